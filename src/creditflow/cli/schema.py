"""`creditflow schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXTRA = "report"


def schema(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="A recipe; the schema then has the rules of its files, too.")
    ] = None,
) -> None:
    """Print the JSON Schema of recipes, for editors that complete keys.

    Example: creditflow schema > schema.json
    """
    from creditflow.config.schema import json_schema

    print(json.dumps(json_schema(recipe), indent=2, ensure_ascii=False))
