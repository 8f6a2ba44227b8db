"""Conversion of traces to trajectories, compared with Agent Lightning: `python -m benchmarks.traces [--quick]`.

1024 traces of 30 model calls, nested in agents' spans or flat, with or without a reward for each call; one trace of
10,000 and one of 100,000 spans. Both sides read the same spans: creditflow reads the plain objects from Agent
Lightning's `model_dump`, Agent Lightning reads its `Span`s, in a separate environment (`make benchmarks`; without it,
only creditflow is measured). The sides take turns. Agent Lightning has two minutes for each case, ten seconds with
`--quick`; after a time-out it skips the remaining repeats of that case.

Targets: 50,000 spans/s in each case, and the speed on the trace of 100,000 spans is at least 0.8 of that on the trace
of 10,000.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import ROOT, Figure, exit_with, peer_missing, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow._utils.progress import Reporter
from creditflow.plugins.traces import convert, from_agent_lightning

MEASURES = ("src/creditflow/plugins/traces", "src/creditflow/_utils/text_search.py", "src/creditflow/data/__init__.py")
TRACES, CALLS = 1024, 30
SPEED, LINEAR = 50_000, 0.8
THEIR_PYTHON = ROOT / ".venv" / "agentlightning" / "bin" / "python"
THEIR_SECONDS = 120
"""Time limit of Agent Lightning's adapter for one case."""


def main() -> int:
    """Measure, print, write `docs/results/traces.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "a sixteenth of the traces, one repeat; writes nothing").parse_args().quick
    measured = hashes(MEASURES)
    traces, repeats, seconds = (TRACES // 16, 1, 10) if quick else (TRACES, 5, THEIR_SECONDS)
    figures: list[Figure] = []
    speeds: dict[str, float] = {}
    reporter = Reporter()
    for name, made in _cases(traces).items():
        reporter.say(f"{name} ...")
        spans = made()
        ours: list[float] = []
        theirs: list[float | None] = []
        for _ in range(repeats):
            ours.append(_ours(spans))
            if THEIR_PYTHON.exists() and None not in theirs:
                theirs.append(_theirs(spans, seconds))
        n = len(spans)
        speeds[name] = median(ours)
        figures.append(Figure.from_values(f"{name} ({n} spans): spans/s", ours, SPEED))
        if finished := [speed for speed in theirs if speed is not None]:
            figures.append(Figure.from_values(f"{name}: spans/s, Agent Lightning", finished))
            figures.append(Figure(f"{name}: ours / theirs", median(ours) / median(finished), unit="x"))
        elif theirs:
            reporter.say(f"{name}: Agent Lightning's adapter did not end within {seconds} s")
    long, longer = (speeds[name] for name in ("one trace, 10,000", "one trace, 100,000"))
    figures.append(Figure("speed on 100,000 spans, of that on 10,000", longer / long, LINEAR))
    missed = show(figures)
    if not THEIR_PYTHON.exists():
        peer_missing("Agent Lightning", "make benchmarks")
    if not quick:
        write("traces", figures, ("creditflow", "ahocorasick-rs"), measured)
    return int(missed)


def _cases(traces: int) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    found: dict[str, Callable[[], list[dict[str, Any]]]] = {}
    for nested, rewarded in itertools.product((True, False), repeat=2):
        words = f"{'nested' if nested else 'flat'}, {'a reward a step' if rewarded else 'no rewards'}"
        found[f"{traces} x {CALLS}, {words}"] = partial(_batch, traces, nested, rewarded)
    found["one trace, 10,000"] = partial(trace, 0, 3333, True, True)
    found["one trace, 100,000"] = partial(trace, 0, 33333, True, True)
    return found


def _batch(traces: int, nested: bool, rewarded: bool) -> list[dict[str, Any]]:
    return [span for number in range(traces) for span in trace(number, CALLS, nested, rewarded)]


def trace(number: int, calls: int, nested: bool, rewarded: bool) -> list[dict[str, Any]]:
    """One attempt of a rollout: each call's prompt contains the response of the call before."""
    spans = [_span(number, "root", None, "rollout", 0.0, 20.0 * calls + 20, {})]
    said = f"Task {number}: find the sum."
    for at in range(calls):
        time, around = 20.0 * at + 1, "root"
        if nested:
            around, who = f"agent{at}", ("planner", "executor", "verifier")[at % 3]
            spans.append(_span(number, around, "root", "agent", time, time + 18, {"agent.name": who}))
        wrote = f"Step {at} of {number} makes {at * 7 + number}, and so the sum is {at * 13}."
        attributes = {
            "gen_ai.request.model": "m",
            "gen_ai.response.id": f"chatcmpl-{number}-{at}",
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": "You work on a sum with others. Write one line.",
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": f"So far:\n{said}\nGo on.",
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.content": wrote,
            "gen_ai.completion.0.finish_reason": "stop",
            "gen_ai.usage.prompt_tokens": 24,
            "gen_ai.usage.completion_tokens": 16,
            "prompt_token_ids": list(range(24)),
            "response_token_ids": list(range(16)),
        }
        spans.append(_span(number, f"call{at}", around, "openai.chat.completion", time + 1, time + 9, attributes))
        if rewarded:
            given = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": (at % 5) / 4}
            spans.append(_span(number, f"reward{at}", around, "agentlightning.annotation", time + 10, time + 11, given))
        said = wrote
    return spans


def _span(
    number: int, name: str, parent: str | None, kind: str, start: float, end: float, attributes: dict[str, Any]
) -> dict[str, Any]:
    """A span in the format of Agent Lightning's `Span.model_dump`."""
    return {
        "rollout_id": f"rollout-{number}",
        "attempt_id": "attempt-1",
        "sequence_id": 0,
        "trace_id": f"{number:032x}",
        "span_id": f"{number}-{name}",
        "parent_id": None if parent is None else f"{number}-{parent}",
        "name": kind,
        "status": {"status_code": "OK", "description": None},
        "attributes": attributes,
        "events": [],
        "links": [],
        "start_time": 1.7e9 + start,
        "end_time": 1.7e9 + end,
        "context": None,
        "parent": None,
        "resource": {"attributes": {}, "schema_url": ""},
    }


def _ours(spans: list[dict[str, Any]]) -> float:
    gc.collect()
    start = time.perf_counter()
    made = convert(from_agent_lightning(spans))
    seconds = time.perf_counter() - start
    assert not made.left_out
    assert sum(len(one.steps) for one in made.trajectories) == sum(s["name"] == "openai.chat.completion" for s in spans)
    return len(spans) / seconds


def _theirs(spans: list[dict[str, Any]], limit_s: int) -> float | None:
    """Agent Lightning's spans per second; None after a time-out of `limit_s`."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(spans, file)
        file.flush()
        command = [str(THEIR_PYTHON), str(Path(__file__).with_name("agent_lightning.py")), file.name]
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True, env=environment)
        except subprocess.TimeoutExpired:
            return None
    return float(said.stdout.splitlines()[-1])


if __name__ == "__main__":
    exit_with(main)
