"""Findings of a run in sentences, each with its evidence and a suggested change.

A finding is a function from the tables of a run to `Finding`s. It claims something only where a test rejects the
opposite at `ERROR_RATE`, over all agents, functions or curves together, and returns a finding of kind `unknown` where
there is too little data. Computes no credit and draws nothing.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from statistics import fmean, median
from typing import Any, Literal

from creditflow.reports.index import Index
from creditflow.reports.overview import settings
from creditflow.reports.significance import association, at_least, trend
from creditflow.runs import Ledger

ERROR_RATE = 0.05
"""Maximum probability of a wrong claim, for each kind of finding."""
ENOUGH = 30
"""Minimum trajectories, or scores, on each side of a comparison."""
_VARIANCE = 5
"""Minimum variance of a Mantel-Haenszel test, which is an approximation."""
_POINTS = 10
"""Minimum points of a trend."""
_WITHHELD = 0.2
"""A share of credit or steps above which it matters, as for the guard's rule on pass rates."""
_RARE = 0.01
"""The share of failed, or of differing, scores below which a reward function counts as sound, or as constant."""
_EQUAL = 1e-9
"""Maximum spread of equal scores, from rounding."""


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of a run that findings read."""

    metrics: Sequence[Mapping[str, Any]] = ()
    """Lines of `metrics.jsonl`, and of the means `outcome` and `sub_reward` in training, by `step`."""
    parts: Sequence[Mapping[str, Any]] = ()
    """Numbers of trajectories in a task of a training step, by `agent`: `n` with a known outcome, of these `erred`,
    `failed`, `joint` (both) and `first` (failed, and its error was the first). `scored`: whether any is scored;
    `tasks`: the number of tasks with these numbers."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Numbers of steps by `training_step` and `agent`: with credit by a trained policy (`assigned`), and `trained`."""
    settings: Mapping[str, Any] | None = None
    """The configuration by dotted key."""
    examples: Mapping[str, tuple[str, int]] | None = None
    """A wrong trajectory with its training step, by the agent of its first error."""

    def setting(self, key: str, default: Any) -> Any:
        """An option of the run, or its default."""
        value = (self.settings or {}).get(key)
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the recipe to try."""

    key: str
    value: Any
    reason: str

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else json.dumps(self.value)
        return f"{self.key}={value}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence about a run."""

    sentence: str
    evidence: tuple[str, ...] = ()
    metric: str | None = None
    """The curve that shows it."""
    change: Change | None = None
    trajectory: tuple[str, int] | None = None
    """A trajectory that shows it, with its training step."""
    kind: Literal["problem", "good", "unknown"] = "problem"
    """`unknown`: there is too little data."""


def findings(tables: Tables) -> list[Finding]:
    """All findings of a run: problems and good news in the order of `FINDINGS`, then the open questions."""
    results = [finding for find in FINDINGS for finding in find(tables)]
    return sorted(results, key=lambda finding: finding.kind == "unknown")


def tables_of(ledger: Ledger, index: Index) -> Tables:
    """The tables of a run that findings read, from its metrics and its index."""
    examples = index.ask("""
        SELECT erring_agent AS agent, arg_max(trajectory_id, number) AS id, max(training_step) AS step
        FROM trajectories WHERE NOT ended_right AND erring_agent IS NOT NULL GROUP BY erring_agent
    """)
    means = index.ask("""
        SELECT training_step AS step, avg(outcome) FILTER (isfinite(outcome)) AS outcome,
               (SELECT sum(sub_reward) / sum(scored) FROM sums WHERE training_step = step) AS sub_reward
        FROM trajectories GROUP BY ALL
    """)
    return Tables(
        metrics=[*ledger.metrics(), *means],
        parts=index.ask("SELECT COLUMNS(* EXCLUDE (training_step, uid)), count(*) AS tasks FROM parts GROUP BY ALL"),
        steps=index.ask("""
            SELECT training_step, agent, sum(trainable)::BIGINT AS assigned, sum(trained)::BIGINT AS trained
            FROM sums GROUP BY ALL ORDER BY training_step, agent
        """),
        settings=settings(ledger, index),
        examples={row["agent"]: (row["id"], row["step"]) for row in examples},
    )


def lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Findings as text for a terminal."""
    for finding in findings:
        yield f"{'-' if finding.kind != 'unknown' else '?'} {finding.sentence}"
        for evidence in finding.evidence:
            yield f"    {evidence}"
        if finding.trajectory is not None:
            yield f"    see trajectory {finding.trajectory[0]}"
        if finding.change is not None:
            yield f"    try {finding.change}: {finding.change.reason}"


def as_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings for the page."""
    return [
        {**asdict(f), "change": None if f.change is None else {"setting": str(f.change), "reason": f.change.reason}}
        for f in findings
    ]


# ---- does the run learn ----------------------------------------------------------------------------------------------

_SERIES = {
    "val/pass_at_1": "pass@1 in validation",
    "train/pass_at_1": "pass@1 in training",
    "val/outcome_mean": "the mean outcome in validation",
    "outcome": "the mean outcome in training",
    "sub_reward": "the mean sub-reward in training",
}


def learning(tables: Tables) -> Iterator[Finding]:
    """Whether pass@1 has a trend beyond noise, by the first series with enough points.

    If it has none, the first mean with a trend is reported in its place.
    """
    # Without a shuffle, tasks that become harder look like a policy that gets worse.
    shuffled = tables.setting("data.shuffle", True)
    series = {name: _points(tables.metrics, name) for name in _SERIES if shuffled or name.startswith("val/")}
    name = next((name for name, points in series.items() if len(points) >= _POINTS), None)
    if name is None:
        most = max(map(len, series.values()))
        of = "pass@1" if shuffled else "pass@1 in validation (data.shuffle is false)"
        yield _unknown(f"whether the run learns: {most} values of {of}, {_POINTS} are needed")
        return
    distinct = {value for _, value in series[name]}
    means = [of for of in tuple(_SERIES)[2:] if distinct != {1} and len(series.get(of, ())) >= _POINTS]
    trends = {of: trend(series[of]) for of in dict.fromkeys((name, *means))}
    bound = ERROR_RATE / len(trends)
    shown = next((of for of, fit in trends.items() if fit.p <= bound), name)
    fit, points, subject = trends[shown], series[shown], _SERIES[shown]
    if fit.p > bound and distinct in ({0}, {1}):
        yield _constant(tables, name, distinct.pop(), len(points))
        return
    still = () if shown == name else (f"{_SERIES[name]} has no trend",)
    over = [value * (points[-1][0] - points[0][0]) for value in (fit.slope, fit.low, fit.high)]
    trended = f"trend over the run {over[0]:+.3f}, 95 % interval [{over[1]:+.3f}, {over[2]:+.3f}]"
    method = f"Mann-Kendall test, Theil-Sen slope (Mann 1945; Sen 1968) over {len(points)} values, p {_p(fit.p)}"
    method += f" (bound {bound:.2g}, for {len(trends)} curves)" if len(trends) > 1 else ""
    evidence, metric = (*still, trended, method), shown if "/" in shown else None  # the others have no curve
    first, last = f"{fit.first:.3f}", f"{fit.last:.3f}"
    from_to = f"from {first} in its first quarter to {last} in its last"
    if fit.p > bound:
        change = _rate(tables, 3, "a larger step, if the gradient norm and the entropy are steady")
        went = f"went {from_to}" if first != last else f"stayed at {first}"
        yield Finding(f"The run does not learn beyond noise: {subject} {went}.", evidence, metric, change)
    elif fit.rises:
        yield Finding(f"The run learns: {subject} rose {from_to}.", evidence, metric, kind="good")
    else:
        change = _rate(tables, 1 / 3, "smaller updates")
        yield Finding(f"The run gets worse: {subject} fell {from_to}.", evidence, metric, change)


def _rate(tables: Tables, factor: float, reason: str) -> Change | None:
    """A multiple of the learning rate; None if a policy has its own rate."""
    key = "actor_rollout_ref.actor.optim.lr"
    own = [rate for name, rate in (tables.settings or {}).items() if re.fullmatch(r"policies\..+\.optim\.lr", name)]
    return Change(key, f"{factor * float(tables.setting(key, 1e-6)):.1g}", reason) if not any(own) else None


def _constant(tables: Tables, name: str, value: float, n: int) -> Finding:
    """A run in which every trajectory, or none, is right: no task's trajectories differ."""
    evidence, subject = (f"{n} equal values",), _SERIES[name]
    if value:
        sentence = f"There is nothing left to learn: {subject} is 1 throughout."
        return Finding(sentence, evidence, name, kind="unknown")
    sentence = f"No task is ever solved: {subject} is 0 throughout."
    reason = "a rare success needs more rollouts of a task; easier tasks or a supervised warm-up help more"
    return Finding(sentence, evidence, name, _twice(tables, "actor_rollout_ref.rollout.n", 8, reason))


# ---- the agent that limits the team ----------------------------------------------------------------------------------


def limiting_agent(tables: Tables) -> Iterator[Finding]:
    """The agent with the most first errors in wrong trajectories, of those whose errors go with failure."""
    rows = tables.parts
    scored = sorted({row["agent"] for row in rows if row["scored"] and row["n"]})
    n_wrong = max((_count(rows, agent, "failed") for agent in scored), default=0)
    n_right = max((_count(rows, agent, "n") - _count(rows, agent, "failed") for agent in scored), default=0)
    if not scored or min(n_wrong, n_right) < ENOUGH:
        counts = f"{n_right} right and {n_wrong} wrong trajectories with scores"
        reason = counts if scored else "no agent has scores"
        yield _unknown(f"which agent limits the team: {reason}, {ENOUGH} right and {ENOUGH} wrong ones are needed")
        return
    tests = {agent: association(_strata(rows, agent)) for agent in scored}
    if all(variance < _VARIANCE for _, variance in tests.values()):
        yield _unknown("which agent limits the team: too few trajectories of one task differ in errors and in outcome")
        return
    harmful = [
        (_count(rows, agent, "first"), agent, p)
        for agent, (p, variance) in tests.items()
        if variance >= _VARIANCE and p <= ERROR_RATE / len(scored)
    ]
    harmful.sort(reverse=True)
    if not harmful or harmful[0][0] == 0:
        return
    first, agent, p = harmful[0]
    close = [other for n, other, _ in harmful[1:] if n and at_least(first, first + n, 0.5) > ERROR_RATE / len(harmful)]
    named = " and ".join([agent, *close])
    n, n_erred, n_failed, joint = (_count(rows, agent, column) for column in ("n", "erred", "failed", "joint"))
    wrong = f"{first:,} of the {n_failed:,} wrong trajectories in which it acts"
    erred, others = 1 - joint / n_erred, 1 - (n_failed - joint) / (n - n_erred)
    if len(scored) == 1 and len({row["agent"] for row in rows}) > 1:
        sentence = (
            f"Errors of {agent} go with failure: it errs in {wrong}. No other agent has scores, so another one may "
            "limit the team more."
        )
    else:
        sentence = f"{named} limit{'' if close else 's'} the team: {agent} makes the first error in {wrong}."
    bound = "" if len(scored) == 1 else f" (bound {ERROR_RATE / len(scored):.2g}, for {len(scored)} agents)"
    evidence = (
        f"trajectories in which {agent} errs end right {_share(erred)} of the time, others {_share(others)}",
        f"Mantel-Haenszel test over the tasks of training steps (1959), p {_p(p)}{bound}",
    )
    metric, example = _present(tables, f"reward/step_error_rate/{agent}"), (tables.examples or {}).get(agent)
    yield Finding(sentence, evidence, metric, _help_for(tables, agent), example)


def _strata(rows: Iterable[Mapping[str, Any]], agent: str) -> Iterator[tuple[int, int, int, int]]:
    """For each task of a training step: trajectories that erred and failed, erred, failed, all."""
    for row in rows:
        if row["agent"] == agent:
            yield from repeat((row["joint"], row["erred"], row["failed"], row["n"]), row["tasks"])


def _count(rows: Iterable[Mapping[str, Any]], agent: str, column: str) -> int:
    return sum(row[column] * row["tasks"] for row in rows if row["agent"] == agent)


def _help_for(tables: Tables, agent: str) -> Change:
    """A separate policy if the agent shares one, else more trajectories of a task."""
    key = f"team.agents.{agent}.policy"
    policies = {
        match[1]: str(value)
        for name, value in (tables.settings or {}).items()
        if (match := re.fullmatch(r"team\.agents\.(.+)\.policy", name))
    }
    if agent in policies and sum(policy == policies[agent] for policy in policies.values()) > 1:
        return Change(key, agent, f"a policy of its own (add policies.{agent}), not shared with others")
    reason = "more trajectories of a task, between which its steps differ"
    return _twice(tables, "actor_rollout_ref.rollout.n", 8, reason)


# ---- withheld credit ------------------------------------------------------------------------------------------------


def withheld_credit(tables: Tables) -> Iterator[Finding]:
    """Agents whose gates withhold, or whose masks remove, over a fifth in most training steps."""
    gated = _by_name(tables.metrics, "credit/gated_off/(.+)")
    masked: dict[str, list[float]] = {}
    for row in tables.steps:
        if row["assigned"]:
            masked.setdefault(row["agent"], []).append(1 - row["trained"] / row["assigned"])
    n_tests = len(gated) + len(masked)
    most = max((len(shares) for shares in [*gated.values(), *masked.values()]), default=0)
    if not n_tests or 0.5**most > ERROR_RATE / n_tests:
        yield _unknown(f"whether credit is withheld: {most} training steps with credit are too few")
        return
    bound, lower, unmask = ERROR_RATE / n_tests, None, None
    if tables.setting(_CLOSED, "cut") == "freeze":
        unmask = Change(_CLOSED, "cut", "steps upstream of a failure train with their own credit")
    elif any(map(any, _by_name(tables.metrics, "reward/(.+)/timeouts").values())):
        unmask = _twice(tables, "reward.timeout", 60.0, "fewer scores fail by their time limit")
    if tables.setting("algorithm.propagation.rule", "threshold") == "threshold":
        threshold = {"kind": "quantile", "target_pass_rate": 0.8}
        lower = Change("algorithm.propagation.theta", threshold, "a threshold that four of five steps pass")
    for agent, shares in gated.items():
        sentence = f"The gates of {agent} withhold {_share(median(shares))} of the credit that reaches them."
        yield from _withheld(shares, bound, sentence, "of the credit", f"credit/gated_off/{agent}", lower)
    for agent, shares in masked.items():
        sentence = f"{_share(median(shares))} of the steps of {agent} are masked and train nothing."
        metric = _present(tables, f"groups/frozen/{agent}") or _present(tables, "groups/masked_steps")
        yield from _withheld(shares, bound, sentence, "of the steps", metric, unmask)


def _withheld(
    shares: Sequence[float], bound: float, sentence: str, of: str, metric: str | None, change: Change | None
) -> Iterator[Finding]:
    """The finding, if it is certain that more than half of the training steps are above `_WITHHELD`."""
    n = sum(share > _WITHHELD for share in shares)
    if (p := at_least(n, len(shares), 0.5)) <= bound:
        evidence = (
            f"over {_share(_WITHHELD)} {of} in {n} of {len(shares)} training steps",
            f"sign test over training steps, p {_p(p)}",
        )
        yield Finding(sentence, evidence, metric, change)


_CLOSED = "algorithm.propagation.on_closed_gate"


# ---- reward functions ------------------------------------------------------------------------------------------------


def reward_functions(tables: Tables) -> Iterator[Finding]:
    """Reward functions that fail on over a hundredth of their scores, or give one value alone."""
    scores = _by_name(tables.metrics, "reward/(.+)/scores")
    if not scores:
        no = "metrics of their scores are" if any(row["scored"] for row in tables.parts) else "scores are"
        yield _unknown(f"reward functions: no {no} on record")
        return
    few = []
    for name in scores:
        rows = [row for row in tables.metrics if row.get(f"reward/{name}/scores")]
        n = round(sum(row[f"reward/{name}/scores"] for row in rows))
        failed = round(sum((row.get(f"reward/{name}/failed_frac") or 0) * row[f"reward/{name}/scores"] for row in rows))
        if n < ENOUGH:
            few.append(f"{name} ({n})")
            continue
        p = at_least(failed, n, _RARE)
        if failed and p <= ERROR_RATE / len(scores):
            reason = "if the failures are time-outs; else the first reasons are in failures.log"
            yield Finding(
                f"The reward function {name} fails on {failed:,} of {n:,} scores ({_share(failed / n)}).",
                (f"above {_share(_RARE)}: exact binomial test, p {_p(p)}",),
                f"reward/{name}/failed_frac",
                _twice(tables, "reward.timeout", 60.0, reason),
            )
        values = {round(row[f"reward/{name}/mean"], 12) for row in rows if row.get(f"reward/{name}/mean") is not None}
        spreads = [row.get(f"reward/{name}/sd") for row in rows if row.get(f"reward/{name}/mean") is not None]
        # `n - failed` equal scores occur by chance with probability 0.99 ** (n - failed) if one in a hundred differs.
        needed = math.ceil(math.log(ERROR_RATE / len(scores)) / math.log(1 - _RARE))
        if len(values) == 1 and all(spread is not None and spread < _EQUAL for spread in spreads):
            if n - failed < needed:
                few.append(f"{name} ({n - failed} equal ones; {needed} are needed to call it constant)")
                continue
            evidence = (f"fewer than {_share(_RARE)} differ: exact binomial test, p < {ERROR_RATE / len(scores):.2g}",)
            sentence = f"The reward function {name} is constant: all {n - failed:,} scores are {values.pop():g}."
            yield Finding(sentence, evidence, f"reward/{name}/sd", _without(tables, name))
    if few:
        yield _unknown(f"reward functions with too few scores: {', '.join(few)}")


def _without(tables: Tables, name: str) -> Change | None:
    """The configured functions without one; None if it is not among them, alone, or the outcome.

    An outcome that is constant makes pass@1 constant, which the finding `learning` reports.
    """
    functions = tables.setting("reward.functions", [])
    named = [row for row in functions if isinstance(row, Mapping) and "fn" in row] if type(functions) is list else []
    kept = [row for row in named if (row.get("name") or re.split("[.:]", str(row["fn"]))[-1]) != name]
    passed = {row.get("train/pass_at_1") for row in tables.metrics} - {None}
    if len(kept) == len(named) or not kept or len(passed) < 2:
        return None
    others = [{key: value for key, value in row.items() if value not in (None, {})} for row in kept]
    return Change("reward.functions", others, "a score that never differs teaches nothing")


# ---- signals ---------------------------------------------------------------------------------------------------------


def unreached_agents(tables: Tables) -> Iterator[Finding]:
    """Agents that no score and no outcome reaches. This is exact: no test is needed."""
    reach = _by_name(tables.metrics, "credit/reach/(.+)")
    if not reach:
        yield _unknown("which agents a signal reaches: credit/reach is not on record")
        return
    to_all = Change("algorithm.propagation.outcome_to", "all", "the outcome reaches every step")
    useful = tables.setting(to_all.key, "all") != "all" and tables.setting("algorithm.adv_estimator", "grpo") != "gae"
    for agent, shares in reach.items():
        if max(shares) == 0:
            evidence = (f"a signal reaches it in none of {len(shares)} training steps",)
            change = to_all if useful else None
            yield Finding(f"No signal reaches {agent}: it does not learn.", evidence, f"credit/reach/{agent}", change)


# ---- trajectories that end early ------------------------------------------------------------------------------------


def early_ends(tables: Tables) -> Iterator[Finding]:
    """Over a fifth of the trajectories ends early, as the mean over training steps. This is exact: no test."""
    if not any(metric in row for row in tables.metrics for metric in _EARLY):
        yield _unknown("whether trajectories end early: their shares are not on record")
        return
    for metric, (how, change) in _EARLY.items():
        shares = [row[metric] for row in tables.metrics if _is_number(row.get(metric))]
        if shares and (mean := fmean(shares)) > _WITHHELD:
            between = dict.fromkeys(map(_share, (min(shares), max(shares))))
            evidence = (f"{' to '.join(between)} in {len(shares)} training steps",)
            yield Finding(f"{_share(mean)} {how}.", evidence, metric, change(tables))


def _longer_responses(tables: Tables) -> Change:
    return _twice(tables, "data.max_response_length", 512, "if responses, rather than prompts or turns, are too long")


def _more_time(tables: Tables) -> Change | None:
    seconds = tables.setting("actor_rollout_ref.rollout.timeout_s", None)
    if seconds is None or not any(row.get("rollout/timeout_frac") for row in tables.metrics):
        return None
    return Change("actor_rollout_ref.rollout.timeout_s", 2 * seconds, "fewer rollouts end by their time limit")


_EARLY: Mapping[str, tuple[str, Callable[[Tables], Change | None]]] = {
    "rollout/truncated_frac": ("of the trajectories are cut short by a limit of length or turns", _longer_responses),
    "rollout/agent_error_frac": ("of the trajectories are ended by an error of an agent", lambda tables: None),
    "rollout/failed_frac": ("of the trajectories fail without a fault of the agents; they train nothing", _more_time),
}


FINDINGS: tuple[Callable[[Tables], Iterable[Finding]], ...] = (
    learning,
    limiting_agent,
    withheld_credit,
    reward_functions,
    unreached_agents,
    early_ends,
)
"""The findings in the order of the report."""


# ---- helpers ---------------------------------------------------------------------------------------------------------


def _twice(tables: Tables, key: str, default: float, reason: str) -> Change:
    """The change to twice the value, which has the type of the default."""
    return Change(key, 2 * type(default)(tables.setting(key, default)), reason)


def _unknown(what: str) -> Finding:
    return Finding(f"Not judged: {what}.", kind="unknown")


def _points(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """The finite values of a metric by training step; of a step that was repeated, the last value."""
    values = {row["step"]: row[name] for row in rows if _is_number(row.get(name))}
    return [(float(step), float(value)) for step, value in sorted(values.items())]


def _by_name(rows: Iterable[Mapping[str, Any]], pattern: str) -> dict[str, list[float]]:
    """The values of each metric that matches, by the name in it."""
    values: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if _is_number(value) and (match := re.fullmatch(pattern, key)):
                values.setdefault(match[1], []).append(float(value))
    return values


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _present(tables: Tables, metric: str) -> str | None:
    return metric if any(row.get(metric) is not None for row in tables.metrics) else None


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def _p(p: float) -> str:
    return "< 0.0001" if p < 1e-4 else f"= {p:.2g}"
