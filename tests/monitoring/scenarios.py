"""Synthetic series of metrics, healthy and faulty, to test guard rules without training.

Each series is drawn from a seed. Its curves, noise and trajectory counts vary as they do between real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from creditflow.data import Floats

Row = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a series."""

    agents: Sequence[str] = ("planner", "executor", "verifier")
    steps: int = 100
    test_freq: int = 5
    """Training steps from one validation to the next."""
    onset: int = 10
    """The training step at which the fault begins."""
    n_val: int | None = None
    """Trajectories per validation; default: drawn."""
    audit_every: int = 5
    """Training steps between measurements of fidelity."""
    judged: int | None = None
    """Trajectories with verdicts per training step; default: drawn."""


Spoil = Callable[[list[Row], Setting, np.random.Generator], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A healthy run with a fault from the onset on."""

    spoil: Spoil
    rule: str | None = None
    """The default rule that detects the fault."""


def series(name: str, setting: Setting, seed: int) -> list[Row]:
    """One row of metrics per training step, with its `step`."""
    rng = np.random.default_rng((seed, sum(map(ord, name))))
    rows = _healthy(setting, rng)
    SCENARIOS[name].spoil(rows, setting, rng)
    return rows


def _healthy(setting: Setting, rng: np.random.Generator) -> list[Row]:
    steps = setting.steps
    done = np.arange(1, steps + 1) / steps
    learned = 1 - np.exp(-done / rng.uniform(0.1, 0.6))
    begins = rng.uniform(0.1, 0.7)
    gained = learned * rng.uniform(0.0, 0.9 - begins)
    accuracy = np.clip(begins + gained + _wandering(rng, steps, rng.uniform(0.0, 0.01)), 0.02, 0.98)
    n_val = setting.n_val or int(rng.choice([64, 256, 512, 2048]))
    entropy = rng.uniform(0.3, 2.0) * (1 - rng.uniform(0.3, 0.8) * learned) * np.exp(rng.normal(0, 0.05, steps))
    n_judged, each = setting.judged or int(rng.choice([32, 128, 512])), int(rng.choice([1, 4, 12]))
    wrong = np.clip(rng.uniform(0.0, 0.05) * np.exp(rng.normal(0, 0.3, steps)), 0, 0.08)
    agrees, tosses = rng.uniform(0.5, 0.98), max(4, n_judged // 4)  # 0.5: uninformative verdicts
    rows: list[Row] = []
    (own,) = rng.spawn(1)  # the numbers of the other metrics stay the same
    faithful, width = own.uniform(0.2, 0.6), own.uniform(0.1, 0.4)
    for i in range(steps):
        row = {
            "step": float(i + 1),
            "actor/entropy": float(entropy[i]),
            "actor/skipped_updates": float(rng.random() < 0.005),
            # The verdicts of a trajectory contradict together.
            "reward/error_rate": float(rng.binomial(n_judged, wrong[i]) / n_judged),
            "reward/verdicts": float(n_judged * each),
            "reward/judged_trajectories": float(n_judged),
            "reward/agreement": float(rng.beta(agrees * tosses, (1 - agrees) * tosses)),
            "reward/agreement_over": float(tosses),
            "propagation/pass_rate": float(rng.binomial(n_judged, 0.88) / n_judged),
            "timing/propagation_s": float(0.05 * np.exp(rng.normal(0, 0.5))),
        }
        for agent in setting.agents:
            row[f"reward/sub_reward_excess_var/{agent}"] = float(rng.uniform(0.02, 0.15))
            row[f"credit/reach/{agent}"] = 1.0
        if (i + 1) % setting.test_freq == 0:
            row["val/pass_at_1"] = float(rng.binomial(n_val, accuracy[i]) / n_val)
            row["val/trajectories"] = float(n_val)
        if (i + 1) % setting.audit_every == 0:
            row |= _measured_fidelity(faithful, width, own)
        rows.append(row)
    return rows


def _measured_fidelity(true: float, width: float, rng: np.random.Generator) -> Row:
    """A measured fidelity with its interval. `width`: half of the interval's width."""
    value = true + rng.normal(0, width / 1.96)
    return {"credit/fidelity": value, "credit/fidelity_low": value - width, "credit/fidelity_high": value + width}


def _wandering(rng: np.random.Generator, steps: int, size: float) -> Floats:
    """Changes of a policy's accuracy besides learning: noise with a memory of about ten steps."""
    noise = np.zeros(steps)
    for i in range(1, steps):
        noise[i] = 0.9 * noise[i - 1] + rng.normal(0, size * np.sqrt(1 - 0.9**2))
    return noise


Value = Callable[[Row, int, np.random.Generator], float]


def _changed(values: Mapping[str, Value]) -> Spoil:
    """Change metrics in every row from the onset on. `{agent}` in a name is the first agent."""

    def spoil(rows: list[Row], setting: Setting, rng: np.random.Generator) -> None:
        for name, value in values.items():
            for k, row in enumerate(rows[setting.onset - 1 :]):
                row[name.format(agent=setting.agents[0])] = value(row, k, rng)

    return spoil


def _failing(share: float) -> Value:
    """Draw the share of failed verdicts."""
    return lambda row, k, rng: float(rng.binomial(int(row["reward/verdicts"]), share) / int(row["reward/verdicts"]))


def _disagreement(row: Row, k: int, rng: np.random.Generator) -> float:
    tosses = row["reward/agreement_over"]
    return float(rng.beta(0.15 * tosses, 0.85 * tosses))


def _credit_misleads(rows: list[Row], setting: Setting, rng: np.random.Generator) -> None:
    for row in rows[setting.onset - 1 :]:
        if "credit/fidelity" in row:
            row.update(_measured_fidelity(-0.3, row["credit/fidelity_high"] - row["credit/fidelity"], rng))


def _accuracy_falls(rows: list[Row], setting: Setting, rng: np.random.Generator) -> None:
    """Let the accuracy fall from .7 by 3 points from validation to validation."""
    start = 0.7
    fall = 0.0
    for row in rows:
        if "val/pass_at_1" not in row:
            continue
        if row["step"] >= setting.onset:
            fall = min(fall + 0.03, start - 0.1)
        n_val = int(row["val/trajectories"])
        row["val/pass_at_1"] = float(rng.binomial(n_val, start - fall) / n_val)


SCENARIOS: dict[str, Scenario] = {
    "healthy": Scenario(_changed({})),
    "entropy_collapse": Scenario(
        _changed({"actor/entropy": lambda row, k, rng: row["actor/entropy"] * max(1e-4, 0.5 ** (k + 1))}), "entropy"
    ),
    "failing_rewards": Scenario(_changed({"reward/error_rate": _failing(0.15)}), "error_rate"),
    "contradictory": Scenario(
        _changed({"reward/error_rate": _failing(0.5), "reward/agreement": _disagreement}), "agreement"
    ),
    "not_finite": Scenario(_changed({"actor/skipped_updates": lambda *_: 1.0}), "not_finite"),
    "accuracy_drop": Scenario(_accuracy_falls, "accuracy"),
    "shut_out": Scenario(
        _changed({"credit/reach/{agent}": lambda *_: 0.0, "propagation/pass_rate": lambda *_: 0.3}), "shut_out"
    ),
    "unstable": Scenario(
        _changed({"reward/sub_reward_excess_var/{agent}": lambda row, k, rng: float(rng.uniform(0.21, 0.25))}),
        "sub_reward_var",
    ),
    "misleading_credit": Scenario(_credit_misleads, "fidelity_low"),
    "slow": Scenario(
        _changed({"timing/propagation_s": lambda row, k, rng: float(rng.uniform(1.5, 3.0))}), "propagation_s"
    ),
}
