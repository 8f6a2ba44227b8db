"""Overview of a run as JSON types, for the report and the live view.

Computes sums over an index and a ledger; draws nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from creditflow.config import leaves
from creditflow.credit.analysis.linter import idle_gate
from creditflow.credit.records import PROPAGATION_RULES, UNKNOWN
from creditflow.errors import DataError
from creditflow.monitoring.catalog import Names, described
from creditflow.monitoring.notices import failure_summary, idle_gate_summary, rollout_summary
from creditflow.reports.index import Index
from creditflow.runs import Ledger

POINTS = 400
"""Maximum points of a curve; longer curves are averaged over neighbours."""
_BINS = 40
_TURNS = 60
"""Turns of the heat map; later turns are counted in the last one."""
_HARDEST = 15


def overview(ledger: Ledger, index: Index) -> dict[str, Any]:
    """All of the page except single trajectories."""
    agents = of_agents(index)
    return {
        "run": head(ledger, index),
        "left_out": left_out(ledger, index),
        "curves": curves(ledger),
        "events": events(ledger),
        "notices": notices(ledger),
        "agents": agents,
        "series": series(index),
        "heat": heat(index),
        "advantages": advantages(index),
        "hardest": hardest(index),
        "named": named(agents, index),
    }


def notices(ledger: Ledger) -> list[str]:
    """Notices for the top of the report: idle gates, rollouts and functions that failed."""
    rows = ledger.metrics()
    found = [*rollout_summary(rows), *failure_summary(rows), *idle_gate_summary(rows)]
    if idle_gate_summary(rows) and ledger.steps:
        try:
            last = ledger.read(ledger.steps[-1]).assignment
        except DataError:  # `left_out` names the file and the reason
            last = None
        if last is not None and (idle := idle_gate(last)) is not None:
            found.append(f"in the last training step, {idle.message}")
    return found


def left_out(ledger: Ledger, index: Index) -> list[str]:
    """One sentence for each part of the run missing from the page, with the reason."""
    found = [f"{path.name} is left out: it is incomplete, a crash cut it off" for path in ledger.torn]
    damaged = {step: reason for step, reason in index.reasons.items() if step in index.damaged}
    unexplained = {step: reason for step, reason in index.reasons.items() if step in index.taken}
    found += [f"{files} cannot be read: {reason}" for files, reason in _by_reason(damaged)]
    found += [
        f"the trajectories in {files} cannot be shown, nor their credit explained: {reason}"
        for files, reason in _by_reason(unexplained)
    ]
    unassigned = index.ask("SELECT training_step AS n FROM steps GROUP BY ALL HAVING count(trained) = 0")
    found += [
        f"no credit is shown for {files}: {reason}"
        for files, reason in _by_reason({row["n"]: "none was assigned, too many scores failed" for row in unassigned})
    ]
    for rule in sorted(set(index.rules.values())):
        if PROPAGATION_RULES[rule].flows == UNKNOWN:
            found.append(f"graphs draw no credit on their lines: the rule {rule!r} records no flow along edges")
    found += ledger.torn_lines()
    if (told := len(ledger.events())) > _EVENTS:
        found.append(f"the first {told - _EVENTS:,} of {told:,} guard events are left out")
    return found


def _by_reason(reasons: Mapping[int, str]) -> list[tuple[str, str]]:
    """`(files, reason)` pairs, with step files grouped by reason; only a few are listed by name."""
    steps_of: dict[str, list[int]] = {}
    for step in sorted(reasons):
        steps_of.setdefault(reasons[step], []).append(step)
    found = []
    for reason, steps in steps_of.items():
        names = [f"{step:06d}.parquet" for step in steps[:_NAMED]]
        more = f" and {len(steps) - _NAMED:,} more" if len(steps) > _NAMED else ""
        found.append((f"{', '.join(names)}{more}", reason))
    return found


_NAMED = 3
"""Step files that one notice lists by name."""
_EVENTS = 1000
"""Guard events in the page."""


def head(ledger: Ledger, index: Index) -> dict[str, Any]:
    """The run's identity and progress."""
    run = ledger.run
    counted = index.ask(
        "SELECT count(*) AS trajectories, avg(ended_right::INT) AS ended_right, sum(n_steps)::BIGINT AS steps FROM "
        "trajectories"
    )[0]
    said = {key: run.get(key) for key in _FACTS}
    return {
        **{key: value for key, value in said.items() if value is not None},
        **counted,
        "name": ledger.path.resolve().name,
        "training_steps": len(ledger.steps),
        "indexed": len(index.taken),
        "last": ledger.steps[-1] if ledger.steps else None,
    }


_FACTS = ("recipe", "engine", "seed", "started", "device", "recredited_from", "changed")


def settings(ledger: Ledger) -> dict[str, Any]:
    """The run's configuration by dotted key, with the changes of a recredit."""
    run = ledger.run
    config, changed = run.get("config"), run.get("changed")
    flat = dict(leaves(config)) if isinstance(config, dict) else {}
    for key, value in changed.items() if isinstance(changed, dict) else ():
        name = f"algorithm.{key}"
        flat = {other: was for other, was in flat.items() if other != name and not other.startswith(f"{name}.")}
        flat |= dict(leaves({name: value}))
    if _GRANULARITY in flat:  # recipes use another name
        flat["reward.decomp_granularity"] = flat.pop(_GRANULARITY)
    flat.pop("trainer.default_local_dir", None)  # always differs
    return flat


_GRANULARITY = "algorithm.decomp_granularity"


def different(of_runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The settings that differ between runs, each with its value in every run."""
    keys = dict.fromkeys(key for of_run in of_runs for key in of_run)
    found = {key: [of_run.get(key) for of_run in of_runs] for key in keys}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def curves(ledger: Ledger) -> dict[str, Any]:
    """`{metric: {unit, meaning, points: [[training step, value], ...]}}`."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in ledger.metrics():
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                found.setdefault(name, []).append((row["step"], float(value)))
    names = Names(
        agents=_all("agent", found),
        functions=_all("function", found),
        policies=_all("policy", found),
        rules=_all("rule", found),
    )
    told = {}
    for name, points in found.items():
        metric = described(name, names)
        unit, meaning = (metric.unit, metric.meaning) if metric else ("", "")
        told[name] = {"unit": unit, "meaning": meaning, "points": thinned(points)}
    return told


def thinned(points: Sequence[tuple[float, float]]) -> list[list[float]]:
    """At most POINTS points, averaged over neighbours, with six digits."""
    if len(points) > POINTS:
        parts = np.array_split(np.array(points), POINTS)
        points = [(float(part[:, 0].max()), float(part[:, 1].mean())) for part in parts]
    return [[step, float(f"{value:.6g}")] for step, value in points]


def events(ledger: Ledger) -> list[dict[str, Any]]:
    """The last thousand guard events."""
    keys = ("step", "rule", "metric", "what", "action", "note", "text")
    return [{key: row[key] for key in keys if key in row} for row in ledger.events()[-_EVENTS:]]


def of_agents(index: Index) -> list[dict[str, Any]]:
    """One row of statistics per agent."""
    rows = index.ask("""
        SELECT agent, count(*) AS steps,
               avg(sub_reward) AS sub_reward,
               avg(scored::INT) AS scored,
               avg((sub_reward < 1 - 1e-9)::INT) AS error_rate,
               avg(gate_open::INT) FILTER (WHERE scored) AS pass_rate,
               arg_max(threshold, training_step) AS threshold,
               avg(credit) FILTER (WHERE trained) AS credit,
               sum(abs(credit)) FILTER (WHERE trained) / (SELECT sum(abs(credit)) FROM steps WHERE trained) AS share,
               sum(abs(withheld)) FILTER (WHERE NOT isnan(withheld)) AS withheld,
               avg((advantage > 0)::INT) FILTER (WHERE trained AND sub_reward < 1 - 1e-9) AS wrong_rewarded,
               avg((advantage < 0)::INT) FILTER (WHERE trained AND sub_reward >= 1 - 1e-9) AS right_blamed,
               avg(failed::INT) AS failed
        FROM steps GROUP BY agent ORDER BY agent
    """)
    return rows


def series(index: Index) -> dict[str, Any]:
    """`{agent: {credit, pass_rate, threshold, sub_reward: [[training step, value], ...]}}`."""
    names = ("credit", "pass_rate", "threshold", "sub_reward")
    rows = index.ask("""
        SELECT agent, training_step, avg(credit) FILTER (WHERE trained) AS credit,
               avg(gate_open::INT) FILTER (WHERE scored) AS pass_rate, any_value(threshold) AS threshold,
               avg(sub_reward) AS sub_reward
        FROM steps GROUP BY agent, training_step ORDER BY agent, training_step
    """)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        of_agent = found.setdefault(row["agent"], {name: [] for name in names})
        for name in names:
            if row[name] is not None:
                of_agent[name].append((row["training_step"], row[name]))
    return {agent: {name: thinned(points) for name, points in of.items()} for agent, of in found.items()}


def heat(index: Index) -> list[dict[str, Any]]:
    """Mean credit, mean advantage and error rate, by agent and turn."""
    rows = index.ask(f"""
        SELECT agent, least(turn, {_TURNS - 1}) AS turn, count(*) AS steps,
               avg(credit) FILTER (WHERE trained) AS credit, avg(advantage) FILTER (WHERE trained) AS advantage,
               avg((sub_reward < 1 - 1e-9)::INT) AS error_rate
        FROM steps GROUP BY ALL ORDER BY ALL
    """)
    return rows


def advantages(index: Index) -> dict[str, Any]:
    """Histogram of advantages by agent: `{edges, agents: {name: counts}}`.

    The range is the 99.5 % quantile of |advantage|; values beyond it are counted in the outermost bins.
    """
    (of,) = index.ask("SELECT quantile_cont(abs(advantage), 0.995) AS far FROM steps WHERE trained AND advantage != 0")
    far = of["far"] or 1.0
    rows = index.ask(
        f"""
        SELECT agent, least(greatest(floor((advantage + $1) / (2 * $1) * {_BINS}), 0), {_BINS - 1})::INTEGER AS bin,
               count(*) AS n
        FROM steps WHERE trained GROUP BY ALL
        """,
        [far],
    )
    counts: dict[str, list[int]] = {}
    for row in rows:
        counts.setdefault(row["agent"], [0] * _BINS)[row["bin"]] = row["n"]
    edges = [float(f"{edge:.6g}") for edge in np.linspace(-far, far, _BINS + 1)]
    return {"edges": edges, "agents": dict(sorted(counts.items()))}


def hardest(index: Index) -> list[dict[str, Any]]:
    """The tasks with the lowest success rates; ties by the number of trajectories."""
    rows = index.ask(
        """
        SELECT any_value(prompt) AS prompt, count(*) AS trajectories, avg(ended_right::INT) AS ended_right,
               avg(first_error) AS first_error,
               arg_max(trajectory_id, training_step) AS trajectory_id, max(training_step) AS training_step
        FROM trajectories WHERE prompt IS NOT NULL AND ended_right IS NOT NULL
        GROUP BY task_key ORDER BY ended_right, trajectories DESC, prompt LIMIT ?
        """,
        [_HARDEST],
    )
    return rows


def named(agents: Sequence[Mapping[str, Any]], index: Index) -> list[dict[str, Any]]:
    """Free riders and saboteurs, each with the numbers behind it; docs/how_to/report.md defines both."""
    rows = index.ask("""
        SELECT agent,
               avg(advantage) FILTER (WHERE trained AND sub_reward < 1 - 1e-9) AS paid,
               stddev_samp(advantage) FILTER (WHERE trained AND sub_reward < 1 - 1e-9) AS spread,
               count(*) FILTER (WHERE trained AND sub_reward < 1 - 1e-9) AS wrong
        FROM steps GROUP BY agent ORDER BY agent
    """)
    found = []
    for row in rows:
        if row["wrong"] < _ENOUGH or row["paid"] is None or row["spread"] is None:
            continue
        if row["paid"] - 2 * row["spread"] / row["wrong"] ** 0.5 > 0:
            why = (
                f"its {row['wrong']:,} wrong steps have a mean advantage of {row['paid']:+.3f}: it is rewarded for "
                "what others did"
            )
            found.append({"agent": row["agent"], "as": "free rider", "why": why})
    with_it = index.ask("""
        WITH took AS (
            SELECT agent, training_step, trajectory_id, count(*) AS n, any_value(ended_right) AS ended_right,
                   bool_or(sub_reward < 1 - 1e-9) AS erred, bool_or(scored) AS scored
            FROM steps WHERE ended_right IS NOT NULL GROUP BY ALL
        ), kinds AS (SELECT agent, bool_or(scored) AS scored FROM took GROUP BY agent),
        marked AS (
            SELECT k.agent, k.scored, p.ended_right,
                   CASE WHEN k.scored THEN coalesce(t.erred, false) ELSE t.n IS NOT NULL END AS marked
            FROM kinds k CROSS JOIN (SELECT * FROM trajectories WHERE ended_right IS NOT NULL) p
            LEFT JOIN took t ON t.agent = k.agent AND t.training_step = p.training_step
                             AND t.trajectory_id = p.trajectory_id
        )
        SELECT agent, any_value(scored) AS scored, count(*) FILTER (WHERE marked) AS marked,
               avg(ended_right::INT) FILTER (WHERE marked) AS right_marked,
               count(*) FILTER (WHERE NOT marked) AS others,
               avg(ended_right::INT) FILTER (WHERE NOT marked) AS right_others
        FROM marked GROUP BY agent ORDER BY agent
    """)
    rates = {
        row["agent"]: row
        for row in index.ask("""
            SELECT agent, count(*) FILTER (WHERE scored) AS scored,
                   count(*) FILTER (WHERE sub_reward < 1 - 1e-9) AS errors
            FROM steps GROUP BY agent
        """)
    }
    all_scored, all_errors = (sum(row[key] for row in rates.values()) for key in ("scored", "errors"))

    def others_rate(of: Mapping[str, Any]) -> float:
        others: int = all_scored - of["scored"]
        return (all_errors - of["errors"]) / others if others else 0.0

    # An agent without scored peers cannot err more often than they do.
    errs_more = {
        agent: of["errors"] / of["scored"] >= 2 * others_rate(of)
        for agent, of in rates.items()
        if of["scored"] and all_scored - of["scored"] >= _ENOUGH
    }
    for row in with_it:
        if row["marked"] < _ENOUGH or row["others"] < _ENOUGH:
            continue
        drop = row["right_others"] - row["right_marked"]
        error = sum(
            share * (1 - share) / n
            for share, n in ((row["right_marked"], row["marked"]), (row["right_others"], row["others"]))
        )
        if drop - 2 * error**0.5 < _HARM or (row["scored"] and not errs_more.get(row["agent"], False)):
            continue
        when = "errs" if row["scored"] else "takes part"
        why = (
            f"trajectories in which it {when} end right {row['right_marked']:.0%} of the time, others "
            f"{row['right_others']:.0%}"
        )
        if row["scored"]:
            of = rates[row["agent"]]
            why += f"; {of['errors'] / of['scored']:.0%} of its steps are wrong, of the others' {others_rate(of):.0%}"
        found.append({"agent": row["agent"], "as": "saboteur", "why": why})
    return found


_ENOUGH = 30
"""Minimum number of steps, or of trajectories on either side, to name an agent."""
_HARM = 0.1
"""Minimum drop of the success rate, at the lower end of the 95 % interval."""


def _all(kind: str, found: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of agents, functions, policies or guard rules in a run's metrics."""
    prefixes = {"agent": "credit/mean/", "function": "timing/reward_s/", "rule": "guard/on/"}
    if kind == "policy":
        of_policies = (name.partition("/")[0] for name in found if name.count("/") == 2 and "/actor/" in name)
        return tuple(dict.fromkeys(of_policies))
    return tuple(name.removeprefix(prefixes[kind]) for name in found if name.startswith(prefixes[kind]))
