"""The guard of real runs on verl: what it hands out is in force, and it leads a run back to a checkpoint."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl_cpu")

from creditflow.ledger.run_folder import read_events
from creditflow.monitor import GuardStop
from tests.engines.verl.runs import TOY, run

RULE = """
from creditflow.monitor import Finding


class Third:
    \"\"\"Fires at its third look.\"\"\"

    def __init__(self):
        self.looks = 0

    def look(self, value, over):
        self.looks += 1
        return Finding(self.looks == 3, False, {"looks": self.looks})

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


def credit_is_the_outcome(path: Path, step: int) -> bool:
    table = pq.read_table(path / f"steps/{step:06d}.parquet", columns=["credit", "outcome"]).to_pydict()
    return table["credit"] == table["outcome"]


def test_credit_falls_back_on_verl_and_the_event_is_said(recipe, tmp_path, verl_ray, capsys) -> None:
    always = "guard.rules.always={metric: rollout/tokens, above: 1, window: 1, action: fallback_identical}"
    made = run(recipe, tmp_path / "run", always)
    assert [(e["rule"], e["step"], e["action"]) for e in read_events(made.folder)][-1] == (
        "always",
        1,
        "fallback_identical",
    )
    assert made.series("guard/fallback").tolist() == [1.0, 1.0]
    assert not credit_is_the_outcome(made.folder, 1)
    assert credit_is_the_outcome(made.folder, 2)
    assert "guard: always fired: rollout/tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_verl_goes_back_to_its_last_good_checkpoint_and_stops_after_so_many(
    recipe, tmp_path, verl_ray
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(GuardStop, match=r"guard: third fired.*stopped after step 3"):
        run(recipe, folder, THIRD, "guard.max_rollbacks=1", "trainer.total_training_steps=4", "trainer.save_freq=1")
    assert [event.get("goes_on_after") for event in read_events(folder) if event["rule"] == "third"] == [2, None]
    assert sorted(file.name for file in (folder / "rolled_back/1").iterdir()) == ["000003.parquet", "metrics.jsonl"]
