"""Whole runs with functions of other libraries, beside the same functions written for creditflow."""

import json
import shutil

import yaml
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.data import read_parquet
from tests.paths import TOYS

FUNCTIONS = """
from creditflow import outcome, reward

@outcome(name="printable")
def printable(trajectory):
    return float(trajectory.answer[:1].isprintable())

@reward(name="ascii", agent_match="writer")
def ascii_share(step, trajectory):
    return sum(one.isascii() for one in step.response) / max(1, len(step.response))

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str[:1].isprintable()
    return {"score": float(right), "acc": right, "pred": solution_str}

def ascii_shares(prompts, completions, **kwargs):
    said = [completion[0]["content"] for completion in completions]
    return [sum(one.isascii() for one in text) / max(1, len(text)) for text in said]
"""
NATIVE = [{"fn": "functions.py:printable"}, {"fn": "functions.py:ascii_share"}]
BORROWED = [
    {"fn": "functions.py:compute_score", "name": "printable"},
    {"fn": "functions.py:ascii_shares", "name": "ascii", "level": "step", "agent_match": "writer"},
]
VARYING = (
    "timing/",
    "perf/",
    "memory/",
    "reward/printable/extra/",
    "reward/printable/latency_s",
    "reward/ascii/latency_s",
)


def test_borrowed_functions_train_as_native_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    for file in ("toy.py", "toy.yaml"):
        shutil.copy(TOYS / file, tmp_path)
    native, borrowed = (trained(tmp_path, functions) for functions in (NATIVE, BORROWED))
    assert [set(line) - {key for key in line if key.startswith(VARYING)} for line in borrowed] == [
        set(line) - {key for key in line if key.startswith(VARYING)} for line in native
    ]
    for one, other in zip(borrowed, native, strict=True):
        same = [key for key in other if not key.startswith(VARYING) and not key.endswith(("/cached", "_s"))]
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        assert one["reward/printable/extra/acc"] == one["reward/printable/mean"]
    (file, *_) = sorted((tmp_path / "run" / "steps").glob("*.parquet"))
    outcome = read_parquet(file).to_trajectories()[0].outcome
    assert outcome.reason.startswith("acc: ")


def trained(folder, functions):
    """Train the toy recipe for two steps; return its metrics."""
    recipe = {"extends": "toy.yaml", "reward": {"functions": functions, "num_workers": 1}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    shutil.rmtree(folder / "run", ignore_errors=True)
    overrides = [f"trainer.default_local_dir={folder / 'run'}", "trainer.val_before_train=false"]
    result = CliRunner().invoke(app, ["train", "recipe.yaml", *overrides])
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
