"""Plays a recorded trajectory again with some of its agents replaced.

An agent that stays answers as it did where it is asked what it was asked then, and through its policy where it is
asked anything else; so up to the first answer of a replaced agent the play is the recorded one, and after it only what
depends on that answer is played anew. Knows who answers, not what the play was worth.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from creditflow.rollout.client import (
    ChatClient,
    ChatReply,
    FinishReason,
    Generation,
    GenerationRequest,
    Generator,
    PolicyView,
)
from creditflow.rollout.play import Play, Workflow, play_one
from creditflow.rollout.recorder import AgentSpec, Sampling, spelled
from creditflow.trajectory import Message, Step, Trajectory


async def play_again(
    recorded: Trajectory,
    play: Play,
    replaced: Collection[str],
    baselines: Mapping[str, str],
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    sampling: Sampling,
) -> Trajectory:
    """`recorded` again, as `play` (its seed is that of whatever is answered anew), without the agents `replaced`.

    `baselines`: for each policy of a replaced agent the policy of `generator` that answers for it. For the rest see
    `play_one`.
    """
    stand_ins = {name: replace(agents[name], policy=baselines[agents[name].policy]) for name in replaced}
    asked = {**agents, **stand_ins}
    # Each agent has a client of its own name: what was said is remembered agent by agent.
    named = {name: replace(spec, policy=name) for name, spec in asked.items()}
    memory = _Memory(generator, {name: spec.policy for name, spec in asked.items()}, recorded.steps, replaced)
    played = await play_one(play, workflow, named, memory, sampling)
    for step in played.steps:
        step.policy = asked[step.agent].policy
    return played


_QUIET_TURNS = 3
"""Turns of the event loop without a call after which nobody calls who could come before."""


class _Turns:
    """Lets remembered answers out in the order in which they were given, so that branches meet as they met.

    One that should come first and is not asked for any more is not waited for.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._left, self._waiting, self._calls = set(indices), set[int](), 0

    async def wait_for(self, step: Step) -> None:
        """Returns when it is the turn of `step`."""
        self._calls += 1
        self._waiting.add(step.index)
        await asyncio.sleep(0)  # branches that call together do so before the first is answered
        quiet, seen = 0, self._calls
        while min(self._left) < step.index and not (quiet >= _QUIET_TURNS and min(self._waiting) == step.index):
            await asyncio.sleep(0)
            quiet, seen = (quiet + 1, seen) if self._calls == seen else (0, self._calls)
        self._waiting.discard(step.index)
        self._left.discard(step.index)


class _Memory:
    """The generator of one play: by agent, first what is recorded, else the policy of the agent."""

    def __init__(
        self, generator: Generator, policy_of: Mapping[str, str], steps: Sequence[Step], replaced: Collection[str]
    ) -> None:
        self._generator, self._policy_of = generator, policy_of
        self._tokens: dict[tuple[str, tuple[int, ...]], deque[tuple[Step, int, int]]] = defaultdict(deque)
        texts: dict[str, dict[str, deque[Step]]] = defaultdict(lambda: defaultdict(deque))
        turns = _Turns(step.index for step in steps if step.agent not in replaced)
        for step in steps:
            if step.agent not in replaced:
                for begin, end in step.info.get("turns", [[0, len(step.response_ids)]]):
                    asked = step.prompt_ids + step.response_ids[:begin]
                    self._tokens[step.agent, asked].append((step, begin, end))
                texts[step.agent][step.prompt].append(step)
        self._turns = turns
        self.clients: dict[str, PolicyView | ChatClient] = {}
        for agent, policy in policy_of.items():
            client = generator.clients[policy]
            self.clients[agent] = _Chat(client, texts[agent], turns) if isinstance(client, ChatClient) else client

    @property
    def fault(self) -> Exception | None:
        return self._generator.fault

    async def generate(self, policy: str, request: GenerationRequest) -> Generation:
        if said := self._tokens.get((policy, request.prompt_ids)):
            step, begin, end = said.popleft()
            if begin == 0:  # after a tool's answer it is still the same step's turn
                await self._turns.wait_for(step)
            reason = _finish_reason(step) if end == len(step.response_ids) else "stop"
            return Generation(step.response_ids[begin:end], step.logprobs[begin:end], reason, step.policy_version)
        return await self._generator.generate(self._policy_of[policy], request)

    def expect(self, plays: int) -> None:
        self._generator.expect(plays)

    async def idle(self) -> None:
        await self._generator.idle()


class _Chat(ChatClient):
    """A frozen model behind an endpoint, which is asked only what it has not answered."""

    def __init__(self, client: ChatClient, said: Mapping[str, deque[Step]], turns: _Turns) -> None:
        self._client, self._said, self._turns = client, said, turns

    async def chat(
        self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: tuple[int, ...]
    ) -> ChatReply:
        if said := self._said.get(spelled(messages)):
            await self._turns.wait_for(step := said.popleft())
            return ChatReply(step.response, _finish_reason(step))
        return await self._client.chat(messages, max_tokens=max_tokens, temperature=temperature, seed=seed)


def _finish_reason(step: Step) -> FinishReason:
    return "length" if step.info.get("finish_reason") == "length" else "stop"
