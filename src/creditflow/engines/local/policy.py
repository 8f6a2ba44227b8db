"""A policy on this machine: a Hugging Face causal LM with its tokenizer, as a rollout's model client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from creditflow.chat import ChatTokenizer, Prompt
from creditflow.engines.local import decoding, memory, sampler
from creditflow.engines.local.attention import unknown_kinds
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.lora import Adapter
from creditflow.errors import ModelError, first_line
from creditflow.huggingface import load_folder, n_tokens, position_limit, unusable
from creditflow.rollout.client import Generation, GenerationRequest
from creditflow.trajectory import Message

_KEY = "actor_rollout_ref.model.path"


def pick_device(name: str) -> torch.device:
    """`auto`: CUDA where there is a device, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("trainer.device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


class Policy:
    """Model, tokenizer and version. Computes in bf16 on CUDA (weights stay float32), in float32 on the CPU."""

    def __init__(self, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.adapter: Adapter | None = None
        """Whose weights are the policy's own, if the model's are not."""
        self.forward = Forward(self.model)
        self.shares = self.forward.shares
        """Whether rows that are decoded share the prompts that they begin with."""
        self.tokenizer = tokenizer
        self.device = device
        self.version = 0
        self.chat_tokenizer = ChatTokenizer(tokenizer, model.generation_config.eos_token_id, n_tokens(model))
        self.eos_ids = self.chat_tokenizer.end_ids
        self.pad_id = self.chat_tokenizer.pad_id
        self.limit = position_limit(model.config)
        self.max_positions = self.limit.tokens

    @classmethod
    def load(cls, folder: Path | str, device: torch.device) -> Policy:
        """The model in a Hugging Face folder; raises ModelError that names what is missing. Runs no code from it."""
        model, tokenizer = load_folder(folder, "causal", _KEY)
        _expect_known_layers(model, Path(folder))
        _expect_that_it_can_be_saved(model, Path(folder))
        memory.suit(model.num_parameters(), device)
        policy = cls(model, tokenizer, device)
        if not policy.eos_ids:
            raise unusable(_KEY, Path(folder), "names no end-of-sequence token")
        _expect_that_it_decodes(policy, Path(folder))
        return policy

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The weights that are trained."""
        return list(self.model.parameters()) if self.adapter is None else self.adapter.parameters

    def with_adapter(self, adapter: Adapter) -> Policy:
        """The same policy, with an adapter of its own over a model that it may share."""
        other = copy.copy(self)
        other.adapter = adapter
        other.forward = Forward(self.model, self.forward.packs, adapter.in_force)
        return other

    def save(self, folder: Path | str) -> None:
        """A Hugging Face folder that anyone can load; of a policy with an adapter, a folder of peft's."""
        if self.adapter is not None:
            self.adapter.save(folder)
        else:
            self.model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)

    def save_merged(self, folder: Path | str) -> None:
        """As `save`, of a policy with an adapter over a model of its own: one model, with what the adapter adds."""
        assert self.adapter is not None
        merged = self.adapter.copy_of_model().merge_and_unload()
        merged.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)

    def reference(self) -> Policy:
        """The policy as it is now, which nobody trains: a copy, or the model without its adapter.

        The latter is where training began, as an adapter changes nothing then.
        """
        other = copy.copy(self)
        if self.adapter is not None:
            other.forward = Forward(self.model, self.forward.packs, self.adapter.out_of_force)
            return other
        other.model = copy.deepcopy(self.model).requires_grad_(False)
        other.forward = Forward(other.model, self.forward.packs)
        return other

    def autocast(self) -> torch.autocast:
        """bf16 on CUDA; does nothing on the CPU."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def encode(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, tuple[int, ...]]:
        """Prompt text and tokens (`ChatTokenizer.encode`)."""
        return self.chat_tokenizer.encode(prompt, tools)

    def follow(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens between two responses (`ChatTokenizer.follow`)."""
        return self.chat_tokenizer.follow(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a response, without special tokens."""
        return self.chat_tokenizer.decode(ids)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """One response for each request, decoded together. Raises ModelError for one that does not fit the model."""
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        if longest > self.max_positions:
            raise ModelError(
                f"a prompt and its max_tokens: expected at most {self.max_positions} tokens, got {longest}: "
                f"{self.limit.reason}"
            )
        with self.forward.in_force(), self.autocast():
            return sampler.generate(self.model, requests, self.eos_ids, self.pad_id, shared=self.shares)


_DECODES = 1e-2
"""Rows that are decoded together may differ from each alone by so much, in units of their spread: rounding, in whatever
precision, is less, and what is wrong is of the order of 1."""
_CANNOT = (AttributeError, TypeError, ValueError, NotImplementedError, LookupError, RuntimeError)
"""What models raise that are not made for it."""


def _cannot(model: Any) -> str:
    return (
        f"cannot be decoded in batches here: {model.config.model_type} is not supported; expected attention that keeps "
        "keys and values and takes position_ids"
    )


def _expect_known_layers(model: Any, folder: Path) -> None:
    """Refuse models with layers of a kind whose window or state is not known here (Mamba, convolutions)."""
    if kinds := unknown_kinds(model.config):
        raise unusable(_KEY, folder, f"{_cannot(model)}, got layers of kind {', '.join(kinds)}")


def _expect_that_it_decodes(policy: Policy, folder: Path) -> None:
    """Refuse models that keep something else than keys and values, or take positions from the order of the input."""
    cannot = _cannot(policy.model)

    def apart(*, shared: bool) -> float:
        return decoding.decoding_error(policy.model, policy.pad_id, shared=shared)

    try:
        policy.shares = policy.shares and apart(shared=True) <= _DECODES
    except torch.OutOfMemoryError:
        raise
    except _CANNOT:
        policy.shares = False
    if policy.shares:
        return
    try:
        off = apart(shared=False)
    except torch.OutOfMemoryError:
        raise
    except _CANNOT as error:
        raise unusable(_KEY, folder, f"{cannot} ({first_line(error)})") from error
    if not off <= _DECODES:
        raise unusable(_KEY, folder, f"{cannot} (rows together and alone differ by {off:.2g} of their spread)")


def _expect_that_it_can_be_saved(model: Any, folder: Path) -> None:
    """transformers refuses to write a generation configuration that it reads with a warning: say so before training."""
    config = model.generation_config
    if config.temperature is not None or config.top_p is not None or config.top_k is not None:
        config.do_sample = True  # what it has those for
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise unusable(_KEY, folder, f"generation_config.json: {first_line(error)}") from error
