"""A threshold that is lowered once when validation accuracy drops."""

from __future__ import annotations

from dataclasses import dataclass, field

from creditflow.credit.thresholds.base import (
    FINITE,
    FLAG,
    KEY,
    METRIC,
    ROUNDING,
    SHARE,
    WHOLE,
    BatchStats,
    BuiltIn,
    option,
    shares,
    threshold_kind,
)
from creditflow.errors import ConfigError


@threshold_kind("tuned")
@dataclass
class Tuned(BuiltIn):
    """One threshold for all agents, lowered once and permanently when validation accuracy drops.

    Accuracy has dropped if it is more than `accuracy_drop` below the best of the last `patience_epochs` validations: a
    symptom of gates so strict that upstream agents receive no credit. The kind has no target pass rate.
    """

    kind = "tuned"
    saved = ("accuracies", "lowered")

    initial: float = option(0.5, FINITE)
    patience_epochs: int = option(5, WHOLE)
    accuracy_drop: float = option(0.05, SHARE)
    lower_to: float = option(0.4, FINITE)
    accuracies: list[float] = field(init=False, default_factory=list, metadata={"check": shares()})
    lowered: bool = field(init=False, default=False, metadata={"check": FLAG})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lower_to > self.initial:
            raise ConfigError(f"{KEY}.lower_to: expected at most initial = {self.initial!r}, got {self.lower_to!r}")

    def theta(self, agent: str) -> float:
        return float(self.lower_to if self.lowered else self.initial)

    def update(self, observed: BatchStats) -> None:
        if observed.accuracy is None:
            return
        accuracy, last = float(observed.accuracy), self.accuracies[-self.patience_epochs :]
        self.lowered |= max(last, default=0.0) - accuracy > self.accuracy_drop + ROUNDING
        self.accuracies = [*last, accuracy][-self.patience_epochs :]

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_lowered`: 1 after the threshold was lowered, else 0."""
        return super().metrics() | {f"{METRIC}_lowered": float(self.lowered)}
