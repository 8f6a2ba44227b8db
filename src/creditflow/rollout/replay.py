"""Replay a recorded trajectory with some of its agents replaced.

A kept agent gives its recorded response to a recorded prompt, and samples from its policy for any other. So the replay
equals the record up to the first response of a replaced agent, and only the steps that depend on it are sampled again.
This module replays responses and computes no rewards.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from creditflow.data import Message, Step, Trajectory
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


async def replay_rollout(
    recorded: Trajectory,
    rollout: Rollout,
    replaced: Collection[str],
    baselines: Mapping[str, str],
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
) -> Trajectory:
    """Replay `recorded` as `rollout`, with the agents `replaced`; new responses use the seed of `rollout`.

    `baselines`: for each policy of a replaced agent, the policy of `generator` that replaces it. For the other
    arguments see `run_rollout`.
    """
    stand_ins = {name: replace(agents[name], policy=baselines[agents[name].policy]) for name in replaced}
    policy_of = {name: spec.policy for name, spec in {**agents, **stand_ins}.items()}
    # Each agent has a separate client of its name, so that recorded responses are found by agent.
    named = {name: replace(spec, policy=name) for name, spec in agents.items()}
    responses = _RecordedResponses(generator, policy_of, recorded.steps, replaced)
    trajectory = await run_rollout(rollout, workflow, named, responses, sampling)
    for step in trajectory.steps:
        step.policy = policy_of[step.agent]
    return trajectory


_QUIET_TURNS = 3
"""Turns of the event loop without a call, after which no earlier call can follow."""


class _RecordedOrder:
    """Releases recorded responses in their recorded order, so that branches meet as in the record.

    An earlier response that is no longer requested is not waited for.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._left, self._waiting, self._calls = set(indices), set[int](), 0

    async def wait_for(self, step: Step) -> None:
        """Return when it is the turn of `step`."""
        self._calls += 1
        self._waiting.add(step.index)
        try:
            await asyncio.sleep(0)  # parallel branches call before the first of them is answered
            quiet, seen = 0, self._calls
            while min(self._left) < step.index and not (quiet >= _QUIET_TURNS and min(self._waiting) == step.index):
                await asyncio.sleep(0)
                quiet, seen = (quiet + 1, seen) if self._calls == seen else (0, self._calls)
        finally:  # a cancelled call must not hold up later steps
            self._waiting.discard(step.index)
            self._left.discard(step.index)


class _RecordedResponses:
    """The generator of one replay: per agent, recorded responses first, then the agent's policy."""

    def __init__(
        self, generator: Generator, policy_of: Mapping[str, str], steps: Sequence[Step], replaced: Collection[str]
    ) -> None:
        self._generator, self._policy_of = generator, policy_of
        self._tokens: dict[tuple[str, tuple[int, ...]], deque[tuple[Step, int, int]]] = defaultdict(deque)
        texts: dict[str, dict[str, deque[Step]]] = defaultdict(lambda: defaultdict(deque))
        kept = [step for step in steps if step.agent not in replaced]
        for step in kept:
            for begin, end in recorded_turns(step):
                self._tokens[step.agent, step.prompt_ids + step.response_ids[:begin]].append((step, begin, end))
            texts[step.agent][step.prompt].append(step)
        self._order = _RecordedOrder(step.index for step in kept)
        self.clients: dict[str, PolicyView | ChatClient] = {}
        for agent, policy in policy_of.items():
            client = generator.clients[policy]
            self.clients[agent] = _Chat(client, texts[agent], self._order) if isinstance(client, ChatClient) else client

    @property
    def fault(self) -> Exception | None:
        return self._generator.fault

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        if recorded := self._tokens.get((policy, request.prompt_ids)):
            step, begin, end = recorded.popleft()
            if begin == 0:  # after a tool's result, the step's turn continues
                await self._order.wait_for(step)
            reason = finish_reason(step) if end == len(step.response_ids) else "stop"
            return Generation(step.response_ids[begin:end], step.logprobs[begin:end], reason, step.policy_version)
        return await self._generator.generate(self._policy_of[policy], request)

    def expect(self, rollouts: int) -> None:
        self._generator.expect(rollouts)

    async def idle(self) -> None:
        await self._generator.idle()


class _Chat(ChatClient):
    """A frozen model behind an endpoint that is called only for unrecorded prompts."""

    def __init__(self, client: ChatClient, recorded: Mapping[str, deque[Step]], order: _RecordedOrder) -> None:
        self._client, self._recorded, self._order = client, recorded, order

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        if recorded := self._recorded.get(spelled(messages)):
            await self._order.wait_for(step := recorded.popleft())
            return ChatReply(step.response, finish_reason(step))
        return await self._client.chat(messages, max_tokens=max_tokens, temperature=temperature, seed=seed)


def recorded_turns(step: Step) -> list[list[int]]:
    """The begin and end of each sampled turn in the step's response; tools' results stand between turns."""
    turns: list[list[int]] = step.info.get("turns", [[0, len(step.response_ids)]])
    return turns


def finish_reason(step: Step) -> FinishReason:
    """The reason for the end of the step's last turn."""
    return "length" if step.info.get("finish_reason") == "length" else "stop"
