"""The speed of rewards against a plain implementation of the same work: `python -m benchmarks.rewards [--quick]`.

Both sides run in turns in one process; figures are medians of the turns' ratios. Takes about six minutes on two cores.

* Programs in the sandbox against `subprocess.run([python, file])` with the same interpreter, two at a time. The
  sandbox's interpreter is isolated and has no site packages, which saves a millisecond.
* `judge` against a stub server that answers after 50 ms, 256 calls in flight; the sequential time is that of the same
  judge with one call in flight, measured on fewer calls.
* `math_verify` on the pairs in tests/samples that are equal and need the library, repeatedly: worker processes, and Ray
  actors, against the same calls in this process. Each call has its time-out; the backends choose their own batches, of
  16 and more.
* Functions that wait 50 ms each, on async Ray actors.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from creditflow.data import Step, Task, Trajectory
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rewards.calls import Backend
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from creditflow.rewards.execution.backends import BackendOptions, make_backend
from creditflow.sandbox import open_sandbox
from creditflow.sandbox.backends.bubblewrap import Bubblewrap
from tests.rewards.judge_server import Answer, JudgeServer

PAIRS = Path(__file__).parent.parent / "tests" / "samples" / "math_pairs.jsonl"
PACKAGES = ("creditflow", "ray", "httpx", "math-verify")
MEASURES = ("src/creditflow/rewards",)
WAIT_S = 0.05
IN_FLIGHT = 256
AT_ONCE = 2
"""Concurrent programs; the machine has two cores."""
PROGRAMS = {
    "trivial": "print(1)",
    "20 ms": "total = 0\nfor i in range(220_000):\n    total += i * i\nprint(total)",
    "50 ms": "total = 0\nfor i in range(700_000):\n    total += i * i\nprint(total)",
}


def main() -> int:
    """Measure, print, write `docs/results/rewards.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "fewer calls and repeats; holds the same, writes nothing").parse_args().quick
    measured = hashes(MEASURES)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

    figures = _sandboxed(repeats=3 if quick else 9, runs=20 if quick else 60)
    figures += _judged(2_000 if quick else 10_000)
    figures += _verified(600 if quick else 2_000, repeats=2 if quick else 5)
    waiting, io_table = _waiting((1, 50, 200) if quick else (1, 2, 5, 10, 20, 50, 100, 200))
    figures += waiting
    missed = show(figures)
    if not quick:
        write("rewards", figures, PACKAGES, measured, {"async_actors": io_table})
    return int(missed)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _scored_seconds(manager: RewardManager, trajectories: Sequence[Trajectory]) -> float:
    return _seconds(lambda: asyncio.run(manager.score(trajectories)))


def _mapped(threads: ThreadPoolExecutor, run: Callable[[int], object], times: int) -> None:
    """Run a function `times` times on the threads."""
    list(threads.map(run, range(times)))


# ---- the sandbox ---------------------------------------------------------------------------------------------------


def _sandboxed(repeats: int, runs: int) -> list[Figure]:
    return [figure for name in PROGRAMS for figure in _one_program(name, repeats, runs)]


def _one_program(name: str, repeats: int, runs: int) -> list[Figure]:
    box = open_sandbox("bubblewrap")
    assert isinstance(box, Bubblewrap)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(AT_ONCE) as threads:
        file = Path(folder) / "main.py"
        file.write_text(PROGRAMS[name])
        box.write("main.py", PROGRAMS[name].encode())
        expected = subprocess.run([box.python, file], capture_output=True, check=True).stdout

        def plain(_: int = 0) -> None:
            assert subprocess.run([box.python, file], capture_output=True, check=True).stdout == expected

        def boxed(_: int = 0) -> None:
            assert box.run(["python", "main.py"]).stdout == expected

        ratios, plain_ms, added_ms = [], [], []
        for _ in range(repeats):
            plain_s, boxed_s = (_seconds(partial(_mapped, threads, run, runs)) for run in (plain, boxed))
            ratios.append(plain_s / boxed_s)
            alone = [(_seconds(plain), _seconds(boxed)) for _ in range(runs)]
            plain_ms.append(median(one for one, _ in alone) * 1e3)
            added_ms.append(median(two for _, two in alone) * 1e3 - plain_ms[-1])
    added, rate = (8.0, None) if name == "trivial" else (None, 0.7)
    return [
        Figure.from_values(f"{name} program, plain", plain_ms, unit="ms"),
        Figure.from_values(f"{name} program, added by the sandbox", added_ms, added, at_most=True, unit="ms"),
        Figure.from_values(
            f"{name} program, sandboxed runs per second / plain, {AT_ONCE} at a time", ratios, rate, unit="x"
        ),
    ]


# ---- the judge -----------------------------------------------------------------------------------------------------


def serve_judge(address: Any) -> None:
    """Send the address of a stub that answers after `WAIT_S`, and serve until the process ends."""
    with JudgeServer(Answer(delay=WAIT_S)) as server:
        address.send(server.url)
        threading.Event().wait()


@contextmanager
def judge_process() -> Iterator[str]:
    """Run the stub of a judge in a separate process; yields its address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve_judge, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def _judged(calls: int) -> list[Figure]:
    def seconds(n: int, in_flight: int, url: str) -> float:
        entry = RewardFunctionConfig(
            fn="judge",
            args={"endpoint": url, "model": "stub", "rubric": "Is it right?", "max_concurrency": in_flight},
        )
        (function,) = load_reward_functions([entry], Path(), ())
        manager = RewardManager([function], 0.0, max_in_flight=in_flight, cache_size=0)
        trajectories = [trajectory_with(str(i), [f"response {i}"]) for i in range(n)]

        async def score() -> float:
            async with manager.open():
                await manager.score([trajectory_with("first", ["warm"])])
                return (await manager.score(trajectories)).seconds

        return asyncio.run(score())

    with judge_process() as url:
        one_by_one = seconds(40, 1, url) / 40
        together = seconds(calls, IN_FLIGHT, url)
    return [
        Figure("one judge call of 50 ms, one after the other", one_by_one * 1e3, unit="ms"),
        Figure(
            f"{calls} judge calls, {IN_FLIGHT} in flight / one after the other", one_by_one * calls / together, 20,
            unit="x",
        ),
    ]  # fmt: skip


# ---- math_verify ---------------------------------------------------------------------------------------------------


def math_trajectories(calls: int) -> tuple[tuple[RewardFunction, ...], list[Trajectory]]:
    """`math_verify` as outcome, and `calls` trajectories with an equal answer that needs the library."""
    pairs = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    pairs = [pair for pair in pairs if pair["equal"] and "\\" in pair["answer"]]  # pairs that need the library
    entry = RewardFunctionConfig(fn="math_verify", timeout=20.0, cache=False)
    trajectories = []
    for i in range(calls):
        pair = pairs[i % len(pairs)]
        task = Task("benchmark", ({"role": "user", "content": "?"},), pair["truth"])
        trajectories.append(Trajectory(str(i), str(i), task, answer=pair["answer"]))
    return load_reward_functions([entry], Path(), ()), trajectories


def _verified(calls: int, repeats: int) -> list[Figure]:
    functions, trajectories = math_trajectories(calls)

    def run(backend: Backend | None) -> Callable[[], object]:
        manager = RewardManager(functions, 1.0, backend=backend)

        def score() -> None:
            (report,) = asyncio.run(manager.score(trajectories)).functions
            assert (report.failed, report.mean, report.calls) == (0, 1.0, calls)

        return score

    backends = {
        name: make_backend(name, functions, BackendOptions(num_workers=AT_ONCE))
        for name in ("inline", "process", "ray")
    }
    runs = {name: run(backend) for name, backend in backends.items()}
    for go in runs.values():
        go()  # imports, start-up
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, go in runs.items():
            seconds[name].append(_seconds(go))
    for backend in backends.values():
        if backend is not None:
            backend.close()
    figures = [
        Figure.from_values("one math_verify call, one process", [s / calls * 1e3 for s in seconds["inline"]], unit="ms")
    ]
    for name, what in {"process": "2 worker processes", "ray": "2 Ray actors"}.items():
        ratios = [one / two for one, two in zip(seconds["inline"], seconds[name], strict=True)]
        figures.append(Figure.from_values(f"{calls} math_verify calls, {what} / one process", ratios, 1.6, unit="x"))
    return figures


# ---- Ray actors ----------------------------------------------------------------------------------------------------


async def waits(step: Step, trajectory: Trajectory) -> float:
    """A reward that waits like a call of a service."""
    await asyncio.sleep(WAIT_S)
    return 1.0


def _waiting(in_flight: Sequence[int]) -> tuple[list[Figure], list[dict[str, float]]]:
    function = RewardFunction("waits", "step", waits, is_async=True)
    table = []
    for flight in in_flight:
        backend = make_backend("ray", [function], BackendOptions(num_workers=min(4, flight), max_in_flight=flight))
        manager = RewardManager([function], backend=backend)
        started = _scored_seconds(manager, [trajectory_with("first", ["warm"] * 8)])
        n = max(40, 20 * flight)
        trajectories = [trajectory_with(str(i), ["said"] * 20) for i in range(n // 20)]
        seconds = _scored_seconds(manager, trajectories)
        table.append({"in_flight": flight, "calls_per_s": n / seconds, "start_s": started})
        manager.close()
    sequential = 1 / WAIT_S
    most = table[-1]
    return [
        Figure(
            f"{most['in_flight']:.0f} waiting calls in flight on async Ray actors / one after the other",
            most["calls_per_s"] / sequential, 50, unit="x",
        )
    ], table  # fmt: skip


def trajectory_with(name: str, responses: Sequence[str]) -> Trajectory:
    """A trajectory of one agent with the given responses."""
    task = Task("benchmark", ({"role": "user", "content": "What is 48 + 24?"},), "72")
    steps = [
        Step(f"{name}/{i}", name, i, "solver", i, (i - 1,) if i else (), task.text, response)
        for i, response in enumerate(responses)
    ]
    return Trajectory(name, name, task, steps, (len(steps) - 1,), "72")


if __name__ == "__main__":
    exit_with(main)
