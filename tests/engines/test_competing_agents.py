"""A small real run of two agents with their own outcomes: training, ledger, `why`, `recredit` and the report."""

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from creditflow._utils.progress import Reporter
from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.credit import assign, explain
from creditflow.engines.local.rollouts import outcomes_differ
from creditflow.engines.local.trainer import train
from creditflow.reports.detail import trajectory_graph
from creditflow.runs import Ledger
from tests.builders import credit_options, make_trajectory, step
from tests.oracle.credit_oracle import credit_rows
from tests.paths import TOY

RIVALS = """
from creditflow import outcome

@outcome(range=(-1, 1))
def rivals(trajectory):
    critic = trajectory.answer[:1]
    if critic > "\\uff00":
        return {"*": 0.0, "writer": 0.5, "critic": None}   # the critic's outcome fails
    return zero_sum(trajectory)

@outcome(range=(-1, 1))
def zero_sum(trajectory):
    writer = 1.0 if trajectory.answer[:1] < "A" else -1.0
    return {"*": 0.0, "writer": writer, "critic": -writer}
"""


def creditflow(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def a_run(folder: Path, outcome: str, *overrides: str) -> Ledger:
    (folder / "rivals.py").write_text(RIVALS)
    functions = f"reward.functions=[{{fn: {folder}/rivals.py:{outcome}}}, {{fn: toy.py:compute_decomposed_reward}}]"
    options = [f"trainer.default_local_dir={folder}/run", functions, "trainer.test_freq=-1", *overrides]
    return Ledger.open(train(load_recipe(TOY, options), Reporter()).path)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("rivals"), "rivals", "reward.max_failed_frac=1")


def test_ledger_keeps_outcomes_of_agents_and_their_credit(ledger: Ledger) -> None:
    for recorded in ledger:
        batch, assignment = recorded.batch, recorded.assignment
        assert assignment is not None
        trajectories = batch.to_trajectories()
        assert all(set(t.outcomes) == {"writer", "critic"} and t.outcome.value == 0.0 for t in trajectories)
        rows = credit_rows(trajectories, assignment.options)
        np.testing.assert_allclose(assignment.credit.total_S, [row.credit for row in rows], rtol=1e-12, atol=1e-12)
        assert assignment.groups.trained_S.tolist() == [row.trained for row in rows]
        again = assign(batch, assignment.options)
        np.testing.assert_array_equal(again.advantage.advantage_S, assignment.advantage.advantage_S)
        for s in range(batch.n_steps):
            assert explain(assignment, s).replay() == assignment.advantage.advantage_S[s]


def test_why_and_report_show_the_outcome_of_the_steps_agent(ledger: Ledger, tmp_path: Path) -> None:
    recorded = next(iter(ledger))
    batch, assignment = recorded.batch, recorded.assignment
    learns = assignment.groups.trained_S & ~assignment.groups.tied_S & (assignment.groups.group_S >= 0)
    s = int(np.flatnonzero(learns & (batch.agent_of_step == batch.agent_names.index("critic")))[0])
    n = int(batch.trajectory_of_step[s])
    value = batch.outcomes_of_agents[n]["critic"].value
    assert f"outcome = {value:g}   # of critic" in creditflow("why", ledger.path, batch.step_ids[s])
    shown = creditflow("why", ledger.path, "--trajectory", batch.trajectory_ids[n])
    assert f"outcome of critic {value:g} in [-1, 1]" in shown
    assert trajectory_graph(recorded, batch.trajectory_ids[n])["outcomes"]["critic"] == value
    creditflow("report", ledger.path, "-o", tmp_path / "report.html")
    assert "outcome of " in (tmp_path / "report.html").read_text()


def test_recredit_reproduces_files_with_outcomes_of_agents(ledger: Ledger, tmp_path: Path) -> None:
    creditflow("recredit", ledger.path, "-o", tmp_path / "same")
    again = Ledger.open(tmp_path / "same")
    for training_step in ledger.steps:
        assert again.file(training_step).read_bytes() == ledger.file(training_step).read_bytes()
    creditflow("recredit", ledger.path, "-o", tmp_path / "other", "algorithm.propagation=identical")
    for recorded in Ledger.open(tmp_path / "other"):
        chosen = credit_options(propagation="identical", group_by="agent")
        expected = [row.credit for row in credit_rows(recorded.batch.to_trajectories(), chosen)]
        assert recorded.assignment.credit.total_S.tolist() == expected


@pytest.mark.parametrize(
    ("outcomes", "differ"),
    [([{"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}], True), ([{"a": 1.0, "b": 0.0}] * 2, False), ([{}, {}], False)],
)
def test_dynamic_sampling_keeps_groups_whose_agents_differ(outcomes, differ) -> None:
    """The common outcomes of a zero-sum game are equal."""
    group = [make_trajectory(f"t{n}", [step("a"), step("b")], 0.5, outcomes=own) for n, own in enumerate(outcomes)]
    assert outcomes_differ(group) == differ
