"""vLLM as the sampler of a policy: a worker process that receives the policy's weights after every update."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from creditflow._utils.progress import Reporter, phase
from creditflow.config import Config
from creditflow.engines.local.planning import cache_numbers, head_size, memory_limit
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.samplers import vllm_worker
from creditflow.engines.local.samplers.process import Worker
from creditflow.errors import ConfigError, ModelError
from creditflow.rollout.client import Generation, GenerationRequest

NAME_KEY = "actor_rollout_ref.rollout.name"
KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm"
DEFAULT_PYTHON = Path(sys.prefix) / "vllm" / "bin" / "python"
"""In the environment that `make vllm` builds, inside this one."""
_HOW = f"build it with `make vllm`, name the Python of another with {KEY}.python, or set {NAME_KEY}=local"
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's attention on the CPU (`vllm/v1/attention/backends/cpu_attn.py`, 0.27)."""
_START_S = 900.0
_OWN = {"python", "start_timeout_s"}
"""Options that are not vLLM's."""
_OURS = {
    "model", "skip_tokenizer_init", "generation_config", "logprobs_mode", "disable_log_stats", "max_num_seqs",
}  # fmt: skip
"""vLLM's options that this sampler sets."""
_CACHE_SHARE = 8
"""The key-value cache takes at most this part of the device's memory."""
WORKER = Path(vllm_worker.__file__)
PREFIX = "creditflow-weights-"


class VllmSampler:
    """Samples from one policy in a worker process, which starts at the first call."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        options: Mapping[str, Any],
        *,
        threads: int = 0,
        timeout_s: float = _START_S,
    ) -> None:
        self.name = f"vLLM for policy {name}"
        self.options = dict(options)
        self.context = int(options["max_model_len"])
        """Maximum number of tokens of prompt and response together."""
        self.reloads = 0
        """The number of times that changed weights were sent."""
        self._command, self._threads, self._timeout_s = command, threads, timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        """The worker's folder, with room for the weights."""
        self._worker: Worker | None = None
        self._loaded: object = None

    def generate(self, policy: Policy, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one response per request with the policy's current weights.

        Raises ModelError if a request is longer than the context, and SamplerError if the worker fails.
        """
        longest = max(len(request.prompt_ids) + request.max_tokens for request in requests)
        if longest > self.context:
            raise ModelError(
                f"a prompt and its max_tokens: expected at most {self.context} tokens (data.max_prompt_length + "
                f"data.max_response_length, or {KEY}.max_model_len), got {longest}"
            )
        worker = self.sync(policy)
        asked = [
            {
                "prompt_ids": request.prompt_ids,
                "max_tokens": request.max_tokens,
                "temperature": request.temperature,
                "seed": _seed(request.seed),
            }
            for request in requests
        ]
        reply = worker.call("generate", requests=asked, eos_ids=sorted(policy.eos_ids))
        return [
            Generation(
                response_ids=tuple(row["ids"]),
                logprobs=tuple(row["logprobs"]),
                finish_reason="stop" if row["ids"][-1] in policy.eos_ids else "length",
            )
            for row in reply["generations"]
        ]

    def sync(self, policy: Policy) -> Worker:
        """Start the worker, or send it the policy's weights if they are not the ones that it holds."""
        state = policy.weights_state()
        if self._worker is None:
            self._worker = self._start(policy)
        elif state != self._loaded:
            self._loaded = None
            with self._exported(policy) as files:
                self._worker.call("load", files=files)
            self.reloads += 1
        self._loaded = state
        return self._worker

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.end()
        self._worker = self._loaded = self._folder = None

    def _start(self, policy: Policy) -> Worker:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, dir=_root(policy), ignore_cleanup_errors=True)
        folder = self._folder.name
        Reporter().say(f"{self.name}: starting, which may take a minute")
        with phase(f"{self.name}: starting"), self._exported(policy):
            worker = Worker(self.name, self._command, Path(folder), _environment(self._threads))
            worker.call("start", self._timeout_s, options={"model": folder, **self.options})
        return worker

    @contextmanager
    def _exported(self, policy: Policy) -> Iterator[list[str]]:
        """Write the policy's weights to the worker's folder while it reads them."""
        assert self._folder is not None
        policy.export(self._folder.name)
        files = sorted(Path(self._folder.name).glob("*.safetensors"))
        yield [str(file) for file in files]
        for file in files:
            file.unlink()


def attach_samplers(policies: Mapping[str, Policy], config: Config) -> None:
    """Give each policy its own vLLM sampler. Raises ConfigError if vLLM or a model cannot be used, starts nothing."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    settings = dict(rollout.engine_kwargs.get("vllm") or {})
    if unknown := sorted(rollout.engine_kwargs.keys() - {"vllm"}):
        raise ConfigError(f"actor_rollout_ref.rollout.engine_kwargs: expected vllm, got {', '.join(unknown)}")
    if own := sorted(_OURS & settings.keys()):
        raise ConfigError(f"{KEY}.{own[0]}: expected options that creditflow does not set itself; leave it out")
    python = find_python(settings.get("python"))
    for name, policy in policies.items():
        if policy.sampler is not None:  # frozen policies of one model are one object
            continue
        expect_supported(name, policy)
        options: dict[str, Any] = {
            "max_model_len": min(policy.max_positions, data.max_prompt_length + data.max_response_length),
            "max_num_seqs": rollout.max_num_seqs,
            "dtype": "bfloat16" if policy.forward.half else "float32",  # as in the update
            "enforce_eager": True,
            "seed": 0,
        }
        options |= {key: value for key, value in settings.items() if key not in _OWN}
        if "kv_cache_memory_bytes" not in options:
            options["kv_cache_memory_bytes"] = cache_bytes(
                policy, options["max_model_len"], rollout.max_num_seqs, 4 if options["dtype"] == "float32" else 2
            )
        policy.sampler = VllmSampler(
            name,
            [str(python), "-I", str(WORKER)],
            options,
            threads=config.trainer.num_threads,
            timeout_s=float(settings.get("start_timeout_s", _START_S)),
        )


def find_python(named: object = None) -> Path:
    """The Python of an environment with vLLM: the named one, that of `make vllm`, or this one.

    Raises ConfigError if it has no vLLM, which is not imported: that takes many seconds.
    """
    default = DEFAULT_PYTHON if DEFAULT_PYTHON.is_file() else Path(sys.executable)
    python = default if named is None else Path(str(named)).expanduser()
    if not python.is_file():
        raise ConfigError(f"{KEY}.python: expected the Python of an environment with vLLM, got {named}: {_HOW}")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([python, "-I", "-c", code], check=False, capture_output=True).returncode:
        raise ConfigError(f"{KEY}.python: expected an environment with vLLM, got {python}, which has none: {_HOW}")
    return python.absolute()


def expect_supported(name: str, policy: Policy) -> None:
    """Raise ConfigError for a model that vLLM starts with, but fails at the first request."""
    size = head_size(policy.model)
    if policy.device.type == "cpu" and size not in _HEAD_SIZES:
        raise ConfigError(
            f"{NAME_KEY}: vllm cannot sample from policy {name} on the CPU: expected attention heads of size "
            f"{', '.join(map(str, _HEAD_SIZES))}, got {size}; set {NAME_KEY}=local"
        )


def cache_bytes(policy: Policy, context: int, rows: int, bytes_per_number: int) -> int:
    """The memory of the key-value cache: `rows` sequences of `context` tokens, or an eighth of the device's memory.

    At least one sequence; rows beyond the cache wait. The result depends on the device, not on its load.
    """
    block = 128 * cache_numbers(policy.model) * bytes_per_number  # vLLM's largest block on the CPU
    row = (context // 128 + 2) * block
    return max(row, min(rows * row, memory_limit(policy.device) // _CACHE_SHARE))


def _seed(key: Iterable[int]) -> int:
    """A seed of 63 bits from a request's random key."""
    return int(np.random.SeedSequence(tuple(key)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _root(policy: Policy) -> str | None:
    """A folder in memory with room for the weights, else None: the system's folder for temporary files."""
    shared = Path("/dev/shm")
    size = sum(weight.nbytes for weight in policy.model.parameters())
    has_room = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 1.2 * size
    return str(shared) if has_room else None


def _environment(threads: int) -> dict[str, str]:
    fixed = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, which ends with this one
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_CPU_OMP_THREADS_BIND": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    }
    if threads:
        fixed["OMP_NUM_THREADS"] = str(threads)
    return {**os.environ, **fixed}
