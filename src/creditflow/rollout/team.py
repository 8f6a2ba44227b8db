"""A team as a workflow sees it: named agents that one awaits, and the record of what they said."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from creditflow.chat import ToolCall, parse_tool_calls
from creditflow.errors import ConfigError, CreditflowError, PromptTooLong
from creditflow.rollout.client import ChatClient, GenerationRequest, Generator, PolicyView
from creditflow.rollout.tools import Tool, ToolResult, call_tool, shortened
from creditflow.trajectory import Message, Step, Trajectory


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Who an agent is: its system prompt, and the policy through which it acts."""

    system: str = ""
    policy: str = "default"
    tools: tuple[Tool, ...] = ()
    """What it may call, before it answers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an agent samples unless the call says otherwise."""

    max_tokens: int = 512
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    max_assistant_turns: int = 8
    """Of one step by an agent with tools: how often it may speak."""
    max_parallel_calls: int = 4
    """Calls of tools in one turn; further ones are refused."""
    max_tool_response_length: int = 2048
    """Characters of a tool's result; of a longer one, beginning and end."""


class Reply(str):
    """An agent's response: the text itself, and the step that it is recorded as.

    Of an agent that called tools, what it said last; the whole, with calls and results, is `step.response`.
    """

    step: Step

    def __new__(cls, text: str, step: Step) -> Reply:
        reply = super().__new__(cls, text)
        reply.step = step
        return reply

    @property
    def text(self) -> str:
        """The response as a plain string."""
        return str.__str__(self)


class Team:
    """The agents of one trajectory: `await team.planner(prompt)`, or `team["planner"]`."""

    def __init__(
        self,
        agents: Mapping[str, AgentSpec],
        trajectory: Trajectory,
        generator: Generator,
        sampling: Sampling,
        seed: tuple[int, ...],
    ) -> None:
        self._agents = agents
        self._trajectory = trajectory
        self._generator = generator
        self._sampling = sampling
        self._seed = seed
        self._calls = 0
        self._callers: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._state: dict[str, Any] = {}
        """What the tools of this play share."""

    def __getitem__(self, name: str) -> Agent:
        if name not in self._agents:
            raise ConfigError(f"the workflow calls agent {name!r}; team.agents has {', '.join(self._agents)}")
        return Agent(self, name)

    def __getattr__(self, name: str) -> Agent:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def answer_from(self, *replies: Reply) -> None:
        """Say which steps the answer came from; without it, the last step."""
        self._trajectory.answer_steps = tuple(sorted({reply.step.index for reply in replies}))

    async def close(self) -> None:
        """The play is over: calls that are still on their way (parallel branches of a workflow that raised) are ended,
        so that nothing changes the trajectory, or uses the model, while it is scored and trained on.
        """
        self._closed = True
        late = set(self._callers)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Knows the current task as one that waits for a model; a task waits for one at a time."""
        task = asyncio.current_task()
        assert task is not None  # coroutines run in tasks
        self._callers.add(task)
        try:
            yield
        finally:
            self._callers.discard(task)


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent of a team; awaiting a call of it makes one step."""

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
        """Ask the agent, and record its step.

        `prompt`: text (one user message) or chat messages; the agent's system prompt goes before it.
        `parents`: the replies that this prompt uses; default: the step before, as the trajectory stands now.
        `temperature`: 0 is greedy; such a step is credited, but not trained on: nothing was sampled.
        `info`: kept with the step, for reward functions (anything that JSON can hold).
        Raises PromptTooLong, which ends the trajectory as `truncated`.
        """
        team, agent, trajectory = self.team, self.name, self.team._trajectory
        if team._closed:
            raise CreditflowError(f"trajectory {trajectory.id}: {agent} was called after the play had ended")
        spec, sampling = team._agents[agent], team._sampling
        client = team._generator.clients[spec.policy]
        if parents is None:
            parent_indices: tuple[int, ...] = (len(trajectory.steps) - 1,) if trajectory.steps else ()
        else:
            parent_indices = tuple(sorted({reply.step.index for reply in parents}))
        seed = (*team._seed, team._calls)
        team._calls += 1

        messages: list[Message] = [{"role": "system", "content": spec.system}] if spec.system else []
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        limit = sampling.max_tokens if max_tokens is None else max_tokens
        temperature = sampling.temperature if temperature is None else temperature
        if limit < 1 or not 0 <= temperature < math.inf:
            raise ValueError(f"{agent}: expected max_tokens >= 1 and temperature >= 0, got {limit} and {temperature}")
        json.dumps(info)  # what cannot be written with the step is told where it was given
        call = _Call(messages, limit, temperature, seed)
        try:
            if isinstance(client, ChatClient):
                said = await self._chat(client, call)
            else:
                said = await self._generate(client, call)
        except PromptTooLong as error:
            trajectory.status = "truncated"
            trajectory.info["truncated"] = f"{agent}'s prompt {error}"
            raise PromptTooLong(f"trajectory {trajectory.id}: {agent}'s prompt {error}") from error
        index = len(trajectory.steps)
        step = Step(
            id=f"{trajectory.id}/{index}",
            trajectory_id=trajectory.id,
            index=index,
            agent=agent,
            turn=sum(earlier.agent == agent for earlier in trajectory.steps),
            parents=parent_indices,
            prompt=said.prompt,
            response=said.response,
            prompt_ids=said.prompt_ids,
            response_ids=said.response_ids,
            response_mask=said.sampled if temperature > 0 else (0,) * len(said.response_ids),
            logprobs=said.logprobs if temperature > 0 else (0.0,) * len(said.response_ids),
            temperature=temperature,
            policy=spec.policy,
            policy_version=said.version,
            info={**said.info, **(info or {})},
        )
        if said.cut_off is not None:
            step.info["finish_reason"] = "length"
            trajectory.status = "truncated"
            trajectory.info.setdefault("truncated", f"{agent} was cut off at {said.cut_off}")
        trajectory.steps.append(step)
        return Reply(said.response if said.last is None else said.last, step)

    async def _generate(self, client: PolicyView, call: _Call) -> _Said:
        """Asks a policy of the run; runs the tools that it calls, and asks again, until it calls none."""
        team, sampling = self.team, self.team._sampling
        spec, version = team._agents[self.name], client.version
        tools = {tool.name: tool for tool in spec.tools}
        prompt, prompt_ids = client.encode(call.messages, *([[tool.schema for tool in spec.tools]] if tools else []))
        room = min(sampling.max_prompt_tokens, client.max_positions - 1)
        if len(prompt_ids) > room:
            raise PromptTooLong(f"has {len(prompt_ids)} tokens, at most {room} fit")
        max_tokens = min(call.max_tokens, client.max_positions - len(prompt_ids))
        spoken = _Spoken()
        with team._calling():
            for turn in range(sampling.max_assistant_turns if tools else 1):
                seed = (*call.seed, turn) if turn else call.seed
                left = max_tokens - len(spoken.ids)
                request = GenerationRequest(prompt_ids + tuple(spoken.ids), left, call.temperature, seed)
                generation = await team._generator.generate(spec.policy, request)
                spoken.say(generation.response_ids, generation.logprobs)
                version = version if generation.version is None else generation.version
                last = client.decode(generation.response_ids)
                cut_off = generation.finish_reason == "length"
                calls = parse_tool_calls(last)[1] if tools and not cut_off else []
                if not calls or turn + 1 == sampling.max_assistant_turns:
                    break  # after the last turn nobody would read what a tool says, so none is called
                results = await self._call_tools(tools, calls, spoken)
                told = client.follow([{"role": "tool", "content": result.text} for result in results])
                if len(spoken.ids) + len(told) >= max_tokens:
                    cut_off = True
                    break
                spoken.hear(told)
        return _Said(
            prompt=prompt,
            response=client.decode(spoken.ids) if spoken.calls else last,
            last=last,
            prompt_ids=prompt_ids,
            response_ids=tuple(spoken.ids),
            sampled=tuple(spoken.mask),
            logprobs=tuple(spoken.logprobs),
            version=version,
            cut_off=f"{len(spoken.ids)} tokens" if cut_off else None,
            info={"tool_calls": spoken.calls, "turns": spoken.turns} if spoken.calls else {},
        )

    async def _call_tools(self, tools: Mapping[str, Tool], calls: list[ToolCall], spoken: _Spoken) -> list[ToolResult]:
        """What the calls of one turn come to, made together."""
        sampling, state = self.team._sampling, self.team._state
        most = sampling.max_parallel_calls
        made = await asyncio.gather(*(call_tool(tools, call, state) for call in calls[:most]))
        refused = f"error: not called: at most {most} calls at a time"
        made += [ToolResult(call.name, "error", refused) for call in calls[most:]]
        results = [replace(one, text=shortened(one.text, sampling.max_tool_response_length)) for one in made]
        for call, result in zip(calls, results, strict=True):
            arguments = None if call.arguments is None else dict(call.arguments)
            spoken.calls.append(
                {"name": call.name, "arguments": arguments, "status": result.status, "result": result.text}
            )
        return results

    async def _chat(self, client: ChatClient, call: _Call) -> _Said:
        """Asks a frozen model behind an endpoint: its tokens are not ours, so the step has none."""
        if self.team._agents[self.name].tools:
            raise ConfigError(f"team.agents.{self.name}.tools: a policy behind an endpoint calls none")
        with self.team._calling():
            reply = await client.chat(
                call.messages, max_tokens=call.max_tokens, temperature=call.temperature, seed=call.seed
            )
        counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        return _Said(
            prompt=spelled(call.messages),
            response=reply.text,
            cut_off=f"{call.max_tokens} tokens" if reply.finish_reason == "length" else None,
            info={name: count for name, count in counts.items() if count is not None},
        )


def spelled(messages: Sequence[Message]) -> str:
    """What a step has as its prompt where the model's own spelling is not known."""
    return "\n\n".join(f"[{message.get('role')}]\n{message.get('content')}" for message in messages)


@dataclass(frozen=True, slots=True)
class _Call:
    messages: list[Message]
    max_tokens: int
    temperature: float
    seed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Said:
    """What a step is made of, whoever answered."""

    prompt: str
    response: str
    last: str | None = None
    """Of a response with calls of tools, what was said after the last of them."""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    """1 for each response token that the policy wrote, 0 for what its tools did."""
    logprobs: tuple[float, ...] = ()
    version: int = 0
    cut_off: str | None = None
    """At what the response ended, where it did not end by itself."""
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Spoken:
    """A response as it grows: what the policy said, and what its tools did."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)
    """Begin and end of what the policy said, as positions in `ids`."""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def say(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The policy's own."""
        self.turns.append([len(self.ids), len(self.ids) + len(ids)])
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logprobs += logprobs

    def hear(self, ids: Sequence[int]) -> None:
        """What was told in between."""
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
