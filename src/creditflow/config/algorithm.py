"""The section `algorithm`: the options of credit, their aliases, and the choice of tasks."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt

from creditflow._utils.sections import OPTIONS, Section, Text, expected
from creditflow.credit.options import CreditOptions
from creditflow.errors import ConfigError


class FilterGroupsConfig(Section):
    """Dynamic sampling: replace tasks without a learning signal."""

    enable: bool = False
    """Leave out tasks whose rollouts all have the same outcome."""
    max_num_gen_batches: PositiveInt = 10
    """Maximum number of task batches to roll out for one training step."""


class RolloutCorrectionConfig(Section):
    """Importance weights for a sampler whose log-probs differ from the actor's, as in verl."""

    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """Weigh the loss of each token by the probability ratio of actor and sampler: of the `token`, or the product over
    its response (`sequence`). `auto`: `token` with `actor_rollout_ref.rollout.name: vllm`, else null. null: no weights.
    The built-in sampler computes with the actor's own weights and precision, so it needs none."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Upper limit of a weight (truncated importance sampling)."""


_LAMBDA = r"^\s*gae_lambda\s*=\s*(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$"


@dataclass
class AlgorithmConfig(CreditOptions):
    """The options of credit (`creditflow.credit.CreditOptions`) and the other keys of `algorithm.*`."""

    __pydantic_config__: ClassVar[ConfigDict] = OPTIONS

    preset: str | None = None
    """A published method by name. It sets options of credit, which the run prints; a key of the recipe that contradicts
    one of them is an error. See docs/concepts/published_rules.md."""
    threshold_share: bool | None = None
    """True/false: the same as `propagation: threshold/discounted`; contradicting it is an error."""
    error_minimization: Annotated[
        Annotated[dict[Literal["gae_lambda"], float], Field(min_length=1)]
        | Annotated[str, Field(pattern=_LAMBDA)]
        | None,
        expected("{gae_lambda: 0.95} or the string gae_lambda=0.95"),
    ] = None
    """`{gae_lambda: 0.95}` or `gae_lambda=0.95`: the same as `lam`."""
    strata: Text | None = None
    """`file.py:function` that takes a step and returns a label (from the prompt alone) or None."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)

    def without_aliases(self, set_keys: Set[str]) -> AlgorithmConfig:
        """Rewrite `threshold_share` and `error_minimization` to `propagation` and `lam`.

        `set_keys`: the keys that were set. Raises ConfigError if an alias contradicts its option.
        """
        resolved = self
        if self.threshold_share is not None:
            rule = "threshold" if self.threshold_share else "discounted"
            if "algorithm.propagation" in set_keys and self.propagation != rule:
                raise ConfigError(
                    f"algorithm.threshold_share: {str(self.threshold_share).lower()} means propagation {rule!r}, "
                    f"but algorithm.propagation is {self.propagation!r}"
                )
            resolved = replace(resolved, propagation=rule, threshold_share=None)
        if (alias := self.error_minimization) is not None:
            lam = float(alias.partition("=")[2]) if isinstance(alias, str) else alias["gae_lambda"]
            if "algorithm.lam" in set_keys and self.lam != lam:
                raise ConfigError(f"algorithm.error_minimization: means lam {lam}, but algorithm.lam is {self.lam}")
            resolved = replace(resolved, lam=lam, error_minimization=None)
        return resolved
