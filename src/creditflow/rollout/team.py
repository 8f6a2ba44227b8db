"""A workflow's team: named agents to await, or to call over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from creditflow.data import Message
from creditflow.errors import ConfigError, CreditflowError, PromptTooLong, did_you_mean
from creditflow.rollout.recorder import AgentCall, Recorder, Reply

if TYPE_CHECKING:
    from creditflow.rollout.http.server import Session


class Team:
    """The agents of one rollout: `await team.planner(prompt)`, or `team["planner"]`.

    `base_url` and `api_key` are for agents of any framework that call their model over HTTP.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        recorder.of_workflow = True
        self._loop = asyncio.get_running_loop()
        self._session: Session | None = None
        self._opening = threading.Lock()
        """Agents in several threads may read the URL, and some of them outlive the rollout."""

    def __getitem__(self, name: str) -> Agent:
        if name not in self._recorder.agents:
            hint = did_you_mean(name, self._recorder.agents)
            raise ConfigError(
                f"the workflow calls agent {name!r}; team.agents has {', '.join(self._recorder.agents)}{hint}"
            )
        return Agent(self, name)

    def __getattr__(self, name: str) -> Agent:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    @property
    def agent_names(self) -> list[str]:
        """The names of the team's agents, in the order of the recipe."""
        return list(self._recorder.agents)

    @property
    def base_url(self) -> str:
        """The URL for clients of OpenAI and Anthropic, and libraries built on one; each call becomes a step here.

        The agent is set by the header `X-Creditflow-Agent`, by the model's name (`planner` or `default:planner`), or by
        the system prompt (`team.agents.<name>.match`, or its `system`). Needs `creditflow[serve]`; the server listens
        on loopback.
        """
        return self.open().base_url

    @property
    def api_key(self) -> str:
        """The key for `base_url`. It is valid for this rollout alone, until its end."""
        return self.open().api_key

    @property
    def client_environment(self) -> dict[str, str]:
        """Environment variables for a program that uses an official client: `OPENAI_BASE_URL` and the like.

        They hold `base_url` and `api_key` for the clients of OpenAI and of Anthropic.
        """
        return self.open().environment

    @property
    def refused_prompt(self) -> PromptTooLong | None:
        """The last prompt of a client, if it had no room."""
        return self._recorder.too_long if self._session is not None else None

    def open(self) -> Session:
        """Let clients call the rollout. Raises CreditflowError if it has ended."""
        with self._opening:
            if self._session is None or self._recorder.ended:
                self._recorder.expect_running("its URL was asked for")
            if self._session is None:
                from creditflow.rollout.http.server import open_session

                self._session = open_session(self._recorder, self._loop)
            return self._session

    def answer_from(self, *answers: Reply | str) -> None:
        """Set the steps that the answer came from; default: the last step.

        Each is a reply, or its id as clients over HTTP have it (`step_id` of a choice). Raises CreditflowError for ids
        that are not in this trajectory.
        """
        trajectory = self._recorder.trajectory
        ids = [answer.step.id if isinstance(answer, Reply) else answer for answer in answers]
        step_ids = [step.id for step in trajectory.steps]
        if unknown := [id for id in ids if id not in step_ids]:
            raise CreditflowError(
                f"trajectory {trajectory.id}: answer_from: expected replies or their ids, got {str(unknown[0])[:80]!r}"
            )
        trajectory.answer_steps = tuple(sorted({step_ids.index(id) for id in ids}))

    def keep_info(self, **values: Any) -> None:
        """Keep values in the trajectory's `info`, for reward functions (any JSON values)."""
        self._recorder.trajectory.info.update(values)

    def cut_short(self, why: str) -> None:
        """Mark the rollout as cut short (a limit of turns): it is `truncated`, and its answer is scored."""
        trajectory = self._recorder.trajectory
        trajectory.status = "truncated"
        trajectory.info.setdefault("truncated", why)

    async def close(self, why: str = "") -> None:
        """End the rollout's calls; see `Recorder.close`."""
        with self._opening:
            self._recorder.ended = why
        if self._session is not None:
            self._session.close(why)
        await self._recorder.close(why)


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent of a team; each awaited call makes one step."""

    team: Team = field(repr=False)
    name: str

    async def __call__(
        self,
        prompt: str | Sequence[Message],
        *,
        parents: Sequence[Reply] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        info: dict[str, Any] | None = None,
    ) -> Reply:
        """Call the agent, and record its step.

        `prompt`: text (one user message) or chat messages; the agent's system prompt precedes it.
        `parents`: the replies that this prompt uses; default: the step before, when the call is made.
        `temperature`: 0 is greedy; such a step is credited, but not trained on, because nothing was sampled.
        `info`: kept with the step, for reward functions (any JSON value).
        Raises PromptTooLong, which ends the trajectory as `truncated`.
        """
        recorder = self.team._recorder
        recorder.expect_awaited(f"{self.name}'s prompt", prompt)
        recorder.expect_awaited(f"{self.name}'s list of parents", parents)
        messages = recorder.agents[self.name].introduced(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        if strangers := [parent for parent in parents or () if not isinstance(parent, Reply)]:
            raise ConfigError(f"parents: expected replies, as calls of agents return them, got {strangers[0]!r:.80}")
        used = None if parents is None else tuple(sorted({reply.step.index for reply in parents}))
        call = AgentCall(self.name, messages, used, max_tokens=max_tokens, temperature=temperature, info=info)
        return await recorder.ask(call)
