"""Tests of task folders: the same tasks from every source, the choice of a split, and unusable folders."""

import json
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from creditflow.config import load_recipe
from creditflow.data import Task
from creditflow.data.datasets import load_tasks, write_tasks
from creditflow.errors import DataError

datasets = pytest.importorskip("datasets")

TASKS = [
    Task(
        data_source=f"source {k % 2}",
        prompt=({"role": "system", "content": "Be brief."}, {"role": "user", "content": f"{k} + 1 = ? \u00fc"}),
        ground_truth=str(k + 1),
        extra_info={"index": k, "parts": [f"{k}", "1"], "note": None if k % 3 else "easy"},
    )
    for k in range(10)
]
ROWS = [
    {
        "data_source": task.data_source,
        "prompt": list(task.prompt),
        "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
        "extra_info": task.extra_info,
    }
    for task in TASKS
]
MAKE = f"""
from creditflow import Task

def tasks(split, recipe):
    yield from {TASKS!r}
"""


def save(rows: list[dict], folder: Path, **options) -> None:
    datasets.Dataset.from_list(rows).save_to_disk(folder, **options)


def save_splits(folder: Path, **rows: list[dict]) -> None:
    datasets.DatasetDict({name: datasets.Dataset.from_list(some) for name, some in rows.items()}).save_to_disk(folder)


def write_rows(rows: list[dict], path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_every_source(base: Path) -> list[str]:
    write_rows(ROWS, base / "t.jsonl")
    write_tasks(TASKS, base / "t.parquet")
    save(ROWS, base / "saved", num_shards=3)
    save_splits(base / "splits", train=ROWS, test=ROWS[:1])
    (base / "parquet").mkdir()
    write_rows(ROWS[:6], base / "parquet" / "train-00000-of-00002.parquet")
    write_rows(ROWS[6:], base / "parquet" / "train-00001-of-00002.parquet")
    write_rows(ROWS[:1], base / "parquet" / "test-00000-of-00001.parquet")
    (base / "make.py").write_text(MAKE)
    return ["t.jsonl", "t.parquet", "saved", "splits", "splits/train", "parquet", "make.py:tasks"]


def test_every_source_gives_equal_tasks(tmp_path):
    for source in write_every_source(tmp_path):
        assert load_tasks(source, tmp_path, {}, "train") == TASKS, source


def test_other_columns_and_formats_are_ignored(tmp_path):
    rows = [{**row, "image": {"bytes": b"no image", "path": None}, "score": 0.5} for row in ROWS]
    features = datasets.Dataset.from_list(rows).features
    features["image"] = datasets.Image()
    saved = datasets.Dataset.from_list(rows, features=features).with_format("numpy", columns=["score"])
    saved.save_to_disk(tmp_path / "saved")
    assert load_tasks("saved", tmp_path, {}, "train") == TASKS


def test_saved_data_set_needs_the_library_that_saved_it(tmp_path, monkeypatch):
    truths = [72, "seventy", [7, 2]]
    rows = [{**ROWS[0], "reward_model": {"ground_truth": truth}} for truth in truths]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").save_to_disk(tmp_path / "saved")
    assert [task.ground_truth for task in load_tasks("saved", tmp_path, {}, "train")] == truths
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"saved: reading it needs the package that saved it: .*pip install datasets"):
        load_tasks("saved", tmp_path, {}, "train")


@pytest.mark.parametrize(
    ("names", "train", "val"),
    [
        (["train", "validation", "test"], "train", "validation"),
        (["test", "train"], "train", "test"),
        (["train", "dev"], "train", "dev"),
        (["train"], "train", "train"),
    ],
)
@pytest.mark.parametrize("kind", ["saved", "parquet", "jsonl"])
def test_folder_gives_the_tasks_of_the_split(tmp_path, kind, names, train, val):
    rows = {name: [{**ROWS[0], "data_source": name}] for name in names}
    if kind == "saved":
        save_splits(tmp_path / "d", **rows)
    else:
        (tmp_path / "d").mkdir()
        for name in names:
            write_rows(rows[name], tmp_path / "d" / f"{name}-00000.{kind}")
    assert [task.data_source for task in load_tasks("d", tmp_path, {}, "train")] == [train]
    assert [task.data_source for task in load_tasks("d", tmp_path, {}, "val")] == [val]


def test_files_without_a_split_belong_to_both(tmp_path):
    (tmp_path / "d").mkdir()
    write_rows(ROWS[:3], tmp_path / "d" / "a.jsonl")
    write_rows(ROWS[3:], tmp_path / "d" / "b.parquet")
    (tmp_path / "d" / "README.md").write_text("Sums.")
    assert load_tasks("d", tmp_path, {}, "train") == load_tasks("d", tmp_path, {}, "val") == TASKS


def test_unusable_folders_are_named(tmp_path):
    save_splits(tmp_path / "levels", easy=ROWS, hard=ROWS)
    for name in ("mixed", "other", "held_out"):
        (tmp_path / name).mkdir()
    write_rows(ROWS, tmp_path / "mixed" / "train.jsonl")
    write_rows(ROWS, tmp_path / "mixed" / "more.jsonl")
    (tmp_path / "other" / "data.csv").write_text("a\n")
    write_rows(ROWS, tmp_path / "held_out" / "test.jsonl")
    save([{"question": "1 + 1", "label": 2}], tmp_path / "columns")
    save([ROWS[0], {**ROWS[1], "prompt": []}], tmp_path / "rows")
    save(ROWS, tmp_path / "cut")
    cut = tmp_path / "cut" / "data-00000-of-00001.arrow"
    cut.write_bytes(cut.read_bytes()[:200])
    messages = {
        "levels": r"data.train_files: .*levels: expected a split 'train' or 'training', got easy, hard; .*/easy",
        "mixed": r"mixed: expected a split in every file's name or in none, got 'more.jsonl' beside files of train",
        "other": r"other: expected a data set of `save_to_disk`, or .* files in the folder itself, got data.csv",
        "held_out": r"held_out: expected a split 'train' or 'training', got test; .*held_out/test.jsonl",
        "columns": r"columns: missing data_source, prompt, reward_model \(verl's columns\), got question, label;",
        "rows": r"rows: row 1: prompt: expected a list of messages .*, got '\[\]'",
        "cut": r"cut: not a readable data set: ",
    }
    for files, message in messages.items():
        with pytest.raises(DataError, match=message):
            load_tasks(files, tmp_path, {}, "train")


def test_stored_recipe_names_folders_absolutely(tmp_path, monkeypatch):
    save(ROWS, tmp_path / "saved")
    (tmp_path / "recipe.yaml").write_text("extends: arithmetic_chain\ndata: {train_files: saved, val_files: [saved]}\n")
    monkeypatch.chdir("/")
    data = load_recipe(tmp_path / "recipe.yaml", []).absolute().config.data
    assert (data.train_files, data.val_files) == (f"{tmp_path}/saved", [f"{tmp_path}/saved"])


SOURCES = """
from creditflow import Task

def one(truth, source="s", info=None):
    return Task(source, ({"role": "user", "content": "q"},), truth, {} if info is None else info)

def bare():
    return (one(1),)
def by_split(split):
    yield one(split)
def by_recipe(*, recipe):
    return [one(recipe["count"])]
def all(**given):
    return [one(sorted(given))]
def other(split, path):
    return []
def late(split, recipe):
    yield one(1)
    raise OSError("disk")
def number():
    return [one(1, source=3)]
def listed():
    return [one(1, info=[1])]
def mapping():
    return {"a": one(1)}
def none():
    return []
def rows():
    return [{}]
def broken(split, recipe):
    return [recipe["labels"]]
"""


def test_task_function_takes_split_and_recipe_or_fewer(tmp_path):
    (tmp_path / "make.py").write_text(SOURCES)
    truths = {"bare": 1, "by_split": "val", "by_recipe": 3, "all": ["recipe", "split"]}
    for name, truth in truths.items():
        assert load_tasks(f"make.py:{name}", tmp_path, {"count": 3}, "val")[0].ground_truth == truth


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other", "make.py:other: expected a function with parameters among split, recipe: missing .* 'path'"),
        ("late", r"make.py:late raised OSError: disk \(make.py:19 in late\)"),
        ("number", "task 0 of make.py:number: data_source: expected a text, got int 3"),
        ("listed", "task 0 of make.py:listed: extra_info: expected an object, got list"),
        ("mapping", "expected an iterable of tasks from make.py:mapping, got a dict"),
        ("none", "data.train_files: make.py:none holds no task"),
        ("rows", "data.train_files: task 0 of make.py:rows: expected a creditflow.Task, got dict"),
        ("broken", r"make\.py:broken raised KeyError: 'labels' \(make\.py:31 in broken\)$"),
    ],
)
def test_unusable_task_functions_are_named(tmp_path, name, message):
    (tmp_path / "make.py").write_text(SOURCES)
    with pytest.raises(DataError, match=message):
        load_tasks(f"make.py:{name}", tmp_path, {}, "train")
