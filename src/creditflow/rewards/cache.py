"""Cache of reward function results; the least recently used entries are evicted first.

The key covers everything that a function may read: the function's identity and version, and the whole trajectory except
ids and scores (two trajectories may differ in nothing else). A function that reads less declares it with
`RewardFunction.cache_key`.
"""

from __future__ import annotations

import hashlib
import marshal
from collections import OrderedDict
from dataclasses import replace

from creditflow.data import Step, Trajectory
from creditflow.rewards.calls import PlacedScore, Returned, RewardCall

_MARSHAL = 2
"""The last marshal version that writes equal values as equal bytes, whether or not they are the same objects."""
_OVERHEAD = 10
"""Overhead of an entry, in numbers."""
Key = tuple[str, ...]


class Cache:
    """Results of calls, by key."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Capacity in numbers, over all entries; an entry takes ten more than it holds."""
        self._values: OrderedDict[Key, tuple[PlacedScore, ...]] = OrderedDict()
        self._held = 0

    def get(self, key: Key) -> Returned | None:
        """The stored result of the call, or None."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return Returned(self._values[key])

    def put(self, key: Key, returned: Returned) -> None:
        """Store a result, and evict the oldest entries beyond the capacity."""
        self._forget(key)
        if _weight(returned.scores) > self.size:  # would evict everything, itself included
            return
        self._values[key] = returned.scores
        self._held += _weight(returned.scores)
        while self._held > self.size:
            self._forget(next(iter(self._values)))

    def _forget(self, key: Key) -> None:
        if key in self._values:
            self._held -= _weight(self._values.pop(key))


def _weight(scores: tuple[PlacedScore, ...]) -> int:
    values = (placed.score.value for placed in scores)
    return _OVERHEAD + sum(len(value) if isinstance(value, tuple) else 1 for value in values)


class Keys:
    """Computes the cache keys for the calls of one scoring; hashes each trajectory once."""

    def __init__(self) -> None:
        self._digests: dict[int, str | None] = {}

    def key_for(self, call: RewardCall) -> Key | None:
        """The key of the call; None if the call must not, or cannot, be cached."""
        function = call.function
        if not function.cache or not function.identity:
            return None
        if function.cache_key is None:
            inputs, place = self._digest(call.trajectory), "" if call.step is None else str(call.step.index)
        else:
            inputs, place = _own_key(call), ""
        if inputs is None:
            return None
        return function.identity, function.version, function.level, str(function.range), place, inputs

    def _digest(self, trajectory: Trajectory) -> str | None:
        if id(trajectory) not in self._digests:
            self._digests[id(trajectory)] = _content(trajectory)
        return self._digests[id(trajectory)]


def _own_key(call: RewardCall) -> str | None:
    assert call.function.cache_key is not None
    try:
        text = call.function.cache_key(*call.arguments)
    except Exception:  # user code; the call itself reports the error
        return None
    return None if text is None else hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _content(trajectory: Trajectory) -> str | None:
    task = trajectory.task
    infos = (task.prompt, task.ground_truth, task.extra_info, trajectory.info, [step.info for step in trajectory.steps])
    if not _is_plain(infos):
        return None
    seen = (task.data_source, infos, trajectory.answer_steps, trajectory.answer, trajectory.status)
    try:
        data = marshal.dumps((seen, [_seen(step) for step in trajectory.steps]), _MARSHAL)
    except ValueError:
        return None
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _seen(step: Step) -> tuple[object, ...]:
    without = replace(step, id="", trajectory_id="", scores={})
    return tuple(getattr(without, name) for name in Step.__slots__)


def plain_text(value: object) -> str | None:
    """A text that only equal values of plain Python types share; None for other types."""
    return repr(value) if _is_plain(value) else None


def _is_plain(value: object) -> bool:
    """Whether the value consists of plain Python types only: two different arrays may have the same repr."""
    if isinstance(value, dict):
        return type(value) is dict and all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return value is None or type(value) in (str, int, float, bool)
