"""The agent loop that runs a recipe's workflow, and the workers and their manager around it.

A worker writes one row per trained step to TransferQueue, as verl's own workers do. The loop writes the scored
trajectory, from which credit is computed, to a separate partition.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from dataclasses import replace
from typing import Any

import ray
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.config import omega_conf_to_dataclass

from creditflow.data import Step, Trajectory
from creditflow.data.table import pack
from creditflow.engines.verl.recipe import KEY, read_run_handle
from creditflow.engines.verl.rollouts import RolloutRecord, partition, rollout_of
from creditflow.engines.verl.runner import build_runner, sampled_steps
from creditflow.engines.verl.servers import ServedPolicy, Servers
from creditflow.errors import CreditflowError, first_line
from creditflow.monitoring.metrics import passes
from creditflow.rollout.chat import ChatTokenizer
from creditflow.rollout.client import ChatClient, PolicyView

_UNBOUNDED = 1 << 62
"""A version that no run reaches."""


class RolloutWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[misc]
    """An agent-loop worker, with the clients and the runner that the rollouts of its process share.

    `llm_client`: the client of each trained policy and the section of its model in verl's configuration.
    """

    def __init__(self, config: Any, llm_client: dict[str, tuple[Any, Any]], *args: Any) -> None:
        super().__init__(config, self, *args)  # verl passes its second argument to each agent loop
        run = read_run_handle(config)
        self.seed, self.synchronous = run.config.data.seed, config.trainer.v1.trainer_mode == "sync"
        self.runner = build_runner(run.recipe, config.actor_rollout_ref.rollout.agent.num_workers)
        self.trained = {
            name: _served(client, model, self.rollout_config, config.data.get("apply_chat_template_kwargs"))
            for name, (client, model) in llm_client.items()
        }
        self.clients: dict[str, PolicyView | ChatClient] = {**self.trained, **self.runner.components.chat_clients}
        self.runner.components.rewards.connect(self.trained)

    async def _agent_loop_postprocess(self, output: list[AgentLoopOutput], validate: bool, **row: Any) -> None:
        """Write the rows of a rollout. verl alone would copy all fields of the task into each of them."""
        if output:
            fields = {name: row[name] for name in ("uid", "session_id", "global_steps", "index")}
            await super()._agent_loop_postprocess(output, validate, **fields)

    async def stay(self) -> None:
        """Do nothing as long as the worker lives."""
        await asyncio.Event().wait()

    async def aclose(self) -> None:
        """Close the resources of rollouts and scoring."""
        await self.runner.close()


@register(KEY)
class WorkflowLoop(AgentLoopBase):  # type: ignore[misc]
    """verl's agent loop of a recipe: runs and scores one rollout of the workflow."""

    def __init__(self, server_manager: RolloutWorker, **_: Any) -> None:
        self.worker = server_manager

    async def run(self, sampling_params: dict[str, Any], session_id: int, **row: Any) -> list[AgentLoopOutput]:
        """Write the rollout's record to TransferQueue; return the rows of its trained steps.

        Failures are written too, so that the trainer counts them.
        """
        worker, step, greedy = self.worker, int(row["global_steps"]), bool(row.get("greedy"))
        validate = "greedy" in row
        place = (int(row["index"]), session_id)
        # If verl samples tasks one by one to fill a batch (gen_batch_size), a task may have two groups in one step.
        uid = "" if validate or not worker.config.data.get("gen_batch_size") else row["uid"]
        rollout = rollout_of(pickle.loads(row["raw_prompt"]), worker.seed, validate, step, place, greedy, uid)
        # In a training step, servers hold the weights of the step before; in asynchronous modes they may be updated
        # during the rollout. A validation runs after its step's update.
        first = step if validate else step - 1
        versions = range(first, first + 1 if validate or worker.synchronous else _UNBOUNDED)
        servers = Servers(worker.clients, sampling_params, versions, f"{rollout.id}-{row['uid'][:8]}")
        components, temperature = worker.runner.components, 0.0 if greedy else float(sampling_params["temperature"])
        started, rows = time.perf_counter(), list[AgentLoopOutput]()
        try:
            sampling = replace(components.sampling, temperature=temperature)
            recorded, report = await worker.runner.run(rollout, servers, sampling)
            record = RolloutRecord(place, pack(recorded), report, components.endpoint_metrics())
            if not validate:
                seconds, trained = time.perf_counter() - started, sampled_steps(recorded, worker.trained)
                rows = [step_output(recorded, recorded.steps[i], seconds) for i in trained]
        except Exception as error:  # a recipe's functions may raise anything; the trainer counts and reports it
            record = RolloutRecord.from_error(error, rollout, place)
        await record.put(f"{row['uid']}_{session_id}", partition(validate))
        return rows


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


def _served(client: Any, model_section: Any, rollout: Any, template_options: Any) -> ServedPolicy:
    model = omega_conf_to_dataclass(model_section)
    if template := model.get("custom_chat_template", None):
        model.tokenizer.chat_template = template
    end_ids = getattr(model.generation_config, "eos_token_id", None)
    chat = ChatTokenizer(model.tokenizer, end_ids, OmegaConf.to_container(template_options or OmegaConf.create()))
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
