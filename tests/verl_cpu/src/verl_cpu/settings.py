"""Options and environment variables for verl on a CPU. Imports neither Ray nor verl."""

from __future__ import annotations

from typing import Literal

Rollout = Literal["transformers", "vllm"]


def options(n_ranks: int = 1, rollout_name: Rollout = "transformers") -> list[str]:
    """Hydra overrides for verl's `ppo_trainer`: `n_ranks` training processes, each with one rollout server.

    `rollout_name`: the back end of the servers, our own or verl's vLLM. Batch sizes, model and data are not set here.
    """
    actor, ref, critic = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"
    model, rollout = "actor_rollout_ref.model", "actor_rollout_ref.rollout"
    engines = [f"{actor}.fsdp_config", f"{ref}.fsdp_config", f"{critic}.fsdp"]
    return [
        "trainer.device=cpu",
        "trainer.nnodes=1",
        f"trainer.n_gpus_per_node={n_ranks}",
        f"{actor}.strategy=fsdp2",  # FSDP1 does not support the CPU; the reference uses the actor's strategy
        f"{critic}.strategy=fsdp2",
        f"++{model}.override_config.attn_implementation=sdpa",
        f"++{critic}.model.override_config.attn_implementation=sdpa",
        f"{actor}.use_torch_compile=false",
        *(f"{engine}.use_torch_compile=false" for engine in engines),
        *(
            f"++{engine}.mixed_precision.{part}_dtype=fp32"
            for engine in engines
            for part in ("param", "reduce", "buffer")
        ),
        f"{rollout}.name={rollout_name}",
        *(_VLLM if rollout_name == "vllm" else ()),
        f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.load_format=auto",
        f"{rollout}.free_cache_engine=false",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        f"++{rollout}.checkpoint_engine.custom_backend_module=verl_cpu.transfer",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    ]


_VLLM = (
    "actor_rollout_ref.rollout.enforce_eager=true",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    "actor_rollout_ref.rollout.max_num_seqs=128",
    "++actor_rollout_ref.rollout.enable_sleep_mode=false",  # it needs CUDA's memory pool
)


def mode_options(mode: str, n_ranks: int = 1) -> tuple[str, ...]:
    """verl's options for a trainer mode; `separate_async` gets as many devices for rollouts as for training."""
    separate = (
        "actor_rollout_ref.rollout.nnodes=1",
        f"actor_rollout_ref.rollout.n_gpus_per_node={n_ranks}",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    )
    return (f"trainer.v1.trainer_mode={mode}", *(separate if mode.endswith("separate_async") else ()))


def environment() -> dict[str, str]:
    """Environment variables to set before Ray starts, so that all its processes inherit them."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a rollout server requests 0 GPUs from Ray, but uses one
        "TRANSFER_QUEUE_ENABLE": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the engine's classes are registered only for CUDA, but do not need it
    }
