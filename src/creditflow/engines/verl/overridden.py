"""verl's methods that this engine overrides or relies on, and hashes of their source in each supported version.

An override calls the replaced method or takes over its work, so it may be wrong once that method changes. A version of
verl without hashes is accepted if none of the methods differs from those of a known version.
`python -m creditflow.engines.verl.overridden` prints the hashes of the installed version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

_AGENT_LOOP, _V1, _ROLLOUT = "experimental/agent_loop/agent_loop.py", "trainer/ppo/v1", "workers/rollout"
OVERRIDDEN: Mapping[str, str] = {
    _AGENT_LOOP: """
        AgentLoopOutput.as_dict AgentLoopWorker.__init__ AgentLoopWorker._run_agent_loop AgentLoopManager.__init__
    """,
    "trainer/main_ppo.py": "TaskRunnerV1.run TaskRunnerV1.init_agent_loop_manager",
    f"{_V1}/agent_loop_tq.py": "AgentLoopManagerTQ.__init__ AgentLoopWorkerTQ.__init__",
    f"{_V1}/replay_buffer.py": """
        ReplayBuffer.sample ReplayBuffer._select_prompt_uids ReplayBuffer._dapo_filtered_keys
        ReplayBuffer._wait_for_next_poll ReplayBuffer._terminal_eviction_reasons
        ReplayBufferAsync._terminal_eviction_reasons ReplayBufferAsync.sample
    """,
    f"{_V1}/trainer_base.py": """
        PPOTrainer.__init__ PPOTrainer._setup PPOTrainer._init_resource_pool_mgr PPOTrainer._init_dataloader
        PPOTrainer._build_replay_buffer PPOTrainer._load_checkpoint PPOTrainer._save_checkpoint PPOTrainer._step_once
        PPOTrainer._balance_batch PPOTrainer._get_required_batch_multiple PPOTrainer._update_actor
        PPOTrainer._update_critic PPOTrainer._validate PPOTrainer._compute_metrics PPOTrainer._submit_batch_to_rollout
        PPOTrainer._get_n_gpus_for_throughput PPOTrainer.get_llm_client PPOTrainer.prepare_step PPOTrainer.on_init_end
        PPOTrainer.on_train_begin PPOTrainer.on_step_begin PPOTrainer.on_step_end PPOTrainer.on_sample_begin
        PPOTrainer.on_sample_end PPOTrainer.on_validate_begin PPOTrainer.on_validate_end
    """,
    f"{_V1}/trainer_sync.py": "PPOTrainerSync.on_init_end PPOTrainerSync.on_step_end PPOTrainerSync.on_sample_end",
    f"{_V1}/trainer_colocate_async.py": """
        PPOTrainerColocateAsync.get_llm_client PPOTrainerColocateAsync.on_init_end
        PPOTrainerColocateAsync.on_train_begin PPOTrainerColocateAsync.on_step_end
        PPOTrainerColocateAsync.on_sample_end
    """,
    f"{_V1}/trainer_separate_async.py": """
        PPOTrainerSeparateAsync.__init__ PPOTrainerSeparateAsync._setup PPOTrainerSeparateAsync._init_resource_pool_mgr
        PPOTrainerSeparateAsync._get_n_gpus_for_throughput PPOTrainerSeparateAsync.get_llm_client
        PPOTrainerSeparateAsync.prepare_step PPOTrainerSeparateAsync.on_init_end PPOTrainerSeparateAsync.on_train_begin
        PPOTrainerSeparateAsync.on_step_begin PPOTrainerSeparateAsync.on_step_end
        PPOTrainerSeparateAsync.on_sample_begin PPOTrainerSeparateAsync.on_sample_end
        PPOTrainerSeparateAsync.on_validate_begin
    """,
    "workers/engine_workers.py": "ActorRolloutRefWorker.init_model",
    f"{_ROLLOUT}/llm_server.py": "LLMServerClient.generate FullyAsyncLLMServerClient.generate",
    f"{_ROLLOUT}/replica.py": """
        RolloutReplica.__init__ RolloutReplica.init_hybrid RolloutReplica.init_standalone
        RolloutReplica.get_ray_class_with_init_args
    """,
    "checkpoint_engine/base.py": "CheckpointEngineWorker.__init__",
    "single_controller/base/worker.py": "Worker.__init__",
    f"{_ROLLOUT}/vllm_rollout/vllm_async_server.py": """
        vLLMHttpServer.collective_rpc vLLMReplica.__init__ vLLMReplica.launch_servers
    """,
    f"{_ROLLOUT}/vllm_rollout/vllm_rollout.py": """
        ServerAdapter.__init__ ServerAdapter._ensure_server_handle ServerAdapter._execute_method
        ServerAdapter.update_weights
    """,
    f"{_ROLLOUT}/sglang_rollout/async_sglang_server.py": "SGLangReplica.__init__ SGLangReplica.launch_servers",
    f"{_ROLLOUT}/sglang_rollout/sglang_rollout.py": "ServerAdapter.__init__ ServerAdapter._init_server_adapter",
}
"""The overridden methods, by file in verl."""
RELIED_ON: Mapping[str, str] = {
    f"{_V1}/agent_loop_tq.py": """
        AgentLoopWorkerTQ.generate_sequences AgentLoopWorkerTQ._run_prompt AgentLoopWorkerTQ._agent_loop_postprocess
        AgentLoopManagerTQ.generate_sequences
    """,
    f"{_V1}/replay_buffer.py": """
        ReplayBuffer._sync_metadata_from_transfer_queue ReplayBuffer._materialize_batch ReplayBuffer._clear_groups
        ReplayBuffer._evict_terminal_groups ReplayBuffer._sampleable_terminal_keys
        ReplayBufferAsync._has_enough_samples ReplayBufferAsync.wait_for_sampleable
    """,
    f"{_V1}/trainer_base.py": """
        PPOTrainer.fit PPOTrainer.step PPOTrainer._reissue_inflight_prompts PPOTrainer._add_batch_to_generate
        PPOTrainer._compute_old_log_prob PPOTrainer._compute_ref_log_prob PPOTrainer._compute_values
    """,
}
"""Methods that are not overridden, but whose order of calls, keys and tags the engine depends on."""
_KNOWN = Path(__file__).with_name("overridden.json")


def names() -> Iterator[tuple[str, str]]:
    """The file and the qualified name of each method."""
    for table in (OVERRIDDEN, RELIED_ON):
        for file, methods in table.items():
            for method in methods.split():
                yield file, method


def hashes(root: Path) -> dict[str, str]:
    """The hash of each method's source in the verl at `root`, by name; empty if the method is absent.

    Spaces and line ends do not count.
    """
    digests = {}
    for file, method in names():
        path = root / file
        text = _sources(path, path.stat().st_mtime_ns).get(method, "") if path.is_file() else ""
        digests[f"{file}: {method}"] = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()[:12] if text else ""
    return digests


@functools.lru_cache(maxsize=64)
def _sources(path: Path, _changed: int) -> dict[str, str]:
    """The source of each method in a file, by qualified name."""
    text = path.read_text()
    return {
        f"{node.name}.{item.name}": ast.get_source_segment(text, item) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def supported() -> dict[str, dict[str, str]]:
    """The hashes of each supported version of verl."""
    digests: dict[str, dict[str, str]] = json.loads(_KNOWN.read_text())
    return digests


def changed(version: str, root: Path) -> list[str]:
    """The methods of the verl `version` at `root` that differ from the nearest supported version; none for that one."""
    versions = supported()
    if version in versions:
        return []
    here = hashes(root)
    return min(
        ([name for name, digest in here.items() if of_version.get(name) != digest] for of_version in versions.values()),
        key=len,
    )


def installed() -> tuple[str, Path]:
    """The version and the folder of the installed verl. Raises PackageNotFoundError."""
    version, spec = importlib.metadata.version("verl"), find_spec("verl")
    if spec is None or spec.origin is None:
        raise importlib.metadata.PackageNotFoundError("verl")
    return version, Path(spec.origin).parent


if __name__ == "__main__":
    _version, _root = installed()
    print(json.dumps({_version: hashes(_root)}, indent=1))
