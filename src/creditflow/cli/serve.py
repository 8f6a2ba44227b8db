"""`creditflow serve`: a recipe's policies behind an OpenAI-compatible server, for agents that run elsewhere.

A rollout begins with the first call at its URL. It ends when its client ends it, or after a long time without a call.
The trajectories of ended rollouts are written in files of several.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from creditflow._utils.files import make_folder, write_whole
from creditflow._utils.loopback import expect_loopback
from creditflow._utils.progress import Reporter
from creditflow.config import load_recipe
from creditflow.data import Score, Task, Trajectory, TrajectoryBatch, write_parquet
from creditflow.engines.common.components import Components, build_components
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import BatchError, first_line
from creditflow.rollout import Scheduler
from creditflow.rollout.http.openai_api import Refused, parsed
from creditflow.rollout.http.server import LONGEST_NAME, OpenAIServer, Session
from creditflow.rollout.recorder import AgentSpec, Recorder

KEY_VARIABLE = "CREDITFLOW_API_KEY"
"""Environment variable of the API key; if it is unset, a key is generated and printed."""
MOST_OPEN = 4096
"""Maximum number of open rollouts."""
_LOOK = 1.0
"""Seconds between two checks for trajectories to write."""
_LONGEST_WAIT = 30.0
"""Maximum seconds a trajectory waits for its file to fill."""


def serve(
    path: Path,
    overrides: Sequence[str],
    out: Path,
    host: str,
    port: int,
    idle: float,
    per_file: int,
    *,
    remote: bool,
    reporter: Reporter,
) -> None:
    """Serve until interrupted. Raises InputError for a host that other machines can reach, unless `remote`."""
    expect_loopback(host, "needs but the API key", remote=remote)
    recipe = load_recipe(path, overrides)
    components = build_components(recipe, training=False, tasks=False)
    policy_set = PolicySet.for_rollouts(recipe)
    make_folder(out, "--out")
    asyncio.run(_serve(components, policy_set, TrajectoryWriter(out, per_file, reporter), host, port, idle, reporter))


async def _serve(
    components: Components,
    policy_set: PolicySet,
    written: TrajectoryWriter,
    host: str,
    port: int,
    idle: float,
    reporter: Reporter,
) -> None:
    given = os.environ.get(KEY_VARIABLE, "")
    scheduler = Scheduler(
        {**policy_set.policies, **components.chat_clients},
        components.recipe.config.actor_rollout_ref.rollout.max_num_seqs,
    )
    store = SessionStore(components, scheduler, written, given or secrets.token_urlsafe(24))
    store.server = server = OpenAIServer(host, port, session_factory=store).start()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    reporter.say(f"base URL: {server.url}/t/NAME/v1   NAME: whatever you call the trajectory")
    reporter.say(f"API key:  {f'that of {KEY_VARIABLE}' if given else store.api_key}")
    reporter.say(f"agents:   {', '.join(f'{spec.policy}:{name}' for name, spec in components.agents.items())}")
    reporter.say(f"trajectories are written to {written.folder} (ends with Ctrl-C)")
    fault: Exception | None = None
    try:
        while not stop.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _LOOK)
            if fault is None and (fault := scheduler.fault) is not None:
                reporter.say(
                    f"a model broke, and whoever called it got a 500: {type(fault).__name__}: {first_line(fault)}"
                )
            await store.end_idle(idle)
            written.write(all_of_them=False)
    finally:
        await asyncio.to_thread(server.stop)  # no client can begin or end a rollout from here on
        try:
            await store.end_idle(0.0)
        finally:
            written.write(all_of_them=True)
        for client in components.chat_clients.values():
            await client.aclose()


class EndRequest(BaseModel):
    """Body of a client's request to end a rollout; every field is optional."""

    model_config = ConfigDict(extra="forbid")

    uid: str | None = Field(None, max_length=LONGEST_NAME)
    """Id of the task; trajectories with the same `uid` form a group. Default: the rollout's name."""
    outcome: float | None = Field(None, ge=0, le=1)
    answer: str | None = None
    ground_truth: Any = None
    scores: dict[str, dict[str, Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]]] = {}
    """Sub-rewards in [0, 1], by response id (the step's id) and score name."""
    answer_steps: list[str] = []
    """Ids of the responses that the final answer came from. Default: the last response."""


class SessionStore:
    """The open rollouts of clients; implements the server's `Lobby`."""

    server: OpenAIServer
    agents: Mapping[str, AgentSpec]

    def __init__(self, components: Components, scheduler: Scheduler, written: TrajectoryWriter, api_key: str) -> None:
        self.api_key, self.agents = api_key, components.agents
        self._components, self._scheduler, self._written = components, scheduler, written
        self._loop = asyncio.get_running_loop()
        self._open: dict[str, Session] = {}
        self._begun = 0
        self._start = secrets.randbits(64)
        """Random part of the seeds, so that a restarted server does not repeat its samples for a task."""

    def enter(self, name: str) -> Session:
        """See `Lobby`."""
        if len(self._open) >= MOST_OPEN:
            raise Refused(
                429, f"{MOST_OPEN} trajectories are open: end some by POST /t/NAME/end", code="too_many_trajectories"
            )
        self._begun += 1
        id = f"{name}#{secrets.token_hex(4)}"  # unique in the folder, also across servers
        trajectory = Trajectory(id=id, uid=name, task=Task("served", (), None))
        seed = (self._start, self._begun)
        recorder = Recorder(self._components.agents, trajectory, self._scheduler, self._components.sampling, seed)
        session = self.server.open(recorder, self._loop, name=name, expected=False)
        self._open[name] = session
        return session

    def end(self, session: Session, body: bytes) -> Coroutine[Any, Any, Mapping[str, Any]]:
        """See `Lobby`."""
        return self._end(session, parsed(EndRequest, body or b"{}"))

    async def end_idle(self, seconds: float) -> None:
        """End rollouts without a pending call and without any call for `seconds`; 0 ends all."""
        now = time.monotonic()
        for session in list(self._open.values()):
            if seconds <= 0 or (not session.waiting and now - session.last_call > seconds):
                with suppress(Refused):  # its client ended it first
                    await self._end(session, EndRequest.model_validate({}), by_nobody=True)

    async def _end(self, session: Session, ending: EndRequest, *, by_nobody: bool = False) -> Mapping[str, Any]:
        if self._open.get(session.name) is not session:  # it has ended, and another rollout may have its name by now
            raise Refused(410, f"the trajectory {session.name} has ended", code="trajectory_ended")
        trajectory = session.recorder.trajectory
        steps = {step.id: step for step in trajectory.steps}
        for field, ids in (("scores", ending.scores), ("answer_steps", ending.answer_steps)):
            if unknown := [id for id in ids if id not in steps]:
                raise Refused(400, f"{field}: no answer of this trajectory has the id {unknown[0][:80]!r}")
        del self._open[session.name]
        if by_nobody:
            trajectory.info["ended"] = "by nobody"
        session.close()
        await session.recorder.close()
        trajectory.uid = ending.uid or trajectory.uid
        trajectory.answer = ending.answer
        trajectory.outcome = None if ending.outcome is None else Score(ending.outcome)
        trajectory.task = Task("served", trajectory.task.prompt, ending.ground_truth)
        for id, given in ending.scores.items():
            for name, value in given.items():
                steps[id].scores[name] = Score(value)
        if trajectory.steps:
            came_from = {steps[id].index for id in ending.answer_steps} or {len(trajectory.steps) - 1}
            trajectory.answer_steps = tuple(sorted(came_from))
            try:
                self._written.add(trajectory)
            except BatchError as error:
                raise Refused(400, f"the trajectory cannot be written: {first_line(error)}") from error
        return {"id": trajectory.id, "steps": len(trajectory.steps)}


class TrajectoryWriter:
    """Writer of ended trajectories to the files `trajectories-000001.parquet` and so on."""

    def __init__(self, folder: Path, per_file: int, reporter: Reporter) -> None:
        self.folder = folder
        self._per_file, self._reporter = per_file, reporter
        self._waiting: list[Trajectory] = []
        self._since = 0.0
        """Arrival time of the first waiting trajectory."""
        self._next = 1
        self._trouble = ""
        """The last message about a file that could not be written."""

    def add(self, trajectory: Trajectory) -> None:
        """Queue a trajectory. Raises BatchError if it cannot be written, so that it does not block the others."""
        try:
            TrajectoryBatch.from_trajectories([trajectory])
        except BatchError as error:
            self._reporter.say(f"{trajectory.id} cannot be written: {first_line(error)}")
            raise
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.append(trajectory)

    def write(self, *, all_of_them: bool) -> None:
        """Write full files; write everything if `all_of_them` or if the first has waited too long.

        After an OSError the trajectories stay queued and the error is printed; with `all_of_them` it is raised.
        """
        last, all_of_them = all_of_them, all_of_them or time.monotonic() - self._since > _LONGEST_WAIT
        while len(self._waiting) >= (1 if all_of_them else self._per_file):
            trajectories = self._waiting[: self._per_file]
            batch = TrajectoryBatch.from_trajectories(trajectories)
            try:
                file = self._free_name()
                try:
                    write_whole(file, partial(write_parquet, batch))
                except BaseException:
                    file.unlink(missing_ok=True)
                    self._next -= 1
                    raise
            except OSError as error:
                if last:
                    raise
                self._say_once(f"{len(self._waiting)} trajectories wait to be written: {error}")
                return
            del self._waiting[: len(trajectories)]
            self._trouble = ""
            self._reporter.say(
                f"{file.name}: {len(trajectories)} trajectories, "
                f"{sum(len(trajectory.steps) for trajectory in trajectories)} steps"
            )

    def _say_once(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._reporter.say(trouble)
        self._trouble = trouble

    def _free_name(self) -> Path:
        """Create an empty file under the next free name, since another server may write into the same folder."""
        while True:
            file = self.folder / f"trajectories-{self._next:06d}.parquet"
            self._next += 1
            with suppress(FileExistsError):
                file.touch(exist_ok=False)
                return file
