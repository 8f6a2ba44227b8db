"""A local policy: a Hugging Face causal LM with its tokenizer, as the model client of rollouts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from creditflow._utils.huggingface import load_folder, position_limit, unusable
from creditflow.engines.local import decoding, memory, sampler
from creditflow.engines.local.attention import unknown_kinds
from creditflow.engines.local.forward import Forward
from creditflow.engines.local.lora import Adapter
from creditflow.errors import ModelError, first_line
from creditflow.rollout.chat import ChatModel, ChatTokenizer
from creditflow.rollout.client import Generation, GenerationRequest

_KEY = "actor_rollout_ref.model.path"


def pick_device(name: str) -> torch.device:
    """The torch device of a name; `auto` is CUDA if available, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("trainer.device: cuda was asked for, but torch sees no CUDA device")
    return torch.device(name)


class Sampler(Protocol):
    """Samples in place of the built-in sampler, from the weights that the policy has at the call."""

    def generate(self, policy: Policy, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one response per request."""
        ...


class Policy(ChatModel):
    """Model, tokenizer and version.

    Computes in bf16 on CUDA, in float32 on the CPU, or as `forward.set_precision` chooses. Weights stay float32.
    """

    def __init__(self, model: Any, tokenizer: Any, device: torch.device) -> None:
        self.model = model.to(device).eval()
        self.adapter: Adapter | None = None
        """The adapter with the policy's trained weights; None if it trains the model itself."""
        self.adapted = True
        """Whether the adapter applies; False for the reference of a policy with an adapter."""
        self.sampler: Sampler | None = None
        """Generates in place of the built-in sampler."""
        self.forward = Forward(self.model)
        self.shares = self.forward.shares
        """Whether decoding rows share equal prompts."""
        self.device = device
        self.version = 0
        self.chat_tokenizer = ChatTokenizer(tokenizer, model.generation_config.eos_token_id)
        self.eos_ids = self.chat_tokenizer.end_ids
        self.pad_id = self.chat_tokenizer.pad_id
        self.limit = position_limit(model.config)
        self.max_positions = self.limit.tokens

    @classmethod
    def load(cls, folder: Path | str, device: torch.device) -> Policy:
        """Load a Hugging Face folder, without running code from it.

        Raises ModelError that names the missing part.
        """
        model, tokenizer = load_folder(folder, "causal", _KEY)
        if kinds := unknown_kinds(model.config):  # such as Mamba, or convolutions
            raise unusable(_KEY, Path(folder), f"{_cannot(model)}, got layers of kind {', '.join(kinds)}")
        _expect_that_it_can_be_saved(model, Path(folder))
        memory.suit(model.num_parameters(), device)
        policy = cls(model, tokenizer, device)
        if not policy.eos_ids:
            raise unusable(_KEY, Path(folder), "names no end-of-sequence token")
        _expect_that_it_decodes(policy, Path(folder))
        return policy

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The trained weights."""
        return list(self.model.parameters()) if self.adapter is None else self.adapter.parameters

    def with_adapter(self, adapter: Adapter) -> Policy:
        """A copy of the policy with `adapter`, over the same, possibly shared, model."""
        other = copy.copy(self)
        other.adapter = adapter
        other.forward = Forward(
            self.model, self.forward.packs, adapter.in_force, recomputes=self.forward.recomputes, half=self.forward.half
        )
        return other

    def save(self, folder: Path | str) -> None:
        """Save a Hugging Face folder, or a peft folder if the policy has an adapter."""
        if self.adapter is not None:
            self.adapter.save(folder)
        else:
            self.model.save_pretrained(folder, safe_serialization=True)
        self.tokenizer.save_pretrained(folder)

    def export(self, folder: Path | str) -> None:
        """Save the weights that the policy samples with as a Hugging Face folder without a tokenizer.

        An adapter is merged in a copy of the model.
        """
        model = self.model
        if self.adapter is not None:
            copied = copy.deepcopy(self.adapter.model)
            model = copied.merge_and_unload(adapter_names=[self.adapter.name]) if self.adapted else copied.unload()
        model.save_pretrained(folder, safe_serialization=True)

    def weights_state(self) -> object:
        """A value that differs from an earlier one if the weights that the policy samples with have changed since."""
        name = self.adapter.name if self.adapter is not None and self.adapted else None
        weights = tuple((weight.data_ptr(), weight._version) for weight in self.model.parameters())
        return id(self.model), name, self.version, weights

    def reference(self) -> Policy:
        """A frozen reference of the policy: a copy, or the model without its adapter.

        The model without its adapter is the policy before training, because a new adapter does not change the output.
        """
        other = copy.copy(self)
        if self.adapter is not None:
            other.forward = Forward(self.model, self.forward.packs, self.adapter.out_of_force, half=self.forward.half)
            other.adapted = False
            return other
        other.model = copy.deepcopy(self.model).requires_grad_(False)
        other.forward = Forward(other.model, self.forward.packs, half=self.forward.half)
        return other

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one response per request, in one batch.

        Raises ModelError if a request exceeds the model's limit.
        """
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        if longest > self.max_positions:
            raise ModelError(
                f"a prompt and its max_tokens: expected at most {self.max_positions} tokens, got {longest}: "
                f"{self.limit.reason}"
            )
        if self.sampler is not None:
            return self.sampler.generate(self, requests)
        with self.forward.running():
            return sampler.generate(self.model, requests, self.eos_ids, self.pad_id, shared=self.shares)


_DECODES = 1e-2
"""Largest accepted difference between batched and single decoding, in standard deviations of the logits. Rounding is
smaller in any precision, and errors are of the order of 1."""
_CANNOT = (AttributeError, TypeError, ValueError, NotImplementedError, LookupError, RuntimeError)
"""Exceptions of models that do not support batched decoding."""


def _cannot(model: Any) -> str:
    return (
        f"cannot be decoded in batches here: {model.config.model_type} is not supported; expected attention that keeps "
        "keys and values and takes position_ids"
    )


def _expect_that_it_decodes(policy: Policy, folder: Path) -> None:
    """Raise ModelError if batched decoding gives wrong results, and set `policy.shares` by a trial.

    Models fail that cache something other than keys and values, or take positions from the input order.
    """
    reason: str
    cause: Exception | None
    for shared in (True, False) if policy.shares else (False,):
        policy.shares = shared
        try:
            error = decoding.decoding_error(policy.model, policy.pad_id, shared=shared)
        except torch.OutOfMemoryError:
            raise
        except _CANNOT as exception:
            reason, cause = first_line(exception), exception
            continue
        if error <= _DECODES:
            return
        reason, cause = f"rows together and alone differ by {error:.2g} of their spread", None
    raise unusable(_KEY, folder, f"{_cannot(policy.model)} ({reason})") from cause


def _expect_that_it_can_be_saved(model: Any, folder: Path) -> None:
    """Raise ModelError before training if the generation configuration cannot be saved.

    transformers loads an invalid generation configuration with a warning, but does not save it.
    """
    config = model.generation_config
    if config.temperature is not None or config.top_p is not None or config.top_k is not None:
        config.do_sample = True  # these options are valid only with sampling
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise unusable(_KEY, folder, f"generation_config.json: {first_line(error)}") from error
