"""The data types of one rollout: Task, Score, Step and Trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np

from creditflow.errors import ScoreRangeError

# Arrays by their class: from NumPy 2.5 on, `NDArray` hides it behind an alias on Python 3.12 and later.
Floats = np.ndarray[tuple[Any, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[Any, ...], np.dtype[np.int64]]
Bools = np.ndarray[tuple[Any, ...], np.dtype[np.bool_]]
TokenIds = np.ndarray[tuple[Any, ...], np.dtype[np.int32]]
Message = dict[str, Any]
"""One chat message: `{"role": ..., "content": ...}`."""

ScoreStatus = Literal["ok", "failed", "timeout"]
TrajectoryStatus = Literal["ok", "failed", "truncated"]
TRAJECTORY_STATUSES: tuple[TrajectoryStatus, ...] = ("ok", "failed", "truncated")

NOT_MATCHED, OK, FAILED, TIMEOUT = 0, 1, 2, 3
"""Codes of `TrajectoryBatch.score_status`. NOT_MATCHED: the function did not match the step."""
RIGHT = 1.0 - 1e-9
"""The lowest rescaled score in [0, 1] at which a step or an answer counts as right."""
RANGE_TOLERANCE = 1e-6
"""Tolerance for rounding, as a share of a range's width: a value this far beyond a bound counts as the bound."""
CODE_OF_STATUS: dict[ScoreStatus, int] = {"ok": OK, "failed": FAILED, "timeout": TIMEOUT}
_DEPTH = 64
"""The deepest nesting of a message that is read; templates recurse over it."""
_CALL_LEVELS = 2
"""Nested objects: a call, and its function. Deeper objects are arguments."""


def content_text(content: object) -> str:
    """Return the text of a message's content: a text, null, or OpenAI's list of parts, of which text parts count."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)


def without_nulls(message: Message, *, in_arguments: bool = False) -> Message:
    """Return `message` without null keys and without an empty list of tool calls; `content` may be null.

    Chat templates test whether a key is present. OpenAI's client writes every key of its types (`model_dump()`), and
    Parquet every key that any row has. `in_arguments`: also remove nulls from the calls' arguments, for messages from
    Parquet; elsewhere nulls in arguments are values.
    """
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    depth = _DEPTH if in_arguments else _CALL_LEVELS
    for key in ("tool_calls", "function_call", "content"):
        if isinstance(kept.get(key), list | tuple | Mapping):
            kept[key] = _bare(kept[key], depth)
    if kept.get("tool_calls") in ([], ()):
        del kept["tool_calls"]
    return kept


def _bare(value: Any, depth: int) -> Any:
    """Return `value` without null keys, down to `depth` levels of objects."""
    if isinstance(value, list | tuple):
        return [_bare(inner, depth) for inner in value]
    if isinstance(value, Mapping) and depth > 0:
        return {key: _bare(inner, depth - 1) for key, inner in value.items() if inner is not None}
    return value


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set, with verl's columns."""

    data_source: str
    prompt: tuple[Message, ...]
    """Chat messages; `text` is the content of the last one, the only one that most workflows need."""
    ground_truth: Any
    """verl's `reward_model.ground_truth`, any JSON value."""
    extra_info: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The content of the last message; empty for an empty prompt."""
        return content_text(self.prompt[-1]["content"]) if self.prompt else ""


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward function for one step, or of the outcome function for one trajectory."""

    value: float | tuple[float, ...]
    """One number, or one per response token. Meaningless unless `status` is ok."""
    range: tuple[float, float] = (0.0, 1.0)
    """Range of the function's values; gates and credit use the value rescaled from it to [0, 1]."""
    weight: float = 1.0
    """Weight in the step's weighted mean. 0: measured and reported, but never part of credit."""
    status: ScoreStatus = "ok"
    reason: str = ""
    seconds: float = 0.0
    version: str = ""
    """A hash of the function's source and arguments."""

    @property
    def rescaled(self) -> float:
        """The (mean) value, rescaled from `range` to [0, 1]; NaN if the scoring failed."""
        return self.rescaled_over(())

    def rescaled_over(self, response_mask: Sequence[int]) -> float:
        """Like `rescaled`, but the mean of token values covers only the tokens that the policy sampled, if any."""
        if self.status != "ok":
            return float("nan")
        value = self.value
        low, high = self.range
        if isinstance(value, tuple):
            if len(value) == len(response_mask) and any(response_mask):
                value = tuple(v for v, sampled in zip(value, response_mask, strict=True) if sampled)
            if value and not low <= min(value) <= max(value) <= high:
                value = tuple(clip_rounding(float(v), low, high) for v in value)
            value = float(np.mean(value))
        return (clip_rounding(float(value), low, high) - low) / (high - low)


def clip_rounding(value: float, low: float, high: float) -> float:
    """`value`, moved to the bound if it is beyond it only by rounding (`RANGE_TOLERANCE`)."""
    if low <= value <= high:
        return value
    slack = RANGE_TOLERANCE * (high - low)
    if low - slack <= value <= high + slack:
        return low if value < low else high
    return value


def outcome_value(outcome: Score | None) -> float:
    """The value of an outcome, clipped if it is outside its range by rounding alone; NaN for none or a failed one."""
    if outcome is None or outcome.status != "ok":
        return float("nan")
    return clip_rounding(cast(float, outcome.value), *outcome.range)


def into_range(value: float, allowed: tuple[float, float]) -> float:
    """`value`, clipped to a bound if it is beyond it only by rounding.

    Raises ScoreRangeError for a value further out and for NaN; the message has all digits.
    """
    low, high = allowed
    clipped = clip_rounding(value, low, high)
    if not low <= clipped <= high:
        raise ScoreRangeError(f"expected a value in [{all_digits(low)}, {all_digits(high)}], got {all_digits(value)}")
    return clipped


def all_digits(number: float) -> str:
    """The shortest decimal text that reads back as the same float64; whole numbers without `.0`."""
    return repr(float(number)).removesuffix(".0")


@dataclass(slots=True)
class Step:
    """One call of one agent: a prompt, a response, and later its scores."""

    id: str
    trajectory_id: str
    index: int
    """Position in the trajectory, from 0."""
    agent: str
    turn: int
    """Number of earlier steps of this agent in this trajectory."""
    parents: tuple[int, ...]
    """Indices of the steps whose responses this prompt used; each smaller than `index`."""
    prompt: str
    response: str
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[int, ...] = ()
    """1 where the policy sampled the token, 0 where a tool or the environment wrote it."""
    logprobs: tuple[float, ...] = ()
    """Natural log-probability of each response token when it was sampled; 0 where the mask is 0."""
    temperature: float = 1.0
    """Sampling temperature, at which `logprobs` hold. 0: greedy decoding; no token counts as sampled (mask 0)."""
    policy: str = "default"
    policy_version: int = 0
    """Number of updates of the policy before it sampled this response, or the first token of it."""
    version_spans: tuple[tuple[int, int], ...] = ()
    """For a response that several versions of the policy sampled: `(first token, policy version)` of each span of
    tokens, in order, the first one from token 0. Empty: `policy_version` sampled all of it."""
    scores: dict[str, Score] = field(default_factory=dict)
    stratum: str | None = None
    """A label, computed from the prompt alone, that splits groups (`algorithm.strata`)."""
    info: dict[str, Any] = field(default_factory=dict)
    ref_logprobs: tuple[float, ...] = ()
    """Natural log-probability of each response token under the policy's frozen reference, whatever its mask; at the
    temperature of `logprobs` (at 1 if that is 0). Empty if the engine provides none."""


@dataclass(slots=True)
class Trajectory:
    """The record of one rollout. The trajectories of a task share `uid` and form its group."""

    id: str
    uid: str
    task: Task
    steps: list[Step] = field(default_factory=list)
    answer_steps: tuple[int, ...] = ()
    """Indices of the steps that produced the answer; the last step if the workflow named none."""
    answer: str | None = None
    """The workflow's return value."""
    outcome: Score | None = None
    """The global reward; None before scoring, or without an outcome function."""
    outcomes: dict[str, Score] = field(default_factory=dict)
    """Outcomes of single agents, by agent, for teams that compete; the other agents have the common `outcome`."""
    status: TrajectoryStatus = "ok"
    info: dict[str, Any] = field(default_factory=dict)
