"""The notebook in the docs: its cells run, and its text and code are those of the script that writes it."""

import json
import runpy
import subprocess

import pytest

from tests.forks import fast_python
from tests.paths import DOCS
from tests.reports.runs import a_run

SCRIPT = DOCS / "how_to" / "make_notebook.py"
STORED = json.loads(SCRIPT.with_name("notebook.ipynb").read_text())


def sources(notebook):
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def kinds(notebook):
    """The kinds of output of each cell of code."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [[sorted(output.get("data", output["output_type"])) for output in cell["outputs"]] for cell in cells]


def test_notebook_cells_run_on_another_run(tmp_path) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("matplotlib")
    script = runpy.run_path(str(SCRIPT))
    a_run(tmp_path / "run")
    made = script["notebook"](script["run_cells"](tmp_path))
    assert sources(made) == sources(STORED), "run docs/how_to/make_notebook.py"
    assert kinds(made) == kinds(STORED)


@pytest.mark.slow
def test_notebook_is_made_anew_by_its_script(tmp_path) -> None:
    subprocess.run([fast_python(), SCRIPT, "--output", tmp_path / "made.ipynb"], check=True)
    made = json.loads((tmp_path / "made.ipynb").read_text())
    assert (sources(made), kinds(made)) == (sources(STORED), kinds(STORED))
