"""Message of a response by its tokenizer's response schema, as transformers' `parse_response` reads it.

A schema is regular expressions, written for well-formed responses. On others they may take exponential time, so all
searches in one response have a common limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

_LIMIT_S = 2.0
"""Seconds of processor time for one response. Most take less than a millisecond."""


def message_by_schema(response: str, schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message that `schema` reads in a response, special tokens included; empty if it does not match.

    Raises ValueError if a part of it is malformed or the search takes too long, ImportError if the schema needs the
    package jmespath.
    """
    import regex
    from transformers.utils import chat_parsing_utils

    end = time.process_time() + _LIMIT_S

    def timed(name: str, *args: Any, **options: Any) -> Any:
        return getattr(regex, name)(*args, timeout=max(1e-3, end - time.process_time()), **options)

    # A copy of the library's function with another `re`: the library itself has no limit.
    searches = {name: partial(timed, name) for name in ("search", "finditer", "sub")}
    names = {**vars(chat_parsing_utils), "re": SimpleNamespace(DOTALL=regex.DOTALL, **searches)}
    names["recursive_parse"] = FunctionType(chat_parsing_utils.recursive_parse.__code__, names)
    try:
        message = names["recursive_parse"](response, schema)
    except (TypeError, LookupError, ArithmeticError, RecursionError, TimeoutError, regex.error) as error:
        raise ValueError(str(error)) from error
    return message if isinstance(message, Mapping) else {}
