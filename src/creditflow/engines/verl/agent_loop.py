"""verl agent-loop workers that run creditflow workflows.

A worker writes one row per trained step to TransferQueue, as verl's own workers do, and the scored trajectory, from
which credit is computed, to a separate partition.
"""

from __future__ import annotations

import asyncio
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
from creditflow.engines.verl.rollouts import RolloutRecord, partition, random_key, rollout_ids
from creditflow.engines.verl.runner import build_runner, sampled_steps
from creditflow.engines.verl.servers import ServedPolicy, Servers
from creditflow.errors import CreditflowError, first_line
from creditflow.monitoring.metrics import passes
from creditflow.rollout import Rollout
from creditflow.rollout.chat import ChatTokenizer
from creditflow.rollout.client import ChatClient, PolicyView

_UNBOUNDED = 1 << 62
"""A version that no run reaches."""


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
        servers = Servers(self.clients, sampling_params, versions, request_id)
        started = time.perf_counter()
        try:
            components, temperature = self.runner.components, 0.0 if greedy else float(sampling_params["temperature"])
            sampling = replace(components.sampling, temperature=temperature)
            recorded, report = await self.runner.run(rollout, servers, sampling)
            record = RolloutRecord.from_trajectory(recorded, report, place, components.endpoint_metrics())
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

    async def stay(self) -> None:
        """Do nothing as long as the worker lives."""
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        """Close the resources of rollouts and scoring."""
        await self.runner.close()


class CreditflowAgentLoopManager(AgentLoopManagerTQ):  # type: ignore[misc]
    """verl's manager of agent-loop workers, with workers that run teams."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(RolloutWorker)
        self._staying: list[Any] = []

    def expect_alive(self) -> None:
        """Raise CreditflowError if a worker died. Does not wait."""
        self._staying = self._staying or [worker.stay.remote() for worker in self.agent_loop_workers]
        died, _ = ray.wait(self._staying, timeout=0)
        try:
            ray.get(died)
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


def step_output(trajectory: Trajectory, step: Step, seconds: float) -> AgentLoopOutput:
    """Convert a step to a verl training row. `seconds`: the duration of the whole rollout."""
    outcome = trajectory.outcome
    return AgentLoopOutput(
        prompt_ids=list(step.prompt_ids),
        response_ids=list(step.response_ids),
        response_mask=list(step.response_mask),
        response_logprobs=list(step.logprobs),
        # Only for verl's metrics. With None, verl's reward workers would score the step.
        reward_score=outcome.rescaled if outcome is not None and outcome.status == "ok" else 0.0,
        num_turns=len(trajectory.steps),
        metrics=AgentLoopMetrics(generate_sequences=seconds),
        extra_fields={
            "min_global_steps": step.policy_version,
            "max_global_steps": step.version_spans[-1][1] if step.version_spans else step.policy_version,
            "agent": step.agent,
            "turn": step.turn,
            "reward_extra_info": {"acc": float(passes(outcome))},
        },
    )
