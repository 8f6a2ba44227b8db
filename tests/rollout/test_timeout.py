"""The time limit of a rollout. Workflows, models and endpoints set the event loop's clock, so no test waits."""

import asyncio
import threading

import httpx
import pytest

from creditflow.config import load_recipe
from creditflow.credit.rewards import read_rewards
from creditflow.data import Task, TrajectoryBatch
from creditflow.engines.common.components import build_components
from creditflow.errors import CreditflowError
from creditflow.monitoring.metrics import rollout_metrics
from creditflow.rewards import RewardFunction, RewardManager
from creditflow.rollout import AgentSpec, ChatClient, FrozenModel, Rollout, Scheduler, run_rollouts
from creditflow.rollout.endpoint import Endpoint
from creditflow.rollout.recorder import Sampling
from tests.builders import Replies, credit_options, rollout_of
from tests.paths import TOY
from tests.rewards.processes import HANG_S

AGENTS = {"writer": AgentSpec(), "far": AgentSpec(policy="far")}
TOLD = "took more than 600 s (actor_rollout_ref.rollout.timeout_s)"


class Clockwork(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only when it is set."""

    now = 0.0

    def time(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds


async def pass_(seconds):
    """Spend seconds in the rollout's code."""
    asyncio.get_running_loop().pass_(seconds)
    await asyncio.sleep(0)


async def forever():
    await asyncio.Event().wait()


class Model(Replies):
    """Answers `yes`; each generation takes `seconds` on the loop's clock."""

    def __init__(self, seconds=0.0):
        super().__init__(lambda prompt: "yes")
        self.seconds, self.loop = seconds, None

    def generate(self, requests):
        if self.seconds:
            self.loop.pass_(self.seconds)
        return super().generate(requests)


class Hanging(ChatClient):
    """An endpoint that accepts a call and never answers."""

    def __init__(self):
        self.cancelled = 0

    async def chat(self, messages, **given):
        try:
            await pass_(601)
            await forever()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


def run(main):
    with asyncio.Runner(loop_factory=Clockwork) as runner:
        return runner.run(main())


def run_workflow(workflow, n=1, model=None, far=None, **sampling):
    async def main():
        client = model or Model()
        client.loop = asyncio.get_running_loop()
        clients = {"default": client} | ({"far": far} if far else {})
        rollouts = [rollout_of(k) for k in range(n)]
        return await run_rollouts(rollouts, workflow, AGENTS, Scheduler(clients), Sampling(**sampling))

    return run(main)


async def hangs_in_the_second(task, team):
    await team.writer("one")
    if task.extra_info["k"] == 1:
        await pass_(601)
        await forever()
    return await team.writer("two")


def test_hanging_rollout_fails_alone():
    made = run_workflow(hangs_in_the_second, n=3)
    assert [one.status for one in made] == ["ok", "failed", "ok"]
    assert [len(one.steps) for one in made] == [2, 1, 2]
    assert made[1].info["error"].startswith(f"RolloutTimedOut: the rollout {TOLD}")
    assert made[1].info["timed_out"] == 600


@pytest.mark.parametrize(("after", "status"), [(299, "ok"), (301, "failed")])
def test_clock_stops_only_in_the_sampler(after, status):
    async def solve(task, team):
        await pass_(300)
        await team.writer("one")
        await asyncio.gather(team.writer("two"), team.writer("three"))
        await pass_(after)
        await pass_(0)

    (made,) = run_workflow(solve, model=Model(seconds=10_000))
    assert (made.status, len(made.steps)) == (status, 3)


@pytest.mark.parametrize("blocks_first", [True, False])
def test_time_outside_a_rollout_does_not_count(blocks_first):
    async def solve(task, team):
        if blocks_first:  # work that blocks the loop before other rollouts have begun
            asyncio.get_running_loop().pass_(400)
        await team.writer("one")
        if not blocks_first:
            asyncio.get_running_loop().pass_(400)

    assert [trajectory.status for trajectory in run_workflow(solve, n=4)] == ["ok"] * 4


def test_late_rollout_is_not_sampled_for():
    async def solve(task, team):
        asyncio.get_running_loop().pass_(601)  # without an await: no timer can fire
        await team.writer("one")

    model = Model()
    (made,) = run_workflow(solve, model=model)
    assert (made.status, made.info["timed_out"], model.batches) == ("failed", 600, [])


def test_hanging_endpoint_call_is_cancelled():
    async def solve(task, team):
        try:
            await team.far("one")
        except CreditflowError:
            return "the workflow goes on"

    far = Hanging()
    (made,) = run_workflow(solve, far=far)
    assert (made.status, made.steps, far.cancelled) == ("failed", [], 1)


class Slow(Endpoint):
    """An endpoint that takes 500 s for a reply and serves one request at a time."""

    async def _post(self, client, body):
        await pass_(500)
        return {"choices": [{"message": {"role": "assistant", "content": "far"}, "finish_reason": "stop"}]}


def test_queue_for_an_endpoint_does_not_count():
    async def solve(task, team):
        return await team.far("one")

    far = FrozenModel(Slow("http://127.0.0.1:9", "m", None, {}, 1, 120.0, 0, 0.0, 600.0))
    assert [one.status for one in run_workflow(solve, n=3, far=far)] == ["ok"] * 3


def test_workflow_that_swallows_cancellation_is_abandoned():
    said = []

    async def solve(task, team):
        try:
            await pass_(601)
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
        try:
            await team.writer("one")
        except CreditflowError as error:
            said.append(str(error))
        await pass_(11)
        await forever()

    (made,) = run_workflow(solve)
    assert (made.status, made.steps) == ("failed", [])
    assert len(said) == 1
    assert said[0].startswith(f"trajectory t0: writer was called after the rollout had ended: it {TOLD}")


def post(base_url, api_key, agent):
    """Return status and body of a chat completion over HTTP."""
    body = {"model": agent, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=HANG_S)
    return answer.status_code, answer.json()


def test_thread_that_does_not_return_is_abandoned():
    release, said, threads = threading.Event(), [], []

    def solve(task, team):
        threads.append(threading.current_thread())
        url, key = team.base_url, team.api_key
        said.append(post(url, key, "writer"))
        said.append(post(url, key, "far"))
        release.wait()
        said.append(post(url, key, "writer"))
        said.append(post(url, "another key", "writer"))
        for call in (lambda: team.base_url, lambda: asyncio.run(team.writer("one"))):
            try:
                call()
            except CreditflowError as error:
                said.append((0, str(error)))

    (made,) = run_workflow(solve, far=Hanging())
    assert (made.status, [step.response for step in made.steps], made.info["timed_out"]) == ("failed", ["yes"], 600)
    assert threads[0].is_alive()
    assert threads[0].daemon
    release.set()
    threads[0].join(timeout=HANG_S)
    assert [status for status, _ in said] == [200, 410, 410, 401, 0, 0]
    for _, answer in (said[1], said[2]):
        assert answer["error"]["code"] == "trajectory_ended"
        assert f"has ended: it {TOLD}" in answer["error"]["message"]
    assert all(TOLD in text for _, text in said[4:])
    assert len(made.steps) == 1


@pytest.mark.parametrize("end", ["mask", "zero"])
def test_timeout_outcome_masks_or_counts_zero(end):
    made = run_workflow(hangs_in_the_second, n=3, timeout_outcome=end)

    functions = [
        RewardFunction("own", "step", lambda step, trajectory: 0.5),
        RewardFunction("right", "outcome", lambda trajectory: 1.0),
    ]
    asyncio.run(RewardManager(functions).score(made))
    batch = TrajectoryBatch.from_trajectories(made)
    rewards, metrics = read_rewards(batch, credit_options()), rollout_metrics(batch)
    zero = end == "zero"
    assert rewards.masked_N.tolist() == [False, not zero, False]
    for n, (known, outcome) in enumerate([(True, 1), (zero, 0), (True, 1)]):
        assert set(rewards.known_S[batch.trajectory_of_step == n]) == {known}
        assert set(rewards.outcome_S[batch.trajectory_of_step == n]) == {outcome}
    assert [score.value for step in made[1].steps for score in step.scores.values()] == ([0.5] if zero else [])
    assert metrics["rollout/timeout_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/failed_frac"] == pytest.approx(0 if zero else 1 / 3)
    assert metrics["rollout/agent_error_frac"] == pytest.approx(1 / 3 if zero else 0)


LATE = """
import asyncio

async def solve(task, team):
    draft = await team.writer(task.text)
    if task.ground_truth == 1:
        asyncio.get_running_loop().pass_(31)
        await asyncio.Event().wait()
    return draft
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "late.py").write_text(LATE)
    options = ["recipe.tasks=2", f"team.workflow={tmp_path}/late.py:solve", "actor_rollout_ref.rollout.timeout_s=30"]
    return lambda *overrides: load_recipe(TOY, [*options, "reward.backend=inline", *overrides])


def test_local_engine_fails_late_rollouts_alone(recipe):
    from creditflow.engines.local.policy_set import PolicySet
    from creditflow.engines.local.rollouts import sample_trajectories

    components = build_components(recipe())
    policy_set = PolicySet.for_rollouts(components.recipe)

    made = run(lambda: sample_trajectories(components, policy_set, components.train_tasks, 2, 1.0, (0, 1)))
    assert [one.status == "failed" for one in made] == [False, False, True, True]
    assert [one.info.get("timed_out") for one in made] == [None, None, 30, 30]


@pytest.mark.parametrize("end", ["mask", "zero"])
def test_verl_runner_fails_late_rollouts_alone(recipe, end):
    """The path of an agent-loop worker. Its servers take 10,000 s for a response, which does not count."""
    from creditflow.engines.verl.runner import build_runner

    class Servers:
        fault = None

        def __init__(self):
            self.clients = {"default": Model()}

        async def generate(self, policy, request):
            await pass_(10_000)
            return self.clients[policy].generate([request])[0]

        def expect(self, rollouts):
            pass

    async def main():
        runner = build_runner(recipe(f"actor_rollout_ref.rollout.timeout_outcome={end}"), 1)
        one = [Rollout(Task("toy", ({"role": "user", "content": "Say."},), k), "u", f"t{k}", (k,)) for k in range(2)]
        try:
            return [(await runner.run(rollout, Servers(), runner.components.sampling))[0] for rollout in one]
        finally:
            await runner.close()

    fine, late = run(main)
    assert (fine.status, fine.outcome.value) == ("ok", 1)
    assert (late.status, late.info["timed_out"]) == ("failed" if end == "mask" else "ok", 30)
    assert late.outcome is None if end == "mask" else late.outcome.value == 0
