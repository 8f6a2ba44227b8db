"""Parse a response into a message with the tokenizer's response schema, as transformers' `parse_response` does.

A schema is regular expressions, written for well-formed responses. On others they may take exponential time, so all
searches in one response have a common limit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any

_LIMIT_S = 1.0
"""Seconds of this thread's processor time for one response. Most take less than a millisecond."""


def message_by_schema(response: str, schema: Mapping[str, Any], limit: float = 2 * _LIMIT_S) -> Mapping[str, Any]:
    """Return the message that `schema` reads in a response, special tokens included; empty if it does not match.

    Raises ValueError if a part of it is malformed or the search takes too long, ImportError if the schema needs the
    package jmespath. Other threads run meanwhile. `limit`: seconds of processor time of all threads of the process.
    """
    import regex
    from transformers.utils import chat_parsing_utils

    begin, end = time.thread_time(), time.process_time() + limit

    def timed(name: str, *args: Any, **options: Any) -> Any:
        options |= {"timeout": max(1e-3, end - time.process_time()), "concurrent": True}
        return getattr(regex, name)(*args, **options)

    # A copy of the library's function with another `re`: the library itself has no limit.
    searches = {name: partial(timed, name) for name in ("search", "finditer", "sub")}
    names = {**vars(chat_parsing_utils), "re": SimpleNamespace(DOTALL=regex.DOTALL, **searches)}
    parse = chat_parsing_utils.recursive_parse
    names["recursive_parse"] = FunctionType(parse.__code__, names, argdefs=parse.__defaults__)
    try:
        message = names["recursive_parse"](response, schema)
    except TimeoutError as error:
        # The package regex counts the time of all threads, the limit only that of this one.
        if time.thread_time() - begin < _LIMIT_S:
            return message_by_schema(response, schema, 2 * limit)
        raise ValueError(f"the search took more than {_LIMIT_S:g} s") from error
    except (TypeError, LookupError, ArithmeticError, RecursionError, regex.error) as error:
        raise ValueError(str(error)) from error
    return message if isinstance(message, Mapping) else {}
