"""Gradient checkpointing: a model's layers keep only their inputs, and compute the rest again for the gradient.

Uses transformers' own checkpointed layers, which checkpoint in training mode only. Policies stay in evaluation mode,
without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from creditflow.errors import ConfigError

_KEY = "actor_rollout_ref.model.enable_gradient_checkpointing"


def expect_recomputable(model: Any) -> None:
    """Raise ConfigError if transformers cannot checkpoint the layers of `model`."""
    if not (model.supports_gradient_checkpointing and _layers(model)):
        kind = model.config.model_type
        raise ConfigError(f"{_KEY}: expected false for a model of type {kind}, got true: it has no checkpointed layers")


@contextmanager
def recomputing(model: Any, again: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Checkpoint the layers of passes within this context.

    `again`: the context in which the backward pass computes a layer again.
    """
    layers = _layers(model)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return _in_mode(layers, training=False), again()

    options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}
    model.gradient_checkpointing_enable(options)
    try:
        with _in_mode(layers, training=True):
            yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def _in_mode(layers: Sequence[Any], *, training: bool) -> Iterator[None]:
    """Set the mode of the layers, without the modules in them."""
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = training
    try:
        yield
    finally:
        for layer, mode in zip(layers, before, strict=True):
            layer.training = mode


def _layers(model: Any) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
