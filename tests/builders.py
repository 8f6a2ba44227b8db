"""Batches from compact specifications, for all tests.

batch_of(
    trajectory("a", [step("planner"), step("executor", 0.4), step("verifier", "failed")], outcome=1.0),
    trajectory("b", [step("planner"), step("executor", {"right": 1.0, "format": Score(0.5, weight=0.0)})], task="q1"),
)
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from creditflow.credit import Assignment, CreditOptions, assign
from creditflow.credit.records import PROPAGATION_RULES
from creditflow.data import Message, Score, Step, Task, Trajectory, TrajectoryBatch
from creditflow.data.trajectory import TrajectoryStatus
from creditflow.registry import Registry
from creditflow.rollout import (
    AgentSpec,
    Generation,
    GenerationRequest,
    Generator,
    Rollout,
    Sampling,
    Workflow,
    run_rollouts,
)
from creditflow.rollout.chat import ToolCall, opens_thought, parse_tool_calls

ScoreSpec = float | Score | str
"""A value, a Score, or `"failed"` / `"timeout"`."""


def mostly_slow(values: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Test parameters; `make test` runs those in `fast` only, `make test-all` all of them."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values]


def examples(number: int) -> settings:
    """Settings of a test: `number` examples in `make test-all`; a fifth of them in `make test`, but at least 20."""
    return settings(max_examples=max(min(number, 20), number * settings().max_examples // 100))


def unlocated(reason: str) -> str:
    """A failure reason without its location: `ValueError: x (f.py:3 in g)` becomes `ValueError: x`."""
    return re.sub(r" \([^()]*\.py:\d+[^()]*\)", "", reason)


def score(spec: ScoreSpec, weight: float = 1.0) -> Score:
    if isinstance(spec, Score):
        return spec
    if isinstance(spec, str):
        return Score(0.0, weight=weight, status=spec, reason="as the test wants it")  # type: ignore[arg-type]
    return Score(spec, weight=weight)


@dataclass
class StepSpec:
    agent: str
    scores: dict[str, Score]
    parents: tuple[int, ...] | None
    more: dict[str, object] = field(default_factory=dict)


def step(
    agent: str = "solver",
    scores: ScoreSpec | Mapping[str, ScoreSpec] | None = None,
    parents: Sequence[int] | None = None,
    **more: object,
) -> StepSpec:
    """Specify a step. `scores`: none, one (named "f"), or several by name. `parents`: default the step before.

    `more`: fields of Step; `tokens=k` adds k response tokens, all sampled.
    """
    if scores is None:
        named = {}
    elif isinstance(scores, Mapping):
        named = {name: score(spec) for name, spec in scores.items()}
    else:
        named = {"f": score(scores)}
    tokens = more.pop("tokens", 0)
    if tokens:
        logprobs = (-1.0,) * tokens
        more = {
            "response_ids": (7,) * tokens,
            "response_mask": (1,) * tokens,
            "logprobs": logprobs,
            "ref_logprobs": logprobs,
            **more,
        }
    return StepSpec(agent, named, None if parents is None else tuple(parents), more)


def make_trajectory(
    id: str,
    steps: Sequence[StepSpec],
    outcome: ScoreSpec | None = None,
    task: str = "q0",
    *,
    status: TrajectoryStatus = "ok",
    answer_steps: tuple[int, ...] = (),
    outcomes: Mapping[str, ScoreSpec] | None = None,
) -> Trajectory:
    """Build a trajectory from step specifications; turns are counted."""
    turns: Counter[str] = Counter()
    made = []
    for index, spec in enumerate(steps):
        fields = {"turn": turns[spec.agent], "prompt": f"{task} {spec.agent} {index}", "response": "", **spec.more}
        turns[spec.agent] += 1
        parents = spec.parents if spec.parents is not None else ((index - 1,) if index else ())
        made.append(
            Step(
                id=f"{id}.{index}",
                trajectory_id=id,
                index=index,
                agent=spec.agent,
                parents=parents,
                scores=spec.scores,
                **fields,  # type: ignore[arg-type]
            )
        )
    return Trajectory(
        id=id,
        uid=task,
        task=Task("test", ({"role": "user", "content": task},), None),
        steps=made,
        answer_steps=answer_steps,
        outcome=None if outcome is None else score(outcome),
        outcomes={agent: score(spec) for agent, spec in (outcomes or {}).items()},
        status=status,
    )


def batch_of(*trajectories: Trajectory) -> TrajectoryBatch:
    return TrajectoryBatch.from_trajectories(trajectories)


def credit_options(propagation: str = "own", **keys: Any) -> CreditOptions:
    """Options of credit from flat keys; those of a rule that does not have them are left out."""
    kind = PROPAGATION_RULES[{"none": "own"}.get(propagation, propagation)]
    flat = {"theta": keys.pop("propagation_threshold", 0.5), **keys}
    own = {f.name for f in fields(kind)}
    rule = kind(**{name: value for name, value in flat.items() if name in own})
    every = {"theta", *(f.name for rule in PROPAGATION_RULES.loaded().values() for f in fields(rule))}
    general = {name: value for name, value in keys.items() if name not in every}
    return CreditOptions(propagation=rule, **general)


def credited(*trajectories: Trajectory, **options: Any) -> Assignment:
    """The assignment of these trajectories, under the rule `threshold` unless `options` name another."""
    return assign(batch_of(*trajectories), credit_options(**{"propagation": "threshold", **options}))


class Letters:
    """Encoding of a test's model client, with one token per character."""

    def encode(self, messages: Sequence[Message], tools=()) -> tuple[str, tuple[int, ...]]:
        text = "\n".join(message["content"] for message in (*messages, *({"content": str(tool)} for tool in tools)))
        return text, tuple(map(ord, text))

    async def calls(self, ids: Sequence[int], prompt: str) -> tuple[str, list[ToolCall]]:
        return parse_tool_calls(self.decode(ids), in_thought=opens_thought(prompt))

    def follow(self, messages: Sequence[Message], prompt: str) -> tuple[int, ...]:
        return tuple(map(ord, "".join(f"[{message['content']}]" for message in messages)))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Replies(Letters):
    """A model with one token per character; `answer` maps a prompt to the response.

    `reason`: the finish reason of responses of any length. Without it, they are cut at `max_tokens`.
    """

    version = 0
    max_positions = 100_000

    def __init__(self, answer: Callable[[str], str], reason: str | None = None) -> None:
        self.answer, self.reason = answer, reason
        self.requests: list[GenerationRequest] = []
        self.batches: list[int] = []
        """Requests of each call of `generate`."""

    @property
    def prompts(self) -> list[str]:
        return [self.decode(request.prompt_ids) for request in self.requests]

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        self.requests += requests
        self.batches.append(len(requests))
        generations = []
        for request in requests:
            text = self.answer(self.decode(request.prompt_ids))
            ids = tuple(map(ord, text if self.reason else text[: request.max_tokens]))
            reason = self.reason or ("stop" if len(ids) == len(text) else "length")
            generations.append(Generation(ids, tuple(-0.5 - i for i in range(len(ids))), reason))  # type: ignore[arg-type]
        return generations


def rollout_of(k: int = 0, text: str | None = None) -> Rollout:
    message = {"role": "user", "content": f"task {k}" if text is None else text}
    return Rollout(Task("test", (message,), None, {"k": k}), f"u{k}", f"t{k}", (k,))


def run_team(
    workflow: Workflow,
    agents: Mapping[str, AgentSpec],
    generator: Generator,
    n: int = 1,
    sampling: Sampling | None = None,
    text: str | None = None,
) -> list[Trajectory]:
    """Run a workflow on the tasks `task 0`, `task 1`, ..., or on `n` tasks with this text."""
    rollouts = [rollout_of(k, text) for k in range(n)]
    return asyncio.run(run_rollouts(rollouts, workflow, agents, generator, sampling or Sampling()))


class Scripted:
    """A model with one token per byte; `answer` maps a prompt to the response bytes."""

    version = 0
    max_positions = 100_000

    def __init__(self, answer):
        self.answer = answer
        self.prompts = []

    def encode(self, messages):
        text = "\n".join(message["content"] for message in messages)
        return text, tuple(text.encode())

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")

    def generate(self, requests):
        self.prompts += [self.decode(request.prompt_ids) for request in requests]
        ids = [tuple(self.answer(self.decode(request.prompt_ids))) for request in requests]
        return [Generation(i, (-1.0,) * len(i), "stop") for i in ids]


def unregister(registry: Registry[Any], name: str) -> None:
    """Remove an entry that a test has added."""
    registry._entries.pop(name, None)
    registry._resolved.discard(name)


def without_progress(stderr: str) -> str:
    """The standard error of a command without the lines that name what it loads, repeated on a busy machine."""
    return "".join(line for line in stderr.splitlines(keepends=True) if not line.startswith("loading "))


def record_removed_keys(run: Path, *, central: bool) -> None:
    """Rewrite a run's configuration as it was recorded before `data.curriculum` and `critic.central` were removed."""
    facts, recipe = json.loads((run / "run.json").read_text()), yaml.safe_load((run / "config.yaml").read_text())
    for config in (facts["config"], recipe):
        config["critic"]["central"], config["data"]["curriculum"] = central, None
    (run / "run.json").write_text(json.dumps(facts))
    (run / "config.yaml").write_text(yaml.safe_dump(recipe))
