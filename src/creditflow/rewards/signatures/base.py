"""The call of a reward function with the keyword arguments of the library that it was written for.

Such a function scores one text: the answer of a trajectory, or the response of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from creditflow.data import Message, Score, Step, Trajectory
from creditflow.errors import RewardError, did_you_mean
from creditflow.rewards.cache import plain_text

Format = Literal["text", "messages"]
NO_ANSWER = "the workflow returned no answer"
"""The reason of the worst outcome, given without a call."""


@dataclass(frozen=True)
class Subject:
    """A text to score: a trajectory's answer, or a step's response."""

    text: str
    trajectory: Trajectory
    step: Step | None = None
    format: Format | None = None
    """The format of prompts and completions; None: the format of the data set's prompts."""

    @cached_property
    def is_text(self) -> bool:
        """Whether prompts and completions are texts, not lists of chat messages."""
        if self.format is None:
            return isinstance(self.trajectory.task.extra_info.get("prompt"), str)
        return self.format == "text"

    @property
    def prompt(self) -> str | list[Message]:
        """The task's prompt; for a step, the prompt that its agent received."""
        task = self.trajectory.task
        if self.step is not None:
            return self.step.prompt if self.is_text else [{"role": "user", "content": self.step.prompt}]
        return task.text if self.is_text else [dict(message) for message in task.prompt]

    @property
    def completion(self) -> str | list[Message]:
        """The text, as such or as one message of the role `assistant`."""
        return self.text if self.is_text else [{"role": "assistant", "content": self.text}]

    @property
    def completion_ids(self) -> list[int]:
        """The tokens of the step; of a trajectory, those of the last step that produced the answer."""
        steps = self.trajectory.steps
        if self.step is not None:
            return list(self.step.response_ids)
        at = self.trajectory.answer_steps[-1] if self.trajectory.answer_steps else -1
        return list(steps[at].response_ids) if steps else []

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of the data set: `extra_info`, `ground_truth` and `data_source`, without the prompt."""
        task = self.trajectory.task
        own = {name: value for name, value in task.extra_info.items() if name != "prompt"}
        return {"data_source": task.data_source, "ground_truth": task.ground_truth} | own


@dataclass(slots=True)
class Notes:
    """Texts and numbers that a function records beside its score, by name."""

    texts: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Signature:
    """The call of a library's reward functions."""

    name: str
    """The value of `signature` in an entry of `reward.functions`."""
    form: str
    """The parameters as a text, for error messages."""
    marks: frozenset[str]
    """Names of parameters by which a function is recognised; one is enough."""
    offer: Callable[[Subject, Notes], dict[str, Any]]
    """The keyword arguments for a text. A function receives those that it has parameters for."""
    read: Callable[[Any, Notes], Any]
    """Convert the return value of the library to one of creditflow."""
    offered: frozenset[str] | None = None
    """The names of all arguments, by which results are cached. None: every column of the data set is an argument, too,
    prompts and completions are texts or messages, and results are cached by everything about the trajectory.
    """
    objects: frozenset[str] = frozenset()
    """Names in the entry's `args` whose texts are references to objects: `file.py:name`."""


@dataclass
class SignatureCall:
    """Calls a function by its signature: `(step, trajectory)` for a step, `(trajectory)` for an outcome."""

    function: Callable[..., Any]
    signature: Signature
    args: Mapping[str, Any] = field(default_factory=dict)
    """The entry's `args`, which replace arguments of the same name."""
    format: Format | None = None
    low: float = 0.0
    """The lowest value of the range."""

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.function).parameters.values()
        self.takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.names = {parameter.name for parameter in parameters}
        self.required = [parameter.name for parameter in parameters if is_required(parameter)]

    def __call__(self, *arguments: Any) -> Any:
        subject = self._subject(*arguments)
        if subject is None:
            return Score(self.low, reason=NO_ANSWER)
        notes = Notes()
        named, missing = self._given(subject, notes)
        if missing:
            raise _missing(missing[0], subject)
        returned = self.function(**named)
        if inspect.isawaitable(returned):
            return self._awaited(returned, notes)
        return self.signature.read(returned, notes)

    def cache_key(self, *arguments: Any) -> str | None:
        """The arguments as a text; see `RewardFunction.cache_key`."""
        subject = self._subject(*arguments)
        return plain_text(None if subject is None else self._given(subject, Notes())[0])

    async def _awaited(self, returned: Any, notes: Notes) -> Any:
        return self.signature.read(await returned, notes)

    def _subject(self, *arguments: Any) -> Subject | None:
        trajectory: Trajectory = arguments[-1]
        step: Step | None = arguments[0] if len(arguments) > 1 else None
        text = trajectory.answer if step is None else step.response
        return None if text is None else Subject(text, trajectory, step, self.format)

    def _given(self, subject: Subject, notes: Notes) -> tuple[dict[str, Any], list[str]]:
        """The arguments of the call, and the names of required ones that are missing."""
        offered = self.signature.offer(subject, notes) | dict(self.args)
        named = {name: value for name, value in offered.items() if self.takes_all or name in self.names}
        return named, [name for name in self.required if name not in offered]


def _offer_answer(subject: Subject, notes: Notes) -> dict[str, Any]:
    return {"text": subject.text, "truth": subject.trajectory.task.ground_truth}


ANSWER = Signature(
    "answer", "(text, truth)", frozenset(), _offer_answer, lambda value, notes: value, frozenset({"text", "truth"})
)
"""The call of a comparison of a text with the truth, which `@answer` declares."""


def by_position(function: Callable[[str, Any], Any], *, text: str, truth: Any) -> Any:
    """Call a comparison, whose parameters may have any names."""
    return function(text, truth)


def is_required(parameter: inspect.Parameter) -> bool:
    """Whether a call must give the parameter a value."""
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def _missing(name: str, subject: Subject) -> RewardError:
    columns = sorted(map(str, subject.columns))
    return RewardError(
        f"expected a column {name!r} of the data set (extra_info), or an entry in `args`{did_you_mean(name, columns)}; "
        f"the columns are {', '.join(columns)}"
    )
