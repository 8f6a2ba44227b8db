"""Tests of conventions from other distributions."""

import json
from pathlib import Path

from tests.distributions import install, succeeded

MODULE = """
from creditflow.plugins.traces.conventions.base import Convention, Place, Reward

def rewards(span, entries):
    if "acme.grade" in span.attributes:
        yield Reward([("grade", span.attributes["acme.grade"] / 10)])

CONVENTION = Convention(
    name="acme", kinds=("acme.kind",), calls=(("acme.kind", ("llm",)),),
    prompt=(Place("acme.question", "text"),), response=(Place("acme.answer", "text"),),
    agent_kinds=(("acme.kind", ("worker",), ("acme.worker",)),),
    rewards=rewards, reward_prefixes=("acme.grade",),
)
"""


def span(id: str, parent: str | None, start: int, **attributes: object) -> dict[str, object]:
    """A span in Agent Lightning's form; attribute `a` is named `acme.a`."""
    return {
        "rollout_id": "r", "attempt_id": "a", "trace_id": "7", "span_id": id, "parent_id": parent, "name": id,
        "attributes": {f"acme.{name}": value for name, value in attributes.items()},
        "start_time": start, "end_time": start + 1,
    }  # fmt: skip


SPANS = [
    span("work", None, 1, kind="worker", worker="writer"),
    span("first", "work", 2, kind="llm", question="Add 1 and 2.", answer="The sum is 3.", grade=5),
    span("second", "work", 4, kind="llm", question="Check: The sum is 3.", answer="Right.", grade=10),
]


def test_installed_convention_is_read(tmp_path: Path) -> None:
    install(tmp_path, "[creditflow.traces]\nacme = acme_traces:CONVENTION\n", acme_traces=MODULE)
    (tmp_path / "spans.json").write_text(json.dumps(SPANS))
    printed = succeeded(tmp_path, "convert", "spans.json", "-o", "steps.parquet")
    assert all(part in printed for part in ("1 trajectory of 1 task, 2 steps", "writer", "grade"))
