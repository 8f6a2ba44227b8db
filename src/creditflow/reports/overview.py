"""Overview of a run, and of several side by side, as JSON types, for the report and the live view.

Computes sums over an index and a ledger; draws nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from creditflow.config import leaves
from creditflow.config.algorithm import KEY, rule_options
from creditflow.config.references import spelled_out
from creditflow.credit.analysis.linter import idle_gate
from creditflow.credit.records import CreditOptions
from creditflow.errors import DataError
from creditflow.monitoring.catalog import Metric, Names, described
from creditflow.monitoring.notices import failure_summary, idle_gate_summary, rollout_summary
from creditflow.reports.index import PER_E, TURNS, Index, policies_of
from creditflow.reports.plugin_tables import plugin_tables
from creditflow.reports.text import cut, in_yaml
from creditflow.runs import Ledger
from creditflow.runs.run_folder import torn_lines

POINTS = 400
"""Maximum points of a curve; of longer ones, the values farthest from the mean of their neighbours are kept."""
_BINS = 40
"""Maximum bins of the histogram."""


def overview(ledger: Ledger, index: Index) -> dict[str, Any]:
    """All of the page except single trajectories. `last_turn` in `heat` is that turn and all later ones."""
    rows = ledger.metrics()
    return {
        "run": head(ledger, index),
        "left_out": left_out(ledger, index),
        "curves": curves(ledger, rows),
        "events": events(ledger),
        "notices": notices(ledger, rows),
        "agents": of_agents(index),
        "series": series(index),
        "tables": plugin_tables(rows),
        "heat": heat(index),
        "last_turn": TURNS - 1,
        "advantages": advantages(index),
    }


def notices(ledger: Ledger, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notices for the top of the report: idle gates, rollouts and functions that failed. `rows`: the metrics."""
    sentences = [*rollout_summary(rows), *failure_summary(rows), *idle_gate_summary(rows)]
    if idle_gate_summary(rows) and ledger.steps:
        try:
            last = ledger.read(ledger.steps[-1]).assignment
        except DataError:  # `left_out` names the file and the reason
            last = None
        if last is not None and (idle := idle_gate(last)) is not None:
            sentences.append(f"in the last training step, {idle.message}")
    return sentences


def left_out(ledger: Ledger, index: Index) -> list[str]:
    """One sentence for each part of the run missing from the page, with the reason."""
    sentences = [f"{path.name} is left out: it is incomplete, a crash cut it off" for path in ledger.torn]
    reasons = dict(index.reasons)  # the live view's reader may add to it
    damaged = {step: reason for step, reason in reasons.items() if step in index.damaged}
    unexplained = {step: reason for step, reason in reasons.items() if step in index.taken}
    sentences += [f"{files} cannot be read: {reason}" for files, reason in _by_reason(damaged)]
    sentences += [
        f"the trajectories in {files} cannot be shown, nor their credit explained: {reason}"
        for files, reason in _by_reason(unexplained)
    ]
    unassigned = index.ask("SELECT training_step AS n FROM sums GROUP BY ALL HAVING sum(assigned) = 0")
    sentences += [
        f"no credit is shown for {files}: {reason}"
        for files, reason in _by_reason({row["n"]: "none was assigned, too many scores failed" for row in unassigned})
    ]
    sentences += torn_lines(ledger.path)
    if (n_events := len(ledger.events())) > _EVENTS:
        sentences.append(f"the first {n_events - _EVENTS:,} of {n_events:,} guard events are left out")
    return sentences


def _by_reason(reasons: Mapping[int, str]) -> list[tuple[str, str]]:
    """`(files, reason)` pairs, with step files grouped by reason; only a few are listed by name."""
    steps_of: dict[str, list[int]] = {}
    for step in sorted(reasons):
        steps_of.setdefault(reasons[step], []).append(step)
    groups = []
    for reason, steps in steps_of.items():
        names = [f"{step:06d}.parquet" for step in steps[:_NAMED]]
        more = f" and {len(steps) - _NAMED:,} more" if len(steps) > _NAMED else ""
        groups.append((f"{', '.join(names)}{more}", reason))
    return groups


_NAMED = 3
"""Step files that one notice lists by name."""
_EVENTS = 1000
"""Guard events in the page."""


def head(ledger: Ledger, index: Index) -> dict[str, Any]:
    """The run's name, progress, and facts as rows of name, value and the option that sets it.

    `unreadable`: training steps whose trajectories cannot be shown.
    """
    query = "SELECT count(*) AS trajectories, coalesce(sum(n_steps), 0)::BIGINT AS steps FROM trajectories"
    counts = index.ask(query)[0]
    progress = {"training_steps": len(ledger.steps), "indexed": len(index.taken), "unreadable": sorted(index.reasons)}
    return {"name": ledger.path.resolve().name, **progress, **counts, "facts": _facts(ledger, index, counts)}


def _facts(ledger: Ledger, index: Index, counts: Mapping[str, int]) -> list[tuple[str, str, str]]:
    run, options = ledger.run, settings(ledger, index)
    tasks, versions = (dict(run[key]) if isinstance(run.get(key), dict) else {} for key in ("tasks", "versions"))
    policies = dict.fromkeys(key.split(".")[1] for key in options if key.startswith("policies."))
    own_rates = {policy: options.get(f"policies.{policy}.optim.lr") for policy in policies}
    rates = [f"{policy} {rate}" for policy, rate in own_rates.items() if rate is not None]
    models = dict.fromkeys(in_yaml(of) for policy in policies or [""] if (of := _model(options, policy)) is not None)
    size = f"{n:,} parameters" if isinstance(n := run.get("parameters"), int) else None
    done = {"training steps": len(ledger.steps), **counts}
    rows: list[tuple[str, list[Any], str]] = [
        ("rule", [_rule(index)], "algorithm.propagation"),
        ("advantage", [options.get(_ESTIMATOR), _after("grouped by ", options.get("algorithm.group_by"))], _ESTIMATOR),
        ("model", [*models, size], _MODEL),
        ("learning rate", [options.get(_RATE), *rates, options.get(f"{_OPTIMIZER}.lr_scheduler_type")], _OPTIMIZER),
        *(
            (name, [options.get(key), tasks.get(key)], key)
            for name, key in (("training data", "data.train_files"), ("validation data", "data.val_files"))
        ),
        ("recorded", [f"{name} {n:,}" for name, n in done.items()], ""),
        ("run", [run.get("recipe"), *(_after(f"{key} ", run.get(key)) for key in ("engine", "device", "seed"))], ""),
        ("started", [run.get("started")], ""),
        ("recredited", [run.get("recredited_from"), run.get("changed")], ""),
        ("versions", [*(f"{name} {of}" for name, of in versions.items()), _after("Python ", run.get("python"))], ""),
    ]
    shown = [(name, [in_yaml(part) for part in parts if part is not None], key) for name, parts, key in rows]
    return [(name, cut(", ".join(parts), 400), key) for name, parts, key in shown if parts]


def _after(word: str, value: Any) -> str | None:
    return None if value is None else f"{word}{value}"


def _model(options: Mapping[str, Any], policy: str) -> Any:
    """The model of a policy: its own, that of its endpoint, or the default."""
    own = (options.get(f"policies.{policy}.{key}") for key in ("model.path", "endpoint.model"))
    return next(filter(None, own), options.get(_MODEL))


_ESTIMATOR, _MODEL = "algorithm.adv_estimator", "actor_rollout_ref.model.path"
_OPTIMIZER, _RATE = "actor_rollout_ref.actor.optim", "actor_rollout_ref.actor.optim.lr"


def _rule(index: Index) -> str | None:
    if (options := _first_options(index)) is None:
        return None
    spec = rule_options(options.propagation.spec())
    others = in_yaml({key: value for key, value in spec.items() if key != "rule"})[1:-1]
    return f"{spec['rule']} ({others})" if others else str(spec["rule"])


def _first_options(index: Index) -> CreditOptions | None:
    """The options of the first readable training step: those of later ones may be the guard's."""
    options = dict(index.options)  # the live view's reader may add to it
    return options[min(options)] if options else None


def settings(ledger: Ledger, index: Index) -> dict[str, Any]:
    """The run's configuration by dotted key, with the options that assigned its credit, which a recredit changes."""
    config = ledger.run.get("config")
    flat = dict(leaves(config)) if isinstance(config, dict) else {}
    if (options := _first_options(index)) is not None:
        credit = spelled_out(options) | {"propagation": rule_options(options.propagation.spec())}
        kept = {key: value for key, value in flat.items() if not key.startswith(KEY)}
        flat = kept | dict(leaves({"algorithm": credit}))
    if _GRANULARITY in flat:  # recipes use another name
        flat["reward.decomp_granularity"] = flat.pop(_GRANULARITY)
    flat.pop("trainer.default_local_dir", None)  # always differs
    return flat


_GRANULARITY = "algorithm.decomp_granularity"


def comparison(ledgers: Sequence[Ledger], indices: Sequence[Index]) -> dict[str, Any]:
    """Return `{runs: [{name, curves, agents}], settings: {key: values}}`; settings that differ alone."""
    runs = [
        {"name": name, "curves": curves(ledger, ledger.metrics()), "agents": of_agents(index)}
        for name, ledger, index in zip(names_of(ledgers), ledgers, indices, strict=True)
    ]
    return {"runs": runs, "settings": different([settings(*run) for run in zip(ledgers, indices, strict=True)])}


def names_of(ledgers: Sequence[Ledger]) -> list[str]:
    """The shortest ends of the runs' paths that differ between all folders."""
    paths = [ledger.path.resolve().parts for ledger in ledgers]
    n = next(n for n in count(1) if len({path[-n:] for path in paths}) == len(set(paths)))
    return ["/".join(path[-n:]) for path in paths]


def different(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that differ between runs, each with its value in every run."""
    keys = dict.fromkeys(key for run in runs for key in run)
    by_key = {key: [run.get(key) for run in runs] for key in keys}
    return {key: values for key, values in by_key.items() if any(value != values[0] for value in values)}


def curves(ledger: Ledger, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`{metric: {title, unit, meaning, points: [[training step, value], ...]}}` of the run's metrics `rows`."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                points.setdefault(name, []).append((row["step"], float(value)))
    names = Names(
        agents=_matches(points, "credit/mean/(.+)"),
        functions=_matches(points, "timing/reward_s/(.+)"),
        policies=(*_matches(points, "([^/]+)/actor/[^/]+"), *policies_of(ledger)),
        rules=_matches(points, "guard/on/(.+)"),
    )
    metrics = {name: described(name, names) or Metric(name, "", "", "") for name in points}
    return {
        name: {
            "title": metric.title_of(name),
            "unit": metric.unit,
            "meaning": metric.meaning,
            "points": thinned(points[name]),
        }
        for name, metric in metrics.items()
    }


def _matches(metrics: Iterable[str], pattern: str) -> tuple[str, ...]:
    """The names of agents, functions, policies or rules that a run's metrics contain."""
    return tuple(dict.fromkeys(match[1] for name in metrics if (match := re.fullmatch(pattern, name))))


def thinned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """At most POINTS points with six digits: the last, and of each part of the others that farthest from its mean."""
    if len(points) > POINTS:
        parts = np.array_split(np.array(points[:-1]), POINTS - 1)
        points = [*(part[np.abs(part[:, 1] - part[:, 1].mean()).argmax()].tolist() for part in parts), points[-1]]
    return [[step, float(f"{value:.6g}")] for step, value in points]


def events(ledger: Ledger) -> list[dict[str, Any]]:
    """The last thousand guard events."""
    keys = ("step", "rule", "metric", "what", "action", "note", "text")
    return [{key: row[key] for key in keys if key in row} for row in ledger.events()[-_EVENTS:]]


_MEASURES = {
    "steps": "sum(n)::BIGINT",
    "sub_reward": "sum(sub_reward) / sum(scored)",
    "scored": "sum(scored) / sum(assigned)",
    "error_rate": "sum(wrong) / sum(scored)",
    "pass_rate": "sum(opened) / (sum(opened) + sum(shut))",
    "threshold": "arg_max(threshold, training_step)",
    "credit": "sum(credit) / sum(trained)",
    "share": "sum(moved) / (SELECT sum(moved) FROM sums)",
    "withheld": "sum(withheld)",
    "advantage": "sum(advantage) / sum(trained)",
    "wrong_raised": "sum(wrong_raised) / sum(wrong_trained)",
    "right_lowered": "sum(right_lowered) / sum(right_trained)",
}
"""Statistics of a set of steps, by name, as SQL over the table `sums`. A division by 0 is null, as is the pass rate,
the threshold and the withheld credit of a rule without gates."""


def _statistics(index: Index, keys: str, *names: str) -> list[dict[str, Any]]:
    """The named statistics of steps, grouped and sorted by `keys`."""
    columns = ", ".join(f"{_MEASURES[name]} AS {name}" for name in names)
    return index.ask(f"SELECT {keys}, {columns} FROM sums s GROUP BY ALL ORDER BY ALL")


def of_agents(index: Index) -> list[dict[str, Any]]:
    """One row of statistics per agent."""
    return _statistics(index, "agent", *(name for name in _MEASURES if name != "advantage"))


def series(index: Index) -> dict[str, Any]:
    """`{agent: {credit, pass_rate, threshold, sub_reward: [[training step, value], ...]}}`."""
    names = ("credit", "pass_rate", "threshold", "sub_reward")
    curves: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in _statistics(index, "agent, training_step", *names):
        agent = curves.setdefault(row["agent"], {name: [] for name in names})
        for name in names:
            if row[name] is not None:
                agent[name].append((row["training_step"], row[name]))
    return {agent: {name: thinned(points) for name, points in own.items()} for agent, own in curves.items()}


def heat(index: Index) -> list[dict[str, Any]]:
    """Mean credit, mean advantage and error rate, by agent and turn."""
    return _statistics(index, "agent, turn", "steps", "credit", "advantage", "error_rate")


def advantages(index: Index) -> dict[str, Any]:
    """Histogram of advantages by agent: `{edges, tick, agents: {name: counts}, zero}`, with round edges, one of them 0.

    The range covers the 99.5 % quantile of |advantage|; values beyond it are counted in the outermost bins. `zero`:
    steps with an advantage of 0, which are in no bin. The index stores advantages with a relative error of 1.6 %.
    """
    rows = index.ask("SELECT agent, bin, sum(n)::BIGINT AS n FROM advantages GROUP BY ALL ORDER BY agent, bin")
    value_R = np.array([_value_of(row["bin"]) for row in rows])
    n_R = np.array([row["n"] for row in rows], dtype=np.int64)
    order = np.argsort(np.abs(value_R))
    order = order[value_R[order] != 0]
    far = 1.0
    if order.size:
        reached = np.searchsorted(np.cumsum(n_R[order]), 0.995 * n_R[order].sum())
        far = float(abs(value_R[order[min(int(reached), len(order) - 1)]]))
    width = _round_up(2 * far / _BINS)
    labelled = 4 if f"{width:e}".startswith("5") else 5  # bins between two round ticks
    half = labelled * math.ceil(far / (labelled * width) - 1e-9)
    bin_R = np.clip(np.floor(value_R / width) + half, 0, 2 * half - 1).astype(np.int64)
    counts: dict[str, list[int]] = {row["agent"]: [0] * (2 * half) for row in rows}
    for row, bin, n in zip(rows, bin_R.tolist(), n_R.tolist(), strict=True):
        counts[row["agent"]][bin] += n if row["bin"] else 0
    edges = [float(f"{k * width:.6g}") for k in range(-half, half + 1)]
    return {"edges": edges, "tick": labelled * width, "agents": counts, "zero": int(n_R[value_R == 0].sum())}


def _round_up(size: float) -> float:
    """The next of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(size))
    return next(float(f"{k * power:.1g}") for k in (1, 2, 5, 10) if k * power >= size * (1 - 1e-9))


def _value_of(bin: int) -> float:
    """The advantage in the middle of a bin of the index."""
    return 0.0 if bin == 0 else math.copysign(math.exp((abs(bin) - 1000) / PER_E), bin)
