"""verl's own program on a CPU, with creditflow's plug-in and the agent loop of `docs/how_to/inside_verl.md`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("verl")

import verl_cpu

from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.reports.detail import Spelling
from creditflow.runs import Ledger
from tests.engines.verl.runs import mode_options
from tests.paths import ROOT
from tests.test_coming_from import BLOCK

pytestmark = pytest.mark.slow
SUMS = {"3 + 8 =": "11", "9 + 4 =": "13", "7 + 5 =": "12", "6 + 8 =": "14"}
BY_DIGITS = """def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return min(1.0, sum(c.isdigit() for c in solution_str) / 4)
"""


def train(folder: Path, *options: str) -> list[dict[str, float]]:
    """Train three steps in verl's own program; returns verl's metrics of each."""
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": result},
            "extra_info": {"index": i},
        }
        for i, (text, result) in enumerate(SUMS.items())
    ]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "score.py").write_text(BY_DIGITS)
    for file, _, text in BLOCK.findall((ROOT / "docs/how_to/inside_verl.md").read_text()):
        if file:
            (folder / file).write_text(text)
    overrides = [
        *(f"data.train_files={folder}/tasks.jsonl", f"data.val_files={folder}/tasks.jsonl", "data.train_batch_size=4"),
        *("data.max_prompt_length=128", "data.max_response_length=16"),
        *(f"actor_rollout_ref.model.path={tiny_byte_model()}", "actor_rollout_ref.actor.optim.lr=1e-3"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
        *("actor_rollout_ref.rollout.n=4", f"reward.custom_reward_function.path={folder}/score.py"),
        *("trainer.total_training_steps=3", "trainer.total_epochs=3", "trainer.val_before_train=false"),
        *("trainer.test_freq=-1", "trainer.save_freq=-1", f"trainer.default_local_dir={folder}/checkpoints"),
        *("trainer.logger=[file]", f"trainer.project_name={folder}", "trainer.experiment_name=metrics"),
    ]
    ray = ("num_cpus=16", "+num_gpus=2", "+include_dashboard=false", "+object_store_memory=536870912")
    overrides += [f"{'+' * ('+' in o)}ray_kwargs.ray_init.{o.lstrip('+')}" for o in ray]
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT / "src"), str(ROOT), str(folder)])
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *verl_cpu.options(1), *options],
        env={**os.environ, **verl_cpu.environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line)["data"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "critic/advantages/mean" in line]


def loop(folder: Path) -> tuple[str, ...]:
    agent = "actor_rollout_ref.rollout.agent"
    return f"{agent}.default_agent_loop=planner_solver", f"{agent}.agent_loop_config_path={folder}/loops.yaml"


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_mode_trains_on_the_advantages_of_assign(tmp_path, mode):
    run = tmp_path / "run"
    options = (
        *("algorithm.adv_estimator=grpo", f"+algorithm.creditflow.folder={run}"),
        *mode_options(f"credit_{mode}"),
        *(["trainer.v1.separate_async.parameter_sync_step=1"] if mode == "separate_async" else []),
    )
    steps = train(tmp_path, *loop(tmp_path), *options, "+algorithm.creditflow.propagation=threshold")
    ledger = Ledger.open(run)
    assert ledger.steps == (1, 2, 3)
    for number, verl_metrics in zip(ledger.steps, steps, strict=True):
        recorded = ledger.read(number)
        batch, credit = recorded.batch, recorded.assignment
        token_T = credit.token_advantages()
        assert batch.agent_names == ("planner", "solver")
        assert np.isnan(batch.scores[1::2]).all()  # planners alone have scores
        assert np.std(batch.scores[::2]) > 0.05
        assert {task.text: task.ground_truth for task in batch.tasks}.items() <= SUMS.items()
        assert list(batch.answers) == list(batch.responses[1::2])
        for name, value in {"mean": token_T.mean(), "max": token_T.max(), "min": token_T.min()}.items():
            assert verl_metrics[f"critic/advantages/{name}"] == pytest.approx(value, abs=1e-5)
        assert token_T.std() > 0.1
    assert ledger.run["config"]["actor_rollout_ref"]["actor"]["optim"]["lr"] == 1e-3
    assert all(0 <= row["train/outcome_mean"] <= 1 for row in ledger.metrics())
    assert Spelling(ledger).for_policy("default") is not None
    why = subprocess.run([sys.executable, "-m", "creditflow", "why", run], capture_output=True, text=True, check=True)
    assert "planner" in why.stdout


def test_estimator_trains_verls_own_rows(tmp_path):
    steps = train(tmp_path, "algorithm.adv_estimator=creditflow", "+algorithm.creditflow.group_by=task")
    assert len(steps) == 3
    for verl_metrics in steps:
        assert verl_metrics["critic/advantages/max"] > 0.1 > -0.1 > verl_metrics["critic/advantages/min"]
