"""Guard tests on complete small runs with injected failures."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM

from creditflow.engines.local import actor
from creditflow.errors import ConfigError
from creditflow.monitoring.guard import GuardStop
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import read_events, read_metrics
from tests.builders import mostly_slow
from tests.engines.small_runs import (
    EVERY_STEP,
    TEAM,
    Stopped,
    expect_the_same,
    run,
    stopped,
    without_clock,
    write_recipe,
)

VERDICTS = """
import zlib


def of_training_step(trajectory):
    kind, step = trajectory.id.split("-")[:2]  # 0-STEP-TASK-PLAY in training, 1-TASK-PLAY in an evaluation
    return int(step) if kind == "0" else 0


@reward
def verdict(step, trajectory, *, sick="", first=1, last=1000):
    right = ends_with_a(trajectory)
    if not first <= of_training_step(trajectory) <= last:
        return right
    if sick == "fails" and zlib.crc32(step.id.encode()) % 100 < 30:
        raise ValueError("no verdict")
    if sick == "misleads":
        return float("a" not in step.response)
    return 1.0 - right if sick == "contradicts" else right


@reward(agent_match="editor")
def never_enough(step, trajectory):
    return 0.2
"""

RECIPE = """
extends: toy.yaml
actor_rollout_ref: {actor: {ppo_mini_batch_size: 4, ppo_max_token_len_per_gpu: 16384}, rollout: {val_kwargs: {n: 16}}}
algorithm: {propagation_threshold: 0.5, strata: null}
reward: {functions: [{fn: "team.py:ends_with_a"}, {fn: "team.py:verdict"}]}
trainer: {num_threads: 1, val_before_train: false}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, word_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("guarded")
    write_recipe(folder, word_model_folder)
    (folder / "team.py").write_text(TEAM + VERDICTS)
    (folder / "guarded.yaml").write_text(RECIPE)
    return folder / "guarded.yaml"


def steps(n: int) -> str:
    return f"trainer.total_training_steps={n}"


def verdicts(sick: str, first: int, last: int = 1000) -> str:
    """An override of the rewards, with verdicts that fail from step `first` to `last`."""
    args = f"{{sick: {sick}, first: {first}, last: {last}}}"
    return f"reward.functions=[{{fn: 'team.py:ends_with_a'}}, {{fn: 'team.py:verdict', args: {args}}}]"


def happened(path: Path, rule: str) -> list[tuple[str, str, int]]:
    return [(e["what"], e["action"], e["step"]) for e in read_events(path) if e["rule"] == rule]


def credit_is_the_outcome(path: Path, step: int) -> bool:
    table = pq.read_table(path / f"steps/{step:06d}.parquet", columns=["credit", "outcome"]).to_pydict()
    return table["credit"] == table["outcome"]


def test_failing_verdicts_trigger_the_fallback_and_recovery(recipe, tmp_path) -> None:
    options = ("guard.rules.error_rate={window: 3, unless: null}", "reward.max_failed_frac=0.5")  # the guard acts first
    path = run(recipe, tmp_path / "run", steps(13), verdicts("fails", 2, 6), *options)
    (_, action, fired), (back, _, recovered) = happened(path, "error_rate")
    assert (action, back) == ("fallback_identical", "recovered")
    assert 2 < fired <= 6 < recovered
    rows = {row["step"]: row for row in read_metrics(path)}
    assert [s for s in rows if rows[s]["guard/fallback"]] == list(range(fired, recovered))
    assert not any(credit_is_the_outcome(path, s) for s in range(1, fired + 1))
    assert all(credit_is_the_outcome(path, s) for s in range(fired + 1, recovered + 1))


def test_contradictory_verdicts_trigger_the_fallback(recipe, tmp_path) -> None:
    path = run(recipe, tmp_path / "run", steps(10), verdicts("contradicts", 4))
    fallbacks = [event for event in read_events(path) if event["action"] == "fallback_identical"]
    assert {event["rule"] for event in fallbacks} == {"error_rate", "agreement"}
    assert all(4 <= event["step"] <= 9 for event in fallbacks)
    fired = min(event["step"] for event in fallbacks)
    assert not credit_is_the_outcome(path, fired)
    assert credit_is_the_outcome(path, fired + 1)


def test_falling_accuracy_lowers_the_threshold(recipe, tmp_path) -> None:
    # From step 6 on, only the misleading verdict is rewarded, so accuracy falls regardless of a machine's rounding.
    rules = ("guard.rules.error_rate=null", "guard.rules.agreement=null")  # no fallback, whose rule has no threshold
    options = (verdicts("misleads", 6), "algorithm.propagation.w_o=0", "trainer.test_freq=1", *rules)
    path = run(recipe, tmp_path / "run", steps(12), *options)
    _, action, fired = happened(path, "accuracy")[0]
    assert action == "set_threshold"
    theta = [set(pq.read_table(path / f"steps/{s:06d}.parquet")["threshold"].to_pylist()) for s in (fired, fired + 1)]
    assert theta == [{0.5}, {0.4}]
    event = next(event for event in read_events(path) if event["rule"] == "accuracy")
    accuracy = [row["val/pass_at_1"] for row in read_metrics(path) if fired - 5 <= row["step"] <= fired]
    assert accuracy[0] - accuracy[-1] > 0.05
    assert event["numbers"]["p"] < 2e-3


def test_entropy_collapse_is_reported(recipe, tmp_path, capsys) -> None:
    path = run(recipe, tmp_path / "run", steps(8), "actor_rollout_ref.actor.optim.lr=1.0")
    assert happened(path, "entropy")[0][:2] == ("fired", "warn")
    assert "guard: entropy fired: actor/entropy" in capsys.readouterr().err


def test_agent_without_credit_is_reported(recipe, tmp_path) -> None:
    options = [
        "algorithm.outcome_to=answer",
        "reward.functions=[{fn: 'team.py:ends_with_a'}, {fn: 'team.py:never_enough'}]",
    ]
    path = run(recipe, tmp_path / "run", steps(4), *options)
    assert happened(path, "shut_out") == [("fired", "warn", 3)]
    assert [event["metric"] for event in read_events(path)] == ["credit/reach/writer"]


@pytest.fixture
def not_finite(monkeypatch):
    """Make the loss NaN in updates `first` to `last` of a process, counted from 1."""

    def spoil(first: int, last: int) -> list[int]:
        seen, made = [], actor.policy_loss

        def policy_loss(*args):
            seen.append(1)
            loss, *more = made(*args)
            return (loss * float("nan") if first <= len(seen) <= last else loss, *more)

        monkeypatch.setattr(actor, "policy_loss", policy_loss)
        return seen

    return spoil


SAVED = (*EVERY_STEP, "trainer.test_freq=-1", "reward.cache_size=0")


@pytest.fixture(scope="module")
def healthy(recipe, tmp_path_factory) -> Path:
    return run(recipe, tmp_path_factory.mktemp("healthy") / "run", *SAVED)


def expect_the_same_but_rollbacks(path: Path, other: Path) -> None:
    file = path / "metrics.jsonl"
    file.write_text(re.sub(r'"guard/rollbacks": [0-9.]+', '"guard/rollbacks": 0.0', file.read_text()))
    expect_the_same(other, path)


@pytest.mark.parametrize("kept", mostly_slow((None, 1), {1}))
def test_rollback_after_non_finite_updates_leaves_no_trace(recipe, healthy, not_finite, tmp_path, kept) -> None:
    """With one checkpoint kept, the newest one would contain the failure."""
    not_finite(2, 4)
    keep = "null" if kept is None else str(kept)
    path = run(recipe, tmp_path / "run", *SAVED, f"trainer.max_actor_ckpt_to_keep={keep}")
    assert happened(path, "not_finite") == [("fired", "restore_checkpoint", 4)]
    assert read_events(path)[0]["goes_on_after"] == 1
    aside = path / "rolled_back/1"
    files = [f"{step:06d}.parquet" for step in (2, 3, 4)]
    assert sorted(file.name for file in aside.iterdir()) == [*files, "metrics.jsonl"]
    assert {row["guard/rollbacks"] for row in read_metrics(path)[1:]} == {1.0}
    expect_the_same_but_rollbacks(path, healthy)


def test_run_stops_with_a_report_after_max_rollbacks(recipe, not_finite, tmp_path) -> None:
    not_finite(2, 1000)
    with pytest.raises(GuardStop, match=r"stopped after step 3: that was after 2 rollbacks, of which"):
        run(recipe, tmp_path / "run", *SAVED, "guard.rules.not_finite.window=2")
    path = tmp_path / "run"
    assert [event.get("goes_on_after") for event in read_events(path)] == [1, 1, None]
    assert sorted(folder.name for folder in (path / "rolled_back").iterdir()) == ["1", "2"]


def test_run_stops_without_a_good_checkpoint(recipe, not_finite, tmp_path) -> None:
    not_finite(1, 1000)
    with pytest.raises(GuardStop, match="there is no good checkpoint"):
        run(recipe, tmp_path / "run", steps(4))
    assert (tmp_path / "run/checkpoints/global_step_3/model.safetensors").is_file()  # not lost


def test_run_stopped_by_a_rule_resumes(recipe, tmp_path) -> None:
    options = (steps(3), "guard.rules.enough={metric: rollout/tokens, above: 1, window: 2, action: stop}")
    with pytest.raises(GuardStop, match=r"guard: enough fired: rollout/tokens .*; stopped after step 2"):
        run(recipe, tmp_path / "run", *options)
    path = run(recipe, tmp_path / "run", *options)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    assert happened(path, "enough") == [("fired", "stop", 2)]


@pytest.mark.parametrize("place", ["before the event", "after the event"])
def test_run_killed_during_a_rollback_completes_it(recipe, healthy, not_finite, monkeypatch, tmp_path, place) -> None:
    """Checkpoints after the rollback's target must not be resumed."""
    options = (*SAVED, "guard.rules.not_finite.window=2")
    seen = not_finite(2, 3)
    append = RunFolder.append_events

    def dies(self, events, back_to=None):
        if back_to is None:
            return append(self, events)
        if place == "after the event":
            append(self, events, back_to)
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_events", dies)
        with pytest.raises(Stopped):
            run(recipe, tmp_path / "run", *options)
    if place == "before the event":
        seen[:] = [1, 1]  # the next process meets the same updates
    path = run(recipe, tmp_path / "run", *options)
    expect_the_same_but_rollbacks(path, healthy)
    assert [event.get("goes_on_after") for event in read_events(path)] == [1]


LORA = (
    verdicts("contradicts", 2, 6),
    "guard.fallback={trainable: lora, lora_rank: 2, layers_to_transform: [1]}",
    "guard.rules.error_rate.recover_epochs=2",
    "trainer.save_freq=1",
    steps(10),
)


@pytest.fixture(scope="module")
def adapted(recipe, tmp_path_factory) -> Path:
    """A run that falls back to adapters."""
    return run(recipe, tmp_path_factory.mktemp("adapted") / "run", *LORA)


def weights(path: Path, step: int) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path / f"checkpoints/global_step_{step}").state_dict()


def test_fallback_trains_adapters_on_the_named_layers(adapted) -> None:
    (_, _, fired), (_, _, recovered) = happened(adapted, "error_rate")
    events = [event for event in read_events(adapted) if event["rule"] == "fallback"]
    assert [(e["what"], e["step"]) for e in events] == [
        ("adapters alone are trained", fired),
        ("all weights again", recovered),
    ]
    assert events[0]["numbers"].keys() == {"before"}
    before, during, after = (weights(adapted, step) for step in (fired, recovered - 1, recovered + 1))
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    assert changed
    assert all(".layers.1." in name and "proj" in name for name in changed)
    assert {name for name in during if not torch.equal(during[name], after[name])} > changed


@pytest.mark.parametrize("after", mostly_slow((5, 7, 9), {7}))
def test_resumed_adapter_fallback_equals_an_unstopped_run(recipe, adapted, tmp_path, after) -> None:
    again = run(recipe, stopped(recipe, tmp_path / "stopped", after, *LORA), *LORA)
    assert without_clock(adapted) == without_clock(again)
    for name, weight in weights(adapted, 10).items():
        assert torch.equal(weight, weights(again, 10)[name]), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["guard.fallback={trainable: lora, target_modules: [q_prj]}"], "target_modules: no module is named q_prj"),
        (["guard.fallback.trainable=lora", "actor_rollout_ref.model.lora_rank=2"], "trainable: expected all where"),
    ],
)
def test_impossible_fallback_is_rejected(recipe, tmp_path, options, message) -> None:
    with pytest.raises(ConfigError, match=rf"guard\.fallback\.{message}"):
        run(recipe, tmp_path / "run", *options)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_healthy_runs_only_produce_warnings(recipe, tmp_path, seed) -> None:
    path = run(recipe, tmp_path / "run", steps(50), "trainer.test_freq=5", f"data.seed={seed}")
    assert {event["action"] for event in read_events(path)} <= {"warn"}
    assert torch.isfinite(torch.tensor([row["actor/entropy"] for row in read_metrics(path) if row["step"]])).all()
