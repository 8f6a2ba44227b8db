"""Tasks from the families of reasoning-gym, by an address: `reasoning-gym://chain_sum?min_terms=2&size=2000`.

The problems of a family are split by a hash of the problem: no seed, size or option puts a training problem into the
validation set. reasoning_gym is imported only when an address is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from creditflow._utils.install import needs
from creditflow.data.sources import Source, TaskSplit, digest, options_of, split_named, split_of, whole
from creditflow.data.trajectory import Task
from creditflow.errors import DataError, did_you_mean, first_line

SCHEME = "reasoning-gym://"
GymSplit = TaskSplit
DEFAULT_SIZE = 500
MIN_PATIENCE, PATIENCE_PER_PROBLEM = 1000, 4
"""Draws without a new problem after which a family counts as exhausted: 1000, or 4 per problem found."""
_CHUNK = 500
_OWN_OPTIONS = ("size", "seed", "weight", "split", "match", "level")

_PROBLEM_FIELDS = {
    "advanced_geometry": ("task_type", "A", "B", "C"),
    "basic_arithmetic": ("expression",),
    "chain_sum": ("expression",),
    "circuit_logic": ("term_strings", "assignments", "final_gate"),
    "color_cube_rotation": ("initial_state", "rotations", "target_side"),
    "complex_arithmetic": ("num1", "num2", "operation"),
    "count_bits": ("number",),
    "count_primes": ("start", "end"),
    "countdown": ("numbers", "target"),
    "decimal_chain_sum": ("expression",),
    "fraction_simplification": ("numerator", "denominator"),
    "gcd": ("numbers",),
    "intermediate_integration": ("integrand", "variable"),
    "kakurasu": ("puzzle", "row_sums", "col_sums"),
    "lcm": ("numbers",),
    "polynomial_equations": ("polynomial_expr", "variable"),
    "polynomial_multiplication": ("polynomial_expr",),
    "power_function": ("base", "exponent"),
    "prime_factorization": ("number",),
    "products": ("expression",),
    "puzzle24": ("numbers",),
    "rubiks_cube": ("cube_size", "scramble_moves"),
    "simple_equations": ("equation",),
    "simple_geometry": ("n_sides", "known_angles"),
    "simple_integration": ("integrand", "variable"),
    "sokoban": ("gamestr",),
    "survo": ("puzzle",),
    "time_intervals": ("task_type", "start_time", "end_time", "expected_format"),
    "tsumego": ("board",),
}
"""The metadata that define the problem, for families that ask one problem in several phrasings or drawings."""
_UNORDERED = frozenset({"countdown", "gcd", "lcm", "puzzle24"})
"""Families in which the order of `numbers` does not matter."""
_INPUT, _GATE = re.compile("([A-Z]+)('?)"), re.compile("[^A-Z']")
"""The parts of a term of circuit_logic, such as `A&B'`: an input with its negation, and the sign of the gate."""

_RANGE = re.compile(r"(?<=[?&])level=(?P<first>[0-9]{1,3})-(?P<last>[0-9]{1,3})(?=&|$)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class GymAddress:
    """A parsed address."""

    text: str
    family: str
    options: Mapping[str, Any]
    """Fields of the family's configuration, with those of the curriculum's level."""
    size: int
    """Number of distinct problems."""
    seed: int
    weight: float | None
    split: GymSplit | None
    match: re.Pattern[str] | None
    """Searched in the question; other problems are skipped."""
    level: int
    """The level of the family's curriculum; 0 if none is set."""


def gym_tasks(names: Sequence[str], key: str, split: GymSplit) -> list[Task]:
    """Load the tasks of a list of addresses, one after another.

    If one has a `weight`, the sum of the sizes is shared out by the weights (default 1) and the tasks are mixed evenly.
    Raises DataError for an unknown family or option, or for a family with too few problems.
    """
    families = [parse_addresses(name, key) for name in names]
    sizes, weights = [levels[0].size for levels in families], [levels[0].weight for levels in families]
    weighted = any(weight is not None for weight in weights)
    if weighted:
        sizes = _shared_out(sum(sizes), [1.0 if weight is None else weight for weight in weights])
    parts = [
        _load(address, share, key, split)
        for levels, size in zip(families, sizes, strict=True)
        for address, share in zip(levels, _shared_out(size, [1.0] * len(levels)), strict=True)
    ]
    return _interleaved(parts) if weighted else [task for part in parts for task in part]


def gym_entry(task: Task) -> dict[str, Any]:
    """Restore the entry (question, answer, metadata) of a task as its family made it.

    Raises DataError for a task from another source.
    """
    text = task.extra_info.get("entry")
    if not task.data_source.startswith("reasoning-gym/") or not isinstance(text, str):
        raise DataError(f"expected a task of a {SCHEME} address, got one of {task.data_source!r}")
    entry: dict[str, Any] = _restored(json.loads(text))
    return entry


def gym_data_set(task: Task) -> Any:
    """The data set that made the task, for its `score_answer`."""
    info = task.extra_info
    return _data_set(info["family"], info["options"], 0)


def problem_of(family: str, entry: Mapping[str, Any]) -> str:
    """A canonical text of the entry's problem, equal for two phrasings of one problem."""
    metadata = entry["metadata"]
    names = _PROBLEM_FIELDS.get(family, ())
    if not names or not all(name in metadata for name in names):
        return f"{family}: {' '.join(entry['question'].split())}"
    values: list[Any] = [
        sorted(metadata[name]) if name == "numbers" and family in _UNORDERED else metadata[name] for name in names
    ]
    if family == "circuit_logic":
        values = _circuit(*values)
    return f"{family}: {''.join(json.dumps(values, default=str).split())}"


def _circuit(terms: Sequence[str], inputs: Mapping[str, int], last: str) -> list[Any]:
    """The gates of a circuit with the values at their inputs, and the last gate.

    Names of inputs, wires from one input to several gates, negations, and the order of the gates are left out.
    """
    gates = [
        ["".join(_GATE.findall(term)[:1]), *(inputs[name] ^ bool(negated) for name, negated in _INPUT.findall(term))]
        for term in terms
    ]
    return [sorted(gates), last]


def parse_addresses(text: str, key: str) -> list[GymAddress]:
    """Parse an address; with a range of levels (`level=0-3`) one address for each level, which share its size.

    Raises DataError, as `parse_address` does, and for a range that descends.
    """
    if (match := _RANGE.search(text)) is None:
        return [parse_address(text, key)]
    first, last = int(match["first"]), int(match["last"])
    if first > last:
        raise DataError(f"{key}: {text}: level: expected an ascending range, got {first}-{last}")
    return [parse_address(_RANGE.sub(f"level={level}", text), key) for level in range(first, last + 1)]


def parse_address(text: str, key: str) -> GymAddress:
    """Parse and check an address of one level. Raises DataError, with the nearest name for an unknown one."""
    factory, where = _factory(key), f"{key}: {text}"
    family, _, query = text.removeprefix(SCHEME).partition("?")
    families = sorted(set(factory.DATASETS) - {"composite"})
    if family not in families:
        hint = "; list several addresses instead" if family == "composite" else did_you_mean(family, families)
        raise DataError(f"{key}: expected a family of reasoning-gym, got {family!r}{hint}")
    texts = options_of(query, where)
    own = {name: texts.pop(name) for name in _OWN_OPTIONS if name in texts}
    levels = {name.removeprefix("level."): texts.pop(name) for name in list(texts) if name.startswith("level.")}
    hints = get_type_hints(factory.DATASETS[family][1])
    fields = [field.name for field in dataclasses.fields(factory.DATASETS[family][1]) if field.name not in own]
    fields = [name for name in fields if name not in _OWN_OPTIONS]
    for name in texts:
        if name not in fields:
            names = [*_OWN_OPTIONS, *fields]
            raise DataError(
                f"{where}: unknown option {name!r}{did_you_mean(name, names)}; {family} has {', '.join(names)}"
            )
    options = _options_of_level(factory, family, own.get("level"), levels, where)
    options |= {name: _value(value, hints[name], f"{where}: {name}") for name, value in texts.items()}
    address = GymAddress(
        text=text,
        family=family,
        options=options,
        size=whole(own.get("size", str(DEFAULT_SIZE)), 1, f"{where}: size"),
        seed=whole(own.get("seed", "0"), 0, f"{where}: seed"),
        weight=_weight(own["weight"], f"{where}: weight") if "weight" in own else None,
        split=split_named(own["split"], f"{where}: split") if "split" in own else None,
        match=_pattern(own["match"], f"{where}: match") if "match" in own else None,
        level=int(own.get("level", "0")),
    )
    try:
        _data_set(family, _plain_text(options), 0)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"{where}: {first_line(error)}") from error
    return address


# Loading


def _factory(key: str) -> Any:
    with needs(f"{key}: {SCHEME}", "gym"), warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # one of its dependencies compares texts with `is`
        return importlib.import_module("reasoning_gym.factory")


@lru_cache(maxsize=64)
def _data_set(family: str, options: str, seed: int) -> Any:
    return _factory(SCHEME).create_dataset(family, seed=seed, size=_CHUNK, **_restored(json.loads(options)))


def _load(address: GymAddress, size: int, key: str, split: GymSplit) -> list[Task]:
    options = _plain_text(address.options)
    of_split = address.split or split
    tasks: dict[str, Task] = {}
    seen: set[str] = set()
    idle = 0
    for entry in _entries(address, options, key):
        problem = problem_of(address.family, entry)
        idle += 1
        if problem not in seen:
            seen.add(problem)
            idle = 0
            if split_of(problem) == of_split and (address.match is None or address.match.search(entry["question"])):
                tasks[problem] = _task(address, options, entry, problem, len(tasks), of_split)
        if len(tasks) == size:
            return list(tasks.values())
        if idle >= max(MIN_PATIENCE, PATIENCE_PER_PROBLEM * len(seen)):
            break
    raise DataError(
        f"{key}: {address.text}: expected {size} distinct problems in split {of_split}, found {len(tasks)} (of "
        f"{len(seen)} in all splits); set size={max(len(tasks), 1)} or less, or widen the options"
    )


def _entries(address: GymAddress, options: str, key: str) -> Iterator[dict[str, Any]]:
    """Draw entries without end; a larger size continues the sequence of a smaller one."""
    for chunk in range(2**31):
        seed = int(digest(f"{address.family} {address.seed} {chunk}")[:8], 16)
        data_set = _data_set(address.family, options, seed)
        for index in range(_CHUNK):
            try:
                entry: dict[str, Any] = data_set[index]
            except IndexError:  # the family has no further problem for this seed
                if index == 0:
                    return
                break
            except Exception as error:
                why = f"{type(error).__name__}: {first_line(error)}"
                raise DataError(f"{key}: {address.text}: the family cannot make a problem: {why}") from error
            yield entry


def _task(
    address: GymAddress, options: str, entry: Mapping[str, Any], problem: str, index: int, split: GymSplit
) -> Task:
    answer = entry["answer"]
    return Task(
        data_source=f"reasoning-gym/{address.family}",
        prompt=({"role": "user", "content": str(entry["question"])},),
        ground_truth=None if answer is None else str(answer),
        extra_info={
            "index": index,
            "split": split,
            "family": address.family,
            "level": address.level,
            "options": options,
            "problem": digest(problem)[:16],
            "entry": _plain_text(entry),
        },
    )


def _interleaved(parts: Sequence[Sequence[Task]]) -> list[Task]:
    """Mix lists of tasks evenly, so that a prefix has the shares of the whole."""
    placed = [((i + 0.5) / len(part), n, task) for n, part in enumerate(parts) for i, task in enumerate(part)]
    return [task for _, _, task in sorted(placed, key=lambda place: place[:2])]


def _shared_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole shares of `total`, by largest remainder; at least 1 each."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    return [max(share, 1) for share in shares]


# Options


def _options_of_level(
    factory: Any, family: str, level: str | None, levels: Mapping[str, str], where: str
) -> dict[str, Any]:
    """The configuration fields of a curriculum at `level`, with the levels of single attributes on top."""
    if level is None and not levels:
        return {}
    if family not in factory.CURRICULA:
        raise DataError(f"{where}: level: {family} has no curriculum; set its options instead")
    curriculum = factory.CURRICULA[family]()
    attributes = curriculum.attributes
    highest = max(len(attribute.levels) for attribute in attributes.values()) - 1
    if level is not None:
        number = whole(level, 0, f"{where}: level")
        if number > highest:
            raise DataError(f"{where}: level: expected at most {highest}, got {number}")
        curriculum.set_global_level(number)
    for name, value in levels.items():
        if name not in attributes:
            known_levels = ", ".join(attributes)
            raise DataError(
                f"{where}: unknown level of {name!r}{did_you_mean(name, attributes)}; {family} has {known_levels}"
            )
        number, most = whole(value, 0, f"{where}: level.{name}"), len(attributes[name].levels) - 1
        if number > most:
            raise DataError(f"{where}: level.{name}: expected at most {most}, got {number}")
        curriculum.set_attr_level(name, number)
    config = curriculum.generate_configuration()
    names = ("field_name", "lower_field_name", "upper_field_name")
    fields = [getattr(a, name) for a in attributes.values() for name in names if hasattr(a, name)]
    return {field: getattr(config, field) for field in fields}


def _value(text: str, hint: Any, where: str) -> Any:
    """A query value as the type of the configuration's field: JSON, or plain text."""
    adapter: TypeAdapter[Any] = TypeAdapter(hint)
    candidates: list[Any] = [text]
    with contextlib.suppress(ValueError):
        candidates.insert(0, json.loads(text))
    for candidate in candidates:
        try:
            return adapter.validate_python(candidate)
        except ValidationError:
            continue
    raise DataError(f"{where}: expected {str(hint).removeprefix('typing.')}, got {text!r}")


def _weight(text: str, where: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise DataError(f"{where}: expected a number above 0, got {text!r}")
    return weight


def _pattern(text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise DataError(f"{where}: {text!r} is not a regular expression: {error}") from error


# JSON that keeps tuples, sets, fractions and keys other than texts, which the scorers of some families need


def _plain_text(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=True)


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value  # numpy's
    if isinstance(value, tuple):
        return {"(tuple)": [_plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"(set)": sorted((_plain(item) for item in value), key=json.dumps)}
    if isinstance(value, Fraction):
        return {"(fraction)": str(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        pairs = [(_plain(key), _plain(item)) for key, item in value.items()]
        simple = all(type(key) is str and not key.startswith("(") for key, _ in pairs)
        return dict(pairs) if simple else {"(pairs)": pairs}
    return str(value) if isinstance(value, str) else value


_KINDS: Mapping[str, Callable[[Any], Any]] = {"(tuple)": tuple, "(set)": set, "(pairs)": dict, "(fraction)": Fraction}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, items),) = value.items()
        if kind in _KINDS:
            return _KINDS[kind](_restored(items))
    return {key: _restored(item) for key, item in value.items()}


SOURCE = Source(gym_tasks, lambda name: parse_addresses(name, "data.train_files")[0].split)
