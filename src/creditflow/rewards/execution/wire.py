"""Send reward functions, calls and results to another process of the same user.

Functions and calls are pickled (functions and trajectories are the user's own). Results of a worker process come back
as JSON: it may have touched text by a model, and its answer must not be able to run code here.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from creditflow._utils.loading import USER_FILES
from creditflow.errors import CreditflowError, RewardError, first_line
from creditflow.rewards.calls import Returned, RewardCall
from creditflow.rewards.registry import RewardFunction

_RETURNED = TypeAdapter(Returned)


class TransferError(CreditflowError):
    """Calls cannot be sent, or cannot be read on arrival; the message gives the reason."""


class UnreadableAnswerError(CreditflowError):
    """An answer that is not in our format."""


def pack_functions(functions: Sequence[RewardFunction]) -> bytes:
    """Pack the functions, with the user's own files that hold them. Raises RewardError if one cannot be sent.

    A function in an importable module, or in a `file.py` of a recipe, is packed by name (together with the texts of the
    folder's files, so that another machine needs no copy); one typed at a prompt or made in a function, by value.
    """
    import cloudpickle

    functions = [replace(function, when=None) for function in functions]  # the manager selects the steps
    for function in functions:
        try:
            cloudpickle.dumps(function)
        except Exception as error:  # pickling runs the user's own code, which may raise anything
            raise RewardError(
                f"reward function {function.name}: cannot be sent to another process ({first_line(error)}); give "
                "it what can be pickled, or call it in this process: reward.backend=inline"
            ) from error
    return bytes(cloudpickle.dumps((sys.path, USER_FILES, cloudpickle.dumps(tuple(functions)))))


def unpack_functions(data: bytes, *, same_machine: bool) -> tuple[RewardFunction, ...]:
    """Unpack the functions, and import their modules from the sender's search path."""
    path, files, packed = pickle.loads(data)
    sys.path[:] = path if same_machine else [*sys.path, *(folder for folder in path if folder not in sys.path)]
    USER_FILES.update(files)
    return tuple(pickle.loads(packed))


def pack_calls(calls: Sequence[RewardCall], index_of_function: Mapping[int, int]) -> bytes:
    """Pack calls for a process that holds the functions: `index_of_function` maps `id(function)` to their index there.

    A trajectory that several calls use is sent once. Raises TransferError if a trajectory cannot be pickled.
    """
    items = [(index_of_function[id(call.function)], call.trajectory, call.step) for call in calls]
    try:
        return pickle.dumps(items, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects in `info` may raise anything
        raise TransferError(f"the trajectory cannot be sent to another process: {first_line(error)}") from error


def unpack_calls(data: bytes, functions: Sequence[RewardFunction]) -> list[RewardCall]:
    """Unpack the calls. Raises TransferError if they cannot be read here."""
    try:
        return [RewardCall(functions[i], trajectory, step) for i, trajectory, step in pickle.loads(data)]
    except Exception as error:  # as above
        raise TransferError(f"the trajectory cannot be read in another process: {first_line(error)}") from error


def pack_returned(returned: Returned) -> bytes:
    """Pack a result as JSON without line breaks."""
    return _RETURNED.dump_json(returned)


def unpack_returned(data: bytes) -> Returned:
    """Unpack a result. Raises UnreadableAnswerError for anything that `pack_returned` did not write."""
    try:
        return _RETURNED.validate_json(data)
    except ValidationError as error:
        raise UnreadableAnswerError("its answer could not be read") from error
