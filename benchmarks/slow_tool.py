"""A team with a slow tool that records the duration of its rollouts, for `benchmarks.asynchronous`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from creditflow import Task, Team
from creditflow._utils.loading import load_object

SECONDS_FILE = "CREDITFLOW_ROLLOUT_SECONDS"
"""The environment variable with the path of the file of durations."""
_solve: Any = load_object("cases.py:solve_slowly", Path(__file__).parent, "solve_slowly")


async def solve_timed(task: Task, team: Team) -> str:
    """Run `solve_slowly` and append its seconds to the file of durations."""
    start = time.monotonic()
    answer: str = await _solve(task, team)
    with Path(os.environ[SECONDS_FILE]).open("a") as lines:
        lines.write(f"{time.monotonic() - start:.3f}\n")
    return answer
