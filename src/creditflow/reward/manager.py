"""Runs reward functions over trajectories: fills `step.scores` and `trajectory.outcome`, and reports.

A function that fails makes a score that says so, never a reward of zero. This module must not know how functions are
declared or found, where they run (a backend's matter), nor what becomes of the scores.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

import numpy as np

from creditflow.errors import RewardError, TooManyFailedScores, first_line
from creditflow.reward.cache import Cache, Keys
from creditflow.reward.calls import Backend, Call, Returned
from creditflow.reward.compose import answer
from creditflow.reward.here import run_on_loop, together
from creditflow.reward.registry import Level, RewardFunction, leaves
from creditflow.reward.scores import make_score, mean_value, scores_of, to_score
from creditflow.rollout.client import PolicyView
from creditflow.tracebacks import keep_traceback
from creditflow.trajectory import Score, Step, Trajectory

_SHOWN_REASONS = 3
_SHARES = {"clipped", "cut_prompts"}
"""Numbers of functions (`metrics()`) that are shares: those of several processes are no sum."""

Progress = Callable[[int, int], None]
"""Told how many of how many calls are done."""


@dataclass(frozen=True, slots=True)
class FunctionReport:
    """What one function did in one scoring."""

    name: str
    level: Level
    matched: int
    """Steps (for the outcome: trajectories) that it had to score."""
    failed: int
    """Timed-out ones included."""
    mean: float
    """Of the scores that are ok, in the function's own range; NaN without any."""
    seconds: float
    """Sum over its calls; those of async functions overlap. Of a composition: over its parts'."""
    reasons: tuple[str, ...]
    """The first distinct reasons of failure, each with the first id that it came with."""
    timeouts: int = 0
    calls: int = 0
    """That were really made; of a composition: of its parts."""
    cached: int = 0
    """Calls that were answered without being made: from the cache, or because another one asked the same."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """What the function counted itself (`metrics()`)."""
    sd: float = 0.0
    """Standard deviation of those that `mean` is of."""

    @property
    def failed_frac(self) -> float:
        """0 to 1."""
        return self.failed / self.matched if self.matched else 0.0

    @classmethod
    def merge(cls, reports: Sequence[FunctionReport]) -> FunctionReport:
        """One report of what one function did in several scorings; see `ScoringReport.merge`."""
        scored = [(r.matched - r.failed, r.mean, r.sd) for r in reports if r.matched > r.failed]
        n_scored = sum(n for n, _, _ in scored)
        mean = sum(n * mean for n, mean, _ in scored) / n_scored if scored else math.nan
        variance = sum(n * (sd**2 + (own - mean) ** 2) for n, own, sd in scored) / n_scored if scored else 0.0
        reasons: dict[str, str] = {}
        for reason in (reason for report in reports for reason in report.reasons):
            reasons.setdefault(_without_place(reason), reason)
        return cls(
            name=reports[0].name,
            level=reports[0].level,
            matched=sum(report.matched for report in reports),
            failed=sum(report.failed for report in reports),
            mean=mean,
            sd=math.sqrt(variance),
            seconds=sum(report.seconds for report in reports),
            reasons=tuple(reasons.values())[:_SHOWN_REASONS],
            timeouts=sum(report.timeouts for report in reports),
            calls=sum(report.calls for report in reports),
            cached=sum(report.cached for report in reports),
            counted=_merge_counted(reports),
        )


@dataclass(frozen=True, slots=True)
class ScoringReport:
    """What one call of `RewardManager.score` did."""

    functions: tuple[FunctionReport, ...]
    seconds: float
    """Wall clock of the whole scoring."""

    @property
    def failed_frac(self) -> float:
        """Share of all scores, sub-rewards and outcomes alike, that failed."""
        matched = sum(function.matched for function in self.functions)
        return sum(function.failed for function in self.functions) / matched if matched else 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The first distinct reasons of failure."""
        return tuple(reason for function in self.functions for reason in function.reasons)

    def metrics(self) -> dict[str, float]:
        """`reward/failed_frac`, `reward/<function>/...`, `timing/...`: docs/rewards.md lists them."""
        metrics = {"reward/failed_frac": self.failed_frac, "timing/reward_s": self.seconds}
        for function in self.functions:
            if not math.isnan(function.mean):
                metrics[f"reward/{function.name}/mean"] = function.mean
                metrics[f"reward/{function.name}/sd"] = function.sd
            metrics[f"reward/{function.name}/failed_frac"] = function.failed_frac
            metrics[f"reward/{function.name}/scores"] = function.matched
            metrics[f"reward/{function.name}/timeouts"] = function.timeouts
            metrics[f"reward/{function.name}/cached"] = function.cached
            if function.calls:
                metrics[f"reward/{function.name}/latency_s"] = function.seconds / function.calls
            metrics[f"timing/reward_s/{function.name}"] = function.seconds
            metrics |= {f"reward/{function.name}/{key}": value for key, value in function.counted.items()}
        return metrics

    @classmethod
    def merge(cls, reports: Sequence[ScoringReport]) -> ScoringReport:
        """One report of many scorings, of several processes perhaps, in which the same functions took part.

        Counts and seconds add up (so `seconds` is no wall clock any more where scorings overlapped), means are weighted
        by what they are the mean of, and of the distinct reasons the first are kept. What functions counted themselves
        goes by its name: of a name with `_max` in it the largest; shares (`_SHARES`, and names that end with `_frac`)
        weighted by what the function had to score; of all others the sum.
        """
        of_function: dict[tuple[str, str], list[FunctionReport]] = {}
        for function in (function for report in reports for function in report.functions):
            of_function.setdefault((function.name, function.level), []).append(function)
        return cls(
            tuple(FunctionReport.merge(same) for same in of_function.values()),
            seconds=sum(report.seconds for report in reports),
        )

    def to_json(self) -> str:
        """For `from_json` in another of our processes: NaN stays NaN."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ScoringReport:
        """The inverse of `to_json`."""
        said = json.loads(text)
        functions = (FunctionReport(**{**f, "reasons": tuple(f["reasons"])}) for f in said["functions"])
        return cls(tuple(functions), said["seconds"])


class RewardManager:
    """Scores trajectories with a fixed set of functions.

    `backend`: where plain functions run (`creditflow.reward.backends.make_backend`); None: in this thread, one by one
    and without time-outs. `timeout`: seconds for each call of a function that has none of its own.
    `max_in_flight`: calls of async functions that wait at a time. `cache_size`: numbers that are remembered.

    It may be used from one event loop after another, one scoring at a time. `close` ends what the backend has started.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        max_failed_frac: float = 0.2,
        *,
        backend: Backend | None = None,
        timeout: float = 60.0,
        max_in_flight: int = 256,
        cache_size: int = 1_000_000,
    ) -> None:
        self.functions = tuple(functions)
        self.max_failed_frac = max_failed_frac
        self.backend = backend
        self.timeout = timeout
        self.max_in_flight = max_in_flight
        self._cache = Cache(cache_size)
        self._untaken = ScoringReport((), 0.0)

    def connect(self, clients: Mapping[str, PolicyView]) -> None:
        """Give the policies of the run (`rollout.client.PolicyView` by name) to the functions that use one.

        Raises RewardError where a function wants one that there is not.
        """
        for function in leaves(self.functions):
            if (wanted := getattr(function.instance, "connect", None)) is not None:
                try:
                    wanted(clients)
                except ValueError as error:  # a policy that there is not
                    raise RewardError(f"reward function {function.name}: {first_line(error)}") from error

    @asynccontextmanager
    async def open(self, clients: Mapping[str, PolicyView] | None = None) -> AsyncIterator[RewardManager]:
        """Connect the policies of the run, and close everything at the end."""
        self.connect(clients or {})
        try:
            yield self
        finally:
            await self.aclose()

    async def score(
        self,
        trajectories: Sequence[Trajectory],
        *,
        max_failed_frac: float | None = None,
        progress: Progress | None = None,
        outcome_only: bool = False,
    ) -> ScoringReport:
        """Fill `step.scores` and `trajectory.outcome` in place.

        Trajectories that failed are left alone. Where the agents went wrong (`info["agent_error"]`), or the play was
        truncated before there was an answer, the outcome is the worst of its range (by default 0) without asking the
        function, and the steps are scored as ever. Latency goes into the report only: scores that hold a clock's
        readings would differ between two runs of one seed.

        `max_failed_frac`: instead of the manager's. `progress`: told, from whichever thread, how many calls of how many
        are answered. `outcome_only`: ask no function but the outcome's.

        Raises TooManyFailedScores where a function failed on more than `max_failed_frac` of its own scores. The scores
        are filled in by then.
        """
        start = time.perf_counter()
        calls: list[Call] = []
        given: list[tuple[Call, Score]] = []
        functions = [function for function in self.functions if not outcome_only or function.level == "outcome"]
        for trajectory in trajectories:
            if trajectory.status == "failed":
                continue
            for function in functions:
                if function.level == "outcome" and (reason := _no_outcome(trajectory)):
                    given.append((Call(function, trajectory), make_score(function, function.range[0], reason)))
                else:
                    made, failed = _calls(function, trajectory)
                    calls += made
                    given += failed
        ran = _Ran(progress)
        for call, returned in zip(calls, await self._answer(calls, ran), strict=True):
            given += scores_of(call, returned)
        for call, score in given:
            if call.step is None:
                call.trajectory.outcome = score
            else:
                call.step.scores[call.function.name] = score

        counted = await self._counted()
        report = ScoringReport(
            tuple(_report(function, given, ran, counted) for function in functions),
            seconds=time.perf_counter() - start,
        )
        self._untaken = ScoringReport.merge([self._untaken, report])
        expect_few_failures(report, self.max_failed_frac if max_failed_frac is None else max_failed_frac)
        return report

    def take_report(self) -> ScoringReport:
        """One report of all scorings since it was last taken."""
        report, self._untaken = self._untaken, ScoringReport((), 0.0)
        return report

    def close(self) -> None:
        """End the backend's processes; the next scoring starts them again."""
        if self.backend is not None:
            self.backend.close()

    async def aclose(self) -> None:
        """The same, and connections that functions hold."""
        ends = [getattr(function.instance, "aclose", None) for function in leaves(self.functions)]
        try:
            failed = await asyncio.gather(*(end() for end in ends if end is not None), return_exceptions=True)
        finally:
            self.close()
        for error in failed:
            if error is not None:
                raise error

    async def _answer(self, calls: Sequence[Call], ran: _Ran) -> list[Returned]:
        """What each call came back with; a composition asks for its parts, and may then ask for more."""
        return await answer(calls, lambda asked: self._run(asked, ran))

    async def _run(self, calls: Sequence[Call], ran: _Ran) -> list[Returned]:
        """Answer from the cache what is known, call each of the others once, and remember."""
        keys = Keys()
        returned: dict[int, Returned] = {}
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for i, call in enumerate(calls):
            key = keys.of(call)
            # Parts of several steps' scores may ask for one and the same call of a trajectory.
            asked = key or (id(call.function), id(call.trajectory), id(call.step))
            if key is not None and (known := self._cache.get(key)) is not None:
                returned[i] = known
                ran.cached[id(call.function)] += 1
            elif (same_as := first.setdefault(asked, i)) != i:
                same[i] = same_as
                ran.cached[id(call.function)] += 1
        to_run = [i for i in first.values() if i not in returned]
        ran.wanted += len(to_run)
        for i, one in zip(to_run, await self._dispatch([calls[i] for i in to_run], ran), strict=True):
            returned[i] = one
            ran.add(calls[i], one)
            # Failures are not remembered: another try may go well.
            if (key := keys.of(calls[i])) is not None and all(s.status == "ok" for _, s in scores_of(calls[i], one)):
                self._cache.put(key, one)
        return [returned[same.get(i, i)] for i in range(len(calls))]

    async def _dispatch(self, calls: Sequence[Call], ran: _Ran) -> list[Returned]:
        """What each call came back with: from the backend, or from here for what it does not take."""
        away = [self.backend is not None and self.backend.takes(call.function) for call in calls]
        here = [call for call, is_away in zip(calls, away, strict=True) if not is_away]
        there = [call for call, is_away in zip(calls, away, strict=True) if is_away]
        running = [run_on_loop(here, self.timeout, self.max_in_flight, ran.answered)]
        if self.backend is not None and there:
            running.append(self.backend.run(there, ran.answered))
        returned = await together(running)
        sources = {False: iter(returned[0]), True: iter(returned[-1])}
        return [next(sources[is_away]) for is_away in away]

    async def _counted(self) -> dict[int, dict[str, float]]:
        """What functions counted themselves, by function (`id`)."""
        counted: dict[int, dict[str, float]] = {}
        for function in leaves(self.functions):
            ask = getattr(function.instance, "metrics", None)
            if ask is not None and not (self.backend is not None and self.backend.takes(function)):
                counted[id(function)] = ask()
        if self.backend is not None:
            counted |= {id(function): said for function, said in await self.backend.metrics()}
        return counted


@dataclass(slots=True)
class _Ran:
    """What was really called in one scoring, by function (`id`)."""

    progress: Progress | None = None
    wanted: int = 0
    done: int = 0
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    cached: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, call: Call, returned: Returned) -> None:
        if returned.traceback:
            keep_traceback(call.trajectory, f"reward function {call.function.name}", returned.traceback)
        self.calls[id(call.function)] += 1
        self.seconds[id(call.function)] += returned.seconds

    def answered(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.wanted)


def _calls(function: RewardFunction, trajectory: Trajectory) -> tuple[list[Call], list[tuple[Call, Score]]]:
    """The calls that score a trajectory, and failed scores of steps of which it is not known whether to score them."""
    if function.level == "outcome":
        return [Call(function, trajectory)], []
    matching: list[Step] = []
    failed: list[tuple[Call, Score]] = []
    for step in trajectory.steps:
        try:
            if function.matches(step):
                matching.append(step)
        except RewardError as error:
            failed.append((Call(function, trajectory, step), to_score(function, Returned(error=str(error)), step)))
    if function.level == "step":
        return [Call(function, trajectory, step) for step in matching], failed
    return ([Call(function, trajectory, steps=tuple(matching))] if matching else []), failed


def _no_outcome(trajectory: Trajectory) -> str:
    """Why the outcome function has nothing to look at; empty where it has."""
    if "agent_error" in trajectory.info:
        return f"the agents went wrong: {trajectory.info['agent_error']}"
    if "ended_early" in trajectory.info:
        return f"truncated before there was an answer: {trajectory.info['ended_early']}"
    return ""


def _report(
    function: RewardFunction,
    given: Sequence[tuple[Call, Score]],
    ran: _Ran,
    counted: Mapping[int, Mapping[str, float]],
) -> FunctionReport:
    mine = [(call, score) for call, score in given if call.function is function]
    values = [mean_value(score) for _, score in mine if score.status == "ok"]
    reasons: dict[str, str] = {}
    for call, score in mine:
        if score.status != "ok":
            where = f"step {call.step.id}" if call.step else f"trajectory {call.trajectory.id}"
            reasons.setdefault(score.reason, f"{function.name}, {where}: {score.reason}")
    parts = [id(part) for part in leaves([function])]
    own: dict[str, float] = {}
    for part in leaves([function]):
        prefix = "" if part is function else f"{part.name}/"
        own |= {f"{prefix}{key}": value for key, value in counted.get(id(part), {}).items()}
    return FunctionReport(
        name=function.name,
        level=function.level,
        matched=len(mine),
        failed=len(mine) - len(values),
        mean=float(np.mean(values)) if values else math.nan,
        sd=float(np.std(values)) if values else 0.0,
        seconds=sum(ran.seconds[part] for part in parts),
        reasons=tuple(reasons.values())[:_SHOWN_REASONS],
        timeouts=sum(score.status == "timeout" for _, score in mine),
        calls=sum(ran.calls[part] for part in parts),
        cached=sum(ran.cached[part] for part in parts),
        counted=own,
    )


def _without_place(reason: str) -> str:
    """What a reason says, without the step or trajectory that it was first seen at: `f, step t.0: timed out`."""
    return reason.partition(": ")[2]


def _merge_counted(reports: Sequence[FunctionReport]) -> dict[str, float]:
    counted: dict[str, float] = {}
    weight: dict[str, int] = defaultdict(int)
    for report in reports:
        for name, value in report.counted.items():
            if "_max" in name:
                counted[name] = max(counted.get(name, value), value)
            elif name.endswith("_frac") or name.rpartition("/")[2] in _SHARES:
                weight[name] += report.matched
                share = report.matched / weight[name] if weight[name] else 0.0
                counted[name] = (1 - share) * counted.get(name, 0.0) + share * value
            else:
                counted[name] = counted.get(name, 0.0) + value
    return counted


def expect_few_failures(report: ScoringReport, max_failed_frac: float) -> None:
    """Raises TooManyFailedScores, naming each function that failed on more than `max_failed_frac` of its own scores."""
    failing = [function for function in report.functions if function.failed_frac > max_failed_frac]
    if not failing:
        return
    failing.sort(key=lambda function: -function.failed_frac)
    worst, names = failing[0], ", ".join(f"{function.name} ({function.failed_frac:.0%})" for function in failing)
    what = "outcomes" if worst.level == "outcome" else "scores"
    reasons = "; ".join(reason for function in failing for reason in function.reasons[:_SHOWN_REASONS])
    raise TooManyFailedScores(
        f"{worst.failed} of {worst.matched} {what} failed, more than reward.max_failed_frac={max_failed_frac:g} allows "
        f"one function: {names}; first reasons: {reasons}"
    )
