"""Lessons for a tiny model before there is anything to reinforce: what recipes that make their own model share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from creditflow.engines.local.policy import Policy
from creditflow.rollout import GenerationRequest

Example = tuple[str, str]
"""A prompt, and the response to it."""


def supervised_loss(policy: Policy, examples: Sequence[Example]) -> Tensor:
    """Cross-entropy of the responses, each with the end token; averaged over their tokens.

    All prompts have as many tokens, and so do all responses. Raises ValueError where they do not.
    """
    prompts = [policy.tokenizer(prompt)["input_ids"] for prompt, _ in examples]
    targets = [policy.tokenizer(target)["input_ids"] + [policy.pad_id] for _, target in examples]  # <|end|> is both
    ids = torch.tensor([p + t for p, t in zip(prompts, targets, strict=True)])
    n = len(targets[0])
    logits = policy.model(input_ids=ids, use_cache=False, logits_to_keep=n + 1).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, -n:].flatten())


def sampled_accuracy(policy: Policy, examples: Sequence[Example]) -> float:
    """The share of the examples whose response the policy gives, sampled at temperature 1; the same at every call."""
    requests = [
        GenerationRequest(tuple(policy.tokenizer(prompt)["input_ids"]), len(target.split()) + 1, 1.0, (i,))
        for i, (prompt, target) in enumerate(examples)
    ]
    answers = [policy.decode(generation.response_ids) for generation in policy.generate(requests)]
    return sum(answer == target for answer, (_, target) in zip(answers, examples, strict=True)) / len(examples)
