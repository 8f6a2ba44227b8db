"""Trees of branches in the report, the live view and `why`: drawn, reachable, and never counted as rollouts."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from creditflow.cli import app
from creditflow.data import TrajectoryBatch
from creditflow.reports.detail import trajectory_graph
from creditflow.reports.index import Filter, Index
from creditflow.reports.overview import overview
from creditflow.reports.samples import samples
from creditflow.runs import Ledger, RunFolder
from tests.reports.browser import opened
from tests.reports.runs import HOSTILE, a_run, write_step
from tests.reports.test_page import reported, served
from tests.trees import tree_of_branches

REPLAY = {"propagation": "replay", "adv_estimator": "rloo", "outcome_to": "all", "group_by": "task_agent_turn"}


def a_tree_run(path: Path, **options: object) -> Ledger:
    folder = RunFolder.create(path, {"recipe": "trees", "engine": "local", "seed": 0, "config": {}}, "")
    batch = TrajectoryBatch.from_trajectories(tree_of_branches(HOSTILE, f"expected {HOSTILE}"))
    write_step(folder, 1, batch, **{**REPLAY, **options})
    return Ledger.open(path)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_tree_run(tmp_path_factory.mktemp("trees") / "run")


@pytest.fixture(scope="module")
def index(ledger: Ledger) -> Index:
    made = Index(ledger)
    made.refresh(ledger)
    return made


def test_overview_counts_rollouts_alone(ledger: Ledger, index: Index) -> None:
    found = overview(ledger, index)
    run = found["run"]
    assert (run["trajectories"], run["steps"], run["branches"], run["ended_right"]) == (2, 6, 4, 0.5)
    assert [row["steps"] for row in found["agents"]] == [2, 2, 2]
    assert [(row["trajectories"], row["ended_right"]) for row in found["hardest"]] == [(2, 0.5)]
    assert sum(cell["steps"] for cell in found["heat"]) == 6
    assert sum(map(sum, found["advantages"]["agents"].values())) == 6


def test_run_without_branches_has_none(tmp_path: Path) -> None:
    plain = a_run(tmp_path / "run", 1)
    index = Index(plain)
    index.refresh(plain)
    page = index.page(Filter(), 0, 100)
    assert page["total"] == 16
    assert {row["n_branches"] for row in page["trajectories"]} == {0}
    assert overview(plain, index)["run"]["branches"] == 0
    graph = trajectory_graph(plain.read(1), page["trajectories"][0]["trajectory_id"])
    assert (graph["branch"], graph["decision"]) == (None, None)
    assert {node["copy_of"] for node in graph["steps"]} == {None}


@pytest.mark.parametrize(("branches", "ids"), [(None, ["t", "other"]), ("with", ["t"]), ("without", ["other"])])
def test_list_has_rollouts_with_their_branches(index: Index, branches: str | None, ids: list[str]) -> None:
    page = index.page(Filter(branches=branches), 0, 10)
    assert page["total"] == len(ids)
    assert [row["trajectory_id"] for row in page["trajectories"]] == ids
    assert [row["n_branches"] for row in page["trajectories"]] == [4 if id == "t" else 0 for id in ids]


def test_filters_by_steps_ignore_steps_of_branches(index: Index) -> None:
    assert index.page(Filter(agent="executor", least_score=1.0), 0, 10)["total"] == 2


def test_decision_has_values_and_advantages_of_alternatives(ledger: Ledger) -> None:
    decision = trajectory_graph(ledger.read(1), "t")["decision"]
    assert (decision["at"], decision["agent"], decision["probability"], decision["weight"]) == (1, "executor", 0.25, 1)
    first, second, refused = decision["alternatives"]
    assert (first["mean"], first["advantage"], first["response"]) == (0.5, -0.5, "executor of t")
    assert (second["mean"], second["advantage"], second["response"]) == (1.0, 0.5, HOSTILE)
    assert (refused["mean"], refused["advantage"], refused["response"]) == (None, None, None)
    leaves = [[(leaf["trajectory_id"], leaf["return"]) for leaf in one["leaves"]] for one in decision["alternatives"]]
    assert leaves == [[("t", 1.0), ("t~0.1", 0.0)], [("t~1.0", 1.0), ("t~1.1", 1.0)], [("t~2.0", None)]]
    assert refused["leaves"][0]["reason"].startswith("refused: expected ")


def test_decision_under_another_rule_trains_no_branch(tmp_path: Path) -> None:
    decision = trajectory_graph(a_tree_run(tmp_path / "run", propagation="none").read(1), "t")["decision"]
    assert not decision["trained"]
    assert [one["mean"] for one in decision["alternatives"]] == [0.5, 1.0, None]
    assert [one["advantage"] is None for one in decision["alternatives"]] == [False, True, True]


def test_branch_names_its_rollout_and_its_copies(ledger: Ledger) -> None:
    recorded = ledger.read(1)
    expected = {
        "t~0.1": (0, 1, 2, ["t.0", "t.1", None]),
        "t~1.0": (1, 0, 1, ["t.0", None, None]),
        "t~1.1": (1, 1, 2, ["t.0", "t~1.0.1", None]),
    }
    for id, (alternative, continuation, first, copies) in expected.items():
        graph = trajectory_graph(recorded, id)
        place = {"of": "t", "alternative": alternative, "continuation": continuation, "first": first, "refused": None}
        assert graph["branch"] == place
        assert [node["copy_of"] for node in graph["steps"]] == copies
        assert graph["decision"] is None
    assert trajectory_graph(recorded, "t~2.0")["branch"]["refused"] == f"expected {HOSTILE}"


def test_samples_contain_the_branches_of_a_sample(ledger: Ledger, index: Index) -> None:
    found = samples(ledger, index, 10)
    assert [row["trajectory_id"] for row in found["trajectories"]] == ["other", "t"]  # wrong ones first
    ids = {"t", "other", "t~0.1", "t~1.0", "t~1.1", "t~2.0"}
    assert found["graphs"].keys() == {f"1 {id}" for id in ids}
    assert "1 t~1.1.1" not in found["steps"]  # a copy
    assert "1 t~1.1.2" in found["steps"]


def test_page_draws_the_tree_and_leads_to_branches_and_back(ledger: Ledger, tmp_path: Path) -> None:
    url = reported(tmp_path / "report.html", ledger.path)
    with served(ledger.path) as (live, _):
        for address in (url, live):
            with opened(address) as page:
                page.wait_for_selector("#list [data-trajectory]")
                title = page.title()
                assert "4\nbranches" in page.inner_text("#tiles")
                assert page.locator("#list tbody tr").count() == 2
                page.click('#list [data-trajectory="t"]')
                page.wait_for_selector("svg.tree")
                assert page.locator("svg.tree [data-alternative]").count() == 3
                assert page.locator("svg.tree [data-leaf]").count() == 5
                assert page.locator("svg.tree .value").all_text_contents() == ["0.500", "1.000", ""]
                rows = page.locator("#trajectory tbody tr").all_inner_texts()
                assert [row.split("\t")[3:5] for row in rows] == [["0.500", "2"], ["1.000", "2"], ["-", "1"]]
                assert [row.split("\t")[6] for row in rows] == ["-0.500", "+0.500", "not trained"]
                assert page.locator("#trajectory td.response").nth(1).inner_text() == HOSTILE
                page.locator('svg.tree [data-leaf="t~1.1"]').focus()
                page.keyboard.press("Enter")
                page.wait_for_selector("text=Branch t~1.1")
                assert page.locator("svg.trajectory g.copy").count() == 2
                assert page.get_attribute('svg.tree [data-leaf="t~1.1"]', "aria-current") == "true"
                page.click('svg.trajectory [data-step="t~1.1.1"]')
                page.wait_for_selector("text=Step t~1.0.1: executor")
                page.click('#trajectory .leaves [data-leaf="t~2.0"]')
                page.wait_for_selector("text=Refused: expected")
                page.click('#trajectory [data-trajectory="t"]')
                page.wait_for_selector("text=Trajectory t")
                page.click('svg.tree [data-alternative="1"]')
                page.wait_for_selector("text=Step t~1.0.1: executor")
                assert page.inner_text('[data-part="response"]') == HOSTILE
                assert "return of t~1.1" in page.inner_text('[data-part="why"]')
                page.select_option("#filter [name=branches]", "without")
                page.click("#filter button")
                page.wait_for_selector('#list [data-trajectory="t"]', state="detached")
                assert page.locator('#list [data-trajectory="other"]').count() == 1
                assert page.locator("#list tbody tr").count() == 1
                assert page.title() == title
                assert page.locator("img, script[src]").count() == 0


def test_page_without_branches_has_no_column_of_them(tmp_path: Path) -> None:
    plain = a_run(tmp_path / "run", 1)
    with opened(reported(tmp_path / "report.html", plain.path)) as page:
        page.wait_for_selector("#list [data-trajectory]")
        assert "branches" not in page.inner_text("#list")
        assert "branches" not in page.inner_text("#tiles")
        assert not page.is_visible("#branches")


def why(ledger: Ledger, *arguments: str) -> str:
    result = CliRunner().invoke(app, ["why", str(ledger.path), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_why_prints_the_alternatives_of_a_decision(ledger: Ledger) -> None:
    lines = why(ledger, "--trajectory", "t").splitlines()
    assert any(line.endswith("executor of t  <- decision") for line in lines)
    found = [line.split() for line in lines[-4:]]
    assert found[0][:3] == ["alternative", "mean", "return"]
    assert found[1][:3] == ["0", "0.500", "-0.500"]
    assert found[2][:3] == ["1", "1.000", "+0.500"]
    assert found[3][:3] == ["2", "-", "masked"]
    assert "t (1.00), t~0.1 (0.00)" in lines[-3]
    assert "\x1b" not in "".join(lines)


def test_why_marks_a_branch_and_its_copies(ledger: Ledger) -> None:
    output = why(ledger, "--trajectory", "t~1.1")
    assert output.startswith("branch t~1.1 of task q0")
    assert "branch:  of t, alternative 1, continuation 1, new from step 2" in output
    assert len(re.findall("<- copy$", output, re.MULTILINE)) == 2


def test_why_of_a_run_counts_rollouts_and_lists_no_copy(ledger: Ledger) -> None:
    output = why(ledger)
    assert output.startswith("training step 1: 6 steps of 2 trajectories, beside 4 branches")
    assert "frozen" not in output
