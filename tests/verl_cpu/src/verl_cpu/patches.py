"""Patches of three places in verl 0.9 that do not support a CPU, and of one in vLLM."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_cpu.imports import after_import


def apply() -> None:
    """Patch the modules now, or when verl imports them."""
    after_import("verl.utils.distributed", _name_gloo_once)
    after_import("verl.utils.fsdp_utils", _pin_no_memory)
    after_import("verl.utils.model", _ask_for_no_flash_attention)
    after_import("vllm._custom_ops", _keep_linear_weights)


def _name_gloo_once(distributed: ModuleType) -> None:
    """Request the back end "cpu:gloo" once: verl requests "cpu:gloo,cpu:gloo", which torch rejects."""
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def _pin_no_memory(fsdp_utils: ModuleType) -> None:
    """Disable pinned memory, which verl uses to offload the reference policy and which needs an accelerator."""
    original = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=False)


def _keep_linear_weights(custom_ops: ModuleType) -> None:
    """Switch off oneDNN in vLLM, which packs the weights of linear layers and drops the tensors that verl loads into.

    vLLM's own `reload_weights` copes with packed weights; verl calls `load_weights`. Generation is slower without.
    """
    custom_ops._supports_onednn = False


def _ask_for_no_flash_attention(model: ModuleType) -> None:
    """Use the configured attention for the critic: verl always uses flash attention."""

    def load_valuehead_model(local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool) -> Any:
        from transformers import AutoModelForTokenClassification

        return AutoModelForTokenClassification.from_pretrained(
            local_path,
            dtype=torch_dtype,
            config=model_config,
            attn_implementation=model_config._attn_implementation,
            trust_remote_code=trust_remote_code,
        )

    model.load_valuehead_model = load_valuehead_model
