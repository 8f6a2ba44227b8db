"""What can go wrong, as one small hierarchy.

Every message names what it is about (an id, a key, a file), what was expected and what came.
"""

import difflib
import errno
from collections.abc import Iterable, Sequence
from typing import Any


class CreditflowError(Exception):
    """The base of every error that creditflow raises on purpose."""

    trajectories: Sequence[Any] = ()
    """The trajectories that it was raised for; their `info` holds the failures."""


class InputError(CreditflowError):
    """The user's input is wrong: the command line prints the message and exits with code 2."""


class ConfigError(InputError):
    """A key or value of the configuration is unknown, missing or contradictory."""


class DataError(InputError):
    """A data file is missing, malformed or empty."""


class ModelError(InputError):
    """A model folder is missing, incomplete or does not fit its tokenizer."""


class RewardError(InputError):
    """A reward function cannot be loaded, or matches nothing, so that nothing would be learned."""


class UnknownAgentError(ConfigError):
    """An option speaks of an agent that is not in the team."""


class BatchError(CreditflowError):
    """Columns that do not make a trajectory batch, or one that the options cannot be applied to."""


class EmptyBatchError(BatchError):
    """There is no step to assign credit to."""


class ShapeError(BatchError):
    """A column, or a mask, has the wrong length or type."""


class CycleError(BatchError):
    """Steps use one another's output in a circle."""


class OrderError(BatchError):
    """A parent comes after its child, or steps lie in another order than they were made."""


class NotFiniteError(BatchError):
    """NaN or infinity where a number was expected."""


class ScoreRangeError(BatchError):
    """A score outside [0, 1] after rescaling from its declared range."""


class TooManyFailedScores(CreditflowError):
    """More scores failed than `reward.max_failed_frac` allows; training on the rest would mislead."""


class AgentError(CreditflowError):
    """Raised by a workflow where the agents themselves went wrong (unparsable output, an illegal action).

    The trajectory is kept with outcome 0: were it dropped, crashing would cost an agent nothing.
    """


class PromptTooLong(CreditflowError):
    """A prompt leaves no room for a response; its trajectory ends there with status `truncated`."""


class RolloutTimedOut(CreditflowError):
    """A rollout took longer than `actor_rollout_ref.rollout.timeout_s`."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"took more than {limit_s:g} s (actor_rollout_ref.rollout.timeout_s); time in the run's sampler is left out"
        )


class EndpointError(CreditflowError):
    """A model behind an endpoint gave no usable reply, however often it was asked; the play that waited for it failed.

    `timed_out`: it did not answer in time. `prompt_too_long`: it said that it has no room for the prompt.
    """

    def __init__(self, message: str, *, timed_out: bool = False, prompt_too_long: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out
        self.prompt_too_long = prompt_too_long


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type's name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def says_disk_full(error: BaseException) -> bool:
    """Whether an error is that of a write for which there was no room."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` with the known word that is nearest, whatever its case; empty where none is near."""
    spellings = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word)[:_LONGEST_WORD].lower(), spellings, n=1)
    return f" (did you mean {spellings[close[0]]!r}?)" if close else ""


_LONGEST_WORD = 200
"""Characters of a word that are compared; the comparison takes longer than linear."""
