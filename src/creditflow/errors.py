"""The exceptions of creditflow.

Every message names its subject (an id, a key, a file), the expected value and the actual one.
"""

import difflib
import errno
import json
from collections.abc import Iterable, Sequence
from typing import Any
from unicodedata import category


class CreditflowError(Exception):
    """Base class of the errors that creditflow raises."""

    trajectories: Sequence[Any] = ()
    """The trajectories concerned; their `info` holds the failures."""


class InputError(CreditflowError):
    """The user's input is wrong: the command line prints the message and exits with code 2."""


class ConfigError(InputError):
    """A key or value of the configuration is unknown, missing or contradictory."""


class MissingAttributeError(ConfigError, AttributeError):
    """A name of a module needs a package that is not installed."""


class DataError(InputError):
    """A data file is missing, malformed or empty."""


class ModelError(InputError):
    """A model folder is missing, incomplete or does not fit its tokenizer."""


class RewardError(InputError):
    """A reward function cannot be loaded, or matches no step, so that training would have no signal."""


class UnknownAgentError(ConfigError):
    """An option names an agent that is not in the team."""


class UnknownIdError(InputError):
    """The run has no such training step, or the training step no such trajectory or step."""


class BatchError(CreditflowError):
    """The columns do not form a valid trajectory batch, or the options do not apply to it."""


class EmptyBatchError(BatchError):
    """The batch has no steps to assign credit to."""


class ShapeError(BatchError):
    """A column or a mask has the wrong length or type."""


class OrderError(BatchError):
    """A parent comes after its child, or steps are not in the order in which they were made."""


class NotFiniteError(BatchError):
    """A value is NaN or infinite where a finite number is expected."""


class ScoreRangeError(BatchError):
    """A score lies outside its declared range (outside [0, 1] after rescaling), or the range is invalid."""


class TooManyFailedScores(CreditflowError):
    """More scores failed than `reward.max_failed_frac` allows; training on the rest would be misleading."""


class AgentError(CreditflowError):
    """Raised by a workflow for an agent's mistake (unparsable output, an illegal action).

    The trajectory is kept with outcome 0. If it were dropped, an agent could crash without cost.
    """


class PromptTooLong(CreditflowError):
    """A prompt leaves no room for a response; its trajectory ends with status `truncated`."""


class RolloutTimedOut(CreditflowError):
    """A rollout took longer than `actor_rollout_ref.rollout.timeout_s`."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"took more than {limit_s:g} s (actor_rollout_ref.rollout.timeout_s); time in the run's sampler is left out"
        )


class EndpointError(CreditflowError):
    """A model behind an endpoint gave no usable reply after all retries; the rollout that waited for it failed.

    `timed_out`: the endpoint did not reply in time. `prompt_too_long`: it rejected the prompt as too long.
    """

    def __init__(self, message: str, *, timed_out: bool = False, prompt_too_long: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.prompt_too_long = prompt_too_long


USER_MODULE = "creditflow_user_"
"""Prefix of the names of modules that are files beside a recipe."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """A text for a terminal: control characters other than tabs and newlines are spelled out, as are surrogates."""
    kept = (c in "\t\n" or category(c) not in ("Cc", "Cs") for c in text)
    return "".join(c if keep else c.encode("unicode_escape").decode() for c, keep in zip(text, kept, strict=True))


def json_fault(error: BaseException) -> str:
    """The message of a parser of JSON with the column alone, for a message that names the row."""
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)


def says_disk_full(error: BaseException) -> bool:
    """Whether an error comes from a write to a full disk (or beyond a quota)."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the nearest known word, ignoring case; empty if none is close."""
    spellings = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word)[:_LONGEST_WORD].lower(), spellings, n=1)
    return f" (did you mean {spellings[close[0]]!r}?)" if close else ""


_LONGEST_WORD = 200
"""Number of characters of a word that are compared; the time of the comparison is superlinear."""
