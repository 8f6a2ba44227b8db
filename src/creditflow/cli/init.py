"""`creditflow init`: create a project from a template."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from creditflow.cli._options import make_new_folder
from creditflow.errors import InputError, did_you_mean
from creditflow.removed import removed_hint

TEMPLATES = Path(__file__).parents[1] / "recipes" / "templates"
"""A folder per template, and `_common` with the files that all templates share."""


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to create.")],
    *,
    template: Annotated[str, typer.Option(metavar="T", help="chain, router, loop or tools.")] = "chain",
) -> None:
    """Create a project that trains at once.

    Writes a workflow, rewards, a recipe, tasks, a test and a README to the folder NAME. The model is a generated one
    with random weights. chain: two agents in a row. router: one that chooses a specialist. loop: a reviewer that sends
    an answer back. tools: an agent with tools.

    Example: creditflow init my_team --template router
    """
    templates = sorted(path.name for path in TEMPLATES.iterdir() if not path.name.startswith("_"))
    if template not in templates:
        hint = removed_hint(f"template {template}") or did_you_mean(template, templates)
        raise InputError(f"--template: expected one of {', '.join(templates)}, got {template!r}{hint}")
    make_new_folder(name, "NAME")
    for source in (TEMPLATES / "_common", TEMPLATES / template):
        shutil.copytree(source, name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    recipe, folder = shlex.quote(str(name / "recipe.yaml")), shlex.quote(str(name))
    print(f"created {name} from the template {template}: {', '.join(sorted(path.name for path in name.iterdir()))}")
    print(f"\nnext:\n  creditflow check {recipe}\n  creditflow train {recipe}")
    print(f"  python -m pytest {folder}   (pip install pytest)")
