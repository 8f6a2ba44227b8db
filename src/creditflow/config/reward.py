"""The section `reward`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from creditflow._utils.sections import FromMapping, Section, Share
from creditflow.rewards.entries import RewardFunctionConfig


class RewardConfig(Section):
    """Reward functions, where they run, and how many of their scores may fail."""

    functions: list[Annotated[RewardFunctionConfig, FromMapping()]] = Field(default_factory=list)
    """The reward functions. Default for the address of a plug-in's workflow: its own, such as a rubric."""
    max_failed_frac: Share = 0.2
    """Stop if a larger share of all scores, or of the outcomes alone, fails."""
    backend: Literal["process", "ray", "inline"] = "process"
    """Execution of functions: `process`, worker processes of this machine; `ray`, Ray actors (`ray_kwargs.ray_init`);
    `inline`, this process, without time-outs, for a debugger."""
    num_workers: PositiveInt | None = None
    """Worker processes, or Ray actors; default: one per core, at most eight."""
    timeout: PositiveFloat = 60.0
    """Seconds for one call of a function without its own `timeout`."""
    max_in_flight: PositiveInt = 256
    """Maximum number of pending calls of async functions."""
    cache_size: NonNegativeInt = 1_000_000
    """Size of the cache of function results, in numbers; keyed by function and inputs. A result of one number takes
    eleven. 0: no cache."""
    sandbox: dict[str, Any] = Field(default_factory=dict)
    """Sandbox for untrusted code: `backend` and its options (`creditflow.sandbox`), for every function with a
    `sandbox` argument."""
    decomp_granularity: Literal["trajectory", "agent", "step", "token_level"] | None = None
    """`trajectory` (outcome only), `agent`, `step` (default) or `token_level`: the same as
    `algorithm.decomp_granularity`; contradicting it is an error."""
