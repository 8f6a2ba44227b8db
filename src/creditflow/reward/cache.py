"""Answers a call that was made before with the same inputs: the least recently used answers are forgotten first.

The key is all that a function may look at: its version, and everything about the trajectory but ids and scores (two
plays may differ in nothing else). A function that looks at less says so (`RewardFunction.cache_key`).
"""

from __future__ import annotations

import hashlib
import marshal
from collections import OrderedDict
from dataclasses import replace

from creditflow.reward.calls import Call, Returned
from creditflow.trajectory import Step, Trajectory

_MARSHAL = 2
"""The last version that writes equal values as equal bytes, whether or not they are the same objects."""
Key = tuple[str, str, bytes]


class Cache:
    """What calls returned, by key."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: OrderedDict[Key, object] = OrderedDict()

    def get(self, key: Key) -> Returned | None:
        """What the call came back with before; None where it is not known."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return Returned(self._values[key])

    def put(self, key: Key, returned: Returned) -> None:
        """Remember its value."""
        if self.size < 1:
            return
        self._values[key] = returned.value
        self._values.move_to_end(key)
        if len(self._values) > self.size:
            self._values.popitem(last=False)


class Keys:
    """Makes the keys of one scoring's calls; each trajectory is read once."""

    def __init__(self) -> None:
        self._digests: dict[int, bytes | None] = {}

    def of(self, call: Call) -> Key | None:
        """The call's key; None where it must not, or cannot, be cached."""
        function = call.function
        if not function.cache or not function.version:
            return None
        if function.cache_key is not None:
            inputs: bytes | None = function.cache_key(*call.arguments).encode(errors="surrogatepass")
        else:
            inputs = self._digest(call.trajectory)
        if inputs is None:
            return None
        place = "" if call.step is None or function.cache_key is not None else str(call.step.index)
        return (function.version, f"{function.level} {place}", hashlib.blake2b(inputs, digest_size=16).digest())

    def _digest(self, trajectory: Trajectory) -> bytes | None:
        if id(trajectory) not in self._digests:
            self._digests[id(trajectory)] = _content(trajectory)
        return self._digests[id(trajectory)]


def _content(trajectory: Trajectory) -> bytes | None:
    task = trajectory.task
    seen = (
        (task.data_source, task.prompt, task.ground_truth, task.extra_info),
        (trajectory.answer_steps, trajectory.answer, trajectory.status, trajectory.info),
        [_seen(step) for step in trajectory.steps],
    )
    try:
        return hashlib.blake2b(marshal.dumps(seen, _MARSHAL), digest_size=16).digest()
    except ValueError:  # an object in `info` that is none of Python's plain values
        return None


def _seen(step: Step) -> tuple[object, ...]:
    plain = replace(step, id="", trajectory_id="", scores={})
    return tuple(getattr(plain, name) for name in Step.__slots__)
