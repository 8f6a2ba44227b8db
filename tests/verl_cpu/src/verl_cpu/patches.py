"""Three places in verl 0.9 where a CPU was not thought of."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from verl_cpu.imports import after_import


def apply() -> None:
    """Now, or when verl imports them."""
    after_import("verl.utils.distributed", _name_gloo_once)
    after_import("verl.utils.fsdp_utils", _pin_no_memory)
    after_import("verl.utils.model", _ask_for_no_flash_attention)


def _name_gloo_once(distributed: ModuleType) -> None:
    """It would ask torch for "cpu:gloo,cpu:gloo", which torch refuses."""
    original = distributed.initialize_global_process_group_ray

    def initialize_global_process_group_ray(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize_global_process_group_ray


def _pin_no_memory(fsdp_utils: ModuleType) -> None:
    """The reference policy is offloaded to pinned memory; pinning needs an accelerator."""
    original = fsdp_utils.CPUOffloadPolicy
    fsdp_utils.CPUOffloadPolicy = lambda pin_memory=True: original(pin_memory=False)


def _ask_for_no_flash_attention(model: ModuleType) -> None:
    """The critic's attention is flash attention, whatever the configuration says."""

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
