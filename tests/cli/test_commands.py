"""How the command line finds its commands, and those of other distributions."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from creditflow import cli
from creditflow.cli import ENTRY_POINTS, app, commands
from creditflow.registry import installed
from tests.distributions import creditflow, install

FOLDER = Path(cli.__file__).parent
COMMANDS = sorted(
    [
        [*path.relative_to(FOLDER).parts[:-1], path.stem.replace("_", "-")]
        for path in FOLDER.rglob("*.py")
        if path.name[0] != "_"
    ]
    + [[name] for name in installed(ENTRY_POINTS)]
)
"""Every command as its words, with those of plug-ins."""
HEAVY = {"torch", "transformers", "pyarrow", "matplotlib", "omegaconf", "sympy", "numba", "verl", "ray"}


def run_python(code: str):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_help_lists_every_command_with_its_summary():
    text = CliRunner().invoke(app, ["--help"]).stdout
    lines = text[text.index("Begin:\n") :].splitlines()
    rows = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    listed = [row.split()[0] for row in rows]
    assert listed[:2] == ["init", "recipes"]
    assert sorted(listed) == sorted({words[0] for words in COMMANDS})
    assert all(len(row.split(maxsplit=1)) == 2 for row in rows)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", commands())
def test_example_of_a_command_names_its_options(name):
    example = commands()[name].summary()[1]
    words = shlex.split(example.partition(" > ")[0])[1:]
    path = next(words[:n] for n in (1, 2) if words[:n] in COMMANDS)
    text = CliRunner().invoke(app, [*path, "--help"], prog_name="creditflow").stdout
    assert all(word in text for word in words if word.startswith("-"))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_a_command_describes_every_option(words):
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    rows = result.stdout.partition("Options:\n")[2].splitlines()
    assert all(len(row.split("  ")) > 2 for row in rows if row.startswith("  -"))
    assert not re.search(r"<\w|[{}]", result.stdout)  # no types of Python


def test_help_loads_no_heavy_module():
    """The list of commands loads none of them."""
    code = (
        "import sys\n"
        "from creditflow.cli import app\n"
        f"for words in [[], *{COMMANDS!r}]:\n"
        "    try: app([*words, '--help'], prog_name='creditflow')\n"
        "    except SystemExit: print('LOADED', *sys.modules)\n"
    )
    done = run_python(code)
    loaded = [set(line.split()) for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert len(loaded) == done.stdout.count("Usage: creditflow") == 1 + len(COMMANDS), done.stderr
    of_cli = {name for name in loaded[0] if name.startswith("creditflow.cli")}
    assert of_cli == {"creditflow.cli", "creditflow.cli._app"}
    assert not loaded[-1] & HEAVY


def test_version_names_python_torch_and_verl():
    code = "import sys; from creditflow.cli import app; app(['--version'], standalone_mode=False); print(*sys.modules)"
    lines = run_python(code).stdout.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["creditflow", "Python", "torch", "verl"]
    assert lines[1] == f"Python {sys.version.split()[0]}"
    assert not set(lines[-1].split()) & HEAVY


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "unknown command 'trian' (did you mean 'train'?)"),
        (["sandbox", "chekc"], "unknown command 'chekc' (did you mean 'check'?)"),
        (["xyzzy"], "unknown command 'xyzzy'; `creditflow --help` lists them"),
        (["data", "xyzzy"], "unknown command 'xyzzy'; `creditflow data --help` lists them"),
    ],
)
def test_unknown_command_is_refused_with_the_nearest(words, message):
    result = CliRunner().invoke(app, words, prog_name="creditflow")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["view", "run", "--port", "65536"], "--port: expected a whole number from 0 to 65535, got 65536"),
        (["view", "run", "--port", "http"], "--port: expected a whole number from 0 to 65535, got http"),
        (["serve", "x", "--idle", "nan"], "--idle: expected a number from 1 on, got nan"),
        (["view", "run", "--prot", "1"], "unknown option --prot (did you mean '--port'?)"),
        (["view", "run", "--port", "\x1b[2J"], r"--port: expected a whole number from 0 to 65535, got \x1b[2J"),
        (["--verison"], "unknown option --verison (did you mean '--version'?)"),
        (["--jobs", "train"], "unknown option --jobs; see `creditflow --help`"),
        (["train"], "RECIPE: is missing; see `creditflow train --help`"),
    ],
)
def test_wrong_options_are_refused_in_one_line(words, message):
    result = CliRunner().invoke(app, words, prog_name="creditflow")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {message}\n")


GREETING = """
from typing import Annotated
import typer
from creditflow.errors import InputError

def greet(name: str, times: Annotated[int, typer.Option(help="Number of greetings.")] = 1) -> None:
    '''Greet a person.'''
    if times < 1:
        raise InputError(f"--times: expected 1 or more, got {times}")
    print(*[f"hello {name}"] * times)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed distribution with three commands, of which two cannot be loaded, and two named as creditflow's."""
    commands = ["greet-all = greeting:greet", "broken = broken:run", "missing = greeting:nothing"]
    points = "\n".join(["[creditflow.commands]", *commands, "train = greeting:greet", "convert = greeting:greet"])
    install(tmp_path, points, greeting=GREETING, broken="import no_such_module\n")
    return tmp_path


def test_command_of_another_distribution_runs(package):
    done = creditflow(package, "greet-all", "Ann", "--times", "2")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello Ann hello Ann\n", "")
    refused = creditflow(package, "greet-all", "Ann", "--times", "0")
    assert (refused.returncode, refused.stderr) == (2, "error: --times: expected 1 or more, got 0\n")
    text = creditflow(package, "greet-all", "--help").stdout
    assert "Greet a person." in text
    assert "Number of greetings." in text


def test_broken_command_breaks_only_itself(package):
    text = creditflow(package, "--help")
    assert (text.returncode, text.stderr) == (0, "")
    assert [line.split() for line in text.stdout.splitlines() if "broken" in line or "greet-all" in line] == [
        ["broken", "(from", "theirs", "1.0)"],
        ["greet-all", "Greet", "a", "person."],
    ]
    broken = creditflow(package, "broken")
    assert (broken.returncode, broken.stdout, broken.stderr) == (
        1,
        "",
        "error: command 'broken' of theirs 1.0: entry point 'broken' of creditflow.commands: broken:run cannot be "
        "loaded: ModuleNotFoundError: No module named 'no_such_module'\n",
    )
    missing = creditflow(package, "missing")
    assert "creditflow.commands: greeting:nothing cannot be loaded: AttributeError" in missing.stderr


def test_two_commands_of_one_name_break_only_themselves(package):
    install(package, "[creditflow.commands]\ngreet-all = broken:run\n", "farewells")
    done = creditflow(package, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    message = "entry points creditflow.commands: expected one named 'greet-all', got broken:run and greeting:greet"
    assert message in creditflow(package, "greet-all", "Ann").stderr


def test_own_commands_take_precedence(package):
    assert "Train a team with a recipe." in creditflow(package, "train", "--help").stdout
    assert "Turn traces of other systems into trajectories." in creditflow(package, "convert", "--help").stdout
