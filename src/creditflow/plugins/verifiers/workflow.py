"""A workflow that runs a task in verifiers' environment, in which each role is an agent of the team.

verifiers runs its own loop: it opens the tool servers, the conversations between roles, the stops and the scoring.
Every model call goes to the rollout's URL and becomes a step with the sampled tokens. Imports verifiers when a workflow
is made.
"""

from __future__ import annotations

import asyncio
import dis
import importlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

from creditflow.data import Task, Trajectory
from creditflow.errors import ConfigError, CreditflowError, first_line
from creditflow.plugins.verifiers.record import RECORD, TraceRecord
from creditflow.plugins.verifiers.tasks import VerifiersAddress, environment_config, parse_address, task_data
from creditflow.rollout.runner import Workflow

if TYPE_CHECKING:
    from creditflow.rollout.team import Team

_REASON_CHARACTERS = 500


def verifiers_workflow(text: str, key: str) -> Workflow:
    """The workflow of an address.

    Raises DataError for an invalid address, and ConfigError for a taskset that needs a container.
    """
    return environment_of(text, key).run


@lru_cache(maxsize=16)
def environment_of(text: str, key: str) -> RoleEnvironment:
    """The environment of an address. Raises as `verifiers_workflow`."""
    return RoleEnvironment(parse_address(text, key), key)


class RoleEnvironment:
    """verifiers' environment, with its servers on a separate event loop in a thread.

    The servers start with the first rollout and stay until the process ends. The rollout's own loop stays free.
    """

    def __init__(self, address: VerifiersAddress, key: str) -> None:
        self.address = address
        where = f"{key}: {address.text}"
        config = environment_config(address, key).model_copy(deep=True)
        v1 = importlib.import_module("verifiers.v1")
        specs = {name: value for name, value in config if isinstance(value, v1.AgentConfig)}
        _refuse_harnesses(v1, config, specs, where)
        self.roles = tuple(specs)
        """The agents of the team."""
        config = config.model_copy(update={name: _role_config(v1, name, spec) for name, spec in specs.items()})
        try:
            self.env = v1.load_environment(config)
            self.task_type = type(self.env.taskset).task_type()
            self._refuse_boxes(v1, where)
            self.weights = self._declared_weights()
            """The weights of the rewards and judges that the taskset declares, by name."""
        except CreditflowError:
            raise
        except Exception as error:  # the code of the taskset
            raise ConfigError(f"{where}: {type(error).__name__}: {first_line(error)}") from error
        self._v1 = v1
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None

    async def run(self, task: Task, team: Team) -> str:
        """Run one episode, record its traces, and return the reply that was scored."""
        data = self.task_type.data_type().model_validate_json(task_data(task, self.address.taskset))
        _refuse_data(data)
        their_task = self.task_type(data, self.env.config.taskset.task)
        with _key_variable(team.api_key) as variable:
            client = self._v1.EvalClientConfig(base_url=team.base_url, api_key_var=variable)
            # Each role has its name as its model; the rollout's server finds the agent by it.
            context = self._v1.ModelContext(model=self.roles[0], client=client)
            episode = await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._episode(their_task, context), self._running_loop())
            )
        return self._recorded(episode, team)

    # The methods below run on the environment's own loop, or start it.

    async def _episode(self, task: Any, context: Any) -> Any:
        assert self._ready is not None
        await asyncio.shield(self._ready)
        return await self.env.run_episode(task, context)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._ready = loop.create_future()
                threading.Thread(target=self._run, args=(loop,), name="creditflow-verifiers", daemon=True).start()
                self._loop = loop
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        """Serve until the process ends; verifiers itself stops its processes then."""
        assert self._ready is not None
        forever = asyncio.Event()
        try:
            async with self.env.serving():
                # A shared interception server keeps the connections of every rollout's URL. Without one, each run of
                # a role opens and closes a separate server.
                self.env._interception = None
                self._ready.set_result(None)
                await forever.wait()
        except Exception as error:  # raised to every rollout
            self._ready.set_exception(error)
            await forever.wait()

    # Checks

    def _refuse_boxes(self, v1: Any, where: str) -> None:
        """Raise ConfigError for a taskset whose tasks, hooks or tools run in a box (a container, a cloud sandbox)."""
        config = self.env.config.taskset
        if self.task_type.NEEDS_CONTAINER:
            raise _needs_box(where, f"{self.task_type.__name__} needs a container")
        shared = self.env.taskset.toolsets(config)
        for toolset in [*self.task_type.toolsets(config.task), *shared]:
            place = toolset.config
            if place.url is None and not isinstance(place.runtime, v1.SubprocessConfig):
                raise _needs_box(where, f"the tool server {toolset.server_name} runs in {place.runtime.type}")
        if self.address.runtime == "none" and (hooks := self._commanding_hooks()):
            raise ConfigError(
                f"{where}: {hooks[0]} runs commands in the rollout's box, which may run what "
                "a model wrote; creditflow gives no box. runtime=subprocess lets it run them on this machine, without "
                "a sandbox"
            )

    def _commanding_hooks(self) -> list[str]:
        """The names of the hooks of the task, and of its judges, that read their argument `runtime`."""
        task = self._blank()
        hooks: list[Callable[..., Any]] = [*task.hooks("reward"), *task.hooks("metric"), task.setup, task.finalize]
        hooks += (judge.score for judge in task.plugged_judges())
        return [h.__qualname__ for h in hooks if "runtime" in signature(h).parameters and _reads(h, "runtime")]

    def _blank(self) -> Any:
        """A task without data, for the hooks that its class and its configuration declare."""
        task = self.task_type.__new__(self.task_type)
        task.config = self.env.config.taskset.task
        return task

    def _declared_weights(self) -> dict[str, float]:
        task = self._blank()
        weights = {hook.__name__: float(getattr(hook, "_vf_weight", 1.0)) for hook in task.hooks("reward")}
        return weights | {judge.reward_name: float(judge.config.weight) for judge in task.plugged_judges()}

    # Results

    def _recorded(self, episode: Any, team: Team) -> str:
        """Record the traces of an episode with the trajectory; return the answer. Raises for a failed episode."""
        trajectory = team._recorder.trajectory
        if not self.env.complete(episode) or not trajectory.steps:
            raise CreditflowError(f"verifiers: {_reason(episode)}"[:_REASON_CHARACTERS])
        index = {step.id: step.index for step in trajectory.steps}
        traces = [_record(trace, index) for trace in episode.traces]
        trajectory.info[RECORD] = [trace.to_json() for trace in traces]
        scored = [at for at, trace in enumerate(traces) if trace.rewards and trace.steps] or [len(traces) - 1]
        for record, trace in zip(traces, episode.traces, strict=True):
            if record.steps:
                trajectory.steps[record.steps[-1]].info[RECORD] = record.scores()
            if trace.agent.trainable and (trace.is_truncated or trace.is_timeout):
                team.cut_short(f"{record.agent}: {trace.stop_condition}")
            if not trace.agent.trainable:
                _freeze(trajectory, record)
        last = [trajectory.steps[traces[at].steps[-1]].id for at in scored if traces[at].steps]
        if last:
            team.answer_from(*last)
        return str(episode.traces[scored[-1]].last_reply)


def _refuse_harnesses(v1: Any, config: Any, specs: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a role whose program is more than a conversation with tools."""
    if (bundled := v1.default_harness_id(config.taskset.id)) != "bash":
        raise _needs_box(where, f"the taskset has a harness of its own, {bundled}")
    for role, spec in specs.items():
        if spec.harness is not None and spec.harness.id not in ("null", "creditflow"):
            raise _needs_box(where, f"role {role} is run by the program {spec.harness.id}")
        if spec.harness is not None and spec.harness.skills:
            raise _needs_box(where, f"role {role} has skills, which are files in a box")


def _role_config(v1: Any, role: str, spec: Any) -> Any:
    """The role's configuration with this run's harness, model and place, and without retries.

    A retried run would leave the steps of the failed one in the trajectory.
    """
    from creditflow.plugins.verifiers.harness import InProcessHarnessConfig

    options = spec.harness.model_dump(exclude={"id"}) if spec.harness is not None else {}
    return spec.model_copy(
        update={
            "harness": InProcessHarnessConfig(**options),
            "runtime": v1.SubprocessConfig(),
            "model": role,
            "client": None,
            "retries": v1.RetryConfig(),
        }
    )


def _refuse_data(data: Any) -> None:
    """Raise ConfigError for a task that asks for a box by its data."""
    closed = "*" not in data.network_allow or bool(data.network_block)
    wishes = {"image": data.image, "agent_user": data.agent_user, "skills": data.skills, "network rules": closed}
    for name, wish in wishes.items():
        if wish:
            raise _needs_box(f"task {data.idx}", f"its data name {name}")


def _needs_box(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where}: {why}; creditflow runs conversations with tools only: run this taskset with verifiers, in its own "
        "container or sandbox"
    )


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Whether a function's code names the variable `name`, or reads all by `locals`; True for one without code."""
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    if code is None or "locals" in code.co_names:
        return True
    variables = [i.argval for i in dis.get_instructions(code) if i.opcode in (*dis.haslocal, *dis.hasfree)]
    # Since Python 3.13, one instruction may load two variables.
    return any(name in (loaded if isinstance(loaded, tuple) else (loaded,)) for loaded in variables)


@contextmanager
def _key_variable(api_key: str) -> Iterator[str]:
    """An environment variable with the rollout's key while it runs; verifiers reads keys from the environment."""
    name = f"CREDITFLOW_ROLLOUT_{secrets.token_hex(8).upper()}_API_KEY"
    os.environ[name] = api_key
    try:
        yield name
    finally:
        del os.environ[name]


def _reason(episode: Any) -> str:
    """The error that ended an episode."""
    for name, errors in [("the environment", episode.errors), *((t.agent.name, t.errors) for t in episode.traces)]:
        if errors:
            return f"{name}: {errors[-1].type}: {errors[-1].message}"
    return "no role called its model"


def _record(trace: Any, index: Mapping[str, int]) -> TraceRecord:
    from creditflow.plugins.verifiers.harness import STEPS

    rewards = {
        name: None if reward is None else (float(reward.score), float(reward.weight))
        for name, reward in trace.rewards.items()
    }
    return TraceRecord(
        agent=trace.agent.name,
        steps=tuple(index[id] for id in trace.info.get(STEPS, ())),
        rewards=rewards,
        metrics=dict(trace.metrics),
        trainable=bool(trace.agent.trainable),
        stop=trace.stop_condition,
    )


def _freeze(trajectory: Trajectory, trace: TraceRecord) -> None:
    """Exclude the steps of a role that the environment marks as not trainable from training."""
    for at in trace.steps:
        step = trajectory.steps[at]
        step.response_mask = (0,) * len(step.response_ids)
        step.logprobs = (0.0,) * len(step.response_ids)
