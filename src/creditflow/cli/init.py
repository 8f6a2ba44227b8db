"""`creditflow init`: create a project from a template."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import Annotated

import typer

from creditflow.errors import InputError, did_you_mean
from creditflow.removed import removed_hint

TEMPLATES = Path(__file__).parents[1] / "recipes" / "templates"
"""A folder per template, and `_common` with the files that all templates share."""


def init(
    name: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to create.")],
    *,
    template: Annotated[str, typer.Option(metavar="T", help="chain, debate, tools or http.")] = "chain",
) -> None:
    """Create a project that trains at once.

    Writes a workflow, rewards, a recipe, tasks, a test and a README to the folder NAME. The model is a generated one
    with random weights. chain: two agents in a row. debate: two debaters and a judge. tools: an agent with tools.
    http: agents that call over HTTP with OpenAI's client.

    Example: creditflow init my_team --template chain
    """
    templates = sorted(path.name for path in TEMPLATES.iterdir() if not path.name.startswith("_"))
    if template not in templates:
        expected = f"{', '.join(templates[:-1])} or {templates[-1]}"
        hint = removed_hint(f"template {template}") or did_you_mean(template, templates)
        raise InputError(f"--template: expected {expected}, got {template!r}{hint}")
    if name.exists() and not name.is_dir():
        raise InputError(f"NAME: {name} is a file; name a new folder")
    if name.is_dir() and any(name.iterdir()):
        raise InputError(f"NAME: {name} is not empty; name a new folder, or empty this one first")
    for source in (TEMPLATES / "_common", TEMPLATES / template):
        shutil.copytree(source, name, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    recipe, folder = shlex.quote(str(name / "recipe.yaml")), shlex.quote(str(name))
    print(f"created {name} from the template {template}: {', '.join(sorted(path.name for path in name.iterdir()))}")
    print(f"\nnext:\n  creditflow check {recipe}\n  creditflow train {recipe}")
    print(f"  python -m pytest {folder}   (pip install pytest)")
