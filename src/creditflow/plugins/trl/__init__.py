"""TRL's GRPOTrainer with the advantages of `creditflow.credit.assign`: one for each step of a team, or for each turn.

TRL samples, computes log-probabilities and the loss, and updates the model. With a workflow, creditflow runs and scores
the team, and every trained step becomes one row of TRL's batch. Without one, TRL calls the tools or the environments,
and every run of sampled tokens in a row is a step.

Importing this module imports TRL and torch.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from creditflow._utils.huggingface import position_limit
from creditflow._utils.install import pip_install
from creditflow._utils.pins import difference
from creditflow.config.references import spelled_out
from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.analysis.metrics import batch_stats
from creditflow.credit.history import History
from creditflow.credit.thresholds.tuned import Tuned
from creditflow.data import Score, Step, Trajectory, TrajectoryBatch
from creditflow.data.arrays import outcomes_of
from creditflow.data.datasets import task_of_row
from creditflow.data.trajectory import clip_rounding
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
from creditflow.rollout.user_code import result_of
from creditflow.runs import RunFolder

_TESTED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("tested.json").read_text())
"""The hash of each method of TRL that is extended, called or relied on here, in each tested version."""
_NEWEST = f"trl=={list(_TESTED)[-1]}"

try:
    import trl as installed_trl
    from trl import GRPOTrainer
except ModuleNotFoundError as missing:
    raise ConfigError(f"creditflow.plugins.trl needs {missing.name}: {pip_install(_NEWEST)}") from missing

__all__ = ["CreditGRPOTrainer"]

_POLICY = "default"
"""The policy that TRL trains."""
_LOSSES = ("dapo", "bnpo", "cispo", "vespo")
"""Losses that average over tokens. The others average over rows, of which a trajectory of a workflow has several."""
_OF_TRL = ("reward_funcs", "rollout_func", "tools", "environment_factory", "reward_processing_classes", "outcome_range")
"""Arguments for TRL's rollouts, which a workflow and its rewards replace."""
_AGENT = "assistant"
"""The agent of TRL's own rollouts."""
_UNSCORED = Score(0.0, status="failed", reason="every reward function returned None")
"""The outcome of a rollout without a reward: like TRL, credit leaves it out of its group."""

_Places = dict[int, tuple[int, int]]
"""Row and first token of steps in TRL's batch."""


class CreditGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that trains every agent's steps on creditflow's advantages.

    All agents act through the trained model, except those whose `AgentSpec.policy` names one of `frozen`. The
    `num_generations` rollouts of a task form its group. TRL's own advantages, and so `scale_rewards`, have no effect.
    """

    def __init__(
        self,
        model: Any,
        *,
        workflow: Workflow | None = None,
        rewards: Sequence[Callable[..., Any] | str] = (),
        agents: Mapping[str, AgentSpec | str] | None = None,
        credit: CreditOptions | None = None,
        sampling: Sampling | None = None,
        frozen: Mapping[str, ChatClient] | None = None,
        run_folder: Path | str | None = None,
        outcome_range: tuple[float, float] | None = None,
        max_failed_frac: float = 0.2,
        **trl: Any,
    ) -> None:
        """Set up TRL's trainer and the team.

        `workflow`: `async def solve(task, team) -> answer`; default: TRL's rollouts, whose outcome is the weighted sum
        of `reward_funcs` and `get_reward`. `rewards`: reward functions, or names of ready-made ones; at least one with
        a workflow. `agents`: system prompt or `AgentSpec` of each agent of the workflow. `credit`: options of credit;
        default: `CreditOptions()`. `sampling`: limits of a rollout; default: TRL's `max_completion_length` and
        `temperature`. `frozen`: models behind an endpoint, by policy name; each batch ends with their `aclose`, if they
        have it. `run_folder`: a new folder for the ledger, which `creditflow why`, `report` and `Ledger` read.
        `outcome_range`: lowest and highest possible weighted sum of TRL's rewards; default: 0 and 1. `max_failed_frac`:
        largest share of failed rollouts in a batch, and of failed scores of a function. `trl`: further arguments of
        GRPOTrainer, such as `args`, `train_dataset` and `environment_factory`.

        Raises ConfigError for unsupported options, and for an untested version of TRL. Training raises BatchError for a
        sum outside `outcome_range`.
        """
        _expect_tested(Path(installed_trl.__file__).parent)
        given = {**trl, "agents": agents, "sampling": sampling, "frozen": frozen, "outcome_range": outcome_range}
        for name in _OF_TRL if workflow else ("agents", "sampling", "frozen"):
            if given.get(name) is not None:
                raise ConfigError(f"{name}: expected none {'with' if workflow else 'without'} a workflow")
        if workflow and not rewards:
            raise ConfigError("rewards: expected at least one function with a workflow")
        self._outcome_range = bounds = outcome_range or (0.0, 1.0)
        if len(bounds) != 2 or not -math.inf < bounds[0] < bounds[1] < math.inf:
            raise ConfigError(f"outcome_range: expected a lowest and a highest number, got {bounds}")
        self.workflow = workflow
        team = (agents or {}) if workflow else {_AGENT: ""}
        self.agents = {name: AgentSpec(agent) if isinstance(agent, str) else agent for name, agent in team.items()}
        self.rewards = RewardManager(reward_functions_of(rewards, list(self.agents)), max_failed_frac)
        self.credit = credit or CreditOptions()
        if self.credit.estimator.critic:
            raise ConfigError(f"adv_estimator: expected one without a critic, got {self.credit.adv_estimator!r}")
        self._threshold = self.credit.propagation.make_threshold()
        if isinstance(self._threshold, Tuned):
            raise ConfigError("theta.kind: 'tuned' needs an accuracy of validation, which TRL does not give")
        self._history = History()
        self._frozen = dict(frozen or {})
        self._max_failed_frac = max_failed_frac
        self._batches = 0
        if workflow:
            trl |= {"reward_funcs": [outcome], "rollout_func": self._recorded_rows}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(model=model, **trl)
        if self.accelerator.num_processes > 1:
            raise ConfigError(f"accelerate: expected one process, got {self.accelerator.num_processes}")
        self._clients: dict[str, Any] = {}
        if workflow:
            if self.args.loss_type not in _LOSSES:
                means = f"expected {', '.join(_LOSSES)}, got {self.args.loss_type!r}, which averages over completions"
                raise ConfigError(f"loss_type: {means}")
            client = _TrainedModel(self)
            self._clients = {_POLICY: client}
            self._end_responses_at(sorted(client.end_ids))
            longest = self.args.max_completion_length
            room = client.max_positions - longest
            self.sampling = sampling or Sampling(longest, room, temperature=self.args.temperature)
            if room < 1:
                most = f"less than the model's {client.max_positions} positions"
                raise ConfigError(f"max_completion_length: expected {most}, got {longest}")
            if self.sampling.max_tokens > longest:
                most = f"at most max_completion_length ({longest})"
                raise ConfigError(f"sampling.max_tokens: expected {most}, got {self.sampling.max_tokens}")
        self._folder = None if run_folder is None else self._create_folder(Path(run_folder))

    def _end_responses_at(self, end_ids: list[int]) -> None:
        """Let TRL sample up to these tokens, and count a response that ends with one as complete."""
        self.eos_token_ids = end_ids
        if not self.use_vllm:
            self.generation_config.eos_token_id = self.generation_kwargs["eos_token_id"] = end_ids

    def _create_folder(self, path: Path) -> RunFolder:
        data = {"seed": self.args.seed, "shuffle": bool(self.args.shuffle_dataset)}
        config = {"algorithm": spelled_out(self.credit), "data": data}
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

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Make, score and credit the rollouts of the tasks in `inputs`, and return the rows to train on."""
        training = bool(self.model.training)
        mode = "train" if training else "eval"
        n = self.num_generations if training else self.num_generations_eval
        rollouts = self._rollouts(inputs, n)
        if self.workflow is None:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            trajectories, places = self._turns(rollouts)
        else:
            trajectories = result_of(self._roll_out(rollouts, self.workflow))
        report = result_of(self._score(trajectories))
        assignment = self.assign_credit(TrajectoryBatch.from_trajectories(trajectories))
        if self.workflow is not None:
            multiple_of = math.lcm(n, self.args.steps_per_generation if training else 1)
            places = self._set_rows(assignment, trajectories, multiple_of)
            output = super()._generate_and_score_completions([{"prompt": row.prompt} for row in self._rows])
            self._correct_metrics(self._metrics[mode], assignment)
        self._set_advantages(assignment, places, output)

        metrics = step_metrics(assignment.batch, report, assignment, self._threshold)
        for name, value in metrics.items():
            if math.isfinite(value):
                self._metrics[mode][name].append(value)
        if training:
            self._batches += 1
            self._threshold.update(batch_stats(assignment))
            self._history = assignment.history_after
            if self._folder is not None:
                self._folder.write_steps(self._batches, assignment.batch, assignment)
                self._folder.append_metrics(self._batches, metrics)
        return output

    def _rollouts(self, inputs: Sequence[Mapping[str, Any]], n: int) -> list[Rollout]:
        """One rollout for each of `inputs`, of which `n` in a row are the same task."""
        place = f"{self.state.global_step}-{self._batches}"
        tasks = [task_of_row({"prompt": "", **row}, "train_dataset", "trl") for row in inputs]
        return [Rollout(task, f"{place}-{i // n}", f"{place}-{i // n}-{i % n}", (i,)) for i, task in enumerate(tasks)]

    async def _roll_out(self, rollouts: Sequence[Rollout], workflow: Workflow) -> list[Trajectory]:
        """Run the team on the rollouts."""
        scheduler = Scheduler({**self._clients, **self._frozen}, max_num_seqs=len(rollouts))
        try:
            trajectories = await run_rollouts(rollouts, workflow, self.agents, scheduler, self.sampling)
        finally:  # the next batch runs on another event loop, with other connections
            for close in filter(None, (getattr(client, "aclose", None) for client in self._frozen.values())):
                await close()
        reasons = [str(trajectory.info.get("error")) for trajectory in trajectories if trajectory.status == "failed"]
        n_steps = sum(len(trajectory.steps) for trajectory in trajectories)
        expect_few_failed_rollouts(reasons, len(rollouts), n_steps, trajectories[0].info, self._max_failed_frac)
        return trajectories

    async def _score(self, trajectories: Sequence[Trajectory]) -> ScoringReport:
        async with self.rewards.open(self._clients):
            return await self.rewards.score(trajectories)

    def _generate(self, *given: Any) -> Any:
        """Generate with TRL, and keep the tokens: TRL's batch masks those of completions that it leaves out."""
        generated = super()._generate(*given)
        self._generated = generated[:3]
        return generated

    def _turns(self, rollouts: Sequence[Rollout]) -> tuple[list[Trajectory], _Places]:
        """TRL's completions as trajectories, and the row and first token of each step.

        A step is a run of sampled tokens. Those of tools and environments are in the prompts of the steps that follow.
        """
        rewards_R = (self._rewards_RK * self.reward_weights.to(self._rewards_RK.device)).nansum(dim=1)
        rewards_R[self._rewards_RK.isnan().all(dim=1)] = math.nan
        allowed = self._outcome_range
        outcomes = outcomes_of([clip_rounding(value, *allowed) for value in rewards_R.tolist()], allowed).tolist()
        ends = [*self.eos_token_ids, self._tokenizer.pad_token_id]  # of a complete response, as in TRL
        trajectories = []
        places: _Places = {}
        prompts, completions, masks = self._generated
        for row, (rollout, prompt, tokens) in enumerate(zip(rollouts, prompts, completions, strict=True)):
            steps = []
            sampled = masks[row] if masks else [1] * len(tokens)
            edges = np.flatnonzero(np.diff(sampled, prepend=0, append=0)).tolist()
            for k, (begin, end) in enumerate(zip(edges[::2], edges[1::2], strict=True)):
                read, made = prompt + tokens[:begin], tokens[begin:end]
                steps.append(
                    Step(
                        f"{rollout.id}/{k}", rollout.id, k, _AGENT, k, (k - 1,) if k else (),
                        self._tokenizer.decode(read), self._tokenizer.decode(made, skip_special_tokens=True),
                        tuple(read), tuple(made), (1,) * len(made), (0.0,) * len(made), self.args.temperature,
                        policy_version=self.state.global_step,
                    )
                )  # fmt: skip
                places[len(places)] = (row, begin)
            scored = _UNSCORED if math.isnan(outcomes[row]) else Score(outcomes[row], allowed)
            answer = steps[-1].response if steps else None
            trajectories.append(Trajectory(rollout.id, rollout.uid, rollout.task, steps, (), answer, scored))
            trajectories[-1].status = "ok" if tokens[-1] in ends else "truncated"
        return trajectories, places

    def _set_rows(self, assignment: Assignment, trajectories: Sequence[Trajectory], multiple_of: int) -> _Places:
        """Make the trained steps the rows of TRL's batch; the row and first token of each.

        Rows without trained tokens complete TRL's groups and micro-batches.
        """
        batch = assignment.batch
        steps = [step for trajectory in trajectories for step in trajectory.steps]
        trained = np.flatnonzero(assignment.groups.trained_S & (batch.sampled_of_step > 0)).tolist()
        end = (int(self._tokenizer.pad_token_id),)
        filler = Step("", "", 0, "", 0, (), "", "", end, end, (0,), (0.0,))
        n_fillers = -len(trained) % multiple_of if trained else multiple_of
        self._rows = [*(steps[s] for s in trained), *[filler] * n_fillers]
        outcomes = [*batch.outcome[batch.trajectory_of_step[trained]].tolist(), *[math.nan] * n_fillers]
        self._rewards_RK = torch.tensor(outcomes, device=self.accelerator.device)[:, None]
        return {s: (row, 0) for row, s in enumerate(trained)}

    def _set_advantages(self, assignment: Assignment, places: _Places, output: dict[str, Any]) -> None:
        """Write the advantage of each trained token [R, C], and mask all other tokens."""
        batch, advantage_T = assignment.batch, assignment.token_advantages(dtype=np.float32)
        shape = output["completion_ids"].shape
        advantage_RC, mask_RC = np.zeros(shape, dtype=np.float32), np.zeros(shape, dtype=np.int64)
        for s, (row, begin) in places.items():
            first, end = batch.token_offsets[s : s + 2].tolist()
            place = (row, slice(begin, begin + end - first))
            advantage_RC[place] = advantage_T[first:end]
            mask_RC[place] = batch.response_mask[first:end] & assignment.groups.trained_S[s]
        device = output["completion_ids"].device
        output["advantages"] = torch.from_numpy(advantage_RC).to(device)
        output["tool_mask"] = torch.from_numpy(mask_RC).to(device)
        output["num_items_in_batch"] = (output["completion_mask"] * output["tool_mask"]).sum()
        logged = self._logs["advantages"]
        for _ in range(min(len(advantage_RC), len(logged))):
            logged.pop()
        logged.extend(advantage_RC[:, 0].tolist())

    def _recorded_rows(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        """The rows of the batch as TRL's `rollout_func` returns them."""
        return {
            "prompt_ids": [list(row.prompt_ids) for row in self._rows],
            "completion_ids": [list(row.response_ids) for row in self._rows],
            "logprobs": [list(row.logprobs) for row in self._rows] if self.use_vllm else None,
            "env_mask": [list(row.response_mask) for row in self._rows],
        }

    def _calculate_rewards(self, *given: Any) -> torch.Tensor:
        """[R, K] TRL's rewards; with a workflow, [R, 1] the outcome of each row's trajectory, which TRL logs."""
        if self.workflow is None:
            self._rewards_RK = super()._calculate_rewards(*given)
        return self._rewards_RK

    def _correct_metrics(self, metrics: Mapping[str, list[float]], assignment: Assignment) -> None:
        """Replace the metrics that TRL has computed from rows by those of trajectories and of credit."""
        batch, groups = assignment.batch, assignment.groups
        known_N = torch.from_numpy(batch.outcome[~np.isnan(batch.outcome)])
        mean, spread = known_N.mean().item(), known_N.std(correction=int(len(known_N) > 1)).item()
        tied = torch.from_numpy(groups.tied_S[groups.trained_S]).double().mean().item()
        corrected = {"reward": mean, "reward_std": spread, "frac_reward_zero_std": tied}
        corrected |= {"rewards/outcome/mean": mean, "rewards/outcome/std": spread}
        for name, value in corrected.items():
            metrics[name][-1] = value


class _TrainedModel(ChatModel):
    """The model that TRL trains, as the model client of rollouts. TRL samples."""

    def __init__(self, trainer: CreditGRPOTrainer) -> None:
        model = trainer.model
        self._trainer = trainer
        options = trainer.args.chat_template_kwargs
        self.chat_tokenizer = ChatTokenizer(trainer._tokenizer, model.generation_config.eos_token_id, options)
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
                raise ConfigError(f"temperature: expected TRL's {args.temperature:g}, got {request.temperature:g}")
        prompts = [list(request.prompt_ids) for request in requests]
        completions, logprobs = self._trainer._generate_single_turn(prompts, None, {}, num_generations=1)
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


def _expect_tested(root: Path) -> None:
    """Raise ConfigError if a method in `tested.json` differs in the TRL at `root` from those of the tested versions."""
    if differs := difference(root, _TESTED):
        raise ConfigError(f"the installed trl {version('trl')} {differs}: {pip_install(_NEWEST)}")
