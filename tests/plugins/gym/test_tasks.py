import json
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from creditflow._utils.install import install_command
from creditflow.data.datasets import load_tasks, validation_files, write_tasks
from creditflow.errors import ConfigError, DataError
from creditflow.plugins.gym.tasks import gym_data_set, gym_entry, problem_of, split_of

FAMILIES = (
    "chain_sum?max_terms=2&max_digits=2",
    "basic_arithmetic?max_terms=3&max_digits=1",
    "simple_equations",
    "gcd?max_value=60",
    "syllogism",
    "circuit_logic?min_terms=2&max_terms=2&neg_prob=0.1",
    "number_format",
    "fraction_simplification?max_value=60",
    "knights_knaves",
    "graph_color",
    "word_sorting?max_words=4",
)


def load(*names: str, split="train", **more):
    return load_tasks([f"reasoning-gym://{name}" for name in names], Path(), more, split)


def problems(tasks):
    return {task.extra_info["problem"] for task in tasks}


def entry(family, question="?", **metadata):
    return {"question": question, "answer": "", "metadata": metadata}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.partition("?")[0])
def test_splits_of_a_family_are_disjoint_by_problem(family):
    family += "&" if "?" in family else "?"
    train = [*load(f"{family}size=150"), *load(f"{family}size=60&seed=7")]
    for split, seed, size in (("val", 0, 40), ("val", 7, 60), ("val", 3, 20)):
        held_out = load(f"{family}size={size}&seed={seed}", split=split)
        assert not problems(train) & problems(held_out)
        assert not {task.text for task in train} & {task.text for task in held_out}
    tune = load(f"{family}size=20&split=tune")
    assert not problems(tune) & (problems(train) | problems(held_out))


def test_whole_small_family_is_divided_without_overlap():
    # two one-digit numbers, joined by + or -: 200 problems
    base = "chain_sum?max_terms=2&max_digits=1"
    sizes, found = {}, {}
    for split in ("train", "val", "tune"):
        with pytest.raises(DataError, match=r"of 200 in all splits") as raised:
            load(f"{base}&size=500&split={split}")
        sizes[split] = int(str(raised.value).partition("found ")[2].partition(" ")[0])
        tasks = load(f"{base}&size={sizes[split]}&split={split}")
        found[split] = {gym_entry(task)["metadata"]["expression"] for task in tasks}
    expected = {f"{a} {sign} {b}" for a in range(10) for b in range(10) for sign in "+-"}
    assert set.union(*found.values()) == expected
    assert sum(sizes.values()) == 200
    assert 25 <= sizes["val"] <= 55
    assert 8 <= sizes["tune"] <= 32


def test_one_problem_in_two_phrasings_has_one_split():
    plain = entry("basic_arithmetic", "Calculate 3 + 4.", expression="3 + 4")
    other = entry("basic_arithmetic", "What is 3+4 ?", expression="3+4")
    assert problem_of("basic_arithmetic", plain) == problem_of("basic_arithmetic", other)
    assert problem_of("gcd", entry("gcd", numbers=[12, 8])) == problem_of("gcd", entry("gcd", numbers=[8, 12]))
    assert problem_of("gcd", entry("gcd", numbers=[12, 8])) != problem_of("gcd", entry("gcd", numbers=[1, 28]))
    assert problem_of("syllogism", entry("", "All  a are\nb")) == problem_of("syllogism", entry("", "All a are b"))


def test_one_circuit_in_two_drawings_has_one_problem():
    def circuit(terms, inputs, last="XOR", question="?"):
        metadata = {"term_strings": terms, "assignments": inputs, "final_gate": last}
        return problem_of("circuit_logic", entry("circuit_logic", question, **metadata))

    drawn = circuit(["A&B", "A\u2191C"], {"A": 1, "B": 0, "C": 1})
    assert drawn == 'circuit_logic: [[["&",1,0],["\\u2191",1,1]],"XOR"]'
    assert circuit(["B\u2191C", "C&A"], {"A": 0, "B": 1, "C": 1}, question="another drawing") == drawn
    assert circuit(["A&B", "A\u2191B'"], {"A": 1, "B": 0}) == drawn
    assert circuit(["AA&B", "AA\u2191AB"], {"AA": 1, "AB": 1, "B": 0}) == drawn
    for other in (
        circuit(["A&B", "A\u2191C"], {"A": 1, "B": 0, "C": 1}, last="OR"),
        circuit(["A&B", "A\u2191C"], {"A": 1, "B": 1, "C": 1}),
        circuit(["A&B", "A&C"], {"A": 1, "B": 0, "C": 1}),
        circuit(["A&B", "A\u2191C\u2191C"], {"A": 1, "B": 0, "C": 1}),
    ):
        assert other != drawn


def test_split_of_a_problem_stays_the_same():
    # fixed values: a change would move problems between the splits of recorded runs
    assert [split_of(f"p{i}") for i in range(8)] == ["val", "train", "tune", "tune", "train", "train", "train", "val"]


@pytest.mark.parametrize(
    "family",
    [
        "basic_arithmetic?max_terms=2&max_digits=1",
        "chain_sum?max_terms=2&max_digits=1",
        "circuit_logic?min_terms=2&max_terms=2&min_inputs=2&max_inputs=2&neg_prob=0.1",
        "gcd?max_value=30",
    ],
)
def test_problem_determines_the_answer(family):
    first, second = (
        {task.extra_info["problem"]: task.ground_truth for task in load(f"{family}&size=60&seed={seed}")}
        for seed in (0, 1)
    )
    shared = first.keys() & second.keys()
    assert shared
    assert all(first[problem] == second[problem] for problem in shared)


def test_tasks_repeat_and_a_larger_size_extends_a_smaller_one():
    small, large = load("gcd?size=20"), load("gcd?size=60")
    assert small == large[:20]
    assert len(problems(large)) == 60
    assert load("gcd?size=20&seed=1") != small


def test_entry_survives_json_and_parquet(tmp_path):
    names = ("graph_color?size=3", "complex_arithmetic?size=3", "knights_knaves?size=3", "rubiks_cube?size=2")
    tasks = load(*names)
    write_tasks(tasks, tmp_path / "mixed.parquet")
    again = load_tasks("mixed.parquet", tmp_path, {}, "train")
    assert again == tasks
    for task in again:
        assert json.loads(json.dumps(task.extra_info)) == task.extra_info
    color = gym_entry(again[0])
    assert all(type(vertex) is int for vertex in color["metadata"]["possible_answer"])
    data_set = gym_data_set(again[0])
    assert data_set.score_answer(json.dumps(color["metadata"]["possible_answer"]), color) == 1.0
    for task in again[3:9]:
        assert gym_data_set(task).score_answer(task.ground_truth, gym_entry(task)) == 1.0
    # some families keep fractions in their metadata: gsm_symbolic among its first 60 problems
    entries = [gym_entry(task) for task in load("gsm_symbolic?size=60")]
    assert any(isinstance(value, Fraction) for entry in entries for value in entry["metadata"]["variables"].values())


def test_weights_share_out_the_sizes_evenly():
    tasks = load("gcd?weight=3&size=30", "syllogism?size=10")
    kinds = [task.data_source for task in tasks]
    assert kinds.count("reasoning-gym/gcd") == 30
    assert kinds.count("reasoning-gym/syllogism") == 10
    assert kinds[:20].count("reasoning-gym/syllogism") == 5
    plain = load("gcd?size=3", "syllogism?size=2")
    assert [task.data_source for task in plain] == ["reasoning-gym/gcd"] * 3 + ["reasoning-gym/syllogism"] * 2


def test_options_have_the_types_of_the_family():
    def options(name):
        return json.loads(load(name)[0].extra_info["options"])

    names = '["Adam","Bo","Cy","Dan","Ed","Flo","Gus","Hal"]'
    assert options(f"family_relationships?male_names={names}&size=1")["male_names"][0] == "Adam"
    assert options("chain_sum?allow_negation=true&size=1")["allow_negation"] is True
    levels = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2}
    assert options("chain_sum?level=2&level.num_digits=1&max_terms=3&size=2") == levels


def test_match_keeps_fitting_questions():
    tasks = load("chain_sum?min_terms=3&max_digits=1&match=^[^-]*$&size=50")
    assert all("-" not in task.text and "+" in task.text for task in tasks)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("chain_sun", "got 'chain_sun' (did you mean 'chain_sum'?)"),
        ("composite", "list several addresses"),
        ("chain_sum?min_term=2", "unknown option 'min_term' (did you mean 'min_terms'?)"),
        ("chain_sum?min_terms=two", "min_terms: expected"),
        ("chain_sum?min_terms=5&max_terms=2", "max_terms must be >= min_terms"),
        ("chain_sum?size=0", "size: expected a whole number of 1 or more, got '0'"),
        ("chain_sum?weight=-1", "weight: expected a number above 0"),
        ("chain_sum?split=vall", "did you mean 'val'?"),
        ("chain_sum?level=3-1&size=5", "expected an ascending range, got 3-1"),
        ("chain_sum?level=0-99&size=5", "level: expected at most"),
        ("chain_sum?level=1-&size=5", "a whole number"),
        ("chain_sum?level=11", "level: expected at most 10, got 11"),
        ("chain_sum?level.num_term=1", "did you mean 'num_terms'?"),
        ("gsm_symbolic?level=1", "gsm_symbolic has no curriculum"),
        ("chain_sum?match=(", "is not a regular expression"),
        ("chain_sum?max_terms=2&max_digits=1&size=900", "set size="),
    ],
)
def test_unusable_addresses_are_refused(address, message):
    with pytest.raises(DataError) as raised:
        load(address)
    assert message in str(raised.value)
    assert str(raised.value).startswith("data.train_files: ")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("gym"))):
        load("chain_sum?size=7")


@pytest.mark.parametrize("split", ["train", "val", "tune"])
def test_split_without_validation_files_is_refused(split):
    name = f"reasoning-gym://gcd?size=20&split={split}"
    for train_files in (name, ["reasoning-gym://lcm", name]):
        with pytest.raises(DataError) as raised:
            validation_files(train_files, None)
        message = str(raised.value)
        assert message.startswith(f"data.train_files: {name}: split: expected none, got '{split}'")
        assert message.endswith(f"remove split={split}, or set data.val_files")
        assert validation_files(train_files, "reasoning-gym://gcd") == "reasoning-gym://gcd"
    assert validation_files("reasoning-gym://gcd", None) == "reasoning-gym://gcd"
    assert validation_files(["reasoning-gym://gcd", "a.jsonl"], None) == ["reasoning-gym://gcd", "a.jsonl"]
    assert validation_files("reasoning-gym://gcd", name) == name


def test_range_of_levels_shares_the_size():
    made = load("chain_sum?level=0-2&size=10", "gcd?size=5&level=1-1")
    levels = [(task.extra_info["family"], task.extra_info["level"]) for task in made]
    assert Counter(levels) == {("chain_sum", 0): 4, ("chain_sum", 1): 3, ("chain_sum", 2): 3, ("gcd", 1): 5}
    weighted = load("chain_sum?level=0-2&size=10&weight=3", "gcd?size=10")
    assert Counter(task.extra_info["family"] for task in weighted) == {"chain_sum": 15, "gcd": 5}
