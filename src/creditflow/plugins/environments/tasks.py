"""Tasks of an environment, by an address: `textarena://TicTacToe-v0?players=2&size=500`.

A task holds the address and a seed. Training seeds are odd and validation seeds even, so the two never share a start.
Addresses with different values of `seed` share none either, if their sizes are equal.
No environment is opened here: `creditflow.plugins.environments` runs the tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast, get_args

from creditflow._utils.sections import json_or_text
from creditflow.data.sources import MOST_TASKS, Source, options_of, whole
from creditflow.data.trajectory import Task
from creditflow.errors import DataError, did_you_mean

Illegal = Literal["error", "random"]
"""Effect of an illegal action. `error`: AgentError ends the rollout with the worst outcome of its range. `random`: a
legal action is drawn at random."""
DEFAULT_SIZE = 500
DEFAULT_TURNS = 1000
_NAME = re.compile(r"[A-Za-z0-9_./:\[\]-]{1,200}")


@dataclass(frozen=True)
class EnvironmentAddress:
    """A parsed address."""

    text: str
    scheme: str
    name: str
    options: Mapping[str, Any]
    """Options of the adapter and of the environment: JSON values, or texts."""
    size: int
    """Number of tasks."""
    seed: int
    """Number of the sample of starts: 0 has the first `size` seeds, 1 the next."""
    illegal: Illegal
    max_turns: int
    """Actions of all seats (rounds, if seats act at once) after which a rollout is cut short."""


def environment_tasks(text: str, key: str, split: str) -> list[Task]:
    """Make the tasks of an address. Raises DataError for an invalid address; options are checked by the adapter."""
    address = parse_environment_address(text, key)
    held_out = split != "train"
    return [
        Task(
            data_source=f"{address.scheme}/{address.name}",
            prompt=({"role": "user", "content": f"{address.scheme}://{address.name}"},),
            ground_truth=None,
            extra_info={
                "index": index,
                "split": split,
                "environment": text,
                "seed": 2 * (address.seed * address.size + index) + (0 if held_out else 1),
            },
        )
        for index in range(address.size)
    ]


@lru_cache(maxsize=64)
def parse_environment_address(text: str, key: str) -> EnvironmentAddress:
    """Parse and check an address. Raises DataError."""
    where = f"{key}: {text[:200]}"
    scheme, _, rest = text.partition("://")
    name, _, query = rest.partition("?")
    if not _NAME.fullmatch(name):
        raise DataError(f"{where}: expected the name of an environment after {scheme}://, got {name[:80]!r}")
    options = options_of(query, where)
    illegal = options.pop("illegal", "error")
    if illegal not in get_args(Illegal):
        raise DataError(
            f"{where}: illegal: expected error or random, got {illegal!r}{did_you_mean(illegal, get_args(Illegal))}"
        )
    if literal := next((name for name, value in options.items() if value in ("True", "False", "None")), None):
        raise DataError(f"{where}: {literal}: expected JSON (true, false, null), got {options[literal]}")
    return EnvironmentAddress(
        text=text,
        scheme=scheme,
        name=name,
        size=whole(options.pop("size", str(DEFAULT_SIZE)), 1, f"{where}: size", MOST_TASKS),
        seed=whole(options.pop("seed", "0"), 0, f"{where}: seed"),
        illegal=cast(Illegal, illegal),
        max_turns=whole(options.pop("max_turns", str(DEFAULT_TURNS)), 1, f"{where}: max_turns"),
        options={option: json_or_text(value) for option, value in options.items()},
    )


SOURCE = Source(lambda names, key, split: [task for name in names for task in environment_tasks(name, key, split)])
"""The source of every scheme that has an adapter in `creditflow.plugins.environments.adapters`."""
