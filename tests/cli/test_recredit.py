"""`creditflow recredit` on small real runs: the same trajectories under other settings."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from creditflow.config import credit_overrides
from creditflow.credit import assign
from creditflow.credit.analysis.difference import moved
from creditflow.reports.overview import different
from creditflow.reports.overview import settings as settings_of
from creditflow.reports.run_report import indexed
from creditflow.runs import Ledger, RunFolder
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.reassignment import reassigned, reassigned_step
from tests.builders import credit_options
from tests.cli.commands import creditflow, refused, toy_run

QUANTILE = "algorithm.propagation_threshold={kind: quantile, target_pass_rate: 0.5, range: [0.0, 0.9], floor: 0.5}"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return Ledger.open(toy_run(tmp_path_factory.mktemp("recredit") / "run"))


def different_settings(*folders: Path) -> dict[str, list]:
    ledgers = map(Ledger.open, folders)
    return different([settings_of(ledger, indexed(ledger)) for ledger in ledgers])


def rows(text: str, title: str) -> dict[str, list[str]]:
    """The table under `title`: the cells of each row by its first cell."""
    lines = text.split(title)[1].splitlines()[2:]
    table = lines[: next((i for i, line in enumerate(lines) if i > 2 and not line.strip()), len(lines))]
    return {line.split()[0]: line.split()[1:] for line in table if line.strip()}


def test_recredit_without_changes_reproduces_every_file(ledger: Ledger, tmp_path: Path) -> None:
    result = creditflow("recredit", ledger.path, "-o", tmp_path / "same")
    assert result.exit_code == 0, result.output
    again = Ledger.open(tmp_path / "same")
    assert again.steps == ledger.steps
    for step in ledger.steps:
        assert again.file(step).read_bytes() == ledger.file(step).read_bytes()
    assert rows(result.stdout, "changes of credit")["all"] == ["32", "0.0%", "0.0%", "0", "0"]
    assert "\nrule: {rule: threshold, w_r: 1.0, " in result.stdout


ADAPTIVE = {
    "quantile": (QUANTILE,),
    "noise": ("algorithm.propagation_threshold={kind: noise}",),
    "scores": ("algorithm.propagation=calibrated",),
}


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_recredit_reproduces_adaptive_parts(tmp_path: Path, kind: str) -> None:
    options = (*ADAPTIVE[kind], "trainer.total_training_steps=3", "trainer.test_freq=2")
    ledger = Ledger.open(toy_run(tmp_path / "run", *options))
    for changed in ({}, credit_overrides(ADAPTIVE[kind])):
        for recorded, assignment in reassigned(ledger, changed):
            assert assignment is not None
            assert recorded.assignment is not None
            np.testing.assert_array_equal(assignment.credit.threshold_S, recorded.assignment.credit.threshold_S)
            np.testing.assert_array_equal(assignment.advantage.advantage_S, recorded.assignment.advantage.advantage_S)
            assert assignment.history.to_json() == recorded.assignment.history.to_json()
            facts, recorded_facts = (a.fit and a.fit.facts for a in (assignment, recorded.assignment))
            assert facts == recorded_facts
    last = ledger.read(3).assignment
    assert last is not None
    alone = reassigned_step(ledger, ledger.read(3), credit_overrides(ADAPTIVE[kind]))
    np.testing.assert_array_equal(alone.advantage.advantage_S, last.advantage.advantage_S)
    alone = reassigned_step(ledger, ledger.read(3), credit_overrides(["algorithm.propagation=posterior"]))
    assert len(alone.history.observations) == 2  # of both earlier training steps
    assert last.history.parts if kind == "scores" else set(last.credit.threshold_S) != {0.5}


def test_recredit_applies_another_rule(ledger: Ledger, tmp_path: Path) -> None:
    result = creditflow(
        "recredit", ledger.path, "algorithm.propagation=identical", "group_by=task", "-o", tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    other = Ledger.open(tmp_path / "out")
    total = moved = flipped = 0.0
    for step in ledger.steps:
        old, new = ledger.read(step).assignment, other.read(step).assignment
        assert old is not None
        assert new is not None
        expected = assign(old.batch, credit_options(propagation="identical", group_by="task"))
        np.testing.assert_array_equal(new.advantage.advantage_S, expected.advantage.advantage_S)
        moved += float(np.abs(new.credit.total_S - old.credit.total_S).sum())
        total += float((np.abs(new.credit.total_S) + np.abs(old.credit.total_S)).sum())
        flipped += int(((new.advantage.advantage_S * old.advantage.advantage_S) < 0).sum())
    cells = rows(result.stdout, "changes of credit")["all"]
    assert cells[:3] == ["32", f"{moved / total:.1%}", f"{flipped / 32:.1%}"]
    assert [row["step"] for row in read_metrics(tmp_path / "out")] == [1, 2]


def test_recredit_spells_out_a_preset(ledger: Ledger, tmp_path: Path) -> None:
    settings = ("propagation.w_o=0.5", "preset=calibrated", "propagation.w_m=0.25")
    result = creditflow("recredit", ledger.path, *settings, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assignment = Ledger.open(tmp_path / "out").read(1).assignment
    assert assignment is not None
    assert assignment.options == credit_options(propagation="calibrated", w_m=0.25, group_by="task_agent")
    assert "did you mean 'magrpo'" in refused("recredit", ledger.path, "preset=magrp")


@pytest.mark.parametrize("settings", [("preset=gigpo",), ("propagation=irc", "adv_estimator=relative")])
def test_recredit_to_a_rule_that_compares_trajectories(ledger: Ledger, tmp_path: Path, settings: tuple[str]) -> None:
    result = creditflow("recredit", ledger.path, *settings, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert Ledger.open(tmp_path / "out").read(1).assignment.options.propagation.relative
    result = creditflow("recredit", tmp_path / "out", "propagation=own", "adv_estimator=rloo", "-o", tmp_path / "back")
    assert result.exit_code == 0, result.output


def test_gates_are_compared_only_if_both_rules_have_them(ledger: Ledger, tmp_path: Path) -> None:
    batch = ledger.read(1).batch
    own, open_, closed = (
        assign(batch, credit_options(propagation=name, propagation_threshold=theta))
        for name, theta in (("own", 0.0), ("threshold", 0.0), ("threshold", 1.0))
    )
    assert sum(change.gates for change in moved(open_, closed).values()) > 0
    both_ways = [*moved(own, closed).values(), *moved(closed, own).values()]
    assert {change.gates for change in both_ways} == {0}
    assert "gates changed" not in creditflow("recredit", ledger.path, "propagation=own", "-o", tmp_path / "own").stdout


def test_recredited_run_is_read_by_why_and_report(ledger: Ledger) -> None:
    assert creditflow("recredit", ledger.path, "algorithm.propagation.w_o=0.5").exit_code == 0
    folder = ledger.path / "recredited" / "algorithm.propagation.w_o=0.5"
    assert Ledger.open(folder).run["changed"] == {"propagation": {"w_o": 0.5}}
    why = creditflow("why", folder, ledger.read(1).batch.step_ids[0])
    assert "w_o = 0.5" in why.stdout
    twice = creditflow("recredit", folder, "gamma=0.5", "propagation.w_r=2", "-o", folder.parent / "twice")
    assert twice.exit_code == 0, twice.output
    assert Ledger.open(folder.parent / "twice").run["changed"] == {"propagation": {"w_o": 0.5, "w_r": 2}, "gamma": 0.5}
    assert creditflow("report", ledger.path, folder, "-o", folder.parent / "r.html").exit_code == 0
    assert different_settings(ledger.path, folder) == {"algorithm.propagation.w_o": [1.0, 0.5]}
    again = refused("recredit", ledger.path, "algorithm.propagation.w_o=0.5")
    assert again == f"RUN: {folder} exists and is not an empty folder; name another one with -o"
    below = folder / "run.json" / "mine"
    message = refused("recredit", ledger.path, "gamma=0.5", "-o", below)
    assert message == f"-o: {below.with_name('.mine.part')} cannot be made: Not a directory"
    (folder.parent / "full").mkdir()
    (folder.parent / "full" / "kept.txt").write_text("mine")
    for name in ("full", "full/kept.txt"):
        message = refused("recredit", ledger.path, "algorithm.propagation.w_o=0.5", "-o", folder.parent / name)
        assert message == f"-o: {folder.parent / name} exists and is not an empty folder; name another one with -o"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("algorithm.gama=1", "expected an option of credit (did you mean 'gamma'?)"),
        ("gamma", "gamma: expected key=value"),
        ("data.seed=1", "expected an option of credit"),
        ("group_by=ajar", "algorithm.group_by: expected one of task, task_agent, "),
        ("propagation=replay", "removed in 0.1: use `own`"),
        ("algorithm.shadow={propagation: own}", "recredit already computes a second assignment"),
    ],
)
def test_invalid_settings_are_refused_and_write_nothing(ledger: Ledger, override: str, says: str) -> None:
    before = sorted(ledger.path.rglob("*"))
    assert says in refused("recredit", ledger.path, override)
    assert sorted(ledger.path.rglob("*")) == before


def test_interrupted_recredit_leaves_no_folder(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, written = RunFolder.write_steps, []

    def breaks(self: RunFolder, step: int, *args: object) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(step)
        write(self, step, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(RunFolder, "write_steps", breaks)
    assert creditflow("recredit", ledger.path, "propagation.w_o=3", "-o", tmp_path / "out").exit_code == 130
    assert written
    assert list(tmp_path.iterdir()) == []


def test_every_reader_sets_a_torn_file_aside(ledger: Ledger, tmp_path: Path) -> None:
    run = shutil.copytree(ledger.path, tmp_path / "run")
    torn = run / ledger.file(2).relative_to(ledger.path)
    torn.write_bytes(torn.read_bytes()[:1000])
    assert Ledger.open(run).steps == (1,)
    step = ledger.read(1).batch.step_ids[0]
    for command in (["recredit", run], ["report", run, "-o", tmp_path / "report.html"], ["why", run, step]):
        result = creditflow(*command)
        assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"set aside: {torn} is incomplete, a crash cut it off"


def test_gae_is_refused_for_a_run_without_a_critic(ledger: Ledger) -> None:
    assert "gae expects a critic's values" in refused("recredit", ledger.path, "adv_estimator=gae")


def test_recredit_keeps_steps_without_assigned_credit(ledger: Ledger, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", ledger.run, (ledger.path / "config.yaml").read_text())
    folder.write_steps(1, ledger.read(1).batch)
    result = creditflow("recredit", folder.path, "propagation.w_o=2", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert Ledger.open(tmp_path / "out").read(1).assignment is None
    assert json.loads((tmp_path / "out" / "run.json").read_text())["recredited_from"] == str(folder.path.resolve())


def test_recredit_keeps_a_fallback_of_the_guard(ledger: Ledger, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", ledger.run, (ledger.path / "config.yaml").read_text())
    batch = ledger.read(1).batch
    folder.write_steps(1, batch, assign(batch, credit_options(propagation="threshold")))
    folder.write_steps(2, batch, assign(batch, credit_options(propagation="identical")))
    for i, override in enumerate(("propagation.theta=0.3", "propagation_threshold=0.3")):
        result = creditflow("recredit", folder.path, override, "-o", tmp_path / str(i))
        assert result.exit_code == 0, result.output
        assert "training step 2: the guard's fallback, the rule identical, stays in force" in result.stdout
        again = Ledger.open(tmp_path / str(i))
        assert again.read(1).assignment.options.propagation.theta == 0.3
        assert again.file(2).read_bytes() == Ledger.open(folder.path).file(2).read_bytes()
    result = creditflow("recredit", folder.path, "propagation=own", "-o", tmp_path / "own")
    assert Ledger.open(tmp_path / "own").read(2).assignment.options.propagation.name == "own"
    assert "stays in force" not in result.stdout
    assert "the rule own has no such option" in refused("recredit", tmp_path / "own", "propagation.theta=0.3")


def test_settings_of_mappings_differ_key_by_key(ledger: Ledger, tmp_path: Path) -> None:
    assert credit_overrides(["gamma=9e-1", "algorithm.group_by=task"]) == {"gamma": 0.9, "group_by": "task"}
    changes = ("propagation_threshold={kind: noise}", "reward.decomp_granularity=agent")
    assert creditflow("recredit", ledger.path, *changes, "-o", tmp_path / "other").exit_code == 0
    changed = different_settings(ledger.path, tmp_path / "other")
    assert changed["algorithm.propagation.theta.kind"] == [None, "noise"]
    assert changed["reward.decomp_granularity"] == ["step", "agent"]
    assert "algorithm.decomp_granularity" not in changed


def test_share_moved_of_opposite_credit_is_one(ledger: Ledger) -> None:
    before = ledger.read(1).assignment
    assert before is not None
    for total_S, expected in ((before.credit.total_S, 0.0), (-before.credit.total_S, 1.0)):
        credit = replace(before.credit, total_S=total_S)
        shares = [change.share_moved for change in moved(before, replace(before, credit=credit)).values()]
        assert [share for share in shares if not math.isnan(share)] == pytest.approx([expected] * len(shares))
