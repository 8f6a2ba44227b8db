"""Tests of the user's frames of an exception, and of its full traceback."""

import json

from creditflow._utils.tracebacks import TRACEBACK_CHARACTERS, located, location, traceback_text


def raised(function) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def deep(n: int) -> None:
    if n == 0:
        raise KeyError("labels")
    deep(n - 1)


def test_frames_of_libraries_and_python_are_left_out():
    def reads():
        json.loads("{")

    error = raised(reads)
    at = f"test_tracebacks.py:{reads.__code__.co_firstlineno + 1} in reads"
    assert location(error).endswith(at)
    assert "json" not in location(error)
    assert "json/decoder.py" in traceback_text(error)


def test_innermost_three_frames_are_shown():
    raises, calls = deep.__code__.co_firstlineno + 2, deep.__code__.co_firstlineno + 3
    frames = [f"test_tracebacks.py:{line} in deep" for line in (calls, calls, raises)]
    assert located(raised(lambda: deep(9)), "KeyError") == f"KeyError ({', '.join(frames)})"


def test_unraised_error_has_no_location():
    assert located(ValueError("x"), "ValueError: x") == "ValueError: x"


def test_code_without_a_file_counts_as_the_users():
    assert location(raised(lambda: exec("1 / 0"))).endswith("<string>:1")


def test_long_traceback_is_cut_and_unprintable_one_written():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def mute() -> None:
        raise Mute

    def long() -> None:
        raise ValueError("x" * 10 * TRACEBACK_CHARACTERS)

    assert "Mute" in traceback_text(raised(mute))
    text = traceback_text(raised(long))
    assert text.startswith("Traceback")
    assert len(text) <= TRACEBACK_CHARACTERS + 10
