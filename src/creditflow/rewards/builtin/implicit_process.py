"""Implicit process reward: the log-ratio of two language models' probabilities for each token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from creditflow._utils.huggingface import n_tokens
from creditflow.data import Score, Step, Trajectory
from creditflow.rewards.builtin.kl import NO_REFERENCE, neutral_where_not_sampled
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.alignment import token_at
from creditflow.rewards.support.arguments import Above0, BatchSize, Device, OptionalLength, check_arguments
from creditflow.rewards.support.models import (
    LoadedModel,
    load_model,
    model_folder,
    response_logprobs,
)
from creditflow.rewards.support.step_model import CountedShare, StepModel

RUN = "run"
"""Value of `reference` for the run's frozen reference, by `step.ref_logprobs`."""


@dataclass(frozen=True, slots=True)
class _ModelInput:
    """A step as input of the models."""

    prompt: list[int]
    response: list[int]
    ends: list[int] | None
    """End of each of the models' tokens in the response; None if the tokens are the policy's own."""
    temperature: float
    reference: Sequence[float] | None
    """Log-probs of the run's reference; None: the second model computes them."""
    reason: str = ""


@builtin
@reward(name="implicit_process", range=(-1.0, 1.0), timeout=600.0)
class ImplicitProcess(StepModel[_ModelInput]):
    """`beta * (log pi_phi(y_t | y_<t) - log pi_ref(y_t | y_<t))` for every response token, clipped to +-`limit`.

    `path`: the folder of pi_phi, a causal language model trained to tell right responses from wrong ones (any outcome
    reward model that is a log-ratio has this as its token rewards). `reference`: the folder of pi_ref, the model that
    pi_phi was trained from, with the same vocabulary; or `run`: the run's frozen reference, by `step.ref_logprobs`.
    Log-probs are at temperature 1; with `reference: run` both are at the step's.
    If the models' vocabulary is the policy's, they read the step's own tokens. Otherwise (not with `run`) they read its
    text, and the value of each of their tokens goes to the response token that has its last character. The sum over the
    response is preserved; the policy's end-of-sequence token then gets 0. The policy's vocabulary comes from the run's
    policies, or from the folder in `tokenizer`; without either the score is `failed`.
    `max_length`, `batch_size`, `device`: as for `process_model`.

    Range: [-limit, limit]. The value is unbounded before clipping: the score's reason gives the number of clipped
    tokens among the sampled ones, the metric `clipped` their share. Cost: a forward pass of both models per step, and
    their memory. Source: PRIME (arXiv 2502.01456, eq. 3 to 5; beta 0.05), after the implicit process reward model
    (arXiv 2412.01981).
    """

    def __init__(
        self,
        path: str,
        reference: str,
        beta: Above0 = 0.05,
        limit: Above0 = 1.0,
        tokenizer: str | None = None,
        max_length: OptionalLength = None,
        batch_size: BatchSize = 16,
        device: Device = "auto",
    ) -> None:
        check_arguments(ImplicitProcess.__init__, locals())
        folders = [model_folder(path, "path")]
        if reference != RUN:
            folders.append(model_folder(reference, f"reference (or `{RUN}`)"))
        super().__init__(folders, tokenizer, max_length, batch_size, device)
        self.needs_reference = reference == RUN
        self.beta, self.limit = float(beta), float(limit)
        self.range = (-self.limit, self.limit)
        self._clipped = CountedShare()

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The step's texts, tokens and reference, and the identity of the models."""
        own = [step.prompt, step.response, step.prompt_ids, step.response_ids, step.response_mask, step.policy]
        reference = [step.temperature, step.ref_logprobs] if self.needs_reference else []
        return json.dumps([own, reference, self._stamp])

    def metrics(self) -> dict[str, float]:
        """`clipped`: the share of sampled tokens with a value beyond the limit."""
        return {"clipped": self._clipped.take()}

    def _load(self) -> list[LoadedModel]:
        models: list[LoadedModel] = [load_model(folder, "causal", self.device) for folder in self.folders]
        if models[0].tokenizer.get_vocab() != models[-1].tokenizer.get_vocab():
            raise ValueError(f"two models must have the same vocabulary: {' and '.join(map(str, self.folders))}")
        return models

    def _row(self, step: Step) -> _ModelInput:
        if not step.response_ids:
            raise ValueError("the response has no tokens")
        if self.needs_reference and not step.ref_logprobs:
            raise ValueError(NO_REFERENCE)
        models = self._models
        same = self._tokens.spelled_by(models[0].tokenizer, step.policy)
        if self.needs_reference and not same:
            raise ValueError(
                f"reference: {RUN} needs a model of the policy's vocabulary; {self.folders[0]} is not known to be one"
            )
        ends: list[int] | None = None
        keep = 0
        if same:
            prompt, response = list(step.prompt_ids), list(step.response_ids)
        else:
            prompt, keep = models[0].encode_prompt(step.prompt)
            response, ends = models[0].encode(step.response, written_by_a_model=True)
        known = min(n_tokens(model.model) for model in models)
        if unknown := [token for token in (*prompt, *response) if token >= known]:
            raise ValueError(f"expected tokens below {known}, which the models have, got {unknown[0]}")
        if not prompt:
            raise ValueError("the prompt has no tokens: there is nothing to predict the first response token from")
        kept, note = self._cut(prompt, len(response), keep)
        reason = f"the models {note}" if note else ""
        if self.needs_reference:
            return _ModelInput(kept, response, ends, step.temperature, step.ref_logprobs, reason)
        return _ModelInput(kept, response, ends, 1.0, None, reason)

    def _compute(self, rows: list[_ModelInput]) -> list[list[float]]:
        """For each row, the log-ratio of each of the models' tokens, times beta."""
        pairs = [(row.prompt, row.response) for row in rows]
        temperatures = [row.temperature for row in rows]
        logprobs: list[list[Sequence[float]]] = []
        for model in self._models:
            with model.lock:
                logprobs.append([*response_logprobs(model, pairs, temperatures, self.batch_size)])
        references = logprobs[-1] if not self.needs_reference else [row.reference or () for row in rows]
        return [
            [self.beta * (one - other) for one, other in zip(own, reference, strict=True)]
            for own, reference in zip(logprobs[0], references, strict=True)
        ]

    def _score(self, step: Step, row: _ModelInput, values: Sequence[float]) -> Score:
        if not all(map(math.isfinite, values)):
            raise ValueError("a log-probability is not a finite number")
        ratios = values if row.ends is None else self._handed_to_tokens(step, values, row.ends)
        within = [max(-self.limit, min(self.limit, ratio)) for ratio in ratios]
        # A greedy step has no sampled tokens: every token counts.
        mask = step.response_mask if any(step.response_mask) else (1,) * len(ratios)
        clipped = sum(bool(one) and value != ratio for one, value, ratio in zip(mask, within, ratios, strict=True))
        self._clipped.add(clipped, sum(mask))
        note = f"{clipped} of {sum(mask)} tokens clipped to +-{self.limit:g}" if clipped else ""
        reason = "; ".join(filter(None, [row.reason, note]))
        return Score(tuple(neutral_where_not_sampled(within, mask)), self.range, reason=reason)

    def _handed_to_tokens(self, step: Step, ratios: Sequence[float], ends: Sequence[int]) -> list[float]:
        """The models' token values, each added to the response token that has its last character."""
        policy_ends = self._tokens.ends(step)
        values = [0.0] * len(policy_ends)
        for ratio, end in zip(ratios, ends, strict=True):
            values[token_at(policy_ends, max(end - 1, 0))] += ratio
        return values
