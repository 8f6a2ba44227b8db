import asyncio
import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from creditflow.data import Score
from creditflow.errors import RewardError
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from creditflow.rewards.execution import processes
from creditflow.rewards.execution.backends import BackendOptions, make_backend
from creditflow.rewards.execution.processes import WorkerPool
from tests.rewards.processes import HANG_S, alive, children, descriptors, until
from tests.rewards.trajectories import Mute, NoException, a_trajectory

BEFORE: set[int] = set()


@pytest.fixture(autouse=True)
def _children_before():
    """Record the processes that exist before a test."""
    BEFORE.clear()
    BEFORE.update(children())


def left_behind():
    """The processes that a test has started and not ended."""
    return {pid: state for pid, state in children().items() if pid not in BEFORE}


def recurse(n):
    return recurse(n + 1)


def throw(error):
    raise error


class Sparse:
    def tolist(self):
        raise RuntimeError("no such layout")


def last_words():
    os.write(2, b"the last words\n")
    os._exit(7)


def write_for_ever():
    while True:
        print("x" * 10_000)


BAD = {
    "none": (lambda: None, "failed", "expected a number, got nothing (None)"),
    "nan": (lambda: float("nan"), "failed", "expected a value in [0, 1], got nan"),
    "huge": (lambda: 10**5000, "failed", "expected a value in [0, 1], got inf"),
    "list": (lambda: [0.5] * 3, "failed", "expected one value for each of 2 response tokens, got 3"),
    "long list": (lambda: [0.5] * 2_000_000, "failed", "expected one value for each of 2 response tokens, got 2000000"),
    "raises": (lambda: 1 / 0, "failed", "ZeroDivisionError: division by zero"),
    "exits": (lambda: sys.exit(3), "failed", "it tried to end the process: sys.exit(3)"),
    "exits at once": (lambda: os._exit(3), "failed", "its worker process died twice (exit code 3)"),
    "has last words": (last_words, "failed", "its worker process died twice (exit code 7: the last words)"),
    "segfaults": (lambda: ctypes.string_at(0), "failed", "its worker process died twice (signal SIGSEGV)"),
    "recurses": (lambda: recurse(0), "failed", "RecursionError: maximum recursion depth exceeded"),
    "prints": (write_for_ever, "failed", "printed more than 1 MiB"),
    "raises what ends programs": (lambda: throw(NoException("a panic")), "failed", "NoException: a panic"),
    "cannot say what it raised": (lambda: throw(Mute()), "failed", "Mute"),
    "an object that cannot be looked at": (Sparse, "failed", "RuntimeError: no such layout"),
    "a score with an array for a range": (lambda: Score(0.5, range=np.zeros((2, 2))), "failed", "expected a Score"),
    "sleeps": (lambda: time.sleep(1000), "timeout", "took longer than 1 s"),
    "hangs": (lambda: pow(7, 10**9), "timeout", "took longer than 1 s"),
    "a failed score": (lambda: Score(0.0, status="failed", reason="away"), "failed", "away"),
    "a score of nothing": (lambda: Score(None), "failed", "expected a number, got nothing (None)"),
    "a score with no range": (lambda: Score(0.5, range="ab"), "failed", "expected a Score with a range of finite"),
}


def bad_functions(names=tuple(BAD)):
    """Functions that misbehave at the middle step, and are good at the others."""

    def call(bad, step, trajectory):
        return bad() if step.index == 1 else 0.25

    limits = {name: 1.0 if BAD[name][1] == "timeout" else 60.0 for name in names}
    return [
        RewardFunction(name, "step", functools.partial(call, BAD[name][0]), timeout=limit)
        for name, limit in limits.items()
    ]


def score(functions, trajectories, n_workers=2, **kwargs):
    backend = make_backend("process", functions, BackendOptions(num_workers=n_workers, **kwargs))
    manager = RewardManager(functions, 1.0, backend=backend)
    try:
        return asyncio.run(manager.score(trajectories))
    finally:
        manager.close()


def expect_bad_ones_to_fail_alone(trajectory):
    for name in trajectory.steps[0].scores:
        _, status, reason = BAD[name]
        scores = [step.scores[name] for step in trajectory.steps]
        assert [score.status for score in scores] == ["ok", status, "ok"], (name, [score.reason for score in scores])
        assert scores[1].reason.startswith(reason), name
        assert [scores[0].value, scores[2].value] == [0.25, 0.25]


def test_misbehaving_functions_fail_only_their_own_scores(capfd):
    trajectory = a_trajectory()
    report = score(bad_functions(), [trajectory])
    expect_bad_ones_to_fail_alone(trajectory)
    assert {f.name: f.timeouts for f in report.functions if f.timeouts} == {"sleeps": 1, "hangs": 1}
    assert left_behind() == {}
    assert len(capfd.readouterr().err) < 10_000  # of the gigabyte printed


def test_killed_workers_cost_no_score(tmp_path):
    log = tmp_path / "calls"

    def logged(step, trajectory):
        with open(log, "a") as file:  # noqa: PTH123
            file.write(f"{trajectory.id} {step.index}\n")
        time.sleep(0.0005)
        return step.index / 100

    functions = [RewardFunction("f", "step", logged)]
    pool = WorkerPool(functions, 2, timeout=HANG_S)
    trajectories = [a_trajectory(str(i), "p" * 100) for i in range(10)]

    def kill_two():
        for enough in (200, 600):
            until(lambda enough=enough: log.exists() and len(log.read_text().splitlines()) >= enough)
            os.kill(pool.pids[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_two)
    killer.start()
    report = asyncio.run(RewardManager(functions, backend=pool).score(trajectories))
    killer.join()
    assert (report.functions[0].matched, report.functions[0].failed) == (1000, 0)
    assert [[step.scores["f"].value for step in trajectory.steps] for trajectory in trajectories] == [
        [i / 100 for i in range(100)]
    ] * 10
    lines = log.read_text().splitlines()
    assert len(set(lines)) == 1000
    assert len(lines) <= 1002  # repeats only the call in which each worker died
    pool.close()
    assert left_behind() == {}


def test_workers_serve_successive_loops_and_are_replaced():
    functions = [RewardFunction("f", "step", lambda step, trajectory: 1.0)]
    pool = WorkerPool(functions, 1, timeout=HANG_S)
    manager = RewardManager(functions, backend=pool)

    def score_one():
        assert asyncio.run(manager.score([a_trajectory()])).failed_frac == 0.0
        (pid,) = pool.pids
        return pid

    pid = score_one()
    assert [score_one(), score_one()] == [pid, pid]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))
    another = score_one()
    manager.close()
    assert len({pid, another, score_one()}) == 3
    manager.close()
    assert left_behind() == {}


def test_cancelled_scoring_ends_its_workers():
    functions = [RewardFunction("f", "step", lambda step, trajectory: time.sleep(1000))]
    pool = WorkerPool(functions, 2, timeout=1000)

    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(RewardManager(functions, backend=pool).score([a_trajectory()]), 1.0)

    asyncio.run(impatient())
    until(lambda: left_behind() == {})
    pool.close()


def test_workers_die_with_a_killed_manager(tmp_path):
    script, begun = tmp_path / "script.py", tmp_path / "begun-"
    script.write_text(
        "import asyncio, time\n"
        "from creditflow.rewards import RewardFunction, RewardManager\n"
        "from creditflow.rewards.execution.processes import WorkerPool\n"
        "from tests.rewards.trajectories import a_trajectory\n"
        "def hang(step, trajectory):\n"
        f"    open({str(begun)!r} + step.agent, 'w').write('begun')\n"
        "    time.sleep(1000)\n"
        "functions = [RewardFunction('f', 'step', hang)]\n"
        "asyncio.run(RewardManager(functions, backend=WorkerPool(functions, 2, "
        "1000)).score([a_trajectory(agents='ab')]))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": os.getcwd()})  # noqa: PTH109
    until(lambda: all((tmp_path / f"begun-{agent}").exists() for agent in "ab"))
    workers = list(children(process.pid))
    assert len(workers) == 2
    process.kill()
    process.wait()
    until(lambda: not any(alive(pid) for pid in workers))


def test_pool_closes_every_descriptor():
    functions = [RewardFunction("f", "step", lambda step, trajectory: os._exit(1) if step.index else 1.0)]
    counts = []
    for _ in range(4):
        score(functions, [a_trajectory(agents="pe")], n_workers=1)
        counts.append(descriptors())
    assert counts[-1] - counts[0] < 3  # a leak adds one for each pool; something else may be opened or collected once


def test_output_of_functions_is_shown_up_to_a_limit(capfd):
    functions = [RewardFunction("f", "step", lambda step, trajectory: print("seen", step.index, "." * 1000) or 1.0)]
    score(functions, [a_trajectory(agents="p" * 30)], n_workers=1)
    shown = capfd.readouterr().err
    assert "seen 0" in shown
    assert "printed more than is shown" in shown
    assert len(shown) < 5_000


@given(st.integers(0, 5_000), st.integers(1, 20))
def test_batches_cover_all_calls_in_order_and_shrink(n_calls, n_workers):
    parts = list(processes.batches(range(n_calls), n_workers))
    assert [number for part in parts for number in part] == list(range(n_calls))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert all(1 <= size <= processes.BATCH[1] for size in sizes)
    assert len(parts) >= min(n_calls, n_workers)


def test_workers_find_functions_of_a_recipe_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "from creditflow import reward\n"
        "BESIDE = Path(__file__).with_name('weight.txt')\n"
        "class Table:\n"
        "    def __init__(self, scale=1.0): self.scale = scale\n"
        "    def __call__(self, step, trajectory): return self.scale * float(BESIDE.read_text())\n"
        "@reward(agent_match='p')\n"
        "def helped(step, trajectory): return helper()\n"
        "def helper(): return 0.5\n"
    )
    (tmp_path / "weight.txt").write_text("0.25")
    entries = [RewardFunctionConfig(fn="mine.py:Table", args={"scale": 2.0}), RewardFunctionConfig(fn="mine.py:helped")]
    trajectory = a_trajectory()
    score(load_reward_functions(entries, tmp_path, "pev"), [trajectory])
    assert {name: score.value for name, score in trajectory.steps[0].scores.items()} == {"Table": 0.5, "helped": 0.5}


def test_unpicklable_function_is_refused_by_make_backend():
    lock = threading.Lock()
    with pytest.raises(RewardError, match=r"reward function f: cannot be sent to another process .*backend=inline"):
        make_backend("process", [RewardFunction("f", "step", lambda step, trajectory: lock.locked())])


class BreaksOnArrival:
    """Can be pickled, but not unpickled."""

    def __reduce__(self):
        return (int, ("no number",))

    def __call__(self, step, trajectory):
        return 1.0


def test_failed_worker_start_fails_every_call_with_a_reason():
    trajectory = a_trajectory()
    score([RewardFunction("f", "step", BreaksOnArrival())], [trajectory])
    for step in trajectory.steps:
        assert step.scores["f"].reason.startswith("the worker process cannot start: ValueError: invalid")


def test_async_and_here_functions_run_in_the_manager():
    async def waits(step, trajectory):
        return float(os.getpid() == home)

    home = os.getpid()
    functions = [
        RewardFunction("waits", "step", waits, is_async=True),
        RewardFunction("stays", "step", lambda step, trajectory: float(os.getpid() == home), inline=True),
        RewardFunction("goes", "step", lambda step, trajectory: float(os.getpid() == home)),
    ]
    trajectory = a_trajectory(agents="p")
    score(functions, [trajectory])
    values = {name: score.value for name, score in trajectory.steps[0].scores.items()}
    assert values == {"waits": 1.0, "stays": 1.0, "goes": 0.0}


# The channel, which functions can reach


def the_connection():
    """The file descriptor on which a worker answers."""
    return int(sys.argv[1])


def stop_in_the_middle_of_an_answer():
    os.write(the_connection(), b"[")
    os.kill(os.getpid(), signal.SIGSTOP)


MEDDLING = {
    "garbage": lambda: os.write(the_connection(), b"abc\n"),
    "an answer that never ends": lambda: os.write(the_connection(), b"["),
    "an answer too long": lambda: os.write(the_connection(), b"0" * (processes.MAX_ANSWER + 1)),
    "another value": lambda: os.write(the_connection(), b'{"error": 1}\n'),
    "no answer": lambda: os.close(the_connection()),
    "a fork that comes back": lambda: os.fork() or throw(RuntimeError("the child")),
    "a fork that stays": lambda: os.fork() or time.sleep(1000),
    "half an answer": stop_in_the_middle_of_an_answer,
}


def test_meddling_with_the_channel_fails_only_the_meddler():
    def call(meddle, step, trajectory):
        if step.index == 1:
            meddle()
        return step.index / 100

    trajectory = a_trajectory("t", "p" * 9)
    functions = [
        RewardFunction(name, "step", functools.partial(call, meddle), timeout=1.5) for name, meddle in MEDDLING.items()
    ]
    score(functions, [trajectory])
    for step in trajectory.steps:
        for name, result in step.scores.items():
            meddled = step.index == 1 and result.status in ("failed", "timeout")
            assert meddled or result.value == step.index / 100, (name, result)
    assert trajectory.steps[1].scores["half an answer"].status == "timeout"
    until(lambda: left_behind() == {})


# What travels


class OfMain:
    """Can be pickled, but not unpickled in a worker."""

    def __reduce__(self):
        return (throw, (ValueError("unknown here"),))


def test_unpicklable_trajectories_fail_alone():
    functions = [RewardFunction("f", "step", lambda step, trajectory: 0.5)]
    expect_unpicklable_trajectories_to_fail_alone(functions, make_backend("process", functions))


def expect_unpicklable_trajectories_to_fail_alone(functions, backend):
    trajectories = [a_trajectory(str(i)) for i in range(5)]
    trajectories[1].info["thing"], trajectories[3].info["thing"] = threading.Lock(), OfMain()
    report = asyncio.run(RewardManager(functions, 1.0, backend=backend).score(trajectories))
    backend.close()
    scores = [trajectory.steps[0].scores["f"] for trajectory in trajectories]
    assert [score.status for score in scores] == ["ok", "failed", "ok", "failed", "ok"]
    assert scores[1].reason.startswith("the trajectory cannot be sent to another process: ")
    assert scores[3].reason.startswith("the trajectory cannot be read in another process: unknown here")
    assert report.functions[0].failed == 6


def test_recipe_file_is_sent_as_loaded(tmp_path):
    file, trajectory = tmp_path / "edited.py", a_trajectory()

    def loaded(value):
        file.write_text(f"VALUE = {value}\ndef f(step, trajectory): return VALUE\n")
        return load_reward_functions([RewardFunctionConfig(fn="edited.py:f")], tmp_path, ())

    first, second = loaded(0.25), loaded(0.75)
    file.unlink()
    for functions, value in ((first, 0.25), (second, 0.75)):
        score(functions, [trajectory])
        assert trajectory.steps[0].scores["f"].value == value


def test_workers_search_modules_as_the_trainer_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "difflib.py").write_text("raise RuntimeError('not the library')")
    trajectory = a_trajectory()
    score([RewardFunction("f", "step", lambda step, trajectory: float(bool(__import__("difflib"))))], [trajectory])
    assert trajectory.steps[0].scores["f"].value == 1.0


def closes_output(step, trajectory):
    if step.index == 0:
        sys.stdout = None
    if step.index == 1:
        sys.stderr.close()
    return 0.5


def leaves_an_alarm(step, trajectory):
    if step.index == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
    else:
        time.sleep(0.1)
    return 1.0


@pytest.mark.parametrize("careless", [closes_output, leaves_an_alarm])
def test_careless_call_does_not_hit_the_next_one(careless):
    trajectory = a_trajectory()
    score([RewardFunction("f", "step", careless)], [trajectory], n_workers=1)
    assert [step.scores["f"].status for step in trajectory.steps] == ["ok"] * 3


def test_endlessly_forking_function_leaves_nothing_behind(tmp_path):
    """Each child starts in a separate session, while the worker is being ended."""

    def forks(step, trajectory):
        while True:
            subprocess.Popen(["sleep", f"1000.{os.getppid()}"], start_new_session=True)

    mark = f"1000.{os.getpid()}"
    functions = [RewardFunction("f", "step", forks, timeout=0.3)]
    report = score(functions, [a_trajectory("t", "pppp")], n_workers=1)
    assert report.functions[0].timeouts == 4
    left = [file for file in Path("/proc").glob("[0-9]*/cmdline") if mark in _text(file)]
    assert left == []


def _text(file):
    try:
        return file.read_text()
    except OSError:
        return ""


def test_calls_behind_a_hanging_call_are_redistributed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "BATCH", (8, 8))  # all are sent together, to one worker, with the hanging ones first
    meeting = [tmp_path / str(i) for i in (3, 5, 7)]

    def meets(step, trajectory):
        (tmp_path / str(step.index)).touch()
        while step.index % 2 and not all(file.exists() for file in meeting):
            time.sleep(0.01)
        return 1.0

    functions = [
        RewardFunction("hangs", "step", lambda *_: time.sleep(1000), agent_match=re.compile("h"), timeout=0.5),
        RewardFunction("meets", "step", meets, agent_match=re.compile("p"), timeout=HANG_S),
    ]
    report = score(functions, [a_trajectory("t", "hh" + "p" * 6)], n_workers=4)
    assert [(f.timeouts, f.failed) for f in report.functions] == [(2, 2), (0, 0)]


def test_closing_the_pool_ends_a_running_scoring():
    functions = [RewardFunction("f", "step", lambda step, trajectory: time.sleep(1000))]
    pool = WorkerPool(functions, 1, timeout=1000)

    async def closed():
        scoring = asyncio.create_task(RewardManager(functions, 1.0, backend=pool).score([a_trajectory()]))
        while not pool.pids:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close)
        return await scoring

    assert asyncio.run(closed()).failed_frac == 1.0
    assert left_behind() == {}
