"""A threshold that is lowered once when validation accuracy drops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from creditflow.credit.thresholds.base import (
    KEY,
    METRIC,
    ROUNDING,
    AgentNames,
    BatchStats,
    check_state,
    expect_number,
    expect_threshold,
    expect_whole,
    read_numbers,
    theta_metrics,
    threshold_kind,
)
from creditflow.errors import ConfigError


@threshold_kind("tuned")
@dataclass(slots=True)
class Tuned:
    """One threshold for all agents, lowered once and permanently when validation accuracy drops.

    Accuracy has dropped if it is more than `accuracy_drop` below the best of the last `patience_epochs` validations: a
    symptom of gates so strict that upstream agents receive no credit. The kind has no target pass rate.
    """

    team: AgentNames = None
    initial: float = 0.5
    patience_epochs: int = 5
    accuracy_drop: float = 0.05
    lower_to: float = 0.4
    floor: ClassVar[float] = 0.0
    _accuracies: list[float] = field(init=False, default_factory=list)
    _lowered: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        expect_threshold("initial", self.initial)
        expect_threshold("lower_to", self.lower_to)
        expect_number("accuracy_drop", self.accuracy_drop, 0.0, 1.0)
        expect_whole("patience_epochs", self.patience_epochs)
        if self.lower_to > self.initial:
            raise ConfigError(f"{KEY}.lower_to: expected at most initial = {self.initial!r}, got {self.lower_to!r}")

    def theta(self, agent: str) -> float:
        return float(self.lower_to if self._lowered else self.initial)

    def update(self, observed: BatchStats) -> None:
        if observed.accuracy is None:
            return
        accuracy = float(observed.accuracy)
        if max(self._accuracies, default=0.0) - accuracy > self.accuracy_drop + ROUNDING:
            self._lowered = True
        self._accuracies = [*self._accuracies, accuracy][-self.patience_epochs :]

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "tuned", "accuracies": list(self._accuracies), "lowered": self._lowered}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, "tuned", "accuracies", "lowered")
        accuracies = read_numbers(state, "accuracies")
        if not isinstance(state["lowered"], bool):
            raise ConfigError(f"threshold state: lowered: expected true or false, got {state['lowered']!r}")
        self._accuracies, self._lowered = accuracies[-self.patience_epochs :], state["lowered"]

    def metrics(self) -> dict[str, float]:
        """`propagation/threshold_lowered`: 1 after the threshold was lowered, else 0."""
        return theta_metrics(self, self.theta(""), self.team or ()) | {f"{METRIC}_lowered": float(self._lowered)}
