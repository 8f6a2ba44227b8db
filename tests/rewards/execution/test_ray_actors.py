import asyncio
import os
import signal
import time

import pytest

from creditflow.errors import ConfigError
from creditflow.rewards import RewardFunction, RewardManager, reward
from creditflow.rewards.entries import RewardFunctionConfig, load_reward_functions
from creditflow.rewards.execution import ray_actors as ray_backend
from creditflow.rewards.execution.backends import BackendOptions, make_backend
from creditflow.rewards.execution.ray_actors import RayBackend
from tests.ray_start import start_ray
from tests.rewards.execution.test_processes import (
    BreaksOnArrival,
    bad_functions,
    expect_bad_ones_to_fail_alone,
    expect_unpicklable_trajectories_to_fail_alone,
)
from tests.rewards.processes import alive, until
from tests.rewards.test_signatures import EACH, expect_the_same_scores, load
from tests.rewards.trajectories import a_trajectory

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def _no_ray_is_left():
    yield
    ray.shutdown()


def backend_of(functions, n_actors=2, **kwargs) -> RayBackend:
    """Make a backend on the Ray of this module, which starts once because that takes seconds."""
    if not ray.is_initialized():
        start_ray(num_cpus=2, include_dashboard=False, log_to_driver=False)
    return make_backend("ray", functions, BackendOptions(num_workers=n_actors, **kwargs))


def score(functions, trajectories, **kwargs):
    backend = backend_of(functions, **kwargs)
    report = asyncio.run(RewardManager(functions, 1.0, backend=backend).score(trajectories))
    backend.close()
    return report


def test_ray_option_error_names_its_key():
    ray.shutdown()  # options count where a Ray starts
    with pytest.raises(ConfigError, match=r"ray_kwargs\.ray_init: .*nonsense"):
        RayBackend([], BackendOptions(1, ray_init={"nonsense": 1})).start()


def test_misbehaving_function_fails_one_score_only():
    functions = bad_functions(["raises", "exits at once", "hangs", "prints", "a failed score"])
    backend = backend_of(functions, n_actors=1)
    manager = RewardManager(functions, 1.0, backend=backend)
    trajectory = a_trajectory()
    asyncio.run(manager.score([trajectory]))
    expect_bad_ones_to_fail_alone(trajectory)
    pids = [pid for actor in backend.actors for pid in ray.get(actor.pids.remote())]
    manager.close()
    until(lambda: not any(alive(pid) for pid in pids))  # neither an actor nor a worker of one


def test_killed_actor_costs_no_score(tmp_path):
    log = tmp_path / "calls"

    def logged(step, trajectory):
        with open(log, "a") as file:  # noqa: PTH123
            file.write(".")
        return step.index / 100

    async def waited(step, trajectory):
        await asyncio.sleep(0.01)
        return step.index / 100

    functions = [RewardFunction("logged", "step", logged), RewardFunction("waited", "step", waited, is_async=True)]
    backend = backend_of(functions, max_in_flight=16)
    trajectories = [a_trajectory(str(i), "p" * 100) for i in range(4)]

    async def interrupted():
        scoring = asyncio.create_task(RewardManager(functions, backend=backend).score(trajectories))
        while not log.exists() or log.stat().st_size < 100:
            await asyncio.sleep(0.01)
        os.kill((await backend.actors[0].pids.remote())[0], signal.SIGKILL)
        return await scoring

    report = asyncio.run(interrupted())
    assert [(f.matched, f.failed) for f in report.functions] == [(400, 0)] * 2
    for name in ("logged", "waited"):
        assert [[s.scores[name].value for s in p.steps] for p in trajectories] == [[i / 100 for i in range(100)]] * 4
    backend.close()


def test_async_and_plain_functions_run_together():
    in_flight = most = 0

    async def where(step, trajectory):
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        while most < 10:  # in this actor; one at a time they would time out
            await asyncio.sleep(0.001)
        in_flight -= 1
        return float(os.getpid() != home)

    home = os.getpid()
    functions = [
        RewardFunction("waits", "step", where, is_async=True),
        RewardFunction("works", "step", lambda step, trajectory: float(os.getpid() != home)),
        RewardFunction("stays", "step", lambda step, trajectory: float(os.getpid() == home), inline=True),
    ]
    report = score(functions, [a_trajectory(str(i), "p" * 20) for i in range(10)], n_actors=1)
    assert {f.name: f.mean for f in report.functions} == {"waits": 1.0, "works": 1.0, "stays": 1.0}
    assert report.functions[0].calls == 200


@pytest.mark.slow
def test_call_that_kills_its_actor_twice_fails() -> None:
    async def kills(step, trajectory):
        if trajectory.id == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    functions = [RewardFunction("f", "step", kills, is_async=True)]
    trajectories = [a_trajectory(str(i), "p") for i in range(3)]
    score(functions, trajectories, n_actors=1, max_in_flight=1)
    scores = [trajectory.steps[0].scores["f"] for trajectory in trajectories]
    assert [score.status for score in scores] == ["ok", "failed", "ok"]
    assert scores[1].reason.startswith("its Ray actor died twice")


@pytest.mark.slow
def test_blocking_async_function_is_detected(monkeypatch):
    monkeypatch.setattr(ray_backend, "GRACE_S", 3.0)

    async def blocks(step, trajectory):
        if step.index == 1:
            time.sleep(1000)  # blocks instead of awaiting
        return 1.0

    functions = [RewardFunction("f", "step", blocks, is_async=True, timeout=5.0)]
    trajectory = a_trajectory()
    score(functions, [trajectory], n_actors=1, max_in_flight=1)
    assert [step.scores["f"].status for step in trajectory.steps] == ["ok", "failed", "ok"]
    assert "blocks its thread" in trajectory.steps[1].scores["f"].reason


def test_unpicklable_trajectories_fail_alone():
    functions = [RewardFunction("f", "step", lambda step, trajectory: 0.5)]
    backend = backend_of(functions, n_actors=1)
    expect_unpicklable_trajectories_to_fail_alone(functions, backend)


def test_failed_actor_start_fails_every_call():
    trajectory = a_trajectory("t", "p" * 30)
    score([RewardFunction("f", "step", BreaksOnArrival())], [trajectory], n_actors=1)
    for step in trajectory.steps:
        assert step.scores["f"].reason.startswith("its Ray actor cannot start: ")


def test_cancelled_scoring_ends_the_actors(tmp_path):
    def sleeps(step, trajectory):
        (tmp_path / "begun").write_text(str(os.getpid()))
        time.sleep(1000)

    functions = [RewardFunction("f", "step", sleeps)]
    backend = backend_of(functions, n_actors=1)

    async def impatient():
        scoring = asyncio.create_task(RewardManager(functions, backend=backend).score([a_trajectory()]))
        while not ((tmp_path / "begun").exists() and (tmp_path / "begun").read_text()):
            await asyncio.sleep(0.01)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(impatient())
    until(lambda: not alive(int((tmp_path / "begun").read_text())))
    backend.close()


@reward(name="counting")
class Counting:
    """Counts its calls; each actor has an instance."""

    def __init__(self):
        self.calls = 0

    async def __call__(self, step, trajectory):
        self.calls += 1
        return 1.0

    def metrics(self):
        calls, self.calls = self.calls, 0
        return {"requests": float(calls), "index_max": float(calls)}


def test_counters_of_actors_are_summed(tmp_path):
    (function,) = load_reward_functions([RewardFunctionConfig(fn=f"{__name__}:Counting")], tmp_path, ())
    backend = backend_of([function])
    manager = RewardManager([function], backend=backend)
    trajectories = [a_trajectory(str(i), "p" * (10 + i)) for i in range(4)]
    first, second = (asyncio.run(manager.score(trajectories)).metrics() for _ in range(2))
    assert first["reward/counting/requests"] == 46
    assert 23 <= first["reward/counting/index_max"] < 46  # the larger of the two actors'
    assert second["reward/counting/requests"] == 0  # every answer was cached
    backend.close()


def test_functions_of_files_and_libraries_run_in_an_actor(tmp_path):
    """An actor has the text of a recipe's file alone, and passes it on to its own worker process."""
    (tmp_path / "mine.py").write_text("def half(step, trajectory):\n    return 0.5\n")
    of_file = load_reward_functions([RewardFunctionConfig(fn="mine.py:half")], tmp_path, ())
    functions = (*load(*EACH), *of_file)
    expect_the_same_scores(functions, backend_of(functions, n_actors=1))
