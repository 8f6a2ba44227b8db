"""Tests of the recipe arithmetic_chain, run with a client that answers by rule.

One story was worked out by hand: 47 + 05 = 52; 52 * 2 = 104, which is 04; 04 - 13 = -9, which is 91.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.config import load_recipe
from creditflow.data import Step, Task, Trajectory, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.engines.models.tiny import word_tokenizer
from tests.builders import examples
from tests.paths import RECIPES
from tests.recipes.team import agents_of, loader, run_recipe, scores_of

recipe = loader("arithmetic_chain")

STORY = "Ann has 4 7 . gets 0 5 . makes it double . loses 1 3 ."
PLAN = "4 7 ; + 0 5 ; * 0 2 ; - 1 3"
TASK = Task("arithmetic_chain", ({"role": "user", "content": STORY},), "9 1", {"plan": PLAN})
SUMS = {"4 7 + 0 5 =": "5 2", "5 2 * 0 2 =": "0 4", "0 4 - 1 3 =": "9 1"}
SYSTEM = {"planner": "plan", "executor": "exec", "verifier": "check"}
SIGN_OF_VERB = {
    **dict.fromkeys(("gets", "finds", "buys", "wins"), "+"),
    **dict.fromkeys(("loses", "eats", "sells", "drops"), "-"),
}


def run_team(answer: Callable[[str], str]) -> tuple[Trajectory, list[str]]:
    """The scored trajectory, and the prompts in order."""
    trajectory, model = run_recipe("arithmetic_chain", TASK, SYSTEM, lambda prompt: answer(prompt).encode())
    return trajectory, model.prompts


def a_good_team(prompt: str) -> str:
    agent, _, asked = prompt.partition("\n")
    if agent == "plan":
        return PLAN
    if agent == "exec":
        return SUMS[asked]
    sum_, _, candidate = asked.partition("= ")
    right = SUMS[f"{sum_}="]
    return f"{right} {'ok' if candidate == f'{right} ?' else 'bad'}"


def a_good_team_but(said: dict[str, str]) -> Callable[[str], str]:
    """The good team with other answers to the prompts in `said`."""
    return lambda prompt: said[prompt] if prompt in said else a_good_team(prompt)


# The arithmetic and the tasks


def read_story(story: str) -> tuple[int, str]:
    """The final value of a story, in whole numbers until the end, and its plan."""
    head, *sentences = [sentence.split() for sentence in story.removesuffix(" .").split(" . ")]
    assert head[1] == "has"
    value, components = int("".join(head[2:])), [" ".join(head[2:])]
    for words in sentences:
        if words[:2] == ["makes", "it"]:
            factor = {"double": 2, "triple": 3}[words[2]]
            value *= factor
            components.append(f"* 0 {factor}")
        else:
            verb, tens, ones = words
            sign = SIGN_OF_VERB[verb]
            value += int(tens + ones) * (1 if sign == "+" else -1)
            components.append(f"{sign} {tens} {ones}")
    return value % 100, " ; ".join(components)


def make_tasks(split: str, operations: int = 5, train: int = 4096, val: int = 512, **more: object) -> list[Task]:
    return recipe("make_tasks")(split, {"operations": operations, "train_tasks": train, "val_tasks": val, **more})


@pytest.mark.parametrize("operations", [1, 5, 14])
@pytest.mark.parametrize("split", ["train", "val"])
def test_task_has_the_truth_and_plan_of_its_story(split: str, operations: int) -> None:
    assert read_story(STORY) == (91, PLAN)
    for index, task in enumerate(make_tasks(split, operations, train=300, val=300)):
        value, plan = read_story(task.text)
        assert task.ground_truth == f"{value:02d}"[0] + " " + f"{value:02d}"[1]
        assert task.extra_info == {"index": index, "split": split, "plan": plan}
        assert plan.count(";") == operations


@pytest.mark.parametrize("operations", [5, 14])
def test_splits_are_disjoint(operations: int) -> None:
    splits = [make_tasks(s, operations, val_split=v) for s, v in (("train", "val"), ("val", "val"), ("val", "tune"))]
    assert [len(tasks) for tasks in splits] == [4096, 512, 512]
    assert [tasks[0].extra_info["split"] for tasks in splits] == ["train", "val", "tune"]
    plans = [task.extra_info["plan"] for tasks in splits for task in tasks]
    assert len(set(plans)) == len(plans)


def test_tasks_are_reproducible_and_smaller_splits_are_prefixes() -> None:
    assert make_tasks("train", train=64) == make_tasks("train", train=64)
    assert make_tasks("train", train=16) == make_tasks("train", train=64)[:16]
    assert make_tasks("val", val=16, val_split="tune") == make_tasks("val", val=64, val_split="tune")[:16]
    assert make_tasks("train", train=64, val_split="tune") == make_tasks("train", train=64)


@pytest.mark.parametrize("operations", [5, 14])
def test_tokenizer_covers_every_word_of_the_recipe(operations: int) -> None:
    tokenizer = word_tokenizer(recipe("WORDS"))
    unknown = tokenizer.token_to_id("<|end|>")
    said = {"exec 1 2 + 3 4 =", "exec 5 6 - 7 8 = 9 0 bad =", "check 5 6 * 0 2 = 1 2 ?", "1 2 ok", "1 2 bad"}
    for task in make_tasks("train", operations, train=500):
        said |= {f"plan {task.text}", task.extra_info["plan"], task.ground_truth}
    for text in said:
        ids = tokenizer.encode(text).ids
        assert unknown not in ids, text
        assert len(ids) == len(text.split())
        assert tokenizer.decode(ids) == text


def test_longest_prompts_and_plans_fit_the_limits() -> None:
    tasks = make_tasks("train", 14, train=500)
    longest_story = max(len(f"plan {task.text}".split()) for task in tasks)
    longest_plan = max(len(task.extra_info["plan"].split()) for task in tasks)
    assert longest_story == 1 + 5 + 14 * 4
    assert longest_plan == 2 + 14 * 4
    for name in ("arithmetic_chain", "arithmetic_chain_sparse", "arithmetic_chain_long"):
        data = load_recipe(RECIPES / f"{name}.yaml").config.data
        assert longest_plan + 1 <= data.max_response_length  # with the end token
        assert longest_story <= data.max_prompt_length
        # `exec 1 2 + 3 4 = ... bad =`: a retry quotes the executor, whose response may have the maximum length.
        assert 9 + data.max_response_length <= data.max_prompt_length
    assert longest_plan + 1 <= 64  # the shorter limit that the recipe's first lines recommend


# The workflow


def test_rollout_computes_one_operation_at_a_time() -> None:
    trajectory, prompts = run_team(a_good_team)
    assert agents_of(trajectory) == "pevevev"
    assert prompts == [
        f"plan\n{STORY}",
        "exec\n4 7 + 0 5 =",
        "check\n4 7 + 0 5 = 5 2 ?",
        "exec\n5 2 * 0 2 =",
        "check\n5 2 * 0 2 = 0 4 ?",
        "exec\n0 4 - 1 3 =",
        "check\n0 4 - 1 3 = 9 1 ?",
    ]
    assert [step.parents for step in trajectory.steps] == [(), (0,), (1,), (2,), (3,), (4,), (5,)]
    assert [step.info for step in trajectory.steps[:3]] == [
        {},
        {"sum": "4 7 + 0 5 ="},
        {"sum": "4 7 + 0 5 =", "candidate": "5 2"},
    ]
    assert (trajectory.status, trajectory.answer, trajectory.info) == ("ok", "9 1", {})
    assert scores_of(trajectory) == [1.0] * 7
    assert trajectory.outcome.value == 1.0
    TrajectoryBatch.from_trajectories([trajectory])


def test_retry_prompt_contains_the_bad_candidate() -> None:
    said = {"exec\n4 7 + 0 5 =": "5 3", "exec\n4 7 + 0 5 = 5 3 bad =": "5 2"}
    trajectory, prompts = run_team(a_good_team_but(said))
    assert agents_of(trajectory) == "peveevev"
    assert prompts[2:5] == ["check\n4 7 + 0 5 = 5 3 ?", "exec\n4 7 + 0 5 = 5 3 bad =", "exec\n5 2 * 0 2 ="]
    assert [step.parents for step in trajectory.steps] == [(), *((i,) for i in range(7))]
    assert [step.turn for step in trajectory.steps if step.agent == "executor"] == [0, 1, 2, 3]
    assert trajectory.answer == "9 1"
    assert scores_of(trajectory) == [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    kinds = [recipe("candidate_kind")(step) for step in trajectory.steps]
    assert kinds == [None, None, "wrong", None, None, "right", None, "right"]


@pytest.mark.parametrize(("verdict", "tries"), [("ok bad", 2), ("bad ok", 1), ("", 1), ("bad.", 1)])
def test_only_a_verdict_ending_in_bad_causes_a_retry(verdict: str, tries: int) -> None:
    def answer(prompt: str) -> str:
        agent = prompt.partition("\n")[0]
        return {"plan": "4 7 ; + 0 5", "exec": "5 2", "check": verdict}[agent]

    trajectory, _ = run_team(answer)
    assert agents_of(trajectory).count("e") == tries
    assert trajectory.answer == "5 2"


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ("47 ; + 0 5", "the plan does not start with a number: '47'"),
        ("\u0664 \u0667 ; + 0 5", "the plan does not start with a number: '\u0664 \u0667'"),
        ("ok " * 50, "the plan does not start with a number: " + repr(("ok " * 50)[:40])),
        ("4 7 ; + 0 5 =", "not an operation: '+ 0 5 ='"),
    ],
)
def test_invalid_plan_ends_the_rollout_with_a_reason(plan: str, reason: str) -> None:
    trajectory, _ = run_team(lambda prompt: plan)
    assert agents_of(trajectory) == "p"
    assert trajectory.status == "ok"
    assert trajectory.info == {"agent_error": reason}
    assert trajectory.answer is None
    assert trajectory.outcome.value == 0.0
    assert trajectory.steps[0].scores["plan_right"].status == "ok"


def test_plan_may_have_at_most_twice_the_operations() -> None:
    def answer(prompt: str) -> str:
        return plan if prompt.startswith("plan") else "4 7"

    plan = "4 7" + " ; + 0 0" * 6
    trajectory, _ = run_team(answer)
    assert (len(trajectory.steps), trajectory.answer) == (13, "4 7")
    plan = "4 7" + " ; + 0 0" * 7
    trajectory, _ = run_team(answer)
    assert len(trajectory.steps) == 1
    assert trajectory.info == {"agent_error": "the plan has 7 operations"}


def test_nonnumeric_candidate_ends_the_rollout_unless_retried() -> None:
    said = {"exec\n4 7 + 0 5 =": "52", "check\n4 7 + 0 5 = 52 ?": "5 2 ok"}
    trajectory, _ = run_team(a_good_team_but(said))
    assert agents_of(trajectory) == "pev"
    assert trajectory.info == {"agent_error": "not a number: '52'"}
    assert scores_of(trajectory) == [1.0, 0.0, 0.0]

    said = {"exec\n4 7 + 0 5 =": "52", "exec\n4 7 + 0 5 = 52 bad =": "5 2", f"plan\n{STORY}": "4 7 ; + 0 5 ; nonsense"}
    trajectory, _ = run_team(a_good_team_but(said))
    assert agents_of(trajectory) == "peve"
    assert trajectory.info == {"agent_error": "not an operation: 'nonsense'"}


NUMBERS = st.sampled_from(["0 0", "4 7", "9 9"])
OPERATIONS = st.builds("{} {}".format, st.sampled_from("+-*/"), NUMBERS)
NEARLY = st.text("0123456789 +-*;=?okbad\n", max_size=20)
PLANS = st.one_of(
    st.text(max_size=60),
    NEARLY,
    st.builds(
        lambda start, components: " ; ".join([start, *components]), NUMBERS, st.lists(OPERATIONS | NEARLY, max_size=8)
    ),
)
RESPONSES = st.lists(st.one_of(NUMBERS, NEARLY, st.text(max_size=20)), min_size=1, max_size=4)
VERDICTS = st.lists(
    st.one_of(st.sampled_from(["4 7 ok", "4 7 bad", "bad", ""]), NEARLY, st.text(max_size=20)), min_size=1, max_size=4
)


@examples(200)
@given(PLANS, RESPONSES, VERDICTS)
def test_any_responses_end_in_a_number_or_an_agent_error(plan: str, responses: list[str], verdicts: list[str]) -> None:
    said = {"plan": itertools.repeat(plan), "exec": itertools.cycle(responses), "check": itertools.cycle(verdicts)}
    trajectory, _ = run_team(lambda prompt: next(said[prompt.partition("\n")[0]]))
    assert trajectory.status == "ok"
    assert "error" not in trajectory.info
    if trajectory.answer is None:
        assert trajectory.info["agent_error"]
        assert len(trajectory.info["agent_error"]) < 500  # 40 characters, each escaped at worst
    else:
        assert re.fullmatch("[0-9] [0-9]", trajectory.answer)
    assert len(trajectory.steps) <= 1 + 3 * 6
    assert all(0.0 <= value <= 1.0 for value in scores_of(trajectory))
    assert len(scores_of(trajectory)) == len(trajectory.steps)
    assert {recipe("candidate_kind")(step) for step in trajectory.steps} <= {None, "right", "wrong"}


# The sub-rewards


def judged(function: str, agent: str, response: str, **info: str) -> float:
    step = Step("t/0", "t", 0, agent, 0, (), "prompt", response, info=dict(info))
    return recipe(function)(step, Trajectory("t", "u", TASK, [step], (0,)))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (PLAN, 1.0),
        ("4 8 ; + 0 5 ; * 0 2 ; - 1 3", 3 / 4),
        ("4 7 ; - 0 5 ; * 0 2 ; + 1 3", 2 / 4),
        ("4 7", 1 / 4),
        ("4 7 ; * 0 2 ; - 1 3", 1 / 4),  # one part is missing, so later parts are misplaced
        (PLAN + " ; + 0 1" * 36, 4 / 40),
        (PLAN.replace(" ;", ";"), 0.0),
        ("", 0.0),
    ],
)
def test_plan_earns_its_share_of_right_parts(plan: str, expected: float) -> None:
    assert judged("plan_right", "planner", plan) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("sum_", "response", "expected"),
    [
        ("4 7 + 0 5 =", "5 2", 1.0),
        ("4 7 + 0 5 =", "5 3", 0.5),
        ("4 7 + 0 5 =", "2 5", 0.0),
        ("4 7 + 0 5 =", "5 2 5 2", 0.5),
        ("4 7 + 0 5 =", "", 0.0),
        ("9 9 * 0 3 =", "9 7", 1.0),  # 297: no sum of the story, and right for this prompt
    ],
)
def test_candidate_earns_its_share_of_right_digits(sum_: str, response: str, expected: float) -> None:
    assert judged("digits_right", "executor", response, sum=sum_) == expected


@pytest.mark.parametrize(
    ("candidate", "verdict", "expected"),
    [
        ("5 2", "5 2 ok", 1.0),
        ("5 2", "5 2 bad", 0.0),
        ("5 3", "5 2 bad", 1.0),
        ("5 3", "5 2 ok", 0.0),
        ("5 3", "9 9 bad", 1.0),  # the verdict counts, not the verifier's own sum
        ("52", "ok", 0.0),
        ("5 2", "ok 5 2", 0.0),
    ],
)
def test_verdict_is_judged_by_the_candidate_in_its_prompt(candidate: str, verdict: str, expected: float) -> None:
    assert judged("verdict_right", "verifier", verdict, sum="4 7 + 0 5 =", candidate=candidate) == expected


@pytest.mark.parametrize(("answer", "expected"), [("9 1", 1.0), ("1 9", 0.0), ("91", 0.0), (None, 0.0)])
def test_outcome_compares_the_answer_with_the_story(answer: str | None, expected: float) -> None:
    assert recipe("answer_right")(Trajectory("t", "u", TASK, answer=answer)) == expected


# The recipe files


@pytest.mark.parametrize(
    ("name", "operations", "weights", "outcome_to"),
    [
        ("arithmetic_chain", 5, {"plan_right": 1.0, "digits_right": 1.0, "verdict_right": 1.0}, "all"),
        ("arithmetic_chain_sparse", 5, {"plan_right": 0.0, "digits_right": 1.0, "verdict_right": 0.0}, "answer"),
        ("arithmetic_chain_long", 14, {"plan_right": 1.0, "digits_right": 1.0, "verdict_right": 1.0}, "all"),
    ],
)
def test_recipe_builds_with_its_weights(name: str, operations: int, weights: dict[str, float], outcome_to: str) -> None:
    loaded = load_recipe(RECIPES / f"{name}.yaml", ["recipe.train_tasks=16", "recipe.val_tasks=4"])
    components = build_components(loaded)
    outcome, *sub_rewards = components.rewards.functions
    assert (outcome.name, outcome.level) == ("answer_right", "outcome")
    assert {function.name: function.weight for function in sub_rewards} == weights
    assert loaded.config.credit.propagation.outcome_to == outcome_to
    assert {agent: spec.system for agent, spec in components.agents.items()} == SYSTEM
    assert components.stratum is recipe("candidate_kind")
    assert {task.extra_info["plan"].count(";") for task in components.train_tasks} == {operations}


# The warm-up

ASKED = {"operations": 2, "hidden": 64, "layers": 2, "warmup_planner": 0.05, "warmup_executor": 0.4, "warmup_seed": 0}


@pytest.mark.slow
def test_warm_up_is_cached_and_reaches_the_planner_accuracy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from creditflow.engines.local.policy import Policy, pick_device

    monkeypatch.setenv("CREDITFLOW_CACHE", str(tmp_path))
    folder = recipe("warm_model")(ASKED)
    assert list(tmp_path.iterdir()) == [folder]
    written_at = (folder / "config.json").stat().st_mtime_ns
    assert recipe("warm_model")(ASKED) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written_at
    policy = Policy.load(folder, pick_device("cpu"))
    assert recipe("_sampled_accuracy")(policy, "planner", ASKED["operations"]) >= ASKED["warmup_planner"]
