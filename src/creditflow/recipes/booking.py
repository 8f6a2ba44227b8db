"""A long dialogue with a simulated user: a desk books a trip for a customer who answers its questions.

The customer's prompt holds the trip that it wants; the desk asks (`day`), the customer answers (`friday`), and so on,
for at most 20 turns each, until the desk books (`book from rome to oslo day friday ...`) and the customer says thanks.
Both begin with the same small model, made and warmed up on the spot: mostly it answers truthfully and books the parts
it has heard, but it asks at random, repeats questions, and late in the dialogue books at a random time, whether or not
it knows all parts. Only the desk is trained; the customer is frozen.

A question is right if it is new; a booking is as right as the customer's wishes it meets, and the outcome is whether it
meets them all. Whether the customer keeps to its trip is reported and not rewarded: check first for a straying
simulated user if such a run goes wrong.

Recipe settings (`recipe.*`): `train_tasks`, `val_tasks`; `hidden`, `layers`; `warmup`, the sampled accuracy of answers
and bookings at which the warm-up stops.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from creditflow import Step, Task, Trajectory, outcome, reward
from creditflow.data import Message
from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.local.warm_up import Example, sampled_accuracy, warm_up
from creditflow.engines.models.tiny import made_once, save_tiny_llama
from creditflow.rollout import topologies

CHOICES = {
    "from": ("rome", "oslo", "lima", "cairo"),
    "to": ("paris", "delhi", "quito", "accra"),
    "day": ("monday", "tuesday", "thursday", "friday"),
    "hour": ("dawn", "noon", "dusk", "midnight"),
    "class": ("economy", "premium", "business", "first"),
    "seat": ("window", "middle", "aisle", "exit"),
    "meal": ("meat", "fish", "vegan", "fruit"),
    "bags": ("none", "one", "two", "three"),
    "fare": ("saver", "basic", "flex", "refund"),
    "pay": ("card", "cash", "points", "invoice"),
}
"""The parts of a trip, each with its choices."""
TURNS = 20
HELLO, BOOK, UNKNOWN, THANKS = "hello", "book", "unknown", "thanks"
Trip = dict[str, str]


def spelled(trip: Trip) -> str:
    """A trip in words, in the order of CHOICES, with `unknown` for missing parts."""
    return " ".join(f"{part} {trip.get(part, UNKNOWN)}" for part in CHOICES)


# The task


def make_tasks(split: str, recipe: dict[str, Any]) -> list[Task]:
    """Random trips; only the customer sees the goal."""
    rng = random.Random(split)
    number = {"train": recipe["train_tasks"], "val": recipe["val_tasks"]}[split]
    return [make_task(rng, index, split) for index in range(number)]


def make_task(rng: random.Random, index: int, split: str) -> Task:
    """A customer with a random trip as its goal."""
    goal = spelled(_trip(rng))
    return Task("booking", ({"role": "user", "content": goal},), goal, {"index": index, "split": split, "goal": goal})


def _trip(rng: random.Random) -> Trip:
    return {part: rng.choice(choices) for part, choices in CHOICES.items()}


# The workflow

solve = topologies.dialogue("desk", "customer", turns=TURNS, until=THANKS)


# The rewards


@outcome
def booked(trajectory: Trajectory) -> float:
    """Whether the trip is booked without an error."""
    return float(trajectory.answer == f"{BOOK} {trajectory.task.ground_truth}")


@reward(agent_match="desk")
def asked_or_booked(step: Step, trajectory: Trajectory) -> float:
    """0 for a repeated response; 1 for a question; for a booking, 1 less a fifth for each wrong part, at least 0.

    0 for anything else, including a booking with missing or misplaced parts.
    """
    if step.response in {other.response for other in trajectory.steps[: step.index] if other.agent == step.agent}:
        return 0.0
    words = step.response.split()
    if words[:1] == [BOOK]:
        goal = trajectory.task.ground_truth.split()
        same = [said == word for said, word in zip(words[1:], goal, strict=False)]
        if len(words) != 1 + len(goal) or not all(same[::2]):
            return 0.0
        return max(0.0, 1.0 - same[1::2].count(False) / 5)
    return float(step.response in CHOICES)


@reward(agent_match="customer", weight=0.0)
def truthful(step: Step, trajectory: Trajectory) -> float:
    """Whether the customer's response is consistent with its goal."""
    said = [other.response for other in trajectory.steps[: step.index]]
    return float(step.response == answer(said[-1] if said else None, trajectory.task.extra_info["goal"]))


def answer(question: str | None, goal: str) -> str:
    """A truthful customer's response: to nothing yet, to a booking, to a question, and to any other text."""
    if question is None:
        return HELLO
    if question.split()[:1] == [BOOK]:
        return THANKS
    words = goal.split()
    return words[words.index(question) + 1] if question in CHOICES else UNKNOWN


# The model, warmed up so that it can speak, and asks and books at random

ROWS = 64
"""Examples of each kind in a warm-up step."""
WARM_UP_VERSION = 2
"""Part of the cached folder's name; to be raised with every change of the warm-up."""


def warm_model(recipe: dict[str, Any]) -> Path:
    """The folder of a small Llama whose answers and bookings are mostly right; made on first use and cached."""
    settings = {key: recipe[key] for key in ("hidden", "layers", "warmup")}
    name = "-".join(str(part) for part in ("booking", WARM_UP_VERSION, *settings.values()))
    return made_once(name, lambda folder: _warm_up(folder, settings))


def make_tokenizer() -> tuple[Any, str]:
    """A tokenizer with one token per word, and a chat template: the role, then the word."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    words = [*special, HELLO, BOOK, UNKNOWN, THANKS, *CHOICES, *(word for words in CHOICES.values() for word in words)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|end|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return tokenizer, template


def _said(trip: Trip, questions: Sequence[str], asks: str) -> list[Message]:
    """The conversation so far, from the side of the role in `asks` that asks the questions: "assistant", or "user"."""
    answers = "user" if asks == "assistant" else "assistant"
    said: list[Message] = [{"role": answers, "content": HELLO}]
    for question in questions:
        said.append({"role": asks, "content": question})
        said.append({"role": answers, "content": trip[question]})
    return said


FIRST_TURNS = {"asks": 0, "books": TURNS // 2, "greets": 0, "answers": 0, "thanks": TURNS // 2}
"""The kinds of response in the warm-up, and the minimum number of questions before each."""


def _turns(kind: str, rng: random.Random) -> int:
    return rng.randrange(FIRST_TURNS[kind], TURNS)


def _example(kind: str, turns: int, rng: random.Random, policy: Policy) -> Example:
    """An example of a response after `turns` random questions."""
    trip, questions = _trip(rng), rng.choices(list(CHOICES), k=turns)
    answers = {part: word for part, word in trip.items() if part in questions}
    booking = f"{BOOK} {spelled(answers)}"
    briefed: list[Message] = [{"role": "user", "content": spelled(trip)}]
    agent_turns, user_turns = _said(trip, questions, "assistant"), [*briefed, *_said(trip, questions, "user")]
    question = rng.choice(list(CHOICES))
    messages, response = {
        "asks": (agent_turns, question),
        "books": (agent_turns, booking),
        "greets": (briefed, HELLO),
        "answers": ([*user_turns, {"role": "user", "content": question}], trip[question]),
        "thanks": ([*user_turns, {"role": "user", "content": booking}], THANKS),
    }[kind]
    return policy.encode(messages)[0], response


def _warm_up(folder: Path, settings: dict[str, Any]) -> None:
    tokenizer, template = make_tokenizer()
    sizes = {"hidden": settings["hidden"], "layers": settings["layers"], "positions": 256}
    save_tiny_llama(folder, tokenizer, **sizes, seed=0, chat_template=template)
    policy = Policy.load(folder, pick_device("cpu"))
    rng = random.Random(0)

    def lessons() -> list[list[Example]]:
        turns = {kind: _turns(kind, rng) for kind in FIRST_TURNS}
        return [[_example(kind, of_kind, rng, policy) for _ in range(ROWS)] for kind, of_kind in turns.items()]

    def learned(step: int) -> bool:
        if step % 25:
            return False
        accuracy = {kind: _accuracy(policy, kind) for kind in ("answers", "books")}
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in accuracy.items())
        print(f"warm-up step {step}: {said}", file=sys.stderr, flush=True)
        return min(accuracy.values()) >= float(settings["warmup"])

    warm_up(policy, lessons, learned, most_steps=3000)
    policy.save(folder)


def _accuracy(policy: Policy, kind: str) -> float:
    rng = random.Random(1)
    examples = [_example(kind, _turns(kind, rng), rng, policy) for _ in range(256)]
    if kind == "books":  # the time of a booking is random; its content is not
        examples = [(f"{prompt} {BOOK}", response.removeprefix(f"{BOOK} ")) for prompt, response in examples]
    return sampled_accuracy(policy, examples)
