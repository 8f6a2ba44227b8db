"""verl's own program on a CPU, with creditflow's plug-in and the agent loop of `docs/how_to/inside_verl.md`."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

from creditflow.reports.detail import Spelling
from creditflow.runs import Ledger
from tests.paths import ROOT
from tests.test_docs_code import BLOCK

pytest.importorskip("verl_cpu")

pytestmark = pytest.mark.slow
PROGRAM = "python3 -m verl.trainer.main_ppo"


FIRST_ANSWERS = """
        outputs[0].extra_fields["is_answer"] = True
        outputs[-1].reward_score = len(set(outputs[0].response_ids)) % 3 / 2
        outputs[-1].extra_fields["reward_extra_info"] = {}"""


def train(folder: Path, *options: str, without: Sequence[str] = (), at_end: str = "") -> list[dict[str, float]]:
    """Run the page's command on a CPU; returns verl's metrics of each training step.

    `options` follow those of the command, whose lines with a text of `without` are left out. `at_end`: the last lines
    of the agent loop.
    """
    blocks = BLOCK.findall((ROOT / "docs/how_to/inside_verl.md").read_text())
    for file, _, text in blocks:
        if file:
            (folder / file).write_text(text.replace("\n        return outputs", f"{at_end}\n        return outputs"))
    command = next(text for _, _, text in blocks if PROGRAM in text)
    lines = command[command.index("export PYTHONPATH") :].replace(PROGRAM, f"{sys.executable} -m verl_cpu").splitlines()
    logged = ("trainer.logger=[file]", f"trainer.project_name={folder}", "trainer.experiment_name=metrics")
    more = (*logged, f"trainer.default_local_dir={folder}/checkpoints", "actor_rollout_ref.actor.optim.lr=1e-3")
    kept = [line.removesuffix("\\") for line in lines if not any(text in line for text in without)]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT / "src"), str(ROOT)]))
    done = subprocess.run(
        ["bash", "-ec", "\n".join([kept[0], " ".join([*kept[1:], shlex.join([*more, *options])])])],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "critic/advantages/mean" in row]


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_mode_trains_on_the_advantages_of_assign(tmp_path, mode):
    """In one mode the solver's output is a comment on the answer, which is the planner's."""
    first = mode == "colocate_async"
    options = [f"trainer.v1.trainer_mode=credit_{mode}", "algorithm.creditflow.propagation=threshold"]
    options += ["trainer.v1.separate_async.parameter_sync_step=1"] if mode == "separate_async" else []
    steps = train(tmp_path, *options, at_end=FIRST_ANSWERS if first else "")
    (run,) = (tmp_path / "runs").iterdir()
    ledger = Ledger.open(run)
    assert ledger.steps == (1, 2, 3)
    tasks = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
    truths = {task["prompt"][0]["content"]: task["reward_model"]["ground_truth"] for task in tasks}
    for number, verl_metrics in zip(ledger.steps, steps, strict=True):
        recorded = ledger.read(number)
        batch, credit = recorded.batch, recorded.assignment
        token_T = credit.token_advantages()
        assert batch.agent_names == ("planner", "solver")
        assert np.isnan(batch.scores[1::2]).all()  # planners alone have scores
        assert np.std(batch.scores[::2]) > 0.05
        assert {task.text: task.ground_truth for task in batch.tasks}.items() <= truths.items()
        assert list(batch.answers) == list(batch.responses[0 if first else 1 :: 2])
        assert len(batch.answers) == 16
        assert (batch.policy_version == number - 1).all() or mode == "separate_async"
        for name, value in {"mean": token_T.mean(), "max": token_T.max(), "min": token_T.min()}.items():
            assert verl_metrics[f"critic/advantages/{name}"] == pytest.approx(value, abs=1e-5)
        assert token_T.std() > 0.1
    assert ledger.run["config"]["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-3
    assert all(0 <= row["train/outcome_mean"] <= 1 for row in ledger.metrics())
    assert Spelling(ledger).for_policy("default") is not None
    why = subprocess.run([sys.executable, "-m", "creditflow", "why", run], capture_output=True, text=True, check=True)
    assert "planner" in why.stdout


def test_estimator_trains_verls_own_rows(tmp_path):
    credit = ("algorithm.adv_estimator=creditflow", "+algorithm.creditflow.group_by=task")
    steps = train(tmp_path, *credit, without=("rollout.agent.", "algorithm.", "trainer_mode"))
    assert len(steps) == 3
    for verl_metrics in steps:
        assert verl_metrics["critic/advantages/max"] > 0.1 > -0.1 > verl_metrics["critic/advantages/min"]
