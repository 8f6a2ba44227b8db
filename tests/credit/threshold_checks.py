"""Checks of thresholds, on a fixed history of observed batches. The checks do not judge the value of theta."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from creditflow.credit import BatchStats, Threshold, make_threshold
from creditflow.errors import ConfigError
from creditflow.testing.report import Fault, Report, described, name_of, run

NEVER_SEEN = "an agent never seen"
_AGENTS = ("planner", "executor", "verifier")
_MEMBERS = ("floor", "theta", "update", "state_dict", "load_state_dict", "metrics")
_ACCURACIES = (None, 0.7, 0.75, None, 0.8, 0.6, None, 0.62, 0.9, None, 0.5, 0.9)
_STOP = 6
"""Number of updates before the run is stopped and resumed."""


def check_threshold(spec: float | Mapping[str, Any]) -> Report:
    """Run every check of this module on a threshold, described as in `algorithm.propagation_threshold`.

    `tuned` has one theta for all agents, so that other agents may change an absent agent's theta. Raises
    ConformanceError if a check fails.
    """
    shared = isinstance(spec, Mapping) and spec["kind"] == "tuned"
    case = _ThresholdCase(partial(make_threshold, spec))
    return run(f"threshold {spec}", BASICS, CHECKS, [case], {name_of(absent_agents_stay)} if shared else ())


@dataclass
class _ThresholdCase:
    """A kind of threshold, and the history for its updates."""

    make: Callable[[], Threshold]

    def __str__(self) -> str:
        return "the threshold"

    def history(self) -> list[tuple[str, BatchStats, list[str]]]:
        """(when, the observed batch, the agents seen by then): every agent is sometimes absent, and one joins late."""
        rng, seen, batches = np.random.default_rng(0), list[str](), []
        for update, accuracy in enumerate(_ACCURACIES):
            sub_rewards, spread = {}, {}
            for i, agent in enumerate(_AGENTS):
                size = (1, 40, 200)[(update // 2 + i) % 3]
                eighths, sd = rng.integers(0, 9 - i % 3, size=size), float(rng.random()) / 2
                if (update + i) % 3:
                    sub_rewards[agent], spread[agent] = eighths / 8, sd
                    seen = seen if agent in seen else [*seen, agent]
            batches.append((f"update {update}", BatchStats(sub_rewards, spread, accuracy), seen))
        return batches

    def states(self) -> Iterator[tuple[str, Threshold, list[str]]]:
        """(when, a threshold, the agents seen): one new threshold, at the start and after each update."""
        threshold = self.make()
        yield "at the start", threshold, []
        for when, observed, seen in self.history():
            threshold.update(observed)
            yield f"after {when}", threshold, seen

    def half_way(self) -> Threshold:
        """A new threshold after the first `_STOP` updates."""
        return next(islice(self.states(), _STOP, None))[1]


# ---- the checks ----------------------------------------------------------------------------------------------------


def is_a_threshold(case: _ThresholdCase) -> Iterator[Fault]:
    """`make` returns a new object at every call, with all members of `creditflow.credit.Threshold`."""
    threshold = case.make()
    if missing := [name for name in _MEMBERS if not hasattr(threshold, name)]:
        got = f"a {type(threshold).__name__} without {', '.join(missing)}"
        yield Fault(str(case), f"an object with {', '.join(_MEMBERS)}", got)
    if threshold is case.make():
        yield Fault(str(case), "a new object at every call of make", "the same one twice")


def theta_is_finite(case: _ThresholdCase) -> Iterator[Fault]:
    """`theta` is a finite number for every agent seen so far."""
    for when, threshold, seen in case.states():
        for agent in seen:
            if not _is_number(theta := threshold.theta(agent)):
                yield Fault(f"{when}, agent {agent!r}", "a finite theta", repr(theta))


def new_agents_have_a_theta(case: _ThresholdCase) -> Iterator[Fault]:
    """An agent that was never seen has a finite theta, before the first batch and after every batch."""
    for when, threshold, _ in case.states():
        try:
            theta: object = threshold.theta(NEVER_SEEN)
        except Exception as error:
            theta = described(error)
        if not _is_number(theta):
            yield Fault(f"{when}, {NEVER_SEEN}", "a finite theta", str(theta))


def only_updates_move_it(case: _ThresholdCase) -> Iterator[Fault]:
    """Thetas change in `update` only, not when metrics, state or thetas are read."""
    for when, threshold, seen in case.states():
        before = _thetas(threshold, seen)
        threshold.metrics(), threshold.state_dict(), _thetas(threshold, seen[::-1])
        if (after := _thetas(threshold, seen)) != before:
            yield Fault(when, f"{before} until the next", after)


def empty_batches_change_nothing(case: _ThresholdCase) -> Iterator[Fault]:
    """An empty batch, `BatchStats({}, {})`, leaves thetas and state unchanged."""
    for when, threshold, seen in case.states():
        before = _shown(threshold, seen)
        threshold.update(BatchStats({}, {}))
        if (after := _shown(threshold, seen)) != before:
            yield Fault(f"an empty batch {when}", before, after)


def absent_agents_stay(case: _ThresholdCase) -> Iterator[Fault]:
    """An update without an agent leaves that agent's theta unchanged."""
    threshold, known = case.make(), list[str]()
    for when, observed, seen in case.history():
        away = [agent for agent in known if agent not in observed.sub_rewards]
        before = _thetas(threshold, away)
        threshold.update(observed)
        if (after := _thetas(threshold, away)) != before:
            yield Fault(f"{when}, which does not speak of {', '.join(away)}", before, after)
        known = seen


def floor_is_a_share(case: _ThresholdCase) -> Iterator[Fault]:
    """`floor` is a number from 0 to 1."""
    for threshold in (case.make(), case.half_way()):
        if not (_is_number(threshold.floor) and 0 <= threshold.floor <= 1):
            yield Fault(str(case), "a floor from 0 to 1", repr(threshold.floor))


def metrics_are_numbers(case: _ThresholdCase) -> Iterator[Fault]:
    """Metrics are finite numbers, and their names start with `propagation/`."""
    for when, threshold, _ in case.states():
        for name, value in threshold.metrics().items():
            if not str(name).startswith("propagation/"):
                yield Fault(when, "a name that starts with propagation/", repr(name))
            if not _is_number(value):
                yield Fault(f"{when}, metric {name}", "a finite number", repr(value))


def state_is_json(case: _ThresholdCase) -> Iterator[Fault]:
    """The state is a mapping that JSON can represent, without NaN, and is equal after a round trip through JSON."""
    for threshold in (case.make(), case.half_way()):
        state = threshold.state_dict()
        try:
            read = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as error:
            yield Fault("the state", "what JSON can hold", described(error))
        else:
            if read != state or not isinstance(state, dict):
                yield Fault("the state", repr(state), f"{read!r}, once read again from JSON")


def resumed_is_as_uninterrupted(case: _ThresholdCase) -> Iterator[Fault]:
    """A saved and resumed threshold has the same state and later thetas as an uninterrupted one."""
    uninterrupted, resumed = case.half_way(), case.make()
    resumed.load_state_dict(_through_json(uninterrupted.state_dict()))
    for when, observed, seen in case.history()[_STOP:]:
        expected, got = _shown(uninterrupted, seen), _shown(resumed, seen)
        if got != expected:
            yield Fault(f"saved and resumed after update {_STOP - 1}, before {when}", expected, got)
        uninterrupted.update(observed)
        resumed.update(observed)


def other_states_are_refused(case: _ThresholdCase) -> Iterator[Fault]:
    """A state of another kind, or with a missing or extra key, raises ConfigError and is never misread."""
    state = case.half_way().state_dict()
    others = {f"a state without {key!r}": {k: v for k, v in state.items() if k != key} for key in state}
    others |= {
        "a state of another kind": {**state, "kind": "another"},
        "a state with a key too many": {**state, "x": 0},
    }
    for what, other in others.items():
        try:
            case.make().load_state_dict(_through_json(other))
        except ConfigError:
            continue
        except Exception as error:
            yield Fault(what, "a ConfigError", described(error))
        else:
            yield Fault(what, "a ConfigError", "no exception")


BASICS = (is_a_threshold,)
CHECKS = (
    theta_is_finite,
    new_agents_have_a_theta,
    only_updates_move_it,
    empty_batches_change_nothing,
    absent_agents_stay,
    floor_is_a_share,
    metrics_are_numbers,
    state_is_json,
    resumed_is_as_uninterrupted,
    other_states_are_refused,
)


def _thetas(threshold: Threshold, agents: Collection[str]) -> str:
    return ", ".join(f"theta of {agent} {threshold.theta(agent)!r}" for agent in agents)


def _shown(threshold: Threshold, agents: Collection[str]) -> str:
    """Thetas and state as text, for comparison; other checks test that they are numbers and JSON."""
    return f"{_thetas(threshold, agents)}, state {json.dumps(threshold.state_dict(), default=repr, sort_keys=True)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, bool) and bool(np.isfinite(value))


def _through_json(state: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(state, default=repr))
