"""Score each token or each line of a response by a process reward model: a trained token classifier."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from creditflow._utils.sections import expected
from creditflow.data import Score, Step, Trajectory
from creditflow.errors import did_you_mean
from creditflow.plugins.model_rewards.alignment import PolicyTokens, token_at
from creditflow.plugins.model_rewards.models import (
    Batcher,
    Device,
    LoadedModel,
    attempt,
    by_length,
    cut_prompt,
    load_model,
    model_folder,
    padded,
    stamp,
)
from creditflow.rewards.registry import reward
from creditflow.rewards.support.arguments import check_arguments
from creditflow.rewards.values import DetailedScore, neutral_where_not_sampled

BatchSize = Annotated[int, Field(ge=1), expected("1 or more")]
OptionalLength = Annotated[Annotated[int, Field(ge=2)] | None, expected("2 or more tokens")]

REDUCE: dict[str, Callable[[Sequence[float]], float]] = {
    "min": min,
    "product": math.prod,
    "last": lambda scores: scores[-1],
    "mean": lambda scores: sum(scores) / len(scores),
}
"""Functions that combine the scores of a step's lines into one."""


@dataclass(frozen=True, slots=True)
class _ScoredInput:
    """A step as input of the model, and the positions at which the scores are read."""

    ids: list[int]
    at: list[int]
    """Scored positions in `ids`."""
    ends: list[int]
    """Character of the response up to which each score applies; rising."""
    reason: str = ""


@reward(name="process_model", timeout=600.0)
class ProcessModel:
    """The probability, by a process reward model, that each part of the response is right.

    `path`: The Hugging Face folder of a token classifier (`AutoModelForTokenClassification`, as TRL's PRMTrainer saves
    it). It reads the step's prompt and response with its own tokenizer. Models that bring their own code are refused.
    `per`: `line`: each line is followed by `separator` and scored there, as in TRL's training (blank lines are left
    out), and all tokens of the line get its score. `token`: the response is scored token by token, as it is. `step`:
    one number, the lines' scores combined by `reduce`.
    `reduce`: The function that combines the scores of a step's lines.
    `label`: Index or name of the class "right"; default: 1 of two classes. One logit is read by the sigmoid.
    `separator`: The text behind each line.
    `tokenizer`: The folder of the policy's tokenizer, if the run's policies are not connected. Its tokens and the
    model's are matched by characters: a response token gets the score that first reaches its last character. If its
    tokens do not decode to the response, the score is `failed`; `per: step` needs no match.
    `max_length`: Tokens of the model's input; default and bound: its positions. The excess is cut from the left of the
    prompt, and the score's reason reports it, as does the number `cut_prompts`; a response that does not fit by itself
    is `failed`.
    `batch_size`: Rows of one forward pass.
    `device`: The model's device.

    Range: 0 to 1; tokens that the policy did not sample get the mean of the others. Cost: a forward pass of the model
    per step. Memory: one copy of the model per folder and process. Source: Uesato et al. (arXiv 2211.14275); Lightman
    et al. (arXiv 2305.20050), who reduce by product; format of the folder: https://huggingface.co/docs/trl/prm_trainer.
    """

    inline = True
    file_arguments = ("path", "tokenizer")

    def __init__(
        self,
        path: str,
        per: Annotated[Literal["token", "line", "step"], expected("token, line or step")] = "line",
        reduce: Literal["min", "product", "last", "mean"] = "min",
        label: int | str | None = None,
        separator: Annotated[str, Field(min_length=1)] = "\n",
        tokenizer: str | None = None,
        max_length: OptionalLength = None,
        batch_size: BatchSize = 16,
        device: Device = "auto",
    ) -> None:
        check_arguments(ProcessModel.__init__, locals())
        folder = model_folder(path, "path")
        self.folder, self.label = folder, _class_index(folder, label)
        self.per, self.reduce, self.separator = per, reduce, separator
        self.max_length, self.batch_size, self.device = max_length, batch_size, device
        self._stamp = stamp(folder)
        self._tokens = PolicyTokens(None if tokenizer is None else model_folder(tokenizer, "tokenizer"))
        self._batcher: Batcher[Step, Score] = Batcher(self._score_all)
        self._loaded: LoadedModel | None = None

    def connect(self, clients: Mapping[str, Any]) -> None:
        """Set the run's policies, which decode their tokens."""
        self._tokens.connect(clients)

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """One value per response token, or one for the step."""
        return await self._batcher(step)

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The model's input, the tokens of the response, and the identity of the model."""
        return json.dumps([step.prompt, step.response, step.response_ids, step.response_mask, step.policy, self._stamp])

    def _score_all(self, steps: list[Step]) -> list[Score | Exception]:
        """A score or an error for each step; an error of one step does not affect the others."""
        model = self._loaded = self._loaded or load_model(self.folder, "token_classification", self.device)
        with model.lock:
            rows = [attempt(self._row, model, step) for step in steps]
        values = iter(self._compute(model, [row for row in rows if not isinstance(row, Exception)]))
        return [
            row if isinstance(row, Exception) else attempt(self._score, step, row, next(values))
            for step, row in zip(steps, rows, strict=True)
        ]

    def _row(self, model: LoadedModel, step: Step) -> _ScoredInput:
        response, at, ends = self._whole(model, step) if self.per == "token" else self._lines(model, step)
        if not response:
            raise ValueError("the response has nothing that could be scored: it is empty, or blank")
        prompt, keep = model.encode_prompt(step.prompt)
        limit = min(self.max_length or model.max_positions, model.max_positions)
        kept = cut_prompt(prompt, len(response), limit, keep)
        reason = f"the model saw {len(kept)} of the prompt's {len(prompt)} tokens" if len(kept) < len(prompt) else ""
        return _ScoredInput([*kept, *response], [len(kept) + position for position in at], ends, reason)

    def _whole(self, model: LoadedModel, step: Step) -> tuple[list[int], list[int], list[int]]:
        ids, ends = model.encode(step.response, written_by_a_model=True)
        return ids, list(range(len(ids))), ends

    def _lines(self, model: LoadedModel, step: Step) -> tuple[list[int], list[int], list[int]]:
        """The response's tokens line by line, the position of each line's last token, and the end of each line.

        A blank line belongs to the line before it.
        """
        separator, _ = model.encode(self.separator, written_by_a_model=False)
        ids: list[int] = []
        at: list[int] = []
        ends: list[int] = []
        end = 0
        for line in step.response.split(self.separator):
            end = min(end + len(line) + len(self.separator), len(step.response))
            tokens, _ = model.encode(line, written_by_a_model=True) if line.strip() else ([], [])
            if tokens:
                ids += [*tokens, *separator]
                at.append(len(ids) - 1)
                ends.append(end)
            elif ends:
                ends[-1] = end
        return ids, at, ends

    def _compute(self, model: LoadedModel, rows: list[_ScoredInput]) -> list[list[float]]:
        """For each row, the probability of the class "right" at each scored position."""
        import torch

        probabilities: list[list[float]] = [[]] * len(rows)
        with model.lock, torch.inference_mode():
            for batch in by_length([len(row.ids) for row in rows], self.batch_size):
                input_ids, mask = padded(model, [rows[i].ids for i in batch])
                logits = model.model(input_ids=input_ids, attention_mask=mask).logits.float()
                right = logits[..., 0].sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)[..., self.label]
                for k, i in enumerate(batch):
                    probabilities[i] = right[k, rows[i].at].tolist()
        return probabilities

    def _score(self, step: Step, row: _ScoredInput, values: Sequence[float]) -> Score:
        if not all(map(math.isfinite, values)):
            raise ValueError("the model's scores are not finite numbers")
        numbers = (("cut_prompts", float(bool(row.reason))),)
        if self.per == "step" or not step.response_ids:
            return DetailedScore(REDUCE[self.reduce](values), reason=row.reason, numbers=numbers)
        tokens = [values[token_at(row.ends, max(end - 1, 0))] for end in self._tokens.ends(step)]
        value = tuple(neutral_where_not_sampled(tokens, step.response_mask))
        return DetailedScore(value, reason=row.reason, numbers=numbers)


def _class_index(folder: Path, label: int | str | None) -> int:
    """The index of the class "right", from the folder's config.json; raises ValueError if it has no such class."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        names = {int(i): str(name) for i, name in (config.get("id2label") or {0: "LABEL_0", 1: "LABEL_1"}).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"path: {folder} has no usable config.json: {error}") from error
    classes = ", ".join(f"{i} ({name})" for i, name in sorted(names.items()))
    if label is None:
        if len(names) > 2:
            raise ValueError(f"label: the model has {len(names)} classes, say which is the right one: {classes}")
        return len(names) - 1
    index = next((i for i, name in names.items() if label in (i, name)), None)
    if index is None:
        raise ValueError(f"label: expected one of {classes}, got {label!r}{did_you_mean(label, names.values())}")
    return index
