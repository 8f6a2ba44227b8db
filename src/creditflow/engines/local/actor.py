"""Updates one policy from steps and their advantages; knows nothing of how either came about."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from creditflow.config import ActorConfig, OptimConfig
from creditflow.engines.local.batching import Rows, bucket, pad, token_rows
from creditflow.engines.local.loss import KL_ESTIMATORS, policy_loss, token_weights_for
from creditflow.engines.local.policy import Policy
from creditflow.trajectory import Bools, Floats, Ints, Trajectory, TrajectoryBatch


def response_logprobs(policy: Policy, rows: Rows) -> tuple[Tensor, Tensor]:
    """[B, R] log-prob of each response token at its row's temperature, and the entropy there; float32."""
    R = rows.response_ids.shape[1]
    with policy.autocast():
        out: Any = policy.model(
            input_ids=rows.input_ids,
            attention_mask=rows.attention_mask,
            position_ids=rows.position_ids,
            use_cache=False,
            logits_to_keep=R + 1,
        )
    scaled = torch.log_softmax(out.logits[:, :-1].float() / rows.temperature[:, None, None], dim=-1)
    logprobs = scaled.gather(2, rows.response_ids.unsqueeze(2)).squeeze(2)
    with torch.no_grad():
        entropy = -(scaled.exp() * scaled).sum(-1)
    return logprobs, entropy


@torch.no_grad()
def fill_reference_logprobs(reference: Policy, trajectories: Sequence[Trajectory], max_tokens: int) -> None:
    """Set `ref_logprobs` of every step that has response tokens, in the plays that did not fail.

    They are taken as those of training are: at the step's temperature (at 1 where it was greedy), token by token,
    whatever the mask. `max_tokens`: of one micro-batch, padding included.
    """
    batch = TrajectoryBatch.from_trajectories([t for t in trajectories if t.status != "failed"])
    steps = [step for t in trajectories if t.status != "failed" for step in t.steps]
    for micro in bucket(batch, np.flatnonzero(np.diff(batch.token_offsets)), max_tokens):
        logprobs, _ = response_logprobs(reference, pad(batch, micro, reference.pad_id, reference.device))
        for s, row in zip(micro.tolist(), logprobs.tolist(), strict=True):
            steps[s].ref_logprobs = tuple(row[: len(steps[s].response_ids)])


def _lr_factor(optim: OptimConfig, total_updates: int | None) -> Callable[[int], float]:
    """The share of `optim.lr` at the k-th update, from 0: linear warm-up, then constant or half a cosine."""
    warmup = optim.lr_warmup_steps

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / (warmup + 1)
        if optim.lr_scheduler_type == "constant" or total_updates is None:
            return 1.0
        done = (update - warmup) / max(1, total_updates - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


class Actor:
    """A policy with its optimizer and, for the KL loss or where a reward function needs it, its frozen reference."""

    def __init__(
        self, policy: Policy, config: ActorConfig, total_updates: int | None = None, *, keep_reference: bool = False
    ) -> None:
        self.policy = policy
        self.config = config
        self.reference: Policy | None = None
        if config.use_kl_loss or keep_reference:
            self.reference = copy.copy(policy)
            self.reference.model = copy.deepcopy(policy.model).requires_grad_(False)
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            policy.model.parameters(),
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _lr_factor(optim, total_updates))

    def update(
        self, batch: TrajectoryBatch, advantage_T: Floats, trained_S: Bools, mini_batch_of_step: Ints
    ) -> dict[str, float]:
        """One optimizer update per mini-batch and epoch; returns `actor/*` metrics, averaged over the updates.

        `advantage_T`: [T] what each response token gets; only sampled ones are read. `trained_S`: False leaves the
        step out of the loss and of its denominator. `mini_batch_of_step` [S]: 0, 1, ...
        """
        updates = [
            self._update_once(batch, advantage_T, np.flatnonzero(trained_S & (mini_batch_of_step == m)))
            for _ in range(self.config.ppo_epochs)
            for m in range(int(mini_batch_of_step.max(initial=0)) + 1)
        ]
        done = [metrics for metrics in updates if metrics]
        self.policy.version += 1
        return {key: float(np.mean([metrics[key] for metrics in done])) for key in (done[0] if done else {})}

    def _update_once(self, batch: TrajectoryBatch, advantage_T: Floats, steps: Ints) -> dict[str, float]:
        config, policy = self.config, self.policy
        step_of_token = np.repeat(np.arange(batch.n_steps), np.diff(batch.token_offsets))
        sampled = np.bincount(step_of_token[batch.response_mask], minlength=batch.n_steps)
        weights = token_weights_for(config.loss_agg_mode, torch.from_numpy(sampled[steps]))
        weight_S = np.zeros(batch.n_steps)
        weight_S[steps] = weights.numpy()
        steps = steps[sampled[steps] > 0]
        if len(steps) == 0:
            return {}
        low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high

        totals = dict.fromkeys(("pg_loss", "pg_clipfrac", "entropy", "ppo_kl", "kl_loss"), 0.0)
        self.optimizer.zero_grad(set_to_none=True)
        for micro in bucket(batch, steps, config.ppo_max_token_len_per_gpu):
            rows = pad(batch, micro, policy.pad_id, policy.device)
            logprobs, entropy = response_logprobs(policy, rows)
            weight = torch.from_numpy(weight_S[micro]).to(logprobs)[:, None] * rows.response_mask
            advantage = torch.from_numpy(token_rows(batch, micro, advantage_T)).to(logprobs)
            loss, clipped = policy_loss(logprobs, rows.old_logprobs, advantage, weight, low, high)
            totals["pg_loss"] += float(loss.detach())
            if config.use_kl_loss and self.reference is not None:
                with torch.no_grad():
                    reference, _ = response_logprobs(self.reference, rows)
                kl = (KL_ESTIMATORS[config.kl_loss_type](logprobs - reference) * weight).sum()
                totals["kl_loss"] += float(kl.detach())
                loss = loss + config.kl_loss_coef * kl
            torch.autograd.backward(loss)
            mean_weight = weight / float(weight_S @ sampled)  # the loss's own averaging, scaled to sum to one
            totals["pg_clipfrac"] += float((clipped * mean_weight).sum())
            totals["entropy"] += float((entropy * mean_weight).sum())
            totals["ppo_kl"] += float(((rows.old_logprobs - logprobs.detach()) * mean_weight).sum())
        norm = torch.nn.utils.clip_grad_norm_(policy.model.parameters(), config.grad_clip)
        finite = bool(torch.isfinite(norm))
        lr = self.optimizer.param_groups[0]["lr"]
        if finite:
            self.optimizer.step()
            self.schedule.step()
        else:  # one bad batch must not poison the weights; the skip is counted
            self.optimizer.zero_grad(set_to_none=True)
        metrics = {f"actor/{name}": value for name, value in totals.items()}
        metrics |= {"actor/grad_norm": float(norm), "actor/lr": lr, "actor/skipped_updates": float(not finite)}
        if not config.use_kl_loss:
            del metrics["actor/kl_loss"]
        return metrics
