from pathlib import Path

import pytest

from creditflow.data import Score, Step, Task, Trajectory
from creditflow.errors import ConfigError, RewardError
from creditflow.rewards import load_reward_functions, outcome, reward
from creditflow.rewards.entries import RewardFunctionConfig, entry_of
from creditflow.rewards.registry import REWARD_FUNCTIONS, RewardFunction

TEAM = ("planner", "executor", "verifier")

USER_FILE = """
from creditflow.rewards import outcome, reward

@reward(agent_match="exec|verif", weight=2.0, range=(-1, 1), name="tidy")
def tidiness(step, trajectory, limit=10):
    return 1.0 if len(step.response) < limit else -1.0

@reward
def bare(step, trajectory):
    return 0.5

@reward(level="trajectory")
async def all_at_once(trajectory):
    return [0.25] * len(trajectory.steps)

@outcome
def won(trajectory):
    return trajectory.answer == "yes"

def compute_decomposed_reward(trajectory):
    return [1.0 if step.response[0].isdigit() else 0.5 for step in trajectory.steps]

def long_enough(step, trajectory, least):
    return float(len(step.response) >= least)

def three(a, b, c):
    return 0.0

@reward
def wrong_shape(trajectory):
    return 0.0

@reward(when=lambda step: step.index == 2)
def of_the_last(step, trajectory):
    return 1.0

def says_much(step):
    return len(step.response) > 3

class Judge:
    async def __call__(self, step, trajectory):
        return 1.0

judge = Judge()
number = 3
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USER_FILE)
    return tmp_path


def load(base: Path, *entries: dict) -> tuple[RewardFunction, ...]:
    return load_reward_functions([entry_of(e, f"reward.functions[{i}]") for i, e in enumerate(entries)], base, TEAM)


def a_trajectory(answer: str | None = "72") -> Trajectory:
    task = Task("openai/gsm8k", ({"role": "user", "content": "How many?"},), "72")
    steps = [
        Step(f"t/{i}", "t", i, agent, 0, (i - 1,) if i else (), "prompt", response)
        for i, (agent, response) in enumerate([("planner", "1. add"), ("executor", "48+24=72"), ("verifier", "ok")])
    ]
    return Trajectory("t", "u", task, steps, (2,), answer)


def test_decorated_function_stays_a_plain_function():
    def half(trajectory):
        return 0.5

    for decorate in (reward(agent_match="x", level="trajectory"), outcome, outcome(range=(-1, 1))):
        assert decorate(half) is half


def test_recipe_overrides_the_decorator(base):
    (declared,) = load(base, {"fn": "mine.py:tidiness"})
    assert (declared.name, declared.level, declared.weight, declared.range) == ("tidy", "step", 2.0, (-1.0, 1.0))
    assert [declared.matches(step) for step in a_trajectory().steps] == [False, True, True]

    (changed,) = load(base, {"fn": "mine.py:tidiness", "agent_match": "plan", "weight": 0.0, "name": "t"})
    assert (changed.name, changed.weight) == ("t", 0.0)
    assert [changed.matches(step) for step in a_trajectory().steps] == [True, False, False]


def test_when_comes_from_the_recipe_or_the_decorator(base):
    (declared,) = load(base, {"fn": "mine.py:of_the_last"})
    assert [declared.matches(step) for step in a_trajectory().steps] == [False, False, True]
    changed, whole = load(
        base,
        {"fn": "mine.py:of_the_last", "when": "mine.py:says_much"},
        {"fn": "sum", "when": "mine.py:says_much", "args": {"parts": [{"fn": "mine.py:bare"}]}},
    )
    for function in (changed, whole):
        assert [function.matches(step) for step in a_trajectory().steps] == [True, True, False]


def test_parameters_set_the_level_of_undecorated_functions(base):
    whole, step = load(
        base, {"fn": "mine.py:compute_decomposed_reward"}, {"fn": "mine.py:long_enough", "args": {"least": 3}}
    )
    assert (whole.level, whole.name) == ("trajectory", "compute_decomposed_reward")
    assert whole.call(a_trajectory()) == [1.0, 1.0, 0.5]
    trajectory = a_trajectory()
    assert step.level == "step"
    assert [step.call(s, trajectory) for s in trajectory.steps] == [1.0, 1.0, 0.0]


def test_async_functions_and_objects_are_detected(base):
    functions = load(base, {"fn": "mine.py:all_at_once"}, {"fn": "mine.py:judge"}, {"fn": "mine.py:bare"})
    assert [function.is_async for function in functions] == [True, True, False]
    assert functions[1].name == "Judge"


def test_comparison_scores_outcomes_or_steps(base):
    as_outcome, as_step = load(
        base, {"fn": "numeric_match"}, {"fn": "numeric_match", "level": "step", "agent_match": "exec", "name": "value"}
    )
    trajectory = a_trajectory("It is 72.")
    assert as_outcome.level == "outcome"
    assert as_outcome.call(trajectory) == 1.0
    assert as_step.level == "step"
    assert [as_step.call(step, trajectory) for step in trajectory.steps] == [0.0, 1.0, 0.0]


def test_missing_answer_scores_the_worst(base):
    (function,) = load(base, {"fn": "exact_match"})
    assert function.call(a_trajectory(None)) == Score(0.0, reason="the workflow returned no answer")


def test_arguments_are_bound_and_change_the_version(base):
    plain, strict, strict_again = (
        load(base, {"fn": "numeric_match", "args": args})[0] for args in ({}, {"rel_tol": 0.5}, {"rel_tol": 0.5})
    )
    assert plain.call(a_trajectory("70.5")) == 0.0
    assert strict.call(a_trajectory("70.5")) == 1.0
    assert plain.version != strict.version == strict_again.version


def test_version_changes_with_the_source(tmp_path):
    versions = []
    for i, value in enumerate(("0.5", "0.6", "0.5")):
        (tmp_path / f"f{i}.py").write_text(f"def f(step, trajectory):\n    return {value}\n")
        versions.append(load(tmp_path, {"fn": f"f{i}.py:f"})[0].version)
    assert versions[0] == versions[2] != versions[1]


def test_ready_made_functions_document_range_cost_and_source():
    assert set(REWARD_FUNCTIONS.names()) >= {"exact_match", "numeric_match", "math_verify"}
    for _, function in REWARD_FUNCTIONS.items():
        for word in ("Range:", "Cost:", "Source:"):
            assert word in (function.__doc__ or "")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"fn": "exact_mach"}, "no ready-made reward function 'exact_mach' .did you mean 'exact_match'"),
        ({"fn": "mine.py:number"}, "expected a function, mine.py:number is a int"),
        ({"fn": "mine.py:bare", "agent_match": "plan("}, "'plan.' is not a regular expression"),
        ({"fn": "mine.py:bare", "agent_match": "plannr"}, r"team's agents: planner, .* .did you mean 'planner'\?.$"),
        ({"fn": "mine.py:bare", "agent_match": "^judge$"}, "'.judge.' matches none of the team's agents: [^(]*$"),
        ({"fn": "mine.py:bare", "args": {"x": 1}}, "unknown argument 'x'; it takes none"),
        ({"fn": "numeric_match", "args": {"rel_tl": 1}}, "unknown argument 'rel_tl' .did you mean 'rel_tol'"),
        ({"fn": "mine.py:bare", "args": {"step": 1}}, "unknown argument 'step'"),
        (
            {"fn": "mine.py:bare", "level": "trajectory"},
            "the recipe says level trajectory, the function is of level step",
        ),
        ({"fn": "mine.py:bare", "level": "steps"}, "got 'steps' .did you mean 'step'"),
        ({"fn": "numeric_match", "level": "trajectory"}, "its level is outcome or step, not trajectory"),
        ({"fn": "mine.py:wrong_shape"}, "is called as .step, trajectory. and its args, but that does not fit"),
        ({"fn": "mine.py:long_enough", "level": "step"}, r"must take .trajectory. or .step, trajectory.; it takes"),
        ({"fn": "mine.py:bare", "weight": -1.0}, "expected a weight of 0 or more, got -1"),
        ({"fn": "mine.py:bare", "weight": float("nan")}, "weight: expected a finite number, got nan"),
        ({"fn": "mine.py:won", "weight": 0.5}, "an outcome has no agent_match and no weight"),
        ({"fn": "mine.py:won", "agent_match": "planner"}, "an outcome has no agent_match"),
        ({"fn": "mine.py:won", "when": "mine.py:says_much"}, "an outcome is no step's: it has no `when`"),
        ({"fn": "mine.py:bare", "when": "mine.py:three"}, r"when: is called as \(step\) and its args, but"),
        (
            {"fn": "sum", "args": {"parts": [{"fn": "mine.py:of_the_last"}]}},
            "is declared with `when`, which belongs to the sum",
        ),
    ],
)
def test_invalid_entry_is_refused_in_one_line(base, entry, message):
    with pytest.raises(RewardError, match=message) as error:
        load(base, entry)
    assert "\n" not in str(error.value)
    assert "reward.functions[0]" in str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"fn": "mine.py:bare"}, {"fn": "mine.py:bare", "agent_match": "planner"}], "the name 'bare' is taken by"),
        ([{"fn": "mine.py:won"}, {"fn": "exact_match"}], "at most one outcome function, got won, exact_match"),
        ([{"fn": "mine.py:nothing"}], r"reward.functions\[0\].fn"),
    ],
)
def test_invalid_entries_are_refused(base, entries, message):
    with pytest.raises((ConfigError, RewardError), match=message):
        load(base, *entries)


def test_decorator_refuses_an_unknown_level():
    with pytest.raises(RewardError, match="@outcome"):
        reward(level="outcome")


CLASSES = """
from creditflow import reward

@reward(name="scaled", timeout=7, range=(0, 9))
class Scaled:
    def __init__(self, scale, low=0.0):
        if scale < 0:
            raise ValueError(f"expected a scale of 0 or more, got {scale}")
        self.range = (low, scale)
    def __call__(self, step, trajectory):
        return self.range[1]
    def cache_key(self, step, trajectory):
        return step.response

class Here:
    inline = True
    async def __call__(self, step, trajectory):
        return 1.0

class Lame:
    pass
"""


def of_class(tmp_path, name, shared=None, **entry):
    (tmp_path / "classes.py").write_text(CLASSES)
    entries = [RewardFunctionConfig(fn=f"classes.py:{name}", **entry)]
    return load_reward_functions(entries, tmp_path, TEAM, shared)[0]


def test_class_is_instantiated_with_the_args(tmp_path):
    function = of_class(tmp_path, "Scaled", args={"scale": 4.0})
    assert function.call(None, None) == 4.0
    assert (function.name, function.range, function.timeout, function.is_async) == ("scaled", (0.0, 4.0), 7, False)
    assert function.cache_key(Step("", "", 0, "a", 0, (), "", "said"), None) == "said"
    assert function.version != of_class(tmp_path, "Scaled", args={"scale": 5.0}).version
    inline = of_class(tmp_path, "Here")
    assert (inline.inline, inline.is_async, inline.cache_key) == (True, True, None)


def test_entry_and_shared_arguments_reach_a_class(tmp_path):
    function = of_class(tmp_path, "Scaled", {"scale": 3.0, "sandbox": {}}, timeout=0.5, cache=False)
    assert (function.range, function.timeout, function.cache) == ((0.0, 3.0), 0.5, False)
    assert of_class(tmp_path, "Scaled", {"scale": 3.0}, args={"scale": 2.0}).range == (0.0, 2.0)


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("Scaled", {"args": {"scale": -1}}, "expected a scale of 0 or more, got -1"),
        ("Scaled", {}, "missing a required argument: 'scale'"),
        ("Scaled", {"args": {"scal": 1}}, "unknown argument 'scal'.*did you mean 'scale'"),
        ("Scaled", {"args": {"scale": 1.0, "low": 2.0}}, "low < high"),
        ("Scaled", {"args": {"scale": 1.0}, "timeout": 0.0}, "expected a timeout of more than 0 seconds"),
        ("Lame", {}, "expected a class with __call__"),
    ],
)
def test_failing_constructor_is_an_error_of_the_recipe(tmp_path, name, entry, message):
    with pytest.raises(RewardError, match=message):
        of_class(tmp_path, name, **entry)


def test_file_arguments_are_found_beside_the_recipe(tmp_path, monkeypatch):
    recipe = tmp_path / "my recipe"
    (recipe / "docs").mkdir(parents=True)
    (recipe / "rubric.md").write_text("Beside the recipe.")
    (tmp_path / "rubric.md").write_text("In the working directory.")
    (tmp_path / "other.md").write_text("Only in the working directory.")
    monkeypatch.chdir(tmp_path)
    entries = [
        RewardFunctionConfig(
            fn="judge", name=rubric[:5], args={"endpoint": "http://host/v1", "model": "m", "rubric": rubric}
        )
        for rubric in ("rubric.md", "other.md", "A text. " * 1_000, "docs", "Prefer notes.md to todo.txt")
    ]
    functions = load_reward_functions(entries, recipe, ())
    rubrics = [function.instance.prompt.rubric for function in functions]
    assert rubrics[:2] == ["Beside the recipe.", "Only in the working directory."]
    assert rubrics[2].startswith("A text.")
    assert rubrics[3:] == ["docs", "Prefer notes.md to todo.txt"]
