"""Where a user's own code went wrong: file, line and function of an exception, and its whole traceback.

In the short form, frames of creditflow, of Python and of installed libraries are left out.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

_OURS = str(Path(__file__).parent)
_PYTHON = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_LIBRARIES = ("site-packages", "dist-packages")
_SHOWN = 3
"""Frames of the short form: the innermost ones."""
_NAME = 60
TRACEBACK_CHARACTERS = 20_000


def location(error: BaseException) -> str:
    """The user's frames of an exception, innermost last: `team.py:42 in reward, text.py:7 in parse`.

    Without a frame of the user's, the innermost of a library, or else of creditflow. Empty where it was never raised.
    """
    frames = list(_frames(error.__traceback__))
    users = [frame for kind, frame in frames if kind == "user"]
    others = [frame for kind, frame in frames if kind == "library"] or [frame for _, frame in frames]
    return ", ".join(users[-_SHOWN:] or others[-1:])


def located(error: BaseException, text: str) -> str:
    """`text`, which describes the exception, and where it was raised."""
    where = location(error)
    return f"{text} ({where})" if where else text


def traceback_text(error: BaseException) -> str:
    """The whole traceback, with its causes; of a very long one, beginning and end."""
    try:
        text = "".join(traceback.format_exception(error)).encode("utf-8", "replace").decode()
    except Exception as broken:  # it may call `__str__` and `__repr__` of the user's classes
        text = f"{type(error).__name__}: its traceback cannot be written ({type(broken).__name__})\n"
    half = TRACEBACK_CHARACTERS // 2
    return text if len(text) <= TRACEBACK_CHARACTERS else f"{text[:half]}\n...\n{text[-half:]}"


def _frames(at: TracebackType | None) -> Iterator[tuple[str, str]]:
    """Kind and short form of each frame, outermost first."""
    while at is not None:
        code = at.tb_frame.f_code
        name = "" if code.co_name == "<module>" else f" in {code.co_name[:_NAME]}"
        yield _kind(code.co_filename), f"{Path(code.co_filename).name[-_NAME:]}:{at.tb_lineno}{name}"
        at = at.tb_next


def _kind(file: str) -> str:
    if file.startswith("<frozen "):
        return "python"
    if Path(file).is_relative_to(_OURS):
        return "creditflow"
    if any(part in _LIBRARIES for part in Path(file).parts):
        return "library"
    return "python" if Path(file).is_relative_to(_PYTHON[0]) or Path(file).is_relative_to(_PYTHON[-1]) else "user"
