"""Replay credit in complete runs: branches within a budget, trained once, reproducible and resumable."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.credit import assign, explain
from creditflow.credit.trees import KEY
from creditflow.engines.base import Capability, expect_capabilities
from creditflow.engines.common.branches import new_tokens, plan_branches
from creditflow.engines.local import branches
from creditflow.engines.local.decoding import SharedRows
from creditflow.errors import ConfigError, CreditflowError, TooManyFailedScores
from creditflow.monitoring.catalog import Names, described
from creditflow.rollout.branching import REFUSED
from creditflow.runs import Ledger
from creditflow.runs.run_folder import read_metrics
from tests.builders import batch_of, make_trajectory, step
from tests.engines.test_resume import Stopped, expect_the_same
from tests.engines.test_trainer import RECIPE, TRAJECTORY, run

REPLAY = (
    "algorithm.propagation=replay",
    "actor_rollout_ref.rollout.branching={budget: 0.4, alternatives: 3, continuations: 2}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.total_training_steps=4",
)

CHANGING = """
calls = 0


@outcome
def fails_on_branches(trajectory):
    if "~" in trajectory.id:
        raise RuntimeError("no score for a branch")
    return ends_with_a(trajectory)


async def changes(task, team):
    global calls
    calls += 1
    return await team.editor(f"{await team.writer(task.text)} {'i' if calls <= 40 else 'h'}")
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory, word_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "team.py").write_text(TRAJECTORY + CHANGING)
    (folder / "toy.yaml").write_text(RECIPE.replace("MODEL", str(word_model_folder)))
    return folder / "toy.yaml"


@pytest.fixture(scope="module")
def whole(recipe_file: Path) -> Path:
    return run(recipe_file, "whole", *REPLAY)


def test_branches_keep_the_prefix_token_for_token(whole: Path) -> None:
    seen = 0
    for recorded in Ledger.open(whole):
        batch = recorded.batch
        rows = {id: s for s, id in enumerate(batch.step_ids)}
        for n, info in enumerate(batch.trajectory_info):
            if "of" not in info.get(KEY, {}):
                continue
            own = np.flatnonzero(batch.trajectory_of_step == n)
            new = next(s for s in own if batch.branch_of[s] is not None)
            for s in own[: batch.index_of_step[new]]:
                first = batch.branch_of[new].rsplit("/", 1)[0]
                other = rows[f"{first}/{batch.index_of_step[s]}"]
                tokens = [batch.response_ids[batch.token_offsets[r] : batch.token_offsets[r + 1]] for r in (s, other)]
                assert tokens[0].tolist() == tokens[1].tolist()
                assert batch.prompts[s] == batch.prompts[other]
                seen += 1
    assert seen > 20


def test_branch_tokens_stay_close_to_the_budget(whole: Path) -> None:
    rows = [row for row in read_metrics(whole) if row["step"] > 0]
    assert rows[-1]["rollout/branch_tokens_frac"] == pytest.approx(0.4, abs=0.06)
    assert all(row["rollout/branches"] > row["rollout/branch_decisions"] > 0 for row in rows)
    assert all(row["rollout/branch_refused_frac"] == 0 for row in rows)


def test_branches_are_in_no_metric_of_tasks(whole: Path) -> None:
    for row, recorded in zip(read_metrics(whole)[1:], Ledger.open(whole), strict=True):
        roots = [n for n, info in enumerate(recorded.batch.trajectory_info) if "of" not in info.get(KEY, {})]
        assert len(roots) == 32
        assert row["train/pass_at_1"] == np.mean(recorded.batch.outcome[roots])
        assert row["rollout/steps_per_trajectory"] == 2.0


def test_every_metric_of_branches_is_in_the_catalog(whole: Path) -> None:
    names = {name for row in read_metrics(whole) for name in row if "branch" in name}
    assert len(names) >= 7
    for name in names:
        assert described(name, Names(("writer", "editor"), engine="local")) is not None, name


def test_recorded_trees_give_the_trained_advantages_again(whole: Path) -> None:
    for recorded in Ledger.open(whole):
        a = recorded.assignment
        again = assign(recorded.batch, a.options, history=a.history)
        assert np.array_equal(a.advantage_S, again.advantage_S)
        assert np.array_equal(a.share_S, again.share_S)
        at = np.flatnonzero(a.level_S == a.level_names.index("decision"))
        assert len(at)
        for s in at[:4].tolist():
            assert explain(a, s).replay() == a.advantage_S[s]


def test_run_killed_inside_a_tree_resumes_to_the_same_result(recipe_file, whole, monkeypatch) -> None:
    run_branch, ran = branches.run_branch, []

    async def dies(recorded, *args):
        made = await run_branch(recorded, *args)
        ran.append(recorded.id)
        if len(ran) > 40 and ran[-2] == ran[-1]:  # after two branches of a tree that has more
            raise Stopped
        return made

    with monkeypatch.context() as patch:
        patch.setattr(branches, "run_branch", dies)
        with pytest.raises(Stopped):
            run(recipe_file, "stopped", *REPLAY)
    assert read_metrics(recipe_file.parent / "stopped")[-1]["step"] in (1, 2, 3)
    assert len(ran) > 40
    expect_the_same(whole, run(recipe_file, "stopped", *REPLAY))


def test_run_with_branches_is_reproducible(recipe_file, whole) -> None:
    expect_the_same(whole, run(recipe_file, "again", *REPLAY))


@pytest.mark.parametrize("at", ["agents", "uncertain", "disputed"])
def test_decisions_are_drawn_by_every_preference(recipe_file, at) -> None:
    section = f"actor_rollout_ref.rollout.branching={{budget: 0.3, at: {at}, alternatives: 2}}"
    path = run(recipe_file, at, REPLAY[0], section, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    recorded = Ledger.open(path).read(1)
    roots = [info[KEY] for info in recorded.batch.trajectory_info if "at" in info.get(KEY, {})]
    assert roots
    if at == "agents":
        assert {one["weight"] for one in roots} == {1.0}
    else:
        assert len({one["weight"] for one in roots}) > 1


def test_budget_counts_no_tokens_of_endpoints() -> None:
    steps = [step("a", tokens=2), step("judge", info={"completion_tokens": 50}), step("a", tokens=3)]
    branch = make_trajectory("t~1.0", steps)
    recorded = batch_of(branch)
    assert new_tokens(branch, 0) == len(recorded.response_ids) == 5  # the count of rollouts
    assert new_tokens(branch, 1) == 3


def test_first_step_excludes_earlier_decisions(recipe_file) -> None:
    section = "actor_rollout_ref.rollout.branching={budget: 0.3, first_step: 1, alternatives: 2}"
    path = run(recipe_file, "late", REPLAY[0], section, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    roots = [info[KEY]["at"] for info in Ledger.open(path).read(1).batch.trajectory_info if "at" in info.get(KEY, {})]
    assert set(roots) == {1}


def test_run_without_branches_warns(recipe_file, capsys) -> None:
    section = "actor_rollout_ref.rollout.branching={first_step: 99}"
    path = run(recipe_file, "none", REPLAY[0], section, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    assert "no trajectory branched in the first step" in (printed := capsys.readouterr().err)
    assert "first_step 99, budget 0.5" in printed
    assert read_metrics(path)[-1]["rollout/branches"] == 0


def test_replay_without_weight_of_the_outcome_is_refused(recipe_file) -> None:
    with pytest.raises(ConfigError, match=r"algorithm.w_o: 0, but algorithm.propagation: replay compares outcomes"):
        load_recipe(recipe_file, [REPLAY[0], "algorithm.w_o=0"])


def test_disputed_without_scores_is_refused(recipe_file) -> None:
    section = "actor_rollout_ref.rollout.branching={at: disputed}"
    with pytest.raises(ConfigError, match=r"branching.at: disputed reads scores and outcomes, and credit ignores"):
        load_recipe(recipe_file, [REPLAY[0], section, "algorithm.reward_decomp=false"])


def test_replay_without_an_outcome_is_refused(recipe_file) -> None:
    with pytest.raises(ConfigError, match="expected an outcome function, the return of branches, found none"):
        run(recipe_file, "no outcome", REPLAY[0], "reward.functions=[{fn: 'team.py:says_a'}]", "trainer.test_freq=-1")


def test_alternatives_share_the_keys_and_values_of_their_prompt(recipe_file, monkeypatch) -> None:
    read, in_order, prompts_read, running = SharedRows._read, branches.in_order, list[tuple[int, ...]](), [False]

    def reads(self, prompts, device):
        prompts_read.extend(prompts if running[0] else ())
        return read(self, prompts, device)

    def plans(*args):
        running[0] = True
        return plan_branches(*args)

    def ends(pairs):
        running[0] = False
        return in_order(pairs)

    monkeypatch.setattr(SharedRows, "_read", reads)
    monkeypatch.setattr(branches, "plan_branches", plans)
    monkeypatch.setattr(branches, "in_order", ends)
    section = "actor_rollout_ref.rollout.branching={budget: 0.5, alternatives: 4}"
    path = run(recipe_file, "shared", REPLAY[0], section, "trainer.total_training_steps=1", "trainer.test_freq=-1")
    batch = Ledger.open(path).read(1).batch
    prompts = [tuple(batch.prompt_ids[slice(*batch.prompt_offsets[s : s + 2])].tolist()) for s in range(batch.n_steps)]
    of_decisions = Counter(prompts[s] for s in range(batch.n_steps) if batch.branch_of[s] is not None)
    after = {prompts[s] for s in range(1, batch.n_steps) if batch.branch_of[s - 1] is not None}
    decisions = [prompt for prompt, count in of_decisions.items() if count == 3 and prompt not in after]
    assert len(decisions) > 4
    assert all(prompts_read.count(prompt) == 1 for prompt in decisions)


def test_refused_branches_are_counted_and_not_trained(recipe_file) -> None:
    path = run(
        recipe_file,
        "changing",
        *REPLAY[:2],
        "team.workflow=team.py:changes",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "data.train_batch_size=4",
    )
    row, recorded = read_metrics(path)[-1], Ledger.open(path).read(1)
    refused = [n for n, info in enumerate(recorded.batch.trajectory_info) if REFUSED in info]
    assert 0 < row["rollout/branch_refused_frac"] < 1
    assert len(refused) == round(row["rollout/branch_refused_frac"] * row["rollout/branches"])
    assert recorded.assignment.masked_N[refused].all()


def test_too_many_failed_branches_end_the_run(recipe_file, monkeypatch) -> None:
    async def fails(recorded, at, rollout, workflow, agents, generator, sampling):
        made = await branches_run(recorded, at, rollout, workflow, agents, generator, sampling)
        made.status, made.info = "failed", {"error": "the tool is gone"}
        return made

    branches_run = branches.run_branch
    monkeypatch.setattr(branches, "run_branch", fails)
    with pytest.raises(CreditflowError, match=r"of \d+ branches failed, more than .*the first: the tool is gone"):
        run(recipe_file, "failing", *REPLAY[:2], "trainer.val_before_train=false")


def test_failed_scores_of_branches_leave_readable_evidence(recipe_file) -> None:
    functions = "reward.functions=[{fn: 'team.py:fails_on_branches'}, {fn: 'team.py:says_a'}]"
    with pytest.raises(TooManyFailedScores, match="no score for a branch"):
        run(recipe_file, "evidence", *REPLAY[:2], functions, "trainer.val_before_train=false")
    batch = Ledger.open(recipe_file.parent / "evidence").read(1).batch
    branch = next(id for id in batch.trajectory_ids if "~" in id)
    shown = CliRunner().invoke(app, ["why", str(recipe_file.parent / "evidence"), "--trajectory", branch])
    assert shown.exit_code == 0, shown.output
    assert f"branch {branch}" in shown.output


def test_replay_is_refused_on_an_engine_without_branches(recipe_file) -> None:
    config = load_recipe(recipe_file, [REPLAY[0]]).config
    with pytest.raises(ConfigError, match=r"propagation: replay is for .*; other does not support it"):
        expect_capabilities(config, "other", {Capability.AUDIT})
    expect_capabilities(config, "other", {Capability.BRANCHES})


def test_commands_read_a_run_with_branches(whole: Path) -> None:
    a = Ledger.open(whole).read(2).assignment
    decision = next(s for s in range(a.batch.n_steps) if a.level_names[a.level_S[s]] == "decision")
    why = CliRunner().invoke(app, ["why", str(whole), a.batch.step_ids[decision]])
    assert why.exit_code == 0, why.output
    assert "baseline = sum for baseline / count" in why.output
    assert "return of " in why.output
    recredit = CliRunner().invoke(app, ["recredit", str(whole), "algorithm.propagation=none"])
    assert recredit.exit_code == 0, recredit.output
    again = Ledger.open(next((whole / "recredited").iterdir())).read(2).assignment
    roots = np.flatnonzero(["~" not in id for id in a.batch.step_ids])
    assert again.trained_S.sum() == again.trained_S[roots].sum() > 0


def test_frozen_agents_are_replayed_and_never_chosen(recipe_file) -> None:
    policies = ("policies={one: {}, two: {trainable: false}}", "team.agents.writer.policy=two")
    more = ("team.agents.editor.policy=one", "trainer.total_training_steps=1", "trainer.test_freq=-1")
    path = run(recipe_file, "frozen", *REPLAY[:2], *policies, *more)
    assert read_metrics(path)[-1]["rollout/branch_refused_frac"] == 0.0
    recorded = Ledger.open(path).read(1)
    roots = [info[KEY]["at"] for info in recorded.batch.trajectory_info if "at" in info.get(KEY, {})]
    assert set(roots) == {1}
