"""Asks the agents of one play, and records every call as a step; a workflow makes them, or a client of the server."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from creditflow.chat import Prompt, PromptIds, ToolCall, message_text, opens_thought, parse_tool_calls, without_nulls
from creditflow.errors import ConfigError, CreditflowError, PromptTooLong
from creditflow.rollout.client import ChatClient, GenerationRequest, Generator, PolicyView
from creditflow.rollout.clock import RolloutClock
from creditflow.rollout.reuse import read_in
from creditflow.rollout.threads import end
from creditflow.rollout.tools import Tool, ToolResult, call_tool, shortened
from creditflow.rollout.unawaited import unawaited
from creditflow.trajectory import Message, Step, Trajectory

_LOOKED_BACK = 64
"""Of the steps before, the responses of so many are looked for in a prompt."""
_OWN = frozenset(("finish_reason", "tool_calls", "turns", "prompt_tokens", "completion_tokens", "ignored"))
"""Of a step's `info`: told by whoever answered, and read by metrics and replay."""
_SEEDED = 1 << 31
"""Stands before a seed that a caller chose: in a play's key it must not meet the number of a call."""
_LONG = 1 << 16
_LONG_PER_TOKEN = 8
"""Characters. A prompt of more, and of more for each token that there is room for, hardly ever fits: it is read beside
the event loop, which it would hold up. Those that fit are read at once, so that their order is that of the calls."""
_THOUGHT_TOKENS = 32
"""Tokens at the end of a prompt that an opening tag of a thought may take."""
_READING = ThreadPoolExecutor(1, thread_name_prefix="creditflow-long-prompts")
"""One at a time: who sends many waits for them."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """Who an agent is: its system prompt, and the policy through which it acts."""

    system: str = ""
    policy: str = "default"
    tools: tuple[Tool, ...] = ()
    """What it may call, before it answers."""
    match: str = ""
    """Regular expression: a call over HTTP that names no agent is this one's where its system prompt matches."""
    ignored_fields: frozenset[str] = frozenset()
    """Of a call over HTTP: fields that would change what is sampled, and are ignored instead of refused."""

    def introduced(self, messages: Sequence[Message]) -> list[Message]:
        """`messages` after the agent's system prompt."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an agent samples unless the call says otherwise, and how long a rollout may take."""

    max_tokens: int = 512
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    max_assistant_turns: int = 8
    """Of one step by an agent with tools: how often it may speak."""
    max_parallel_calls: int = 4
    """Calls of tools in one turn; further ones are refused."""
    max_tool_response_length: int = 2048
    """Characters of a tool's result; of a longer one, beginning and end."""
    timeout_s: float = 600.0
    """Seconds for one rollout; time in the run's own sampler does not count."""
    timeout_outcome: str = "mask"
    """Effect on a rollout that takes longer: `mask` makes its trajectory `failed`, `zero` gives it outcome 0."""


class Reply(str):
    """An agent's response: the text itself, and the step that it is recorded as.

    Of an agent that called tools, what it said last; the whole, with calls and results, is `step.response`.
    """

    step: Step
    logprobs: tuple[float, ...]
    """Of the step's response tokens; unlike the step's, which are for training, of greedy ones too."""

    def __new__(cls, text: str, step: Step, logprobs: tuple[float, ...] = ()) -> Reply:
        reply = super().__new__(cls, text)
        reply.step, reply.logprobs = step, logprobs
        return reply

    @property
    def text(self) -> str:
        """The response as a plain string."""
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one agent, as a workflow or a client of the server makes it."""

    agent: str
    prompt: Prompt
    """Chat messages, system prompt included; a text, or tokens: as the model reads it, special tokens included."""
    parents: tuple[int, ...] | None = None
    """Indices of the steps that the prompt uses; None: those that `reads` and `answers` say, or the step before (all of
    them, where one call made several)."""
    reads: Sequence[str] = ()
    """Texts of the prompt in which responses of the steps before are looked for."""
    spoken: Sequence[str] = ()
    """Those that the prompt itself calls an agent's: of a response as a whole, whatever its own step had read."""
    answers: Sequence[int] = ()
    """Indices of steps whose calls of tools the prompt answers."""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    """The same seed and call within a play: the same response. None: a new one each time."""
    stop: tuple[str, ...] = ()
    """Texts at which the response ends; what was sampled up to the end of one is trained on, it is not in the reply."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of functions that the caller itself runs, in place of the agent's own tools."""
    info: Mapping[str, Any] | None = None
    ignored: Sequence[str] = ()
    """What the caller asked for besides and nothing comes of, by name; the step's `info["ignored"]`."""


class Recorder:
    """One play: its agents, and the trajectory that their calls make."""

    def __init__(
        self,
        agents: Mapping[str, AgentSpec],
        trajectory: Trajectory,
        generator: Generator,
        sampling: Sampling,
        seed: tuple[int, ...],
        clock: RolloutClock | None = None,
    ) -> None:
        """`clock`: the rollout's time limit; None: unlimited."""
        self.clock = RolloutClock(math.inf) if clock is None else clock
        self.agents = agents
        self.trajectory = trajectory
        self.sampling = sampling
        self._too_long: dict[str, PromptTooLong] = {}
        """By agent the last prompt that had no room, until another one of that agent is answered."""
        self.generator = generator
        self._seed = seed
        self._calls = 0
        self._latest: tuple[int, ...] = ()
        """What the call made that ended last."""
        self._examples: dict[int, int] = {}
        """Of a step, how often its prompt had its response already as an agent's words: an example, it may be."""
        self._callers: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._ended_by = ""
        """The reason in the refusal of later calls, if the rollout did not end by itself."""
        self.of_workflow = False
        """Whether a workflow writes the prompts, and not a client that is served without one."""
        self.mistake: ConfigError | None = None
        """The first mistake of the workflow that ends the run."""
        self._state: dict[str, Any] = {}
        """What the tools of this play share."""

    @property
    def too_long(self) -> PromptTooLong | None:
        """The last prompt that had no room, of an agent that was not answered since."""
        return next(reversed(self._too_long.values()), None)

    def expect_awaited(self, what: str, value: object, place: str = "") -> None:
        """Raises ConfigError where a value is, holds or spells out a coroutine, which the workflow did not await.

        Texts of the task, of system prompts and of responses may spell one out.
        """
        task, steps = self.trajectory.task, self.trajectory.steps
        systems = [spec.system for spec in self.agents.values()]
        responses = [step.response for step in steps]
        found = unawaited(value, (task.prompt, task.ground_truth, task.extra_info, systems, responses))
        if found is not None:
            where = f" ({place})" if place else ""
            self.mistake = self.mistake or ConfigError(
                f"{what} holds {found}: expected its result; add `await` to the call that made it{where}"
            )
            raise self.mistake

    async def close(self, why: str = "") -> None:
        """End the calls that are still on their way (parallel branches of a workflow that raised), and refuse others.

        Nothing may change the trajectory, or use the model, while it is scored and trained on.
        `why`: the reason for later callers; empty if the rollout ended by itself.
        """
        self._closed, self._ended_by = True, f": it {why}" if why else ""
        await end(set(self._callers))

    async def ask(self, call: Call) -> Reply:
        """The response to one call, recorded as a step. Raises as `Agent.__call__` does."""
        answer = await self._answer(call, self._latest)
        return self._record([answer])[0]

    async def ask_all(self, calls: Sequence[Call]) -> list[Reply]:
        """The responses to calls that are made together; those that do not say it use the step before, all the same.

        Who calls next has read one of them, and of which that is nothing is known: it uses them all.
        """
        before = self._latest
        try:
            async with asyncio.TaskGroup() as together:
                answers = [together.create_task(self._answer(call, before)) for call in calls]
        except BaseExceptionGroup as failed:  # the others were ended with the first: who asked gets none of them
            raise failed.exceptions[0] from None
        return self._record([answer.result() for answer in answers])

    async def _answer(self, call: Call, before: tuple[int, ...]) -> _Answer:
        agent, trajectory = call.agent, self.trajectory
        if self._closed:
            reason = f"{agent} was called after the play had ended{self._ended_by}"
            raise CreditflowError(f"trajectory {trajectory.id}: {reason}")
        if self.of_workflow and not isinstance(call.prompt, PromptIds):
            self.expect_awaited(f"{agent}'s prompt", call.prompt)
        client = self.generator.clients[self.agents[agent].policy]
        asked, parents = self._resolved(call), self._parents(call) or before if call.parents is None else call.parents
        json.dumps(call.info)  # what cannot be written with the step is told where it was given
        if own := _OWN.intersection(call.info or ()):
            raise ValueError(
                f"{agent}: info {', '.join(sorted(own))}: what a step keeps by these names is not the caller's"
            )
        try:
            if isinstance(client, ChatClient):
                said = await self._chat(client, asked)
            else:
                said = await self._generate(client, asked)
        except PromptTooLong as error:
            trajectory.status = "truncated"
            trajectory.info["truncated"] = f"{agent}'s prompt {error}"
            told = PromptTooLong(f"trajectory {trajectory.id}: {agent}'s prompt {error}")
            self._too_long = {name: one for name, one in self._too_long.items() if name != agent} | {agent: told}
            raise told from error
        return _Answer(asked, parents, said)

    def _record(self, answers: Sequence[_Answer]) -> list[Reply]:
        """What was asked together becomes steps together: where one of it failed, none of it was asked."""
        if self._closed:
            raise CreditflowError(f"trajectory {self.trajectory.id}: a response came after the play had ended")
        replies = [self._step(answer) for answer in answers]
        self._latest = tuple(reply.step.index for reply in replies)
        for reply in replies:
            self._too_long.pop(reply.step.agent, None)
        return replies

    def _step(self, answer: _Answer) -> Reply:
        asked, said, call, trajectory = answer.asked, answer.said, answer.asked.call, self.trajectory
        agent, index = call.agent, len(trajectory.steps)
        step = Step(
            id=f"{trajectory.id}/{index}",
            trajectory_id=trajectory.id,
            index=index,
            agent=agent,
            turn=sum(earlier.agent == agent for earlier in trajectory.steps),
            parents=answer.parents,
            prompt=said.prompt,
            response=said.response,
            prompt_ids=said.prompt_ids,
            response_ids=said.response_ids,
            response_mask=said.sampled if asked.temperature > 0 else (0,) * len(said.response_ids),
            logprobs=said.logprobs if asked.temperature > 0 else (0.0,) * len(said.response_ids),
            temperature=asked.temperature,
            policy=self.agents[agent].policy,
            policy_version=said.version,
            info={**said.info, **(call.info or {}), **({"ignored": list(call.ignored)} if call.ignored else {})},
        )
        if said.cut_off is not None:
            step.info["finish_reason"] = "length"
            trajectory.status = "truncated"
            trajectory.info.setdefault("truncated", f"{agent} was cut off at {said.cut_off}")
        self._examples[index] = sum(text.strip() == step.response.strip() for text in call.spoken)
        trajectory.steps.append(step)
        return Reply(said.response if said.last is None else said.last, step, said.logprobs)

    def _parents(self, call: Call) -> tuple[int, ...]:
        """What the prompt itself shows to have been used."""
        steps = self.trajectory.steps
        used = {index for index in call.answers if 0 <= index < len(steps)}
        recent = steps[-_LOOKED_BACK:]
        spoken = Counter(text.strip() for text in call.spoken)
        source = {}
        for step in sorted(recent, key=lambda step: step.agent == call.agent):  # one's own words before another's
            text = step.response.strip()
            if text and spoken[text] > self._examples.get(step.index, 0):
                source[text] = step.index
        used |= set(source.values())
        reads = [*call.reads, *(text for text in call.spoken if text.strip() not in source)]
        if reads and recent:
            # What a step was told already, it may have been told by the task: to read it again proves nothing.
            said = ["" if step.response.strip() in step.prompt else step.response for step in recent]
            used |= {recent[at].index for at in read_in(reads, said)}
        return tuple(sorted(used))

    def _resolved(self, call: Call) -> _Resolved:
        sampling = self.sampling
        limit = sampling.max_tokens if call.max_tokens is None else call.max_tokens
        temperature = sampling.temperature if call.temperature is None else call.temperature
        if limit < 1 or not 0 <= temperature < math.inf:
            raise ValueError(
                f"{call.agent}: expected max_tokens >= 1 and temperature >= 0, got {limit} and {temperature}"
            )
        if call.seed is None:
            seed = (*self._seed, self._calls)
            self._calls += 1
        else:
            seed = (*self._seed, _SEEDED, call.seed)
        return _Resolved(call, limit, temperature, seed)

    async def _generate(self, client: PolicyView, asked: _Resolved) -> _Said:
        """Asks a policy of the run; runs the agent's tools that it calls, and asks again, until it calls none."""
        call, spec, sampling, version = asked.call, self.agents[asked.call.agent], self.sampling, client.version
        tools = {tool.name: tool for tool in spec.tools} if call.tools is None else {}
        schemas = [tool.schema for tool in tools.values()] if call.tools is None else list(call.tools)
        room = min(sampling.max_prompt_tokens, client.max_positions - 1)
        spoken = _Spoken()
        read_last: tuple[int, ...] = ()
        with self._calling():
            prompt, prompt_ids = await self._read(client, call.prompt, schemas, room)
            max_tokens = min(asked.max_tokens, client.max_positions - len(prompt_ids))
            key = asked.key(prompt_ids)
            for turn in range(sampling.max_assistant_turns if tools else 1):
                seed = (*key, turn) if turn else key
                left = max_tokens - len(spoken.ids)
                request = GenerationRequest(prompt_ids + tuple(spoken.ids), left, asked.temperature, seed)
                with self.clock.stopped():
                    generation = await self.generator.generate(spec.policy, request)
                version = version if generation.version is None else generation.version
                last, n_tokens, stopped = _up_to(call.stop, client, generation.response_ids)
                spoken.say(generation.response_ids[:n_tokens], generation.logprobs[:n_tokens])
                cut_off = generation.finish_reason == "length" and not stopped
                calls: list[ToolCall] = []
                if tools and not (cut_off or stopped):
                    thinking = opens_thought(client.decode(read_last) if turn else prompt)
                    calls = parse_tool_calls(last, in_thought=thinking)[1]
                if not calls or turn + 1 == sampling.max_assistant_turns:
                    break  # after the last turn nobody would read what a tool says, so none is called
                results = await self._call_tools(tools, calls, spoken)
                told = client.follow([{"role": "tool", "content": result.text} for result in results])
                read_last = told[-_THOUGHT_TOKENS:]
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

    async def _read(
        self, client: PolicyView, prompt: Prompt, schemas: Sequence[Mapping[str, Any]], room: int
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt as the model reads it. Raises PromptTooLong."""
        asked = (prompt, schemas) if schemas else (prompt,)
        if len(repr(asked)) > max(_LONG, _LONG_PER_TOKEN * room):
            read = await asyncio.get_running_loop().run_in_executor(_READING, client.encode, *asked)
        else:
            read = client.encode(*asked)
        if (tokens := len(read[1])) > room:
            raise PromptTooLong(f"has {tokens} tokens, at most {room} fit")
        return read

    async def _call_tools(self, tools: Mapping[str, Tool], calls: list[ToolCall], spoken: _Spoken) -> list[ToolResult]:
        """What the calls of one turn come to, made together."""
        sampling, state = self.sampling, self._state
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

    async def _chat(self, client: ChatClient, asked: _Resolved) -> _Said:
        """Asks a frozen model behind an endpoint: its tokens are not ours, so the step has none."""
        call = asked.call
        if self.agents[call.agent].tools or call.tools or call.stop or isinstance(call.prompt, str | PromptIds):
            raise ConfigError(f"{call.agent}: a policy behind an endpoint takes chat messages; no tools, no stop texts")
        messages = [without_nulls(message) for message in call.prompt]
        prompt = spelled(messages)
        with self._calling(), self.clock.current():
            reply = await client.chat(
                messages, max_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.key(prompt)
            )
        counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        return _Said(
            prompt=prompt,
            response=reply.text,
            cut_off=f"{asked.max_tokens} tokens" if reply.finish_reason == "length" else None,
            info={name: count for name, count in counts.items() if count is not None},
        )

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


def spelled(messages: Sequence[Message]) -> str:
    """What a step has as its prompt where the model's own spelling is not known."""
    return "\n\n".join([f"[{message.get('role')}]\n{message_text(message)}" for message in messages])


def _up_to(stop: Sequence[str], client: PolicyView, ids: Sequence[int]) -> tuple[str, int, bool]:
    """A response's text up to the first of the texts `stop`, the tokens that it takes to write that, and whether there
    was one.

    As sampling goes from left to right, what stands before is distributed as if it had been ended there.
    """
    text = client.decode(ids)

    def place(text: str) -> int | None:
        return min((at for one in stop if (at := text.find(one)) >= 0), default=None)

    if place(text) is None:
        return text, len(ids), False
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if place(client.decode(ids[:middle])) is not None else (middle + 1, high)
    text = client.decode(ids[:low])  # what stands behind was never sampled, and ends nothing
    return text[: place(text)], low, True


@dataclass(frozen=True, slots=True)
class _Resolved:
    """A call with what it left open."""

    call: Call
    max_tokens: int
    temperature: float
    seed: tuple[int, ...]

    def key(self, read: str | Sequence[int]) -> tuple[int, ...]:
        """Of its random numbers. A seed that the caller chose may be that of all its calls: were they to draw the same
        numbers, what one prompt is answered would depend on what another one was. So what was `read` is in it.
        """
        if self.call.seed is None:
            return self.seed
        digest = hashlib.sha256(json.dumps([self.call.agent, read]).encode()).digest()
        return (*self.seed, int.from_bytes(digest[:8]))


@dataclass(frozen=True, slots=True)
class _Answer:
    """A call that was answered, and is no step yet."""

    asked: _Resolved
    parents: tuple[int, ...]
    said: _Said


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
