"""Findings: each on a run that shows it, on one that does not, and its rate of wrong claims over random null runs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from creditflow.data import Score, TrajectoryBatch
from creditflow.reports import findings as module
from creditflow.reports.findings import ERROR_RATE, FINDINGS, Finding, Tables, findings, lines, tables_of
from creditflow.reports.significance import association, at_least, trend
from creditflow.runs import Ledger, RunFolder
from tests.builders import batch_of, make_trajectory, step
from tests.cli.commands import creditflow
from tests.reports.runs import a_run, indexed, write_step

NULL_RUNS = 300
MOST_WRONG = int(stats.binom.ppf(0.999, NULL_RUNS, ERROR_RATE))
"""More wrong claims than this occur once in a thousand times, at the stated error rate."""


def found(name: str, tables: Tables) -> list[Finding]:
    return list(getattr(module, name)(tables))


def claims(name: str, tables: Tables) -> list[Finding]:
    return [one for one in found(name, tables) if one.kind != "unknown"]


def curve(name: str, values: Any) -> Tables:
    return Tables(metrics=[{"step": k, name: float(value)} for k, value in enumerate(values)])


def team(rng: np.random.Generator, harm: float, training_steps: int = 10, n: int = 64, spread: float = 0.0) -> Tables:
    """Three scored agents. An error of `write` lowers the success rate by `harm`, other errors have no effect.

    `spread`: tasks of 8 trajectories differ by up to this: the harder one is, the more errors and failures it has.
    """
    parts = []
    for _ in range(training_steps * n // 8):
        hard = rng.uniform(-spread, spread)
        erred = rng.uniform(size=(8, 3)) < 0.4 + hard
        failed = rng.uniform(size=8) < 0.4 + hard + harm * erred[:, 1]
        first = np.where(erred.any(axis=1), erred.argmax(axis=1), -1)
        for agent, name in enumerate(("plan", "write", "check")):
            masks = (erred[:, agent], failed, erred[:, agent] & failed, (first == agent) & failed)
            counts = dict(zip(("erred", "failed", "joint", "first"), (int(mask.sum()) for mask in masks), strict=True))
            parts.append({"agent": name, "scored": True, "tasks": 1, "n": 8, **counts})
    return Tables(parts=parts)


# ---- learning --------------------------------------------------------------------------------------------------------


def test_learning_tells_a_rise_from_a_fall() -> None:
    noise = np.random.default_rng(0).normal(0, 0.03, 24)
    (rise,) = found("learning", curve("train/pass_at_1", np.linspace(0.3, 0.5, 24) + noise))
    assert (rise.kind, rise.metric, rise.change) == ("good", "train/pass_at_1", None)
    assert rise.sentence.startswith("The run learns: pass@1 in training rose from 0.3")
    assert any("95 % interval [+" in evidence for evidence in rise.evidence)
    (fall,) = found("learning", curve("train/pass_at_1", np.linspace(0.5, 0.3, 24) + noise))
    assert fall.kind == "problem"
    assert str(fall.change) == "actor_rollout_ref.actor.optim.lr=3e-07"
    rates = {"policies.write.optim.lr": 1e-5, "policies.plan.optim.lr": None}
    (fall,) = found(
        "learning", Tables(metrics=curve("train/pass_at_1", np.linspace(0.5, 0.3, 24)).metrics, settings=rates)
    )
    assert fall.change is None


def test_learning_prefers_validation_with_enough_points() -> None:
    rows = [{"step": k, "train/pass_at_1": 0.5, "val/pass_at_1": k / 20 if k % 2 else None} for k in range(20)]
    assert found("learning", Tables(metrics=rows))[0].metric == "val/pass_at_1"
    assert found("learning", Tables(metrics=rows[:12]))[0].metric == "train/pass_at_1"


def test_learning_without_a_shuffle_needs_validation() -> None:
    rows = [{"step": k, "train/pass_at_1": 1 - k / 20, "outcome": k / 20, "val/pass_at_1": k / 20} for k in range(20)]
    assert found("learning", Tables(metrics=rows, settings={"data.shuffle": False}))[0].metric == "val/pass_at_1"
    (one,) = found("learning", Tables(metrics=rows[:9], settings={"data.shuffle": False}))
    assert "9 values of pass@1 in validation (data.shuffle is false), 10 are needed" in one.sentence


def test_learning_of_a_constant_run_suggests_no_other_rate() -> None:
    (done,) = found("learning", curve("train/pass_at_1", np.ones(20)))
    assert (done.kind, done.change) == ("unknown", None)
    (never,) = found("learning", curve("train/pass_at_1", np.zeros(20)))
    assert (never.kind, str(never.change)) == ("problem", "actor_rollout_ref.rollout.n=16")


def test_learning_of_constant_pass_rate_reads_the_means() -> None:
    noise = np.random.default_rng(0).normal(0, 0.03, (2, 24))
    rows = [{"step": k, "train/pass_at_1": 0.0, "outcome": 0.1 + noise[0, k]} for k in range(24)]
    better = [{"step": k, "sub_reward": 0.3 + k / 40 + noise[1, k]} for k in range(24)]
    (rise,) = found("learning", Tables(metrics=[*rows, *better]))
    assert (rise.kind, rise.metric, rise.evidence[0]) == ("good", None, "pass@1 in training has no trend")
    assert rise.sentence.startswith("The run learns: the mean sub-reward in training rose from 0.3")
    rare = Tables(metrics=[{"step": 20, "train/pass_at_1": 0.0625}, *rows[:20], *rows[21:], *better])
    assert found("learning", rare)[0].sentence == rise.sentence  # one success makes no trend
    (none,) = found("learning", Tables(metrics=rows))
    assert none.sentence == "No task is ever solved: pass@1 in training is 0 throughout."
    solved = [row | {"train/pass_at_1": 1.0} for row in rows]
    assert found("learning", Tables(metrics=[*solved, *better]))[0].sentence.startswith("There is nothing left")


def test_learning_of_constant_pass_rate_is_rarely_wrong() -> None:
    rng, wrong = np.random.default_rng(7), 0
    for _ in range(NULL_RUNS):
        means = {name: rng.normal(size=20) for name in ("val/outcome_mean", "outcome", "sub_reward")}
        rows = [{"step": k, "train/pass_at_1": 0.0} | {name: of[k] for name, of in means.items()} for k in range(20)]
        wrong += found("learning", Tables(metrics=rows))[0].evidence[0] == "pass@1 in training has no trend"
    assert wrong <= MOST_WRONG


def test_learning_is_not_claimed_of_noise() -> None:
    rng = np.random.default_rng(1)
    wrong = sum(
        one.kind == "good" or "worse" in one.sentence
        for _ in range(NULL_RUNS)
        for one in claims("learning", curve("train/pass_at_1", rng.binomial(64, 0.4, int(rng.integers(10, 40))) / 64))
    )
    assert wrong <= MOST_WRONG


# ---- the limiting agent ----------------------------------------------------------------------------------------------


def test_limiting_agent_is_named_with_its_errors() -> None:
    tables = team(np.random.default_rng(0), harm=0.6)
    (one,) = found("limiting_agent", tables)
    assert one.sentence.startswith("write limits the team: write makes the first error in ")
    assert str(one.change) == "actor_rollout_ref.rollout.n=16"
    shared = {"team.agents.write.policy": "base", "team.agents.plan.policy": "base"}
    (one,) = found("limiting_agent", Tables(parts=tables.parts, settings=shared))
    assert str(one.change) == "team.agents.write.policy=write"


def test_limiting_agent_without_rivals_is_not_compared() -> None:
    rows = [row | {"scored": row["agent"] == "write"} for row in team(np.random.default_rng(0), harm=0.6).parts]
    (one,) = found("limiting_agent", Tables(parts=rows))
    assert one.sentence.startswith("Errors of write go with failure: it errs in ")
    assert " wrong trajectories in which it acts. " in one.sentence
    assert one.sentence.endswith("No other agent has scores, so another one may limit the team more.")


def test_limiting_agent_needs_trajectories_of_one_task() -> None:
    columns = ("n", "erred", "failed", "joint", "first")
    rows = [dict.fromkeys(columns, k) | {"agent": "plan", "scored": True, "tasks": 40, "n": 1} for k in (0, 1)]
    assert found("limiting_agent", Tables(parts=rows))[0].kind == "unknown"


@pytest.mark.parametrize("spread", [0.0, 0.35])
def test_limiting_agent_is_not_claimed_of_noise(spread: float) -> None:
    """A difference of all rates between tasks must not look like a cause."""
    rng = np.random.default_rng(2)
    runs = [team(rng, 0.0, n=24, spread=spread) for _ in range(NULL_RUNS)]
    assert sum(bool(claims("limiting_agent", tables)) for tables in runs) <= MOST_WRONG


# ---- withheld credit -------------------------------------------------------------------------------------------------


def shares(rng: np.random.Generator, gated: float, masked: float, training_steps: int = 20) -> Tables:
    rows = [{"step": k, "credit/gated_off/write": float(rng.beta(20 * gated, 20 - 20 * gated))} for k in range(20)]
    trained = rng.binomial(50, 1 - masked, training_steps).tolist()
    steps = [{"training_step": k, "agent": "plan", "assigned": 50, "trained": n} for k, n in enumerate(trained)]
    return Tables(metrics=rows, steps=steps)


def test_withheld_credit_names_gates_and_masks() -> None:
    gates, masks = found("withheld_credit", shares(np.random.default_rng(0), 0.5, 0.4))
    assert gates.sentence.startswith("The gates of write withhold ")
    assert gates.metric == "credit/gated_off/write"
    assert gates.change.key == "algorithm.propagation.theta"
    assert "of the steps of plan are masked and train nothing" in masks.sentence
    assert masks.change is None
    slow = shares(np.random.default_rng(0), 0.1, 0.4)
    slow = Tables(steps=slow.steps, metrics=[{"step": k, "reward/judge/timeouts": k // 9} for k in range(10)])
    assert str(found("withheld_credit", slow)[0].change) == "reward.timeout=120.0"
    assert found("withheld_credit", shares(np.random.default_rng(0), 0.1, 0.05)) == []
    frozen = shares(np.random.default_rng(0), 0.1, 0.4)
    frozen = Tables(steps=frozen.steps, settings={"algorithm.propagation.on_closed_gate": "freeze"})
    assert str(found("withheld_credit", frozen)[0].change) == "algorithm.propagation.on_closed_gate=cut"


def test_withheld_credit_is_not_claimed_at_its_bound() -> None:
    rng = np.random.default_rng(3)
    wrong = sum(bool(claims("withheld_credit", shares(rng, 0.19, 0.2))) for _ in range(NULL_RUNS))
    assert wrong <= MOST_WRONG


# ---- reward functions ------------------------------------------------------------------------------------------------


def scores(values: Any, failed: int = 0, name: str = "judge") -> Tables:
    prefix = f"reward/{name}"
    facts = {f"{prefix}/scores": len(values) + failed, f"{prefix}/failed_frac": failed / (len(values) + failed)}
    facts |= {f"{prefix}/mean": float(np.mean(values)), f"{prefix}/sd": float(np.std(values))}
    functions = [{"fn": "judges.py:judge"}, {"fn": "math_verify", "agent_match": "plan", "args": {}, "name": None}]
    rows = [{"step": 1, **facts, "train/pass_at_1": 0.5}, {"step": 2, "train/pass_at_1": 0.6}]
    return Tables(metrics=rows, settings={"reward.functions": functions})


def test_failing_and_constant_rewards_are_named() -> None:
    (failing,) = found("reward_functions", scores(np.arange(400) / 400, failed=40))
    assert failing.sentence == "The reward function judge fails on 40 of 440 scores (9 %)."
    assert str(failing.change) == "reward.timeout=120.0"
    (constant,) = found("reward_functions", scores(np.full(512, 0.1)))
    assert "judge is constant: all 512 scores are 0.1" in constant.sentence
    assert str(constant.change) == 'reward.functions=[{"fn": "math_verify", "agent_match": "plan"}]'
    assert found("reward_functions", scores(np.arange(400) / 400)) == []


def test_reward_functions_are_not_accused_by_chance() -> None:
    """Functions that fail, or differ, on one score in a hundred."""
    rng = np.random.default_rng(4)
    runs = [scores((rng.uniform(size=300) < 0.99).astype(float), failed=rng.binomial(300, 0.01)) for _ in range(300)]
    accused = [{("fails" in one.sentence) for one in claims("reward_functions", tables)} for tables in runs]
    assert sum(True in kinds for kinds in accused) <= MOST_WRONG
    assert sum(False in kinds for kinds in accused) <= MOST_WRONG


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_unreached_agent_is_named() -> None:
    rows = [{"step": k, "credit/reach/plan": 0.0, "credit/reach/write": k / 9} for k in range(10)]
    at_answer = {"algorithm.propagation.outcome_to": "answer"}
    (one,) = found("unreached_agents", Tables(metrics=rows, settings=at_answer))
    assert one.sentence == "No signal reaches plan: it does not learn."
    assert str(one.change) == "algorithm.propagation.outcome_to=all"
    for settings in ({}, {**at_answer, "algorithm.adv_estimator": "gae"}):
        (one,) = found("unreached_agents", Tables(metrics=rows, settings=settings))
        assert one.change is None
    reached = [{**row, "credit/reach/plan": 0.01} for row in rows]
    assert found("unreached_agents", Tables(metrics=reached)) == []


# ---- all -------------------------------------------------------------------------------------------------------------


def test_early_ends_are_named_with_the_limit() -> None:
    shares = {
        "rollout/truncated_frac": (0.9, 0.7),
        "rollout/failed_frac": (0.2, 0.2),
        "rollout/agent_error_frac": (1, 0),
    }
    rows = [{"step": k, **{name: values[k] for name, values in shares.items()}} for k in range(2)]
    cut, ended = claims("early_ends", Tables(metrics=rows, settings={"data.max_response_length": 24}))
    assert cut.sentence == "80 % of the trajectories are cut short by a limit of length or turns."
    assert (str(cut.change), cut.metric) == ("data.max_response_length=48", "rollout/truncated_frac")
    assert ended.sentence == "50 % of the trajectories are ended by an error of an agent."
    assert ended.evidence == ("0 % to 100 % in 2 training steps",)


def test_early_ends_name_a_time_limit_that_was_reached() -> None:
    settings = {"actor_rollout_ref.rollout.timeout_s": 30}
    failed = {"step": 1, "rollout/failed_frac": 0.5, "rollout/timeout_frac": 0.5}
    (one,) = claims("early_ends", Tables(metrics=[failed], settings=settings))
    assert str(one.change) == "actor_rollout_ref.rollout.timeout_s=60"
    (other,) = claims("early_ends", Tables(metrics=[{**failed, "rollout/timeout_frac": 0.0}], settings=settings))
    assert other.change is None


def test_findings_without_data_state_what_is_missing() -> None:
    said = findings(Tables())
    assert len(said) == len(FINDINGS)
    assert {one.kind for one in said} == {"unknown"}
    assert all(one.sentence.startswith("Not judged: ") and one.change is None for one in said)


def test_findings_put_claims_before_unknowns() -> None:
    kinds = [one.kind for one in findings(curve("train/pass_at_1", np.arange(20) / 20))]
    assert kinds == ["good", *["unknown"] * (len(FINDINGS) - 1)]


def test_findings_of_a_run_link_to_its_trajectories(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = RunFolder.create(tmp_path / "run", {"config": {"team": {"agents": {}}}}, "")
    for training_step in range(1, 13):
        write_step(folder, training_step, spoilt_by_writer(rng, training_step))
    ledger = Ledger.open(folder.path)
    index = indexed(ledger)
    tables = tables_of(ledger, index)
    assert sum(row["n"] * row["tasks"] for row in tables.parts) == 12 * 20 * 3
    wrong = sum(int((recorded.batch.outcome == 0).sum()) for recorded in ledger)
    assert sum(row["failed"] * row["tasks"] for row in tables.parts) == 3 * wrong
    (id, training_step), *_ = [one.trajectory for one in findings(tables) if one.trajectory is not None]
    batch = ledger.read(training_step).batch
    n = batch.trajectory_ids.index(id)
    assert batch.outcome[n] == 0.0
    said = "\n".join(lines(findings(tables)))
    assert f"see trajectory {id}" in said
    assert "write limits the team" in said


def spoilt_by_writer(rng: np.random.Generator, training_step: int) -> TrajectoryBatch:
    made = []
    for k in range(20):
        errors = rng.uniform(size=3) < (0.1, 0.5, 0.1)
        steps = [
            step(agent, 1.0 - float(error)) for agent, error in zip(("plan", "write", "check"), errors, strict=True)
        ]
        made.append(
            make_trajectory(f"{training_step}-{k}", steps, outcome=Score(float(not errors[1])), task=f"q{k % 5}")
        )
    return batch_of(*made)


def test_report_prints_findings_last(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    result = creditflow("report", ledger.path, "-o", tmp_path / "report.html")
    assert result.exit_code == 0, result.output
    assert "? Not judged: whether the run learns: 3 values of pass@1, 10 are needed." in result.stdout


# ---- tests of significance -------------------------------------------------------------------------------------------


def test_trend_agrees_with_scipy() -> None:
    rng = np.random.default_rng(0)
    for n in (10, 25, 60):
        values = np.round(rng.normal(0, 1, n) + np.arange(n) / n, 1)  # with ties
        mine = trend(list(enumerate(values)))
        slope, _, low, high = stats.theilslopes(values, np.arange(n))
        assert mine.slope == pytest.approx(slope)
        mirrored = trend(list(enumerate(-values)))
        assert (mirrored.low, mirrored.high) == (-mine.high, -mine.low)
        pairs = [(i, j) for j in range(n) for i in range(j)]
        slopes = np.sort([(values[j] - values[i]) / (j - i) for i, j in pairs])
        for bound, theirs in ((mine.low, low), (mine.high, high)):  # scipy rounds ranks otherwise: one rank apart
            assert slopes[np.searchsorted(slopes, theirs) - 1] <= bound + 1e-12
            assert bound - 1e-12 <= slopes[np.searchsorted(slopes, theirs, side="right")]
        # scipy does not correct for continuity.
        score = abs(sum(np.sign(values[j] - values[i]) for i, j in pairs))
        deviation = score / stats.norm.isf(stats.kendalltau(np.arange(n), values, method="asymptotic").pvalue / 2)
        assert mine.p == pytest.approx(2 * stats.norm.sf((score - 1) / deviation), rel=1e-6)
    assert trend([(k, 0.5) for k in range(10)]).p == 1.0
    with pytest.raises(ValueError, match="at least 4 points, got 3"):
        trend([(0, 1), (1, 2), (2, 3)])


def test_binomial_test_agrees_with_scipy() -> None:
    for successes, n, rate in ((0, 10, 0.3), (7, 10, 0.5), (40, 440, 0.01), (3, 3, 0.99), (900, 1000, 0.89)):
        assert at_least(successes, n, rate) == pytest.approx(stats.binom.sf(successes - 1, n, rate), rel=1e-9)
    for successes in (2, 121_000, 125_000):  # most of the n terms add nothing
        expected = stats.binom.sf(successes - 1, 12_000_000, 0.01)
        assert at_least(successes, 12_000_000, 0.01) == pytest.approx(expected, rel=1e-6)


def test_association_of_one_table_is_hypergeometric() -> None:
    exact = stats.hypergeom(100, 40, 50)
    for both in (22, 25, 30):
        p, variance = association([(both, 50, 40, 100)])
        assert variance == pytest.approx(exact.var())
        assert p == pytest.approx(stats.norm.sf((both - 0.5 - exact.mean()) / exact.std()), rel=1e-9)
        assert p == pytest.approx(exact.sf(both - 1), rel=0.1, abs=2e-5)
    assert association([(1, 1, 1, 1)]) == (1.0, 0.0)
