"""Calls of the agents of one rollout, made by a workflow or by a client of the server; each is recorded as a step."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from creditflow._utils.awaits import unawaited
from creditflow._utils.text_search import read_in
from creditflow.data import Message, Step, Trajectory
from creditflow.data.trajectory import without_nulls
from creditflow.errors import ConfigError, CreditflowError, PromptTooLong
from creditflow.rollout.chat import ToolCall, message_text, opens_thought, parse_tool_calls
from creditflow.rollout.client import ChatClient, Generation, GenerationRequest, Generator, PolicyView
from creditflow.rollout.clock import RolloutClock
from creditflow.rollout.tools import Tool, ToolResult, call_tool, shortened
from creditflow.rollout.user_code import end

_LOOKED_BACK = 64
"""Number of preceding steps whose responses are searched for in a prompt."""
_OWN = frozenset(
    ("finish_reason", "tool_calls", "turns", "prompt_tokens", "completion_tokens", "ignored", "call_number")
)
"""Keys of a step's `info` that the recorder sets, for metrics and replay. `call_number`: the number of the step's call
among all calls of the rollout, if calls of its agent ended in another order than they began."""
_SEEDED = 1 << 31
"""Precedes a caller's seed in the rollout's key, so that it differs from the number of any call."""
_LONG = 1 << 16
_LONG_PER_TOKEN = 8
"""Characters. A prompt longer than both `_LONG` and this many per free token hardly ever fits. It is tokenised in a
thread, since it would block the event loop. Other prompts are tokenised at once, so that their order is that of the
calls."""
_THOUGHT_TOKENS = 32
"""Tokens at the end of a prompt that may contain the opening tag of a thought."""
_READING = ThreadPoolExecutor(1, thread_name_prefix="creditflow-long-prompts")
"""One thread: a client that sends many long prompts waits for them."""


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """An agent's system prompt, the policy through which it acts, and its tools."""

    system: str = ""
    policy: str = "default"
    tools: tuple[Tool, ...] = ()
    """Tools that the agent may call before it answers."""
    match: str = ""
    """Regular expression: a call over HTTP without an agent's name belongs to the agent whose `match` finds its system
    prompt."""
    ignored_fields: frozenset[str] = frozenset()
    """For calls over HTTP: fields that would change the sample, and are ignored instead of refused."""

    def introduced(self, messages: Sequence[Message]) -> list[Message]:
        """Return `messages` after the agent's system prompt."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *messages]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Defaults for the sampling of an agent's calls, and the limits of a rollout."""

    max_tokens: int = 512
    max_prompt_tokens: int = 1024
    temperature: float = 1.0
    max_assistant_turns: int = 8
    """Turns of an agent with tools in one step."""
    max_parallel_calls: int = 4
    """Tool calls in one turn; further ones are refused."""
    max_tool_response_length: int = 2048
    """Characters of a tool's result; a longer one is cut in its middle."""
    timeout_s: float = 600.0
    """Seconds for one rollout; time in the run's own sampler does not count."""
    timeout_outcome: str = "mask"
    """Effect on a rollout that takes longer: `mask` makes its trajectory `failed`, `zero` gives it the worst outcome of
    its range (by default 0)."""


class Reply(str):
    """An agent's response: its text, and the step that records it.

    For an agent that called tools, the text after the last results; `step.response` holds the whole response, with
    calls and results.
    """

    step: Step
    logprobs: tuple[float, ...]
    """Log-probs of the step's response tokens, greedy ones included; `step.logprobs`, for training, are 0 for those."""
    stop_text: str
    """The stop text that ended the response; empty if none did."""
    parts: tuple[str, Sequence[ToolCall]]
    """Text and tool calls of a response that was not cut off, if the agent had tools."""

    def __new__(cls, answer: _Answer) -> Reply:
        reply = super().__new__(cls, answer.text)
        reply.step, reply.parts = answer.step, answer.parts
        reply.logprobs, reply.stop_text = answer.logprobs, answer.stop_text
        return reply

    @property
    def text(self) -> str:
        """The response as a plain string."""
        return str.__str__(self)


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One call of one agent, made by a workflow or by a client of the server."""

    agent: str
    prompt: Sequence[Message]
    """Chat messages, system prompt included."""
    parents: tuple[int, ...] | None = None
    """Indices of the steps that the prompt uses. None: those that `reads`, `spoken` and `answers` show, or else the
    step before (all steps of the last call, if it made several)."""
    reads: Sequence[str] = ()
    """Texts of the prompt that are searched for responses of earlier steps."""
    spoken: Sequence[str] = ()
    """Texts that the prompt attributes to an agent. They are compared with whole responses, even those that a step's
    own prompt contained."""
    answers: Sequence[int] = ()
    """Indices of steps whose tool calls the prompt answers."""
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    """Within a rollout, the same seed and call give the same response. None: a new seed for each call."""
    stop: tuple[str, ...] = ()
    """Texts at which the response ends. The sample up to the end of such a text is trained on; the reply ends before
    it."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """JSON schemas of functions that the caller runs; they replace the agent's tools."""
    info: Mapping[str, Any] | None = None
    ignored: Sequence[str] = ()
    """Names of ignored request fields; the step's `info["ignored"]`."""


class Recorder:
    """One rollout: its agents, and the trajectory of their calls."""

    def __init__(
        self,
        agents: Mapping[str, AgentSpec],
        trajectory: Trajectory,
        generator: Generator,
        sampling: Sampling,
        seed: tuple[int, ...],
        clock: RolloutClock | None = None,
        note: Callable[[Step], None] = lambda _: None,
    ) -> None:
        """`clock`: the rollout's time limit; None: unlimited. `note`: called with each recorded step."""
        self._note = note
        self.clock = RolloutClock(math.inf) if clock is None else clock
        self.agents = agents
        self.trajectory = trajectory
        self.sampling = sampling
        self._too_long: dict[str, PromptTooLong] = {}
        """The last prompt of each agent that had no room, until a later call of that agent is answered."""
        self.generator = generator
        self._seed = seed
        self._calls = 0
        self._latest: tuple[int, ...] = ()
        """Indices of the steps that the last completed call recorded."""
        self._examples: dict[int, int] = {}
        """For each step, how often its prompt already contained its response as an agent's message, perhaps as an
        example."""
        self._begun = 0
        self._open: dict[str, set[int]] = defaultdict(set)
        """The numbers of the unfinished calls of each agent."""
        self._newest: dict[str, int] = {}
        """The largest number of a recorded call of each agent."""
        self._callers: set[asyncio.Task[Any]] = set()
        self.ended: str | None = None
        """The reason for the rollout's end; empty if it ended by itself, None while it runs."""
        self.of_workflow = False
        """Whether a workflow writes the prompts, rather than a client that is served without one."""
        self.mistake: ConfigError | None = None
        """The first mistake of the workflow that ends the run."""
        self._state: dict[str, Any] = {}
        """The dict that the tools of this rollout share."""

    @property
    def too_long(self) -> PromptTooLong | None:
        """The last prompt that had no room, of an agent without a later answer."""
        return next(reversed(self._too_long.values()), None)

    def expect_awaited(self, what: str, value: object, place: str = "") -> None:
        """Raise ConfigError if a value is or contains a coroutine, which the workflow did not await."""
        task, steps = self.trajectory.task, self.trajectory.steps
        systems = [spec.system for spec in self.agents.values()]
        responses = [step.response for step in steps]
        if coroutine := unawaited(value, (task.prompt, task.ground_truth, task.extra_info, systems, responses)):
            text = f"{what} holds {coroutine}: expected its result; add `await` to the call"
            self.mistake = self.mistake or ConfigError(f"{text} ({place})" if place else text)
            raise self.mistake

    def expect_running(self, event: str) -> None:
        """Raise CreditflowError, with the `event` that is refused, if the rollout has ended."""
        if self.ended is not None:
            why = f": it {self.ended}" if self.ended else ""
            raise CreditflowError(f"trajectory {self.trajectory.id}: {event} after the rollout had ended{why}")

    async def close(self, why: str = "") -> None:
        """End the pending calls (parallel branches of a workflow that raised), and refuse later ones.

        Nothing may change the trajectory, or use the model, while it is scored and trained on. `why`: the reason for
        later callers; empty if the rollout ended by itself.
        """
        self.ended = why
        await end(set(self._callers))

    async def ask(self, call: AgentCall) -> Reply:
        """Return the response to one call, recorded as a step. Raises like `Agent.__call__`."""
        return self._record([await self._answer(call, self._latest)])[0]

    async def ask_all(self, calls: Sequence[AgentCall]) -> list[Reply]:
        """Return the responses to calls that are made together. Without named parents, all use the step before.

        The next caller has read one of these responses, and it is unknown which: its step uses them all.
        """
        before = self._latest
        try:
            async with asyncio.TaskGroup() as together:
                answers = [together.create_task(self._answer(call, before)) for call in calls]
        except BaseExceptionGroup as failed:  # the first error cancelled the others: the caller gets no response
            raise failed.exceptions[0] from None
        return self._record([answer.result() for answer in answers])

    async def _answer(self, call: AgentCall, before: tuple[int, ...]) -> _Answer:
        agent, trajectory = call.agent, self.trajectory
        self.expect_running(f"{agent} was called")
        if self.of_workflow:
            self.expect_awaited(f"{agent}'s prompt", call.prompt)
        answer = self._unanswered(call, self._parents(call) or before if call.parents is None else call.parents)
        client = self.generator.clients[answer.step.policy]
        self._open[agent].add(answer.number)
        try:
            if isinstance(client, ChatClient):
                await self._chat(client, answer)
            else:
                await self._generate(client, answer)
        except PromptTooLong as error:
            trajectory.status = "truncated"
            trajectory.info["truncated"] = f"{agent}'s prompt {error}"
            self._too_long.pop(agent, None)
            self._too_long[agent] = PromptTooLong(f"trajectory {trajectory.id}: {agent}'s prompt {error}")
            raise self._too_long[agent] from error
        finally:
            self._open[agent].discard(answer.number)
        return answer

    def _unanswered(self, call: AgentCall, parents: tuple[int, ...]) -> _Answer:
        """Return a call with its defaults filled in. Raises ValueError if it is invalid."""
        agent, sampling = call.agent, self.sampling
        limit = sampling.max_tokens if call.max_tokens is None else call.max_tokens
        temperature = sampling.temperature if call.temperature is None else call.temperature
        if limit < 1 or not 0 <= temperature < math.inf:
            raise ValueError(f"{agent}: expected max_tokens >= 1 and temperature >= 0, got {limit} and {temperature}")
        json.dumps(call.info)  # raises here, in the call that gave it, rather than when the step is written
        if own := _OWN.intersection(call.info or ()):
            raise ValueError(
                f"{agent}: info {', '.join(sorted(own))}: what a step keeps by these names is not the caller's"
            )
        if call.seed is None:
            seed = (*self._seed, self._calls)
            self._calls += 1
        else:
            seed = (*self._seed, _SEEDED, call.seed)
        step = Step(
            id="",
            trajectory_id=self.trajectory.id,
            index=-1,
            agent=agent,
            turn=-1,
            parents=parents,
            prompt="",
            response="",
            temperature=temperature,
            policy=self.agents[agent].policy,
        )
        self._begun += 1
        return _Answer(call, step, limit, seed, self._begun)

    def _record(self, answers: Sequence[_Answer]) -> list[Reply]:
        """Record the steps of one request together; after an error in one of its calls, none is recorded."""
        trajectory = self.trajectory
        self.expect_running("a response came")
        for answer in answers:
            call, step = answer.call, answer.step
            step.index = len(trajectory.steps)
            step.id = f"{trajectory.id}/{step.index}"
            step.turn = sum(earlier.agent == step.agent for earlier in trajectory.steps)
            step.info |= {**(call.info or {}), **({"ignored": list(call.ignored)} if call.ignored else {})}
            newest = self._newest.get(step.agent, 0)
            if answer.number < newest or any(number < answer.number for number in self._open[step.agent]):
                step.info["call_number"] = answer.number
            self._newest[step.agent] = max(newest, answer.number)
            if answer.cut_off:
                step.info["finish_reason"] = "length"
                trajectory.status = "truncated"
                trajectory.info.setdefault("truncated", f"{step.agent} was cut off at {answer.cut_off}")
            self._examples[step.index] = sum(text.strip() == step.response.strip() for text in call.spoken)
            self._too_long.pop(step.agent, None)
            trajectory.steps.append(step)
            self._note(step)
        self._latest = tuple(answer.step.index for answer in answers)
        return [Reply(answer) for answer in answers]

    def _parents(self, call: AgentCall) -> tuple[int, ...]:
        """Return the steps that the prompt shows to have been used."""
        steps = self.trajectory.steps
        used = {index for index in call.answers if 0 <= index < len(steps)}
        recent = steps[-_LOOKED_BACK:]
        spoken = Counter(text.strip() for text in call.spoken)
        source = {}
        for step in sorted(recent, key=lambda step: step.agent == call.agent):  # the caller's own responses win
            text = step.response.strip()
            if text and spoken[text] > self._examples.get(step.index, 0):
                source[text] = step.index
        used |= set(source.values())
        reads = [*call.reads, *(text for text in call.spoken if text.strip() not in source)]
        if reads and recent:
            # A response that its step's own prompt contains may come from the task: reading it again proves nothing.
            responses = ["" if step.response.strip() in step.prompt else step.response for step in recent]
            used |= {recent[at].index for at in read_in(reads, responses)}
        return tuple(sorted(used))

    async def _generate(self, client: PolicyView, answer: _Answer) -> None:
        """Sample from a policy of the run, call the requested tools and continue, until the response has no calls."""
        call, step, sampling = answer.call, answer.step, self.sampling
        spans: list[tuple[int, int]] = []
        tools = {tool.name: tool for tool in self.agents[call.agent].tools} if call.tools is None else {}
        schemas = [tool.schema for tool in tools.values()] if call.tools is None else list(call.tools)
        room = min(sampling.max_prompt_tokens, client.max_positions - 1)
        tool_calls: list[dict[str, Any]] = []
        turns: list[list[int]] = []
        results_end: tuple[int, ...] = ()
        with self._calling():
            step.prompt, step.prompt_ids = await self._read(client, call.prompt, schemas, room)
            max_tokens = min(answer.max_tokens, client.max_positions - len(step.prompt_ids))
            key = answer.key(step.prompt_ids)
            for turn in range(sampling.max_assistant_turns if tools else 1):
                seed = (*key, turn) if turn else key
                begin = len(step.response_ids)
                ids = step.prompt_ids + step.response_ids
                request = GenerationRequest(ids, max_tokens - begin, step.temperature, seed, self._seed)
                with self.clock.stopped():
                    generation = await self.generator.generate(step.policy, request)
                answer.text, n_tokens, answer.stop_text = _up_to(call.stop, client, generation.response_ids)
                _note_versions(spans, generation, begin, n_tokens, client.version)
                _append(step, generation.response_ids[:n_tokens], generation.logprobs[:n_tokens])
                turns.append([begin, len(step.response_ids)])
                cut_off = generation.finish_reason == "length" and not answer.stop_text
                if schemas and not cut_off:
                    read = step.prompt + client.decode(results_end)
                    answer.parts = parse_tool_calls(answer.text, in_thought=opens_thought(read))
                calls = answer.parts[1] if tools and not (cut_off or answer.stop_text) else ()
                if not calls or turn + 1 == sampling.max_assistant_turns:
                    break  # the results of the last turn's calls would not be read, so none is called
                results = await self._call_tools(tools, calls)
                tool_calls += results
                answers = [
                    {"role": "tool", "name": call.name, "tool_call_id": call.id or None, "content": result["result"]}
                    for call, result in zip(calls, results, strict=True)
                ]
                following = client.follow(answers, step.prompt)
                results_end = following[-_THOUGHT_TOKENS:]
                if len(step.response_ids) + len(following) >= max_tokens:
                    cut_off = True
                    break
                _append(step, following)
        step.response = client.decode(step.response_ids) if tool_calls else answer.text
        step.policy_version = spans[0][1]
        step.version_spans = tuple(spans) if len(spans) > 1 else ()
        if tool_calls:
            step.info = {"tool_calls": tool_calls, "turns": turns}
        answer.cut_off = f"{len(step.response_ids)} tokens" if cut_off else ""
        answer.logprobs = step.logprobs
        if step.temperature == 0:  # greedy tokens are not sampled
            step.response_mask, step.logprobs = (0,) * len(step.response_ids), (0.0,) * len(step.response_ids)

    async def _read(
        self, client: PolicyView, prompt: Sequence[Message], schemas: Sequence[Mapping[str, Any]], room: int
    ) -> tuple[str, tuple[int, ...]]:
        """Return the prompt as the model reads it. Raises PromptTooLong."""
        arguments = (prompt, schemas) if schemas else (prompt,)
        if len(repr(arguments)) > max(_LONG, _LONG_PER_TOKEN * room):
            read = await asyncio.get_running_loop().run_in_executor(_READING, client.encode, *arguments)
        else:
            read = client.encode(*arguments)
        if (tokens := len(read[1])) > room:
            limit = "data.max_prompt_length" if room == self.sampling.max_prompt_tokens else "the model's positions"
            raise PromptTooLong(f"has {tokens} tokens, at most {room} fit ({limit})")
        return read

    async def _call_tools(self, tools: Mapping[str, Tool], calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        """Run the calls of one turn concurrently. Return each call with its result, as the step's `info` has them."""
        most = self.sampling.max_parallel_calls
        results = await asyncio.gather(*(call_tool(tools, call, self._state) for call in calls[:most]))
        refused = f"error: not called: at most {most} calls at a time"
        results += [ToolResult(call.name, "error", refused) for call in calls[most:]]
        return [
            {
                "name": call.name,
                "arguments": None if call.arguments is None else dict(call.arguments),
                "status": result.status,
                "result": shortened(result.text, self.sampling.max_tool_response_length),
            }
            for call, result in zip(calls, results, strict=True)
        ]

    async def _chat(self, client: ChatClient, answer: _Answer) -> None:
        """Call a frozen model behind an endpoint: its tokens are unknown, so the step has none."""
        call, step = answer.call, answer.step
        if self.agents[call.agent].tools or call.tools or call.stop:
            raise ConfigError(f"{call.agent}: a policy behind an endpoint takes no tools and no stop texts")
        messages = [without_nulls(message) for message in call.prompt]
        step.prompt = spelled(messages)
        with self._calling(), self.clock.current():
            reply = await client.chat(
                messages, max_tokens=answer.max_tokens, temperature=step.temperature, seed=answer.key(step.prompt)
            )
        step.response = answer.text = reply.text
        counts = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        step.info = {name: count for name, count in counts.items() if count is not None}
        answer.cut_off = f"{answer.max_tokens} tokens" if reply.finish_reason == "length" else ""

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Mark the current task as waiting for a model; a task waits for one model at a time."""
        task = asyncio.current_task()
        assert task is not None  # coroutines run in tasks
        self._callers.add(task)
        try:
            yield
        finally:
            self._callers.discard(task)


def spelled(messages: Sequence[Message]) -> str:
    """Return the prompt of a step when the model's own rendering is unknown."""
    return "\n\n".join([f"[{message.get('role')}]\n{message_text(message)}" for message in messages])


def _up_to(stop: Sequence[str], client: PolicyView, ids: Sequence[int]) -> tuple[str, int, str]:
    """Cut a response at the first of the texts `stop`: its text, its number of tokens, and the stop text or "".

    Sampling goes from left to right, so the part before the stop has the same distribution as if sampling had ended
    there.
    """
    text = client.decode(ids)

    def place(text: str) -> tuple[int, str] | None:
        return min(((at, word) for word in stop if (at := text.find(word)) >= 0), default=None)

    if place(text) is None:
        return text, len(ids), ""
    low = bisect_left(range(len(ids)), True, key=lambda end: place(client.decode(ids[:end])) is not None)
    # a stop text after this token was never sampled, and ends nothing
    text = client.decode(ids[:low])
    position = place(text)
    assert position is not None  # the search ended where it is
    return text[: position[0]], low, position[1]


@dataclass(slots=True)
class _Answer:
    """A call and its answer, before its step is recorded."""

    call: AgentCall
    step: Step
    """Its place in the trajectory (`id`, `index`, `turn`) is set when it is recorded."""
    max_tokens: int
    seed: tuple[int, ...]
    number: int
    """The number of the call in the rollout."""
    text: str = ""
    """The text of the reply: for a response with tool calls, the part after the last results."""
    stop_text: str = ""
    logprobs: tuple[float, ...] = ()
    cut_off: str = ""
    """The limit that cut the response off; empty if none did."""
    parts: tuple[str, Sequence[ToolCall]] = ("", ())
    """Text and tool calls of the last response that was not cut off, if the agent has tools."""

    def key(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the key of the call's random numbers.

        A caller may choose the same seed for all its calls. With the same random numbers, the response to one prompt
        would depend on the response to another. So the key includes the prompt.
        """
        if self.call.seed is None:
            return self.seed
        digest = hashlib.sha256(json.dumps([self.call.agent, prompt]).encode()).digest()
        return (*self.seed, int.from_bytes(digest[:8]))


def _note_versions(
    spans: list[tuple[int, int]], generation: Generation, begin: int, n_tokens: int, current: int
) -> None:
    """Add the versions of a generation's first `n_tokens` tokens, from token `begin` of the response, to `spans`.

    `current`: the version of a generation that has none.
    """
    version = current if generation.version is None else generation.version
    for start, of_span in generation.version_spans or ((0, version),):
        if (start < n_tokens or not spans) and (not spans or spans[-1][1] != of_span):
            spans.append((begin + start, of_span))


def _append(step: Step, ids: Sequence[int], logprobs: Sequence[float] | None = None) -> None:
    """Append tokens to a response; without `logprobs`, the policy did not sample them."""
    step.response_ids += tuple(ids)
    step.response_mask += (0 if logprobs is None else 1,) * len(ids)
    step.logprobs += (0.0,) * len(ids) if logprobs is None else tuple(logprobs)
