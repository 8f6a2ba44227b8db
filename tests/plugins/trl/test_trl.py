"""Training with TRL's GRPOTrainer on our credit. TRL runs in a separate process, since verl fails beside it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import creditflow
from tests.paths import DOCS, ROOT
from tests.test_docs_code import BLOCK
from tests.test_docs_sft import TRL


def run(folder: Path, *arguments: str | Path) -> str:
    if not (TRL / "trl").is_dir():
        pytest.skip("TRL is missing: make benchmarks")
    paths = [str(TRL), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    environment = os.environ | quiet | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture(scope="module")
def trained(folder):
    return json.loads(run(folder, Path(__file__).with_name("trl_worker.py"), folder).splitlines()[-1])


@pytest.mark.parametrize("credit", ["steps", "tokens"])
def test_trl_loss_has_exactly_our_advantages(trained, credit) -> None:
    made = trained[credit]
    assert len(made["seen"]) > 2 * 16  # 16 rollouts per training step, several steps each
    assert made["seen"] == made["expected"]
    assert len({value for _, _, values in made["seen"] for value in values}) > 4
    assert any(len(set(values)) > 1 for _, _, values in made["seen"]) == (credit == "tokens")
    assert made["moved"]


def test_trl_completes_uneven_batches_with_rows_of_no_weight(trained) -> None:
    assert trained["steps"]["fillers"] > 0
    rows = len(trained["steps"]["seen"]) + trained["steps"]["fillers"]
    assert rows % 4 == 0


def test_trl_logs_trajectories_and_credit(trained) -> None:
    log = trained["steps"]["log"]
    assert log["reward"] == log["rewards/outcome/mean"] == pytest.approx(trained["steps"]["outcome"])
    assert {"credit/mean/writer", "credit/mean/critic", "propagation/pass_rate", "reward/letters/mean"} <= log.keys()


@pytest.mark.parametrize("weights", ["neutral", "lora", "neutral_turns", "cut_turns"])
def test_neutral_credit_trains_as_plain_grpo_trainer(trained, weights) -> None:
    """The outcome alone: the same losses, gradients and weights, to the bit."""
    neutral = trained[weights]
    assert neutral["adapters_only"] == (weights == "lora")
    for name in ("losses", "norms", "rewards"):
        ours, theirs = neutral[name]
        assert ours == theirs
        assert any(ours)
    assert neutral["same_weights"]


def test_trl_responses_end_with_the_templates_turn(trained) -> None:
    assert trained["end_of_turn"]["prompt"].startswith("!say ")  # of `chat_template_kwargs`
    ends, responses = trained["end_of_turn"]["ends"], trained["end_of_turn"]["responses"]
    assert not any(token in ends for ids in responses for token in ids[:-1])
    assert ends[0] in {ids[-1] for ids in responses}
    complete = [ids[-1] in ends for ids in responses]
    assert trained["end_of_turn"]["clipped"] == pytest.approx(1 - sum(complete) / len(complete))


def test_connections_to_frozen_models_close_with_each_batch(trained) -> None:
    assert trained["end_of_turn"]["judged"] == [2 * 16, 2]


def test_trl_trainer_refuses_unsupported_options(trained) -> None:
    loss, estimator, function, twice, agents, longest, limit, none, tuned, scale, three, value = trained["refused"]
    assert "loss_type: expected dapo, bnpo, cispo, vespo, got 'grpo'" in loss
    assert "adv_estimator: expected one without a critic, got 'gae'" in estimator
    assert function.startswith("reward_funcs: expected none")
    assert "rewards[1]: the name 'right' is taken by rewards[0]" in twice
    assert agents == "agents: expected none without a workflow"
    assert longest.startswith("max_completion_length: expected less than the model's ")
    assert limit.startswith("sampling.max_tokens: expected at most max_completion_length (")
    assert none == "rewards: expected at least one function with a workflow"
    assert tuned.startswith("theta.kind: 'tuned' needs an accuracy")
    assert scale == "outcome_range: expected none with a workflow"
    assert three == "outcome_range: expected a lowest and a highest number, got (0, 1, 2)"
    assert value.startswith("outcome: expected values in outcome_range (0.0, 1.0), got 1.1")


def test_trl_with_a_changed_method_is_refused(trained) -> None:
    message = trained["changed"]
    assert message.startswith("the installed trl ")
    assert "1.15.0, 1.16.0, which creditflow was tested with, in GRPOTrainer._compute_loss: " in message
    assert message.endswith("pip install trl==1.16.0")


def test_turns_with_tools_have_their_own_advantages(trained) -> None:
    made = trained["turns"]
    assert made["seen"] == sorted(made["expected"])
    assert any(len(set(advantages)) > 1 for _, _, advantages in made["seen"])
    assert made["turns"] == made["said"]
    assert max(made["turns"]) > 2


def test_tool_rollouts_take_their_outcome_from_trl(trained) -> None:
    unknown, *known = trained["turns"]["outcomes"]
    assert unknown is None
    assert max(known) > 1


def test_rollouts_without_reward_or_end_are_left_out(trained) -> None:
    seen, expected = trained["left_out"]["seen"], trained["left_out"]["expected"]
    assert [ids for ids, _ in seen] == [ids for ids, _ in expected]
    assert [advantage for _, advantage in seen] == pytest.approx([advantage for _, advantage in expected])
    assert 8 < len(seen) < 2 * 12  # of 32 rollouts, 8 have no reward, and others are cut
    assert any(advantage for _, advantage in seen)


def test_run_folder_of_trl_is_read_as_any_other(trained, folder) -> None:
    run = creditflow.Ledger.open(folder / "run")
    made = [recorded.assignment for recorded in run]
    recorded = {np.float32(value) for a in made for value in a.advantage.advantage_S[a.groups.trained_S]}
    assert recorded == {np.float32(values[0]) for _, _, values in trained["steps"]["seen"]}
    assert [row["step"] for row in run.metrics()] == [1, 2]


def test_trl_page_program_runs_as_printed(tmp_path) -> None:
    blocks = BLOCK.findall((DOCS / "how_to" / "trl.md").read_text())
    (program,) = [text for name, _, text in blocks if name == "train_with_trl.py"]
    (tmp_path / "train_with_trl.py").write_text(program)
    run(tmp_path, "train_with_trl.py")
    assert creditflow.Ledger.open(tmp_path / "run").steps
