"""Commands in this process, and runs of the toy team."""

import re
from pathlib import Path

from click.testing import Result
from typer.testing import CliRunner

from creditflow._utils.progress import Reporter
from creditflow.cli import app
from creditflow.config import load_recipe
from creditflow.engines.local.trainer import train
from tests.builders import without_progress
from tests.paths import TOY


def creditflow(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    """Run a command that exits with code 2 and one line of an error; return the message.

    The line of the rule in force may stand before it.
    """
    result = creditflow(*arguments)
    error = re.sub("^credit: .*\n", "", without_progress(result.stderr))
    assert (result.exit_code, result.stdout, error.count("\n")) == (2, "", 1), result.output
    assert error.startswith("error: ")
    return error.removeprefix("error: ").rstrip()


def toy_run(folder: Path, *overrides: str, recipe: str | Path = TOY) -> Path:
    """Train the toy team, or that of another recipe; return the folder of the run."""
    return train(load_recipe(recipe, [f"trainer.default_local_dir={folder}", *overrides]), Reporter()).path
