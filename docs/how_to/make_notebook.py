"""Write docs/how_to/notebook.ipynb: `python docs/how_to/make_notebook.py [--run RUN] [--output FILE]`.

Trains a small recipe (two minutes on two cores), runs the cells below on its run, and stores their outputs.
`--run` uses a run that exists already.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRAIN = (
    "arithmetic_chain recipe.train_tasks=256 data.val_max_samples=64 trainer.total_training_steps=24 "
    "trainer.test_freq=4 trainer.default_local_dir=run"
)
"""The arguments of `creditflow train` that make the notebook's run."""

SHOWN = "creditflow train " + TRAIN.replace(" trainer.total", " \\\n    trainer.total")
"""The command on two lines."""

CELLS = (
    (
        "markdown",
        f"""# What did my agents learn?

A run's folder holds every trajectory, score and advantage. This notebook opens one, as data frames and as figures. It
needs `pip install 'creditflow[report,pandas]'`. The run is a team of planner, executor and verifier on word problems:

```bash
{SHOWN}
```

`open_run` takes the folder of any run, also of one that is still training.""",
    ),
    (
        "code",
        """import pandas

import creditflow

run = creditflow.open_run("run")  # frames="polars" for Polars
run.config["algorithm"]["propagation"]""",
    ),
    (
        "markdown",
        """## Did the team improve?

`metrics()` has one row per training step. [Metrics](../reference/metrics.md) describes the columns. This run was
validated every four steps, so those columns have gaps.""",
    ),
    (
        "code",
        """metrics = run.metrics()
metrics.filter(regex="training_step|pass_at_1$|step_error_rate$").dropna().round(3)""",
    ),
    ("code", """run.plot_learning_curve()"""),
    (
        "markdown",
        """## Who makes the errors?

`steps()` has one row per step. A step with a sub-reward below 1 is wrong.""",
    ),
    (
        "code",
        """steps = run.steps()
scored = steps[steps.scored]
errors = (scored.sub_reward < 1).groupby([scored.agent, scored.training_step]).mean()
errors.unstack(0)[::4].round(3)""",
    ),
    ("markdown", """`scores()` has one row per score, so that every reward function can be seen alone."""),
    ("code", """run.plot_rewards()"""),
    (
        "markdown",
        """## Where did credit go?

`credit()` has the terms of every step's credit and advantage. By agent: the mean credit and its parts, the credit that
gates withheld, and the size of the trained advantages.""",
    ),
    (
        "code",
        """credit = run.credit()
trained = credit[credit.trained].assign(size=credit.advantage.abs())
trained.groupby("agent")[["credit", "own", "received", "shared", "withheld", "size"]].mean().round(3)""",
    ),
    ("code", """run.plot_credit()"""),
    (
        "markdown",
        """## Is the credit right?

A right step should not be blamed, and a wrong one should not be rewarded. The rates of both, by agent:""",
    ),
    (
        "code",
        """known = trained[trained.scored]
wrong, right = known[known.sub_reward < 1], known[known.sub_reward == 1]
rewarded = (wrong.advantage > 0).groupby(wrong.agent).mean()
blamed = (right.advantage < 0).groupby(right.agent).mean()
pandas.DataFrame({"wrong but rewarded": rewarded, "right but blamed": blamed}).round(3)""",
    ),
    (
        "markdown",
        """## What did the gates withhold?

A gate closes where a step's own score is not above the threshold. Credit from later steps then stays there.""",
    ),
    ("code", """run.plot_gates()"""),
    (
        "markdown",
        """## One trajectory

`trajectories()` has one row per trajectory. Here is the one whose gates withheld most credit, step by step.""",
    ),
    (
        "code",
        """trajectories = run.trajectories()
one = trajectories.loc[trajectories.withheld.idxmax()]
print(one.prompt, "| answer", one.answer, "| outcome", one.outcome)
mine = steps[(steps.trajectory_id == one.trajectory_id) & (steps.training_step == one.training_step)]
columns = ["index", "agent", "response", "sub_reward", "gate_open", "received", "withheld", "credit", "advantage"]
mine[columns].round(3)""",
    ),
    ("markdown", """`explain` lists the operations behind one advantage, as `creditflow why` does."""),
    (
        "code",
        """from creditflow.credit import explain

recorded = run.ledger.read(int(one.training_step))
step = recorded.batch.step_ids.index(mine.iloc[0].step_id)
print(explain(recorded.assignment, step))""",
    ),
)
"""Kind and text of each cell."""


def notebook(outputs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The notebook in format 4.5. `outputs`: those of each cell of code."""
    cells: list[dict[str, Any]] = []
    made = iter(enumerate(outputs, start=1))
    for place, (kind, text) in enumerate(CELLS):
        cell = {"cell_type": kind, "id": f"cell-{place}", "metadata": {}, "source": text.splitlines(keepends=True)}
        if kind == "code":
            cell["execution_count"], cell["outputs"] = next(made)
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def code_cells() -> list[str]:
    """The cells of code."""
    return [text for kind, text in CELLS if kind == "code"]


def run_cells(folder: Path) -> list[list[dict[str, Any]]]:
    """Run the cells of code in `folder`; returns the outputs of each."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.chdir(folder):
        return [list(_outputs(text, n, names)) for n, text in enumerate(code_cells(), start=1)]


def _outputs(code: str, number: int, names: dict[str, Any]) -> Iterator[dict[str, Any]]:
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    if printed.getvalue():
        yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        if hasattr(value, "_repr_png_"):
            data["image/png"] = base64.b64encode(value._repr_png_()).decode()  # type: ignore[assignment]
        elif hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}


def main() -> None:
    """Train, run the cells, write the notebook."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("notebook.ipynb"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as named:
        folder = Path(named)
        if options.run is not None:
            (folder / "run").symlink_to(options.run.resolve())
        else:
            command = [sys.executable, "-m", "creditflow", "train", *TRAIN.split()]
            subprocess.run(command, cwd=folder, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        outputs = run_cells(folder)
    options.output.write_text(json.dumps(notebook(outputs), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
