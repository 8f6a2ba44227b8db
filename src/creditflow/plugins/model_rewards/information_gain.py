"""Score a step by how much its response changes the ground truth's log-probability under a frozen model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from creditflow.data import Floats, Score, Step, Trajectory
from creditflow.plugins.model_rewards.models import (
    MAX_BATCH_TOKENS,
    Batcher,
    Device,
    LoadedModel,
    attempt,
    cut_prompt,
    load_model,
    model_folder,
)
from creditflow.rewards.registry import reward
from creditflow.rewards.support.arguments import Limit, OptionalName, check_arguments
from creditflow.rewards.support.text import truths_of
from creditflow.rewards.values import DetailedScore

Row = tuple[tuple[int, ...], tuple[int, ...]]
"""The tokens of a context and those of the truth after it."""


class _Pair(NamedTuple):
    """The truth without and with the response before it."""

    before: Row
    after: Row
    cut: str
    """How many of the tokens the model saw; empty if it saw all."""


@reward(name="information_gain", timeout=600.0)
class InformationGain:
    """The gain in the ground truth's log-probability by the step's response, under a frozen model.

    With y the n tokens of the truth, and each text tokenized on its own,
    gain = (log p(y | prompt + response + cue) - log p(y | prompt + cue)) / n, in nats per token, at temperature 1.
    The prompt is the step's own, so a step is judged by what its agent saw. The mean per token makes truths of
    different lengths comparable.

    `policy`: The policy of the run whose initial weights are the frozen model. All steps are scored with this one model
    and its tokenizer.
    `path`: A Hugging Face folder instead.
    `cue`: The text between response and truth.
    `limit`: Gains are clipped to it; the number `clipped` is 1 for a clipped one. No gain is the middle of the range:
    0.5 after rescaling to [0, 1].
    `device`: The model's device.

    The truth is a text or a number, as `str` writes it; of a list, its first entry. A task without one, or with another
    type, is `failed`. Special tokens spelled out in response, cue or truth are read as text. Prompt and response beyond
    the model's positions are cut from the left, for each term alone; the score's reason and the number `cut` report it.
    The gain of an empty response is 0.

    Limits: the frozen model must be able to use a good response. If it cannot answer from prompt and response, the gain
    is noise. A response that lists many answers may gain by luck. Use it beside an outcome.

    Range: -`limit` to `limit`. Cost: a forward pass over prompt and response and two over the truth; steps of a batch
    share the beginnings of their prompts. Memory: a copy of the model per process. Source: TRACE (arXiv 2607.13988) for
    the difference of log-probabilities under a frozen reference; the mean per token is as in IGPO (arXiv 2510.14967),
    which takes probabilities of the trained policy instead. The contexts by agent and the clipping are this project's.
    """

    inline = True
    file_arguments = ("path",)

    def __init__(
        self,
        policy: str = "default",
        path: OptionalName = None,
        cue: str = "\nAnswer: ",
        limit: Limit = 2.0,
        device: Device = "auto",
    ) -> None:
        check_arguments(InformationGain.__init__, locals())
        self.policy, self.cue, self.limit, self.device = policy, cue, float(limit), device
        self.is_of_run, self.folder = path is None, None if path is None else model_folder(path, "path")
        self.range = (-self.limit, self.limit)
        self._batcher: Batcher[tuple[Step, str], Score] = Batcher(self._score_all)
        self._model: tuple[LoadedModel, Any] | None = None
        """The model and its `Forward`, loaded at the first call."""

    def connect(self, clients: Mapping[str, Any]) -> None:
        """Find the folder that the named policy was loaded from, unless there is a `path`.

        Raises ValueError if the run has no such policy, or if it has no folder.
        """
        if self.is_of_run:
            if self.policy not in clients:
                known = ", ".join(clients) or "the run hands over none"
                raise ValueError(f"policy: expected one of {known}, got {self.policy!r}; or name a folder in `path`")
            self.folder = model_folder(clients[self.policy].tokenizer.name_or_path, "policy")
            self._model = None

    async def __call__(self, step: Step, trajectory: Trajectory) -> Score:
        """The clipped gain; its reason gives both log-probabilities."""
        truth = truths_of(trajectory.task.ground_truth)[0]
        if isinstance(truth, bool) or not isinstance(truth, str | Number):
            raise ValueError(f"ground_truth: expected a text or a number, got {type(truth).__name__}")
        return await self._batcher((step, str(truth)))

    def _score_all(self, items: Sequence[tuple[Step, str]]) -> list[Score | Exception]:
        """A score or an error for each step; an error of one step does not affect the others."""
        model, forward = self._model = self._model or self._load()
        with model.lock:
            pairs = [attempt(self._pair, model, step, truth) for step, truth in items]
            found = [pair for pair in pairs if isinstance(pair, _Pair)]
            means = _mean_logprobs(forward, [*dict.fromkeys(row for pair in found for row in pair[:2])])
        return [attempt(self._score, pair, means) if isinstance(pair, _Pair) else pair for pair in pairs]

    def _load(self) -> tuple[LoadedModel, Any]:
        from creditflow.engines.local.forward import Forward

        if self.folder is None:
            raise ValueError("policy: no policies are connected; name a model's folder in `path`")
        loaded = load_model(self.folder, "causal", self.device)
        return loaded, Forward(loaded.model)

    def _pair(self, model: LoadedModel, step: Step, truth: str) -> _Pair:
        prompt, keep = model.encode_prompt(step.prompt)
        response, _ = model.encode(step.response, written_by_a_model=True)
        tail, ends = model.encode(self.cue + truth, written_by_a_model=True)
        first = sum(end <= len(self.cue) for end in ends)  # a token across the border belongs to the truth
        cue, y = tail[:first], tuple(tail[first:])
        if not y:
            raise ValueError(f"ground_truth: {truth[:80]!r} has no tokens")
        prompt = prompt or [model.pad_id]  # the model needs a position to predict from
        room = model.max_positions - len(tail) - max(1, keep)
        if room < 0:
            raise ValueError(f"ground_truth: {len(tail)} tokens with the cue, for a model of {model.max_positions}")
        end = response[max(0, len(response) - room) :]
        alone, kept = (cut_prompt(prompt, n + len(tail), model.max_positions, keep) for n in (0, len(end)))
        seen, total = len(kept) + len(end), len(prompt) + len(response)
        cut = f"; the model saw {seen} of {total} tokens of prompt and response" if seen < total else ""
        return _Pair(((*alone, *cue), y), ((*kept, *end, *cue), y), cut)

    def _score(self, pair: _Pair, means: Mapping[Row, float]) -> Score:
        before, after = means[pair.before], means[pair.after]
        if not math.isfinite(gain := after - before):
            raise ValueError("the model's log-probabilities are not finite numbers")
        value = float(max(-self.limit, min(self.limit, gain)))
        numbers = (("clipped", float(value != gain)), ("cut", float(bool(pair.cut))))
        reason = f"log-probability of the truth per token: {before:.3f} before, {after:.3f} after{pair.cut}"
        return DetailedScore(value, self.range, reason=reason, numbers=numbers)


def _mean_logprobs(forward: Any, rows: Sequence[Row]) -> dict[Row, float]:
    """The mean log-probability of the truth's tokens in each row. `forward`: a `Forward` of the local engine."""
    import torch

    from creditflow.engines.local.packing import TokenSequences

    if not rows:
        return {}
    contexts, truths = ([np.array(ids) for ids in side] for side in zip(*rows, strict=True))
    begin_R = np.cumsum([0, *map(len, truths)])
    sequences = TokenSequences.from_parts(contexts, truths, np.arange(begin_R[-1]))
    logprobs_T: Floats = np.empty(begin_R[-1])
    with torch.no_grad():
        for packed in forward.micro_batches(sequences, np.arange(len(rows)), MAX_BATCH_TOKENS):
            ids = torch.from_numpy(sequences.response_ids[packed.token_at]).to(forward.device)
            logprobs = forward(packed).log_softmax(-1).gather(1, ids[:, None]).squeeze(1)
            logprobs_T[packed.token_at] = logprobs.double().cpu().numpy()
    return dict(zip(rows, np.add.reduceat(logprobs_T, begin_R[:-1]) / np.diff(begin_R), strict=True))
