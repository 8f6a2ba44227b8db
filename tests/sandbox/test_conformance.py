"""Tests of the behaviour common to all back ends; stubs replace the services that are unavailable here."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from creditflow.errors import ConfigError
from creditflow.sandbox import Sandbox, SandboxError
from creditflow.sandbox.backends import container
from tests.rewards.processes import children, descriptors
from tests.sandbox import boxes

BACKENDS = ["bubblewrap", "unsafe_subprocess", "sandbox_fusion", "container"]
LOCAL = ["bubblewrap", "unsafe_subprocess", "container"]


@pytest.fixture
def box(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
    with boxes.opened(request.param, tmp_path, monkeypatch, wall_s=5.0, output_bytes=2000, file_mb=1) as made:
        yield made


on_all = pytest.mark.parametrize("box", BACKENDS, indirect=True)
on_local = pytest.mark.parametrize("box", LOCAL, indirect=True)


def python(box: Sandbox, code: str, **options):
    return box.run(["python", "-c", code], **options)


@on_all
def test_run_returns_stdout_stderr_and_exit_code(box):
    result = python(box, "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (result.ok, result.limit, result.signal) == (False, None, None)
    assert 0 < result.seconds < 60


@on_all
def test_program_reads_its_complete_input(box):
    text = "zwölf\n" * 1000
    result = python(
        box, "import sys; d = sys.stdin.buffer.read(); print(len(d), d.count('ö'.encode()))", stdin=text.encode()
    )
    assert result.stdout == f"{len(text.encode())} 1000\n".encode()
    assert python(box, "print(repr(input()))").stderr.splitlines()[-1].startswith(b"EOFError")


@on_all
def test_every_run_gets_copies_of_written_files(box):
    box.write("data/a b.txt", b"first")
    box.write("main.py", b"p = 'data/a b.txt'\nprint(open(p).read())\nopen(p, 'w').write('changed')")
    for _ in range(2):
        assert box.run(["python", "main.py"]).stdout == b"first\n"
    box.write("data/a b.txt", b"second")
    assert box.run(["python", "main.py"]).stdout == b"second\n"


PATHS = ["", "/etc/passwd", "../a", "a/../../b", "a/", ".", "a\0b", "a\nb", "x" * 300, "a/" * 600 + "b"]


@on_all
def test_paths_outside_the_folder_and_bad_names_are_refused(box):
    for path in PATHS:
        with pytest.raises(ValueError, match="path"):
            box.write(path, b"")


@on_all
def test_invalid_commands_are_refused(box):
    for command in ([], "python", [""]):
        with pytest.raises(ValueError):  # noqa: PT011 - of several kinds
            box.run(command)


@on_local
def test_command_too_long_for_the_system_raises_value_error(box):
    with pytest.raises(ValueError, match="too long"):
        box.run(["echo", *["x" * 100_000] * 100])


@on_all
def test_input_and_content_must_be_bytes(box):
    for value in (5, "text", None, [1, 2]):
        with pytest.raises(TypeError, match="expected bytes"):
            python(box, "pass", stdin=value)
        with pytest.raises(TypeError, match="expected bytes"):
            box.write("n", value)
    box.write("n", bytearray(b"x"))
    assert python(box, "print(open('n').read() + input())", stdin=memoryview(b"y")).stdout == b"xy\n"


@on_all
def test_input_and_files_are_bounded_together(box):
    for number in range(60):
        box.write(f"f{number}", b"x" * 1024 * 1024)
    with pytest.raises(ValueError, match="in all"):
        python(box, "pass", stdin=b"x" * 5 * 1024 * 1024)


def test_written_folders_count_as_files(tmp_path, monkeypatch):
    with boxes.opened("unsafe_subprocess", tmp_path, monkeypatch, files=3) as box:
        box.write("a/b/c", b"")
        with pytest.raises(SandboxError, match="3 files and folders"):
            box.write("d", b"")


@on_all
def test_write_refuses_folder_conflicts_and_large_files(box):
    box.write("a/b", b"")
    with pytest.raises(ValueError, match="both"):
        box.write("a", b"")
    with pytest.raises(ValueError, match="both"):
        box.write("a/b/c", b"")
    box.write("a/b", b"again")
    with pytest.raises(SandboxError, match="bytes"):
        box.write("c", b"x" * (1024 * 1024 + 1))


@on_all
def test_output_above_the_limit_ends_the_program(box):
    result = python(box, "import sys; sys.stdout.write('x' * 1999); sys.stderr.write('y')")
    assert result.ok
    assert (len(result.stdout), result.stderr) == (1999, b"y")
    result = python(box, "import sys; sys.stdout.write('x' * 2001)")
    assert (result.limit, result.exit_code, result.ok, len(result.stdout)) == ("output", None, False, 2000)


@on_all
def test_endless_output_is_cut_off(box):
    if type(box).__name__ == "SandboxFusion":
        pytest.skip("the service has its own bound")
    result = python(box, "while True: print('x' * 1000)")
    assert result.limit == "output"
    assert len(result.stdout) == 2000


@pytest.mark.parametrize("backend", BACKENDS)
def test_wall_clock_ends_an_endless_program(backend, tmp_path, monkeypatch):
    # The program's time limit excludes the start of a container.
    monkeypatch.setattr(container, "_START_S", 0.5)
    with boxes.opened(backend, tmp_path, monkeypatch, wall_s=1.0) as box:
        started = time.monotonic()
        deaf = "import os, signal\nfor number in {*range(1, 32)} - {9, 19}: signal.signal(number, signal.SIG_IGN)\n"
        close = "" if backend == "sandbox_fusion" else "os.closerange(0, 3)"  # its stub forgets output before that
        result = python(box, f"{deaf}print('begun', flush=True); {close}\nwhile True: pass")
        assert (result.limit, result.exit_code, result.stdout) == ("wall", None, b"begun\n")
        assert time.monotonic() - started < 60


@on_local
def test_output_may_be_binary(box):
    assert python(box, "import os; os.write(1, b'\\xff\\x00\\xfe')").stdout == b"\xff\x00\xfe"


@on_local
def test_environment_has_only_standard_variables(box, monkeypatch):
    monkeypatch.setenv("CREDITFLOW_SECRET", "sesame")
    names = python(box, "import os; print(*sorted(os.environ))").stdout.decode().split()
    assert set(names) <= {"HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "OLDPWD", "TMPDIR"}


@on_local
def test_other_commands_get_arguments_or_exit_with_127(box):
    for command in (["no-such-command"], ["--help"]):
        assert box.run(command).exit_code == 127
    assert box.run(["sh", "-c", 'printf "%s|" "$@"', "sh", "a b", "", "'", "$HOME"]).stdout == b"a b||'|$HOME|"


@on_local
def test_result_has_the_signal_that_ended_the_program(box):
    code = "import ctypes, os; os.close(2); ctypes.string_at(0)"
    result = python(box, code)
    assert (result.signal, result.exit_code, result.limit, result.ok) == (11, None, None, False)


@on_local
def test_child_left_behind_does_not_delay_the_run(box):
    code = "import os, time\nif os.fork() == 0:\n    time.sleep(1000)\nelse:\n    print('done', flush=True)"
    result = python(box, code)
    assert (result.stdout, result.limit) == (b"done\n", None)


@on_all
def test_concurrent_runs_are_isolated(box):
    code = b"import os, time; n = input(); open('mine', 'w').write(n); time.sleep(0.1)\n"
    code += b"print(open('mine').read(), sorted(os.listdir()))"
    box.write("main.py", code)
    lock = threading.Barrier(4)

    def one(number: int) -> bytes:
        lock.wait()
        return box.run(["python", "main.py"], stdin=str(number).encode()).stdout

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(4)))
    assert results == [f"{number} ['main.py', 'mine']\n".encode() for number in range(4)]


@on_local
def test_runs_leave_no_descriptor_and_no_child(box):
    def all_kinds() -> None:
        python(box, "open('a', 'w')")
        python(box, "import sys; sys.exit(1)", stdin=b"x")
        python(box, "while True: print('x' * 1000)")
        box.run(["no-such-command"])

    all_kinds()
    before, children_before = descriptors(), children().keys()
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(all_kinds) for _ in range(2)]:
            future.result()
    # Fewer is possible: an object of another test may be collected late.
    assert descriptors() <= before
    assert children().keys() <= children_before


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("wall_s", 0),
        ("wall_s", float("nan")),
        ("processes", 2.5),
        ("files", True),
        ("cpu_s", "1"),
        ("wall_s", 1e300),
        ("memory_mb", 10**12),
    ],
)
def test_limits_must_be_positive_and_within_bounds(option, value):
    with pytest.raises(ConfigError, match=option):
        boxes.open_sandbox("unsafe_subprocess", **{option: value})
