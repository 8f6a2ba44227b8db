"""`creditflow publish`: the folder loads, its card is valid, and hostile names stay text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from creditflow.monitoring.evaluation import Evaluation
from creditflow.reports.model_card import PublishedPolicy, model_card
from creditflow.runs import Ledger
from tests.cli.commands import creditflow, refused, toy_run
from tests.reports.runs import HOSTILE

SMALL = ("trainer.total_training_steps=1", "actor_rollout_ref.rollout.n=2", "data.val_max_samples=4")
LORA = ("actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.model.lora_alpha=4")
TWO = ("policies={first: {}, second: {}}", "team.agents.writer.policy=first", "team.agents.critic.policy=second")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return toy_run(tmp_path_factory.mktemp("whole") / "run", *SMALL)


def publish(run: Path, output: Path, *options: str):
    return creditflow("publish", run, "--out", output, *options)


def answer(folder: Path, base: Path | None = None) -> list[int]:
    """Twelve greedy tokens after a fixed prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    ids = AutoTokenizer.from_pretrained(folder)("Write a word", return_tensors="pt").input_ids
    return model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)[0].tolist()


def test_published_model_answers_as_the_last_checkpoint(run, tmp_path) -> None:
    copy, folder = tmp_path / "copy", tmp_path / "out"
    checkpoint = shutil.copytree(run, copy) / "checkpoints" / "global_step_1"
    (checkpoint / "modeling_evil.py").write_text("raise SystemExit")
    (checkpoint / "optimizer.pt").write_text("state")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"_name_or_path": "/home/someone/model"}))

    done = publish(copy, folder)

    assert done.exit_code == 0, done.output
    assert f"hf upload ORG/NAME {folder} ." in done.stdout
    assert "nothing was sent" in done.stdout
    assert answer(folder) == answer(run / "checkpoints" / "global_step_1")
    names = {path.name for path in folder.iterdir()}
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= names
    assert not names & {"modeling_evil.py", "optimizer.pt", "state"}
    assert "/home/someone" not in (folder / "config.json").read_text()

    card = ModelCard.load(folder / "README.md")
    assert card.data.creditflow["recipe"] == "toy"
    assert card.data.creditflow["propagation"] == Ledger.open(run).run["config"]["algorithm"]["propagation"]["rule"]
    assert card.data.tags[0] == "creditflow"
    evaluation = Evaluation.from_json((run / "evaluation.json").read_text(), "")
    before = Ledger.open(run).metrics()[0]
    results = {result.metric_type: result for result in card.data.eval_results}
    assert results["pass_at_1"].metric_value == round(evaluation.metrics["pass_at_1"], 6)
    assert f"* pass@1: {results['pass_at_1'].metric_value} (before training `{before['val/pass_at_1']}`)" in card.text
    assert "Licence: -;" in card.text
    assert str(tmp_path) not in str(card)


def test_published_adapter_answers_as_the_last_checkpoint(tmp_path) -> None:
    pytest.importorskip("peft")
    run = toy_run(tmp_path / "run", *SMALL, *LORA)
    adapter = json.loads((run / "checkpoints/global_step_1/adapter_config.json").read_text())
    base = Path(adapter["base_model_name_or_path"])
    done = publish(run, tmp_path / "out", "--base-model", "some-org/some-model", "--license", "apache-2.0")
    assert done.exit_code == 0, done.output
    assert answer(tmp_path / "out", base) == answer(run / "checkpoints" / "global_step_1", base)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "some-org/some-model"
    data = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (data.base_model, data.library_name, data.license) == ("some-org/some-model", "peft", "apache-2.0")


def test_each_policy_is_published_in_a_subfolder(tmp_path) -> None:
    run = toy_run(tmp_path / "run", *SMALL, *TWO)
    assert publish(run, tmp_path / "out").exit_code == 0
    for name in ("first", "second"):
        assert answer(tmp_path / "out" / name) == answer(run / "checkpoints" / "global_step_1" / name)
    text = (tmp_path / "out" / "README.md").read_text()
    assert 'subfolder="first"' in text
    assert 'subfolder="second"' in text


NASTY = st.one_of(
    st.text(max_size=40),
    st.sampled_from(
        [
            HOSTILE, "---", "a\n---\nlicense: mit\n", "x: y", "- a", "{a: b}", "!!python/object/apply:os.system ['id']",
            "&a *a", "| b |", "``` ` ```", "<script>alert(1)</script>", "{{ 1 + 1 }}", "null", "1e3", "\u2028\u0085",
        ]
    ),
)  # fmt: skip


@given(NASTY, NASTY, NASTY)
def test_hostile_names_stay_text_in_the_card(recipe, policy, rule) -> None:
    config, after = {"algorithm": {"propagation": rule}}, {"val/pass_at_1": 0.5}
    policies = [PublishedPolicy(policy, policy, False, None)]
    card = ModelCard(model_card({"recipe": recipe, "config": config}, 1, policies, "apache-2.0", {}, after))
    policies = [PublishedPolicy("p", "p", False, None)]
    plainly = ModelCard(model_card({"recipe": "r", "config": {}}, 1, policies, "apache-2.0", {}, after))
    assert card.data.license == "apache-2.0"
    assert card.data.to_dict().keys() == plainly.data.to_dict().keys()
    assert isinstance(card.data.creditflow["recipe"], str)
    assert isinstance(card.data.creditflow["propagation"], str)
    lines = card.text.splitlines()
    assert [line for line in lines if line.startswith("## ")] == [
        line for line in plainly.text.splitlines() if line.startswith("## ")
    ]
    assert len(lines) == len(plainly.text.splitlines())


def test_licence_and_name_must_have_the_form_of_the_hub(run, tmp_path) -> None:
    for options, message in (
        (("--base-model", "nowhere"), "--base-model: expected ORG/NAME"),
        (("--license", "Mine: all"), "--license: expected an identifier"),
        (("--license", "a\nb: c"), "--license: expected an identifier"),
    ):
        assert message in refused("publish", run, "--out", tmp_path / "out", *options)


def test_publish_refuses_a_taken_folder_and_missing_weights(run, tmp_path) -> None:
    (tmp_path / "file").touch()
    assert "is not empty; name a new folder" in refused("publish", run, "--out", tmp_path)
    assert "file cannot be made: File exists" in refused("publish", run, "--out", tmp_path / "file")
    bare = tmp_path / "bare"
    shutil.copytree(run, bare, ignore=shutil.ignore_patterns("checkpoints"))
    assert "expected a checkpoint, found none" in refused("publish", bare, "--out", tmp_path / "out")
