"""A chain of tool calls: search in a small corpus, a key-value store, a calculator; 30 steps by default.

A task is a small program in words: facts to look up and operations on stored values, each under a name. Four agents
write the calls, one a turn, and none sees the whole program: the searcher `search price ruby`, the clerk `put a 3 4`,
the reader `get a`, the calculator `calc 3 4 + 1 7`. Real tools execute them. An invalid call returns 0 0, and the
rollout continues: later steps inherit an early mistake. With `facts` facts and `operations` operations that is
2 * facts + 4 * operations steps.

A step's parents are the steps that its call reads from: for a `get` the `put` that last wrote that name, for a sum both
values, for a `put` the call with the stored result. A sub-reward judges a call given its prompt; the outcome is whether
the last value is right.

Recipe settings (`recipe.*`): `facts`, `operations`; `train_tasks`, `val_tasks`, `val_split`; `hidden`, `layers`;
`warmup`, the sampled accuracy of every agent at which the warm-up stops; `warmup_seed`, which decides its initial
weights and examples.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from creditflow import Step, Task, Team, Trajectory, outcome, reward
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.warm_up import sampled_accuracy, warm_up, word_model
from creditflow.rollout import Reply

VERBS = {"+": ("plus", "gains", "and"), "-": ("minus", "without", "less"), "*": ("times", "multiplied")}
NAMES = tuple("abcdefghijklmnopqrstuvwxyz")
THINGS = ("ruby", "pearl", "amber", "jade", "opal", "topaz", "coral", "onyx")
QUALITIES = ("price", "weight", "age")
DIGITS = tuple("0123456789")
NOTHING = "0 0"
"""The result of an invalid call, or of a call that finds nothing."""


def digits(number: int) -> str:
    """Two digits, one token each."""
    return f"{number // 10} {number % 10}"


def compute(a: int, operation: str, b: int) -> int:
    """One operation modulo 100."""
    return {"+": a + b, "-": a - b, "*": a * b}[operation] % 100


# The task


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """The tasks of a split; `tune` is a third split, with unreported problems for choosing learning rates."""
    number = {"train": recipe["train_tasks"], "val": recipe["val_tasks"]}[split]
    split = recipe.get("val_split", split) if split == "val" else split
    rng = random.Random(f"{split}-{recipe['facts']}-{recipe['operations']}")
    return [make_task(rng, recipe["facts"], recipe["operations"], index, split) for index in range(number)]


def make_task(rng: random.Random, facts: int, operations: int, index: int, split: str) -> Task:
    """A random program, with the corpus that holds its facts."""
    corpus = {f"{quality} {thing}": rng.randrange(100) for quality in QUALITIES for thing in THINGS}
    lines, values = [], dict[str, int]()
    for k in range(facts + operations):
        name = NAMES[k % len(NAMES)]
        if k < facts:
            fact = rng.choice(list(corpus))
            lines.append(f"{name} is {fact}")
            values[name] = corpus[fact]
        else:
            # The newest value is always used, so that the whole chain leads to the end.
            first, second = NAMES[(k - 1) % len(NAMES)], rng.choice(list(values))
            if rng.random() < 0.5:
                first, second = second, first
            operation = rng.choice("++--*")
            lines.append(f"{name} is {first} {rng.choice(VERBS[operation])} {second}")
            values[name] = compute(values[first], operation, values[second])
    return Task(
        data_source="tool_chain",
        prompt=({"role": "user", "content": " . ".join(lines)},),
        ground_truth=digits(values[name]),
        extra_info={
            "index": index,
            "split": split,
            "corpus": [f"the {fact} is {digits(value)}" for fact, value in corpus.items()],
        },
    )


# The tools


@dataclass
class Tools:
    """The tools' state in one rollout."""

    corpus: list[str]
    store: dict[str, str] = field(default_factory=dict)

    def call(self, text: str) -> str:
        """The result of a call, two digits; NOTHING for an invalid call."""
        match text.split():
            case ["search", *words]:
                return self._search(words)
            case ["put", name, first, second] if name in NAMES and _is_number(first, second):
                self.store[name] = f"{first} {second}"
                return self.store[name]
            case ["get", name]:
                return self.store.get(name, NOTHING)
            case ["calc", a, b, sign, c, d] if sign in VERBS and _is_number(a, b, c, d):
                return digits(compute(int(a + b), sign, int(c + d)))
        return NOTHING

    def _search(self, words: list[str]) -> str:
        """The number in the document that shares the most words; NOTHING if no document shares any."""
        shared = [len(set(words) & set(document.split()[1:3])) for document in self.corpus]
        best = max(range(len(shared)), key=shared.__getitem__)
        return " ".join(self.corpus[best].split()[-2:]) if shared[best] else NOTHING


def _is_number(*words: str) -> bool:
    return all(word in DIGITS for word in words)


# The workflow


async def solve(task: Task, team: Team) -> str:
    """Run the program line by line, call by call."""
    tools = Tools(task.extra_info["corpus"])
    wrote: dict[str, Reply] = {}
    for line in task.text.split(" . "):
        name, _, *words = line.split()
        if len(words) == 2:
            reply = await _ask(team, "searcher", " ".join(words), [], f"search {' '.join(words)}")
            value = tools.call(reply.text)
        else:
            first, verb, second = words
            sides = []
            for side in (first, second):
                got = await _ask(team, "reader", side, [wrote[side]] if side in wrote else [], f"get {side}")
                sides.append((got, tools.call(got.text)))
            (left, a), (right, b) = sides
            sign = next(sign for sign, verbs in VERBS.items() if verb in verbs)
            reply = await _ask(team, "calculator", f"{a} {verb} {b}", [left, right], f"calc {a} {sign} {b}")
            value = tools.call(reply.text)
        put = await _ask(team, "clerk", f"{name} {value}", [reply], f"put {name} {value}")
        tools.call(put.text)
        if put.text.split()[:1] == ["put"] and put.text.split()[1:2]:
            wrote[put.text.split()[1]] = put
    return tools.store.get(name, NOTHING)


async def _ask(team: Team, agent: str, prompt: str, parents: list[Reply], right: str) -> Reply:
    ask: Callable[..., Any] = getattr(team, agent)
    reply: Reply = await ask(prompt, parents=parents, info={"right": right})
    return reply


# The rewards


@reward
def call_right(step: Step, trajectory: Trajectory) -> float:
    """Share of the call's words that are right, given its prompt."""
    right: list[str] = step.info["right"].split()
    said = step.response.split()
    same = sum(a == b for a, b in zip(said, right, strict=False))
    return same / max(len(said), len(right))


@outcome
def answer_right(trajectory: Trajectory) -> float:
    """Whether the last value is right."""
    return float(trajectory.answer == trajectory.task.ground_truth)


# The model, warmed up by supervised learning, so that reinforcement has something to start from

ROLES = {"searcher": "find", "reader": "read", "calculator": "sum", "clerk": "store"}
"""Each agent's system prompt."""
WARM_UP_VERSION = 1
"""Part of the cached folder's name; to be raised with every change of the warm-up."""


def warm_model(recipe: dict[str, Any]) -> Path:
    """The folder of a small Llama whose calls are mostly right; made on first use and cached."""
    settings = {key: recipe[key] for key in ("hidden", "layers", "warmup", "warmup_seed")}
    return word_model(f"tool_chain-{WARM_UP_VERSION}", settings, WORDS, 64, _teach)


WORDS = (
    *(*ROLES.values(), "search", "get", "put", "calc", *DIGITS, *NAMES, *THINGS, *QUALITIES, *VERBS),
    *(verb for verbs in VERBS.values() for verb in verbs),
)
"""The vocabulary, one token per word."""


def _example(role: str, rng: random.Random) -> tuple[str, str]:
    a, b = digits(rng.randrange(100)), digits(rng.randrange(100))
    name, fact = rng.choice(NAMES), f"{rng.choice(QUALITIES)} {rng.choice(THINGS)}"
    sign = rng.choice("++--*")
    prompt, call = {
        "searcher": (fact, f"search {fact}"),
        "reader": (name, f"get {name}"),
        "calculator": (f"{a} {rng.choice(VERBS[sign])} {b}", f"calc {a} {sign} {b}"),
        "clerk": (f"{name} {a}", f"put {name} {a}"),
    }[role]
    return f"{ROLES[role]} {prompt}", call


def _teach(policy: Policy, settings: dict[str, Any]) -> None:
    rng, left = random.Random(settings["warmup_seed"]), list(ROLES)

    def learned(step: int) -> bool:
        nonlocal left
        if step % 5:
            return False
        accuracy = {role: _accuracy(policy, role) for role in ROLES}
        left = [role for role in ROLES if accuracy[role] < settings["warmup"]]
        if step % 25 == 0 or not left:
            said = ", ".join(f"{role} {value:.2f}" for role, value in accuracy.items())
            print(f"warm-up step {step}: {said}", file=sys.stderr, flush=True)
        return not left

    warm_up(policy, lambda: ([_example(role, rng) for _ in range(64)] for role in left), learned, most_steps=2000)


def _accuracy(policy: Policy, role: str) -> float:
    rng = random.Random(1)
    return sampled_accuracy(policy, [_example(role, rng) for _ in range(256)])
