"""Tests of the conformance checks: built-in code passes all, and code with one fault fails exactly one check."""

import asyncio
import itertools
import math
import pickle
import random
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from creditflow import Score, outcome, reward
from creditflow.credit import Credit
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.credit.thresholds.base import THRESHOLDS
from creditflow.errors import ConfigError, CreditflowError
from creditflow.testing import (
    ConformanceError,
    check_propagation_rule,
    check_reward_function,
    check_threshold,
    rewards,
    rules,
    thresholds,
)
from creditflow.testing.report import name_of, sentence_of
from tests.builders import make_trajectory, step
from tests.paths import DOCS

DOCS = DOCS / "how_to" / "conformance.md"
TABLES = {module: (*module.BASICS, *module.CHECKS) for module in (rewards, rules, thresholds)}


def names(module):
    return {name_of(check) for check in TABLES[module]}


def failed(check, *args, **kwargs):
    """Run a check function that must fail; return the names of the failed checks."""
    with pytest.raises(ConformanceError) as caught:
        check(*args, **kwargs)
    return {failure.check for failure in caught.value.report.failures}


# ---- reward functions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["outcome", "step"])
@pytest.mark.parametrize("name", ["exact_match", "numeric_match"])
def test_ready_made_comparisons_conform(name, level):
    assert set(check_reward_function(name, level=level).passed) == names(rewards)


def test_math_verify_conforms():
    assert set(check_reward_function("math_verify").passed) == names(rewards)


READY_MADE = {
    "format": {"pattern": r"\d+"},
    "overlong": {"max_length": 40, "cache_length": 10},
    "coherence": {},
    "sum": {"parts": [{"fn": "coherence"}, {"fn": "overlong", "args": {"max_length": 40, "cache_length": 10}}]},
    "first_ok": {"parts": [{"fn": "math_verify"}, {"fn": "exact_match"}]},
    "gate": {"score": {"fn": "coherence"}, "by": {"fn": "exact_match"}},
}


@pytest.mark.parametrize("name", READY_MADE)
def test_ready_made_measures_and_compositions_conform(name):
    assert set(check_reward_function(name, args=READY_MADE[name]).passed) == names(rewards)


@reward(agent_match="exec|ver")
def by_token(step, trajectory):
    return [1.0 if sampled else 0.0 for sampled in step.response_mask]


@reward(level="trajectory", range=(-1.0, 1.0))
def by_step(trajectory):
    return [Score(-1.0, reason="empty") if not step.response else np.float64(0.5) for step in trajectory.steps]


@outcome
async def judged(trajectory):
    await asyncio.sleep(0)
    return Score(0.0, status="failed", reason="expected a judge, got none")


def plain(step, trajectory, at_least=1):
    return float(len(step.response) >= at_least)


@pytest.mark.parametrize("function", [by_token, by_step, judged, plain])
def test_functions_of_every_shape_conform(function):
    assert set(check_reward_function(function).passed) == names(rewards)


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


def strips_the_answer(trajectory):
    return float(trajectory.answer.strip() == trajectory.task.ground_truth)


async def raises_late(step, trajectory):
    await asyncio.sleep(0)
    return 1.0 / len(step.response.split())


def counts_three_steps(trajectory):
    return [1.0, 1.0, 1.0]


def a_word(step, trajectory):
    return "right"


def one_token_too_few(step, trajectory):
    return [1.0] * (len(step.response_ids) - 1)


class Locked:
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, step, trajectory):
        with self.lock:
            return 1.0


def forgets_to_return(step, trajectory):
    pass


def believes_nan(step, trajectory):
    return [math.nan if "nan" in step.response else 1.0] * len(step.response_ids)


def believes_infinity(trajectory):
    return [Score(math.inf) if "1e999" in step.response else 0.0 for step in trajectory.steps]


def grows_with_length(step, trajectory):
    return len(step.response) / 100


@outcome(range=(-1.0, 1.0))
def beyond_its_range(trajectory):
    return -1.5 if trajectory.answer is None else 0.0


def leaves_a_note(step, trajectory):
    step.info["seen"] = True
    return 1.0


def drops_a_step(trajectory):
    scores = [1.0] * len(trajectory.steps)
    trajectory.steps[-1].response += "."
    return scores


def tosses_a_coin(step, trajectory):
    return random.random()


calls = itertools.count()


@reward(when=lambda step: "a tool" in step.info)
def of_no_step(step, trajectory):
    raise AssertionError("never called")


def tires(step, trajectory):
    return 1.0 / (1 + next(calls))


BROKEN_FUNCTIONS = {
    "can_be_loaded": [three_parameters, range_upside_down],
    "matches_an_agent": [of_nobody, of_no_step],
    "can_travel": [Locked()],
    "never_raises": [first_character, (strips_the_answer, {"level": "outcome"}), raises_late],
    "has_the_right_shape": [counts_three_steps, a_word, one_token_too_few, forgets_to_return],
    "is_finite": [believes_nan, believes_infinity],
    "stays_in_its_range": [grows_with_length, beyond_its_range],
    "leaves_the_trajectory_alone": [leaves_a_note, drops_a_step],
    "is_deterministic": [tosses_a_coin, tires],
}


@pytest.mark.parametrize(
    ("check", "broken"), [(check, f) for check, functions in BROKEN_FUNCTIONS.items() for f in functions]
)
def test_broken_function_fails_exactly_one_check(check, broken):
    function, how = broken if isinstance(broken, tuple) else (broken, {})
    assert failed(check_reward_function, function, **how) == {check}


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

    assert set(check_reward_function(needs_a_page, given).passed) == names(rewards)
    assert repr(given) == before
    assert {response for response, _ in seen} >= set(rewards.HOSTILE.values())
    assert {length for _, length in seen} == {1, 2, rewards.LONGEST}


def test_trajectories_without_steps_check_nothing():
    empty = [make_trajectory("mine", [])]
    assert failed(check_reward_function, plain, trajectories=empty) == {"matches_an_agent"}


def test_functions_can_be_checked_in_a_running_event_loop():
    async def notebook():
        return check_reward_function(judged)

    assert asyncio.run(notebook()).passed


# ---- propagation rules ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPAGATION_RULES.names())
def test_every_built_in_rule_conforms_and_is_independent(name):
    record = PROPAGATION_RULES[name]
    independent = not (record.relative or record.expects)  # such a rule compares trajectories, or is fitted to them
    passed = check_propagation_rule(name, independent=independent).passed
    assert set(passed) == names(rules) - (set() if independent else {name_of(rules.trajectories_are_independent)})


def paid(flow, **columns):
    """A conforming rule: own reward plus the outcome for all steps; `columns` replace columns of its Credit."""
    zero = np.zeros_like(flow.own_S)
    reached_S = np.where(flow.outcome_known_S, 3, np.where(flow.scored_S, 1, 0)).astype(np.uint8)
    return replace(Credit(flow.own_S, zero, flow.outcome_S, zero, reached_S), **columns)


def everywhere(flow):
    return np.full(flow.batch.n_steps, 3, dtype=np.uint8)


def refuses_a_step_alone(flow):
    assert flow.batch.n_steps > 1
    return paid(flow)


def adds_in_place(flow):
    flow.own_S[:] += 1.0
    return paid(flow)


def numbers_the_scores(flow):
    flow.batch.scores[:] = 0.0
    return paid(flow)


def with_noise(flow):
    return paid(flow, shared_S=np.random.default_rng().random(flow.batch.n_steps))


def favours_the_first_trajectory(flow):
    return paid(flow, received_S=0.1 * (flow.batch.trajectory_of_step == 0))


def favours_a_name(flow):
    favoured = np.array(flow.batch.agent_names)[flow.batch.agent_of_step] == "planner"
    return paid(flow, received_S=0.1 * favoured)


def less_the_mean_of_all(flow):
    return paid(flow, own_S=flow.own_S - flow.own_S.mean(), reached_S=everywhere(flow))


def less_the_mean_of_kept(flow):
    mean = flow.outcome_S[flow.outcome_known_S].sum() / max(int(flow.kept_S.sum()), 1)
    return paid(flow, received_S=np.full_like(flow.own_S, -mean), reached_S=everywhere(flow))


def open_gates_unused(flow):
    one = np.ones_like(flow.own_S)
    return paid(flow, gate_out_S=one, gate_in_S=one)


BROKEN_RULES = {
    "runs_on_every_batch": [refuses_a_step_alone],
    "returns_a_credit": [
        lambda flow: flow.own_S,
        lambda flow: paid(flow, own_S=flow.own_S.astype(np.float32)),
        lambda flow: paid(flow, shared_S=flow.outcome_S[:1]),
        lambda flow: paid(flow, reached_S=flow.scored_S),
        lambda flow: paid(flow, withheld_S=None),
    ],
    "is_finite": [
        lambda flow: paid(flow, own_S=np.where(flow.failed_S, np.nan, flow.own_S)),
        lambda flow: paid(flow, gate_out_S=2 * flow.gate_S),
        lambda flow: paid(flow, reached_S=everywhere(flow) + np.uint8(1)),
        lambda flow: paid(flow, stand_in_S=np.full_like(flow.own_S, np.inf)),
    ],
    "leaves_its_input_alone": [adds_in_place, numbers_the_scores],
    "is_deterministic": [with_noise],
    "ignores_trajectory_order": [favours_the_first_trajectory],
    "ignores_the_names_of_agents": [favours_a_name],
    "ignores_masked_trajectories": [less_the_mean_of_all],
    "says_what_reached_a_step": [
        lambda flow: paid(flow, reached_S=everywhere(flow) & np.uint8(1)),
        lambda flow: paid(flow, reached_S=np.where(flow.outcome_known_S, 3, 0).astype("u1")),
    ],
    "pays_own_as_declared": [(paid, {"pays_own": False})],
    "can_be_assigned_and_explained": [open_gates_unused],
    "trajectories_are_independent": [(less_the_mean_of_kept, {"independent": True})],
}


@pytest.mark.parametrize(("check", "broken"), [(check, r) for check, broken in BROKEN_RULES.items() for r in broken])
def test_broken_rule_fails_exactly_one_check(check, broken):
    rule, how = broken if isinstance(broken, tuple) else (broken, {})
    assert failed(check_propagation_rule, rule, **how) == {check}


def test_rule_independence_is_checked_only_on_request():
    assert check_propagation_rule(less_the_mean_of_kept).not_run == ("trajectories_are_independent",)


def test_checking_a_rule_leaves_the_registry_unchanged():
    before = PROPAGATION_RULES.names()
    check_propagation_rule(paid)
    failed(check_propagation_rule, refuses_a_step_alone)
    assert PROPAGATION_RULES.names() == before
    with pytest.raises(ConfigError, match=r"algorithm\.propagation: expected one of discounted, .* got 'treshold'"):
        check_propagation_rule("treshold")


# ---- thresholds ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", THRESHOLDS.names())
def test_every_built_in_threshold_conforms(kind):
    shared = kind == "tuned"
    report = check_threshold({"kind": kind}, shared=shared)
    assert set(report.passed) == names(thresholds) - ({"absent_agents_stay"} if shared else set())


def test_constant_threshold_conforms():
    assert set(check_threshold(0.3).passed) == names(thresholds)


class Mean:
    """A conforming threshold: each agent's mean sub-reward."""

    floor = 0.1

    def __init__(self):
        self.sums = {}

    def theta(self, agent):
        total, n = self.sums.get(agent, (0.5, 1))
        return total / n

    def update(self, observed):
        for agent, r in observed.sub_rewards.items():
            total, n = self.sums.get(agent, (0.0, 0))
            self.sums[agent] = [total + float(np.sum(r)), n + len(r)]

    def state_dict(self):
        return {"kind": "mean", "sums": self.sums}

    def load_state_dict(self, state):
        if set(state) != {"kind", "sums"} or state["kind"] != "mean":
            raise ConfigError(f"threshold state: expected kind and sums of a mean, got {state}")
        self.sums = dict(state["sums"])

    def metrics(self):
        return {"propagation/threshold": self.theta(""), "propagation/threshold_agents": len(self.sums)}


class OverflowsWithTime(Mean):
    def theta(self, agent):
        return math.inf if self.sums.get(agent, (0, 0))[1] > 300 else super().theta(agent)


class KnowsItsAgentsOnly(Mean):
    def theta(self, agent):
        return self.sums[agent][0] / self.sums[agent][1]

    def metrics(self):
        return {}


class MovedByMetrics(Mean):
    def metrics(self):
        self.sums = {agent: [total * 0.9, n] for agent, (total, n) in self.sums.items()}
        return super().metrics()


class ForgetsWhenNothingIsShown(Mean):
    def update(self, observed):
        super().update(observed)
        if not observed.sub_rewards:
            self.sums = {}


class OfTheWholeTeam(Mean):
    def theta(self, agent):
        return sum(total for total, _ in self.sums.values()) / max(1, sum(n for _, n in self.sums.values()))


class FloorInPercent(Mean):
    floor = 10


class UnnamedMetrics(Mean):
    def metrics(self):
        return {"theta": self.theta("")}


class MetricsOfNobody(Mean):
    def metrics(self):
        return {"propagation/threshold_lowest": min(map(self.theta, self.sums), default=math.nan)}


class StateOfTuples(Mean):
    def state_dict(self):
        return {"kind": "mean", "sums": {agent: tuple(entry) for agent, entry in self.sums.items()}}


class StateOfArrays(Mean):
    def state_dict(self):
        return {"kind": "mean", "sums": {}, "all": np.array([entry[0] for entry in self.sums.values()])}

    def load_state_dict(self, state):
        if set(state) != {"kind", "sums", "all"} or state["kind"] != "mean":
            raise ConfigError("threshold state: expected that of a mean")


class StateWithoutCounts(Mean):
    def state_dict(self):
        return {"kind": "mean", "sums": {agent: [self.theta(agent), 1] for agent in self.sums}}


class BelievesAnyState(Mean):
    def load_state_dict(self, state):
        self.sums = dict(state.get("sums", {}))


class RaisesKeyErrors(Mean):
    def load_state_dict(self, state):
        self.sums = dict({"mean": state}[state["kind"]]["sums"])
        if len(state) > 2:
            raise ConfigError("threshold state: a key too many")


class WithoutMetrics(Mean):
    metrics = property()


ONE = Mean()

BROKEN_THRESHOLDS = {
    "is_a_threshold": [lambda: ONE, WithoutMetrics, lambda: 0.5],
    "theta_is_finite": [OverflowsWithTime],
    "new_agents_have_a_theta": [KnowsItsAgentsOnly],
    "only_updates_move_it": [MovedByMetrics],
    "empty_batches_change_nothing": [ForgetsWhenNothingIsShown],
    "absent_agents_stay": [OfTheWholeTeam],
    "floor_is_a_share": [FloorInPercent],
    "metrics_are_numbers": [UnnamedMetrics, MetricsOfNobody],
    "state_is_json": [StateOfTuples],
    "resumed_is_as_uninterrupted": [StateWithoutCounts],
    "other_states_are_refused": [BelievesAnyState, RaisesKeyErrors],
}


def test_custom_threshold_conforms():
    assert set(check_threshold(Mean, agents=("a", "b")).passed) == names(thresholds)


@pytest.mark.parametrize(("check", "make"), [(check, m) for check, broken in BROKEN_THRESHOLDS.items() for m in broken])
def test_broken_threshold_fails_exactly_one_check(check, make):
    assert failed(check_threshold, make) == {check}


def test_state_without_json_form_fails_its_check():
    assert "state_is_json" in failed(check_threshold, StateOfArrays)


def test_shared_threshold_skips_the_absent_agent_check():
    assert check_threshold(OfTheWholeTeam, shared=True).not_run == ("absent_agents_stay",)
    assert failed(check_threshold, {"kind": "tuned"}) == {"absent_agents_stay"}


# ---- the checks themselves -----------------------------------------------------------------------------------------


def test_every_check_can_fail():
    broken = {rewards: BROKEN_FUNCTIONS, rules: BROKEN_RULES, thresholds: BROKEN_THRESHOLDS}
    assert {module: set(table) for module, table in broken.items()} == {module: names(module) for module in TABLES}


def test_error_lists_every_failed_check_with_its_findings():
    def bad(step, trajectory):
        step.response = "changed"
        return 2.0

    with pytest.raises(CreditflowError) as caught:
        check_reward_function(bad)
    message = str(caught.value)
    assert message.startswith("bad: 2 of 9 checks failed\nstays_in_its_range: Every number that it returns lies in the")
    assert "\n  on step 'a sum.0' of trajectory 'a sum': expected a value in [0, 1], got 2; if" in message
    changed = "expected the trajectory as it was before the call, got a changed one"
    assert f"\n  on step 'a sum.1' of trajectory 'a sum': {changed}\n" in message
    assert message.endswith(" more")
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, ConformanceError)
    assert again.report == caught.value.report


def test_report_lists_passed_and_skipped_checks():
    report = check_threshold(0.5, skip=["floor_is_a_share"])
    assert str(report).splitlines()[:2] == ["threshold 0.5: all 10 checks passed", "  is_a_threshold"]
    assert str(report).splitlines()[-1] == "not run: floor_is_a_share"


def test_unknown_check_in_skip_is_refused():
    with pytest.raises(ConfigError, match=r"skip: expected names of checks .* got 'flor_is_a_share' \(did you mean"):
        check_threshold(0.5, skip=["flor_is_a_share"])


def test_import_is_light_and_needs_no_test_framework():
    heavy = "{'torch', 'numba', 'pyarrow', 'transformers', 'pytest', 'hypothesis'}"
    code = f"import sys, creditflow.testing; print(*({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_documentation_lists_every_check_verbatim():
    text = DOCS.read_text()
    for check in itertools.chain.from_iterable(TABLES.values()):
        assert f"| `{name_of(check)}` | {sentence_of(check)} |" in text
