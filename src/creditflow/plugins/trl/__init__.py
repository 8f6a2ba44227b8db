"""TRL's GRPOTrainer for teams: it trains the steps of a workflow with the advantages of `creditflow.credit.assign`.

TRL samples, computes log-probabilities and the loss, and updates the model. creditflow runs the workflow, scores its
trajectories and assigns credit. Every trained step becomes one row of TRL's batch.

Importing this module imports TRL (1.16) and torch.
"""

from __future__ import annotations

import asyncio
import math
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import yaml

from creditflow._utils.huggingface import position_limit
from creditflow.config.references import spelled_out
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.data import Floats, Task, Trajectory, TrajectoryBatch
from creditflow.data.datasets import task_of_row
from creditflow.engines.common.metrics import step_metrics
from creditflow.engines.common.rollouts import expect_few_failed_rollouts
from creditflow.errors import ConfigError
from creditflow.rewards import RewardManager, ScoringReport, reward_functions_of
from creditflow.rollout import (
    AgentSpec,
    ChatClient,
    Generation,
    GenerationRequest,
    Rollout,
    Sampling,
    Scheduler,
    Workflow,
    run_rollouts,
)
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.runs import RunFolder

try:
    from trl import GRPOTrainer
except ModuleNotFoundError as missing:
    raise ConfigError(f"creditflow.plugins.trl needs {missing.name}: pip install 'trl==1.16.*'") from missing

__all__ = ["CreditGRPOTrainer"]

_TESTED = "1.16"
"""The version of TRL whose private methods are overridden here."""
_POLICY = "default"
"""The policy that TRL trains."""
_LOSSES = ("dapo", "bnpo", "cispo", "vespo")
"""Losses that average over tokens. The others average over rows, whose number TRL assumes to be that of completions."""
_OURS = ("reward_funcs", "rollout_func", "tools", "environment_factory", "reward_processing_classes")
"""Arguments of GRPOTrainer whose part the workflow and the rewards have."""

T = TypeVar("T")


class CreditGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that trains every agent's steps on creditflow's advantages.

    All agents act through the trained model, except those whose `AgentSpec.policy` names one of `frozen`. The
    `num_generations` rollouts of a task form its group. TRL's own advantages, and so `scale_rewards`, have no effect.
    """

    def __init__(
        self,
        model: Any,
        *,
        workflow: Workflow,
        rewards: Sequence[Callable[..., Any] | str],
        agents: Mapping[str, AgentSpec | str],
        credit: CreditOptions | None = None,
        sampling: Sampling | None = None,
        frozen: Mapping[str, ChatClient] | None = None,
        run_folder: Path | str | None = None,
        max_failed_frac: float = 0.2,
        **trl: Any,
    ) -> None:
        """Set up TRL's trainer and the team.

        `workflow`: `async def solve(task, team) -> answer`. `rewards`: reward functions, or names of ready-made ones.
        `agents`: system prompt or `AgentSpec` of each agent. `credit`: options of credit; default: `CreditOptions()`.
        `sampling`: limits of a rollout; default: TRL's `max_completion_length` and `temperature`. `frozen`: models
        behind an endpoint, by policy name. `run_folder`: a new folder for the ledger, which `creditflow why`, `report`
        and `Ledger` read. `max_failed_frac`: largest share of failed rollouts in a batch, and of failed scores of a
        function. `trl`: further arguments of GRPOTrainer, such as `args` and `train_dataset`.

        Raises ConfigError for unsupported options.
        """
        if not version("trl").startswith(f"{_TESTED}."):
            raise ConfigError(
                f"trl: expected version {_TESTED}.*, got {version('trl')}: pip install 'trl=={_TESTED}.*'"
            )
        for name in _OURS:
            if trl.get(name) is not None:
                raise ConfigError(f"{name}: expected none, since the workflow and `rewards` take its place")
        self.workflow = workflow
        self.agents = {name: AgentSpec(agent) if isinstance(agent, str) else agent for name, agent in agents.items()}
        self.credit = credit or CreditOptions()
        if self.credit.estimator.critic:
            raise ConfigError(f"adv_estimator: expected one without a critic, got {self.credit.adv_estimator!r}")
        self.rewards = RewardManager(reward_functions_of(rewards, list(self.agents)), max_failed_frac)
        self._threshold = self.credit.propagation.make_threshold()
        self._history = History()
        self._frozen = dict(frozen or {})
        self._max_failed_frac = max_failed_frac
        self._rows: list[_Row] = []
        self._batches = 0
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(model=model, reward_funcs=[outcome], rollout_func=self._recorded_rows, **trl)
        if self.accelerator.num_processes > 1:
            raise ConfigError(f"accelerate: expected one process, got {self.accelerator.num_processes}")
        if self.args.loss_type not in _LOSSES:
            raise ConfigError(
                f"loss_type: expected {', '.join(_LOSSES)}, got {self.args.loss_type!r}, which averages over "
                "completions; trajectories have different numbers of steps"
            )
        self.sampling = self._sampling(sampling)
        self._model_client = _TrainedModel(self)
        self._end_responses_at(sorted(self._model_client.end_ids))
        self._folder = None if run_folder is None else self._create_folder(Path(run_folder))

    def _sampling(self, sampling: Sampling | None) -> Sampling:
        """The limits of a rollout. Raises ConfigError if TRL samples otherwise."""
        longest, temperature = self.args.max_completion_length, self.args.temperature
        if sampling is None:
            limit = position_limit(self.model.config).tokens
            return Sampling(max_tokens=longest, max_prompt_tokens=max(limit - longest, 1), temperature=temperature)
        if sampling.temperature != temperature:
            raise ConfigError(
                f"sampling.temperature: expected GRPOConfig's {temperature:g}, got {sampling.temperature:g}"
            )
        return sampling

    def _end_responses_at(self, end_ids: list[int]) -> None:
        """Let TRL sample up to these tokens, and count a response that ends with one as complete."""
        self.eos_token_ids = end_ids
        if not self.use_vllm:
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = end_ids

    def _create_folder(self, path: Path) -> RunFolder:
        config = {"algorithm": spelled_out(self.credit), "data": {"seed": self.args.seed}}
        facts = {
            "recipe": "trl",
            "engine": "trl",
            "seed": self.args.seed,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": {name: version(name) for name in ("creditflow", "trl", "transformers", "torch")},
            "config": config,
        }
        return RunFolder.create(path, facts, yaml.safe_dump(config, sort_keys=False))

    def assign_credit(self, batch: TrajectoryBatch) -> Assignment:
        """Assign credit, with the threshold and the history of earlier batches. Override it to change credit."""
        return assign(batch, self.credit, threshold=self._threshold, history=self._history)

    def _generate_and_score_completions(self, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Run the team on the tasks in `inputs`, and return the rows of its trained steps."""
        training = bool(self.model.training)
        mode = "train" if training else "eval"
        n = self.num_generations if training else self.num_generations_eval
        trajectories, report = _in_thread(
            self._roll_out([task_of_row(row, "train_dataset", "trl") for row in inputs], n)
        )
        batch = TrajectoryBatch.from_trajectories(trajectories)
        assignment = self.assign_credit(batch)
        self._rows = _rows(assignment, math.lcm(n, self.args.steps_per_generation if training else 1), self._filler())
        output: dict[str, Any] = super()._generate_and_score_completions([{"prompt": row.prompt} for row in self._rows])
        output["advantages"] = _advantages(self._rows, output["completion_ids"])

        metrics = step_metrics(batch, report, assignment, self._threshold)
        self._correct_metrics(mode, batch, assignment, output["advantages"])
        for name, value in metrics.items():
            if math.isfinite(value):
                self._metrics[mode][name].append(value)
        if training:
            self._batches += 1
            self._threshold.update(batch_stats(assignment))
            self._history = assignment.history_after
            if self._folder is not None:
                self._folder.write_steps(self._batches, batch, assignment)
                self._folder.append_metrics(self._batches, metrics)
        return output

    async def _roll_out(self, tasks: Sequence[Task], n: int) -> tuple[list[Trajectory], ScoringReport]:
        """Run and score one rollout of each of `tasks`, of which `n` in a row are the same task."""
        place = f"{self.state.global_step}-{self._batches}"
        rollouts = [
            Rollout(task, f"{place}-{i // n}", f"{place}-{i // n}-{i % n}", (i,)) for i, task in enumerate(tasks)
        ]
        scheduler = Scheduler({_POLICY: self._model_client, **self._frozen}, max_num_seqs=len(rollouts))
        trajectories = await run_rollouts(rollouts, self.workflow, self.agents, scheduler, self.sampling)
        reasons = [str(trajectory.info.get("error")) for trajectory in trajectories if trajectory.status == "failed"]
        n_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        expect_few_failed_rollouts(reasons, len(rollouts), n_steps, trajectories[0].info, self._max_failed_frac)
        async with self.rewards.open({_POLICY: self._model_client}):
            report = await self.rewards.score(trajectories)
        return trajectories, report

    def _filler(self) -> _Row:
        """A row without trained tokens, which completes TRL's groups and micro-batches."""
        end = (int(self._tokenizer.pad_token_id),)
        return _Row("", end, end, (0,), (0.0,), math.nan, np.zeros(1, dtype=np.float32))

    def _recorded_rows(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """The rows of the batch as TRL's `rollout_func` returns them."""
        return {
            "prompt_ids": [list(row.prompt_ids) for row in self._rows],
            "completion_ids": [list(row.response_ids) for row in self._rows],
            "logprobs": [list(row.logprobs) for row in self._rows] if self.use_vllm else None,
            "env_mask": [list(row.mask) for row in self._rows],
        }

    def _calculate_rewards(self, *_: Any, **__: Any) -> torch.Tensor:
        """[R, 1] the outcome of each row's trajectory, which TRL logs."""
        return torch.tensor([[row.outcome] for row in self._rows], device=self.accelerator.device)

    def _correct_metrics(
        self, mode: str, batch: TrajectoryBatch, assignment: Assignment, advantages: torch.Tensor
    ) -> None:
        """Replace the metrics that TRL has computed from rows by those of trajectories and of credit."""
        known_N = batch.outcome[~np.isnan(batch.outcome)]
        mean, spread = (
            (float(known_N.mean()), float(known_N.std(ddof=len(known_N) > 1))) if len(known_N) else (math.nan,) * 2
        )
        trained_S = assignment.groups.trained_S
        tied = float(assignment.groups.tied_S[trained_S].mean()) if trained_S.any() else math.nan
        corrected = {"reward": mean, "reward_std": spread, "frac_reward_zero_std": tied}
        corrected |= {"rewards/outcome/mean": mean, "rewards/outcome/std": spread}
        for name, value in corrected.items():
            self._metrics[mode][name][-1] = value
        logged = self._logs["advantages"]
        first = [float(row.flatten()[0]) for row in advantages]
        for _ in range(min(len(first), len(logged))):
            logged.pop()
        logged.extend(first)


@dataclass(frozen=True, slots=True)
class _Row:
    """One trained step as a row of TRL's batch."""

    prompt: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    mask: tuple[int, ...]
    """1 for sampled tokens."""
    logprobs: tuple[float, ...]
    outcome: float
    """The outcome of its trajectory; NaN if unknown."""
    advantage_T: Floats
    """Advantage of each response token, float32."""


def _rows(assignment: Assignment, multiple_of: int, filler: _Row) -> list[_Row]:
    """The rows of all trained steps, with fillers up to a multiple of `multiple_of`."""
    batch, advantage_T = assignment.batch, assignment.token_advantages(dtype=np.float32)
    rows = []
    for s in np.flatnonzero(assignment.groups.trained_S).tolist():
        prompt = slice(*batch.prompt_offsets[s : s + 2].tolist())
        tokens = slice(*batch.token_offsets[s : s + 2].tolist())
        if batch.response_mask[tokens].any():
            rows.append(
                _Row(
                    batch.prompts[s],
                    tuple(batch.prompt_ids[prompt].tolist()),
                    tuple(batch.response_ids[tokens].tolist()),
                    tuple(batch.response_mask[tokens].astype(int).tolist()),
                    tuple(batch.logprobs[tokens].tolist()),
                    float(batch.outcome[batch.trajectory_of_step[s]]),
                    advantage_T[tokens],
                )
            )
    n_fillers = -len(rows) % multiple_of if rows else multiple_of
    return [*rows, *[filler] * n_fillers]


def _advantages(rows: Sequence[_Row], completion_ids: torch.Tensor) -> torch.Tensor:
    """The advantages as float32: [R], or [R, C] for completions of C tokens if the tokens of a step differ."""
    sampled = [row.advantage_T[np.array(row.mask, dtype=np.bool_)] for row in rows]
    if all(len(values) == 0 or values.min() == values.max() for values in sampled):
        values_R = np.array([values[0] if len(values) else 0.0 for values in sampled], dtype=np.float32)
        return torch.from_numpy(values_R).to(completion_ids.device)
    values_RC = np.zeros(completion_ids.shape, dtype=np.float32)
    for r, row in enumerate(rows):
        values_RC[r, : len(row.advantage_T)] = row.advantage_T
    return torch.from_numpy(values_RC).to(completion_ids.device)


class _TrainedModel(ChatModel):
    """The model that TRL trains, as the model client of rollouts. TRL samples."""

    def __init__(self, trainer: CreditGRPOTrainer) -> None:
        model = trainer.model
        self._trainer = trainer
        self.chat_tokenizer = ChatTokenizer(trainer._tokenizer, model.generation_config.eos_token_id)
        self.end_ids = self.chat_tokenizer.end_ids
        self.max_positions = position_limit(model.config).tokens

    @property
    def version(self) -> int:
        return int(self._trainer.state.global_step)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Sample with TRL.

        A response is cut at the end of its turn and at the call's `max_tokens`, which does not change its distribution.
        """
        args = self._trainer.args
        for request in requests:
            if request.temperature != args.temperature:
                raise ConfigError(
                    f"temperature: expected that of GRPOConfig, {args.temperature:g}, in every call, "
                    f"got {request.temperature:g}"
                )
        prompts = [list(request.prompt_ids) for request in requests]
        completions, logprobs = self._trainer._generate_single_turn(prompts, None, {}, 1)
        generations = []
        for i, request in enumerate(requests):
            end = next((k for k, token in enumerate(completions[i], 1) if token in self.end_ids), None)
            ids = tuple(completions[i][:end][: request.max_tokens])
            # transformers returns no log-probabilities, and TRL computes them again for the loss.
            of_tokens = (0.0,) * len(ids) if logprobs is None else tuple(logprobs[i][: len(ids)])
            ended = bool(ids) and ids[-1] in self.end_ids
            generations.append(Generation(ids, of_tokens, "stop" if ended else "length"))
        return generations


def outcome(**_: Any) -> list[float]:
    """Give TRL the name of the logged reward; `_calculate_rewards` computes it."""
    raise AssertionError("CreditGRPOTrainer computes the rewards")


def _in_thread(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs in a thread, since a notebook has an event loop in this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="creditflow-team") as pool:
        return pool.submit(asyncio.run, work).result()
