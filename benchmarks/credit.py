"""Credit against verl's functions, numpy's copy and the number of steps: `python -m benchmarks.credit [--quick]`.

The compared functions run in one process on the same rows, in turns; figures are medians of the ratios of each turn.
Takes about five minutes on two cores and 6 GB of memory, most of both for ten million steps.

verl's rows have one token each, the minimum, and are float32 with integer masks, as in its trainer. Its functions group
rows by task name, and the vectorized one sorts the names. The targets use a separate string for each row, as rows come
from verl's store; one shared string per task is faster for verl, and is reported. The timings cover `assign` and the
token advantages of a checked batch; verl's functions receive rewards per row and propagate nothing.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.processes import memory_of
from benchmarks.record import RESULTS, Figure, exit_with, quick_parser, show, write
from benchmarks.sources import hashes
from benchmarks.synthetic import bytes_of, chain_batch
from creditflow.config import credit_options
from creditflow.credit import Assignment, CreditOptions
from creditflow.credit import assign as assign_batch
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Floats, TrajectoryBatch, validate

Strings = NDArray[np.object_]

MEASURES = ("src/creditflow/credit", "src/creditflow/data/__init__.py")
TASKS, TRAJECTORIES, STEPS = 1024, 4, 30
RESPONSES, RESPONSE_LENGTH = 4096, 8192
TOKENS_PER_STEP = 256
DECADES = (10**3, 10**4, 10**5, 10**6, 10**7)
PACKAGES = ("creditflow", "numpy", "numba", "torch", "verl")
RULE = credit_options(propagation="threshold", adv_estimator="grpo")
BY_TASK = credit_options(propagation="threshold", adv_estimator="grpo", group_by="task")
GAE = credit_options(propagation="own", adv_estimator="gae", group_by="task", gamma_token=1.0, lam_token=0.95)


def main() -> int:
    """Measure, print, write `docs/results/credit.json`; 1 if a number falls short."""
    quick = quick_parser(__doc__, "fewer repeats, a million steps at most; writes nothing").parse_args().quick
    measured = hashes(MEASURES)

    figures = [*_compilation(), *_against_verl_grpo(2 if quick else 7), *_broadcast(3 if quick else 9)]
    figures += _against_verl_gae(1 if quick else 5)
    figures += _memory()
    growth, more = _growth(DECADES[:-1] if quick else DECADES, repeats=3 if quick else 5)
    figures += growth
    missed = show(figures)
    if not quick:
        details = {"seconds_by_steps": more, "torch_threads": _torch().get_num_threads()}
        write("credit", figures, PACKAGES, measured, details)
    return int(missed)


def assign(batch: TrajectoryBatch, options: CreditOptions, **more: Any) -> Assignment:
    """Assign credit to a checked copy of the batch without derived columns, as a training step does."""
    validate(batch)  # once
    copy = replace(batch)
    copy.remember(validated=True)
    return assign_batch(copy, options, **more)


def _torch() -> Any:
    import torch

    return torch


def _verl() -> Any:
    from verl.trainer.ppo import core_algos

    return core_algos


def _seconds(run: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _by_turns(runs: Mapping[str, Callable[[], object]], repeats: int, warm_up: bool = True) -> dict[str, list[float]]:
    """Seconds of each run in each turn, after one uncounted warm-up turn if `warm_up`."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-int(warm_up), repeats):
        for name, run in runs.items():
            seconds = _seconds(run)
            if turn >= 0:
                taken[name].append(seconds)
    return taken


def _ratios(slower: list[float], faster: list[float]) -> list[float]:
    return [a / b for a, b in zip(slower, faster, strict=True)]


def _report(text: str) -> None:
    print(text, flush=True)


# Against verl's grpo


class Rows:
    """The steps of a batch in verl's format: one row and one token each, with the trajectory's reward at that token."""

    def __init__(self, batch: TrajectoryBatch) -> None:
        torch = _torch()
        rng = np.random.default_rng(0)
        names = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in batch.group_names]
        group_S = batch.group_of_trajectory[batch.trajectory_of_step]
        self.shared_uid = np.array(names, dtype=object)[group_S]
        self.uid = np.array(["".join(list(name)) for name in self.shared_uid], dtype=object)
        reward_S = batch.outcome[batch.trajectory_of_step].astype(np.float32)
        self.rewards = torch.tensor(reward_S[:, None])
        self.mask = torch.ones(self.rewards.shape, dtype=torch.int64)

    def advantages(self, function: Callable[..., Any], uid: Strings | None = None, **more: Any) -> Any:
        """Advantages [S, 1] from one of verl's functions."""
        return function(self.rewards, self.mask, self.uid if uid is None else uid, **more)[0]


def _against_verl_grpo(repeats: int) -> list[Figure]:
    batch, verl = chain_batch(TASKS, TRAJECTORIES, STEPS, tokens=1), _verl()
    rows, vectorized = Rows(batch), verl.compute_grpo_vectorized_outcome_advantage
    _same_before_propagation(batch, rows, verl)
    passing = credit_metrics(assign(batch, RULE))["propagation/pass_rate"]
    if not 0.2 < passing < 0.8:
        raise RuntimeError(f"{passing:.0%} of the gates are open: scores that do not try the threshold rule")
    _report(f"{batch.n_steps:,} steps, {passing:.0%} of the gates open: against verl's grpo")
    names = {
        "ours": "threshold, grpo, by agent and turn",
        "by task": "threshold, grpo, by task",
        "grpo": "verl's grpo",
        "vectorized": "verl's grpo_vectorized",
        "shared": "verl's grpo_vectorized, one string per task",
    }
    taken = _by_turns(
        {
            "ours": lambda: assign(batch, RULE).token_advantages(),
            "by task": lambda: assign(batch, BY_TASK).token_advantages(),
            "grpo": lambda: rows.advantages(verl.compute_grpo_outcome_advantage),
            "vectorized": lambda: rows.advantages(vectorized),
            "shared": lambda: rows.advantages(vectorized, rows.shared_uid),
        },
        repeats,
    )
    figures = [
        Figure.from_values(f"steps/s: {what}", [batch.n_steps / t for t in taken[run]]) for run, what in names.items()
    ]
    for ours in ("ours", "by task"):
        for theirs, hold in (("grpo", 50), ("vectorized", 4), ("shared", None)):
            what = f"{names[ours]}, against {names[theirs]}"
            figures.append(Figure.from_values(what, _ratios(taken[theirs], taken[ours]), hold, unit="x"))
    return figures


def _same_before_propagation(batch: TrajectoryBatch, rows: Rows, verl: Any) -> None:
    """Check that both sides work on the same rows: shared credit without scaling by the spread equals verl's."""
    shared = credit_options(propagation="identical", group_by="task", norm_adv_by_std_in_grpo=False)
    ours_T = assign(batch, shared).token_advantages()
    function = verl.compute_grpo_outcome_advantage
    theirs_T = rows.advantages(function, norm_adv_by_std_in_grpo=False)[:, 0].double().numpy()
    np.testing.assert_allclose(ours_T, theirs_T, rtol=0, atol=1e-5)


# Broadcasting to tokens


def _broadcast(repeats: int) -> list[Figure]:
    rng = np.random.default_rng(0)
    lengths_S = rng.integers(TOKENS_PER_STEP // 2, 3 * TOKENS_PER_STEP // 2 + 1, TASKS * TRAJECTORIES * STEPS)
    batch = chain_batch(TASKS, TRAJECTORIES, STEPS, tokens=lengths_S, tools=True)
    assignment = assign(batch, RULE)
    n_tokens = int(batch.token_offsets[-1])
    out_T, source_T, copy_T = np.zeros(n_tokens), np.ones(n_tokens), np.zeros(n_tokens)
    _report(f"{n_tokens:,} tokens, {batch.response_mask.mean():.0%} of them sampled: against a copy")
    taken = _by_turns(
        {
            "ours": lambda: assignment.token_advantages(out=out_T),
            "copy": lambda: np.copyto(copy_T, source_T),
        },
        repeats,
    )
    expected_T = np.where(batch.response_mask, np.repeat(assignment.advantage.advantage_S, lengths_S), 0.0)
    np.testing.assert_array_equal(out_T, expected_T)
    return [
        Figure.from_values("advantages to tokens, tokens/s", [n_tokens / t for t in taken["ours"]]),
        Figure.from_values(
            "advantages to tokens, of numpy.copyto's speed on as many bytes",
            _ratios(taken["copy"], taken["ours"]),
            0.5,
            unit="x",
        ),
    ]


# GAE


class Responses:
    """4096 responses of 8192 tokens and a critic's values, in verl's format and as one-step trajectories."""

    def __init__(self) -> None:
        torch = _torch()
        self.batch = chain_batch(RESPONSES // TRAJECTORIES, TRAJECTORIES, 1, tokens=RESPONSE_LENGTH)
        shape = (RESPONSES, RESPONSE_LENGTH)
        values = np.random.default_rng(0).normal(0.5, 0.2, shape).astype(np.float32)
        rewards = np.zeros(shape, dtype=np.float32)
        rewards[:, -1] = self.batch.outcome
        self.values_T: Floats = values.ravel().astype(np.float64)
        self.values = torch.tensor(values)
        self.rewards = torch.tensor(rewards)
        self.mask = torch.ones(shape, dtype=torch.int64)
        self.out_T = np.zeros(RESPONSES * RESPONSE_LENGTH, dtype=np.float32)

    def ours(self) -> NDArray[np.float32]:
        """Advantages [T], whitened and cast once to float32, as for a loss."""
        assign(self.batch, GAE, values_T=self.values_T).token_advantages(out=self.out_T)
        return self.out_T

    def theirs(self, verl: Any) -> Any:
        """The same advantages [N, L] from verl."""
        gamma, lam = GAE.gamma_token, GAE.lam_token
        return verl.compute_gae_advantage_return(self.rewards, self.values, self.mask, gamma, lam)[0]


def _against_verl_gae(repeats: int) -> list[Figure]:
    given, verl = Responses(), _verl()
    _report(f"{RESPONSES} x {RESPONSE_LENGTH} tokens: against verl's gae")
    np.testing.assert_allclose(given.ours(), given.theirs(verl).numpy().ravel(), rtol=0, atol=1e-3)
    taken = _by_turns({"ours": given.ours, "verl": lambda: given.theirs(verl)}, repeats, warm_up=False)
    return [
        Figure.from_values("gae with whitening, seconds", taken["ours"], unit="s"),
        Figure.from_values("verl's gae with whitening, seconds", taken["verl"], unit="s"),
        Figure.from_values("gae against verl's", _ratios(taken["verl"], taken["ours"]), 20, unit="x"),
    ]


# Memory


def _memory() -> list[Figure]:
    """Peak memory of `assign` alone, on the least favourable batch: no tokens, and shared texts.

    Python's tracer misses the memory of compiled loops, so the growth of the process has the same target.
    """
    batch = chain_batch(TASKS, TRAJECTORIES, STEPS)
    arrays, texts = bytes_of(batch)
    assign(batch, RULE)
    gc.collect()
    tracemalloc.start()
    assign(batch, RULE)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    _report(f"memory: {arrays / 1e6:.1f} MB of arrays and {texts / 1e6:.1f} MB of names and texts come in")
    whole = arrays + texts
    figures = [
        Figure("peak memory of assign, of the batch's bytes", peak / whole, 3, at_most=True, unit="x"),
        Figure("peak memory of assign, of its arrays' bytes", peak / arrays, unit="x"),
    ]
    if Path("/proc/self/clear_refs").exists():
        grown = _probe("probe_memory()")["grown"]
        figures.append(Figure("growth of the process, of the batch's bytes", grown / whole, 3, at_most=True, unit="x"))
    return figures


def probe_memory() -> None:
    """Print the peak growth in bytes of a fresh process during one assignment."""
    assign(chain_batch(2, TRAJECTORIES, STEPS), RULE)
    batch = chain_batch(TASKS, TRAJECTORIES, STEPS)
    gc.collect()
    before = memory_of("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    assign(batch, RULE)
    print(json.dumps({"grown": memory_of("VmHWM") - before}))


def _probe(call: str, **environment: str) -> dict[str, float]:
    """The JSON that a function of this module prints in a separate process."""
    command = [sys.executable, "-c", f"from benchmarks import credit; credit.{call}"]
    root = RESULTS.parent.parent
    done = subprocess.run(
        command, cwd=root, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


# Compilation


def _compilation() -> list[Figure]:
    _report("compilation, in processes of their own")
    with tempfile.TemporaryDirectory() as folder:
        cold = _probe("probe_compilation()", NUMBA_CACHE_DIR=folder)
        cached = _probe("probe_compilation()", NUMBA_CACHE_DIR=folder)
    return [
        Figure("first assignment, nothing compiled before", cold["first"], unit="s"),
        Figure("first assignment of a later process", cached["first"], unit="s"),
        Figure("second assignment of the same process", cached["second"], unit="s"),
        Figure("first gae, nothing compiled before", cold["first_gae"], unit="s"),
        Figure("first gae of a later process", cached["first_gae"], unit="s"),
    ]


def probe_compilation() -> None:
    """Print the seconds of the first and the second assignment in a process."""
    batch = chain_batch(2, TRAJECTORIES, STEPS, tokens=2)
    values_T = np.zeros(int(batch.token_offsets[-1]))
    runs: dict[str, Callable[[], object]] = {
        "first": lambda: assign(batch, RULE).token_advantages(),
        "second": lambda: assign(batch, RULE).token_advantages(),
        "first_gae": lambda: assign(batch, GAE, values_T=values_T).token_advantages(),
    }
    print(json.dumps({name: _seconds(run) for name, run in runs.items()}))


# Growth with the number of steps


def _growth(sizes: tuple[int, ...], repeats: int) -> tuple[list[Figure], dict[str, Any]]:
    """Seconds by number of steps, the fastest of the repeats (noise only adds), and the exponent over all decades.

    Per step, small batches pay for fixed costs, and large batches for exceeding the caches.
    """
    seconds: dict[str, list[float]] = {"agent_turn": [], "task": []}
    steps = []
    for size in sizes:
        batch = chain_batch(round(size / TRAJECTORIES / STEPS), TRAJECTORIES, STEPS)
        steps.append(batch.n_steps)
        runs = {"agent_turn": partial(assign, batch, RULE), "task": partial(assign, batch, BY_TASK)}
        taken = _by_turns(runs, repeats if size < DECADES[-1] else 3)
        for name, times in taken.items():
            seconds[name].append(min(times))
        _report(
            f"{batch.n_steps:,} steps: " + ", ".join(f"by {name} {times[-1]:.3g} s" for name, times in seconds.items())
        )
        del batch, runs
    fits = {name: _fit(steps, times) for name, times in seconds.items()}
    figures = [
        Figure(f"exponent of the cost, {steps[0]:,} to {steps[-1]:,} steps, by {name}", fit[0], 1.1, at_most=True)
        for name, fit in fits.items()
    ]
    figures += [
        Figure(f"exponent of the last decade, to {steps[-1]:,} steps, by {name}", _fit(steps[-2:], times[-2:])[0])
        for name, times in seconds.items()
    ]
    return figures, {"steps": steps, **seconds, "exponent_and_log10_factor": fits}


def _fit(steps: list[int], seconds: list[float]) -> tuple[float, float]:
    exponent, factor = np.polyfit(np.log10(steps), np.log10(seconds), 1)
    return float(exponent), float(factor)


if __name__ == "__main__":
    exit_with(main)
