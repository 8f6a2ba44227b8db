"""The tables of a run that findings read, from its metrics and its index."""

from __future__ import annotations

from creditflow.reports.findings import Finding, Tables, findings
from creditflow.reports.index import Index
from creditflow.reports.overview import settings
from creditflow.runs import Ledger


def findings_of(ledger: Ledger, index: Index) -> list[Finding]:
    """The findings of a run."""
    return findings(tables_of(ledger, index))


def tables_of(ledger: Ledger, index: Index) -> Tables:
    """Read the tables."""
    examples = index.ask("""
        SELECT erring_agent AS agent, arg_max(trajectory_id, number) AS id, max(training_step) AS step
        FROM trajectories WHERE NOT ended_right AND erring_agent IS NOT NULL GROUP BY erring_agent
    """)
    return Tables(
        metrics=ledger.metrics(),
        parts=index.ask("FROM parts"),
        steps=index.ask("""
            SELECT training_step, agent, sum(assigned)::BIGINT AS assigned, sum(trained)::BIGINT AS trained
            FROM sums GROUP BY ALL ORDER BY training_step, agent
        """),
        settings=settings(ledger),
        examples={row["agent"]: (row["id"], row["step"]) for row in examples},
    )
