"""LoRA adapters over one base model, with peft. Several policies may share the base."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from creditflow._utils.install import needs
from creditflow.config import ActorModelConfig, FallbackConfig
from creditflow.engines.local.products import forget_casts
from creditflow.errors import ConfigError, ModelError, first_line

MODEL_KEY = "actor_rollout_ref.model"


class Adapter:
    """One adapter of a base model.

    The base holds all its adapters, and one is active at a time.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        """peft's wrapper around the base."""
        self.name = name
        self._alone = _locks.setdefault(model, threading.RLock())
        """One lock for all adapters of the base, because several threads may use its policies."""

    @classmethod
    def add(
        cls, base: Any, name: str, rank: int, config: ActorModelConfig | FallbackConfig, seed: int, key: str = MODEL_KEY
    ) -> Adapter:
        """Add the adapter `name` (one word) to `base`: a language model, or the `model` of an earlier adapter.

        A new adapter does not change the model's output. `seed`: for its random half. `key`: the config section of
        `config`.

        Raises ConfigError if the model does not have the named modules or layers.
        """
        expect_fits(base, config, key)
        from peft import LoraConfig, PeftModel, get_peft_model

        lora = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=config.lora_alpha,
            target_modules=linear_modules(base) if config.target_modules == "all-linear" else config.target_modules,
            layers_to_transform=config.layers_to_transform,
            lora_dropout=0.0,
            fan_in_fan_out=_transposed(base),
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                if isinstance(base, PeftModel):
                    base.add_adapter(name, lora)
                    return cls(base, name)
                return cls(get_peft_model(base, lora, adapter_name=name), name)
            except ValueError as error:
                raise ConfigError(f"{key}.target_modules: {first_line(error)}; {_there_is(base)}") from error

    @property
    def parameters(self) -> list[Tensor]:
        """The adapter's trained weights."""
        with self.in_force():
            return [weight for weight in self.model.parameters() if weight.requires_grad]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Activate this adapter in the base, for one thread at a time."""
        with self._alone:
            if self.model.active_adapters != [self.name]:
                self.model.set_adapter(self.name)
            yield

    @contextmanager
    def out_of_force(self) -> Iterator[None]:
        """Deactivate all adapters of the base, for one thread at a time."""
        with self._alone, self.model.disable_adapter():
            yield

    def merge(self) -> None:
        """Merge the adapter into the base's weights and remove it.

        It must be the base's only adapter.
        """
        with self._alone:
            forget_casts(self.model.merge_and_unload())  # it changes the weights' data

    def save(self, folder: Path | str) -> None:
        """Save the adapter for `peft.PeftModel.from_pretrained(base, folder)`."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        state = get_peft_model_state_dict(self.model, adapter_name=self.name)
        save_file({name: weight.contiguous() for name, weight in state.items()}, f"{folder}/adapter_model.safetensors")
        self.model.peft_config[self.name].save_pretrained(str(folder))

    def load(self, folder: Path | str) -> None:
        """Load the weights that `save` wrote. Raises ModelError if they belong to another adapter."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        result: Any = set_peft_model_state_dict(
            self.model, load_file(f"{folder}/adapter_model.safetensors"), adapter_name=self.name
        )
        if result.unexpected_keys:
            raise ModelError(f"{folder}: holds another adapter: {', '.join(sorted(result.unexpected_keys)[:3])}")


_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()


def expect_fits(base: Any, config: ActorModelConfig | FallbackConfig, key: str = MODEL_KEY) -> None:
    """Raise ConfigError if peft is missing, or the model does not have the named modules or layers."""
    with needs(f"{key}.lora_rank: LoRA", "lora"):
        import peft  # noqa: F401
    # peft accepts names without a match if another name matches.
    names = [name for name, _ in base.named_modules()]
    targets = [] if isinstance(config.target_modules, str) else config.target_modules
    unknown = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if unknown:
        raise ConfigError(f"{key}.target_modules: no module is named {', '.join(unknown)}; {_there_is(base)}")
    if tied := _tied(base, targets):
        raise ConfigError(
            f"{key}.target_modules: {', '.join(tied)} shares its weights with another module (tie_word_embeddings), so "
            f"an adapter of it cannot be merged into the model; leave it out. {_there_is(base)}"
        )
    n_layers = _n_layers(base)
    if beyond := [layer for layer in config.layers_to_transform or [] if not 0 <= layer < n_layers]:
        raise ConfigError(f"{key}.layers_to_transform: there is no layer {beyond[0]}; {_there_is(base)}")


def _tied(base: Any, targets: Sequence[str]) -> list[str]:
    """The targets that share a weight with another module.

    Merging an adapter of one module would change the other too, so the saved model would differ from the trained one.
    """
    owners: dict[int, list[str]] = {}
    for name, weight in base.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0].removesuffix(".base_layer")
        owners.setdefault(id(weight), []).append(module)
    shared = [f".{module}" for modules in owners.values() if len(set(modules)) > 1 for module in modules]
    return [target for target in targets if any(module.endswith(f".{target}") for module in shared)]


def _transposed(base: Any) -> bool:
    """Whether the model uses transformers' Conv1D, with weights [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(part, Conv1D) for part in base.modules())


def _n_layers(base: Any) -> int:
    return int(getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", 0))


def _there_is(base: Any) -> str:
    return f"the model has {_n_layers(base)} layers, with linear modules {', '.join(linear_modules(base))}"


def linear_modules(model: Any) -> list[str]:
    """The names of a model's linear layers (including GPT-2's Conv1D), without the output head."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return sorted(
        {
            name.removesuffix(".base_layer").rpartition(".")[2]  # an adapter wraps its linear layer as base_layer
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear | Conv1D) and part is not head and ".lora_" not in name
        }
    )
