"""Sessions that clients begin and end, and the files that their trajectories are written to."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from creditflow._utils.files import write_whole
from creditflow._utils.progress import Reporter
from creditflow.data import Score, Task, Trajectory, TrajectoryBatch, write_parquet
from creditflow.errors import BatchError, first_line
from creditflow.rollout.http.requests import RefusedError, parsed
from creditflow.rollout.http.server import LONGEST_NAME, OpenAIServer, Session
from creditflow.rollout.recorder import AgentSpec, Recorder, Sampling
from creditflow.rollout.scheduler import Scheduler

MOST_OPEN = 4096
"""Maximum number of open rollouts."""
_LONGEST_WAIT = 30.0
"""Maximum seconds a trajectory waits for its file to fill."""


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
    """The rollouts that clients begin by their first call and end by a request.

    `enter` and `end` are called in the server's thread; the coroutine that `end` returns runs on the rollouts' event
    loop.
    """

    server: OpenAIServer
    agents: Mapping[str, AgentSpec]
    """The agents of every rollout."""

    def __init__(
        self,
        agents: Mapping[str, AgentSpec],
        sampling: Sampling,
        scheduler: Scheduler,
        writer: TrajectoryWriter,
        api_key: str,
    ) -> None:
        """`api_key`: the key of every client."""
        self.api_key, self.agents = api_key, agents
        self._sampling, self._scheduler, self._writer = sampling, scheduler, writer
        self._loop = asyncio.get_running_loop()
        self._n_begun = 0
        self._seed = secrets.randbits(64)
        """Random part of the seeds, so that a restarted server does not repeat its samples for a task."""

    def enter(self, name: str) -> Session:
        """Begin a rollout. Raises RefusedError."""
        if len(self.server.sessions) >= MOST_OPEN:
            raise RefusedError(
                429, f"{MOST_OPEN} rollouts are open: end some by POST /t/NAME/end", code="too_many_trajectories"
            )
        self._n_begun += 1
        id = f"{name}#{secrets.token_hex(4)}"  # unique in the folder, also across servers
        trajectory = Trajectory(id=id, uid=name, task=Task("served", (), None))
        seed = (self._seed, self._n_begun)
        recorder = Recorder(self.agents, trajectory, self._scheduler, self._sampling, seed)
        return self.server.open(recorder, self._loop, name=name, expected=False)

    async def end_idle(self, seconds: float) -> None:
        """End rollouts without a pending call and without any call for `seconds`; 0 ends all."""
        now = time.monotonic()
        for session in list(self.server.sessions.values()):
            if seconds <= 0 or (not session.waiting and now - session.last_call > seconds):
                with suppress(RefusedError):  # its client ended it first
                    await self.end(session, abandoned=True)

    async def end(self, session: Session, body: bytes = b"", *, abandoned: bool = False) -> Mapping[str, Any]:
        """End a rollout and return the answer for its client. Raises RefusedError.

        `abandoned`: the server ends it, not a client.
        """
        ending = parsed(EndRequest, body or b"{}")
        if session.ended:  # another rollout may have its name by now
            raise session.refusal()
        trajectory = session.recorder.trajectory
        steps = {step.id: step for step in trajectory.steps}
        for field, ids in (("scores", ending.scores), ("answer_steps", ending.answer_steps)):
            if unknown := [id for id in ids if id not in steps]:
                raise RefusedError(400, f"{field}: no answer of this trajectory has the id {unknown[0][:80]!r}")
        if abandoned:
            trajectory.info["ended"] = "by nobody"
        session.close()
        await session.recorder.close()
        trajectory.uid = ending.uid or trajectory.uid
        trajectory.answer = ending.answer
        trajectory.outcome = None if ending.outcome is None else Score(ending.outcome)
        trajectory.task = Task("served", trajectory.task.prompt, ending.ground_truth)
        for id, scores in ending.scores.items():
            for name, value in scores.items():
                steps[id].scores[name] = Score(value)
        if trajectory.steps:
            answer = {steps[id].index for id in ending.answer_steps} or {len(trajectory.steps) - 1}
            trajectory.answer_steps = tuple(sorted(answer))
            try:
                self._writer.add(trajectory)
            except BatchError as error:
                raise RefusedError(400, f"the trajectory cannot be written: {first_line(error)}") from error
        return {"id": trajectory.id, "steps": len(trajectory.steps)}


class TrajectoryWriter:
    """Writer of ended trajectories to files `trajectories-TIME.parquet`."""

    def __init__(self, folder: Path, per_file: int, reporter: Reporter) -> None:
        self.folder = folder
        self._per_file, self._reporter = per_file, reporter
        self._waiting: list[Trajectory] = []
        self._waiting_since = 0.0
        """Arrival time of the first waiting trajectory."""
        self._last_error = ""
        """The last message about a file that could not be written."""

    def add(self, trajectory: Trajectory) -> None:
        """Queue a trajectory. Raises BatchError if it cannot be written, so that it does not block the others."""
        try:
            TrajectoryBatch.from_trajectories([trajectory])
        except BatchError as error:
            self._reporter.say(f"{trajectory.id} cannot be written: {first_line(error)}")
            raise
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting.append(trajectory)

    def write(self, *, everything: bool) -> None:
        """Write full files; write everything if `everything` or if the first has waited too long.

        After an OSError the trajectories stay queued and the error is printed; with `everything` it is raised.
        """
        late = time.monotonic() - self._waiting_since > _LONGEST_WAIT
        while len(self._waiting) >= (1 if everything or late else self._per_file):
            trajectories = self._waiting[: self._per_file]
            batch = TrajectoryBatch.from_trajectories(trajectories)
            file = self.folder / f"trajectories-{time.time_ns()}.parquet"  # another server may write into the folder
            try:
                write_whole(file, partial(write_parquet, batch))
            except OSError as error:
                if everything:
                    raise
                message = f"{len(self._waiting)} trajectories wait to be written: {error}"
                if message != self._last_error:
                    self._reporter.say(message)
                self._last_error = message
                return
            del self._waiting[: len(trajectories)]
            self._last_error = ""
            n_steps = sum(len(trajectory.steps) for trajectory in trajectories)
            self._reporter.say(f"{file.name}: {len(trajectories)} trajectories, {n_steps} steps")
