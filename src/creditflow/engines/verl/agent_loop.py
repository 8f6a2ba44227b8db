"""verl agent-loop workers that run creditflow workflows.

A worker writes one row per trained step to TransferQueue, as verl's own workers do, with the step's sub-reward on its
tokens. It writes the scored trajectory, from which credit is computed, to a separate partition.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass

from creditflow.data import Step, Trajectory
from creditflow.engines.verl.dataset import task_from_row
from creditflow.engines.verl.recipe import read_run_handle
from creditflow.engines.verl.rollouts import SERVERS_IDLE_S, RolloutRecord, partition, random_key, rollout_ids
from creditflow.engines.verl.runner import build_runner, sampled_steps
from creditflow.engines.verl.servers import IdleClock, ServedPolicy, Servers
from creditflow.errors import CreditflowError, first_line
from creditflow.monitoring.metrics import passes
from creditflow.rollout import Rollout
from creditflow.rollout.chat import ChatTokenizer
from creditflow.rollout.client import ChatClient, PolicyView

_UNBOUNDED = 1 << 62
"""A version that no run reaches."""


class StepOutput(AgentLoopOutput):  # type: ignore[misc]
    """One step as a verl agent-loop output, with its own reward: verl would use the last step's reward for all."""

    sub_reward: float

    def as_dict(self) -> dict[str, Any]:
        """The step in verl's columns, with its own reward at the last token; verl reads the sum over tokens."""
        columns: dict[str, Any] = super().as_dict()
        columns["rm_scores"][-1] = columns.pop("sub_reward")
        return columns


class RolloutWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """An agent-loop worker that runs teams.

    `llm_client`: the client of each trained policy and the section of its model in verl's configuration.
    """

    def __init__(self, config: Any, llm_client: dict[str, tuple[Any, Any]], *args: Any) -> None:
        super().__init__(config, llm_client, *args)
        run = read_run_handle(config)
        self.own, self.synchronous = run.config, config.trainer.v1.trainer_mode == "sync"
        self.runner = build_runner(run.recipe, config.actor_rollout_ref.rollout.agent.num_workers)
        self.trained = {
            name: _served(client, model, self.rollout_config) for name, (client, model) in llm_client.items()
        }
        self.clients: dict[str, PolicyView | ChatClient] = {**self.trained, **self.runner.components.chat_clients}
        self.runner.components.rewards.connect(self.trained)
        self.idle_clock = IdleClock()

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **row: Any
    ) -> None:
        """Run one rollout and write it to TransferQueue.

        Failures are written too, so that the trainer counts them.
        """
        validate, step = bool(trajectory["validate"]), int(row["global_steps"])
        greedy = bool(row.get("greedy", False))
        place = (int(row["index"]), session_id)
        # If verl samples tasks one by one to fill a batch (gen_batch_size), a task may have two groups in one step.
        uid = "" if validate or not self.config.data.get("gen_batch_size") else row["uid"]
        group, name = rollout_ids(validate, step, *place, greedy, uid)
        rollout = Rollout(task_from_row(row), group, name, random_key(self.own.data.seed, validate, step, *place))
        # In a training step, servers hold the weights of the step before; in asynchronous modes they may be updated
        # during the rollout. A validation runs after its step's update.
        first = step if validate else step - 1
        versions = range(first, first + 1 if validate or self.synchronous else _UNBOUNDED)
        request_id = f"{name}-{row['uid'][:8]}"
        servers = Servers(self.clients, sampling_params, versions, request_id, self.idle_clock)
        started = time.perf_counter()
        try:
            components, temperature = self.runner.components, 0.0 if greedy else float(sampling_params["temperature"])
            sampling = replace(components.sampling, temperature=temperature)
            recorded, report = await self.runner.run(rollout, servers, sampling)
            record = RolloutRecord.from_trajectory(recorded, report, place, self._take_counts(validate=validate))
            if not validate:
                await self._put_rows(recorded, time.perf_counter() - started, row, session_id)
        except Exception as error:  # a recipe's functions may raise anything; the trainer counts and reports it
            record = RolloutRecord.from_error(error, rollout, place)
        await record.put(f"{row['uid']}_{session_id}", partition(validate))

    async def _put_rows(self, trajectory: Trajectory, seconds: float, row: Mapping[str, Any], session_id: int) -> None:
        steps = [trajectory.steps[i] for i in sampled_steps(trajectory, self.trained)]
        if steps:
            outputs = [step_output(trajectory, step, seconds) for step in steps]
            fields = {name: row[name] for name in ("uid", "global_steps", "index")}
            await self._agent_loop_postprocess(outputs, False, **fields, session_id=session_id)

    def _take_counts(self, *, validate: bool = False) -> dict[str, float]:
        """Endpoint metrics and idle seconds since the last record of training."""
        counts = self.runner.components.endpoint_metrics()
        return counts if validate else {**counts, SERVERS_IDLE_S: self.idle_clock.take()}

    async def alive(self) -> None:
        """Return, unless the worker has died."""

    async def aclose(self) -> None:
        """Close the resources of rollouts and scoring."""
        await self.runner.close()


class CreditflowAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager of agent-loop workers, with workers that run teams."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        self._unanswered: list[Any] = [None] * self.rollout_config.agent.num_workers

    def expect_alive(self) -> None:
        """Raise CreditflowError if a worker died.

        Does not wait: a busy worker answers at a later call.
        """
        workers = zip(self._unanswered, self.agent_loop_workers, strict=True)
        calls = [ref or worker.alive.remote() for ref, worker in workers]
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        self._unanswered = [None if ref in answered else ref for ref in calls]
        try:
            ray.get(answered)
        except ActorDiedError as error:
            raise CreditflowError(
                f"an agent-loop worker died, and its rollouts with it: {first_line(error)}; run the same command again "
                "to go on from the last checkpoint"
            ) from error

    def close(self, timeout_s: float = 30.0) -> None:
        """Close the workers' resources. Workers that do not answer end with the run."""
        closing = [worker.aclose.remote() for worker in self.agent_loop_workers]
        ray.wait(closing, num_returns=len(closing), timeout=timeout_s)


def _served(client: Any, model_section: Any, rollout: Any) -> ServedPolicy:
    model = omega_conf_to_dataclass(model_section)
    if template := model.get("custom_chat_template", None):
        model.tokenizer.chat_template = template
    chat = ChatTokenizer(model.tokenizer, getattr(model.generation_config, "eos_token_id", None))
    positions = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    return ServedPolicy(client, chat, int(positions))


def step_output(trajectory: Trajectory, step: Step, seconds: float) -> StepOutput:
    """Convert a step to a verl training row. `seconds`: the duration of the whole rollout."""
    outcome = trajectory.outcomes.get(step.agent, trajectory.outcome)
    scored = outcome is not None and outcome.status == "ok"
    return StepOutput(
        prompt_ids=list(step.prompt_ids),
        response_ids=list(step.response_ids),
        response_mask=list(step.response_mask),
        response_logprobs=list(step.logprobs),
        reward_score=0.0,  # with None, verl's reward workers would score it
        num_turns=len(trajectory.steps),
        metrics=AgentLoopMetrics(generate_sequences=seconds),
        sub_reward=sub_reward(step),
        extra_fields={
            "min_global_steps": step.policy_version,
            "max_global_steps": step.version_spans[-1][1] if step.version_spans else step.policy_version,
            "agent": step.agent,
            "turn": step.turn,
            "reward_extra_info": {
                "acc": float(passes(trajectory.outcome)),
                "outcome": outcome.rescaled if scored and outcome is not None else 0.0,
            },
        },
    )


def sub_reward(step: Step) -> float:
    """The weighted mean of the step's scores, in [0, 1]; 0 without scores, or if one failed."""
    scores = [score for score in step.scores.values() if score.weight > 0]
    if not scores or any(score.status != "ok" for score in scores):
        return 0.0
    values = [score.weight * score.rescaled_over(step.response_mask) for score in scores]
    return float(sum(values) / sum(score.weight for score in scores))
