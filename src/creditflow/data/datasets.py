"""Reads and writes tasks: files and folders with the columns of verl, TRL or GSM8K, addresses, a user's function.

pyarrow is imported only when a Parquet file is read or written.
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from creditflow._utils.files import write_whole
from creditflow._utils.loading import is_reference, load_object
from creditflow._utils.tracebacks import located
from creditflow.data.dataset_folders import SUFFIXES, Split, parts_of_folder, saved_rows
from creditflow.data.sources import SOURCES, source_of
from creditflow.data.trajectory import Task, content_text, without_nulls
from creditflow.data.validation import shown
from creditflow.errors import CreditflowError, DataError, first_line, json_fault

_COLUMNS = ("data_source", "prompt", "reward_model", "extra_info", "question", "answer")
"""Columns that tasks are made of: verl's, and those of published GSM8K."""
_TRUTH = ("ground_truth", "solution", "answer")
"""Columns of TRL's data sets that hold the truth; the first that a row has."""
_TEXT_PARTS = ("text", "input_text", "output_text")
_SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Role names in ShareGPT files, which no chat template accepts, to standard roles."""
_CALCULATION = re.compile(r"<<([^<>]*)>>")


def load_tasks(files: str | Sequence[str] | None, base: Path, recipe: Mapping[str, Any], split: Split) -> list[Task]:
    """Load the tasks of `data.train_files` or `data.val_files`, in the order of the files.

    A file is looked up in `base` (the recipe's folder), then in the working directory. It is `.parquet` or `.jsonl`,
    with the columns of verl, of TRL, or of GSM8K as published. A folder was written by `save_to_disk`, or has
    such files. `file.py:function` is called as `function(split=..., recipe=...)`, with those of the two that it takes,
    and returns an iterable of tasks. An address, such as `reasoning-gym://family?option=value`, makes the tasks of that
    split (`sources`). Raises DataError, with the file and the line if there is one, for unusable files and tasks.
    """
    key = f"data.{split}_files"
    names = [files] if isinstance(files, str) else list(files or [])
    if not names or not all(isinstance(name, str) and name for name in names):
        addresses = ", ".join(f"{scheme}://" for scheme in SOURCES.names())
        raise DataError(
            f"{key}: expected a path, `file.py:function`, an address ({addresses}), or a list of them, got {files!r}"
        )
    tasks: list[Task] = []
    for source, run in itertools.groupby(names, partial(source_of, key=key)):
        if source is not None:
            tasks += source.load(list(run), key, split)
            continue
        for name in run:
            loaded = _call(name, base, key, recipe, split) if is_reference(name) else _read(name, base, key, split)
            if not loaded:
                raise DataError(f"{key}: {name} holds no task")
            tasks += loaded
    return tasks


def validation_files(
    train_files: str | Sequence[str] | None, val_files: str | Sequence[str] | None
) -> str | Sequence[str] | None:
    """The files of the validation tasks: `data.val_files`, or without them `data.train_files`.

    Raises DataError for an address in `data.train_files` with a `split` if `data.val_files` is not set: training and
    validation would have the same tasks.
    """
    if val_files is not None:
        return val_files
    for name in [train_files] if isinstance(train_files, str) else train_files or []:
        source = source_of(name)
        if source and (split := source.split_of(name)) not in (None, "all"):
            raise DataError(
                f"data.train_files: {name}: split: expected none, got {split!r}: data.val_files is not set, so "
                f"validation would use the same problems; remove split={split}, or set data.val_files"
            )
    return train_files


def write_tasks(tasks: Sequence[Task], out: Path | str) -> None:
    """Write tasks as Parquet with verl's columns (data_source, prompt, ability, reward_model, extra_info).

    The write is atomic: a temporary file is synced, then renamed to `out`. Raises DataError if the tasks do not fit one
    table, for example if `ground_truth` is a number in one task and a text in another, or if `out` cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = Path(out)
    rows = [
        {
            "data_source": task.data_source,
            "prompt": list(task.prompt),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task.ground_truth},
            "extra_info": task.extra_info or None,
        }
        for task in tasks
    ]
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{out}: the tasks do not fit one Parquet table: {error}") from error
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_whole(out, lambda aside: pq.write_table(table, aside, compression="zstd"))
    except OSError as error:
        raise DataError(f"{out}: cannot be written: {error.strerror or error}") from error


def _call(name: str, base: Path, key: str, recipe: Mapping[str, Any], split: Split) -> list[Task]:
    make = load_object(name, base, key)
    if not callable(make):
        raise DataError(f"{key}: expected a function, {name} is a {type(make).__name__}")
    arguments = _arguments(make, name, key, {"split": split, "recipe": dict(recipe)})
    try:
        result = make(**arguments)
        tasks = list(result) if isinstance(result, Iterable) and not isinstance(result, str | bytes | Mapping) else None
    except CreditflowError:
        raise
    except Exception as error:
        why = located(error, f"{type(error).__name__}: {first_line(error)}")
        raise DataError(f"{key}: {name} raised {why}") from error
    if tasks is None:
        raise DataError(f"{key}: expected an iterable of tasks from {name}, got a {type(result).__name__}")
    for number, task in enumerate(tasks):
        where = f"{key}: task {number} of {name}"
        _expect(task, Task, where, "a creditflow.Task")
        _expect(task.data_source, str, f"{where}: data_source", "a text")
        _expect(task.extra_info, dict, f"{where}: extra_info", "an object")
        _expect(task.prompt, (tuple, list), f"{where}: prompt", "messages")
        for part in ("prompt", "ground_truth", "extra_info"):
            _expect_json(getattr(task, part), f"{where}: {part}")
        if task.prompt:
            _messages(list(task.prompt), where)
    return tasks


def _arguments(make: Callable[..., object], name: str, key: str, offered: dict[str, object]) -> dict[str, object]:
    """Those of the `offered` keyword arguments that `make` takes. Raises DataError if it requires others."""
    signature = inspect.signature(make)
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    arguments = {word: value for word, value in offered.items() if takes_all or word in signature.parameters}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise DataError(
            f"{key}: {name}: expected a function with parameters among {', '.join(offered)}: {error}"
        ) from error
    return arguments


def _found(name: str, base: Path) -> Path | None:
    return next((path for path in (base / name, Path(name)) if path.exists()), None)


def _read(name: str, base: Path, key: str, split: Split) -> list[Task]:
    path = _found(name, base)
    if path is None:
        raise DataError(f"{key}: no file {name!r} in {base} or the working directory")
    tasks: list[Task] = []
    for part in parts_of_folder(path, split, key) if path.is_dir() else [path]:
        for where, row in _rows(part, key):
            if _is_gsm8k(row):
                tasks.append(_gsm8k_task(row, len(tasks), part, where))
            else:
                tasks.append(task_of_row(row, where, path.stem))
    return tasks


def _rows(path: Path, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and row for each row of a file or of a saved data set."""
    if path.suffix == ".jsonl":
        yield from ((f"{path}:{line}", row) for line, row in _jsonl(path))
        return
    if path.is_dir():
        rows = saved_rows(path, partial(_read_columns, where=str(path)))
    elif path.suffix == ".parquet":
        rows = _parquet(path)
    else:
        raise DataError(f"{key}: expected a {', '.join(SUFFIXES)} file or a folder, got {str(path)!r}")
    yield from ((f"{path}: row {i}", row) for i, row in enumerate(rows))


def _read_columns(names: list[str], where: str) -> list[str]:
    """The columns of a saved data set that are read: TRL's are all kept. Raises DataError for other columns."""
    if _is_trl(row := dict.fromkeys(names, True)):
        return names
    if not _is_gsm8k(row):
        _expect_columns(row, where)
    return [name for name in names if name in _COLUMNS]


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number (from 1) and object for each line that is not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip())
            except (ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
                raise DataError(f"{path}:{number}: not a line of JSON: {json_fault(error)}") from error
            _expect(row, dict, f"{path}:{number}", "a JSON object")
            yield number, row


def _parquet(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            # In batches, as Arrow cannot read more than 2 GiB of text in a nested column at once.
            for batch in file.iter_batches(batch_size=256):
                yield from batch.to_pylist()
    except (OSError, pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from error


def task_of_row(row: Mapping[str, Any], where: str, name: str) -> Task:
    """Build a task from a row with the columns of TRL or verl.

    `name`: the default of TRL's `data_source`. Raises DataError, which begins with `where`, for another row.
    """
    return _trl_task(row, where, name) if _is_trl(row) else _verl_task(row, where)


def _verl_task(row: Mapping[str, Any], where: str) -> Task:
    _expect_columns(row, where)
    reward_model, extra_info, messages = row["reward_model"], row.get("extra_info"), _messages(row["prompt"], where)
    _expect_json(reward_model, f"{where}: reward_model")
    _expect_json(extra_info, f"{where}: extra_info")
    if not isinstance(reward_model, dict) or "ground_truth" not in reward_model:
        raise DataError(f"{where}: reward_model: expected an object with ground_truth, got {str(reward_model)[:80]!r}")
    _expect(extra_info, (dict, type(None)), f"{where}: extra_info", "an object")
    return Task(
        data_source=str(row["data_source"]),
        prompt=messages,
        ground_truth=reward_model["ground_truth"],
        extra_info=dict(extra_info or {}),
    )


def _is_trl(row: Mapping[str, Any]) -> bool:
    return "prompt" in row and "reward_model" not in row


def _trl_task(row: Mapping[str, Any], where: str, name: str) -> Task:
    """Build a task from a row with TRL's columns: `prompt`, a text or messages, and any others, all in `extra_info`.

    A prompt that is a text is kept there, too: reward functions of TRL then receive texts. `name`: the default of
    `data_source`.
    """
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    extra_info = {column: value for column, value in row.items() if column != "prompt" or isinstance(value, str)}
    for column, value in extra_info.items():
        _expect_json(value, f"{where}: {column}")
    source = row.get("data_source")
    return Task(
        data_source=source if isinstance(source, str) else name,
        prompt=_messages(messages, where, "a text or a list of messages"),
        ground_truth=next((row[column] for column in _TRUTH if row.get(column) is not None), None),
        extra_info=extra_info,
    )


def _expect_columns(row: Mapping[str, Any], where: str) -> None:
    if missing := [name for name in ("data_source", "prompt", "reward_model") if row.get(name) is None]:
        raise DataError(
            f"{where}: missing {', '.join(missing)} (verl's columns), got {_keys(row)}; rename the columns (TRL's are "
            "`prompt` and any others), or make the tasks with a function (`file.py:function`)"
        )


def _messages(prompt: object, where: str, kinds: str = "a list of messages") -> tuple[dict[str, Any], ...]:
    """Return the messages of a prompt; see `_message`. Raises DataError if the last one of a user shows no text.

    Results of tools and beginnings of answers may be empty.
    """
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"{where}: prompt: expected {kinds} {{role, content}}, got {str(prompt)[:80]!r}")
    messages = tuple(_message(message, f"{where}: prompt[{i}]") for i, message in enumerate(prompt))
    texts = [message["content"] for message in messages if message["role"] == "user"] or [messages[-1]["content"]]
    if not any(letter.isprintable() and letter != " " for letter in texts[-1]):  # zero-width letters are not printable
        raise DataError(f"{where}: prompt: expected visible text in the last user message, got {texts[-1][:80]!r}")
    return messages


def _message(message: object, where: str) -> dict[str, Any]:
    """Return a prompt message without null keys, with its content as one text.

    Raises DataError for a value that is not a message, or for content other than text.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
        raise DataError(f"{where}: expected a message {{role, content}}, got {str(message)[:80]!r}")
    role, content = message["role"], message["content"]
    if role in _SHAREGPT:
        raise DataError(f"{where}.role: expected {_SHAREGPT[role]!r}, got {role!r}")
    parts = content if isinstance(content, list) else []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise DataError(f"{where}.content: expected parts {{type: text, text}}, got {str(part)[:80]!r}")
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise DataError(f"{where}.content: expected a text or a list of parts, got {str(content)[:80]!r}")
    kept = {**without_nulls(message, in_arguments=True), "content": content_text(content)}
    _expect_json(kept, where, ascii_only=False)
    return kept


def _expect(value: object, kind: type | tuple[type, ...], where: str, words: str) -> None:
    if not isinstance(value, kind):
        raise DataError(f"{where}: expected {words}, got {shown(value)}")


def _expect_json(value: object, where: str, ascii_only: bool = True) -> None:
    """Raise DataError, with the place, for a value that JSON cannot represent (a date, bytes).

    `ascii_only`: accept a lone surrogate, which is then escaped; otherwise refuse it, as no tokenizer can encode it.
    """
    try:
        json.dumps(value, ensure_ascii=ascii_only).encode()
    except (TypeError, ValueError, RecursionError):
        held = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list | tuple) else ())
        for key, part in held:
            _expect_json(part, f"{where}.{key}", ascii_only)
        kind = type(value).__name__
        raise DataError(
            f"{where}: expected what JSON can say, so that a run can record it, got a {kind}: {ascii(value)[:80]}"
        ) from None


def _is_gsm8k(row: Mapping[str, Any]) -> bool:
    return "prompt" not in row and {"question", "answer"} <= row.keys()


def _gsm8k_task(row: Mapping[str, Any], index: int, path: Path, where: str) -> Task:
    question, answer = row["question"], row["answer"]
    if not isinstance(question, str) or not isinstance(answer, str):
        raise DataError(f"{where}: expected question and answer to be text")
    _, marker, final = answer.rpartition("####")
    truth = final.strip().replace(",", "")
    if not marker or not truth:
        raise DataError(
            f"{where}: a row with question and answer is read as one of GSM8K, whose answer ends with `#### number`; "
            f"got {answer[-40:]!r}. Other tasks have a prompt in place of a question"
        )
    return Task(
        data_source="openai/gsm8k",
        prompt=_messages([{"role": "user", "content": question}], where),
        ground_truth=truth,
        extra_info={
            "index": index,
            "split": "test" if "test" in re.split(r"[^a-z]+", path.stem.lower()) else "train",
            "answer": answer,
            "calculations": _CALCULATION.findall(answer),
        },
    )


def _keys(row: Mapping[str, Any]) -> str:
    return ", ".join(str(key)[:40] for key in list(row)[:8]) or "an empty object"
