"""Tests of simulated teams, against closed forms."""

import math
from dataclasses import replace

import numpy as np
import pytest

from creditflow.credit import CreditOptions
from creditflow.errors import ConfigError, CycleError
from creditflow.studies.simulation import SimulatedTeam, best_threshold, break_even_noise, credited, draw, moved_outputs

BATCHWIDE = CreditOptions(group_by="agent")
MANY = {"tasks": 2000, "trajectories": 8, "agents": ("a",)}


def options_with(propagation: str, **more) -> CreditOptions:
    return replace(BATCHWIDE, propagation=propagation, **more)


@pytest.mark.parametrize(("n", "p"), [(5, 0.9), (13, 0.95), (30, 0.97), (8, 0.6)])
def test_shared_reward_blames_right_steps_of_lost_trajectories(n, p) -> None:
    """With independent errors, a step is right in a lost trajectory with probability p - p^n."""
    drawn = draw(SimulatedTeam(steps=n, error=1 - p, **MANY))
    share = credited("identical", drawn, options_with("identical")).wrong_way
    assert share == pytest.approx(p - p**n, abs=4 * math.sqrt(0.25 / 16_000))


@pytest.mark.parametrize("noise", [0.05, 0.2, 0.35])
def test_own_reward_sign_errors_equal_the_noise(noise) -> None:
    team = SimulatedTeam(steps=10, error=0.3, noise=noise, votes=1, **MANY)
    share = credited("none", draw(team), options_with("none", outcome_to="answer", w_o=0.0)).wrong_way
    assert share == pytest.approx(noise, abs=4 * math.sqrt(0.25 / 160_000))


def test_verdicts_without_noise_give_no_wrong_sign() -> None:
    drawn = draw(SimulatedTeam(steps=10, error=0.2, **MANY))
    assert credited("none", drawn, options_with("none", w_o=0.0)).wrong_way == 0.0
    assert credited("none", drawn, options_with("none", w_o=0.0)).signal == pytest.approx(1.0)


def test_error_without_recovery_spoils_all_later_outputs() -> None:
    """do(error at t) makes outputs t..n wrong; without it, output s >= t is right with probability p^(s - 1)."""
    n, p = 12, 0.9
    team = SimulatedTeam(steps=n, error=1 - p, **MANY)
    expected = [sum(p ** (s - 1) for s in range(t, n + 1)) for t in range(1, n + 1)]
    assert moved_outputs(team, draw(team)) == pytest.approx(expected, abs=0.13)


def test_error_with_full_recovery_spoils_one_output() -> None:
    team = SimulatedTeam(steps=12, error=0.1, recovery=1.0, **MANY)
    assert moved_outputs(team, draw(team)) == pytest.approx(np.ones(12), abs=1e-12)


def test_self_conditioning_makes_errors_follow_errors() -> None:
    """After the first error every step errs with e + (1 - e) s, so the share of right steps has a closed form."""
    n, e, s = 10, 0.1, 0.5
    drawn = draw(SimulatedTeam(steps=n, error=e, self_conditioning=s, **MANY))
    after = 1 - (e + (1 - e) * s)
    expected = [(1 - e) ** (t + 1) + (1 - (1 - e) ** t) * after for t in range(n)]
    assert drawn.own_NK.mean(axis=0) == pytest.approx(expected, abs=0.02)


def test_shared_reward_spreads_blame_evenly() -> None:
    drawn = draw(SimulatedTeam(steps=13, error=0.02, **MANY))
    assert credited("identical", drawn, options_with("identical")).amplification_K == pytest.approx(np.full(13, 13.0))


def test_threshold_blames_right_steps_less_than_open_gates() -> None:
    team = SimulatedTeam(steps=20, error=0.05, **MANY)
    drawn = draw(team)
    by_rule = {rule: credited(rule, drawn, options_with(rule)) for rule in ("identical", "discounted", "threshold")}
    assert by_rule["threshold"].blamed_right < by_rule["discounted"].blamed_right
    assert by_rule["threshold"].signal > by_rule["discounted"].signal > by_rule["identical"].signal


def test_best_threshold_and_break_even_noise() -> None:
    team = SimulatedTeam(steps=13, error=0.1, noise=0.2, tasks=64)
    best, signals = best_threshold(draw(team), options_with("threshold"), [0.1, 0.3, 0.5, 0.7])
    assert dict(signals)[best] == max(signal for _, signal in signals)
    even, rows = break_even_noise(replace(team, votes=1), options_with("none"), [0.0, 0.2, 0.4, 0.5, 0.6])
    assert even in (0.5, 0.6)
    assert [noise for noise, _, _ in rows] == [0.0, 0.2, 0.4, 0.5, 0.6]


def test_graphs_have_the_parents_of_their_kind() -> None:
    assert SimulatedTeam(steps=3, graph="full").parents_of_step == [(), (0,), (0, 1)]
    assert SimulatedTeam(steps=6, graph="tree").parents_of_step == [(), (0,), (0,), (1,), (1,), (2, 3, 4)]
    assert SimulatedTeam(parents=[[], [0], [0], [1, 2]]).n_steps == 4
    assert SimulatedTeam(steps=5).agent_of_step.tolist() == [0, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"error": 1.2}, ConfigError),
        ({"parents": []}, ConfigError),
        ({"steps": 0}, ConfigError),
        ({"graph": "ring"}, ConfigError),
        ({"scored": ("judge",)}, ConfigError),
        ({"errors": {"judge": 0.1}}, ConfigError),
        ({"parents": [[], [2], [0]]}, CycleError),
    ],
)
def test_invalid_teams_are_refused(options, error) -> None:
    with pytest.raises(error):
        SimulatedTeam(**options)
