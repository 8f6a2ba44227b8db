"""The driver of the studies of credit: blocks of comparable runs, tuned rates, tables and the criterion."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import studies, which_credit
from benchmarks.studies import ARMS, GAIN, GRPO, MEAN, OWN, STUDIES, Case, Study
from benchmarks.which_credit import Board, Run, rates_to_try, report, rows, table_lines, winner
from creditflow.config import load_recipe
from creditflow.plugins.model_rewards.information_gain import InformationGain
from tests.paths import ROOT

MACHINE = {"code": "c1", "commit": "a1", "processor": "p1", "versions": {"torch": "2"}, "date": "2026-11-30"}
STUDY = Study(
    {"one": Case("arithmetic_chain"), "two": Case("arithmetic_chain")},
    (GRPO, OWN),
    {"arithmetic_chain": (1e-4, 2e-4, 4e-4)},
    ("one",),
    seeds=range(20, 26),
)


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Board:
    """A board whose runs end at once, in this process, with the score of `pass_rate`."""
    monkeypatch.setattr(which_credit, "machine", lambda: MACHINE)
    monkeypatch.setattr(which_credit, "code", lambda: MACHINE["code"])
    monkeypatch.setattr(which_credit, "WORK", tmp_path)
    monkeypatch.setattr(which_credit, "in_parallel", lambda jobs, title, folder: [job.work() for job in jobs])
    monkeypatch.setattr(Run, "train", lambda run, facts, folder: line_of(run, facts))
    return Board("test", STUDY, tmp_path)


def pass_rate(run: Run) -> float:
    """Best at the rate 8e-4; `own` is 5 to 15 points above `grpo`, by seed."""
    rate, seed = math.log2(float(run.rate) / 8e-4), run.seed % 10
    return 0.5 - 0.02 * abs(rate) + (0.05 + 0.02 * seed if run.arm == OWN else 0.01 * (seed % 3))


def line_of(run: Run, facts: Mapping[str, Any], **other: Any) -> dict[str, Any]:
    named = dict(zip(("case", "arm", "rate"), run.key, strict=True))
    measured = {
        **{"pass_at_1": [pass_rate(run)] * 3, "pass_at_1_greedy": [0.9] * 3, "step_error_rate": [0.1] * 3},
        **{"tokens": 10, "processor_s": 1},
        **{"seed": run.seed, "settings": run.settings_hash, "weights": f"w{run.seed}"},
    }
    return {**named, **measured, **facts, **other}


def trained(board: Board) -> list[Run]:
    """Tune and train the whole study; returns its final runs."""
    while runs := board.tuning_runs(STUDY.arms):
        board.do(runs, math.inf)
    final = board.final_runs(STUDY.arms, tuple(STUDY.cases), STUDY.seeds)
    assert board.do(final, math.inf)
    return final


# Blocks


def test_finished_run_is_not_repeated(board: Board) -> None:
    final = trained(board)
    before = board.file(20).read_text()
    assert len(before.splitlines()) == 4
    assert board.missing(final) == []
    lines = before.splitlines()
    board.file(20).write_text("\n".join(lines[:2]) + "\n")
    assert [run.seed for run in board.missing(final)] == [20, 20]
    board.do(final, math.inf)
    assert board.file(20).read_text() == before


def test_repeated_block_is_compared_with_the_kept_one(board: Board, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [board.run("one", arm, "1.0e-04", 20) for arm in (GRPO, OWN)]
    board.do(runs[:1], math.inf)
    before = board.file(20).read_text()
    board.repeat(runs, math.inf)
    assert "1 of 1 repeated runs have the same pass@1 as before" in capsys.readouterr().out
    assert board.file(20).read_text() == before


def test_run_during_which_the_code_changed_is_not_kept(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which_credit, "code", lambda: "c2")
    with pytest.raises(ValueError, match="the measured code changed during a run"):
        board.do([board.run("one", GRPO, "1.0e-04", 20)], math.inf)
    assert board.lines(20) == {}


@pytest.mark.parametrize(("option", "value"), [("arms", "best"), ("cases", "hard"), ("seeds", "100")])
def test_unknown_part_of_a_study_is_refused(
    option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["which_credit", "small", f"--{option}", value])
    with pytest.raises(SystemExit):
        which_credit.main()
    assert f"--{option}: expected some of " in capsys.readouterr().err


def test_no_run_begins_after_the_time_limit(board: Board) -> None:
    runs = board.tuning_runs(STUDY.arms)
    assert not board.do(runs, -math.inf)
    assert board.missing(runs) == runs


@pytest.mark.parametrize("fact", ["code", "processor", "versions"])
def test_block_of_another_machine_is_not_continued(board: Board, fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, other = (board.run("one", arm, "1.0e-04", 20) for arm in (GRPO, OWN))
    board.do([run], math.inf)
    monkeypatch.setattr(which_credit, "machine", lambda: {**MACHINE, fact: "other"})
    with pytest.raises(ValueError, match=rf"seed20\.jsonl: .*one of own in one: {fact}: .*remove the file"):
        board.missing([other])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"settings": "other"}, "settings: other, "),
        ({"seed": 21}, "seed: 21, 20"),
        ({"case": "three"}, "not a run of test: KeyError"),
        ({}, "another line has this case, arm and rate"),
        (None, "not a run of test: JSONDecodeError"),
    ],
)
def test_line_that_is_no_run_of_its_block_is_refused(board: Board, changed: dict | None, reason: str) -> None:
    board.do([board.run("one", arm, "1.0e-04", 20) for arm in (GRPO, OWN)], math.inf)
    first, second = board.file(20).read_text().splitlines()
    text = second[:40] if changed is None else json.dumps({**json.loads(second if changed else first), **changed})
    board.file(20).write_text(f"{first}\n{text}\n")
    with pytest.raises(ValueError, match=rf"seed20\.jsonl:2: {reason}"):
        rows(board)


def test_line_of_other_options_is_not_taken_for_the_same(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    run = board.run("one", GRPO, "1.0e-04", 20)
    board.keep({**line_of(run, MACHINE), "config": run.config_hash})
    assert board.missing([run]) == []
    monkeypatch.setattr(Run, "config_hash", "a default has changed")
    with pytest.raises(ValueError, match="config: "):
        board.missing([run])


def test_arms_of_a_block_have_one_set_of_weights(board: Board) -> None:
    run, other = (board.run("one", arm, "1.0e-04", 20) for arm in (GRPO, OWN))
    board.keep(line_of(run, MACHINE))
    with pytest.raises(ValueError, match="grpo and own have other weights"):
        board.keep(line_of(other, MACHINE, weights="w0"))


@pytest.mark.parametrize("fact", ["weights", "code", "processor", "versions", "commit"])
def test_table_refuses_runs_that_are_not_comparable(board: Board, fact: str) -> None:
    trained(board)
    lines = [json.loads(line) for line in board.file(22).read_text().splitlines()]
    changed = [{**line, fact: "other"} if line["arm"] == OWN else line for line in lines]
    board.file(22).write_text("".join(json.dumps(line) + "\n" for line in changed))
    if fact == "commit":
        assert len(rows(board)) == 2  # equal code has an equal hash under any commit
        return
    with pytest.raises(ValueError, match=rf"seed22\.jsonl: grpo and own in one are not comparable: {fact}: .*, other"):
        rows(board)


def test_table_refuses_an_arm_with_several_rates(board: Board) -> None:
    trained(board)
    board.file(22).unlink()
    board.do([board.run(case, arm, "1.0e-04", 22) for case in STUDY.cases for arm in STUDY.arms], math.inf)
    with pytest.raises(ValueError, match=r"in one has the rates \['1.0e-04', '8.0e-04'\]"):
        rows(board)


# Rates


def test_rates_extend_until_the_best_is_inside(board: Board) -> None:
    trained(board)
    assert sorted(board.means("arithmetic_chain", OWN)) == ["1.0e-04", "1.6e-03", "2.0e-04", "4.0e-04", "8.0e-04"]
    assert board.best_rate("arithmetic_chain", OWN) == "8.0e-04"


def test_rate_of_a_group_is_tuned_on_its_cases_alone(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_case(run: Run) -> float:
        return 0.5 - abs(math.log2(float(run.rate) / (2e-4 if run.case == "two" else 4e-4)))

    monkeypatch.setitem(globals(), "pass_rate", by_case)
    cases = {**STUDY.cases, "two": Case("arithmetic_chain", rates="two"), "three": Case("arithmetic_chain")}
    rates = dict.fromkeys(("arithmetic_chain", "two"), (1e-4, 2e-4, 4e-4))
    board = replace(board, study=replace(STUDY, cases=cases, rates=rates, tuning_cases=("one", "two")))
    while runs := board.tuning_runs(STUDY.arms):
        board.do(runs, math.inf)
    found = {run.case: run.rate for run in board.final_runs(STUDY.arms, tuple(cases), (20,))}
    assert found == {"one": "4.0e-04", "two": "2.0e-04", "three": "4.0e-04"}


def test_arms_of_a_case_are_tuned_on_equal_cases() -> None:
    study = STUDIES["small"]
    for case in study.cases.values():
        tuned = [name for name in study.tuning_cases if study.cases[name].group == case.group]
        assert tuned
        valid = {arm: study.cases_of(arm) for arm in study.arms}
        assert all(set(tuned) <= set(of) or not set(tuned) & set(of) for of in valid.values())


def test_untuned_arm_has_no_rate(board: Board) -> None:
    with pytest.raises(LookupError, match="the rate of posterior in arithmetic_chain is not tuned"):
        board.best_rate("arithmetic_chain", "posterior")


def test_next_rate_is_beyond_the_end_with_the_best() -> None:
    first = (1e-4, 2e-4)
    assert rates_to_try({"1.0e-04": 0.5}, first) == ["2.0e-04"]
    assert rates_to_try({"1.0e-04": 0.5, "2.0e-04": 0.4}, first) == ["5.0e-05"]
    assert rates_to_try({"1.0e-04": 0.5, "2.0e-04": 0.6}, first) == ["4.0e-04"]
    assert rates_to_try({"1.0e-04": 0.5, "2.0e-04": 0.4, "5.0e-05": 0.3}, first) == []
    assert rates_to_try({"1.0e-04": 0.5, "2.0e-04": 0.4, "1.0e-05": 0.6}, first) == []  # far below the first rates
    assert rates_to_try({"1.0e-04": 0.5, "2.0e-04": 0.5}, first) == []  # the arm learns nothing


# Tables


def test_table_has_paired_t_intervals(board: Board) -> None:
    runs = trained(board)
    own, grpo = rows(board)
    assert (own.arm, own.seeds, grpo.arm) == (OWN, 6, GRPO)
    differences = [pass_rate(a) - pass_rate(b) for b, a in zip(runs[::2], runs[1::2], strict=True)]
    by_seed = np.array(differences).reshape(6, 2).mean(axis=1)
    low, high = stats.t.interval(0.95, 5, by_seed.mean(), stats.sem(by_seed))
    found = own.above[GRPO][MEAN]
    assert (found.mean, found.low, found.high) == pytest.approx((by_seed.mean(), low, high))
    lines = table_lines([own, grpo])
    (line,) = [
        line for line in lines[lines.index("| above `grpo` | one | two | mean |") :] if line.startswith("| own |")
    ]
    assert line.endswith(f"{100 * by_seed.mean():+.1f} [{100 * low:+.1f}, {100 * high:+.1f}] |")


def test_table_of_few_seeds_has_no_interval(board: Board) -> None:
    few = replace(board, study=replace(STUDY, seeds=range(20, 24)))
    trained(board)
    own, _ = rows(few)
    assert own.seeds == 4
    assert math.isnan(own.above[GRPO][MEAN].low)
    assert not any("[" in line for line in table_lines(rows(few)))
    assert winner(rows(few)) is None
    own, grpo = rows(board)
    assert winner([own, grpo]) == OWN
    assert winner([replace(own, arm="better", seeds=4), own, grpo]) is None


def test_winner_is_no_worse_than_own_in_any_case(board: Board) -> None:
    trained(board)
    own, grpo = rows(board)
    better = replace(own, arm="better")
    assert winner([better, own, grpo]) == "better"
    low = replace(own.above[OWN]["two"], low=-0.021)
    risky = replace(better, above={**own.above, OWN: {**own.above[OWN], "two": low}})
    assert winner([risky, own, grpo]) == OWN
    unproven = replace(better, above={**own.above, GRPO: {MEAN: replace(own.above[GRPO][MEAN], low=-0.001)}})
    assert winner([unproven, own, grpo]) == OWN


def test_arm_of_some_cases_is_trained_and_shown_in_these(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "ONLY_IN", {GAIN: ("one",)})
    arms = (*STUDY.arms, GAIN)
    while runs := board.tuning_runs(arms):
        board.do(runs, math.inf)
    final = board.final_runs(arms, tuple(STUDY.cases), STUDY.seeds)
    assert {run.case for run in final if run.arm == GAIN} == {"one"}
    board.do(final, math.inf)
    own, _, gain = table = rows(board)
    assert (gain.arm, list(gain.means["pass_at_1"]), list(gain.above[OWN])) == (GAIN, ["one"], ["one"])
    assert winner(table) == OWN
    assert next(line for line in table_lines(table) if line.startswith(f"| {GAIN} |")).endswith(" |  |  |")
    assert board.study.cases_of(OWN) == ["one", "two"]
    better = replace(gain, above={**gain.above, OWN: {"one": replace(own.above[GRPO]["one"], low=1.0)}})
    assert winner([better, *table]) == OWN


def test_information_gain_of_the_arm_is_loaded() -> None:
    run = Board("small", STUDIES["small"]).run("outcome only", GAIN, "1.0e-04", 20)
    config = load_recipe(run.recipe, run.settings).config
    *judged, gain = config.reward.functions
    assert [entry.weight for entry in judged[1:]] == [0, 0, 0]
    assert (gain.fn, gain.weight) == ("information_gain", None)
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["creditflow.rewards"]
    module, _, name = points[gain.fn].partition(":")
    InformationGain(**gain.args)
    assert getattr(import_module(module), name) is InformationGain


def test_report_writes_each_difference_and_the_default(
    board: Board, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    written: dict[str, Any] = {}
    page = tmp_path / "page.md"
    marks = [
        f"<!-- made by `{of}` -->\n<!-- to here -->\n"
        for of in (f"{which_credit.COMMAND}, test", which_credit.HEADLINE)
    ]
    page.write_text("".join(marks))
    monkeypatch.setattr(which_credit, "PAGE", page)
    monkeypatch.setattr(which_credit, "README", page)
    monkeypatch.setattr(
        which_credit,
        "write",
        lambda name, figures, packages, measured, details: written.update(details, figures=figures),
    )
    monkeypatch.setattr(which_credit, "measured_by", lambda commit_of: {"commits": commit_of})
    trained(board)
    few = replace(board, study=replace(STUDY, seeds=range(20, 24)))
    assert report([few]) == 0
    assert written["studies"]["test"]["default"] is None
    assert "default by the criterion: not enough seeds" in capsys.readouterr().out
    assert {(figure.spread, figure.hold) for figure in written["figures"]} == {(None, None)}
    tried = [board.run(case, "dr_mas", "1.0e-04", 20) for case in STUDY.cases]  # an arm that the study does not compare
    board.do(tried, math.inf)
    assert report([board]) == 0
    assert written["studies"]["test"]["default"] == OWN
    assert [figure.what.partition(": ")[2] for figure in written["figures"]] == [
        "pass@1, own - grpo, mean",
        "pass@1, own - grpo, mean, lower end",
        "pass@1, grpo - own, mean",
        "pass@1, dr_mas - grpo, mean",
        "pass@1, dr_mas - own, mean",
    ]
    made = page.read_text().split("<!-- to here -->\n")
    assert [text.splitlines()[1:] for text in made[:2]] == [table_lines(rows(board)), which_credit.headline()]
    assert "default by the criterion: own" in capsys.readouterr().out


def test_result_file_has_the_hashes_of_the_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(which_credit, "RESULTS", tmp_path)
    monkeypatch.setattr(which_credit, "hashes", lambda measures: {"file": "new"})
    old, new = (which_credit._digest({"file": text}) for text in ("old", "new"))
    assert which_credit.measured_by({new: "b2"}) == {"file": "new"}
    with pytest.raises(SystemExit, match="git checkout a1 -- src benchmarks"):
        which_credit.measured_by({old: "a1"})
    (tmp_path / "which_credit.json").write_text(json.dumps({"measured": {"file": "old"}}))
    assert which_credit.measured_by({old: "a1"}) == {"file": "old"}
    with pytest.raises(SystemExit, match="several codes"):
        which_credit.measured_by({old: "a1", new: "b2"})
    assert which_credit.measured_by({new: "b2"}) == {"file": "new"}


# Studies


@pytest.mark.parametrize("name", STUDIES)
def test_every_arm_of_a_study_is_a_valid_recipe(name: str) -> None:
    board = Board(name, STUDIES[name])
    for case in board.study.cases:
        for arm in (arm for arm in ARMS if case in board.study.cases_of(arm)):
            run = board.run(case, arm, "1.0e-04", 20)
            credit = load_recipe(run.recipe, run.settings).config.credit
            if arm == GRPO:
                assert (credit.propagation.name, credit.group_by) == ("identical", "task")
            if arm == OWN:
                assert (credit.propagation.name, credit.group_by) == (OWN, "agent_turn")
