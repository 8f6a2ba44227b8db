"""LoRA adapters over one base model, by peft: several policies may share the base. Knows no optimizer."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from creditflow.config import ActorModelConfig, FallbackConfig
from creditflow.errors import ConfigError, ModelError, first_line

MODEL_KEY = "actor_rollout_ref.model"


class Adapter:
    """One adapter of a base model. The base carries all of them, of which one is in force at a time."""

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        """peft's wrapper around the base."""
        self.name = name
        self._alone: threading.RLock = model.__dict__.setdefault("_creditflow_in_use", threading.RLock())
        """One for all adapters of the base: policies may be asked from several threads."""

    @classmethod
    def add(
        cls, base: Any, name: str, rank: int, config: ActorModelConfig | FallbackConfig, seed: int, key: str = MODEL_KEY
    ) -> Adapter:
        """A new adapter `name` (a word) of `base`: a language model, or `model` of the adapter that it got before.

        It changes nothing yet. `seed`: of its random half. `key`: the section that `config` is.

        Raises ConfigError where the model has no such modules or layers.
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
        """The adapter's weights, which are trained."""
        with self.in_force():
            return [weight for weight in self.model.parameters() if weight.requires_grad]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, the base computes with this adapter, for this thread alone."""
        with self._alone:
            if self.model.active_adapters != [self.name]:
                self.model.set_adapter(self.name)
            yield

    @contextmanager
    def out_of_force(self) -> Iterator[None]:
        """Inside, the base computes as it was before it had adapters, for this thread alone."""
        with self._alone, self.model.disable_adapter():
            yield

    def copy_of_model(self) -> Any:
        """peft's wrapper with all that it is around, once more."""
        return copy.deepcopy(self.model, {id(self._alone): threading.RLock()})  # a lock has no copy

    def merge(self) -> None:
        """Add what the adapter is to the base's weights, which it then no longer is over. It must be the only one."""
        with self._alone:
            self.model.merge_and_unload()

    def save(self, folder: Path | str) -> None:
        """A folder that `peft.PeftModel.from_pretrained(base, folder)` loads."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        state = get_peft_model_state_dict(self.model, adapter_name=self.name)
        save_file({name: weight.contiguous() for name, weight in state.items()}, f"{folder}/adapter_model.safetensors")
        self.model.peft_config[self.name].save_pretrained(str(folder))

    def load(self, folder: Path | str) -> None:
        """Take over the weights that `save` wrote. Raises ModelError where they are those of another adapter."""
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file

        result: Any = set_peft_model_state_dict(
            self.model, load_file(f"{folder}/adapter_model.safetensors"), adapter_name=self.name
        )
        if result.unexpected_keys:
            raise ModelError(f"{folder}: holds another adapter: {', '.join(sorted(result.unexpected_keys)[:3])}")


def expect_fits(base: Any, config: ActorModelConfig | FallbackConfig, key: str = MODEL_KEY) -> None:
    """Raises ConfigError where there is no peft, or the model has no such modules or layers."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"{key}.lora_rank: LoRA needs peft: pip install 'creditflow[lora]'") from error
    # peft takes names that nothing matches, as long as something matches one of them.
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

    Merged, an adapter of one would change the other as well, and what is saved is not what was trained.
    """
    owners: dict[int, list[str]] = {}
    for name, weight in base.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0].removesuffix(".base_layer")
        owners.setdefault(id(weight), []).append(module)
    shared = [f".{module}" for modules in owners.values() if len(set(modules)) > 1 for module in modules]
    return [target for target in targets if any(module.endswith(f".{target}") for module in shared)]


def _transposed(base: Any) -> bool:
    """Whether linear layers are transformers' Conv1D, with weights [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return any(isinstance(part, Conv1D) for part in base.modules())


def _n_layers(base: Any) -> int:
    return int(getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", 0))


def _there_is(base: Any) -> str:
    return f"the model has {_n_layers(base)} layers, with linear modules {', '.join(linear_modules(base))}"


def linear_modules(model: Any) -> list[str]:
    """The names of a model's linear layers (GPT-2's Conv1D is one), without the one that makes the logits."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return sorted(
        {
            name.removesuffix(".base_layer").rpartition(".")[2]  # where one has an adapter, it stands beneath it
            for name, part in model.named_modules()
            if isinstance(part, torch.nn.Linear | Conv1D) and part is not head and ".lora_" not in name
        }
    )
