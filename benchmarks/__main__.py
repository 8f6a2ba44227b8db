"""Run the benchmarks, each in its own process: `python -m benchmarks [NAME ...] [--quick] [--outdated]`.

A benchmark is a module of this folder with a `main`. Its exit code is 0, 1 if a figure misses its target, and
anything else on an error; its output goes to `runs/benchmarks/NAME.log`. This command exits with 2 if a benchmark
ended with an error. A missed target is only reported: ratios depend on the machine.

`--outdated` runs nothing. It lists the result files whose measured modules have changed since.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.record import MISSED, PEER_MISSING, RESULTS, ROOT
from benchmarks.sources import results

HERE = Path(__file__).parent
LOGS = ROOT / "runs" / "benchmarks"
REPORT_SECONDS = 30.0
QUICK_LIMIT_SECONDS = 1800.0
"""A quick benchmark above this limit counts as hanging."""
LAST_LINES = 25
HOLDS, FALLS_SHORT, ERROR = "holds", "falls short", "ERROR"


@dataclass(frozen=True)
class Outcome:
    """One benchmark's run."""

    name: str
    status: str
    seconds: float
    note: str = ""


def main() -> int:
    """Run or list the benchmarks; 2 if a benchmark ended with an error."""
    names = discover()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all of them by default: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="fewer repeats; no result file is written")
    parser.add_argument("--outdated", action="store_true", help="list outdated results; nothing is run")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in names]:
        parser.error(f"NAME: expected one of {', '.join(names)}, got {', '.join(unknown)}")
    if given.outdated:
        print_outdated()
        return 0
    exit_on_sigterm()
    outcomes = [run(name, quick=given.quick) for name in given.names or names]
    print_summary(outcomes)
    return 2 if any(outcome.status == ERROR for outcome in outcomes) else 0


def exit_on_sigterm() -> None:
    """Make SIGTERM an ordinary exit, which ends the running benchmark too.

    Each benchmark runs in its own session, so it would outlive an abrupt end of this process.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def discover() -> list[str]:
    """The names of all benchmarks: modules of this folder with a `main`."""
    files = [path for path in HERE.glob("*.py") if not path.name.startswith("_")]
    return sorted(path.stem for path in files if re.search(r"^def main\(\)", path.read_text(), re.MULTILINE))


def run(name: str, *, quick: bool) -> Outcome:
    """Run one benchmark to its end, with a line of progress every half minute."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if quick else [])]
    limit = QUICK_LIMIT_SECONDS if quick else float("inf")
    print(f"{name}: started, output in {log.relative_to(ROOT)}", flush=True)
    start = time.monotonic()
    code = run_command(name, command, log, limit)
    seconds = time.monotonic() - start
    lines = log.read_text(errors="replace").splitlines()
    status, note = judge(code, lines)
    print(f"{name}: {status} after {seconds:.0f} s{f' ({note})' if note else ''}", flush=True)
    if status == ERROR:
        print("\n".join(f"    {line}" for line in lines[-LAST_LINES:]), flush=True)
    return Outcome(name, status, seconds, note)


def run_command(name: str, command: Sequence[str], log: Path, limit: float) -> int | None:
    """The exit code of `command`; None if it exceeds `limit` seconds. Its children end with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while (left := start + limit - time.monotonic()) > 0:
                try:
                    return process.wait(min(REPORT_SECONDS, left))
                except subprocess.TimeoutExpired:
                    lines = log.read_text(errors="replace").splitlines()
                    last = lines[-1].strip()[:100] if lines else "no output yet"
                    print(f"{name}: {time.monotonic() - start:.0f} s: {last}", flush=True)
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def judge(code: int | None, lines: Sequence[str]) -> tuple[str, str]:
    """The status of a benchmark that ended with `code` after printing `lines`, and a note.

    A failed import also ends with 1, so a missed target counts only with its line in the output.
    """
    peers = [line.partition(": ")[2] for line in lines if line.startswith(f"{PEER_MISSING}: ")]
    note = "; ".join(f"without {peer.partition(' (')[0]}" for peer in peers)
    told = [line.removeprefix(f"{MISSED}: ") for line in lines if line.startswith(f"{MISSED}: ")]
    if code is None:
        return ERROR, "time limit"
    if code not in (0, 1) or not told or (code == 1) != (not told[-1].startswith("0 ")):
        return ERROR, f"exit code {code}" + ("" if told else ", no figures")
    missed = f"{told[-1]} targets missed" if code else ""
    return (FALLS_SHORT if code else HOLDS), "; ".join(filter(None, (missed, note)))


def print_summary(outcomes: Sequence[Outcome]) -> None:
    """Print one line for each benchmark, and how many results are outdated."""
    width = max(len(outcome.name) for outcome in outcomes)
    print(f"\n{'benchmark'.ljust(width)}  seconds  status")
    for outcome in outcomes:
        note = f" ({outcome.note})" if outcome.note else ""
        print(f"{outcome.name.ljust(width)}  {outcome.seconds:7.0f}  {outcome.status}{note}")
    outdated = sum(result.outdated for result in results())
    print(f"\noutdated results: {outdated} (python -m benchmarks --outdated)")


def print_outdated() -> None:
    """Print one line for each result file: up to date, outdated with the changed files, or without hashes."""
    found = results(RESULTS)
    width = max(len(result.name) for result in found)
    for result in found:
        if not result.measured:
            state = "no hashes: written by hand"
        elif not result.outdated:
            state = f"up to date: {result.measured} files"
        else:
            files = [*result.changed, *(f"{name} (removed)" for name in result.gone)]
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            state = f"outdated: {len(files)} of {result.measured} files changed: {', '.join(files[:3])}{more}"
        print(f"{result.name.ljust(width)}  {result.date or '-':10}  {state}")
    outdated = sum(result.outdated for result in found)
    print(f"\n{outdated} of {len(found)} result files are outdated")


if __name__ == "__main__":
    sys.exit(main())
