"""Watch a run's metrics with guard rules, and name the action when a rule fires.

The guard changes credit through the options and the threshold that it returns. The engine carries out the other
actions: it restores a checkpoint or stops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, NonNegativeInt

from creditflow._utils.loading import is_reference, load_object
from creditflow._utils.sections import Section, Share, checked, expected, options_model
from creditflow._utils.tracebacks import located
from creditflow.credit.records import CreditOptions, make_rule
from creditflow.credit.rules.base import SharingRule
from creditflow.credit.thresholds.base import Threshold
from creditflow.errors import ConfigError, CreditflowError
from creditflow.monitoring.catalog import Names, expect_known, matching
from creditflow.monitoring.guard_rules.base import GUARD_RULES, KEY, GuardRule, RuleResult
from creditflow.registry import expect_keywords

WARN, SET_THRESHOLD, FALLBACK = "warn", "set_threshold", "fallback_identical"
RESTORE, STOP = "restore_checkpoint", "stop"
FALLBACK_RULE = "identical"
"""The propagation rule of a fallback."""
_OneMetric = Annotated[str, Field(pattern=r"^[^*]+$"), expected("one metric")]
_OF_GATES = ("propagation/pass_rate", "propagation/threshold", "propagation/forced_open", "credit/gated_off")
"""Beginnings of the metrics that only propagation rules with gates have."""


class GuardStop(CreditflowError):
    """The guard stopped the run; the message is the report."""


class GuardAction(CreditflowError):
    """A rule ends an attempt at the run; the caller acts on the event."""

    @property
    def event(self) -> GuardEvent:
        """The event whose action the caller takes."""
        event: GuardEvent = self.args[0]
        return event


@dataclass(frozen=True, slots=True)
class GuardEvent:
    """A rule fired or recovered: one line of `events.jsonl`."""

    step: int
    rule: str
    metric: str
    what: str
    """`fired`, `recovered` or `undecided`; `started` for failures; for adapters, which weights are trained from now on.
    """
    action: str
    numbers: dict[str, float]
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """A dict for JSON; non-finite numbers become None."""
        numbers = {name: value if math.isfinite(value) else None for name, value in self.numbers.items()}
        return {**asdict(self), "numbers": numbers}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> GuardEvent:
        """The inverse of `to_dict`; other keys of the row are ignored."""
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    @property
    def text(self) -> str:
        """One line for display."""
        if self.what == "started":
            return f"warning: {self.note}"
        shown = ", ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in self.numbers.items())
        effect = self.note or _EFFECTS.get((self.what, self.action), "well again")
        return f"guard: {self.rule} {self.what}: {self.metric} ({shown}): {effect}"


def engine_action(events: Sequence[GuardEvent]) -> GuardEvent | None:
    """The event with an action for the engine: the first that stops, else the first that restores a checkpoint."""
    fired = [event for event in events if event.what == "fired"]
    return next((event for action in (STOP, RESTORE) for event in fired if event.action == action), None)


def cannot_go_back(rollbacks: int, most: int) -> str:
    """The reason to stop a run instead of a rollback. `rollbacks`: the number so far, of `most` allowed."""
    if not most:
        return "guard.max_rollbacks is 0, so there is no rollback"
    if rollbacks >= most:
        return f"that was after {rollbacks} rollbacks, of which guard.max_rollbacks allows no more"
    return "there is no good checkpoint to go back to (trainer.save_freq)"


def stop_report(event: GuardEvent, folder: Path, why: str = "") -> str:
    """The message of a GuardStop. `why`: the reason against a rollback."""
    return f"{event.text}; stopped after step {event.step}{why and ': '}{why}; {folder}/events.jsonl has the numbers"


_EFFECTS = {
    ("fired", WARN): "a warning only",
    ("fired", SET_THRESHOLD): "from now on thresholds are capped",
    ("fired", FALLBACK): "credit falls back to the shared global reward",
    ("fired", RESTORE): "back to the last good checkpoint",
    ("fired", STOP): "the run is stopped",
    ("undecided", WARN): "too few samples: the interval contains the limit, or is missing",
    ("recovered", SET_THRESHOLD): "well again; thresholds stay capped",
    ("recovered", FALLBACK): "well again; credit is decomposed again",
}


class Unless(Section):
    """A condition that keeps a rule from acting: the running mean of `metric`, if any, exceeds `above`."""

    metric: _OneMetric
    above: float


class RuleOptions(Section):
    """The options of every entry of `guard.rules`; the others belong to its kind."""

    metric: Annotated[str, Field(min_length=1), expected("the name of a metric")]
    kind: str = "level"
    over: Annotated[_OneMetric | None, expected("one metric")] = None
    action: Literal["warn", "set_threshold", "fallback_identical", "restore_checkpoint", "stop"] = "warn"
    to: Share | None = None
    cool_down: NonNegativeInt = 10
    unless: Unless | None = None


class RuleSpec(RuleOptions):
    """One entry of `guard.rules` with its kind."""

    name: str
    make: Callable[[], Any]
    """Makes the rule for one metric."""
    note: str = ""
    """The reason for reducing the action to a warning."""


@dataclass(slots=True)
class _Watch:
    """The state of one rule on one metric."""

    rule: GuardRule
    on: bool = False
    quiet: int = 0
    """Number of further values for which the rule does not fire."""
    suspect: bool = False
    """See `RuleResult`."""
    held: bool = False
    """The rule is on, and `unless` keeps it from acting."""
    unless_mean: float | None = None
    """The running mean of `unless.metric`. One noisy value could start a fallback that does not end."""
    undecided: bool = False
    """See `RuleResult`; reported at its first look only."""


_OF_CREDIT = ("propagation/", "credit/")
_FLAGS = tuple(flag.name for flag in fields(_Watch) if flag.name != "rule")
"""The state of a watch apart from that of its rule."""


@dataclass(slots=True)
class Guard:
    """The rules of a run, and the changes in force because of them."""

    rules: Sequence[RuleSpec]
    watches: dict[tuple[str, str], _Watch] = field(default_factory=dict)
    cap: float | None = None
    """Upper bound of all thresholds; None for no bound."""

    @classmethod
    def from_rules(
        cls,
        rules: Mapping[str, Any],
        names: Names,
        options: CreditOptions,
        *,
        has_outcome: bool,
        folder: Path | None = None,
    ) -> Guard:
        """Build the guard of `guard.rules`. Raises ConfigError for an invalid rule or an unknown metric.

        The message names the nearest known metric. `names`: the recipe's agents, reward functions, policies and rules.
        `has_outcome`: whether a reward function computes the outcome. `folder`: the base of `file.py:kind`. Rules that
        watch gates are left out if the propagation rule has none.
        """
        entries = specs(rules, folder)
        for rule in entries:
            unless = rule.unless.metric if rule.unless else None
            for option, metric in (("metric", rule.metric), ("over", rule.over), ("unless.metric", unless)):
                if metric is not None:
                    expect_known(metric, names, f"{KEY}.{rule.name}.{option}")
        idle = without_gates(rules, options)
        return cls([_possible(rule, options, has_outcome=has_outcome) for rule in entries if rule.name not in idle])

    @property
    def fallback(self) -> bool:
        """Whether credit currently is the shared global reward."""
        actions = {rule.name: rule.action for rule in self.rules}
        return any(
            watch.on and not watch.held and actions[name] == FALLBACK for (name, _), watch in self.watches.items()
        )

    def look(self, step: int, metrics: Mapping[str, float]) -> list[GuardEvent]:
        """Apply the rules to the metrics of a training step or an evaluation; events in the order of the rules.

        Absent and non-finite metrics are skipped. A non-finite metric of a rule that restores or stops makes the
        checkpoint bad (see `good`). `propagation/*` and `credit/*` of a step under a fallback are skipped too: they
        describe the shared reward, so a rule would recover at once.
        """
        if self.fallback:
            metrics = {name: value for name, value in metrics.items() if not name.startswith(_OF_CREDIT)}
        return [event for rule in self.rules for event in self._look(step, rule, metrics)]

    def _look(self, step: int, rule: RuleSpec, metrics: Mapping[str, float]) -> Iterator[GuardEvent]:
        for name in matching(rule.metric, metrics):
            over = _beside(name, rule.over, metrics) if rule.over is not None else None
            watch = self.watches.setdefault((rule.name, name), _Watch(rule.make()))
            if rule.unless is not None and (value := _beside(name, rule.unless.metric, metrics)) is not None:
                mean = value if watch.unless_mean is None else 0.8 * watch.unless_mean + 0.2 * value
                watch.unless_mean = mean if math.isfinite(mean) else watch.unless_mean
            if not math.isfinite(metrics[name]):
                watch.suspect = True
                continue
            result = watch.rule.look(float(metrics[name]), over)
            watch.suspect = result.suspect
            already_undecided, watch.undecided = watch.undecided, result.undecided
            if watch.quiet:
                watch.quiet -= 1
            elif result.bad and (not watch.on or watch.held):
                already, watch.on = watch.on, True
                seen = watch.unless_mean
                watch.held = rule.unless is not None and seen is not None and seen > rule.unless.above
                if already and watch.held:
                    continue
                yield self._event(step, rule, name, "fired", result, held=watch.held)
                if rule.action == SET_THRESHOLD and rule.to is not None and not watch.held:
                    self.cap = rule.to if self.cap is None else min(self.cap, rule.to)
            elif watch.on and result.well:
                held, watch.on, watch.held, watch.quiet = watch.held, False, False, rule.cool_down
                yield self._event(step, rule, name, "recovered", result, held=held)
            elif result.undecided and not (already_undecided or watch.on):
                yield GuardEvent(step, rule.name, name, "undecided", WARN, dict(result.numbers))

    def _event(
        self, step: int, rule: RuleSpec, metric: str, what: str, result: RuleResult, *, held: bool
    ) -> GuardEvent:
        note = rule.note if what == "fired" else ""
        if held and what == "fired" and rule.unless is not None:
            note = f"a warning only, while {rule.unless.metric} is above {rule.unless.above:g}"
        return GuardEvent(step, rule.name, metric, what, WARN if held else rule.action, dict(result.numbers), note)

    @property
    def good(self) -> bool:
        """Whether a checkpoint saved now is fit for a rollback: no restoring or stopping rule is on or suspect."""
        ends = {rule.name for rule in self.rules if rule.action in (RESTORE, STOP)}
        return not any(
            (watch.on or watch.suspect) and not watch.held and name in ends for (name, _), watch in self.watches.items()
        )

    def options(self, options: CreditOptions) -> CreditOptions:
        """The credit options in force."""
        if not self.fallback:
            return options
        # The rule has a baseline, so an estimator without one makes way for GRPO.
        estimator = "grpo" if options.estimator.relative else options.adv_estimator
        return replace(options, propagation=make_rule(FALLBACK_RULE), adv_estimator=estimator)

    def threshold(self, threshold: Threshold) -> Threshold:
        """The threshold in force."""
        return threshold if self.cap is None else cast(Threshold, Capped(threshold, self.cap))

    def metrics(self) -> dict[str, float]:
        """`guard/*`: the rules that are on, and whether a fallback is in force."""
        on = {f"guard/on/{rule.name}": 0.0 for rule in self.rules}
        on |= {f"guard/on/{name}": 1.0 for (name, _), watch in self.watches.items() if watch.on}
        return {**on, "guard/fallback": float(self.fallback)} if self.rules else {}

    def state_dict(self) -> dict[str, Any]:
        """The state for later events, without the rules, as JSON types."""
        kinds = {rule.name: rule.kind for rule in self.rules}
        watches = [
            {"rule": name, "kind": kinds[name], "metric": metric}
            | {flag: getattr(watch, flag) for flag in _FLAGS}
            | {"state": watch.rule.state_dict()}
            for (name, metric), watch in sorted(self.watches.items())
        ]
        return {"cap": self.cap, "watches": watches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state`; entries of removed rules, or of rules with another kind now, are dropped."""
        rules = {rule.name: rule for rule in self.rules}
        self.cap, self.watches = state["cap"], {}
        for saved in state["watches"]:
            rule = rules.get(saved["rule"])
            if rule is not None and rule.kind == saved["kind"]:
                watch = _Watch(rule.make(), **{flag: saved[flag] for flag in _FLAGS})
                watch.rule.load_state_dict(saved["state"])
                self.watches[rule.name, saved["metric"]] = watch


@dataclass(frozen=True, slots=True)
class Capped:
    """A threshold bounded above by `cap`."""

    under: Threshold
    cap: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.under, name)

    def theta(self, agent: str) -> float:
        return min(self.under.theta(agent), self.cap)

    def metrics(self) -> dict[str, float]:
        """The metrics of the wrapped threshold, with capped values."""
        metrics = self.under.metrics()
        thetas = [name for name in metrics if f"{name}/".startswith("propagation/threshold/")]
        return metrics | {name: min(metrics[name], self.cap) for name in thetas}


def without_gates(rules: Mapping[str, Any], options: CreditOptions) -> list[str]:
    """The names of the rules that watch gates, if the propagation rule has none."""
    metrics = {name: rule.get("metric") for name, rule in rules.items() if isinstance(rule, Mapping)}
    return [
        name for name, metric in metrics.items() if not options.propagation.gated and str(metric).startswith(_OF_GATES)
    ]


def specs(rules: Mapping[str, Any], folder: Path | None = None) -> list[RuleSpec]:
    """The rules in `guard.rules`; null entries are left out.

    Raises ConfigError for an invalid rule. Without a `folder`, user-defined kinds (`file.py:kind`) are left out too,
    since they are not loaded yet.
    """
    parsed = [_spec(name, options, folder) for name, options in rules.items() if options is not None]
    return [spec for spec in parsed if spec is not None]


def _beside(name: str, other: str, metrics: Mapping[str, float]) -> float | None:
    """The value of the metric `other` of the policy that metric `name` belongs to, else of the run."""
    return metrics.get(f"{name.partition('/')[0]}/{other}", metrics.get(other))


def _spec(name: str, entry: Any, folder: Path | None) -> RuleSpec | None:
    key = f"{KEY}.{name}"
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{key}: expected metric, kind, action and more, or null, got {entry!r}")
    given = {option: value for option, value in entry.items() if value is not None}
    own = {option: value for option, value in given.items() if option not in RuleOptions.model_fields}
    common = {option: value for option, value in given.items() if option not in own}
    kind_name = given.get("kind", "level")
    if is_reference(kind_name):
        if folder is None:
            checked(RuleOptions, common, key)
            return None
        kind = load_object(kind_name, folder, f"{key}.kind")
    else:
        try:
            kind = GUARD_RULES[kind_name]
        except ConfigError as error:
            raise ConfigError(str(error).replace(GUARD_RULES.key, f"{key}.kind", 1)) from error
    if hasattr(kind, "__dataclass_fields__"):
        checked(options_model(kind, base=RuleOptions), given, key)
    elif callable(kind):
        expect_keywords(kind_name, kind, own, key)
    options = checked(RuleOptions, common, key)
    if options.action == SET_THRESHOLD and options.to is None:
        raise ConfigError(f"{key}.to: expected a number from 0 to 1, which {SET_THRESHOLD} needs, got nothing")
    make = partial(_make, kind, kind_name, own, key)
    make()  # refuses bad options now
    return RuleSpec.model_construct(**dict(options), name=name, make=make)


def _make(kind: Any, name: str, options: Mapping[str, Any], key: str) -> GuardRule:
    """A rule of the kind called `name`. Raises ConfigError for options that it refuses, and for other objects."""
    try:
        rule = kind(**options) if callable(kind) else kind
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}" if ":" in str(error) else f"{key}: {error}") from None
    except Exception as error:  # whatever the user's kind raises
        raise ConfigError(located(error, f"{key}: {name}: {type(error).__name__}: {error}")) from error
    if isinstance(rule, GuardRule):
        return rule
    words = "expected a class of options with look, state_dict and load_state_dict"
    raise ConfigError(f"{key}.kind: {name}: {words}, got {type(rule).__name__}")


def _possible(rule: RuleSpec, options: CreditOptions, *, has_outcome: bool) -> RuleSpec:
    """`rule`, reduced to a warning if its action would have no effect or leave nothing to learn from."""
    rule_in_force = options.propagation
    theta = getattr(rule_in_force, "theta", None)
    notes = []
    if rule.action == FALLBACK and not has_outcome:
        notes.append("there is no outcome to fall back to")
    if rule.action == FALLBACK and isinstance(rule_in_force, SharingRule) and rule_in_force.shared_reward == "outcome":
        notes.append(f"credit is the shared global reward already ({rule_in_force})")
    if rule.action == SET_THRESHOLD and not rule_in_force.gated:
        notes.append(f"there is no threshold to lower ({rule_in_force})")
    elif rule.action == SET_THRESHOLD and rule.to is not None and isinstance(theta, int | float) and theta <= rule.to:
        notes.append(f"the threshold is {theta:g} already")
    return rule.model_copy(update={"action": WARN, "note": notes[0]}) if notes else rule


def _short(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
