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
from creditflow.engines.local.policy_set import PolicySet
from creditflow.errors import ConfigError, DataError, InputError
from creditflow.runs.run_folder import read_events, read_metrics
from tests.builders import mostly_slow, record_removed_keys
from tests.engines.small_runs import (
    CRITIC,
    EVERY_STEP,
    TWO_POLICIES,
    WATCHED,
    Stopped,
    expect_the_same,
    run,
    stopped,
    without_clock,
)

COSINE = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
KINDS = {
    "one policy": (),
    "nothing to learn": ("algorithm.propagation=identical", "reward.functions=[{fn: 'team.py:never'}]"),
    "two policies with critics, one with an adapter": (*TWO_POLICIES, *CRITIC, COSINE),
    "dynamic sampling": ("algorithm.filter_groups.enable=true",),
    "fitted parts and a reference": (
        "algorithm.propagation=calibrated",
        "algorithm.shadow={propagation: posterior}",
        "actor_rollout_ref.actor.use_kl_loss=true",
    ),
    "a threshold that moves": ("algorithm.propagation_threshold={kind: quantile}",),
}
SLOW_KINDS = {"nothing to learn", "dynamic sampling"}
TWO_CRITICS = KINDS["two policies with critics, one with an adapter"]


@pytest.fixture(scope="module")
def half(shared_recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its second step, which tests do not modify."""
    return stopped(shared_recipe, tmp_path_factory.mktemp("half") / "run", 2, *WATCHED)


def copy_of(path: Path, folder: Path) -> Path:
    """A copy of a run, to modify or resume."""
    return Path(shutil.copytree(path, folder / "copy"))


def test_second_writer_of_a_run_is_refused(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "run"):
        with pytest.raises(InputError, match=r"another process is training in .*run; wait"):
            sole_writer(tmp_path / "run").__enter__()
        assert list((tmp_path / "run").iterdir()) == []
    with sole_writer(tmp_path / "run"):
        pass


@pytest.mark.parametrize("kind", mostly_slow(KINDS, KINDS.keys() - SLOW_KINDS))
def test_resumed_run_equals_an_unstopped_run(shared_recipe, finished, half, tmp_path, kind) -> None:
    settings = (*WATCHED, *KINDS[kind])
    whole = finished(*settings)
    again = copy_of(half, tmp_path) if kind == "one policy" else stopped(shared_recipe, tmp_path / "run", 2, *settings)
    assert read_metrics(again)[-1]["step"] == 2
    expect_the_same(whole, run(shared_recipe, again, *settings))
    assert [event["step"] for event in read_events(whole) if event["rule"] == "often"] == [2]


def test_removed_keys_without_effect_leave_a_run_resumable(shared_recipe, finished, half, tmp_path) -> None:
    again = copy_of(half, tmp_path)
    record_removed_keys(again, central=False)
    expect_the_same(finished(*WATCHED), run(shared_recipe, again, *WATCHED))


def test_removed_key_with_an_effect_is_named_on_resume(shared_recipe, half, tmp_path) -> None:
    again = copy_of(half, tmp_path)
    record_removed_keys(again, central=True)
    with pytest.raises(ConfigError, match=r"critic.central: True in a run of creditflow .*, which cannot go on; rem"):
        run(shared_recipe, again, *WATCHED)


def test_policies_learn_from_their_own_steps_after_a_warm_up(finished) -> None:
    rows = read_metrics(finished(*WATCHED, *TWO_CRITICS))[1:]
    assert all(row[f"{name}/critic/grad_norm"] > 0 for row in rows for name in ("one", "two"))
    assert [row.get("one/actor/grad_norm", 0) > 0 for row in rows] == [False, True, True, True]
    assert [row.get("two/actor/grad_norm", 0) > 0 for row in rows] == [False, True, True, True]
    # Two updates a step in three steps: half a cosine of six.
    expected = [0.01 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    rates = [row["one/actor/lr"] for row in rows[1:]]
    assert rates == pytest.approx([(expected[k] + expected[k + 1]) / 2 for k in (0, 2, 4)])
    assert [row["two/actor/lr"] for row in rows[1:]] == pytest.approx([2 * rate for rate in rates])


def test_checkpoint_is_a_hugging_face_folder_of_each_policy(shared_recipe, finished) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    path = finished(*WATCHED, *TWO_CRITICS) / "checkpoints" / "global_step_3"
    full = AutoModelForCausalLM.from_pretrained(path / "one")
    base = AutoModelForCausalLM.from_pretrained(load_recipe(shared_recipe).config.actor_rollout_ref.model.path)
    adapted = PeftModel.from_pretrained(base, path / "two")
    ids = torch.tensor([[1, 2, 3]])
    assert not torch.equal(full(ids).logits, adapted(ids).logits)


def test_run_without_a_checkpoint_starts_again(shared_recipe, finished, tmp_path) -> None:
    path = stopped(shared_recipe, tmp_path / "run", 0, *WATCHED)
    expect_the_same(finished(*WATCHED), run(shared_recipe, path, *WATCHED))


def test_run_stopped_in_its_last_evaluation_repeats_it(shared_recipe, finished, tmp_path) -> None:
    path = copy_of(finished(*WATCHED), tmp_path)
    (path / "evaluation.json").unlink()
    expect_the_same(finished(*WATCHED), run(shared_recipe, path, *WATCHED))


def test_failed_evaluation_is_repeated_on_resume(shared_recipe, tmp_path, monkeypatch) -> None:
    settings = (*EVERY_STEP, "algorithm.propagation_threshold={kind: tuned, patience_epochs: 1}")
    whole = run(shared_recipe, tmp_path / "whole", *settings)
    validate = trainer.validate
    for at in (2, 4):

        async def fails(parts, policy_set, reporter, when, run, at=at):
            if when == f"after step {at}":
                raise Stopped
            return await validate(parts, policy_set, reporter, when, run)

        with monkeypatch.context() as patch:
            patch.setattr(trainer, "validate", fails)
            with pytest.raises(Stopped):
                run(shared_recipe, tmp_path / "stopped", *settings)
    again = run(shared_recipe, tmp_path / "stopped", *settings)

    assert without_clock(again) == without_clock(whole)
    for file in [*whole.glob("steps/*"), *whole.glob("checkpoints/global_step_3/state/*.json")]:
        assert file.read_bytes() == (again / file.relative_to(whole)).read_bytes(), file.name


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def another_bit(content: bytes) -> bytes:
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 128]) + content[half + 1 :]


MANIFEST = "state/trainer.json"
DAMAGES = {
    **{
        f"{damage.__name__ if damage else 'missing'} {file}": (file, damage)
        for damage in (torn, another_bit, None)
        for file in ("model.safetensors", "state/default.safetensors", MANIFEST, "config.json")
    },
    "other tasks taken": (MANIFEST, lambda text: text.replace(b'"tasks_taken": 8', b'"tasks_taken": 4')),
    "misspelt key": (MANIFEST, lambda text: text.replace(b'"threshold"', b'"thresholf"')),
    "empty list": (MANIFEST, lambda text: b"[]"),
    "empty object": (MANIFEST, lambda text: b"{}"),
}
FAST_DAMAGES = {"torn model.safetensors", "another_bit config.json", "missing state/trainer.json", "misspelt key"}


@pytest.mark.parametrize("damage", mostly_slow(DAMAGES, FAST_DAMAGES))
def test_damaged_checkpoint_falls_back_to_the_one_before(shared_recipe, half, tmp_path, damage) -> None:
    name, change = DAMAGES[damage]
    path, messages = copy_of(half, tmp_path), list[str]()
    file = path / "checkpoints" / "global_step_2" / name
    content = file.read_bytes()
    if change is None:
        file.unlink()
    else:
        file.write_bytes(change(content))
        assert file.read_bytes() != content
    policy_set = PolicySet.from_recipe(load_recipe(shared_recipe), 4, keep_reference=False)
    step, state = checkpoint.newest(path, policy_set, messages.append)
    assert (step, state["tasks_taken"]) == (1, 4)
    (message,) = messages
    assert re.search(rf"global_step_2: {name} .*; the one before it is tried", message)


def test_resume_writes_a_damaged_checkpoint_again(shared_recipe, finished, half, tmp_path, capsys) -> None:
    path = copy_of(half, tmp_path)
    (path / "checkpoints/global_step_2/model.safetensors").write_bytes(b"")
    expect_the_same(finished(*WATCHED), run(shared_recipe, path, *WATCHED))
    assert "goes on after step 1" in "".join(capsys.readouterr())
    policy_set = PolicySet.from_recipe(load_recipe(shared_recipe), 4, keep_reference=False)
    checkpoint.load(path, 2, policy_set)


def test_incomplete_checkpoints_are_kept_if_none_is_complete(shared_recipe, half, tmp_path) -> None:
    path = copy_of(half, tmp_path)
    for manifest in path.glob("checkpoints/*/state/trainer.json"):
        manifest.write_text("{")
    with pytest.raises(DataError, match="none of its checkpoints is whole"):
        run(shared_recipe, path, *WATCHED)
    assert checkpoint.saved_steps(path) == [2, 1]
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2]


def test_failed_checkpoint_write_keeps_earlier_checkpoints(shared_recipe, finished, tmp_path, monkeypatch) -> None:
    from creditflow.engines.local.policy import Policy

    save, path = Policy.save, tmp_path / "run"

    def full(self, folder):
        save(self, folder)
        if self.version == 2:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Policy, "save", full)
        with pytest.raises(OSError, match="No space left"):
            run(shared_recipe, path, *WATCHED)
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["global_step_1"]
    expect_the_same(finished(*WATCHED), run(shared_recipe, path, *WATCHED))


NAMED = ("trainer.resume_mode=resume_path", "trainer.resume_from_path=CHECKPOINT")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("algorithm.gamma=0.5",), "whose options have changed since its start: algorithm.gamma"),
        (("trainer.resume_mode=disable",), "holds a run already, and trainer.resume_mode is disable"),
        ((), "holds a run that is finished, at step 4"),
        (("trainer.total_training_steps=3",), "has come to step 4 already, and the recipe ends at 3"),
        (("trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere"), "expected .*global_step_<number>"),
        ((*NAMED, "trainer.total_training_steps=2"), "CHECKPOINT is of a later step than 2, at which the recipe ends"),
        ((*NAMED, *CRITIC), "CHECKPOINT: has no critic of default"),
        ((*NAMED, *TWO_POLICIES), "holds default, and the recipe trains one, two"),
        ((*NAMED, "actor_rollout_ref.model.path=tiny"), "is not of this recipe's models"),
    ],
)
def test_run_that_cannot_resume_is_rejected(shared_recipe, finished, overrides, message) -> None:
    path = finished(*WATCHED)
    there = f"{path}/checkpoints/global_step_3"
    with pytest.raises((InputError, ConfigError), match=message.replace("CHECKPOINT", there)):
        run(shared_recipe, path, *WATCHED, *(override.replace("CHECKPOINT", there) for override in overrides))
    assert checkpoint.saved_steps(path) == [4, 3, 2, 1]
    assert len(read_metrics(path)) == 5


def test_resume_from_an_earlier_checkpoint_removes_later_ones(shared_recipe, finished, tmp_path) -> None:
    path = copy_of(finished(*WATCHED), tmp_path)
    named = [override.replace("CHECKPOINT", f"{path}/checkpoints/global_step_2") for override in NAMED]
    stopped(shared_recipe, path, 0, *WATCHED, *named)
    assert checkpoint.saved_steps(path) == [2, 1]
    changed = ("actor_rollout_ref.actor.optim.lr=0.001", "trainer.max_actor_ckpt_to_keep=1")
    run(shared_recipe, path, *WATCHED, *named, *changed)
    assert checkpoint.saved_steps(path) == [4]
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["actor/lr"] for row in rows[1:]] == [0.01, 0.01, 0.001, 0.001]
    assert json.loads((path / "run.json").read_text())["seed"] == 0


def test_changed_tasks_are_refused_unless_named(shared_recipe, tmp_path, capfd) -> None:
    """Their order would begin anew: two tasks more, and some of the first eight were trained on twice in a pass."""
    file, settings = tmp_path / "tasks.jsonl", (*WATCHED, f"data.train_files={tmp_path}/tasks.jsonl")
    row = '{"prompt": "a", "answer": "a"}\n'
    file.write_text(row * 8)
    path = stopped(shared_recipe, tmp_path / "run", 1, *settings)
    file.write_text(row * 10)
    refused = r"changed since its start: data.train_files \(8 tasks, .*, now 10 tasks, .*resume_mode=resume_path"
    with pytest.raises(InputError, match=refused):
        run(shared_recipe, path, *settings)
    named = (NAMED[0], f"trainer.resume_from_path={path}/checkpoints/global_step_1")
    stopped(shared_recipe, path, 0, *settings, *named)
    assert "warning: options have changed since the start of the run: data.tr" in "".join(capfd.readouterr())
    file.write_text(row * 8)
    stopped(shared_recipe, path, 0, *settings)


def test_longer_run_resumes_from_a_finished_one(shared_recipe, finished, tmp_path, capfd) -> None:
    path = run(shared_recipe, tmp_path / "run", *WATCHED, "trainer.total_training_steps=2")
    assert "training steps and now has" not in "".join(capfd.readouterr())
    stopped(shared_recipe, path, 1, *WATCHED)
    assert "the run began with 2 training steps and now has 4" in "".join(capfd.readouterr())
    assert not (path / "evaluation.json").exists()  # the shorter run's is removed
    run(shared_recipe, path, *WATCHED, "trainer.max_actor_ckpt_to_keep=2")
    assert checkpoint.saved_steps(path) == [4, 3]
    for file in finished(*WATCHED).glob("steps/*"):
        assert file.read_bytes() == (path / "steps" / file.name).read_bytes()
