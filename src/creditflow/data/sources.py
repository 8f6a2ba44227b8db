"""The sources that make tasks from an address `scheme://name?option=value`: entry points of plug-ins.

An entry point of group `creditflow.task_sources` names a `Source`; its name is the scheme. A source is imported when
its tasks are loaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args
from urllib.parse import parse_qsl

from creditflow.data.trajectory import Task
from creditflow.errors import DataError, did_you_mean
from creditflow.registry import Registry

TaskSplit = Literal["train", "val", "tune"]
SHARE_OF_VAL, SHARE_OF_TUNE = 0.2, 0.1
"""Shares of a source's problems; the rest is for training. `tune`: for choices such as a learning rate."""
MOST_TASKS = 10_000_000
"""Maximum `size` of a source: each of its tasks is in memory."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Source:
    """One kind of address."""

    load: Callable[[Sequence[str], str, TaskSplit], list[Task]]
    """The tasks of one split from addresses that follow one another; also takes the key, for errors."""
    split_of: Callable[[str], str | None] = lambda name: None
    """The split that an address sets itself; `all` if training and validation have the same tasks."""


SOURCES: Registry[Source] = Registry("data.train_files", group="creditflow.task_sources", record=Source)


def source_of(name: str, key: str = "data.train_files") -> Source | None:
    """The source of an address; None for other names. Raises DataError for an address of an unknown scheme."""
    match = _ADDRESS.fullmatch(name)
    if match is None:
        return None
    if match[1] not in SOURCES:
        schemes = ", ".join(SOURCES.names())
        raise DataError(f"{key}: {name[:200]}: expected {schemes} before ://{SOURCES.hint(match[1])}")
    return SOURCES[match[1]]


# ---- parts of an address ---------------------------------------------------------------------------------------------


def split_of(problem: str) -> TaskSplit:
    """The split of a problem; a function of its canonical text alone."""
    place = int(digest(problem)[:12], 16) / 16**12
    return "val" if place < SHARE_OF_VAL else "tune" if place < SHARE_OF_VAL + SHARE_OF_TUNE else "train"


def options_of(query: str, where: str) -> dict[str, str]:
    """The options of an address. Raises DataError for a malformed query and for an option that comes twice."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise DataError(f"{where}: expected options as name=value&name=value, got {query!r}") from error
    options = dict(pairs)
    if len(options) < len(pairs):
        twice = next(name for name, _ in pairs if [n for n, _ in pairs].count(name) > 1)
        raise DataError(f"{where}: expected each option once, got {twice!r} twice")
    return options


def whole(text: str, least: int, where: str, most: int = 999_999_999) -> int:
    """The whole number of an option's text. Raises DataError for other text and numbers out of bounds."""
    if not re.fullmatch(r"[0-9]{1,9}", text, re.ASCII) or int(text) < least:
        raise DataError(f"{where}: expected a whole number of {least} or more, got {text!r:.80}")
    if int(text) > most:
        raise DataError(f"{where}: expected at most {most:,}, got {text}")
    return int(text)


def split_named(text: str, where: str) -> TaskSplit:
    """The split of an option's text. Raises DataError for other text."""
    splits = get_args(TaskSplit)
    if text in splits:
        return cast(TaskSplit, text)
    raise DataError(f"{where}: expected {', '.join(splits)}, got {text!r}{did_you_mean(text, splits)}")


def digest(text: str) -> str:
    """A hash of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
