"""The guard restores a checkpoint of a run on verl. For its fallback of credit, see test_faults.py."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("verl_cpu")

from verl_cpu import mode_options

from creditflow.engines.verl.options import MODES
from creditflow.monitoring.guard import GuardStop
from creditflow.runs.run_folder import read_events
from tests.engines.verl.runs import Run, run
from tests.paths import TOY

RULE = """
from creditflow.monitoring.guard_rules.base import RuleResult


class Third:
    \"\"\"Fires at its third look.\"\"\"

    def __init__(self):
        self.looks = 0

    def look(self, value, over):
        self.looks += 1
        return RuleResult(self.looks == 3, False, {"looks": self.looks})

    def state_dict(self):
        return {"looks": self.looks}

    def load_state_dict(self, state):
        self.looks = state["looks"]
"""
THIRD = "guard.rules.third={kind: 'rule.py:Third', metric: rollout/tokens, action: restore_checkpoint}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    for file in ("toy.py", "toy.yaml"):
        shutil.copy(TOY.parent / file, tmp_path)
    (tmp_path / "rule.py").write_text(RULE)
    return tmp_path / "toy.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_guard_restores_a_checkpoint_and_then_stops(recipe, tmp_path, verl_ray, mode) -> None:
    folder = tmp_path / "run"
    options = (THIRD, "guard.max_rollbacks=1", "trainer.total_training_steps=4", "trainer.save_freq=1")
    lag = () if mode == "sync" else ("algorithm.max_version_lag=2",)
    with pytest.raises(GuardStop, match=r"guard: third fired.*stopped after step 3"):
        run(recipe, folder, *options, *lag, verl=mode_options(mode))
    assert [event.get("goes_on_after") for event in read_events(folder) if event["rule"] == "third"] == [2, None]
    assert sorted(file.name for file in (folder / "rolled_back/1").iterdir()) == ["000003.parquet", "metrics.jsonl"]
    ids = [name for step in (1, 2, 3) for name in Run(folder).batch(step).trajectory_ids]
    assert len(ids) == len(set(ids)) == 8 * 3
