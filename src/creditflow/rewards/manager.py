"""Run reward functions over trajectories: fill `step.scores`, `trajectory.outcome` and `.outcomes`, and report.

A function that fails gives a failed score with a reason, never a reward of zero.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from creditflow._utils.tracebacks import keep_traceback
from creditflow.data import Score, Step, Trajectory
from creditflow.errors import RewardError, TooManyFailedScores, first_line
from creditflow.rewards.cache import Cache, Keys
from creditflow.rewards.calls import Backend, Returned, RewardCall, add_counts
from creditflow.rewards.compose import calls_for, combined
from creditflow.rewards.execution.inline import run_on_loop, together
from creditflow.rewards.registry import Level, RewardFunction, leaves
from creditflow.rewards.scores import failed_score, mean_value, scores_of, worst_score
from creditflow.rollout.client import PolicyView

_SHOWN_REASONS = 3

Scored = tuple[RewardCall, Score]
"""A score, with the step, trajectory or agent that it is of."""
Progress = Callable[[int, int], None]
"""Called with the number of finished calls and the number of all calls."""


@dataclass(frozen=True, slots=True)
class FunctionReport:
    """Report on one function in one scoring."""

    name: str
    level: Level
    matched: int
    """Steps (for the outcome: trajectories) that it had to score."""
    failed: int
    """Failed scores, timed-out ones included; for the outcome: trajectories with a failed outcome, common or not."""
    mean: float
    """Mean of the ok scores, in the function's own range; NaN without any."""
    seconds: float
    """Sum over its calls; those of async functions overlap. For a sum: over the calls of its parts."""
    reasons: tuple[str, ...]
    """The first distinct reasons of failure, each with the first id at which it occurred."""
    timeouts: int = 0
    calls: int = 0
    """Calls that were made; for a sum: calls of its parts."""
    cached: int = 0
    """Calls that were answered without being made: from the cache, or by an identical call."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """Numbers counted by the function itself (`metrics()`)."""
    sd: float = 0.0
    """Standard deviation of the scores in `mean`."""
    not_applicable: int = 0
    """Steps or trajectories to which it does not apply; they are not in `matched`."""
    extra: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """Sum and count of each number that it returned beside its scores."""

    @property
    def failed_frac(self) -> float:
        """Share of failed scores, 0 to 1."""
        return self.failed / self.matched if self.matched else 0.0

    @classmethod
    def merge(cls, reports: Sequence[FunctionReport]) -> FunctionReport:
        """Merge the reports on one function in several scorings; see `ScoringReport.merge`."""
        scored = [(r.matched - r.failed, r.mean, r.sd) for r in reports if r.matched > r.failed]
        n_scored = sum(n for n, _, _ in scored)
        mean = sum(n * mean for n, mean, _ in scored) / n_scored if scored else math.nan
        variance = sum(n * (sd**2 + (own - mean) ** 2) for n, own, sd in scored) / n_scored if scored else 0.0
        reasons: dict[str, str] = {}
        for reason in (reason for report in reports for reason in report.reasons):
            reasons.setdefault(_without_place(reason), reason)
        summed = ("matched", "failed", "seconds", "timeouts", "calls", "cached", "not_applicable")
        return replace(
            reports[0],
            mean=mean,
            sd=math.sqrt(variance),
            reasons=tuple(reasons.values())[:_SHOWN_REASONS],
            counted=add_counts(report.counted for report in reports),
            extra=_merge_extra(reports),
            **{name: sum(getattr(report, name) for report in reports) for name in summed},
        )


@dataclass(frozen=True, slots=True)
class ScoringReport:
    """Report on one call of `RewardManager.score`."""

    functions: tuple[FunctionReport, ...]
    seconds: float
    """Wall clock of the whole scoring."""

    @property
    def failed_frac(self) -> float:
        """Share of failed scores among all scores, sub-rewards and outcomes alike."""
        matched = sum(function.matched for function in self.functions)
        return sum(function.failed for function in self.functions) / matched if matched else 0.0

    @property
    def reasons(self) -> tuple[str, ...]:
        """The first distinct reasons of failure."""
        return tuple(reason for function in self.functions for reason in function.reasons)

    def metrics(self) -> dict[str, float]:
        """`reward/failed_frac`, `reward/<function>/...`, `timing/...`: docs/reference/metrics.md lists them."""
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
            if function.not_applicable:
                metrics[f"reward/{function.name}/not_applicable"] = function.not_applicable
            metrics |= {f"reward/{function.name}/{key}": value for key, value in function.counted.items()}
            for key, (total, count) in function.extra.items():
                metrics[f"reward/{function.name}/extra/{key}"] = total / count
        return metrics

    @classmethod
    def merge(cls, reports: Sequence[ScoringReport]) -> ScoringReport:
        """Merge the reports of several scorings, possibly from several processes, with the same functions.

        Counts and seconds are summed (`seconds` is then not wall clock if scorings overlapped), means are weighted by
        their number of scores, and the first distinct reasons are kept. The functions' own numbers are summed, except
        that of a name with `_max` in it the largest is kept.
        """
        of_function: dict[tuple[str, str], list[FunctionReport]] = {}
        for function in (function for report in reports for function in report.functions):
            of_function.setdefault((function.name, function.level), []).append(function)
        return cls(
            tuple(FunctionReport.merge(same) for same in of_function.values()),
            seconds=sum(report.seconds for report in reports),
        )


class RewardManager:
    """Scores trajectories with a fixed set of functions.

    `backend`: runs plain functions (`creditflow.rewards.execution.backends.make_backend`); None: they run in this
    thread, one by one and without time-outs. `timeout`: default time limit of a call, in seconds. `max_in_flight`:
    maximum number of concurrent async calls. `cache_size`: capacity of the cache, in numbers.

    A manager may be used from one event loop after another, one scoring at a time. `close` ends the backend's
    processes.
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

    @property
    def needs_reference(self) -> bool:
        """Whether a function reads `step.ref_logprobs`, which it declares by `needs_reference = True`."""
        return any(getattr(function.instance, "needs_reference", False) for function in leaves(self.functions))

    def connect(self, clients: Mapping[str, PolicyView]) -> None:
        """Pass the policies of the run (`rollout.client.PolicyView` by name) to the functions that use one.

        Raises RewardError if a function needs a policy that the run lacks.
        """
        for function in leaves(self.functions):
            if (connect := getattr(function.instance, "connect", None)) is not None:
                try:
                    connect(clients)
                except ValueError as error:  # the run lacks a policy
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
        """Fill `step.scores`, `trajectory.outcome` and `trajectory.outcomes` in place.

        Failed trajectories are left alone. If the agents went wrong (`info["agent_error"]`), or the trajectory was
        truncated before there was an answer, the outcome is the worst of its range (by default 0) without a call of the
        function, and the steps are scored as usual. Latency is in the report only: scores with clock readings would
        differ between two runs of one seed.

        `max_failed_frac`: overrides the manager's. `progress`: called from any thread with the numbers of finished and
        of all calls. `outcome_only`: call only the outcome function.

        Raises TooManyFailedScores if a function failed on more than `max_failed_frac` of its own scores. The scores are
        filled in before that.
        """
        functions = [function for function in self.functions if not outcome_only or function.level == "outcome"]
        scored, ran, counted = await self._score(trajectories, functions, progress)
        report = _report(functions, scored, ran, counted)
        self._untaken = ScoringReport.merge([self._untaken, report])
        expect_few_failures(report, self.max_failed_frac if max_failed_frac is None else max_failed_frac)
        return report

    async def score_apart(self, trajectories: Sequence[Trajectory]) -> tuple[list[ScoringReport], ScoringReport]:
        """Score like `score`, with a report on each trajectory, and any number of failures.

        A report has the trajectory's own scores. The second result has all else: seconds, calls and the functions' own
        numbers. Merge it with one of them.
        """
        scored, ran, counted = await self._score(trajectories, self.functions, None)
        own: dict[int, list[Scored]] = defaultdict(list)
        for call, score in scored:
            own[id(call.trajectory)].append((call, score))
        logs = [_CallLog(skipped=[call for call in ran.skipped if call.trajectory is t]) for t in trajectories]
        ran.skipped = []
        parts = [_report(self.functions, own[id(t)], log, {}) for t, log in zip(trajectories, logs, strict=True)]
        return parts, _report(self.functions, (), ran, counted)

    async def _score(
        self, trajectories: Sequence[Trajectory], functions: Sequence[RewardFunction], progress: Progress | None
    ) -> tuple[list[Scored], _CallLog, dict[int, dict[str, float]]]:
        """Fill in the scores; returns them with the log of calls and the functions' own numbers."""
        calls: list[RewardCall] = []
        scored: list[Scored] = []
        for trajectory in trajectories:
            if trajectory.status == "failed":
                continue
            for function in functions:
                if function.level == "outcome" and (reason := no_outcome(trajectory)):
                    scored.append((RewardCall(function, trajectory), worst_score(function, reason)))
                else:
                    own_calls, unmatched = calls_on(function, trajectory)
                    calls += own_calls
                    scored += unmatched
        ran = _CallLog(progress)
        needed = [calls_for(call) for call in calls]  # those of its parts, for a sum
        results = iter(await self._run([part for parts in needed for part in parts], ran))
        for call, parts in zip(calls, needed, strict=True):
            returned = combined(call, [next(results) for _ in parts])
            scored += scores_of(call, returned)
            if not returned.applies:
                ran.skipped.append(call)
                if call.step is None:  # masked, since an outcome of 0 would be a reward
                    masked = Returned(error="does not apply: the function returned None")
                    call.trajectory.outcome, call.trajectory.outcomes = failed_score(call.function, masked), {}
        for call, score in scored:
            if call.agent is not None:
                call.trajectory.outcomes[call.agent] = score
            elif call.step is None:  # comes before the outcomes of single agents
                call.trajectory.outcome, call.trajectory.outcomes = score, {}
            else:
                call.step.scores[call.function.name] = score
        return scored, ran, await self._counted()

    def take_report(self) -> ScoringReport:
        """Return one report of all scorings since the previous call."""
        report, self._untaken = self._untaken, ScoringReport((), 0.0)
        return report

    def close(self) -> None:
        """End the backend's processes; the next scoring starts them again."""
        if self.backend is not None:
            self.backend.close()

    async def aclose(self) -> None:
        """End the backend's processes, and close connections that functions hold."""
        ends = [getattr(function.instance, "aclose", None) for function in leaves(self.functions)]
        try:
            failed = await asyncio.gather(*(end() for end in ends if end is not None), return_exceptions=True)
        finally:
            self.close()
        for error in failed:
            if error is not None:
                raise error

    async def _run(self, calls: Sequence[RewardCall], ran: _CallLog) -> list[Returned]:
        """Answer known calls from the cache, make each other call once, and store its result."""
        keys = Keys()
        returned: dict[int, Returned] = {}
        first: dict[object, int] = {}
        same: dict[int, int] = {}
        for i, call in enumerate(calls):
            key = keys.key_for(call)
            # Parts that score several steps may request the same call of a trajectory.
            call_key = key or (id(call.function), id(call.trajectory), id(call.step))
            if key is not None and (stored := self._cache.get(key)) is not None:
                returned[i] = stored
                ran.cached[id(call.function)] += 1
            elif (same_as := first.setdefault(call_key, i)) != i:
                same[i] = same_as
                ran.cached[id(call.function)] += 1
        to_run = [i for i in first.values() if i not in returned]
        ran.planned += len(to_run)
        for i, result in zip(to_run, await self._dispatch([calls[i] for i in to_run], ran), strict=True):
            returned[i] = result
            ran.add(calls[i], result)
            # Failures are not stored: another try may succeed.
            is_ok = all(score.status == "ok" for _, score in scores_of(calls[i], result))
            if is_ok and (key := keys.key_for(calls[i])) is not None:
                self._cache.put(key, result)
        results = [returned[same.get(i, i)] for i in range(len(calls))]
        # Several steps may request the same call of a trajectory: its numbers count once.
        places = {(id(call.function), id(call.trajectory), id(call.step)): i for i, call in enumerate(calls)}
        for i in places.values():
            ran.add_numbers(calls[i], results[i])
        return results

    async def _dispatch(self, calls: Sequence[RewardCall], ran: _CallLog) -> list[Returned]:
        """The result of each call, from the backend, or from this process for calls that it does not take."""
        away = [self.backend is not None and self.backend.takes(call.function) for call in calls]
        inline = [call for call, is_away in zip(calls, away, strict=True) if not is_away]
        there = [call for call, is_away in zip(calls, away, strict=True) if is_away]
        running = [run_on_loop(inline, self.timeout, self.max_in_flight, ran.answered)]
        if self.backend is not None and there:
            running.append(self.backend.run(there, ran.answered))
        returned = await together(running)
        sources = {False: iter(returned[0]), True: iter(returned[-1])}
        return [next(sources[is_away]) for is_away in away]

    async def _counted(self) -> dict[int, dict[str, float]]:
        """Numbers counted by the functions themselves, by function (`id`)."""
        counted: dict[int, dict[str, float]] = {}
        for function in leaves(self.functions):
            ask = getattr(function.instance, "metrics", None)
            if ask is not None and not (self.backend is not None and self.backend.takes(function)):
                counted[id(function)] = ask()
        if self.backend is not None:
            counted |= {id(function): numbers for function, numbers in await self.backend.metrics()}
        return counted


@dataclass(slots=True)
class _CallLog:
    """Calls that were made in one scoring, by function (`id`)."""

    progress: Progress | None = None
    planned: int = 0
    done: int = 0
    calls: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    cached: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    skipped: list[RewardCall] = field(default_factory=list)
    """Calls of functions that do not apply."""
    numbers: dict[int, dict[str, list[float]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    """The numbers that a function returned beside its scores, by name."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    start: float = field(default_factory=time.perf_counter)

    def add(self, call: RewardCall, returned: Returned) -> None:
        if returned.traceback:
            keep_traceback(call.trajectory.info, f"reward function {call.function.name}", returned.traceback)
        self.calls[id(call.function)] += 1
        self.seconds[id(call.function)] += returned.seconds

    def add_numbers(self, call: RewardCall, returned: Returned) -> None:
        wanted = None if call.steps is None else {step.index for step in call.steps}
        for placed in returned.scores:
            for name, value in placed.numbers if wanted is None or placed.place in wanted else ():
                self.numbers[id(call.function)][name].append(value)

    def answered(self) -> None:
        """Count a result, from any thread."""
        with self.lock:
            self.done += 1
            if self.progress is not None:
                self.progress(self.done, self.planned)


def calls_on(function: RewardFunction, trajectory: Trajectory) -> tuple[list[RewardCall], list[Scored]]:
    """The calls that score a trajectory, and failed scores for the steps on which `when` failed."""
    if function.level == "outcome":
        return [RewardCall(function, trajectory)], []
    matching: list[Step] = []
    failed: list[Scored] = []
    for step in trajectory.steps:
        try:
            if function.matches(step):
                matching.append(step)
        except RewardError as error:
            failed.append((RewardCall(function, trajectory, step), failed_score(function, Returned(error=str(error)))))
    if function.level == "step":
        return [RewardCall(function, trajectory, step) for step in matching], failed
    return ([RewardCall(function, trajectory, steps=tuple(matching))] if matching else []), failed


def no_outcome(trajectory: Trajectory) -> str:
    """The reason to give the outcome without a call of its function; empty otherwise."""
    if "agent_error" in trajectory.info:
        return f"the agents went wrong: {trajectory.info['agent_error']}"
    if "ended_early" in trajectory.info:
        return f"truncated before there was an answer: {trajectory.info['ended_early']}"
    return ""


def _report(
    functions: Sequence[RewardFunction],
    scored: Sequence[Scored],
    ran: _CallLog,
    counted: Mapping[int, Mapping[str, float]],
) -> ScoringReport:
    seconds = time.perf_counter() - ran.start
    return ScoringReport(tuple(_function_report(function, scored, ran, counted) for function in functions), seconds)


def _function_report(
    function: RewardFunction,
    scored: Sequence[Scored],
    ran: _CallLog,
    counted: Mapping[int, Mapping[str, float]],
) -> FunctionReport:
    by_place: dict[tuple[int, int], Scored] = {}
    for call, score in scored:
        place = id(call.trajectory), id(call.step)
        if call.function is function and (call.agent is None or _is_first_failure(score, by_place[place][1])):
            by_place[place] = call, score
    mine = [*by_place.values()]
    values = [mean_value(score) for _, score in mine if score.status == "ok"]
    reasons: dict[str, str] = {}
    for call, score in mine:
        if score.status != "ok":
            where = f"step {call.step.id}" if call.step else f"trajectory {call.trajectory.id}"
            where += f", agent {call.agent}" if call.agent else ""
            reasons.setdefault(score.reason, f"{function.name}, {where}: {score.reason}")
    parts = [id(part) for part in leaves([function])]
    own: dict[str, float] = {}
    extra: dict[str, tuple[float, int]] = {}
    for part in leaves([function]):
        of_part, beside = ("", "") if part is function else (f"{part.name}/", f"{part.name}.")
        own |= {f"{of_part}{key}": value for key, value in counted.get(id(part), {}).items()}
        for name, numbers in ran.numbers.get(id(part), {}).items():
            extra[f"{beside}{name}"] = math.fsum(numbers), len(numbers)
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
        not_applicable=sum(call.function is function for call in ran.skipped),
        extra=extra,
    )


def _is_first_failure(score: Score, before: Score) -> bool:
    return score.status != "ok" and before.status == "ok"


def _without_place(reason: str) -> str:
    """A reason without the step or trajectory at which it first occurred: `f, step t.0: timed out`."""
    return reason.partition(": ")[2]


def _merge_extra(reports: Sequence[FunctionReport]) -> dict[str, tuple[float, int]]:
    merged: dict[str, tuple[float, int]] = {}
    for report in reports:
        for name, (total, count) in report.extra.items():
            before = merged.get(name, (0.0, 0))
            merged[name] = before[0] + total, before[1] + count
    return merged


def expect_few_failures(report: ScoringReport, max_failed_frac: float) -> None:
    """Raises TooManyFailedScores that names each function with more than `max_failed_frac` failed scores."""
    failing = [function for function in report.functions if function.failed_frac > max_failed_frac]
    if not failing:
        return
    failing.sort(key=lambda function: -function.failed_frac)
    names = ", ".join(f"{f.name} {f.failed} of {f.matched} ({f.failed_frac:.0%})" for f in failing)
    reasons = "; ".join(reason for function in failing for reason in function.reasons[:_SHOWN_REASONS])
    raise TooManyFailedScores(
        f"more than reward.max_failed_frac={max_failed_frac:g} of a function's scores failed: {names}; "
        f"first reasons: {reasons}"
    )
