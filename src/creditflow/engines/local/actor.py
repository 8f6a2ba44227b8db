"""The actor: updates one policy from steps and their advantages.

Independent of rollouts and credit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from creditflow._utils.huggingface import n_tokens
from creditflow._utils.progress import advance, phase
from creditflow.config import ActorConfig, OptimConfig
from creditflow.data import Bools, Floats, Ints, Trajectory, TrajectoryBatch
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.learner import (
    ENDLESS,
    Learner,
    Schedule,
    loss_weights,
    sampled_tokens,
    tensors_of,
)
from creditflow.engines.local.logprobs import WHOLE, logprobs_from_hidden
from creditflow.engines.local.lora import Adapter
from creditflow.engines.local.loss import KL_ESTIMATORS, Clip, policy_loss
from creditflow.engines.local.packing import PackedSteps
from creditflow.engines.local.planning import MOST
from creditflow.engines.local.policy import Policy

_LOGITS = WHOLE
"""The largest number of logits per log-softmax call."""


def token_logprobs(
    forward: Forward, packed: PackedSteps, batch: TrajectoryBatch, *, entropy_grad: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob [R] of each response token at its step's temperature (1 for greedy steps), and entropy [R].

    `entropy_grad`: whether a loss needs the entropy's gradient, which may cost as much memory as the logits.
    """
    temperature_B = batch.temperature_of_step[packed.steps]
    temperature = np.where(temperature_B > 0, temperature_B, 1.0)[packed.row_of_token]
    token_ids = torch.from_numpy(batch.response_ids[packed.token_at].astype(np.int64)).to(forward.device)
    head = forward.head if len(temperature) * n_tokens(forward.model) > _LOGITS else None
    if head is not None:
        with forward.running():
            hidden = forward.hidden(packed)
            weight, bias = head.weight, head.bias
            warm = torch.from_numpy(temperature).to(weight) if (temperature != 1).any() else None
            return logprobs_from_hidden(hidden, weight, bias, warm, token_ids, entropy_grad=entropy_grad)
    logits = forward(packed)
    temperature_R = torch.from_numpy(temperature).to(logits)

    def at_tokens(logits: Tensor, temperature_R: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        scaled = torch.log_softmax(logits / temperature_R[:, None], dim=-1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and entropy_grad):
            entropy = -(scaled.exp() * scaled).sum(-1)
        return scaled.gather(1, token_ids[:, None]).squeeze(1), entropy

    if logits.numel() <= _LOGITS:
        return at_tokens(logits, temperature_R, token_ids)
    # With a large vocabulary, each intermediate would be another copy of the logits. Checkpointing recomputes them in
    # the backward pass, part by part, and keeps none.
    n = max(1, _LOGITS // logits.shape[1])
    columns = zip(*(torch.split(column, n) for column in (logits, temperature_R, token_ids)), strict=True)
    parts = [checkpoint(at_tokens, *part, use_reentrant=False, preserve_rng_state=False) for part in columns]
    return torch.cat([logprob for logprob, _ in parts]), torch.cat([entropy for _, entropy in parts])


@torch.no_grad()
def fill_reference_logprobs(
    references: Mapping[str, Policy], trajectories: Sequence[Trajectory], max_tokens: int
) -> None:
    """Set `ref_logprobs` of every step with response tokens, in trajectories that did not fail.

    Computed as in training, for every response token regardless of the mask. `references`: by policy. `max_tokens`:
    the size of one micro-batch.
    """
    batch = TrajectoryBatch.from_trajectories([t for t in trajectories if t.status != "failed"])
    steps = [step for t in trajectories if t.status != "failed" for step in t.steps]
    lengths_S = np.diff(batch.token_offsets)
    for name, reference in references.items():
        own, forward = np.flatnonzero((lengths_S > 0) & batch.sampled_by(name)), reference.forward
        with phase("reference log-probs", int(_lengths(batch)[own].sum()), "tokens"):
            for packed in forward.micro_batches(batch, own, max_tokens):
                logprobs, _ = token_logprobs(forward, packed, batch)
                ends = np.cumsum(lengths_S[packed.steps])[:-1]
                for s, row in zip(packed.steps.tolist(), np.split(logprobs.double().cpu().numpy(), ends), strict=True):
                    steps[s].ref_logprobs = tuple(row.tolist())
                advance(int(_lengths(batch)[packed.steps].sum()))


class Actor:
    """A policy, its optimizer and, for the KL loss or a reward function, its frozen reference."""

    size_key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    """The option of `max_tokens`."""
    most_tokens = MOST
    """The largest derived `max_tokens`."""

    def __init__(
        self,
        policy: Policy,
        config: ActorConfig,
        schedule: Schedule = ENDLESS,
        *,
        optim: OptimConfig | None = None,
        keep_reference: bool = False,
    ) -> None:
        """`optim`: replaces that of `config`."""
        self.policy = policy
        self.config = config
        self.reference: Policy | None = None
        if config.use_kl_loss or keep_reference:
            self.reference = policy.reference()
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        self.max_tokens = config.ppo_max_token_len_per_gpu or MOST
        """Tokens of one micro-batch; `PolicySet` derives it if the configuration leaves it open."""
        self.clip = Clip(low, high, config.clip_ratio_c)
        self._learning = (optim or config.optim, config.grad_clip, schedule)
        self.learner = Learner(policy.parameters, *self._learning)
        self._whole: Policy | None = None

    @property
    def forward(self) -> Forward:
        """The policy's forward pass."""
        return self.policy.forward

    @property
    def narrowed(self) -> bool:
        """Whether an adapter is currently trained instead of all weights."""
        return self._whole is not None

    def narrow(self, adapter: Adapter) -> None:
        """Train `adapter`, an adapter of the policy's model, instead of all weights.

        Frees the gradients and the optimizer state of the weights. The learning-rate schedule continues.
        """
        self._whole, whole = self.policy, self.policy
        self.policy = whole.with_adapter(adapter)
        self._begin_again()

    def widen(self) -> None:
        """Merge the adapter into the weights and train all weights again, with a fresh optimizer state."""
        assert self._whole is not None
        assert self.policy.adapter is not None
        self.policy.adapter.merge()
        self._whole.version, self.policy, self._whole = self.policy.version, self._whole, None
        self.policy.model.requires_grad_(True)
        self._begin_again()

    def _begin_again(self) -> None:
        done = self.learner.done
        self.learner.begin()  # frees the gradients
        self.learner = Learner(self.policy.parameters, *self._learning)
        self.learner.done = done

    def update(
        self,
        batch: TrajectoryBatch,
        advantage_T: Floats,
        trained_S: Bools,
        mini_batch_of_step: Ints,
    ) -> dict[str, float]:
        """Run one optimizer update per mini-batch and epoch; returns `actor/*` metrics, averaged over updates.

        `advantage_T` [T]: one per response token; only sampled tokens are read. `trained_S` [S]: False excludes the
        step from the loss and from its denominator. `mini_batch_of_step` [S]: 0, 1, ...
        """
        computed_S = self._computed_S(batch, advantage_T, trained_S)
        tokens = self.config.ppo_epochs * int(_lengths(batch)[computed_S].sum())
        with phase("updating", tokens, "tokens"):
            metrics = self.learner.in_mini_batches(
                lambda steps: self._update_once(batch, advantage_T, steps, computed_S),
                trained_S,
                mini_batch_of_step,
                self.config.ppo_epochs,
            )
        self.policy.version += 1
        return metrics | ({"actor/tokens": float(tokens)} if metrics else {})

    def _computed_S(self, batch: TrajectoryBatch, advantage_T: Floats, trained_S: Bools) -> Bools:
        """The steps [S] that need a pass.

        Without a KL or entropy term, a step whose advantages are all 0 has no gradient. It counts in the averaging
        weights, but needs no pass.
        """
        step_of_token, sampled_S = sampled_tokens(batch)
        if not (self.config.use_kl_loss or self.config.entropy_coeff):
            moving_T = (advantage_T != 0) & batch.response_mask
            sampled_S = np.bincount(step_of_token[moving_T], minlength=batch.n_steps)
        return np.asarray(trained_S & (sampled_S > 0))

    def _update_once(
        self, batch: TrajectoryBatch, advantage_T: Floats, steps: Ints, computed_S: Bools
    ) -> dict[str, float]:
        config, policy = self.config, self.policy
        step_of_token, sampled_S = sampled_tokens(batch)
        weight_S = loss_weights(config, batch, steps)
        steps = steps[sampled_S[steps] > 0]
        if len(steps) == 0:
            return {}
        weight_T = weight_S[step_of_token] * batch.response_mask
        computed = steps[computed_S[steps]]
        tied = not ((advantage_T != 0) & (weight_T > 0)).any()
        # Metrics use the loss's averaging weights, rescaled to sum to 1 over the computed steps.
        all_weight = float(weight_S[computed] @ sampled_S[computed]) or 1.0

        totals = dict.fromkeys(("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "entropy", "ppo_kl", "kl_loss"), 0.0)
        self.learner.begin()
        old_T = np.where(batch.response_mask, batch.logprobs, 0.0)
        for packed in policy.forward.micro_batches(batch, computed, self.max_tokens):
            reference = None
            if config.use_kl_loss and self.reference is not None:
                with torch.no_grad():  # before the trained pass: both may use one model, with and without its adapter
                    reference, _ = token_logprobs(self.reference.forward, packed, batch)
            logprobs, entropy = token_logprobs(policy.forward, packed, batch, entropy_grad=config.entropy_coeff != 0)
            weight, old, advantage = tensors_of((weight_T, old_T, advantage_T), packed.token_at, logprobs)
            mode, sequence = config.policy_loss.loss_mode, None
            if mode == "gspo":
                (sampled,) = tensors_of((batch.response_mask.astype(np.float64),), packed.token_at, logprobs)
                sequence = torch.from_numpy(packed.row_of_token).to(logprobs.device), sampled
            token_loss, clipped, bounded = policy_loss(logprobs, old, advantage, self.clip, mode, sequence)
            loss = (token_loss * weight).sum()
            totals["pg_loss"] += float(loss.detach())
            if reference is not None:
                kl = (KL_ESTIMATORS[config.kl_loss_type](logprobs - reference) * weight).sum()
                totals["kl_loss"] += float(kl.detach())
                loss = loss + config.kl_loss_coef * kl
            if config.entropy_coeff:
                loss = loss - config.entropy_coeff * (entropy * weight).sum()
            torch.autograd.backward(loss)
            share = weight / all_weight
            totals["pg_clipfrac"] += float((clipped * share).sum())
            totals["pg_clipfrac_lower"] += float((bounded * share).sum())
            totals["entropy"] += float((entropy.detach() * share).sum())
            totals["ppo_kl"] += float(((old - logprobs.detach()) * share).sum())
            advance(int(_lengths(batch)[packed.steps].sum()))
        if not len(computed):
            self.learner.fill_gradients()
        metrics = {f"actor/{name}": value for name, value in (totals | self.learner.step()).items()}
        if not config.use_kl_loss:
            del metrics["actor/kl_loss"]
        metrics["actor/tied_updates"] = float(tied)
        if not len(computed):  # nothing to average; entropy is estimated from the sampled log-probs
            metrics = {key: value for key, value in metrics.items() if key not in _OF_COMPUTED}
            metrics["actor/entropy"] = float(-(old_T @ weight_T) / weight_T.sum())
        return metrics


def _lengths(batch: TrajectoryBatch) -> Ints:
    """Prompt and response tokens of each step [S]."""
    return np.diff(batch.prompt_offsets) + np.diff(batch.token_offsets)


_OF_COMPUTED = {f"actor/{name}" for name in ("pg_clipfrac", "pg_clipfrac_lower", "entropy", "ppo_kl", "kl_loss")}
