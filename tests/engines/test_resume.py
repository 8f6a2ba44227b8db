"""Compare resumed runs with uninterrupted runs."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch

from creditflow.config import load_recipe
from creditflow.engines.common.run import sole_writer
from creditflow.engines.local import checkpoint, trainer
from creditflow.errors import ConfigError, DataError, InputError
from creditflow.runs.run_folder import read_events, read_metrics
from tests.builders import mostly_slow
from tests.engines.small_runs import (
    EVERY_STEP,
    Stopped,
    expect_the_same,
    run,
    stopped,
    without_clock,
    write_recipe,
)

TWO_POLICIES = ("policies={one: {}, two: {}}", "team.agents.writer.policy=one", "team.agents.editor.policy=two")
KINDS = {
    "one policy": ("guard.rules.often={metric: rollout/tokens, above: 1, window: 2}",),
    "nothing to learn": ("algorithm.propagation=identical", "reward.functions=[{fn: 'team.py:never'}]"),
    "a critic": ("algorithm.adv_estimator=gae", "algorithm.outcome_to=answer", "trainer.critic_warmup=1"),
    "two policies, one with an adapter": (
        "policies={one: {}, two: {lora_rank: 2, optim: {lr: 0.02}}}",
        "team.agents.writer.policy=one",
        "team.agents.editor.policy=two",
    ),
    "a central critic": (
        *TWO_POLICIES,
        "algorithm.adv_estimator=gae",
        "algorithm.outcome_to=answer",
        "critic={central: true, optim: {lr: 0.01}}",
        "trainer.critic_warmup=1",
    ),
    "dynamic sampling": ("algorithm.filter_groups.enable=true",),
    "a curriculum": ("data.curriculum={raise_at: 0.0, window: 6}",),
    "fitted parts": (
        "algorithm.score_weight=calibrated",
        "algorithm.shadow={score_model: noisy_and, score_weight: fixed}",
    ),
    "a threshold that moves": (
        "algorithm.propagation_threshold={kind: quantile}",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ),
}


SLOW_KINDS = {"a central critic", "dynamic sampling", "a curriculum"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, word_model_folder: Path) -> tuple[Path, Path]:
    """A recipe and a finished run of it, which tests do not modify."""
    recipe_file = write_recipe(tmp_path_factory.mktemp("finished"), word_model_folder)
    return recipe_file, run(recipe_file, "run", *EVERY_STEP)


def test_second_writer_of_a_run_is_refused(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        with pytest.raises(InputError, match=r"another process is training in .*run; wait"):
            sole_writer(tmp_path / "run").__enter__()
        assert list((tmp_path / "run").iterdir()) == []
    with sole_writer(tmp_path / "run"):
        pass


@pytest.mark.parametrize("kind", mostly_slow(KINDS, KINDS.keys() - SLOW_KINDS))
def test_resumed_run_equals_an_unstopped_run(recipe_file, monkeypatch, kind) -> None:
    settings = (*EVERY_STEP, *KINDS[kind])
    whole = run(recipe_file, "whole", *settings)
    stopped(monkeypatch, recipe_file, "stopped", 2, *settings)
    assert read_metrics(recipe_file.parent / "stopped")[-1]["step"] == 2
    expect_the_same(whole, run(recipe_file, "stopped", *settings))
    events = [event["step"] for event in read_events(whole) if event["rule"] == "often"]
    assert events == ([2] if kind == "one policy" else [])


def test_warm_up_delays_actors_and_their_schedule(recipe_file) -> None:
    cosine = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    rows = read_metrics(run(recipe_file, "run", *EVERY_STEP, *KINDS["a critic"], cosine))[1:]
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    assert ["actor/grad_norm" in row for row in rows] == [False, True, True, True]
    # Two updates a step in three steps: half a cosine of six.
    expected = [0.01 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    rates = [row["actor/lr"] for row in rows[1:]]
    assert rates == pytest.approx([(expected[k] + expected[k + 1]) / 2 for k in (0, 2, 4)])


def test_run_without_a_checkpoint_starts_again(recipe_file, monkeypatch) -> None:
    whole = run(recipe_file, "whole", *EVERY_STEP)
    stopped(monkeypatch, recipe_file, "stopped", 0, *EVERY_STEP)
    expect_the_same(whole, run(recipe_file, "stopped", *EVERY_STEP))


def test_run_stopped_in_its_last_evaluation_repeats_it(recipe_file) -> None:
    whole = run(recipe_file, "whole", *EVERY_STEP)
    shutil.copytree(whole, recipe_file.parent / "stopped")
    (recipe_file.parent / "stopped" / "evaluation.json").unlink()
    expect_the_same(whole, run(recipe_file, "stopped", *EVERY_STEP))


@pytest.mark.parametrize("at", [2, 4])
def test_failed_evaluation_is_repeated_on_resume(recipe_file, monkeypatch, at) -> None:
    settings = (*EVERY_STEP, "algorithm.propagation_threshold={kind: tuned, patience_epochs: 1}")
    whole = run(recipe_file, "whole", *settings)
    validate = trainer.validate

    async def fails(parts, policy_set, reporter, when, run):
        if when == f"after step {at}":
            raise Stopped
        return await validate(parts, policy_set, reporter, when, run)

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "validate", fails)
        with pytest.raises(Stopped):
            run(recipe_file, "stopped", *settings)
    again = run(recipe_file, "stopped", *settings)

    assert without_clock(again) == without_clock(whole)
    later = [] if at == 4 else whole.glob("checkpoints/global_step_4/state/*.json")
    for file in [*whole.glob("steps/*"), *later]:
        assert file.read_bytes() == (again / file.relative_to(whole)).read_bytes(), file.name


@pytest.mark.parametrize(
    ("written", "damaged"),
    [(r'"tasks_taken": 8', '"tasks_taken": 4'), ('"threshold"', '"thresholf"'), (r"(?s).*", "[]"), (r"(?s).*", "{}")],
)
def test_changed_checkpoint_manifest_is_not_loaded(recipe_file, monkeypatch, capsys, written, damaged) -> None:
    stopped(monkeypatch, recipe_file, "run", 2, *EVERY_STEP)
    record = recipe_file.parent / "run" / "checkpoints" / "global_step_2" / "state" / "trainer.json"
    text = record.read_text()
    changed = re.sub(written, damaged, text, count=1)
    assert changed != text
    record.write_text(changed)
    capsys.readouterr()
    run(recipe_file, "run", *EVERY_STEP)
    printed = " ".join("".join(capsys.readouterr()).split())
    assert re.search(r"trainer.json cannot be read: .*; the one before it is tried", printed)
    assert "goes on after step 1" in printed


DAMAGES = [
    (damage, file)
    for damage in ("torn", "gone", "a bit")
    for file in ("model.safetensors", "state/default.safetensors", "state/trainer.json", "config.json")
]
FAST_DAMAGES = {("torn", "model.safetensors"), ("gone", "state/trainer.json"), ("a bit", "state/default.safetensors")}


@pytest.mark.parametrize("damaged_file", mostly_slow(DAMAGES, FAST_DAMAGES), ids=" ".join)
def test_damaged_checkpoint_falls_back_to_the_one_before(recipe_file, monkeypatch, capsys, damaged_file) -> None:
    damage, file = damaged_file
    stopped(monkeypatch, recipe_file, "run", 2, *EVERY_STEP)
    damaged = recipe_file.parent / "run" / "checkpoints" / "global_step_2" / file
    content = damaged.read_bytes()
    half = len(content) // 2
    match damage:
        case "torn":
            damaged.write_bytes(content[:half])
        case "gone":
            damaged.unlink()
        case "a bit":
            damaged.write_bytes(content[:half] + bytes([content[half] ^ 128]) + content[half + 1 :])
    capsys.readouterr()
    path = run(recipe_file, "run", *EVERY_STEP)
    printed = "".join(capsys.readouterr())
    assert "global_step_2" in printed
    assert file.rpartition("/")[2] in printed
    assert "goes on after step 1" in printed
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]
    checkpoint.load(
        path, 2, trainer.PolicySet.from_recipe(load_recipe(recipe_file), 4, keep_reference=False)
    )  # written again


def test_incomplete_checkpoints_are_kept_if_none_is_complete(recipe_file, monkeypatch) -> None:
    stopped(monkeypatch, recipe_file, "run", 2, *EVERY_STEP)
    path = recipe_file.parent / "run"
    for manifest in path.glob("checkpoints/*/state/trainer.json"):
        manifest.write_text("{")
    with pytest.raises(DataError, match="none of its checkpoints is whole"):
        run(recipe_file, "run", *EVERY_STEP)
    assert checkpoint.saved_steps(path) == [2, 1]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_checkpoints_are_limited_to_the_configured_number(recipe_file) -> None:
    path = run(recipe_file, "run", *EVERY_STEP, "trainer.max_actor_ckpt_to_keep=2")
    assert checkpoint.saved_steps(path) == [4, 3]


def test_failed_checkpoint_write_keeps_earlier_checkpoints(recipe_file, monkeypatch) -> None:
    from creditflow.engines.local.policy import Policy

    save = Policy.save

    def full(self, folder):
        save(self, folder)
        if self.version == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "save", full)
        with pytest.raises(OSError, match="No space left"):
            run(recipe_file, "run", *EVERY_STEP)
    path = recipe_file.parent / "run"
    assert checkpoint.saved_steps(path) == [1]
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["global_step_1"]
    expect_the_same(run(recipe_file, "whole", *EVERY_STEP), run(recipe_file, "run", *EVERY_STEP))


def test_checkpoint_is_a_hugging_face_folder_of_each_policy(recipe_file) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = run(recipe_file, "run", *KINDS["two policies, one with an adapter"]) / "checkpoints" / "global_step_3"
    full = AutoModelForCausalLM.from_pretrained(path / "one")
    base = AutoModelForCausalLM.from_pretrained(load_recipe(recipe_file).config.actor_rollout_ref.model.path)
    adapted = PeftModel.from_pretrained(base, path / "two")
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(full(ids).logits, adapted(ids).logits)


def test_policies_learn_only_from_their_own_steps(recipe_file) -> None:
    rows = read_metrics(run(recipe_file, "run", *KINDS["two policies, one with an adapter"]))
    for row in rows[1:]:
        assert row["one/actor/grad_norm"] > 0
        assert row["two/actor/grad_norm"] > 0
        assert row["two/actor/lr"] == 2 * row["one/actor/lr"] == 0.02


def test_central_critic_is_one_for_all_policies(recipe_file) -> None:
    path = run(recipe_file, "run", *EVERY_STEP, *KINDS["a central critic"])
    assert sorted(file.name for file in (path / "checkpoints/global_step_4/state").glob("critic*")) == [
        "critic-central",
        "critic-central.safetensors",
    ]
    rows = read_metrics(path)[1:]
    assert all(row["critic/grad_norm"] > 0 for row in rows)
    assert not any(re.search(r"(one|two)/critic/", key) for row in rows for key in row)
    assert [{f"{name}/actor/pg_loss" in row for name in ("one", "two")} for row in rows] == [{False}, *[{True}] * 3]


def test_central_critic_refuses_other_tokenizers(recipe_file) -> None:
    mixed = ("policies={one: {}, two: {model: {path: tiny}}}", "data={max_prompt_length: 32, max_response_length: 4}")
    with pytest.raises(ConfigError, match=r"^critic.central: expected policies with one vocabulary, got one and two"):
        run(recipe_file, "run", *KINDS["a central critic"], *mixed)
    assert not (recipe_file.parent / "run").exists()


def test_central_critic_needs_a_critic_of_all_policies(recipe_file) -> None:
    with pytest.raises(ConfigError, match=r"^critic.central: true, but algorithm.adv_estimator: grpo has no critic"):
        load_recipe(recipe_file, ["critic.central=true"])
    with pytest.raises(
        ConfigError, match=r"^critic.context: trajectory, but critic.central: true reads the steps of all"
    ):
        load_recipe(recipe_file, [*KINDS["a central critic"], "critic.context=trajectory"])


NAMED = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=CHECKPOINT")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.gamma=0.5",), "began with another algorithm.gamma"),
        (("trainer.resume_mode=disable",), "holds a run already, and trainer.resume_mode is disable"),
        ((), "holds a run that is finished, at step 4"),
        (("trainer.total_training_steps=3",), "has come to step 4 already, and the recipe ends at 3"),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"), "expected .*global_step_<number>"),
        ((*NAMED, "trainer.total_training_steps=2"), "CHECKPOINT is of a later step than 2, at which the recipe ends"),
        ((*NAMED, *KINDS["a critic"]), "CHECKPOINT: has no critic of default"),
        (
            (*NAMED, *KINDS["two policies, one with an adapter"]),
            "holds default, and the recipe trains one, two",
        ),
        ((*NAMED, "actor_rollout_ref.model.path=tiny"), "is not of this recipe's models"),
    ],
)
def test_run_that_cannot_resume_is_rejected(finished, overrides, message) -> None:
    recipe_file, path = finished
    there = f"{path}/checkpoints/global_step_3"
    with pytest.raises((InputError, ConfigError), match=message.replace("CHECKPOINT", there)):
        run(recipe_file, "run", *EVERY_STEP, *(override.replace("CHECKPOINT", there) for override in overrides))
    assert checkpoint.saved_steps(path) == [4, 3, 2, 1]
    assert len(read_metrics(path)) == 5


def test_run_resumes_from_a_named_checkpoint_with_new_options(recipe_file) -> None:
    path = run(recipe_file, "run", *EVERY_STEP)
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}/checkpoints/global_step_2")
    run(recipe_file, "run", *EVERY_STEP, *named, "actor_rollout_ref.actor.optim.lr=0.001")
    rows = read_metrics(path)
    assert [row["actor/lr"] for row in rows[1:]] == [0.01, 0.01, 0.001, 0.001]
    assert json.loads((path / "run.json").read_text())["seed"] == 0


def test_longer_run_resumes_from_a_finished_one(recipe_file, monkeypatch) -> None:
    run(recipe_file, "run", *EVERY_STEP[:2], "trainer.total_training_steps=2")
    stopped(monkeypatch, recipe_file, "run", 1, *EVERY_STEP)
    assert not (recipe_file.parent / "run" / "evaluation.json").exists()  # the shorter run's is removed
    longer = run(recipe_file, "run", *EVERY_STEP)
    whole = run(recipe_file, "whole", *EVERY_STEP)
    for step in (1, 2, 3, 4):
        file = f"steps/00000{step}.parquet"
        assert (longer / file).read_bytes() == (whole / file).read_bytes()


def test_resume_from_an_earlier_checkpoint_removes_later_ones(recipe_file, monkeypatch) -> None:
    path = run(recipe_file, "run", *EVERY_STEP)
    named = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}/checkpoints/global_step_2")
    stopped(monkeypatch, recipe_file, "run", 0, *EVERY_STEP, *named)
    assert checkpoint.saved_steps(path) == [2, 1]
    run(recipe_file, "run", *EVERY_STEP, "trainer.max_actor_ckpt_to_keep=1")
    assert checkpoint.saved_steps(path) == [4]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3, 4]


def test_mixture_of_experts_resumes(recipe_file, monkeypatch, word_model_folder) -> None:
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = recipe_file.parent / "experts"
    tokenizer = AutoTokenizer.from_pretrained(word_model_folder)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = (*EVERY_STEP, f"actor_rollout_ref.model.path={folder}")
    whole = run(recipe_file, "whole", *settings)
    stopped(monkeypatch, recipe_file, "stopped", 2, *settings)
    expect_the_same(whole, run(recipe_file, "stopped", *settings))
