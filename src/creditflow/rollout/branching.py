"""Branches of a recorded trajectory: replay its first steps token for token, then sample the others anew.

The workflow runs again in a fresh environment. Every call that belongs to the kept steps gets its recorded response, in
the recorded order; tools run again, and their results are compared with the record. Calls of later steps wait until all
kept steps are replayed, so that nothing sampled can influence them. The step at which the branch begins has its
recorded prompt, and is recorded before the others. The first difference refuses the branch by name.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from creditflow.data import Message, Step, Trajectory
from creditflow.errors import CreditflowError
from creditflow.rollout.client import (
    ChatClient,
    ChatReply,
    FinishReason,
    Generation,
    GenerationRequest,
    Generator,
    PolicyView,
)
from creditflow.rollout.recorder import AgentSpec, Sampling, spelled
from creditflow.rollout.runner import Rollout, Workflow, run_rollout

REFUSED = "refused"
"""The key of a refused branch in `Trajectory.info`: the id of the recorded step at which it differs."""


async def run_branch(
    recorded: Trajectory,
    at: int,
    rollout: Rollout,
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
) -> Trajectory:
    """Run `rollout` as a branch of `recorded` that keeps the steps with an index below `at`.

    Later steps are sampled with the seed of `rollout`. `at` equal to the number of steps replays everything. For the
    other arguments see `run_rollout`.

    If the replay differs from the record, the trajectory has the status `failed`, the id of the step in
    `info["refused"]`, and the difference in `info["error"]`. Raises ValueError if `at` is not between 0 and the number
    of steps, and otherwise like `run_rollout`.
    """
    if not 0 <= at <= len(recorded.steps):
        raise ValueError(f"{recorded.id}: expected to branch at 0 to {len(recorded.steps)}, got {at}")
    policy_of = {name: spec.policy for name, spec in agents.items()}
    # Each agent has a separate client of its name, so that recorded responses are found by agent.
    named = {name: replace(spec, policy=name) for name, spec in agents.items()}
    with_tools = {name for name, spec in agents.items() if spec.tools}
    responses = _KeptResponses(generator, policy_of, with_tools, recorded.steps, at, sampling.timeout_s)
    with responses.replaying():
        trajectory = await run_rollout(rollout, workflow, named, responses, sampling, responses.note)
    for step in trajectory.steps:
        step.policy = policy_of[step.agent]
    if difference := responses.refusal or _difference(recorded.steps, at, trajectory):
        step, what = difference
        trajectory.status = "failed"
        trajectory.info |= {REFUSED: step.id, "error": f"the branch differs from the record at step {step.id}: {what}"}
    return trajectory


Difference = tuple[Step, str]
"""The first recorded step that a branch does not repeat, and what differs."""

_TURNS = 5
"""Turns of the event loop before a recorded response, in which calls made together with this one begin, and after it,
in which the recorder records its step."""

_CALLS_AFTER_REFUSAL = 100
"""Calls that get the refusal as an error. A workflow that goes on is cancelled: it would block the event loop."""

_CONTEXT = ("agent", "prompt", "prompt_ids", "parents")
"""Fields of the step at which a branch begins that equal the record."""
_KEPT = (*_CONTEXT, "response", "response_ids", "response_mask")
"""Fields of the steps before it that equal the record."""


def _difference(recorded: Sequence[Step], at: int, branch: Trajectory) -> Difference | None:
    """The first difference between the record and the first steps of a branch."""
    steps = branch.steps
    for place, step in enumerate(recorded[: at + 1]):
        if place == len(steps):
            ended = place == at and branch.status == "failed"  # by an error, which is its own reason
            return None if ended else (step, "the workflow ended before it")
        other = steps[place]
        for name in _KEPT if place < at else _CONTEXT:
            if name == "response_mask" and not any(step.response_mask):  # cleared for a policy that is not trained
                continue
            if getattr(step, name) != getattr(other, name):
                return step, f"expected {name} {_short(getattr(step, name))}, got {_short(getattr(other, name))}"
        if place < at and step.info.get("tool_calls") != other.info.get("tool_calls"):
            return step, "its tools returned other results"
    return None


def in_order_of_calls(steps: Sequence[Step]) -> list[Step]:
    """Recorded steps with the calls of each agent in the order in which they began.

    Steps without a number began after all earlier steps of their agent, and ended before all later ones began.
    """
    ordered, places = list(steps), defaultdict[str, list[int]](list)
    for place, step in enumerate(steps):
        if isinstance(step.info.get("call_number"), int):  # it may be another value in an imported trajectory
            places[step.agent].append(place)
    for of_agent in places.values():
        numbered = sorted((steps[place] for place in of_agent), key=lambda step: step.info["call_number"])
        for place, step in zip(of_agent, numbered, strict=True):
            ordered[place] = step
    return ordered


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _KeptResponses:
    """The generator of one branch: recorded responses of the kept steps in order, then the agents' policies."""

    def __init__(
        self,
        generator: Generator,
        policy_of: Mapping[str, str],
        with_tools: Collection[str],
        steps: Sequence[Step],
        at: int,
        timeout_s: float,
    ) -> None:
        self._generator, self._policy_of, self._timeout_s = generator, policy_of, timeout_s
        self._at = at
        self._kept: dict[tuple[str, object], deque[tuple[Step, int, int]]] = defaultdict(deque)
        """The recorded turns for a prompt, in the order of their calls; those of later steps are sampled anew."""
        self._later: set[tuple[str, object]] = set()
        """Calls of later recorded steps, which may be made while kept steps are replayed."""
        for step in in_order_of_calls(steps):
            turns: list[list[int]] = step.info.get("turns", [[0, len(step.response_ids)]])  # results stand between
            keys = [(step.agent, step.prompt_ids + step.response_ids[:begin]) for begin, _ in turns]
            for key in (*keys, (step.agent, step.prompt)):
                if step.index >= at:
                    self._later.add(key)
            for key, (begin, end) in zip(keys if step.index < at else keys[:1], turns, strict=False):
                self._kept[key].append((step, begin, end))
            self._kept[step.agent, step.prompt].append((step, 0, len(step.response_ids)))
        self._left = deque(step for step in steps if step.index < at)
        """The kept steps whose last response is not given yet, in order."""
        self._decision = steps[at] if at < len(steps) else None
        """The first step to sample, until it is recorded."""
        self._with_tools, self._deciding = with_tools, False
        self._changed = asyncio.Condition()
        self._giving = set[asyncio.Task[None]]()
        self.refusal: Difference | None = None
        self._refused = 0
        """The number of calls since the refusal."""
        self._replays = False
        """Whether the generator counts the branch among the rollouts that are about to call."""
        self.clients: dict[str, PolicyView | ChatClient] = {}
        for agent, policy in policy_of.items():
            client = generator.clients[policy]
            self.clients[agent] = _Chat(self, agent, client) if isinstance(client, ChatClient) else client

    @property
    def fault(self) -> Exception | None:
        return self._generator.fault

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the next batch wait for this branch until its kept steps are replayed, or until it ends."""
        if self._at > 0:
            self._replays = True
            self.expect(1)
        try:
            yield
        finally:
            self._end_replay()

    def _end_replay(self) -> None:
        if self._replays:
            self._replays = False
            self.expect(-1)

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        if (kept := await self.kept(policy, request.prompt_ids)) is None:
            first = self._deciding and self._decision is not None and self._is_decision(policy, request.prompt_ids)
            generation = await self._generator.generate(self._policy_of[policy], request)
            if first and policy not in self._with_tools:  # another call may be recorded together with it
                self._give()
            return generation
        step, begin, end = kept
        reason = finish_reason(step) if end == len(step.response_ids) else "stop"
        return Generation(step.response_ids[begin:end], step.logprobs[begin:end], reason, step.policy_version)

    async def kept(self, agent: str, prompt: object) -> tuple[Step, int, int] | None:
        """The recorded turn for a call, when it is its turn; None, after all kept steps, for a call to sample."""
        if self.refusal is not None:
            self._refused += 1
            if self._refused > _CALLS_AFTER_REFUSAL:
                raise asyncio.CancelledError
            self._raise()
        slot = None
        if waiting := self._kept.get((agent, prompt)):
            slot = (turn := waiting.popleft())[0]
            if slot.index < self._at:
                await _turns()
                await self._wait_for_turn(slot)
                if turn[2] == len(slot.response_ids):
                    self._give()
                return turn
        await asyncio.gather(*self._giving)
        if self._left:
            if (agent, prompt) not in self._later:
                await self._refuse(self._left[0], f"{agent} was called with another prompt: {_short(prompt)}")
            await self._wait_for_turn(None)
        self._end_replay()
        await self._wait_for_decision(agent, prompt, slot)
        return None

    def note(self, step: Step) -> None:
        """Release other calls when the first sampled step is recorded."""
        if self._decision is not None and step.index >= self._decision.index:
            self._give()

    def _is_decision(self, agent: str, prompt: object) -> bool:
        """Whether a call belongs to the first step to sample: with its prompt, or after a tool's result."""
        step = self._decision
        if step is None or agent != step.agent:
            return False
        if not isinstance(prompt, tuple):
            return prompt == step.prompt
        return prompt == step.prompt_ids or (self._deciding and prompt[: len(step.prompt_ids)] == step.prompt_ids)

    async def _wait_for_decision(self, agent: str, prompt: object, slot: Step | None) -> None:
        """Let the call of the first step to sample pass, and make the others wait until it is recorded.

        `slot`: the recorded step of the call, among those with its prompt.
        """
        if (step := self._decision) is None:
            return
        again = self._deciding and prompt in (step.prompt, step.prompt_ids)
        if self._is_decision(agent, prompt) and not again and (slot is None or slot is step):
            self._deciding = True
            return
        if (agent, prompt) not in self._later:
            await self._refuse(step, f"{agent} was called with another prompt: {_short(prompt)}")
        await self._wait(lambda: self._decision is None, step)

    async def _wait_for_turn(self, step: Step | None) -> None:
        """Wait until `step` is the first of the kept steps that are left, or until none is left."""
        await self._wait(lambda: self._left[0] is step if self._left else step is None)

    async def _wait(self, due: Callable[[], bool], first: Step | None = None) -> None:
        """Wait for a condition or a refusal. `first`: the step to name if it never comes; default: the first left."""
        async with self._changed:
            try:
                # A call may wait in vain: the workflow may need it before it makes an earlier call.
                waiting = self._changed.wait_for(lambda: self.refusal is not None or due())
                await asyncio.wait_for(waiting, self._timeout_s)
            except TimeoutError:
                first = first or self._left[0]
                self.refusal = self.refusal or (first, f"{first.agent} was not called for {self._timeout_s:g} s")
                self._changed.notify_all()
        if self.refusal is not None:
            self._raise()

    def _give(self) -> None:
        """Note that the last response of the first step is given, and let the recorder record it before the next."""

        async def next_one() -> None:
            try:
                await _turns()
                async with self._changed:
                    if self._left:
                        self._left.popleft()
                    else:
                        self._decision = None
                    self._changed.notify_all()
            finally:
                self.expect(-1)

        self.expect(1)  # the calls that wait for this are about to come
        task = asyncio.create_task(next_one())
        self._giving.add(task)
        task.add_done_callback(self._giving.discard)

    async def _refuse(self, step: Step, what: str) -> NoReturn:
        async with self._changed:
            self.refusal = step, what
            self._changed.notify_all()
        self._raise()

    def _raise(self) -> NoReturn:
        assert self.refusal is not None, "the caller has seen to it"
        self._end_replay()
        step, what = self.refusal
        raise CreditflowError(f"the branch differs from the record at step {step.id}: {what}")

    def expect(self, rollouts: int) -> None:
        self._generator.expect(rollouts)

    async def idle(self) -> None:
        await self._generator.idle()


class _Chat(ChatClient):
    """A frozen model behind an endpoint that is called for later steps only."""

    def __init__(self, responses: _KeptResponses, agent: str, client: ChatClient) -> None:
        self._responses, self._agent, self._client = responses, agent, client

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        if (kept := await self._responses.kept(self._agent, spelled(messages))) is not None:
            return ChatReply(kept[0].response, finish_reason(kept[0]))
        return await self._client.chat(messages, max_tokens=max_tokens, temperature=temperature, seed=seed)


def finish_reason(step: Step) -> FinishReason:
    """The reason for the end of the step's last turn."""
    return "length" if step.info.get("finish_reason") == "length" else "stop"
