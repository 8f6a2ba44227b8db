"""Check a judge's arguments when a recipe is loaded, and convert them to the judge's components.

No function opens a connection. Each raises ValueError, which is reported as an error of the recipe.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from creditflow.rewards.builtin.judge import verdict
from creditflow.rewards.builtin.judge.prompt import FIELDS, PAIR_FIELDS, Prompt, check_template
from creditflow.rewards.builtin.judge.verdict import WINNER, Choices, Form, JudgeScale, VerdictError
from creditflow.rollout import endpoint as endpoints

_HUGE = 1e300
"""Upper limit for numbers; a whole number may exceed the range of a float."""


def refuse_secrets(args: Mapping[str, Any]) -> None:
    """Refuse keys in a recipe, because it is copied into the folder of every run."""
    endpoints.refuse_secrets({name: value for name, value in args.items() if name != "self"})


def one_of(needed: bool = True, **options: object) -> None:
    """Require exactly one of several exclusive options, or at most one if not `needed`."""
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1 or (needed and not given):
        raise ValueError(f"expected one of {', '.join(options)}, got {' and '.join(given) or 'none'}")


def whole(name: str, value: object, least: int) -> None:
    """Require a whole number of `least` or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number of {least} or more, got {value!r}")


def number(name: str, value: object, least: float, *, above: bool = False) -> float:
    """Return a finite number of `least` or more, or above it."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value < _HUGE:
        found = float(value)
        if found > least or not above:
            return found
    raise ValueError(f"{name}: expected a number {'above' if above else 'of at least'} {least:g}, got {value!r}")


def optional_name(name: str, value: object) -> str | None:
    """Return a text that is not empty, or None."""
    if value is not None and not (isinstance(value, str) and value):
        raise ValueError(f"{name}: expected a name, got {value!r}")
    return value


def model_name(value: object) -> str:
    """The model's name, as sent to the endpoint."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"model: expected the model's name as the endpoint knows it, got {value!r}")
    return value


def address_of(endpoint: object) -> str:
    """The endpoint's address, without credentials, because reasons and metrics show it."""
    address = endpoints.address_of(endpoint)
    endpoints.expect_packages()
    return address


def variable_name(name: object) -> str | None:
    """The name of an environment variable that is set."""
    variable = endpoints.variable_name(name)
    endpoints.expect_set(variable)
    return variable


def form_of(scale: Any, choices: Any, pairwise: bool) -> Form:
    """The form of a verdict."""
    if pairwise:
        return WINNER
    if choices is not None:
        return _choices(choices)
    given = [1, 10] if scale is None else scale
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != 2:
        raise ValueError(f"scale: expected [lowest, highest], got {given!r}")
    low, high = (number("scale", one, -1e9) for one in given)
    if not low < high <= 1e9:
        raise ValueError(f"scale: expected [lowest, highest] between -1e9 and 1e9, got {given!r}")
    return JudgeScale(low, high)


def _choices(choices: Any) -> Choices:
    if not isinstance(choices, Mapping) or len(choices) < 2:
        raise ValueError(f"choices: expected two or more words with their values, got {choices!r}")
    values = {str(word): number(f"choices.{word}", value, 0) for word, value in choices.items()}
    if len({word.casefold() for word in values}) < len(values):
        raise ValueError("choices: two of the words differ in case only")
    for word, value in values.items():
        if value > 1:
            raise ValueError(f"choices.{word}: expected a value in [0, 1], got {value:g}")
        try:
            same = verdict.read(f"Score: {word}", Choices(values), "line").value == value
        except VerdictError:
            same = False
        if not same:
            raise ValueError(f"choices: {word!r} cannot be read from a line; take a plain word")
    return Choices(values)


def against_of(pairwise: Any) -> str | None:
    """The field of the task with the text that a response is compared with."""
    if pairwise is None:
        return None
    if not isinstance(pairwise, Mapping) or set(pairwise) != {"against"}:
        raise ValueError(f"pairwise: expected {{against: ground_truth}} or a field of extra_info, got {pairwise!r}")
    return optional_name("pairwise.against", pairwise["against"] or "")


def prompt_of(
    rubric: str | None, template: str | None, instruction: str, max_characters: int, against: str | None
) -> Prompt:
    """The prompt of the judge; reads the files that hold rubric and template."""
    if rubric is None and template is None:
        raise ValueError("rubric: expected a text that says what is good (or a template with that in it)")
    criteria = "" if rubric is None else _text("rubric", rubric)
    if template is None:
        return Prompt(criteria, instruction, None, max_characters)
    needed, known = (("response",), FIELDS) if against is None else (("first", "second"), PAIR_FIELDS)
    text = _text("template", template)
    check_template(text, (*needed, "rubric") if rubric is not None else needed, known)
    return Prompt(criteria, instruction, text, max_characters)


def _text(name: str, given: object) -> str:
    """The text itself, or the content of the file *.md or *.txt that it names."""
    if not isinstance(given, str) or not given.strip():
        raise ValueError(f"{name}: expected a text, or a file *.md or *.txt, got {given!r}")
    if not re.fullmatch(r"\S+\.(?:md|txt)", given):
        return given.strip()
    try:
        return Path(given).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}: cannot read the file {given}: {error}") from error


def body_of(
    max_tokens: int, temperature: float, seed: int | None, style: str, request: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Fields of a request other than model and messages; all of them can be sent as JSON."""
    body: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    if style == "json":
        body["response_format"] = {"type": "json_object"}
    if request is not None and not isinstance(request, Mapping):
        raise ValueError(f"request: expected fields with their values, got {request!r}")
    request = request or {}
    endpoints.check_fields("request", request)
    body |= {str(name): value for name, value in request.items()}
    return {name: value for name, value in body.items() if value is not None}


def prices_of(prices: Any) -> dict[str, float] | None:
    """Prices per million prompt and completion tokens."""
    if prices is None:
        return None
    if not isinstance(prices, Mapping) or set(prices) != {"prompt", "completion"}:
        raise ValueError(f"prices: expected {{prompt: ..., completion: ...}} per million tokens, got {prices!r}")
    return {name: number(f"prices.{name}", value, 0) for name, value in prices.items()}
