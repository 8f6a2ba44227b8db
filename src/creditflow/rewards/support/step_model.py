"""The base of reward functions that score steps with a model: concurrent steps are computed together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from creditflow.data import Score, Step, Trajectory
from creditflow.errors import CreditflowError
from creditflow.rewards.support.alignment import PolicyTokens
from creditflow.rewards.support.models import Batcher, LoadedModel, cut_prompt, model_folder, stamp

Row = TypeVar("Row")
Result = TypeVar("Result")


class CountedShare:
    """A share that several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._part = self._whole = 0

    def add(self, part: int, whole: int) -> None:
        """Count `part` of `whole` more things."""
        with self._lock:
            self._part += part
            self._whole += whole

    def take(self) -> float:
        """The share since the previous call; 0 if nothing was counted."""
        with self._lock:
            share = self._part / self._whole if self._whole else 0.0
            self._part = self._whole = 0
        return share


class StepModel(Generic[Row]):
    """Base class of a function with one or more models; subclasses implement `_load`, `_row`, `_compute`, `_score`.

    `tokenizer`: a folder with the policy's tokenizer, for use without a connected policy. `max_length`, `batch_size`
    and `device`: as for `process_model`.
    """

    inline = True
    file_arguments = ("path", "reference", "tokenizer")

    def __init__(
        self, folders: Sequence[Path], tokenizer: str | None, max_length: int | None, batch_size: int, device: str
    ) -> None:
        self.folders = folders
        self.max_length, self.batch_size, self.device = max_length, batch_size, device
        self._stamp = " ".join(map(stamp, folders))
        self._tokens = PolicyTokens(None if tokenizer is None else model_folder(tokenizer, "tokenizer"))
        self._batcher: Batcher[Step, Score | Exception] = Batcher(self._score_all)
        self._models: list[LoadedModel] = []

    def connect(self, clients: Mapping[str, Any]) -> None:
        """Set the run's policies, which decode their tokens."""
        self._tokens.connect(clients)

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """One value per response token, or one for the step."""
        scored = await self._batcher(step)
        if isinstance(scored, Exception):
            raise scored
        return scored

    def _score_all(self, steps: list[Step]) -> list[Score | Exception]:
        """A score or an error for each step; an error of one step does not affect the others."""
        self._models = self._models or self._load()
        with self._models[0].lock:
            rows = [_attempt(self._row, step) for step in steps]
        values = iter(self._compute([row for row in rows if not isinstance(row, Exception)]))
        return [
            row if isinstance(row, Exception) else _attempt(self._score, step, row, next(values))
            for step, row in zip(steps, rows, strict=True)
        ]

    def _cut(self, prompt: list[int], n_response: int, keep: int) -> tuple[list[int], str]:
        """The prompt, cut so that the response fits into every model (see `cut_prompt`), and a note if it was cut."""
        limits = [model.max_positions for model in self._models]
        kept = cut_prompt(prompt, n_response, min(self.max_length or limits[0], *limits), keep)
        return kept, "" if len(kept) == len(prompt) else f"saw {len(kept)} of the prompt's {len(prompt)} tokens"

    def _load(self) -> list[LoadedModel]:
        """Load the models."""
        raise NotImplementedError

    def _row(self, step: Step) -> Row:
        """The models' input for a step. Raises ValueError or CreditflowError if the step cannot be scored."""
        raise NotImplementedError

    def _compute(self, rows: list[Row]) -> list[list[float]]:
        """The values of each row."""
        raise NotImplementedError

    def _score(self, step: Step, row: Row, values: Sequence[float]) -> Score:
        """The score of a step. Raises ValueError or CreditflowError if the values do not fit it."""
        raise NotImplementedError


def _attempt(make: Callable[..., Result], *arguments: Any) -> Result | Exception:
    try:
        return make(*arguments)
    except (ValueError, CreditflowError) as error:
        return error
