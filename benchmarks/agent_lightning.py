"""Run Agent Lightning's adapter on the spans of a file, in its environment; print spans/s for `benchmarks.traces`."""

import json
import sys
import time
from itertools import groupby
from pathlib import Path

from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.types import Span

spans = [Span(**raw) for raw in json.loads(Path(sys.argv[1]).read_text())]
rollouts = [list(group) for _, group in groupby(spans, key=lambda span: span.rollout_id)]
adapter = TracerTraceToTriplet()
sys.setrecursionlimit(100_000)
start = time.perf_counter()
triplets = sum(len(adapter.adapt(rollout)) for rollout in rollouts)
seconds = time.perf_counter() - start
assert triplets == sum(span.name == "openai.chat.completion" for span in spans)
print(len(spans) / seconds)
