"""Find the fenced blocks of a text: those of CommonMark, and what models write instead.

The text comes from a model, so finding takes time linear in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_FENCE = re.compile(
    r"(?P<before>[^`~]*(?:(?:`{1,2}(?!`)|~{1,2}(?!~))[^`~]*)*)(?P<ticks>`{3,16}|~{3,16})(?P<info>[^`]*)"
)
_LEAD = re.compile(r"[ \t]*(?:(?:[-*+]|[0-9]{1,9}[.)])[ \t]+)?")
_LANGUAGE = re.compile(r"(?i:json)(?=[\s{[])|\S*")


class Block(NamedTuple):
    """A fenced block, or text outside of fences."""

    text: str
    language: str | None = None
    """First word behind the opening fence, in lower case; None outside of fences."""
    is_closed: bool = True


def blocks_in(text: str) -> list[Block]:
    """The text before the first fence, then fenced blocks and the texts between them.

    A fence consists of backticks or tildes. An opening one may be indented, under a list item, or at the end of a line
    of text. A closing one begins its line, indented by at most three more than the opening one; if a language follows,
    it opens the next block. Without one, the block ends behind a line of text that ends in a fence, else with the text.
    """
    blocks, lines = list[Block](), list[str]()
    language, ticks, deepest = None, "", 0
    for line in text.split("\n"):
        fence = _FENCE.fullmatch(line.rstrip())
        before, mark, info = ("", "", "") if fence is None else fence.group("before", "ticks", "info")
        is_first, word = _LEAD.fullmatch(before) is not None, _LANGUAGE.match(info.strip())[0]  # type: ignore[index]
        opens = bool(mark) and (is_first or (word in (info.strip(), "json") and mark[0] == "`"))
        if ticks and is_first and mark.startswith(ticks) and indentation(line) <= deepest:
            opens = (word[:1].isalnum() or word[:1] == "{") and (word == info.strip() or info[0] == word[0])
            blocks.append(Block(_cut(lines, ticks) if opens else "\n".join(lines), language))
            language, ticks, lines = None, "", [] if opens else [info]
        elif ticks or not opens:
            opens = False
            lines.append(line)
        if opens:
            blocks.append(Block("\n".join(lines if is_first else [*lines, before])))
            language, ticks, deepest = word.lower(), mark, len(_LEAD.match(before)[0]) + 3  # type: ignore[index]
            lines = [info.strip()[len(word) :]] if language == "json" else []
    rest = _cut(lines, ticks) if ticks else "\n".join(lines)
    return [*blocks, Block(rest, language, not ticks or rest != "\n".join(lines))]


def _cut(lines: Sequence[str], ticks: str) -> str:
    """The lines up to the first line of text that ends in a fence, without that fence."""
    for i, line in enumerate(lines):
        code = line.rstrip().removesuffix(ticks)
        if code.strip() and code != line.rstrip() and ticks not in code:
            return "\n".join([*lines[:i], code])
    return "\n".join(lines)


def indentation(line: str) -> int:
    """Number of blanks at the beginning of the line."""
    return len(line) - len(line.lstrip(" \t"))
