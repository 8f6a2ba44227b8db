"""Check a judge's arguments when a recipe is loaded, and convert them to the judge's components.

No function opens a connection. Each raises ValueError, which is reported as an error of the recipe.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from creditflow._utils.sections import expected
from creditflow.rewards.builtin.judge import verdict
from creditflow.rewards.builtin.judge.prompt import FIELDS, PAIR_FIELDS, Prompt, check_template
from creditflow.rewards.builtin.judge.verdict import WINNER, Choices, Form, JudgeScale, VerdictError
from creditflow.rollout import endpoint as endpoints

Scale = Annotated[
    Annotated[Sequence[Annotated[float, Field(ge=-1e9, le=1e9)]], Field(min_length=2, max_length=2)] | None,
    expected("[lowest, highest] between -1e9 and 1e9"),
]
ChoiceValues = Mapping[Any, Annotated[float, Field(ge=0, le=1), expected("a value in [0, 1]")]]
Style = Annotated[Literal["line", "json"], expected("'line' or 'json'")]

Pairwise = Annotated[
    Annotated[Mapping[Literal["against"], Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None,
    expected("{against: ground_truth}, or a field of extra_info"),
]


def one_of(needed: bool = True, **options: object) -> None:
    """Require exactly one of several exclusive options, or at most one if not `needed`."""
    set_options = [name for name, value in options.items() if value is not None]
    if len(set_options) > 1 or (needed and not set_options):
        raise ValueError(f"expected one of {', '.join(options)}, got {' and '.join(set_options) or 'none'}")


def form_of(scale: Sequence[float] | None, choices: Mapping[Any, float] | None, pairwise: bool) -> Form:
    """The form of a verdict."""
    if pairwise:
        return WINNER
    if choices is not None:
        return _choices(choices)
    low, high = scale or (1, 10)
    if not low < high:
        raise ValueError(f"scale: expected [lowest, highest], got {scale!r}")
    return JudgeScale(float(low), float(high))


def _choices(words: Mapping[Any, float]) -> Choices:
    if len(words) < 2:
        raise ValueError(f"choices: expected two or more words with their values, got {words!r}")
    values = {str(word): float(value) for word, value in words.items()}
    if len({word.casefold() for word in values}) < len(values):
        raise ValueError("choices: two of the words differ in case only")
    choices = Choices(values)
    for word, value in values.items():
        try:
            same = verdict.read(f"Score: {word}", choices, "line").value == value
        except VerdictError:
            same = False
        if not same:
            raise ValueError(f"choices: {word!r} cannot be read from a line; take a plain word")
    return choices


def prompt_of(
    rubric: str | None, template: str | None, instruction: str, max_characters: int, against: str | None
) -> Prompt:
    """The prompt of the judge; reads the files that hold rubric and template."""
    if rubric is None and template is None:
        raise ValueError("rubric: expected a text that says what is good (or a template with that in it)")
    criteria = "" if rubric is None else _text("rubric", rubric)
    if template is None:
        return Prompt(criteria, instruction, None, max_characters)
    needed, fields = (("response",), FIELDS) if against is None else (("first", "second"), PAIR_FIELDS)
    text = _text("template", template)
    check_template(text, (*needed, "rubric") if rubric is not None else needed, fields)
    return Prompt(criteria, instruction, text, max_characters)


def _text(name: str, text: object) -> str:
    """The text itself, or the content of the file *.md or *.txt that it names."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name}: expected a text, or a file *.md or *.txt, got {text!r}")
    if not re.fullmatch(r".+\.(?:md|txt)", text) or (" " in text and not os.path.isfile(text)):  # noqa: PTH113
        return text.strip()
    try:
        return Path(text).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot read the file {text}: {getattr(error, 'strerror', error)}") from error


def body_of(
    max_tokens: int, temperature: float, seed: int | None, style: str, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Fields of a request other than model and messages; all of them can be sent as JSON."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if style == "json":
        body["response_format"] = {"type": "json_object"}
    endpoints.check_fields("request", request or {})
    body |= {str(name): value for name, value in (request or {}).items()}
    return {name: value for name, value in body.items() if value is not None}
