"""Implicit process reward: the log-ratio of two language models' probabilities for each token."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from creditflow._utils.huggingface import n_tokens
from creditflow.data import Score, Step, Trajectory
from creditflow.errors import CreditflowError
from creditflow.rewards.builtin.kl import NO_REFERENCE, neutral_where_not_sampled
from creditflow.rewards.registry import builtin, reward
from creditflow.rewards.support.alignment import token_at
from creditflow.rewards.support.models import (
    LoadedModel,
    check_batching,
    cut_prompt,
    load_model,
    model_folder,
    response_logprobs,
    stamp,
)
from creditflow.rewards.support.step_model import StepModel

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
    reason: str = ""


@builtin
@reward(name="implicit_process", range=(-1.0, 1.0), timeout=600.0)
class ImplicitProcess(StepModel):
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
        beta: float = 0.05,
        limit: float = 1.0,
        tokenizer: str | None = None,
        max_length: int | None = None,
        batch_size: int = 16,
        device: str = "auto",
    ) -> None:
        for name, value in (("beta", beta), ("limit", limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name}: expected a number above 0, got {value}")
        check_batching(batch_size, max_length, device)
        self.folders = [model_folder(path, "path")]
        if reference != RUN:
            self.folders.append(model_folder(reference, f"reference (or `{RUN}`)"))
        self.needs_reference = reference == RUN
        self.beta, self.limit = float(beta), float(limit)
        self.range = (-self.limit, self.limit)
        self.max_length, self.batch_size, self.device = max_length, batch_size, device
        super().__init__(tokenizer)
        self._stamp = " ".join(map(stamp, self.folders))
        self._models: list[LoadedModel] = []
        self._counting = threading.Lock()
        self._clipped = self._counted = 0

    def cache_key(self, step: Step, trajectory: Trajectory) -> str:
        """The step's texts, tokens and reference, and the identity of the models."""
        own = [step.prompt, step.response, step.prompt_ids, step.response_ids, step.response_mask, step.policy]
        reference = [step.temperature, step.ref_logprobs] if self.needs_reference else []
        return json.dumps([own, reference, self._stamp])

    def metrics(self) -> dict[str, float]:
        """`clipped`: the share of sampled tokens with a value beyond the limit."""
        with self._counting:
            share = self._clipped / self._counted if self._counted else 0.0
            self._clipped = self._counted = 0
        return {"clipped": share}

    def _score_all(self, steps: list[Step]) -> list[Score | Exception]:
        """A score or an error for each step; an error of one step does not affect the others."""
        models = self._loaded()
        results: list[Score | Exception] = [Score(0.0)] * len(steps)
        rows: dict[int, _ModelInput] = {}
        with models[0].lock:
            for i, step in enumerate(steps):
                try:
                    rows[i] = self._row(models, step)
                except (ValueError, CreditflowError) as error:
                    results[i] = error
        pairs = [(row.prompt, row.response) for row in rows.values()]
        temperatures = [row.temperature for row in rows.values()]
        logprobs = []
        for model in models:
            with model.lock:
                logprobs.append(response_logprobs(model, pairs, temperatures, self.batch_size))
        if self.needs_reference:
            logprobs.append([list(steps[i].ref_logprobs) for i in rows])
        for (i, row), own, reference in zip(rows.items(), *logprobs, strict=True):
            try:
                results[i] = self._score(steps[i], row, own, reference)
            except (ValueError, CreditflowError) as error:
                results[i] = error
        return results

    def _loaded(self) -> list[LoadedModel]:
        if not self._models:
            models = [load_model(folder, "causal", self.device) for folder in self.folders]
            if models[0].tokenizer.get_vocab() != models[-1].tokenizer.get_vocab():
                raise ValueError(f"two models must have the same vocabulary: {' and '.join(map(str, self.folders))}")
            self._models = models
        return self._models

    def _row(self, models: Sequence[LoadedModel], step: Step) -> _ModelInput:
        if not step.response_ids:
            raise ValueError("the response has no tokens")
        if self.needs_reference and not step.ref_logprobs:
            raise ValueError(NO_REFERENCE)
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
        limit = min(self.max_length or models[0].max_positions, *(model.max_positions for model in models))
        known = min(n_tokens(model.model) for model in models)
        if unknown := [token for token in (*prompt, *response) if token >= known]:
            raise ValueError(f"expected tokens below {known}, which the models have, got {unknown[0]}")
        if not prompt:
            raise ValueError("the prompt has no tokens: there is nothing to predict the first response token from")
        kept = cut_prompt(prompt, len(response), limit, keep)
        reason = "" if len(kept) == len(prompt) else f"the models saw {len(kept)} of the prompt's {len(prompt)} tokens"
        return _ModelInput(kept, response, ends, step.temperature if self.needs_reference else 1.0, reason)

    def _score(self, step: Step, row: _ModelInput, own: Sequence[float], reference: Sequence[float]) -> Score:
        ratios = [self.beta * (one - other) for one, other in zip(own, reference, strict=True)]
        if not all(map(math.isfinite, ratios)):
            raise ValueError("a log-probability is not a finite number")
        if row.ends is not None:
            ratios = self._handed_to_tokens(step, ratios, row.ends)
        values = [max(-self.limit, min(self.limit, ratio)) for ratio in ratios]
        # A greedy step has no sampled tokens: every token counts.
        mask = step.response_mask if any(step.response_mask) else (1,) * len(values)
        clipped = sum(bool(one) and value != ratio for one, value, ratio in zip(mask, values, ratios, strict=True))
        with self._counting:
            self._clipped += clipped
            self._counted += sum(mask)
        reasons = [f"{clipped} of {sum(mask)} tokens clipped to +-{self.limit:g}"] if clipped else []
        reason = "; ".join([*([row.reason] if row.reason else []), *reasons])
        return Score(tuple(neutral_where_not_sampled(values, mask)), self.range, reason=reason)

    def _handed_to_tokens(self, step: Step, ratios: Sequence[float], ends: Sequence[int]) -> list[float]:
        """The models' token values, each added to the response token that has its last character."""
        policy_ends = self._tokens.ends(step)
        values = [0.0] * len(policy_ends)
        for ratio, end in zip(ratios, ends, strict=True):
            values[token_at(policy_ends, max(end - 1, 0))] += ratio
        return values
