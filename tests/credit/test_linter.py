"""The findings of `check_groups`, and batches without findings."""

import numpy as np
import pytest

from creditflow.credit import assign, check_groups
from creditflow.credit.analysis.linter import idle_gate
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.monitoring.notices import idle_gate_summary
from tests.builders import batch_of, credit_options, credited, make_trajectory, step


def sound():
    return [
        make_trajectory("t0", [step("plan", 1.0, prompt="q"), step("write", 0.75)], 1.0),
        make_trajectory("t1", [step("plan", 0.75, prompt="q"), step("write", 1.0)], 0.0),
    ]


def findings(*trajectories, **chosen):
    return check_groups(batch_of(*trajectories), credit_options(**{"propagation": "threshold", **chosen}))


def codes(*trajectories, **chosen):
    return {finding.code for finding in findings(*trajectories, **chosen)}


def said(code, *trajectories, **chosen):
    (finding,) = [finding for finding in findings(*trajectories, **chosen) if finding.code == code]
    return str(finding)


def test_sound_batch_has_no_findings():
    assert check_groups(batch_of(*sound())) == []


def planned(id, score=0.5, outcome=1.0, prompt="q", **more):
    return make_trajectory(id, [step("plan", score, prompt=prompt)], outcome, **more)


def unscored_plans(*scores):
    return [
        make_trajectory(f"t{n}", [step("plan", prompt="q"), step("write", r)], float(n)) for n, r in enumerate(scores)
    ]


LONE = planned("t2", prompt="r", task="q1")
JUDGED = make_trajectory("t2", [step("judge", 0.5, prompt="j")], 1.0)
TIED = [planned(f"t{n}", 1.0) for n in range(3)]
BY_TASK, TO_ANSWER = {"group_by": "task"}, {"propagation": "none", "outcome_to": "answer"}
WIDER = "groups of a single trajectory (group_by task): 1; their steps are compared with a wider group. More rollouts"


@pytest.mark.parametrize(
    ("code", "trajectories", "options", "message"),
    [
        ("singletons", [*sound(), LONE], BY_TASK, WIDER),
        ("singletons", [*sound(), JUDGED], {}, "wider group or, without one, train on 0 (steps: 1; one is t2.0)"),
        ("mixed_prompts", [*sound(), planned("t2", prompt="other")], {}, "Task q0: 'q' and 'other'"),
        ("no_variance", TIED, {}, "1 of 1 groups have no variance"),
        ("no_variance", TIED, {}, "agent=plan turn=0"),
        ("never_scored", unscored_plans(0.5, 1.0), {}, "plan is never scored"),
        ("unreached", unscored_plans(0.0, 0.25), TO_ANSWER, "no signal reaches plan"),
        ("no_outcome", sound(), TO_ANSWER, "the outcome never reaches plan"),
        ("masked_trajectories", [*sound(), planned("t2", None, "failed")], {}, "1 of 3 trajectories are left out of"),
        ("missing_outcomes", [*sound(), planned("t2", outcome=None)], {}, "1 trajectories have no outcome and others"),
    ],
)
def test_problem_is_reported_with_numbers(code, trajectories, options, message):
    assert message in said(code, *trajectories, **options)


@pytest.mark.parametrize(("lone", "options"), [(LONE, BY_TASK), (JUDGED, {})], ids=["wider group", "no group"])
def test_lone_group_has_one_finding(lone, options):
    assert [finding.code for finding in findings(*sound(), lone, **options)] == ["singletons"]


def test_critic_recipe_is_checked_without_a_critic():
    assert codes(*sound(), adv_estimator="gae", outcome_to="answer") <= {"no_outcome"}


def test_batch_without_outcomes_misses_none():
    assert "missing_outcomes" not in codes(planned("t2", outcome=None), planned("t3", 1.0, None))


def chain(*rewards):
    """Two trajectories of outcomes 0 and 1: a chain of an unscored step and steps with these sub-rewards."""
    return [
        make_trajectory(
            f"t{n}", [step("a", None, prompt="q"), *(step(f"b{i}", r) for i, r in enumerate(rewards))], float(n)
        )
        for n in range(2)
    ]


@pytest.mark.parametrize(
    ("rewards", "options", "code", "reason"),
    [
        # e = r - 1: open steps pass 0, closed ones are cut.
        ((1.0, 0.0), {}, "nothing_flows", "2 have a closed gate, 2 are open and pass 0, as their sub-reward equals"),
        ((1.0, 1.0), {}, "nothing_flows", "4 are open and pass 0"),
        ((0.25, 0.5), {}, "nothing_flows", "Of 4 steps with a parent 4 have a closed gate"),
        ((0.75, 0.75), {"gamma": 0.0}, "nothing_flows", "algorithm.gamma is 0"),
        ((None, None), {}, "nothing_flows", "4 have no score of their own"),
        ((0.75, 0.875), {}, "gates_open", "the lowest sub-reward is 0.75, the highest threshold 0.5"),
        ((None, None), {"outcome_to": "answer"}, "gates_open", "No step has a score"),
        ((0.75, 0.25), {}, None, ""),
        ((1.0, 0.0), {"sub_reward_origin": 0.0}, "gates_open", "closed gates stop nothing: no credit comes to them"),
        ((1.0, 0.25), {"sub_reward_origin": 0.0}, None, ""),
        ((1.0, 0.0), {"propagation": "own"}, None, ""),
        ((1.0, 0.0), {"on_closed_gate": "freeze"}, None, ""),
    ],
)
def test_idle_gate_gives_the_reason(rewards, options, code, reason):
    rule = options.pop("propagation", "threshold")
    batch = batch_of(*chain(*rewards))
    assigned = assign(batch, credit_options(rule, **options))
    finding = idle_gate(assigned)
    assert (finding.code if finding else None) == code
    if finding is not None:
        assert finding.message.startswith("this gate changes no credit")
        assert reason in finding.message
    same = {
        other: np.array_equal(assign(batch, credit_options(other, **options)).credit.total_S, assigned.credit.total_S)
        for other in ("own", "discounted")
    }
    if rule == "threshold" and "on_closed_gate" not in options:
        assert same["own"] == (code == "nothing_flows")
        assert code == "nothing_flows" or same["discounted"] == (code == "gates_open")
        assert (credit_metrics(assigned)["propagation/moved"] == 0.0) == same["own"]


def test_single_steps_have_no_idle_gate():
    assigned = credited(*(make_trajectory(f"t{n}", [step("a", 0.75)], float(n)) for n in range(2)))
    assert idle_gate(assigned) is None
    assert "propagation/moved" not in credit_metrics(assigned)


def test_moved_is_the_received_share_of_credit():
    assigned = credited(*chain(0.75), gamma=0.5)
    # Credit without flow: 0, -0.25 in the first trajectory, 1, 0.75 in the second; each first step receives -0.125.
    assert credit_metrics(assigned)["propagation/moved"] == pytest.approx(0.25 / (0.25 + 0.25 + 1 + 0.75))
    assert "propagation/moved" not in credit_metrics(credited(*chain(0.75), propagation="identical"))


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([{"propagation/moved": 0.0}, {"propagation/moved": 0.0}], 1),
        ([{"propagation/moved": 0.0}, {"propagation/moved": 0.1}], 0),
        ([{"propagation/moved": 0.0, "groups/frozen_steps": 3.0}], 0),
        ([{"train/pass_at_1": 0.5}], 0),
    ],
    ids=["nothing moves", "credit moves", "steps freeze", "no credit"],
)
def test_idle_gate_summary_needs_gates_without_any_effect(rows, lines):
    assert len(idle_gate_summary(rows)) == lines
