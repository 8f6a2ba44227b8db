"""Models, adapters and optimizers, for several sections."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from creditflow._utils.sections import Section, Text, expected

_NAMES = "names of modules, or all-linear"
TargetModules = Annotated[Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)], expected(_NAMES)]
LayerIndices = Annotated[Annotated[list[NonNegativeInt], Field(min_length=1)] | None, expected("numbers of layers")]
ModelPath = Annotated[
    str | None, expected("a Hugging Face folder, a GGUF file, a hub name, tiny, smollm2 or file.py:function")
]
LossAggMode = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
    "traj-mean-step-mean",
]
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
SUM_NORM = "seq-mean-token-sum-norm"
"""The mode that divides by `loss_scale_factor`."""


class ModelConfig(Section):
    """The model of a policy or of the critic."""

    path: ModelPath = None
    """A Hugging Face folder; a GGUF file; a name in the local Hugging Face cache; `tiny`: a byte-level model made on
    the spot; `smollm2`: SmolLM2-135M-Instruct (extra `smollm2`); or `file.py:function` that makes a folder."""


class ActorModelConfig(ModelConfig):
    """The default model of all policies, and how it is trained."""

    enable_gradient_checkpointing: bool | None = None
    """Keep only each layer's input and compute the rest again for the gradient: less memory, more work in an update.
    Default: false; with `--engine verl`, verl's own default, true."""
    lora_rank: NonNegativeInt = 0
    """Rank of the LoRA adapter; only the adapter is trained. 0: train all weights."""
    lora_alpha: PositiveInt = 16
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    target_modules: TargetModules = "all-linear"
    """The modules with an adapter: a list of names as in peft, or `all-linear`, all linear layers but the last."""
    layers_to_transform: LayerIndices = None
    """Indices of the layers with an adapter, from 0; default: all."""


_Beta = Annotated[float, Field(ge=0, lt=1)]
_Betas = Annotated[list[_Beta], Field(min_length=2, max_length=2), expected("two numbers in [0, 1)")]


class OptimConfig(Section):
    """AdamW, as in torch."""

    lr: PositiveFloat = 1e-6
    """Learning rate."""
    lr_warmup_steps: NonNegativeInt = 0
    """Updates over which the learning rate rises linearly from 0."""
    lr_scheduler_type: Literal["constant", "cosine"] = "constant"
    """Schedule after the warm-up: `constant`, or half a `cosine` that reaches 0 when the run ends."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled weight decay."""
    betas: _Betas = Field(default_factory=lambda: [0.9, 0.999])
    """Decay rates of the two running means."""
