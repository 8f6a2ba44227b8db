"""Kill the writer of a ledger at any moment: every finished step is there once, and the next writer continues."""

import multiprocessing
import random
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from creditflow.credit import assign
from creditflow.data import TrajectoryBatch, write_parquet
from creditflow.runs import Ledger, RunFolder
from creditflow.runs.run_folder import read_events, read_metrics
from creditflow.runs.step_files import read_step_file, write_step_file
from tests.builders import credit_options, mostly_slow
from tests.reports.runs import a_batch
from tests.rewards.processes import HANG_S, until


def batch_at(step: int, like: TrajectoryBatch) -> TrajectoryBatch:
    """The same rollouts under other ids. Generating new ones would take longer than writing."""
    return replace(like, step_ids=tuple(f"{step}/{id}" for id in like.step_ids))


def write(path: str, assigned: str, ready: Event) -> None:
    """Write one training step after the other until killed."""
    folder = RunFolder.open(Path(path))
    done = max([row["step"] for row in read_metrics(folder.path)], default=0)
    folder.rewind(done)
    recorded = read_step_file(Path(assigned))
    write_parquet(batch_at(0, recorded.batch), Path(assigned).with_suffix(".first"))  # imports the writer now
    ready.set()
    while True:
        done += 1
        folder.write_steps(done, batch_at(done, recorded.batch), recorded.assignment)
        folder.append_events([{"step": done, "rule": "x" * 200}])
        folder.append_metrics(done, {"loss": 1 / done, "long": 1.0})


@pytest.mark.parametrize("kills", mostly_slow((12, 100), {12}))
def test_killed_writer_leaves_every_finished_step_once(tmp_path: Path, kills: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.test_ledger_killed", "pyarrow.parquet", "pandas"])
    rng, path = random.Random(0), RunFolder.create(tmp_path / "run", {}, "").path
    batch = a_batch(1, tasks=40)
    expected = assign(batch, credit_options())
    write_step_file(tmp_path / "assigned", 0, batch, expected)
    during, finished = 0, 0
    for kill in range(kills):
        ready = context.Event()
        writer = context.Process(target=write, args=(str(path), str(tmp_path / "assigned"), ready), daemon=True)
        writer.start()
        assert ready.wait(HANG_S)
        if kill % 2:  # at any moment after the writer has finished a step
            until(lambda wanted=finished + 1: len(read_metrics(path)) >= wanted)
            time.sleep(rng.uniform(0, 0.15))
        else:  # while it writes a step
            until(lambda: list(path.glob("steps/.*.part")), every=0.0)
        writer.kill()
        writer.join()
        during += bool(list(path.glob("steps/.*.part")))
        ledger = Ledger.open(path)
        assert ledger.torn == ()
        assert ledger.steps == tuple(range(1, len(ledger.steps) + 1))
        of_metrics = [row["step"] for row in read_metrics(path)]
        assert of_metrics == list(range(1, len(of_metrics) + 1))
        assert len(of_metrics) <= len(ledger.steps) <= len(of_metrics) + 1
        finished = len(of_metrics)
    assert during > 0  # some were killed while a file was being written
    assert len(ledger.steps) > kills / 4
    ids = [id for recorded in ledger for id in recorded.batch.step_ids]
    assert len(ids) == len(set(ids)) == batch.n_steps * len(ledger.steps)
    events = [row["step"] for row in read_events(path)]
    assert events == sorted(set(events))
    for recorded in ledger:
        assert recorded.assignment is not None
        assert (recorded.assignment.advantage.advantage_S == expected.advantage.advantage_S).all()
