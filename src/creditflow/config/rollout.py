"""The section `actor_rollout_ref.rollout`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from creditflow._utils.sections import Section, Share, expected


class ValKwargs(Section):
    """How an evaluation samples."""

    n: PositiveInt = 1
    """Rollouts per validation task."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0: greedy."""
    do_sample: bool = True
    """Evaluate by sampling. A greedy pass (`*_greedy`) is always reported as well."""


class MultiTurnConfig(Section):
    """Turns of an agent with tools, within one step."""

    max_assistant_turns: PositiveInt = 8
    """Maximum number of the agent's turns."""
    max_parallel_calls: PositiveInt = 4
    """Tool calls in one turn; further calls are refused."""
    max_tool_response_length: PositiveInt = 2048
    """Characters of a tool's result; a longer result keeps its beginning and end."""


class RolloutConfig(Section):
    """How rollouts are sampled."""

    name: Literal["local", "vllm"] = "local"
    """The embedded engine's sampler: `local`, the built-in one, or `vllm`, a process of vLLM in an environment of its
    own (`make vllm`) for each policy. `--engine verl` reads `verl.actor_rollout_ref.rollout.name` instead."""
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """With `name: vllm`: `vllm`, a mapping of vLLM's engine options (`max_model_len`, `kv_cache_memory_bytes`, `dtype`,
    `enforce_eager`, ...) and of two more. `python`: the Python of the environment with vLLM; default:
    `.venv/vllm/bin/python`, or this one if vLLM is installed in it. `start_timeout_s`: default 900."""
    n: PositiveInt = 8
    """Rollouts per task."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    max_num_seqs: PositiveInt = 1024
    """Maximum number of calls in one batch of generation."""
    max_failed_frac: Share = 0.5
    """Stop if a larger share of rollouts fails: the rest would be a biased sample."""
    timeout_s: PositiveFloat = 600.0
    """Seconds for one rollout; time in the run's own sampler does not count. A longer rollout is cancelled."""
    timeout_outcome: Literal["mask", "zero"] = "mask"
    """`mask`: the trajectory is `failed` and left out of training. `zero`: it gets the worst outcome, by default 0."""
    min_complete_frac: Annotated[float, Field(gt=0, le=1), expected("a share above 0 and at most 1")] = 1.0
    """Train as soon as this share of a batch's groups is complete. The others join the next batch, with the versions
    that sampled them, so batches differ in size. Below 1 needs `--engine verl` with an asynchronous trainer mode."""
    val_kwargs: ValKwargs = ValKwargs()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
