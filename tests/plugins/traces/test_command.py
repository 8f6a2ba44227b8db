"""Tests of the command `creditflow convert`."""

import json
import shlex
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from creditflow.cli import app
from creditflow.data import read_parquet
from tests.paths import TRACES


def convert(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_files_of_several_forms_become_one_batch(tmp_path: Path) -> None:
    log = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}], "reward": 3}
    (tmp_path / "log.jsonl").write_text(json.dumps(log))
    sources = [TRACES / "langgraph_twice.json", TRACES / "langgraph_openinference.pb", tmp_path / "log.jsonl"]
    out, left_out = tmp_path / "out.parquet", tmp_path / "left_out.jsonl"
    result = convert(*sources, "-o", out, "--left-out", left_out, "--range", "reward=0:5")
    assert result.exit_code == 0, result.output
    batch = read_parquet(out)
    assert (batch.n_trajectories, batch.n_steps) == (3, 9)
    assert batch.agent_names == ("planner", "executor", "executor_again", "verifier", "assistant")
    assert "32 spans" not in result.stdout
    assert "3 trajectories of 2 tasks, 9 steps" in result.stdout
    assert "model call: the same call" in result.stdout
    rows = [json.loads(line) for line in left_out.read_text().splitlines()]
    assert [row["what"] for row in rows] == ["model call"] * 4


SOURCE = TRACES / "autogen_otel.json"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "x.json"], "--out: expected a name that ends with .parquet"),
        (["--outcome", "outcom"], "no reward is called 'outcom'; the traces have helpful, outcome"),
        (["--range", "helpfull=0:2"], "--range: no reward is called 'helpfull'; the traces have helpful, outcome"),
        (["--range", "helpful=0:2", "--range", "helpful=0:3"], "--range: helpful is given twice"),
        (["--range", "helpful"], "--range: expected NAME=LOW:HIGH"),
        (["--range", "helpful=1:0"], "low < high"),
        (["--trajectory-by", "nosuch"], "--trajectory-by: no span has an attribute 'nosuch'"),
        (["--uid-by", "nosuch"], "--uid-by: no span has an attribute 'nosuch'"),
        (["--agent-match", "("], "is not a regular expression"),
        (["--agent-match", "nobody"], "no model call has become a step"),
        (["--credit", str(SOURCE)], "is a file already; name another folder"),
    ],
)
def test_bad_option_prints_one_line_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = convert(SOURCE, "-o", "x.parquet", *arguments)
    assert (result.exit_code, list(tmp_path.iterdir())) == (2, [])
    assert message in result.stderr
    assert result.stderr.startswith("error: ")


def test_other_rewards_of_trajectories_are_shown(tmp_path: Path) -> None:
    result = convert(SOURCE, "-o", tmp_path / "out.parquet", "--outcome", "helpful")
    assert (result.exit_code, "outcome (in info)" in result.stdout) == (0, True)


def test_output_folders_are_made_or_refused(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out.parquet"
    assert convert(SOURCE, "-o", out, "--left-out", tmp_path / "other" / "left.jsonl").exit_code == 0
    (tmp_path / "folder").mkdir()
    for option, name in (("--left-out", "folder"), ("--left-out", "deep/out.parquet/x")):
        result = convert(SOURCE, "-o", tmp_path / "two.parquet", option, tmp_path / name)
        assert result.exit_code == 2
        assert f"{option}: {tmp_path / name} cannot be written" in result.output or "cannot be made" in result.output


def test_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.parquet"
    pq.write_table(pa.table({"a": [1]}), theirs)
    result = convert(theirs, "-o", tmp_path / "out.parquet")
    assert result.exit_code == 2
    assert result.output.count("theirs.parquet") == 1
    assert "not of steps" in result.output


def test_duplicate_trajectory_is_refused_with_its_name_escaped(tmp_path: Path) -> None:
    one, log = tmp_path / "one.parquet", tmp_path / "log.jsonl"
    line = {"trajectory_id": "\x1b[2J", "request": {"messages": []}, "response": "Hi", "reward": {"\x1b[3J": 7}}
    log.write_text(json.dumps(line))
    assert "\n\\x1b[3J: expected" in convert(log, "-o", one).stdout
    for sources in ([one, one], [one, log]):
        result = convert(*sources, "-o", tmp_path / "two.parquet")
        assert (result.exit_code, "trajectory \\x1b[2J occurs twice; give each" in result.stderr) == (2, True)


def test_why_accepts_an_id_like_an_option(tmp_path: Path) -> None:
    line = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}
    (tmp_path / "log.jsonl").write_text(json.dumps({"trajectory_id": "-x y", **line}))
    converted = convert(tmp_path / "log.jsonl", "-o", tmp_path / "out.parquet", "--credit", tmp_path / "run")
    why = CliRunner().invoke(app, shlex.split(converted.stdout.partition("see creditflow ")[2]))
    assert (why.exit_code, "-x y/0" in why.stdout) == (0, True)


def test_existing_run_is_refused_before_writing(tmp_path: Path) -> None:
    source, run = TRACES / "langgraph_openinference.json", tmp_path / "run"
    assert convert(source, "-o", tmp_path / "one.parquet", "--credit", run).exit_code == 0
    again = convert(source, "-o", tmp_path / "two.parquet", "--credit", run)
    assert (again.exit_code, (tmp_path / "two.parquet").exists()) == (2, False)
    assert "--credit: " in again.output
    assert "is a run already" in again.output


def test_converted_trajectories_are_credited(tmp_path: Path) -> None:
    out, run = tmp_path / "out.parquet", tmp_path / "run"
    converted = convert(TRACES / "langgraph_openinference.json", "-o", out, "--credit", run)
    assert converted.exit_code == 0
    assert CliRunner().invoke(app, shlex.split(converted.stdout.partition("see creditflow ")[2])).exit_code == 0
    step = read_parquet(out).step_ids[1]
    why = CliRunner().invoke(app, ["why", str(run), step])
    assert (why.exit_code, "executor, turn 0" in why.stdout) == (0, True)
    audit = CliRunner().invoke(app, ["audit", str(run)])
    assert (audit.exit_code, "imported trajectories cannot be continued" in audit.output) == (2, True)
    again = CliRunner().invoke(app, ["recredit", str(run), "algorithm.propagation=discounted"])
    assert again.exit_code == 0, again.output


def test_missing_outcomes_and_torn_lines_warn(tmp_path: Path) -> None:
    call = {"request": {"messages": [{"role": "user", "content": "Hi"}]}, "response": "Hello."}
    for reward, warned in (({"good": 1.0}, True), ({"outcome": 1.0}, False), (None, True)):
        (tmp_path / "log.jsonl").write_text(json.dumps({**call, "reward": reward}) + '\n{"request": {"mess')
        converted = convert(tmp_path / "log.jsonl", "-o", tmp_path / "out.parquet")
        assert converted.exit_code == 0, converted.output
        assert ("warning: no trajectory has an outcome" in converted.stderr) == warned
        assert "line 2, the last, is torn" in converted.stderr
