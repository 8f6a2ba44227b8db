"""`creditflow schema`."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and check them."""
    from creditflow.config.schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
