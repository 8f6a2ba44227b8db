"""How reward functions, calls and values travel to another process of the same user, and back.

What goes out is pickled (functions and plays are the user's own). What comes back is JSON of numbers, lists and scores:
a worker may have touched what a model wrote, and its answer must not be able to run code here.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from creditflow.errors import RewardError, first_line
from creditflow.loading import installed_files, offer_files
from creditflow.reward.calls import Call, Returned
from creditflow.reward.registry import RewardFunction
from creditflow.reward.scores import Other
from creditflow.trajectory import Score, Trajectory

MAX_VALUES = 1_000_000
"""Numbers in one returned value; a response has fewer tokens."""
_DEPTH = 3


def pack_functions(functions: Sequence[RewardFunction]) -> bytes:
    """The functions, with the user's own files that they are in. Raises RewardError where one cannot travel.

    A function in an importable module, or in a `file.py` of a recipe, goes by name (the file's text goes with it, so
    that another machine need not have it); one typed at a prompt or made in a function, by value.
    """
    import cloudpickle

    for function in functions:
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            raise RewardError(
                f"reward function {function.name}: cannot be sent to another process ({first_line(error)}); give it "
                "what can be pickled, or call it in this process: reward.backend=inline"
            ) from error
    return bytes(cloudpickle.dumps((sys.path, installed_files(), cloudpickle.dumps(tuple(functions)))))


def unpack_functions(data: bytes) -> tuple[RewardFunction, ...]:
    """What `pack_functions` packed; imports the modules that the functions are in."""
    path, files, functions = pickle.loads(data)
    sys.path += [folder for folder in path if folder not in sys.path]
    offer_files(files)
    return tuple(pickle.loads(functions))


@dataclass(frozen=True, slots=True)
class Packed:
    """Calls that travel together; a trajectory that several of them look at travels once."""

    trajectories: list[Trajectory]
    items: list[tuple[int, int, int]]
    """Of each call: its function, its trajectory, and the step's index (-1: none)."""


def pack_calls(calls: Sequence[Call], index_of_function: dict[int, int]) -> bytes:
    """Calls for a process that holds the functions: `index_of_function` maps `id(function)` to their place there."""
    place: dict[int, int] = {}
    trajectories: list[Trajectory] = []
    items = []
    for call in calls:
        if id(call.trajectory) not in place:
            place[id(call.trajectory)] = len(trajectories)
            trajectories.append(call.trajectory)
        step = -1 if call.step is None else call.step.index
        items.append((index_of_function[id(call.function)], place[id(call.trajectory)], step))
    return pickle.dumps(Packed(trajectories, items), pickle.HIGHEST_PROTOCOL)


def unpack_calls(data: bytes, functions: Sequence[RewardFunction]) -> list[Call]:
    """What `pack_calls` packed."""
    packed: Packed = pickle.loads(data)
    calls = []
    for f, t, s in packed.items:
        trajectory = packed.trajectories[t]
        calls.append(Call(functions[f], trajectory, None if s < 0 else trajectory.steps[s]))
    return calls


def pack_returned(returned: Returned) -> str:
    """As JSON."""
    try:
        value = _encode(returned.value)
    except ValueError as error:
        return json.dumps({"error": str(error), "seconds": returned.seconds})
    return json.dumps(
        {"value": value, "error": returned.error, "seconds": returned.seconds, "timed_out": returned.timed_out}
    )


def unpack_returned(data: str | bytes) -> Returned:
    """What `pack_returned` packed."""
    fields = json.loads(data)
    return Returned(
        _decode(fields.get("value")), str(fields["error"]), float(fields["seconds"]), bool(fields.get("timed_out"))
    )


def _encode(value: Any, depth: int = 0) -> Any:
    """Numbers as they are, a list as a list, a Score as `{"score": ...}`, anything else as the name of its type."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if value is None or isinstance(value, Real):
        return _number(value)
    if isinstance(value, list | tuple) and depth < _DEPTH:
        if len(value) > MAX_VALUES:
            raise ValueError(f"expected at most {MAX_VALUES} values, got {len(value)}")
        return [_encode(one, depth + 1) for one in value]
    if isinstance(value, Other):
        return {"other": value.kind}
    if isinstance(value, Score):
        return {
            "score": {
                "value": _encode(value.value, depth + 1),
                "range": _encode(value.range, depth + 1),
                "status": str(value.status),
                "reason": str(value.reason)[:10_000],
            }
        }
    return {"other": type(value).__name__}


def _number(value: Any) -> Any:
    if value is None or (isinstance(value, int) and abs(value) < 1 << 53):  # of which True is one
        return value
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "score" not in value:
        return Other(value["other"])
    given = value["score"]
    allowed = _decode(given["range"])
    return Score(
        value=_decode(given["value"]),
        range=tuple(allowed) if isinstance(allowed, list) else allowed,
        status=given["status"],
        reason=given["reason"],
    )
