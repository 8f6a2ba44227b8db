"""Tasks of environments by their addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data.datasets import load_tasks
from creditflow.data.sources import SOURCES
from creditflow.errors import DataError
from creditflow.plugins.environments import ENVIRONMENTS
from creditflow.plugins.environments.tasks import SOURCE, environment_tasks, parse_environment_address

KEY = "data.train_files"


def test_every_scheme_has_an_adapter():
    assert ENVIRONMENTS.names() == tuple(name for name, source in SOURCES.items() if source is SOURCE)


def test_address_separates_own_options_from_the_environments():
    text = "textarena://Nim-v0?players=2&size=3&illegal=random&max_turns=7&name=a b&piles=[3,4]"
    address = parse_environment_address(text, KEY)
    assert (address.scheme, address.name, address.size, address.seed) == ("textarena", "Nim-v0", 3, 0)
    assert (address.illegal, address.max_turns) == ("random", 7)
    assert address.options == {"players": 2, "name": "a b", "piles": [3, 4]}


@given(seed=st.integers(0, 100), size=st.integers(1, 20), other=st.integers(0, 100))
def test_training_and_validation_share_no_seed(seed, size, other):
    train = environment_tasks(f"gymnasium://A-v1?seed={seed}&size={size}", KEY, "train")
    val = environment_tasks(f"gymnasium://A-v1?seed={other}&size={size}", KEY, "val")
    seeds = [{task.extra_info["seed"] for task in tasks} for tasks in (train, val)]
    assert [len(of_split) for of_split in seeds] == [size, size]
    assert not seeds[0] & seeds[1]
    following = environment_tasks(f"gymnasium://A-v1?seed={seed + 1}&size={size}", KEY, "train")
    assert not seeds[0] & {task.extra_info["seed"] for task in following}


def test_addresses_are_loaded_among_other_files(tmp_path):
    names = ["gymnasium://A-v1?size=2", "openenv://127.0.0.1:8000/env?size=1"]
    tasks = load_tasks(names, tmp_path, {}, "train")
    assert [task.data_source for task in tasks] == ["gymnasium/A-v1"] * 2 + ["openenv/127.0.0.1:8000/env"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gymnasum://A-v1", r"expected gymnasium, openenv, .* before ://.*did you mean 'gymnasium'"),
        ("s3://bucket/file", "before ://"),
        ("gymnasium://", "expected the name of an environment after gymnasium://, got ''"),
        ("gymnasium://A;B", "expected the name of an environment"),
        ("gymnasium://A?size", "expected options as name=value"),
        ("gymnasium://A?size=1&size=2", "expected each option once, got 'size' twice"),
        ("gymnasium://A?size=0", "size: expected a whole number of 1 or more, got '0'"),
        ("gymnasium://A?size=999999999", "size: expected at most 10,000,000, got 999999999"),
        ("gymnasium://A?max_turns=-1", "max_turns: expected a whole number"),
        ("gymnasium://A?slip=False", r"slip: expected JSON \(true, false, null\), got False"),
        ("gymnasium://A?illegal=randm", r"illegal: expected error or random, got 'randm'.*did you mean 'random'"),
    ],
)
def test_invalid_address_is_refused(text, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_tasks(text, tmp_path, {}, "train")
