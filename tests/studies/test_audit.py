"""Tests of `creditflow audit`: of a run, and of imported trajectories."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result

from creditflow.credit import assign
from creditflow.data import Task, Trajectory, TrajectoryBatch, write_parquet
from creditflow.engines.local.final_steps import final_step_problem, messages_of_prompt
from creditflow.engines.local.values import DecisionValues
from creditflow.rollout.recorder import spelled
from creditflow.runs import Ledger
from creditflow.studies.decisions import decision_rows, rule_fidelities
from tests.builders import batch_of, credit_options, make_trajectory, step
from tests.cli.commands import creditflow, refused, toy_run
from tests.paths import TOY
from tests.rewards.judge_server import Answer, JudgeServer, Request

FUNCTIONS = TOY.with_name("toy.py")
SERVED = ["--endpoint", "http://127.0.0.1:1/v1", "--served-model", "m"]
NO_OUTCOME = ["--outcome", f"{FUNCTIONS}:compute_decomposed_reward"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    return toy_run(folder, "trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=1")


@pytest.fixture(scope="module")
def imported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trajectories of the first training step, as a Parquet file without its run."""
    file = tmp_path_factory.mktemp("imported") / "trajectories.parquet"
    write_parquet(Ledger.open(run).read(1).batch, file)
    return file


def audit(*arguments: object) -> Result:
    return creditflow("audit", *arguments)


def test_audit_prints_decisions_and_fidelity_by_rule(run: Path, tmp_path: Path) -> None:
    words = ("--decisions", 6, "--continuations", 2, "--rule", "identical", "--top", 3)
    done = audit(run, *words, "--json", tmp_path / "a.json")
    assert done.exit_code == 0, done.output
    assert "training step 2; checkpoint 1 acts: 6 of 16 decisions" in done.output
    for text in ("decisions that mattered most", "standard error", "agree", "noise ceiling", "in force", "identical"):
        assert text in done.output
    kept = json.loads((run / "audit/000002.json").read_text())
    assert kept == json.loads((tmp_path / "a.json").read_text())
    assert len(kept["decisions"]) == 6
    assert kept["probability"] == 6 / 16
    assert (kept["refused"], kept["failed"]) == (0, 0)
    recorded = Ledger.open(run).read(2)
    assert recorded.assignment is not None
    advantage = dict(zip(recorded.batch.step_ids, recorded.assignment.advantage.advantage_S.tolist(), strict=True))
    for row in kept["decisions"]:
        assert row["advantage"] == advantage[row["step_id"]]
        assert -1 <= row["value"] <= 1
    sizes = [abs(row["value"]) for row in kept["decisions"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(row["step_id"] in done.output for row in kept["decisions"]) == 3
    again = audit(run, *words, "--json", tmp_path / "b.json")
    assert again.exit_code == 0
    assert json.loads((tmp_path / "b.json").read_text()) == kept


def test_audit_of_an_imported_table_needs_its_recipe(imported: Path, tmp_path: Path) -> None:
    assert "no workflow to roll out its tasks again; name its recipe with --recipe" in refused("audit", imported)
    done = audit(
        imported, "reward.backend=inline", "--recipe", TOY, "--continuations", 2, "--json", tmp_path / "a.json"
    )
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "a.json").read_text())
    assert len(kept["decisions"]) == 16
    assert (kept["refused"], kept["failed"], kept["not_auditable"]) == (0, 0, {})
    assert {row["advantage"] for row in kept["decisions"]} == {None}
    assert 0 < kept["tokens"] <= 8 * 2 * (8 + 4 + 4)  # two continuations of each prefix, up to four tokens a step


def chat_trajectory(id: str, draft: str, answer: str) -> Trajectory:
    """A trajectory of the toy team with a model behind an endpoint: prompts are spelled out, tokens are unknown."""
    prompts = (
        [{"role": "system", "content": "Write."}, {"role": "user", "content": "Say 1."}],
        [{"role": "system", "content": "Judge."}, {"role": "user", "content": f"Say 1. {draft}"}],
    )
    made = make_trajectory(id, [step("writer", None), step("critic", None)], outcome=float(answer.isprintable()))
    made.task = Task("toy", ({"role": "user", "content": "Say 1."},), 1)
    for one, messages, response in zip(made.steps, prompts, (draft, answer), strict=True):
        one.prompt, one.response = spelled(messages), response
        one.prompt_ids = one.response_ids = one.response_mask = one.logprobs = ()
    return made


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.parquet"
    made = [chat_trajectory(*texts) for texts in (("a", "good", "yes"), ("b", "bad", "\x00"), ("c", "good", "yes"))]
    for one in made[2].steps:  # tokens of a tokenizer, which the endpoint does not have
        one.prompt_ids, one.response_ids, one.response_mask, one.logprobs = (1, 2), (3,), (1,), (-1.0,)
    write_parquet(TrajectoryBatch.from_trajectories(made), file)
    return file


def answer(request: Request) -> Answer:
    """The writer drafts `good`; the critic answers rightly after a good draft only."""
    system, said = (message["content"] for message in request.body["messages"])
    return Answer("good" if system == "Write." else "yes" if said.endswith("good") else "\x00", usage=(10, 3))


def test_audit_with_recipe_and_endpoint_continues_all_steps(chats: Path, tmp_path: Path) -> None:
    with JudgeServer(answer) as server:
        done = audit(chats, "--recipe", TOY, "--endpoint", server.url, "--served-model", "m", "--continuations", 2,
                     "--json", tmp_path / "a.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "a.json").read_text())
    values = {row["step_id"]: row["value"] for row in kept["decisions"]}
    # The bad draft loses the outcome that the endpoint's writer always earns; the answers add nothing to their drafts.
    assert values == {"a.0": 0, "b.0": -1, "c.0": 0, "a.1": 0, "b.1": 0, "c.1": 0}
    assert kept["tokens"] == 3 * 2 * (1 + 2 + 1) * 3


def test_audit_with_an_endpoint_alone_samples_final_steps(chats: Path, tmp_path: Path) -> None:
    with JudgeServer(answer) as server:
        done = audit(chats, "--endpoint", server.url, "--served-model", "m", "--continuations", 2,
                     "--outcome", f"{FUNCTIONS}:first_byte_is_printable", "--json", tmp_path / "a.json")  # fmt: skip
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "a.json").read_text())
    assert {row["step_id"]: row["value"] for row in kept["decisions"]} == {"a.1": 0, "b.1": 0, "c.1": 0}
    (reason,) = kept["not_auditable"]
    assert kept["not_auditable"][reason] == 3
    assert "only the workflow can make them again" in reason
    assert f"not auditable: 3 steps: {reason}" in done.output
    prompts = {message["content"] for request in server.requests for message in request.body["messages"]}
    assert prompts == {"Judge.", "Say 1. good", "Say 1. bad"}


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("chats", SERVED[:2], "--outcome: expected an outcome function"),
        ("chats", [*SERVED[:2], "--outcome", f"{FUNCTIONS}:solve"], "--served-model"),
        ("chats", ["--recipe", TOY, "--endpoint", "ftp://x", "--served-model", "m"], "--endpoint"),
        ("chats", ["--recipe", TOY, *SERVED, "--model", "x"], "--model, --endpoint: expected one of them"),
        ("chats", [*SERVED, *NO_OUTCOME], "--outcome: expected an outcome function, got"),
        ("run", ["--recipe", TOY], "--recipe: is for imported trajectories"),
        ("run", ["data.seed=1"], "KEY=VALUE: is for imported trajectories"),
        ("run", ["--rule", ""], "--rule: expected the name of a rule, or options of credit, got nothing"),
        ("run", ["--rule", "gama=1"], "did you mean 'gamma'?"),
        ("run", ["--training-step", "7"], "expected a training step that is on record (1 to 2), got 7"),
    ],
)
def test_audit_refuses_bad_input(request: pytest.FixtureRequest, source: str, options: list, said: str) -> None:
    assert said in refused("audit", request.getfixturevalue(source), *options)


def test_audit_of_an_earlier_step_names_who_acts(run: Path) -> None:
    model, few = run / "checkpoints/global_step_2", ("--training-step", 1, "--decisions", 2, "--continuations", 2)
    with_model = audit(run, *few, "--model", model)
    assert with_model.exit_code == 0, with_model.output
    assert f"training step 1; {model} acts: 2 of 16 decisions" in with_model.output
    assert "training step 1; the initial model acts" in audit(run, *few).output


def test_audit_without_a_checkpoint_requires_a_model(run: Path, tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    for name in ("run.json", "config.yaml", "steps/000001.parquet"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    message = "expected a checkpoint of the embedded engine, found none; name a model with --model"
    assert message in refused("audit", tmp_path)
    (tmp_path / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()) | {"engine": "verl"}))
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    assert "name a model with --model" in refused("audit", tmp_path)


def test_audit_checks_its_folder_before_rollouts(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("audit"))
    (tmp_path / "run/audit").write_text("in the way")
    assert "audit cannot be made: File exists" in refused("audit", tmp_path / "run")


def test_audit_lists_steps_of_unknown_agents_as_not_auditable(tmp_path: Path) -> None:
    made = chat_trajectory("a", "good", "yes")
    made.steps[1].agent = "stranger"
    write_parquet(TrajectoryBatch.from_trajectories([made]), tmp_path / "a.parquet")
    with JudgeServer(answer) as server:
        done = audit(tmp_path / "a.parquet", "--recipe", TOY, "--endpoint", server.url, "--served-model", "m",
                     "--continuations", 2)  # fmt: skip
    assert "1 steps: the recipe's team has no agent stranger" in done.output


def test_prompts_are_read_back_as_messages() -> None:
    messages = [
        {"role": "system", "content": "Be brief.\n\nAlways [truly]\nbrief."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "[x]\n"},
    ]
    assert messages_of_prompt(spelled(messages)) == messages
    assert messages_of_prompt("<|user|>Hi") is None
    assert messages_of_prompt("") is None


def test_final_step_problems_name_the_reason() -> None:
    made = chat_trajectory("a", "good", "yes")
    assert "later steps depend on it" in final_step_problem(made, 0)
    assert final_step_problem(made, 1) == ""
    made.answer_steps = (0, 1)
    assert "the answer comes from other steps too" in final_step_problem(made, 1)
    made.answer_steps, made.steps[1].prompt = (), "<|user|>Hi"
    assert "not recorded as chat messages" in final_step_problem(made, 1)


def test_decisions_are_ranked_and_compared_in_sign() -> None:
    trajectories = [
        make_trajectory(f"p{n}", [step("one", good, tokens=1), step("two", 1.0, tokens=1)], outcome=good, task="q")
        for n, good in enumerate([1.0, 0.0])
    ]
    batch = batch_of(*trajectories)
    assignment = assign(batch, credit_options(propagation="none", group_by="agent"))
    step_D, after_DK = np.arange(4), np.array([[0.9, 1.0], [1.0, 1.0], [0.4, 0.6], [math.nan, math.nan]])
    before_DK = np.array([[0.4, 0.5], [0.4, 1.0], [0.0, 0.1], [0.0, 0.0]])
    values = DecisionValues(batch.group_of_trajectory[batch.trajectory_of_step], after_DK, before_DK)
    rows = decision_rows(batch, step_D, values, assignment)
    assert [row.step_id for row in rows] == ["p0.0", "p1.0", "p0.1", "p1.1"]
    assert rows[0].advantage == assignment.advantage.advantage_S[0]
    assert [row.agrees for row in rows] == ["yes", "no", "unclear", ""]
    assert decision_rows(batch, step_D, values, None)[0].agrees == ""
    (found,) = rule_fidelities({"none": assignment}, step_D, values)
    assert (found.rule, found.credit.decisions) == ("none", 3)
