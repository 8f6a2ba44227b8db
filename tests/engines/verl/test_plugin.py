import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("verl")

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError
from transfer_queue import KVBatchMeta
from transformers import AutoTokenizer
from verl.protocol import DataProto
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from creditflow import CreditOptions, Score, TrajectoryBatch, assign
from creditflow.config import credit_options
from creditflow.data import TRAJECTORY_STATUSES
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.engines.verl import plugin
from creditflow.engines.verl.plugin import Entries, Row, Turns
from creditflow.errors import BatchError, ConfigError
from creditflow.reports.run_report import indexed, report_data
from creditflow.runs import Ledger
from tests.builders import make_trajectory, step

MASK = np.array([[1, 1, 0, 1, 1, 1, 0], [1, 0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]], bool)
"""Rows with two turns, two turns, one turn; and a padding row."""
OUTCOMES = (1.0, 0.0, 1.0)
UIDS = ("a", "a", "b")


RULE = """from dataclasses import dataclass

from creditflow.credit import option, propagation_rule
from creditflow.credit.rules.threshold import ThresholdRule

@propagation_rule("mine")
@dataclass(frozen=True)
class Mine(ThresholdRule):
    theta: float = option(0.3)
"""


def verl_advantages(algorithm: dict, rewards: np.ndarray, mask: np.ndarray = MASK) -> np.ndarray:
    """The advantages [R, L] that verl's own function computes under `algorithm.adv_estimator=creditflow`."""
    tensors = {"token_level_rewards": torch.tensor(rewards), "response_mask": torch.tensor(mask).long()}
    uids = np.array([*UIDS, "a"][: len(mask)], dtype=object)
    data = DataProto.from_dict(tensors={**tensors}, non_tensors={"uid": uids})
    keys = [f"{uid}_{n}_0" for n, uid in enumerate(uids)]
    config = OmegaConf.create({"creditflow": algorithm})
    done = compute_advantage_for_multi_trajectories(data, keys, adv_estimator="creditflow", config=config)
    return done.batch["advantages"].numpy()


def own_advantages(options: CreditOptions, scores: tuple = (None, None)) -> np.ndarray:
    """The same from `assign` alone, on trajectories that are built step by step."""
    turns = (("a", [2, 3], scores[0]), ("a", [1, 3], scores[1]), ("b", [3], None))
    team = [
        make_trajectory(
            str(n),
            [step("agent", s if k == 0 else None, tokens=length) for k, length in enumerate(lengths)],
            outcome=outcome,
            task=uid,
        )
        for n, ((uid, lengths, s), outcome) in enumerate(zip(turns, OUTCOMES, strict=True))
    ]
    filled = np.zeros(MASK.shape)
    filled[MASK] = assign(TrajectoryBatch.from_trajectories(team), options).token_advantages()
    return filled


def rewards_with(first_turn_of_row_0: float = 0.0) -> np.ndarray:
    rewards = np.zeros(MASK.shape)
    rewards[0, 6], rewards[1, 6], rewards[2, 6] = OUTCOMES
    rewards[0, 1] = first_turn_of_row_0
    return rewards


def test_verl_alone_loads_the_entry_point():
    """verl hides errors of entry points, so that an estimator would be missing without a word."""
    code = "from verl.trainer.ppo.core_algos import get_adv_estimator_fn as get; print(get('creditflow').__module__)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split()[-1:] == ["creditflow.engines.verl.plugin"], done.stderr


@pytest.mark.parametrize("algorithm", [{}, {"propagation": "identical", "group_by": "task"}, {"gamma": 0.5}])
def test_estimator_equals_assign_in_verls_rows(algorithm):
    got = verl_advantages(algorithm, rewards_with())
    np.testing.assert_allclose(got, own_advantages(CreditOptions(**algorithm)), rtol=1e-6)
    assert not got[~MASK].any()


def test_estimator_reads_scores_of_turns():
    got = verl_advantages({"turn_scores": True}, rewards_with(0.75))
    np.testing.assert_allclose(got, own_advantages(CreditOptions(), (0.75, 0.0)), rtol=1e-6)
    in_32_bits = rewards_with(float(np.nextafter(np.float32(1), np.float32(2))))
    assert verl_advantages({"turn_scores": True}, in_32_bits).any()
    with pytest.raises(ConfigError, match=r"row 0: turn_scores.score\[0\]: expected a number .* of at most 1, got 2.0"):
        verl_advantages({"turn_scores": True}, rewards_with(2.0))
    with pytest.raises(BatchError, match=r"row 0: rewards at tokens before the last turn.*turn_scores=true"):
        verl_advantages({"group_by": "agent"}, rewards_with(0.75))


def test_estimator_counts_rewards_before_the_first_turn():
    mask = np.array([[0, 1, 1], [0, 1, 1]], bool)
    got = [
        verl_advantages({"group_by": "task"}, np.array([reward, [0.0, 0.0, 0.0]]), mask)
        for reward in ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    ]
    np.testing.assert_array_equal(got[0], got[1])
    assert got[0].any()


def test_estimator_refuses_more_rows_than_rollouts():
    config = OmegaConf.create({"algorithm": {"creditflow": {}}, "actor_rollout_ref": {"rollout": {"n": 2}}})
    mask = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 1]])  # a padding row repeats the task of another
    tensors = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]), mask, config.algorithm
    assert plugin.advantages(*tensors, ["a", "a", "a", "b"])[0].any()
    with pytest.raises(BatchError, match=r"^3 rows of task a, but .*rollout.n=2; .*set trainer.v1.trainer_mode=credit"):
        plugin.advantages(*tensors, ["a", "a", "b", "a"])


@pytest.mark.parametrize(
    ("algorithm", "mode", "use_v1", "refused"),
    [
        ({"adv_estimator": "grpo", "creditflow": {}}, "sync", True, True),
        ({"adv_estimator": "grpo", "creditflow": {"gamma": 1}}, "credit_sync", False, True),
        ({"adv_estimator": "grpo", "creditflow": {"gamma": 1}}, "credit_sync", True, False),
        ({"adv_estimator": "creditflow", "creditflow": {"gamma": 1}}, "sync", False, False),
        ({"adv_estimator": "grpo"}, "sync", True, False),
    ],
)
def test_verls_check_refuses_options_that_nothing_reads(algorithm, mode, use_v1, refused):
    from verl.trainer.main_ppo import validate_config

    config = OmegaConf.create({"algorithm": algorithm, "trainer": {"v1": {"trainer_mode": mode}, "use_v1": use_v1}})
    with pytest.raises((ConfigError, ConfigAttributeError)) as raised:  # the second from verl, which needs more
        validate_config(config=config, use_reference_policy=False, use_critic=False)
    message = "algorithm.creditflow: without effect; set trainer.v1.trainer_mode=credit_sync"
    assert str(raised.value).startswith(message) == refused
    config.algorithm = {"adv_estimator": "creditflow", "creditflow": {"propagaton": "own"}}
    with pytest.raises(ConfigError, match="did you mean 'propagation'"):
        validate_config(config=config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (
            {"creditflow": {"propagaton": "own"}},
            "algorithm.creditflow.propagaton: expected an option of credit .did you mean 'propagation'",
        ),
        ({"creditflow": {"adv_estimator": "gae"}}, "gae reads a critic; set trainer.v1.trainer_mode=credit_sync"),
        ({"creditflow": {"mask_truncated": True}}, "does not know which responses are cut; set trainer.v1"),
        ({"creditflow": {"folder": "runs/x"}}, "folder: an estimator does not know the training step; set trainer.v1"),
        ({"rollout_correction": {"rollout_rs": "token_k1"}}, "rejected tokens would look like turns"),
        ({"use_kl_in_reward": True}, "set actor_rollout_ref.actor.use_kl_loss=true"),
        ({"creditflow": {"turn_scores": "no"}}, "turn_scores: expected true or false, got 'no'"),
        ({"creditflow": {"outcome_range": 1}}, r"expected two numbers such as \[-1,1\], got 1"),
        ({"creditflow": {"folder": True}}, "algorithm.creditflow.folder: expected a text, got True"),
        ({"creditflow": {"group_by": "task_agent_state"}}, "prompts are not known here"),
        ({"creditflow": {"max_version_lag": 2}}, "max_version_lag: the versions of the policy are not known here"),
        ({"creditflow": {"outcome_range": [1, 0]}}, r"outcome_range: expected the lowest reward first, got \[1,0\]"),
        ({"creditflow": True}, "algorithm.creditflow: expected a mapping of options, got True"),
    ],
)
def test_estimator_refuses_what_it_cannot_do(algorithm, message):
    with pytest.raises(ConfigError, match=message):
        plugin.advantages(torch.zeros(1, 2), torch.ones(1, 2), OmegaConf.create(algorithm), ["a"])
    with pytest.raises(ConfigError, match=message):  # at verl's start
        plugin.check_options(OmegaConf.create({"algorithm": {"adv_estimator": "creditflow", **algorithm}}))


def test_rows_of_agents_keep_parents_and_scores():
    mask = np.array([[1, 1], [1, 0], [0, 1], [0, 0]], bool)
    rows = [
        Row("b", 0, 2, 1.0, Entries(agent="judge", parents=[0, 1])),
        Row("b", 0, 0, 1.0, Entries(agent="first", score=[0.25])),
        Row("b", 0, 1, 1.0, Entries(agent="second", score=[0.5], parents=[])),
        Row("padding", 0, 0, 0.0),
    ]
    turns = Turns.from_rows(rows, mask, (0.0, 1.0))
    batch = turns.batch
    assert [batch.agent_names[a] for a in batch.agent_of_step] == ["first", "second", "judge"]
    assert [*zip(batch.edge_child.tolist(), batch.edge_parent.tolist(), strict=True)] == [(2, 0), (2, 1)]
    np.testing.assert_array_equal(batch.scores[:, 0], [0.25, 0.5, np.nan])
    np.testing.assert_array_equal(turns.spread(np.arange(1.0, 5.0), mask.shape), [[3, 4], [1, 0], [0, 2], [0, 0]])


def test_row_that_reaches_the_limit_truncates_its_trajectory():
    rows = [Row("a", n, i, 1.0, cut=n == 1 and i == 0) for n in range(2) for i in range(2)]
    status_N = Turns.from_rows(rows, np.ones((4, 1), bool), (0.0, 1.0)).batch.status_of_trajectory
    assert [TRAJECTORY_STATUSES[status] for status in status_N] == ["ok", "truncated"]


def test_rows_without_sampled_tokens_give_the_outcome():
    last = Row("a", 0, 3, float(np.float32(1.1)))
    rows = [Row("a", 0, 0, 0.0), Row("a", 0, 1, 0.0), Row("a", 0, 2, 0.0, Entries(parents=[1])), last]
    batch = Turns.from_rows(rows, np.array([[1], [0], [1], [0]], bool), (-0.1, 1.1)).batch
    assert batch.outcome.tolist() == [1.1]
    assert batch.edge_child.size == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            Row("a", 0, 1, 1.0, Entries(parents=[5])),
            "row a_0_1: extra_fields.parents: expected indices, below 1, of the outputs .*, got 5",
        ),
        (
            Row("a", 0, 1, 1.0, Entries(score=[1.0, 0.5])),
            "row a_0_1: extra_fields.score: expected at most 1 for turns, got 2",
        ),
        (Row("a", 0, 1, 2.0), r"row a_0_1: reward 2.0 is not in .*outcome_range=\[LOW,HIGH\]"),
        (Row("a", 0, 1, float("nan")), "row a_0_1: expected a finite reward, got nan"),
        (Row("a", 0, 1, 1.0, Entries(parents=[1])), "below 1, of the outputs .*, got 1"),
    ],
)
def test_rows_that_do_not_fit_are_named(row, message):
    with pytest.raises(BatchError, match=message):
        Turns.from_rows([Row("a", 0, 0, 1.0), row], np.ones((2, 2), bool), (0.0, 1.0))


@pytest.mark.parametrize(
    ("fields", "entries"),
    [
        ({"score": np.float32(0.5), "parents": np.array([0, 1]), "turns": 3}, Entries(score=[0.5], parents=[0, 1])),
        ({"score": (None, 1), "parents": 0, "agent": 7}, Entries(agent="7", score=[None, 1], parents=[0])),
        ({"score": None, "parents": None}, Entries()),
        ({"score": torch.tensor([0.5], dtype=torch.bfloat16, requires_grad=True)}, Entries(score=[0.5])),
        ({"score": [0.5, [0.5]]}, r"extra_fields.score\[1\]: expected a number"),
        ({"score": "high"}, r"row a_0_1: extra_fields.score\[0\]: expected a number .* of at most 1, got 'high'"),
        ({"score": {"a": 1}}, r"extra_fields.score\[0\]: expected a number"),
        ({"score": [0.5, 1.5]}, r"extra_fields.score\[1\]: expected a number .*, got 1.5"),
        ({"parents": ["0"]}, r"extra_fields.parents\[0\]: expected a whole number, got '0'"),
        ({"agent": ["x"]}, r"extra_fields.agent: expected a text, got \['x'\]"),
        ({"is_answer": np.True_, "parents": [np.int64(0)]}, Entries(is_answer=True, parents=[0])),
        ({"is_answer": "yes"}, r"extra_fields.is_answer: expected true or false, got 'yes'"),
    ],
)
def test_row_reads_extra_fields(fields, entries):
    if isinstance(entries, str):
        with pytest.raises(ConfigError, match=entries):
            Row.from_fields("a_0_1", 1.0, fields, False)
    else:
        assert Row.from_fields("a_0_1", 1.0, fields, False).entries == entries


def test_modes_extend_verls_trainers(monkeypatch):
    from verl.trainer.ppo.v1 import get_trainer_cls

    for name in ("sync", "colocate_async", "separate_async"):
        assert issubclass(get_trainer_cls(f"credit_{name}"), (plugin.CreditMode, get_trainer_cls(name)))
    config = OmegaConf.create(
        {"algorithm": {"adv_estimator": "rloo"}, "trainer": {"v1": {"trainer_mode": "credit_sync"}}}
    )
    with pytest.raises(ConfigError, match="in place of rloo; set grpo"):
        plugin.check_options(config)
    with pytest.raises(ConfigError, match=r"reads algorithm.creditflow.adv_estimator in place of rloo; set grpo"):
        get_trainer_cls("credit_sync")(config)
    monkeypatch.setattr(plugin, "TESTED", {"0.1": dict.fromkeys(*plugin.TESTED.values(), "other")})
    with pytest.raises(ConfigError, match=r"differs from 0.1, .* in AgentLoopWorkerTQ._agent_loop_postprocess, PPO"):
        get_trainer_cls("credit_sync")(config)


@pytest.mark.parametrize(("mode", "expected"), [("auto", True), ("disable", False), ("resume_path", True)])
def test_mode_expects_what_verl_resumes(tmp_path, mode, expected):
    trainer = OmegaConf.create({"resume_mode": mode, "default_local_dir": str(tmp_path)})
    assert plugin._resumes(trainer) == (mode == "resume_path")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    assert plugin._resumes(trainer) == expected


def test_folder_goes_on_with_its_own_options_alone(tmp_path):
    def config(**options):
        algorithm = {"creditflow": {"outcome_range": [0, 1], **options}}
        return OmegaConf.create({"algorithm": algorithm, "trainer": {"experiment_name": "x"}})

    run = tmp_path / "run"
    for _ in range(2):  # a run that ended before its first step
        plugin.run_folder(run, config(), 0)
    for number in (1, 2):
        (run / f"steps/{number:06d}.parquet").touch()
    plugin.run_folder(run, config(), 1)
    assert [file.name for file in (run / "steps").iterdir()] == ["000001.parquet"]
    with pytest.raises(ConfigError, match=r"folder: .*run has steps of an earlier run, and this one begins"):
        plugin.run_folder(run, config(), 0)
    with pytest.raises(ConfigError, match=r"folder: .*run belongs to a run with other options"):
        plugin.run_folder(run, config(outcome_range=[0, 2]), 1)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"algorithm.creditflow.folder: "):
        plugin.run_folder(tmp_path / "file", config(), 0)


def test_module_registers_once_when_loaded_again():
    code = "import importlib, sys, creditflow.engines.verl.plugin as p; importlib.reload(p); import verl.trainer.ppo.v1"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_mode_writes_advantages_and_the_step_file(queue, tmp_path):
    from verl.trainer.ppo.v1 import get_trainer_cls

    tokenizer = AutoTokenizer.from_pretrained(tiny_byte_model())
    ids, mask, log_probs = tokenizer.encode("plan:do it"), [1] * 5 + [0] * 2 + [1] * 3, -torch.arange(10.0)
    rows = {
        f"{uid}_{n}_{i}": {
            "uid": uid,
            "prompts": torch.tensor(tokenizer.encode(f"{agent} {uid}?")),
            "responses": torch.tensor(ids),
            "response_mask": torch.tensor(mask),
            "rm_scores": torch.tensor([0.0] * 9 + [float(n)]),
            "rollout_log_probs": log_probs,
            "raw_prompt": [{"role": "user", "content": [{"image": b"\x89"}, {"type": "text", "text": f"{uid}?"}]}],
            "extra_fields": {
                "agent": agent,
                "score": [0.5, n / 4],
                "tool_rewards": [],
                "is_answer": agent == "planner",
            },
        }
        for uid in "ab"
        for n in range(3)
        for i, agent in enumerate(("planner", "solver"))
    }
    keys = list(rows)[::-1]
    fields = list_of_dict_to_tensordict([rows[key] for key in keys])
    tq.kv_batch_put(keys=keys, fields=fields, tags=[{}] * len(keys), partition_id="train")
    file = tmp_path / "rules.py"
    file.write_text(RULE)
    section = {"outcome_range": [0, 2], "propagation": f"{file}:Mine", "group_by": "task_agent"}
    algorithm = {"creditflow": section, "adv_estimator": "grpo", "gamma": 1, "lam": 1, "use_kl_in_reward": False}
    trainer = object.__new__(get_trainer_cls("credit_sync"))
    trainer.config = OmegaConf.create(
        {
            "algorithm": algorithm,
            "actor_rollout_ref": {
                "actor": {"optim": {"lr": 1e-3}},
                "model": {"path": "a/model"},
                "rollout": {"n": 4, "calculate_log_probs": True, "response_length": 10},
            },
            "trainer": {"experiment_name": "x"},
        }
    )
    trainer.credit = plugin.Credit.from_config(trainer.config.algorithm, mode=True)
    trainer.use_critic, trainer.global_steps = False, 3
    trainer.tokenizer = tokenizer
    trainer._folder = plugin.run_folder(tmp_path / "run", trainer.config, 0)
    metrics: dict[str, float] = {}
    trainer._compute_advantage(KVBatchMeta(keys=keys, tags=[{}] * len(keys), partition_id="train"), metrics)
    got = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages", "returns"])
    tq.kv_clear(keys=keys, partition_id="train")

    team = [
        make_trajectory(
            f"{uid}{n}",
            [
                step(agent, score, tokens=length)
                for agent in ("planner", "solver")
                for score, length in ((0.5, 5), (n / 4, 3))
            ],
            outcome=Score(float(n), (0.0, 2.0)),
            task=uid,
        )
        for uid in "ab"
        for n in range(3)
    ]
    options = credit_options(propagation={"rule": "threshold", "theta": 0.3}, group_by="task_agent")
    expected_T = assign(TrajectoryBatch.from_trajectories(team), options).token_advantages()
    for name in ("advantages", "returns"):
        in_order = dict(zip(keys, got[name].unbind(), strict=True))
        sampled = [in_order[key].numpy()[np.array(mask) > 0] for key in sorted(keys)]
        np.testing.assert_allclose(np.concatenate(sampled), expected_T, rtol=1e-5, atol=1e-6)
        assert not any(row.numpy()[5:7].any() for row in in_order.values())
    ledger = Ledger.open(tmp_path / "run")
    recorded = ledger.read(3).batch
    assert set(recorded.policy_version) == {2}
    assert recorded.prompts[:3] == ("planner a?", "planner a?plan:do", "solver a?")
    assert recorded.responses[:2] == ("plan:", " it")
    assert (recorded.answers[0], recorded.tasks[0].text) == (" it", "a?")
    assert (recorded.score_names, np.flatnonzero(recorded.is_answer).tolist()[:2]) == (("score",), [1, 5])
    assert recorded.logprobs[:8].tolist() == log_probs.numpy()[np.array(mask) > 0].tolist()
    assert tokenizer.decode(recorded.response_ids[:8].tolist()) == "plan: it"
    assert metrics["credit/mean/solver"] > 0
    about = {"train/outcome_mean": 0.5, "train/pass_at_1": 1 / 3}  # of 0, 1 and 2 in [0, 2]
    about |= {"rollout/truncated_frac": 1.0, "rollout/lost_frac": 0.25}  # all have 10 tokens; 6 of 8 rollouts
    assert {name: metrics[name] for name in about} == pytest.approx(about)
    shown, findings = report_data(ledger, index := indexed(ledger))
    index.close()
    facts = {name: value for name, value, _ in shown["overview"]["run"]["facts"]}
    assert (facts["learning rate"], facts["model"]) == ("0.001", "a/model")
    assert facts["run"] == "run, engine verl's own program"
    known = {"actor": {"optim": {"lr": 1e-3}}, "model": {"path": "a/model"}, "rollout": {"n": 4}}
    credit = {"propagation": f"{file}:Mine", "group_by": "task_agent"}
    assert OmegaConf.load(tmp_path / "run/config.yaml") == {"algorithm": credit, "actor_rollout_ref": known}
    assert "Not judged: reward functions: no metrics of their scores are on record." in [f.sentence for f in findings]
