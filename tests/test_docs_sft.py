"""Run the page about a supervised warm-up with the real TRL, which `make benchmarks` installs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from creditflow.engines.local.policy import Policy, pick_device
from tests.paths import DOCS
from tests.test_docs_code import BLOCK

TRL = Path(os.environ.get("CREDITFLOW_TRL", Path(sys.prefix) / "trl"))
PAGE = DOCS / "how_to" / "sft.md"
LOSS = re.compile(r"'loss': '([\d.]+)'")
PASS = re.compile(r"pass@1 \(mean over trajectories\) +([\d.]+)\s+pass@1, greedy +([\d.]+)")
TOKENS = """
import json
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
rows = [json.loads(line) for line in open("sft.jsonl")]
trainer = SFTTrainer(
    model=AutoModelForCausalLM.from_pretrained("warm"), processing_class=AutoTokenizer.from_pretrained("warm"),
    train_dataset=Dataset.from_list(rows),
    args=SFTConfig(output_dir="sft", use_cpu=True, bf16=False, report_to="none"),
)
print(json.dumps([[row["input_ids"], row["labels"]] for row in trainer.train_dataset]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not (TRL / "trl").is_dir():
        pytest.skip("TRL is missing: make benchmarks")
    folder = tmp_path_factory.mktemp("sft")
    for name, _, text in BLOCK.findall(PAGE.read_text()):
        if name:
            (folder / name).write_text(text)
    run(folder, "demonstrate.py")
    return folder


def run(folder: Path, *arguments: str, trl: bool = False) -> str:
    paths = [str(TRL)] * trl + [os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout


def evaluate(folder: Path, model: str) -> tuple[float, float]:
    found = PASS.search(run(folder, "-m", "creditflow", "eval", "recipe.yaml", f"actor_rollout_ref.model.path={model}"))
    assert found
    return float(found[1]), float(found[2])


@pytest.mark.slow
def test_warm_up_lowers_the_loss_and_raises_the_evaluation(folder):
    losses = [float(loss) for loss in LOSS.findall(run(folder, "warm_up.py", trl=True))]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 4
    before, after = evaluate(folder, "tiny"), evaluate(folder, "warm")
    assert sum(after) > sum(before)


@pytest.mark.slow
def test_trl_trains_on_the_tokens_that_agents_read(folder):
    run(folder, "warm_up.py", "lora", trl=True)
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    trained = json.loads(run(folder, "-c", TOKENS, trl=True).splitlines()[-1])
    policy = Policy.load(folder / "warm", pick_device("cpu"))
    assert len(trained) == len(rows) > 100
    for row, (ids, labels) in zip(rows, trained, strict=True):
        prompt = policy.encode(row["prompt"])[1]
        response = [*policy.tokenizer(row["completion"][0]["content"])["input_ids"], policy.pad_id]
        assert ids == [*prompt, *response]
        assert labels == [*[-100] * len(prompt), *response]
