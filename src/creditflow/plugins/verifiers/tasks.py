"""Tasks of verifiers' tasksets, by an address: `verifiers://wordle?size=200&env.agent.max_turns=6`.

Reading an address imports the taskset's package, so it runs the code that a recipe names. Nothing is installed and
nothing is downloaded, except by that code. verifiers itself is imported only when an address is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from pydantic import ValidationError

from creditflow._utils.install import needs
from creditflow._utils.sections import json_or_text
from creditflow.data.sources import MOST_TASKS, Source, TaskSplit, digest, options_of, split_named, split_of, whole
from creditflow.data.trajectory import Message, Task
from creditflow.errors import DataError, did_you_mean, first_line

SCHEME = "verifiers://"
DEFAULT_SIZE = 500
"""Number of tasks of an endless taskset."""
READ_PER_TASK, LEAST_READ = 50, 1000
"""Tasks that are read at most for one of an endless taskset that is in the split: 50, and at least 1000 in all."""
Runtime = Literal["none", "subprocess"]
_OWN_OPTIONS = ("size", "split", "runtime")
_NAME = re.compile(r"(?:[A-Za-z0-9][A-Za-z0-9_.-]*/)?[A-Za-z][A-Za-z0-9_-]*(?:@[A-Za-z0-9_.+-]+)?")


@dataclass(frozen=True)
class VerifiersAddress:
    """A parsed address."""

    text: str
    taskset: str
    """The id of the taskset: the name of an installed package, or of a taskset in verifiers."""
    options: Mapping[str, str]
    """Values of the environment's configuration by dotted path; those of the taskset are under `taskset`."""
    size: int | None
    """Number of tasks; None: all of a finite taskset, `DEFAULT_SIZE` of an endless one."""
    split: TaskSplit | Literal["all"] | None
    """`all`: the taskset divides its tasks itself."""
    runtime: Runtime
    """The place of commands in the taskset's hooks; `subprocess` is this machine, without a sandbox."""


def parse_address(text: str, key: str) -> VerifiersAddress:
    """Parse an address. Raises DataError for a malformed one; the taskset's own options are not checked yet."""
    name, _, query = text.removeprefix(SCHEME).partition("?")
    where = f"{key}: {text}"
    if not _NAME.fullmatch(name):
        raise DataError(f"{key}: expected {SCHEME}NAME, the id of an installed taskset, got {text!r}")
    texts = options_of(query, where)
    own = {option: texts.pop(option) for option in _OWN_OPTIONS if option in texts}
    options = {
        name.removeprefix("env.") if name.startswith("env.") else f"taskset.{name}": texts[name] for name in texts
    }
    _nested(options, where)
    if len(options) < len(texts) or "taskset.id" in options:
        raise DataError(f"{where}: expected each option once (env.taskset.NAME is NAME), and no id of a taskset")
    split = own.get("split")
    runtime = own.get("runtime", "none")
    if runtime not in get_args(Runtime):
        hint = did_you_mean(runtime, get_args(Runtime))
        raise DataError(
            f"{where}: runtime: expected none, or subprocess for commands on this machine without a sandbox, "
            f"got {runtime!r}{hint}"
        )
    return VerifiersAddress(
        text=text,
        taskset=name,
        options=options,
        size=whole(own["size"], 1, f"{where}: size", MOST_TASKS) if "size" in own else None,
        split="all" if split == "all" else None if split is None else split_named(split, f"{where}: split"),
        runtime=runtime,  # type: ignore[arg-type]
    )


def verifiers_tasks(names: Sequence[str], key: str, split: TaskSplit) -> list[Task]:
    """Load the tasks of a list of addresses, one after another.

    The tasks of a taskset are split by a hash of their data without the index; with `split=all` they are not. Raises
    DataError if the taskset cannot be loaded, or has too few tasks in the split.
    """
    return [task for name in names for task in _load(parse_address(name, key), key, split)]


def environment_config(address: VerifiersAddress, key: str) -> Any:
    """The checked configuration of the environment that runs the taskset, as verifiers resolves it.

    Raises DataError if verifiers, the taskset or the environment is not installed, or an option is invalid.
    """
    return _config(address.text, key)


def task_data(task: Task, taskset: str) -> str:
    """The data of a task, as JSON. Raises DataError for a task from another source."""
    data = task.extra_info.get("data")
    if task.data_source != f"verifiers/{taskset}" or not isinstance(data, str):
        raise DataError(f"expected a task of {SCHEME}{taskset}, got one of {task.data_source!r}")
    return data


# Loading


def _load(address: VerifiersAddress, key: str, split: TaskSplit) -> list[Task]:
    config = environment_config(address, key)
    loaders = importlib.import_module("verifiers.v1")
    where = f"{key}: {address.text}"
    of_split = address.split or split
    tasks: list[Task] = []
    read = 0
    try:
        taskset = loaders.load_taskset(config.taskset)
        size = address.size or (None if taskset.bounded else DEFAULT_SIZE)
        most = None if taskset.bounded else max(LEAST_READ, READ_PER_TASK * (size or 1))
        for theirs in itertools.islice(taskset, most):
            read += 1
            task = _task(theirs, address.taskset, of_split, f"{where}: task {read - 1}")
            if task is not None:
                tasks.append(task)
            if len(tasks) == size:
                break
    except DataError:
        raise
    except Exception as error:  # the taskset's own code
        raise DataError(f"{where}: the taskset cannot make its tasks: {_why(error)}") from error
    if not tasks or (address.size is not None and len(tasks) < address.size):
        wish = f"{address.size} tasks" if address.size else "tasks"
        raise DataError(
            f"{where}: expected {wish} in split {of_split}, found {len(tasks)} of {read} in all; set a smaller size, "
            "or split=all if the taskset has its own splits"
        )
    return tasks


def _task(task: Any, taskset: str, of_split: str, where: str) -> Task | None:
    """The task in creditflow's form; None if it belongs to another split."""
    data = task.data.model_dump(mode="json", exclude_none=True)
    index = data.pop("idx", None)
    content = json.dumps(data, sort_keys=True)
    if of_split not in ("all", split_of(content)):
        return None
    answer = data.get("answer")
    return Task(
        data_source=f"verifiers/{taskset}",
        prompt=tuple(_messages(data, where)),
        ground_truth=answer if isinstance(answer, str | int | float) else None,
        extra_info={
            "index": index,
            "split": of_split,
            "problem": digest(content)[:16],
            "data": task.data.model_dump_json(),
        },
    )


def _messages(data: Mapping[str, Any], where: str) -> Iterator[Message]:
    if data.get("system_prompt"):
        yield {"role": "system", "content": data["system_prompt"]}
    prompt = data.get("prompt") or []
    if isinstance(prompt, str):
        yield {"role": "user", "content": prompt}
        return
    for message in prompt:
        content = message.get("content") or ""
        parts = content if isinstance(content, list) else []
        if any(part.get("type") != "text" for part in parts):
            raise DataError(f"{where}: a prompt with images; policies of a run read text only")
        text = "".join(part["text"] for part in parts) if isinstance(content, list) else content
        yield {"role": message["role"], "content": text}


@lru_cache(maxsize=64)
def _config(text: str, key: str) -> Any:
    address, where = parse_address(text, key), f"{key}: {text}"
    verifiers = _verifiers(key)
    values = {path: json_or_text(text) for path, text in address.options.items()}
    while True:
        fields = _nested(values, where)
        fields["taskset"] = {**fields.get("taskset", {}), "id": address.taskset}
        try:
            return verifiers.resolve_env_config(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            at = ".".join(map(str, first["loc"]))
            # A field of texts, such as one whose value reads as a number.
            texts = [path for path in values if f"{at}.".startswith(f"{path}.") and _as_text(values, address, path)]
            if not texts:
                option = at.removeprefix("taskset.") if at.startswith("taskset.") else f"env.{at}"
                raise DataError(f"{where}: {option}: {first['msg']}, got {first['input']!r:.80}") from error
        except ModuleNotFoundError as error:
            raise DataError(f"{where}: {_not_installed(address, error)}") from error
        except Exception as error:  # the code of the package, which may be no taskset
            raise DataError(f"{where}: {_why(error)}") from error


def _verifiers(key: str) -> Any:
    with needs(f"{key}: {SCHEME} (in a separate environment, see docs/how_to/verifiers.md)", "verifiers"):
        return importlib.import_module("verifiers.v1")


def _not_installed(address: VerifiersAddress, error: ModuleNotFoundError) -> str:
    """Tell a taskset that is not installed from one that lacks a package."""
    name = address.taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if error.name and error.name.split(".")[0] not in ("verifiers", name):
        return f"the taskset needs {error.name}, which is not installed"
    if " not found (tried to import " not in str(error):
        return first_line(error)
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name not in (name, f"verifiers.v1.tasksets.{name}"):
        return f"the taskset needs {cause.name}, which is not installed"
    shipped = _shipped()
    return (
        f"no taskset {address.taskset!r} is installed{did_you_mean(name, shipped)}; install its package first "
        f"(verifiers ships {', '.join(shipped)})"
    )


def _shipped() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(_path_of("verifiers.v1.tasksets")))


def _path_of(package: str) -> list[str]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or ())


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


# Options


def _nested(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nest values that have dotted paths. Raises DataError if a path is part of another one."""
    root: dict[str, Any] = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        if not last or "" in parents:
            raise DataError(f"{where}: expected options as name=value or env.path.to.name=value, got {path!r}")
        fields = root
        for name in parents:
            fields = fields.setdefault(name, {})
            if not isinstance(fields, dict):
                raise DataError(f"{where}: {path}: {name} has a value by another option")
        if last in fields:
            raise DataError(f"{where}: {path}: other options set parts of it")
        fields[last] = value
    return root


def _as_text(values: dict[str, Any], address: VerifiersAddress, path: str) -> bool:
    """Replace a value that was read as JSON by its text; False if it is the text already."""
    text = address.options[path]
    changed = values[path] is not text and values[path] != text
    values[path] = text
    return changed


SOURCE = Source(verifiers_tasks, lambda name: parse_address(name, "data.train_files").split)
