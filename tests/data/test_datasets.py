import datetime
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from creditflow.data import Task
from creditflow.data.datasets import _parquet, load_tasks, write_tasks
from creditflow.errors import ConfigError, DataError
from tests.paths import GSM8K

datasets = pytest.importorskip("datasets")

ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "How many?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"index": 3},
}


def row_of(message: dict) -> dict:
    """A row with another prompt."""
    return {**ROW, "prompt": [message]}


def load(files, base: Path, split="train", **recipe):
    return load_tasks(files, base, recipe, split)


def jsonl(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def parquet(path: Path, row: dict) -> None:
    pq.write_table(pa.Table.from_pylist([row]), path)


def test_published_gsm8k_becomes_verl_tasks():
    tasks = load(str(GSM8K), GSM8K.parent)
    assert len(tasks) == 64
    published = json.loads(GSM8K.read_text().splitlines()[1])
    assert tasks[1] == Task(
        data_source="openai/gsm8k",
        prompt=({"role": "user", "content": published["question"]},),
        ground_truth="10",
        extra_info={
            "index": 1,
            "split": "train",
            "answer": published["answer"],
            "calculations": ["12/60=0.2", "0.2*50=10"],
        },
    )


def test_published_gsm8k_answer_is_the_number_after_its_marker(tmp_path):
    (task,) = load(
        [str(jsonl(tmp_path / "test.jsonl", {"question": "q", "answer": "It is 1,080.\n#### 1,080"}))], tmp_path
    )
    assert (task.ground_truth, task.extra_info["split"], task.extra_info["calculations"]) == ("1080", "test", [])


def test_parquet_has_verls_columns_and_round_trips(tmp_path):
    tasks = load(str(GSM8K), GSM8K.parent)
    write_tasks(tasks, tmp_path / "new" / "train.parquet")
    assert load("train.parquet", tmp_path / "new") == tasks
    table = pq.read_table(tmp_path / "new" / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert table.to_pylist()[0]["reward_model"] == {"style": "rule", "ground_truth": "72"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["train.parquet"]
    bare = [Task("mine", ({"role": "user", "content": "q"},), 72)]
    write_tasks(bare, tmp_path / "bare.parquet")
    assert load("bare.parquet", tmp_path) == bare


def test_inconsistent_tasks_leave_nothing_behind(tmp_path):
    tasks = [Task("mine", ({"role": "user", "content": "q"},), truth) for truth in ("72", 72)]
    with pytest.raises(DataError, match="do not fit one Parquet table"):
        write_tasks(tasks, tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []


def test_files_with_verls_columns_are_read_in_order(tmp_path):
    jsonl(tmp_path / "b.jsonl", ROW, "")
    jsonl(tmp_path / "a.jsonl", {**ROW, "extra_info": None})
    first, second = load(["b.jsonl", "a.jsonl"], tmp_path)
    assert first == Task("mine", ({"role": "user", "content": "How many?"},), "72", {"index": 3})
    assert second.extra_info == {}


def test_file_is_looked_up_beside_the_recipe_first(tmp_path, monkeypatch):
    (tmp_path / "recipe").mkdir()
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "t.jsonl", {**ROW, "data_source": "here"})
    assert load("t.jsonl", tmp_path / "recipe")[0].data_source == "here"
    jsonl(tmp_path / "recipe" / "t.jsonl", {**ROW, "data_source": "beside"})
    assert load("t.jsonl", tmp_path / "recipe")[0].data_source == "beside"


def test_missing_task_function_is_refused(tmp_path):
    (tmp_path / "make.py").write_text("table = [1]\n")
    with pytest.raises(DataError, match=r"expected a function, make\.py:table is a list"):
        load("make.py:table", tmp_path, "val")
    with pytest.raises(ConfigError, match=r"data\.val_files"):
        load("make.py:nothing", tmp_path, "val")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"data_source": "mine", ', r"t.jsonl:2: not a line of JSON: [^:]*, column 2[34]$"),
        ("[" * 100_000, r"t.jsonl:2: not a line of JSON: maximum recursion depth"),
        ("[1, 2]", r"t.jsonl:2: expected a JSON object, got list"),
        ({"data_source": "mine"}, r"t.jsonl:2: missing prompt, reward_model .* got data_source"),
        ({**ROW, "prompt": "How many?"}, r"t.jsonl:2: prompt: expected a list of messages"),
        ({**ROW, "prompt": []}, r"t.jsonl:2: prompt: expected"),
        (row_of({"role": "user", "content": "\u200b\n"}), r"t.jsonl:2: prompt: expected visible text"),
        ({"prompt": [{"role": r, "content": c} for r, c in (("user", ""), ("assistant", "Sure"))]}, "visible text"),
        ({"question": "", "answer": "#### 72"}, r"t.jsonl:2: prompt: expected visible text"),
        ({**ROW, "prompt": [{"role": "user"}]}, r"t.jsonl:2: prompt\[0\]: expected a message"),
        (row_of({"role": "human", "content": "x"}), r"t.jsonl:2: prompt\[0\].role: expected 'user', got 'human'"),
        (row_of({"role": "user", "content": None}), r"t.jsonl:2: prompt\[0\].content: expected a text .* got 'None'"),
        (row_of({"role": "user", "content": "\ud83d"}), r"t.jsonl:2: prompt\[0\].content: expected what JSON can say"),
        (
            row_of({"role": "user", "content": [{"type": "image", "image": "x"}]}),
            r"t.jsonl:2: prompt\[0\].content: expected parts {type: text, text}, got .*image",
        ),
        ({**ROW, "reward_model": {"style": "rule"}}, r"t.jsonl:2: reward_model: expected an object with ground_truth"),
        ({"prompt": 3, "solution": "72"}, r"t.jsonl:2: prompt: expected a text or a list of messages .*, got '3'"),
        ({"prompt": ["How many?"], "solution": "72"}, r"t.jsonl:2: prompt\[0\]: expected a message"),
        ({**ROW, "extra_info": [1]}, r"t.jsonl:2: extra_info: expected an object, got list"),
        (
            {"question": "q", "answer": "no marker"},
            r"t.jsonl:2: a row with question and answer is read as one of GSM8K",
        ),
        ({"question": "q", "answer": 72}, r"t.jsonl:2: expected question and answer to be text"),
        ({}, r"t.jsonl:2: missing .* an empty object"),
    ],
)
def test_malformed_line_is_named_by_file_and_number(tmp_path, line, message):
    jsonl(tmp_path / "t.jsonl", ROW, line)
    with pytest.raises(DataError, match=message) as error:
        load("t.jsonl", tmp_path)
    assert "\n" not in str(error.value)


def test_unusable_files_are_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no more")
    (tmp_path / "t.csv").write_text("a,b\n")
    (tmp_path / "bytes.jsonl").write_bytes(json.dumps(ROW).encode() + b'\n{"data_source": "\xff\xfe"}\n')
    parquet(tmp_path / "columns.parquet", {"data_source": "a", "question": "c"})
    (tmp_path / "folder").mkdir()
    for files, message in [
        ("gone.parquet", "data.train_files: no file 'gone.parquet' in"),
        ("empty.jsonl", "data.train_files: empty.jsonl holds no task"),
        ("broken.parquet", "broken.parquet: not a readable Parquet file"),
        ("t.csv", "expected a .parquet, .jsonl file or a folder, got .*t.csv'"),
        ("folder", "data.train_files: .*folder: expected a data set of `save_to_disk`, or .* files .*, got nothing"),
        ("bytes.jsonl", r"bytes.jsonl:2"),
        ("columns.parquet", r"columns.parquet: row 0: missing prompt, reward_model"),
        (None, "data.train_files: expected a path"),
        ([], "data.train_files: expected a path"),
        ([3], "data.train_files: expected a path"),
    ]:
        with pytest.raises(DataError, match=message):
            load(files, tmp_path)


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
SPARSE = {"id": "d", "type": None, "function": {"name": "now", "arguments": {}, "strict": None}, "index": None}
TALK = [
    {"role": "system", "content": "Be brief.", "name": None},
    {"role": "user", "content": [{"type": "text", "text": "Warm"}, {"type": "text", "text": "?", "image": None}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL, SPARSE], "refusal": None},
    {"role": "tool", "content": "21 C", "tool_call_id": "c", "tool_calls": []},
    {"role": "user", "content": "And now?", "tool_calls": None},
    {"role": "tool", "content": ""},
]
BARE = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL, {"id": "d", "function": {"name": "now", "arguments": {}}}],
    },
    {"role": "tool", "content": "21 C", "tool_call_id": "c"},
    {"role": "user", "content": "And now?"},
    {"role": "tool", "content": ""},
)


def test_null_keys_are_removed_from_prompts(tmp_path):
    jsonl(tmp_path / "t.jsonl", {**ROW, "prompt": TALK})
    # Parquet gives each message the keys of all messages. A column holds either texts or parts, so use texts only.
    talk = [one if isinstance(one["content"], str | None) else {**one, "content": "Warm?"} for one in TALK]
    parquet(tmp_path / "t.parquet", {**ROW, "prompt": talk})
    assert pq.read_table(tmp_path / "t.parquet").to_pylist()[0]["prompt"][0]["tool_calls"] is None
    for name in ("t.jsonl", "t.parquet"):
        (task,) = load(name, tmp_path)
        assert task.prompt == BARE


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({**ROW, "extra_info": {"at": datetime.date(2025, 1, 1)}}, r"extra_info\.at: .* got a date"),
        ({**ROW, "extra_info": {"images": [{"bytes": b"PNG"}]}}, r"extra_info\.images\.0\.bytes: .* got a bytes"),
        ({**ROW, "reward_model": {"ground_truth": b"72"}}, r"reward_model\.ground_truth: .* got a bytes"),
        ({"prompt": "How many?", "image": b"PNG"}, r"image: .* got a bytes"),
    ],
)
def test_value_outside_json_is_named(tmp_path, row, place):
    parquet(tmp_path / "t.parquet", row)
    with pytest.raises(DataError, match=rf"t\.parquet: row 0: {place}"):
        load("t.parquet", tmp_path)


MESSAGES = [{"role": "user", "content": "How many?"}]
TRL_ROWS = {
    "text": {"prompt": "How many?", "solution": "72", "difficulty": 3},
    "messages": {"prompt": MESSAGES, "answer": "72", "tags": ["sum"]},
    "named": {"prompt": MESSAGES, "ground_truth": "72", "answer": "It is 72.", "data_source": "mine"},
    "untold": {"prompt": MESSAGES, "solution": None},
}
TRL_TASKS = {
    "text": Task("text", (MESSAGES[0],), "72", TRL_ROWS["text"]),
    "messages": Task("messages", (MESSAGES[0],), "72", {"answer": "72", "tags": ["sum"]}),
    "named": Task("mine", (MESSAGES[0],), "72", {"ground_truth": "72", "answer": "It is 72.", "data_source": "mine"}),
    "untold": Task("untold", (MESSAGES[0],), None, {"solution": None}),
}


@pytest.mark.parametrize("name", TRL_ROWS)
def test_columns_of_trl_become_tasks(tmp_path, name):
    row = TRL_ROWS[name]
    jsonl(tmp_path / f"{name}.jsonl", row)
    parquet(tmp_path / f"{name}.parquet", row)
    datasets.Dataset.from_list([row]).save_to_disk(tmp_path / name)
    for file in (f"{name}.jsonl", f"{name}.parquet", name):
        assert load(file, tmp_path) == [TRL_TASKS[name]]


@pytest.mark.slow
def test_parquet_of_more_than_2_gib_of_nested_text_is_read(tmp_path: Path) -> None:
    n, long = 2100, "x" * 2**20
    roles, contents = (pa.DictionaryArray.from_arrays(pa.array([0] * n), pa.array([text])) for text in ("user", long))
    messages = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    prompts = pa.ListArray.from_arrays(pa.array(range(n + 1), pa.int32()), messages)
    file = tmp_path / "long.parquet"
    pq.write_table(pa.table({"prompt": prompts}), file, dictionary_pagesize_limit=2**23, store_schema=False)
    assert sum(row["prompt"][0]["content"] == long for row in _parquet(file)) == n
