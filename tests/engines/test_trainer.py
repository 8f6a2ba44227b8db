"""Complete runs with a model of a dozen words."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from creditflow._utils.progress import Reporter
from creditflow.config import ActorConfig, load_recipe
from creditflow.data import read_parquet
from creditflow.engines.common.components import build_components
from creditflow.engines.common.rollouts import total_steps
from creditflow.engines.local.actor import Actor
from creditflow.engines.local.policy import Policy
from creditflow.engines.local.policy_set import PolicySet
from creditflow.engines.local.rollouts import tasks_at
from creditflow.engines.local.trainer import evaluation_batch, train
from creditflow.engines.models.tiny import tiny_byte_model
from creditflow.errors import CreditflowError, ModelError, TooManyFailedScores
from creditflow.runs import RunFolder
from creditflow.runs.run_folder import read_metrics
from tests.engines.batches import update_once
from tests.engines.small_runs import WATCHED, run
from tests.paths import TOY
from tests.rewards.judge_server import Answer, JudgeServer, Request

ONE_STEP = ("trainer.total_training_steps=1", "trainer.val_before_train=false")


def replace_in_team(recipe_file: Path, old: str, new: str) -> None:
    file = recipe_file.parent / "team.py"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def test_short_run_increases_the_reward(recipe_file: Path) -> None:
    rows = read_metrics(run(recipe_file, "run", "trainer.total_training_steps=15"))
    before, after = rows[0], rows[-1]
    assert after["step"] == 15
    assert after["val/sub_reward/writer"] > before["val/sub_reward/writer"] + 0.3
    assert after["val/pass_at_1"] > before["val/pass_at_1"] + 0.2


def test_run_folder_is_complete_and_its_model_loads(finished, word_model_folder: Path) -> None:
    path = finished(*WATCHED)
    assert {p.name for p in path.iterdir()} >= {"run.json", "config.yaml", "metrics.jsonl", "steps", "checkpoints"}
    assert not [p for p in path.rglob("*") if p.name.endswith(".part")]
    rows = read_metrics(path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    for key in ("actor/pg_loss", "actor/entropy", "timing/propagation_s", "reward/sub_reward/writer"):
        assert all(np.isfinite(row[key]) for row in rows[1:]), key
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])

    first = pq.read_table(path / "steps" / "000001.parquet")
    assert first.num_rows == 4 * 8 * 2
    assert {"advantage", "credit", "group_id", "baseline"} <= set(first.column_names)
    assert read_parquet(path / "steps" / "000001.parquet").n_trajectories == 32

    trained = Policy.load(path / "checkpoints" / "global_step_3", torch.device("cpu"))
    start = Policy.load(word_model_folder, torch.device("cpu"))
    assert not torch.equal(trained.model.lm_head.weight, start.model.lm_head.weight)


def test_seed_changes_the_samples(recipe_file: Path, finished) -> None:
    """A run with the same seed repeats bit for bit: see test_run_without_a_checkpoint_starts_again."""
    other = run(recipe_file, "other", *ONE_STEP, "data.seed=1")
    file = "steps/000001.parquet"
    assert (finished(*WATCHED) / file).read_bytes() != (other / file).read_bytes()


def test_run_stops_if_every_trajectory_fails(recipe_file: Path) -> None:
    with pytest.raises(CreditflowError, match=r"8 of 8 rollouts failed.* the first: ZeroDivisionError: broken"):
        run(recipe_file, "run", "team.workflow=team.py:always_breaks")


def test_saved_configuration_trains_from_its_own_folder(finished, tmp_path: Path) -> None:
    path = finished(*WATCHED)
    again = load_recipe(path / "config.yaml")
    assert again.config.trainer.save_freq == 1
    assert again.config.trainer.default_local_dir is None
    second = run(path / "config.yaml", tmp_path / "second", *ONE_STEP)
    assert (path / "steps/000001.parquet").read_bytes() == (second / "steps/000001.parquet").read_bytes()


def test_delayed_evaluations_begin_after_the_delay(recipe_file: Path) -> None:
    options = ("trainer.total_training_steps=5", "trainer.test_freq=1", "trainer.test_delay=3")
    path = run(recipe_file, "run", *options, "trainer.val_before_train=false")
    assert [row["step"] for row in read_metrics(path) if "val/pass_at_1" in row] == [4, 5]


def test_failed_evaluation_keeps_the_model_and_the_step(recipe_file: Path) -> None:
    line = 'return float(trajectory.answer.split()[-1:] == ["a"])'
    replace_in_team(recipe_file, line, f'assert not trajectory.id.startswith("1-")\n    {line}')
    with pytest.raises(TooManyFailedScores):
        run(recipe_file, "run", "trainer.val_before_train=false", "trainer.total_training_steps=2")
    path = recipe_file.parent / "run"
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert (path / "checkpoints" / "global_step_2" / "model.safetensors").is_file()
    assert not (path / "evaluation.json").exists()


def test_trajectories_are_kept_if_too_many_scores_fail(recipe_file: Path) -> None:
    replace_in_team(recipe_file, "words = step.response.split()", "raise KeyError('no such word')")
    with pytest.raises(TooManyFailedScores, match="no such word"):
        run(recipe_file, "run", "trainer.val_before_train=false")
    batch = read_parquet(recipe_file.parent / "run" / "steps" / "000001.parquet")
    reasons = {score.reason for scores in batch.raw_scores for score in scores.values() if score.status == "failed"}
    assert reasons == {"KeyError: 'no such word' (team.py:23 in says_a)"}


def test_run_stops_if_no_prompt_fits(recipe_file: Path) -> None:
    short = ("data.max_prompt_length=1", "data.max_response_length=1", "actor_rollout_ref.model.path=tiny")
    message = "none of 8 rollouts made a step; the first: writer's prompt has 4 tokens"
    with pytest.raises(CreditflowError, match=message):
        run(recipe_file, "run", *short)


def test_model_folder_without_tokenizer_is_rejected_by_name(recipe_file: Path, word_model_folder: Path) -> None:
    bare = recipe_file.parent / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((word_model_folder / name).read_bytes())
    with pytest.raises(ModelError, match=r"bare has no usable tokenizer"):
        run(recipe_file, "run", f"actor_rollout_ref.model.path={bare}")
    assert not (recipe_file.parent / "run").exists()


WITH_KL = (
    "reward.functions=[{fn: 'team.py:ends_with_a'}, {fn: 'team.py:says_a'}, "
    "{fn: 'creditflow.rewards.builtin.kl:KlToReference', name: kl, weight: 0, args: {estimator: kl}}]"
)


def test_reference_metric_of_weight_0_changes_no_training(recipe_file: Path, finished) -> None:
    """The policy equals its reference before training only."""
    path = run(recipe_file, "run", WITH_KL, *WATCHED)
    weights = "checkpoints/global_step_4/model.safetensors"
    assert (path / weights).read_bytes() == (finished(*WATCHED) / weights).read_bytes()
    assert not read_parquet(finished(*WATCHED) / "steps" / "000004.parquet").ref_logprobs.size
    drift = []
    for step in range(1, 5):
        batch = read_parquet(path / "steps" / f"00000{step}.parquet")
        assert np.isfinite(batch.ref_logprobs).all()
        assert len(batch.ref_logprobs) == len(batch.logprobs)
        drift.append(np.abs(batch.logprobs - batch.ref_logprobs)[batch.response_mask].max())
    assert drift[0] < 1e-5
    assert drift[1] > 1e-3
    assert drift[3] > drift[1]
    rows = read_metrics(path)
    assert abs(rows[1]["reward/kl/mean"]) < 1e-5
    assert all(abs(row["reward/kl/mean"]) > 1e-3 for row in rows[3:])
    assert all(row["reward/kl/failed_frac"] == 0 for row in rows[1:])


def test_frozen_policy_is_its_own_reference(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, [WITH_KL])
    components = build_components(recipe)
    batch = asyncio.run(evaluation_batch(components, PolicySet.for_rollouts(recipe), Reporter(), 2, 1.0, None))
    scores = [step.scores["kl"] for trajectory in batch.to_trajectories() for step in trajectory.steps]
    assert len(scores) == 8 * 2 * 2
    assert all(score.status == "ok" for score in scores)
    assert max(abs(value) for score in scores for value in score.value) < 1e-5


def test_each_epoch_takes_every_task_once_in_its_own_order(recipe_file: Path) -> None:
    config = load_recipe(recipe_file, ["trainer.total_training_steps=null", "trainer.total_epochs=2"]).config
    assert total_steps(8, config) == total_steps(9, config) == 4
    first, second = tasks_at(0, 8, 8, config), tasks_at(8, 8, 8, config)
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert tasks_at(6, 4, 8, config) == first[6:] + second[:2]
    of_nine = tasks_at(0, 8, 9, config)
    assert len(set(of_nine)) == 8


def outcomes_of(path: Path, step: int) -> list[list[float]]:
    """The outcomes of each group of a step."""
    batch = read_parquet(path / "steps" / f"00000{step}.parquet")
    return [batch.outcome[batch.group_of_trajectory == g].tolist() for g in range(len(batch.group_names))]


def test_dynamic_sampling_replaces_groups_of_equal_outcomes(recipe_file: Path, finished) -> None:
    options = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=40")
    filtered = run(recipe_file, "filtered", *options, "trainer.total_training_steps=2")
    assert any(len(set(outcomes)) == 1 for outcomes in outcomes_of(finished(*WATCHED), 1))
    rows = read_metrics(filtered)
    for step in (1, 2):
        groups = outcomes_of(filtered, step)
        assert [len(outcomes) for outcomes in groups] == [8] * 4
        assert all(len(set(outcomes)) == 2 for outcomes in groups)
    assert max(row["rollout/gen_batches"] for row in rows[1:]) > 1
    assert rows[1]["rollout/filtered_frac"] > 0
    first = rows[1]["train/pass_at_1"]  # over all sampled trajectories, also filtered ones
    assert first != pytest.approx(np.mean(outcomes_of(filtered, 1)))


def test_dynamic_sampling_stops_after_max_num_gen_batches(recipe_file: Path) -> None:
    replace_in_team(recipe_file, 'return float(trajectory.answer.split()[-1:] == ["a"])', "return 1.0")
    options = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=3",
        "trainer.test_freq=-1",
    )
    (row,) = read_metrics(run(recipe_file, "run", *ONE_STEP, *options))
    assert (row["rollout/gen_batches"], row["rollout/filtered_frac"]) == (3, 1)


def test_truncation_is_reported_once_in_step_one(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = run(recipe_file, "prompts", "data.max_prompt_length=4", *ONE_STEP)
    share = read_metrics(prompts)[0]["rollout/truncated_frac"]
    assert 0.1 < share < 1.0
    printed = capsys.readouterr().err
    assert f"warning: {share:.0%} of the first step's trajectories were truncated otherwise: by data." in printed

    responses = run(recipe_file, "responses", "data.max_response_length=2", *ONE_STEP)
    batch = read_parquet(responses / "steps" / "000001.parquet")
    printed = capsys.readouterr().err
    assert "trajectories were truncated" not in printed
    for agent in batch.agent_names:
        own = [step for trajectory in batch.to_trajectories() for step in trajectory.steps if step.agent == agent]
        cut = sum("finish_reason" in step.info for step in own)
        assert cut > 0.1 * len(own)
        assert (
            f"warning: in the first step, {cut / len(own):.0%} of {agent}'s responses are truncated ({cut} of "
            f"{len(own)}): raise data.max_response_length, now 2, or ask for shorter responses\n"
        ) in printed


TIED = "reward.functions=[{fn: 'team.py:never'}]"


def test_training_of_the_kl_term_alone_is_reported_once(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run(recipe_file, "run", TIED, "actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=2")
    printed = capsys.readouterr().err

    assert printed.count("warning: at training step 1, only the KL term is trained: every group is tied") == 1
    assert [event["rule"] for event in RunFolder(path).events()] == ["tied_groups"]
    rows = read_metrics(path)[1:]
    assert [row["actor/tied_updates"] for row in rows] == [1, 1]
    assert all(row["actor/tokens"] > 0 and row["throughput/update_tokens_per_s"] > 0 for row in rows)
    assert len([line for line in printed.splitlines() if line.endswith("  every group tied")]) == 2


def test_tied_groups_without_another_term_cost_no_pass(recipe_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = read_metrics(run(recipe_file, "run", TIED, *ONE_STEP))
    assert "is trained: every group is tied" not in capsys.readouterr().err
    assert (row["actor/tied_updates"], row["actor/tokens"]) == (1, 0)
    assert "throughput/update_tokens_per_s" not in row


def test_training_shows_its_phases(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles, bar = list[str](), Reporter.bar

    def recorded(self: Reporter, title: str, *arguments: Any, **options: Any) -> Any:
        titles.append(title)
        return bar(self, title, *arguments, **options)

    monkeypatch.setattr(Reporter, "bar", recorded)
    run(recipe_file, "run", "trainer.total_training_steps=1")
    validation = ["validation", "scoring", "greedy validation", "scoring"]
    steps = ["train", "sampling", "scoring", "values of the critic", "updating"]
    start = ["loading tasks and rewards", "loading models", "before training"]
    assert titles == [*start, *validation, *steps, *validation]


# ---- an agent with a frozen model


def frozen_critic(server: JudgeServer) -> list[str]:
    """Overrides for the toy recipe's critic to use the model of `server`."""
    return [
        "policies.default.trainable=true",
        f"policies.big.endpoint={{base_url: '{server.url}', model: m, max_retries: 1}}",
        "team.agents.critic.policy=big",
    ]


def train_toy(folder: Path, server: JudgeServer, *overrides: str) -> Path:
    settings = [f"trainer.default_local_dir={folder}", *frozen_critic(server), *overrides]
    return train(load_recipe(TOY, settings), Reporter()).path


def verdict(request: Request) -> Answer:
    """An answer that depends only on the question."""
    return Answer("yes" if len(request.text) % 2 else "no, \u00e9", usage=(20, 2))


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Request]:
    """The folder of a run with a frozen critic, and the first request to its endpoint."""
    with JudgeServer(verdict) as server:
        return train_toy(tmp_path_factory.mktemp("frozen") / "run", server), server.requests[0]


def test_endpoint_agent_receives_credit_without_training(frozen: tuple[Path, Request]) -> None:
    path, request = frozen
    assert request.body["messages"][0] == {"role": "system", "content": "Judge."}
    row = read_metrics(path)[1]
    assert row["actor/grad_norm"] > 0
    assert row["rollout/failed_frac"] == 0
    assert (row["endpoint/big/requests"], row["endpoint/big/completion_tokens"]) == (8, 16)

    file = path / "steps" / "000001.parquet"
    batch = read_parquet(file)
    critic_S = batch.agent_of_step == batch.agent_names.index("critic")
    assert np.array_equal(critic_S, batch.policy_of_step == batch.policy_names.index("big"))
    assert (np.diff(batch.token_offsets)[critic_S] == 0).all()
    assert (np.diff(batch.prompt_offsets)[critic_S] == 0).all()
    assert (np.diff(batch.token_offsets)[~critic_S] > 0).all()
    assert batch.policy_version[critic_S].max() == 0
    assert {batch.responses[s] for s in np.flatnonzero(critic_S)} <= {"yes", "no, \u00e9"}
    assert row["rollout/response_tokens"] == len(batch.response_ids)
    table = pq.read_table(file, columns=["agent", "credit", "group_id", "scores"]).to_pylist()
    groups = {agent: {line["group_id"] for line in table if line["agent"] == agent} for agent in ("writer", "critic")}
    assert not groups["writer"] & groups["critic"]
    assert all(np.isfinite(line["credit"]) and "compute_decomposed_reward" in line["scores"] for line in table)


def test_frozen_policy_without_an_agent_judges(tmp_path: Path) -> None:
    judge = "{fn: judge, agent_match: writer, weight: 0, args: {policy: judge, rubric: Short, max_tokens: 4}}"
    functions = f"[{{fn: 'toy.py:compute_decomposed_reward'}}, {{fn: 'toy.py:first_byte_is_printable'}}, {judge}]"
    policies = f"{{default: {{}}, judge: {{trainable: false, model: {{path: '{tiny_byte_model()}'}}}}}}"
    settings = [f"reward.functions={functions}", f"policies={policies}", "reward.max_failed_frac=1", *ONE_STEP]
    path = train(load_recipe(TOY, [f"trainer.default_local_dir={tmp_path}", *settings]), Reporter()).path
    assert read_metrics(path)[0]["reward/judge/requests"] > 0


def test_an_update_skips_rows_without_tokens(frozen: tuple[Path, Request], byte_policy: Policy) -> None:
    batch = read_parquet(frozen[0] / "steps" / "000001.parquet")
    own_S = batch.agent_of_step == batch.agent_names.index("writer")
    advantage_T = np.linspace(-1.0, 1.0, len(batch.response_ids))
    updated = []
    for trained_S in (own_S, np.ones_like(own_S)):
        policy = byte_policy.reference()
        policy.model.requires_grad_(True)
        for mode in ("token-mean", "seq-mean-token-mean"):
            assert update_once(Actor(policy, ActorConfig(loss_agg_mode=mode)), batch, advantage_T, trained_S)
        updated.append(policy.model)
    for a, b in zip(updated[0].parameters(), updated[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_endpoint_failures_are_counted_and_the_run_continues(tmp_path: Path) -> None:
    def shaky(request: Request) -> Answer:
        return Answer(status=404) if "Say 3." in request.text else Answer("yes")

    with JudgeServer(shaky) as server:
        path = train_toy(tmp_path / "run", server, *ONE_STEP, "data.train_batch_size=8")
    assert [row["rollout/failed_frac"] for row in read_metrics(path)] == [1 / 8]
    trajectories = read_parquet(path / "steps" / "000001.parquet").to_trajectories()
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    assert len(failed) == 4  # the trajectories of one of eight tasks
    assert all("status 404" in trajectory.info["error"] for trajectory in failed)


def test_unreachable_endpoint_stops_the_run_with_its_error(tmp_path: Path) -> None:
    with (
        JudgeServer(Answer(hang_up=True)) as server,
        pytest.raises(CreditflowError, match="6 of 6 rollouts failed") as captured,
    ):
        train_toy(tmp_path / "run", server)
    assert f"the first: EndpointError: {server.url}: the connection failed" in str(captured.value)
    assert "(2 tries) (toy.py:" in str(captured.value)
    assert str(captured.value).endswith(f"whole tracebacks: {tmp_path / 'run' / 'failures.log'}")


def test_recipe_with_a_frozen_agent_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    from creditflow.cli.check import check

    with JudgeServer(verdict) as server:
        check(TOY, frozen_critic(server), tasks=2)
    captured = capsys.readouterr()
    assert "critic" in captured.out
    assert "can be trained" in captured.out + captured.err
