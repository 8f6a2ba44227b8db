"""Tests of the check of rewards: built-in functions pass, and a function with one fault fails exactly one check."""

import asyncio
import math
import pickle
import random
import threading

import numpy as np
import pytest

from creditflow import Score, outcome, reward, testing
from creditflow.errors import ConfigError, CreditflowError
from creditflow.testing import CHECKS, ConformanceError, check_reward_function, sentence_of
from tests.builders import make_trajectory, step
from tests.paths import DOCS

DOCS = DOCS / "how_to" / "conformance.md"
NAMES = set(CHECKS)


def failed(check, *args, **kwargs):
    """Run a check function that must fail; return the names of the failed checks."""
    with pytest.raises(ConformanceError) as caught:
        check(*args, **kwargs)
    return {failure.check for failure in caught.value.report.failures}


# ---- reward functions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["outcome", "step"])
@pytest.mark.parametrize("name", ["exact_match", "numeric_match"])
def test_ready_made_comparisons_conform(name, level):
    assert set(check_reward_function(name, level=level).passed) == NAMES


READY_MADE = {
    "format": {"pattern": r"\d+"},
    "overlong": {"max_length": 40, "cache_length": 10},
    "coherence": {},
    "math_verify": {},
    "sum": {"parts": [{"fn": "coherence"}, {"fn": "overlong", "args": {"max_length": 40, "cache_length": 10}}]},
}


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_measures_and_sums_conform(name):
    assert set(check_reward_function(name, args=READY_MADE[name]).passed) == NAMES


@reward(agent_match="exec|ver")
def by_token(step, trajectory):
    return [1.0 if sampled else 0.0 for sampled in step.response_mask]


@reward(level="trajectory", range=(-1.0, 1.0))
def by_step(trajectory):
    return [Score(-1.0, reason="empty") if not step.response else np.float64(0.5) for step in trajectory.steps]


@outcome
async def judged(trajectory):
    await asyncio.sleep(0)
    return 1.0 if trajectory.answer else Score(0.0, status="failed", reason="no answer to judge")


def plain(step, trajectory, at_least=1):
    return float(len(step.response) >= at_least)


@pytest.mark.parametrize("function", [by_token, by_step, judged, plain])
def test_functions_of_every_shape_conform(function):
    assert set(check_reward_function(function).passed) == NAMES


def test_arguments_are_passed_as_in_a_recipe():
    assert check_reward_function(plain, args={"at_least": 3}).passed
    assert failed(check_reward_function, plain, args={"at_last": 3}) == {"can_be_loaded"}


def test_function_is_loaded_by_reference(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text("def long(step, trajectory):\n    return float(len(step.response) > 9)\n")
    monkeypatch.chdir(tmp_path)
    assert check_reward_function("own.py:long").subject == "own.py:long"


def three_parameters(step, trajectory, team):
    return 1.0


@reward(range=(1.0, 0.0))
def range_upside_down(step, trajectory):
    return 1.0


@reward(agent_match="^judge$")
def of_nobody(step, trajectory):
    return 1.0


def first_character(step, trajectory):
    return float(step.response[0] == "4")


async def raises_late(step, trajectory):
    await asyncio.sleep(0)
    return 1.0 / len(step.response.split())


@reward(timeout=0.01)
async def hangs(step, trajectory):
    await asyncio.Event().wait()


def counts_three_steps(trajectory):
    return [1.0, 1.0, 1.0]


def one_token_too_few(step, trajectory):
    return [1.0] * (len(step.response_ids) - 1)


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, step, trajectory):
        with self.lock:
            return 1.0


def believes_nan(step, trajectory):
    return [math.nan if "nan" in step.response else 1.0] * len(step.response_ids)


def grows_with_length(step, trajectory):
    return len(step.response) / 100


@outcome(range=(-1.0, 1.0))
def beyond_its_range(trajectory):
    return -1.5 if trajectory.answer is None else 0.0


def leaves_a_note(step, trajectory):
    step.info["seen"] = True
    return 1.0


def changes_one_element(step, trajectory):
    trajectory.info.setdefault("image", np.zeros(2000))[1000] += 1e-12
    return 1.0


def tosses_a_coin(step, trajectory):
    return random.random()


BROKEN_FUNCTIONS = {
    "can_be_loaded": [three_parameters, range_upside_down],
    "matches_an_agent": [of_nobody],
    "can_travel": [Locked()],
    "never_raises": [first_character, raises_late, hangs, lambda step, trajectory: Score(0.0, status="failed")],
    "has_the_right_shape": [counts_three_steps, one_token_too_few],
    "is_finite": [believes_nan],
    "stays_in_its_range": [grows_with_length, beyond_its_range],
    "leaves_the_trajectory_alone": [leaves_a_note, changes_one_element],
    "is_deterministic": [tosses_a_coin],
}


@pytest.mark.parametrize(
    ("check", "broken"), [(check, f) for check, functions in BROKEN_FUNCTIONS.items() for f in functions]
)
def test_broken_function_fails_exactly_one_check(check, broken):
    assert failed(check_reward_function, broken) == {check}


def test_sampling_function_is_called_once_per_trajectory():
    seen = []

    def sampler(step, trajectory):
        seen.append(step.id)
        return random.random()

    report = check_reward_function(sampler, deterministic=False)
    assert report.not_run == ("is_deterministic",)
    assert len(seen) == len(set(seen))


def test_hostile_trajectories_leave_the_given_ones_unchanged():
    given = [make_trajectory("mine", [step("writer", 0.5, tokens=3, info={"page": 7}), step("critic", "failed")], 1.0)]
    before, seen = repr(given), []

    @reward(agent_match="writer|critic")
    def needs_a_page(step, trajectory):
        seen.append((step.response, len(trajectory.steps)))
        assert not step.scores
        assert trajectory.steps[0].info["page"] == 7
        return 1.0

    assert set(check_reward_function(needs_a_page, given).passed) == NAMES
    assert repr(given) == before
    assert {response for response, _ in seen} >= set(testing.HOSTILE.values())
    assert {length for _, length in seen} == {1, 2, testing.LONGEST}


@pytest.mark.parametrize("ids", ["one one", "one two"])
def test_repeated_ids_are_refused(ids):
    given = [make_trajectory(name, [step("writer", 0.5)], 1.0) for name in ids.split()]
    for trajectory in given:
        trajectory.steps[0].trajectory_id, trajectory.steps[0].id = "one", "s"
    repeated = "step 's' of trajectory 'one'" if "two" in ids else "trajectory 'one'"
    with pytest.raises(ConfigError, match=f"^trajectories: expected unique ids, got {repeated} twice$"):
        check_reward_function(plain, given)


def test_trajectories_without_steps_check_nothing():
    empty = [make_trajectory("mine", [])]
    assert failed(check_reward_function, plain, trajectories=empty) == {"matches_an_agent"}


def test_functions_can_be_checked_in_a_running_event_loop():
    async def notebook():
        return check_reward_function(judged)

    assert asyncio.run(notebook()).passed


# ---- the checks themselves -----------------------------------------------------------------------------------------


def test_every_check_can_fail():
    assert set(BROKEN_FUNCTIONS) == NAMES


def test_error_lists_every_failed_check_with_its_findings():
    def bad(step, trajectory):
        step.response = "changed"
        return 2.0

    with pytest.raises(CreditflowError) as caught:
        check_reward_function(bad)
    message = str(caught.value)
    assert message.startswith("bad: 2 of 9 checks failed\nstays_in_its_range: Every number that it returns is")
    assert "\n  on step 'a sum.0' of trajectory 'a sum': expected a value in [0, 1], got 2; if" in message
    changed = "expected the trajectory as it was before the call, got a changed one"
    assert f"\n  on trajectory 'a sum': {changed}\n" in message
    assert message.endswith(" more")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ConformanceError)
    assert again.report == caught.value.report


def test_report_lists_passed_and_skipped_checks():
    report = check_reward_function("coherence", skip=["is_finite"])
    assert str(report).splitlines()[:2] == ["coherence: all 8 checks passed", "  can_be_loaded"]
    assert str(report).splitlines()[-1] == "not run: is_finite"


def test_unknown_check_in_skip_is_refused():
    with pytest.raises(ConfigError, match=r"skip: expected names of checks .* got 'is_finit' \(did you mean"):
        check_reward_function("coherence", skip=["is_finit"])


def test_documentation_lists_every_check_verbatim():
    text = DOCS.read_text()
    for name, check in CHECKS.items():
        assert f"| `{name}` | {sentence_of(check)} |" in text
