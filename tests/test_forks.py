"""Programs of the fork server behave as those of a new Python."""

import os
import signal
import subprocess
import sys

import pytest

from tests.forks import fast_python

PROGRAMS = {
    "output": "import sys; print(sys.argv, __name__); print('error', file=sys.stderr)",
    "environment": "import os; print(os.environ['OF_TEST'], os.getcwd())",
    "input": "print(input())",
    "code": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('wrong')",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "atexit": "import atexit; atexit.register(print, 'last'); print('first')",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_forked_program_behaves_like_a_new_python(program, tmp_path):
    fast, real = (
        subprocess.run(
            [python, "-c", PROGRAMS[program], "argument"],
            capture_output=True, cwd=tmp_path, env={**os.environ, "OF_TEST": "x"}, input=b"line", check=False,
        )
        for python in (fast_python(), sys.executable)
    )  # fmt: skip
    assert (fast.returncode, fast.stdout, fast.stderr) == (real.returncode, real.stdout, real.stderr)


def test_uncaught_exception_exits_with_1():
    done = subprocess.run([fast_python(), "-c", "raise ValueError('x')"], capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith(b"ValueError: x\n")


def test_forked_program_runs_modules_and_scripts(tmp_path):
    (tmp_path / "mine.py").write_text("import sys, other; print(sys.argv[1:], __name__, other.X)")
    (tmp_path / "other.py").write_text("X = 7")
    for program in (["-m", "mine"], [tmp_path / "mine.py"]):
        done = subprocess.run([fast_python(), *program, "a"], capture_output=True, cwd=tmp_path, text=True, check=True)
        assert done.stdout == "['a'] __main__ 7\n"


def test_killed_launcher_takes_its_program_with_it():
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([fast_python(), "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.kill()
        assert process.stdout.read() == b""  # open until the program has ended
    assert process.returncode == -signal.SIGKILL
