"""Supervised warm-up of tiny models before reinforcement learning, shared by recipes that generate their model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditflow.engines.local.policy import Policy, pick_device
from creditflow.engines.models.tiny import made_once, save_tiny_llama, word_tokenizer
from creditflow.errors import CreditflowError
from creditflow.rollout import GenerationRequest

Example = tuple[str, str]
"""A prompt and its response."""


def word_model(
    name: str,
    settings: dict[str, Any],
    words: Iterable[str],
    positions: int,
    teach: Callable[[Policy, dict[str, Any]], None],
) -> Path:
    """The folder of a small Llama with one token per word, which `teach` warms up; made on first use and cached.

    `settings`: `hidden`, `layers`, and others that the model depends on, such as `warmup_seed` (default 0) for its
    initial weights; the folder is named after all of them.
    """

    def make(folder: Path) -> None:
        sizes, seed = {key: settings[key] for key in ("hidden", "layers")}, settings.get("warmup_seed", 0)
        save_tiny_llama(folder, word_tokenizer(words), **sizes, positions=positions, seed=seed)
        policy = Policy.load(folder, pick_device("cpu"))
        teach(policy, settings)
        policy.save(folder)

    return made_once("-".join(map(str, (name, *settings.values()))), make)


def supervised_loss(policy: Policy, examples: Sequence[Example]) -> Tensor:
    """Cross-entropy of the responses, each with the end token, averaged over their tokens.

    All prompts have the same number of tokens, and so do all responses. Raises ValueError otherwise.
    """
    prompts = [policy.tokenizer(prompt)["input_ids"] for prompt, _ in examples]
    targets = [policy.tokenizer(target)["input_ids"] + [policy.pad_id] for _, target in examples]  # pad is <|end|>
    ids = torch.tensor([p + t for p, t in zip(prompts, targets, strict=True)])
    n = len(targets[0])
    logits = policy.model(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -n:].flatten())


def sampled_accuracy(policy: Policy, examples: Sequence[Example]) -> float:
    """The share of examples with a correct response, sampled at temperature 1.

    The result is the same at every call.
    """
    requests = [
        GenerationRequest(tuple(policy.tokenizer(prompt)["input_ids"]), len(target.split()) + 1, 1.0, (i,))
        for i, (prompt, target) in enumerate(examples)
    ]
    answers = [policy.decode(generation.response_ids) for generation in policy.generate(requests)]
    return sum(answer == target for answer, (_, target) in zip(answers, examples, strict=True)) / len(examples)


def warm_up(
    policy: Policy,
    lessons: Callable[[], Iterable[Sequence[Example]]],
    learned: Callable[[int], bool],
    *,
    most_steps: int,
) -> None:
    """Run steps of AdamW until `learned(step)` is true. It is called after each step and may print its measurements.

    `lessons()` returns a step's batches, whose losses are added. The learning rate rises to 2e-3 within 50 steps.
    Raises CreditflowError if the model has not learned after `most_steps`.
    """
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=2e-3, weight_decay=0.01)
    for step in range(1, most_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 50)
        optimizer.zero_grad(set_to_none=True)
        for examples in lessons():
            torch.autograd.backward(supervised_loss(policy, examples))
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        if learned(step):
            return
    raise CreditflowError(
        f"the warm-up of the generated model missed its target after {most_steps} steps; the measurements above "
        "show by how much. Reduce the task, or enlarge the model"
    )
