"""The rewards that verifiers computed for an episode: the outcome, and the parts of the rubric as sub-rewards."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from creditflow.data import Score, Step, Trajectory
from creditflow.plugins.verifiers.record import RECORD, traces_of
from creditflow.rewards.registry import outcome, reward


@outcome(name="verifiers")
class VerifiersOutcome:
    """The reward of the episode's traces, as verifiers computed it: the sum of scores times weights.

    If the traces of several roles have rewards, each role has its own outcome, and the team's is their mean; the mean
    also for several runs of one role.

    `range`: The range of the sum; a recipe with `team.workflow: verifiers://...` has it from the declared weights.

    Range: 0 to 1, or `range`. Cost: microseconds; verifiers scored the episode when it ended. Source: verifiers 0.4.0.
    Raises DataError for a trajectory of another workflow; a trace whose scoring did not run fails the score.
    """

    inline = True

    def __init__(self, range: Sequence[float] = (0.0, 1.0)) -> None:
        self.range = tuple(map(float, range))

    def __call__(self, trajectory: Trajectory) -> object:
        rewarded = [trace for trace in traces_of(trajectory) if trace.rewards]
        if not rewarded:
            return Score(0.0, status="failed", reason="no trace of the episode has a reward")
        missing = next((f"{t.agent}: {name}" for t in rewarded for name, pair in t.rewards.items() if not pair), None)
        if missing:
            return Score(0.0, status="failed", reason=f"{missing}: the scoring did not run")
        by_agent: dict[str, list[float]] = {}
        for trace in rewarded:
            by_agent.setdefault(trace.agent, []).append(trace.reward)
        means = {agent: fmean(rewards) for agent, rewards in by_agent.items()}
        return means if len(means) > 1 else next(iter(means.values()))

    def cache_key(self, trajectory: Trajectory) -> str | None:
        return None


@reward(name="verifiers_part")
class VerifiersPart:
    """One part of the taskset's rubric, as a sub-reward of the last step of each trace that has the part.

    `part`: The name of a reward in `trace.rewards`; with `metric`, of a metric in `trace.metrics`.
    `metric`: Read a metric of the trace.
    `range`: The range of the part's values.

    The other steps have no score by it: the part judges the end of the trace.

    Range: 0 to 1, or `range`. Cost: microseconds. Source: verifiers 0.4.0. Raises ValueError if the scoring did not
    run.
    """

    inline = True

    def __init__(self, part: str, metric: bool = False, range: Sequence[float] = (0.0, 1.0)) -> None:
        self.part, self.kind = part, "metrics" if metric else "rewards"
        self.range = tuple(map(float, range))

    def when(self, step: Step) -> bool:
        """Whether the step is the last one of a trace that has the part."""
        return self.part in step.info.get(RECORD, {}).get(self.kind, {})

    def __call__(self, step: Step, trajectory: Trajectory) -> float:
        value = step.info[RECORD][self.kind][self.part]
        if value is None:
            raise ValueError(f"the scoring of {self.part} did not run")
        return float(value)

    def cache_key(self, step: Step, trajectory: Trajectory) -> str | None:
        return None
