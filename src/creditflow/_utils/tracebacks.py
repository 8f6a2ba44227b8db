"""Locations of errors in the user's code: file, line and function, and the full traceback.

The short form leaves out frames of creditflow, Python and installed libraries.
"""

from __future__ import annotations

import functools
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

_NOT_USERS = (str(Path(__file__).parents[1]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
_RECIPES = Path(__file__).parents[1] / "recipes"
"""Shipped recipes count as the user's files: users copy and change them."""
_LIBRARIES = ("site-packages", "dist-packages")
_SHOWN = 3
"""Number of frames in the short form, the innermost ones."""
_NAME = 60
TRACEBACK_CHARACTERS = 20_000


def location(error: BaseException) -> str:
    """The user's frames of an exception, innermost last: `team.py:42 in reward, text.py:7 in parse`.

    Empty if it passed through none.
    """
    return ", ".join(list(_users_frames(error.__traceback__))[-_SHOWN:])


def located(error: BaseException, text: str) -> str:
    """`text`, a description of the exception, with the location in the user's code."""
    where = location(error)
    return f"{text} ({where})" if where else text


_Error = TypeVar("_Error", bound=Exception)


def at_users_line(error: _Error, raised: BaseException | None = None) -> _Error:
    """Append the user's frames to the message of an exception, if it has any, and return it.

    `raised`: the exception that passed through the user's code instead of `error`.
    """
    for exception in (error, raised):
        if exception is not None and location(exception):
            error.args = (located(exception, str(error)),)
            break
    return error


def of_function(function: Callable[..., object]) -> str:
    """The location of a function: `team.py:10 in solve`; empty for a callable without Python code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{Path(code.co_filename).name[-_NAME:]}:{code.co_firstlineno} in {code.co_name}"


def traceback_text(error: BaseException) -> str:
    """The full traceback with its causes; the middle of a very long one is cut out."""
    try:
        text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    except Exception as broken:  # formatting may call `__str__` and `__repr__` of the user's classes
        text = f"{type(error).__name__}: its traceback cannot be written ({type(broken).__name__})\n"
    half = TRACEBACK_CHARACTERS // 2
    return text if len(text) <= TRACEBACK_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


KEY = "tracebacks"
"""Key in a trajectory's `info`: full tracebacks by the name of the part that failed."""


def keep_traceback(info: dict[str, Any], what: str, text: str) -> None:
    """Store the first traceback of `what` in a trajectory's `info`, which is written to the run's folder."""
    info.setdefault(KEY, {}).setdefault(what, text)


def _users_frames(at: TracebackType | None) -> Iterator[str]:
    """The user's frames, outermost first."""
    while at is not None:
        code = at.tb_frame.f_code
        if _is_users(code.co_filename):
            name = "" if code.co_name == "<module>" else f" in {code.co_name[:_NAME]}"
            yield f"{Path(code.co_filename).name[-_NAME:]}:{at.tb_lineno}{name}"
        at = at.tb_next


@functools.lru_cache
def _is_users(file: str) -> bool:
    path = Path(file)
    if path.is_relative_to(_RECIPES):
        return True
    if file.startswith("<frozen ") or any(part in _LIBRARIES for part in path.parts):
        return False
    return not any(path.is_relative_to(folder) for folder in _NOT_USERS)
