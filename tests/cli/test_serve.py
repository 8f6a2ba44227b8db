"""`creditflow serve` from its clients' point of view, and the files that it writes."""

import asyncio
import os
import signal
import socket
import subprocess
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from creditflow._utils.loopback import bound
from creditflow._utils.progress import Reporter
from creditflow.cli.serve import _serve
from creditflow.config import load_recipe
from creditflow.data import Score, Task, Trajectory, read_parquet
from creditflow.engines.common.components import build_components
from creditflow.errors import BatchError, InputError
from creditflow.rollout.http.sessions import TrajectoryWriter
from creditflow.runs import Ledger
from tests.builders import Letters
from tests.cli.commands import creditflow, refused
from tests.forks import fast_python
from tests.paths import ROOT
from tests.rewards.processes import HANG_S, until

RECIPE = ROOT / "examples" / "frameworks" / "recipe.yaml"
HELLO = [{"role": "user", "content": "hello"}]


class Serving:
    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [fast_python(), "-m", "creditflow", "serve", str(RECIPE), "-o", str(folder), "--port", "0", *options],
            env={**os.environ, "CREDITFLOW_API_KEY": "a key", "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        line = self.process.stderr.readline()
        assert line.startswith("loading ")
        while line.startswith("loading "):  # repeated on a busy machine
            line = self.process.stderr.readline()
        assert "base URL: " in line, line
        self.url = line.split()[2].removesuffix("/t/NAME/v1")

    def client(self, name: str, key: str = "a key") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/t/{name}/v1", api_key=key, max_retries=0)

    def end(self, name: str, **fields) -> httpx.Response:
        return self.post_end(name, json=fields)

    def post_end(self, name: str, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/t/{name}/end", headers={"Authorization": "Bearer a key"}, timeout=HANG_S, **body)

    def trajectories(self, name: str = "") -> list[Trajectory]:
        """The trajectories in the files, or those of the rollouts of one name."""
        files = [file for file in sorted(self.folder.glob("*.parquet")) if file.stat().st_size]
        read = [trajectory for file in files for trajectory in read_parquet(file).to_trajectories()]
        return [trajectory for trajectory in read if not name or trajectory.id.split("#")[0] == name]

    def wait_for(self, name: str, count: int = 1) -> list[Trajectory]:
        """The trajectories of the rollouts of one name, as soon as the files have `count` of them."""
        until(lambda: len(self.trajectories(name)) >= count, every=0.1)
        return self.trajectories(name)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()

    def stop(self, number: int = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.process.wait(HANG_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory):
    """A server that writes each trajectory into a separate file; each test uses its own rollout names."""
    server = Serving(tmp_path_factory.mktemp("shared") / "trajectories", "--per-file", "1")
    yield server
    server.close()


@pytest.fixture
def serving(tmp_path: Path):
    servers = []

    def start(*options: str) -> Serving:
        servers.append(Serving(tmp_path / "trajectories", *options))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def say(client: openai.OpenAI, agent: str = "writer", **more):
    return client.chat.completions.create(model=agent, messages=HELLO, max_tokens=4, **more)


def test_rollouts_start_end_and_are_written(serving):
    server = serving()
    first = say(server.client("one"))
    say(server.client("one"), "editor")
    say(server.client("two"))
    scores = {first.id: {"good": 0.25}}
    fields = {"uid": "task", "answer": "42", "ground_truth": "42", "answer_steps": [first.id], "scores": scores}
    answer = server.end("one", outcome=1.0, **fields)
    assert (answer.json()["id"].split("#")[0], answer.json()["steps"]) == ("one", 2)
    assert server.stop() == 0
    one, two = server.trajectories()
    assert [(step.agent, step.parents) for step in one.steps] == [("writer", ()), ("editor", (0,))]
    assert (one.uid, one.outcome.value, one.answer, one.task.ground_truth) == ("task", 1.0, "42", "42")
    assert (one.answer_steps, two.answer_steps) == ((0,), (0,))
    assert one.steps[0].scores["good"].value == 0.25
    assert all(len(step.logprobs) == len(step.response_ids) > 0 for step in one.steps)
    assert (two.uid, two.outcome, two.info["ended"]) == ("two", None, "by nobody")


def test_served_rollouts_become_a_run_with_credit(serving, tmp_path):
    server = serving("--per-file", "2")
    for name in ("one", "two"):
        for outcome in (0.0, 1.0):
            say(server.client(name))
            server.end(name, outcome=outcome, uid="task")
    assert server.stop(signal.SIGTERM) == 0
    files = [str(file) for file in sorted(server.folder.glob("*.parquet"))]
    assert len(files) == 2
    done = creditflow("convert", *files, "-o", f"{tmp_path}/all.parquet", "--credit", f"{tmp_path}/run")
    assert done.exit_code == 0, done.stderr
    assert "4 trajectories of 1 task, 4 steps" in done.stdout
    assert Ledger.open(tmp_path / "run").read(1).batch.outcome.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_reused_name_starts_a_new_rollout(shared):
    for _ in range(2):
        say(shared.client("reused"))
        shared.end("reused")
    one, two = shared.wait_for("reused", 2)
    assert one.id != two.id
    assert (one.uid, two.uid) == ("reused", "reused")
    assert one.steps[0].response_ids != two.steps[0].response_ids


@pytest.mark.slow
def test_each_start_has_its_own_random_numbers(serving):
    for _ in range(2):
        server = serving()
        say(server.client("one"))
        server.stop()
    one, other = server.trajectories()
    assert one.steps[0].prompt == other.steps[0].prompt
    assert one.steps[0].response_ids != other.steps[0].response_ids


class Breaks(Letters):
    version, max_positions = 0, 1000

    def generate(self, requests):
        raise MemoryError("no room for the cache")


def test_model_error_is_reported_and_not_retried(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITFLOW_API_KEY", "a key")
    lines: Queue[str] = Queue()

    class Heard(Reporter):
        def say(self, text):
            lines.put(text)

    def call():
        try:
            url = lines.get(timeout=HANG_S).split()[2].replace("NAME", "one") + "/chat/completions"
            request = {"json": {"model": "writer", "messages": HELLO}, "headers": {"Authorization": "Bearer a key"}}
            answers = [httpx.post(url, timeout=HANG_S, **request) for _ in range(2)]
            while "a model failed" not in (report := lines.get(timeout=HANG_S)):
                pass
            return answers, report
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    async def main():
        components = build_components(load_recipe(RECIPE, []), training=False, tasks=False)
        policy_set = SimpleNamespace(policies={"default": Breaks()})
        calling = asyncio.create_task(asyncio.to_thread(call))
        await _serve(components, policy_set, TrajectoryWriter(tmp_path, 1, Heard()), "127.0.0.1", 0, 600.0, Heard())
        return await calling

    answers, report = asyncio.run(main())
    assert [(one.status_code, one.headers["x-should-retry"]) for one in answers] == [(500, "false")] * 2
    assert report.endswith("MemoryError: no room for the cache")
    assert not [line for line in list(lines.queue) if "a model failed" in line]


def test_listing_models_starts_no_rollout(shared):
    client = shared.client("lists")
    assert [model.id for model in client.models.list()] == ["default:writer", "default:editor"]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="writer", messages=[])
    for _ in range(2):
        answer = shared.end("lists")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "trajectory_not_found")
    say(client)
    assert [model.id for model in client.models.list()] == ["default:writer", "default:editor"]
    assert shared.end("lists").json()["steps"] == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"outcome": 2}, "outcome"),
        ({"outcom": 1}, "outcom: Extra"),
        ({"scores": {"x": {"good": 5}}}, "less than or equal to 1"),
        ({"scores": {"x": {"good": 1}}}, "scores: no answer of this trajectory has the id 'x'"),
        ({"answer_steps": ["x"]}, "answer_steps: no answer of this trajectory has the id 'x'"),
    ],
)
def test_invalid_end_is_refused_and_the_rollout_goes_on(shared, fields, why):
    say(shared.client("goes-on"))
    answer = shared.end("goes-on", **fields)
    assert (answer.status_code, why in answer.json()["error"]["message"]) == (400, True)
    answer = shared.post_end("goes-on", content=b'{"outcome"')
    assert answer.json()["error"]["message"].startswith("Invalid JSON")
    say(shared.client("goes-on"))
    assert shared.end("goes-on").json()["steps"] == 2


def test_end_of_a_reused_name_ends_the_right_rollout(shared):
    first = say(shared.client("late")).id
    place, body = urlsplit(shared.url), b'{"outcome": 1}'
    with socket.create_connection((place.hostname, place.port), timeout=HANG_S) as late:
        head = (
            f"POST /t/late/end HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer a key\r\nConnection: close\r\n"
        )
        late.sendall(f"{head}Content-Length: {len(body)}\r\nExpect: 100-continue\r\n\r\n".encode())
        assert b"100 Continue" in late.recv(4096)  # it waits for the body: it has found its trajectory
        shared.end("late", outcome=0.25)
        other = say(shared.client("late")).id
        late.sendall(body)
        assert b" 410 " in late.makefile("rb").read()
    assert say(shared.client("late")).id.split("/")[0] == other.split("/")[0] != first.split("/")[0]
    shared.end("late", outcome=0.5)
    trajectories = shared.wait_for("late", 2)
    assert [(len(trajectory.steps), trajectory.outcome.value) for trajectory in trajectories] == [(1, 0.25), (2, 0.5)]


def test_refused_first_call_starts_no_rollout(shared):
    for fields in ({"model": "default:nobody"}, {"extra_headers": {"X-Creditflow-Parents": "x/1"}}):
        with pytest.raises(openai.APIStatusError):
            shared.client("refused").chat.completions.create(**{"model": "writer", "messages": HELLO, **fields})
        assert shared.end("refused").status_code == 404
    with pytest.raises(openai.BadRequestError, match="printable"):
        say(shared.client("%FF"))


def trajectory_of(name: str) -> Trajectory:
    return Trajectory(id=name, uid=name, task=Task("served", (), None))


def test_failed_writes_are_retried_later(tmp_path, monkeypatch, capsys):
    written = TrajectoryWriter(tmp_path, 2, Reporter())
    for name in "abc":
        written.add(trajectory_of(name))

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr("creditflow.rollout.http.sessions.write_whole", full)
        for _ in range(3):
            written.write(everything=False)
        with pytest.raises(OSError, match="No space"):
            written.write(everything=True)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().err.count("3 trajectories wait to be written") == 1
    written.write(everything=True)
    assert [tuple(read_parquet(file).trajectory_ids) for file in sorted(tmp_path.iterdir())] == [("a", "b"), ("c",)]


def test_unwritable_rollout_blocks_no_other(tmp_path, capsys):
    written = TrajectoryWriter(tmp_path, 2, Reporter())
    broken = trajectory_of("b")
    broken.outcome = Score(float("nan"), status="ok", range=(2.0, 1.0))
    written.add(trajectory_of("a"))
    with pytest.raises(BatchError):
        written.add(broken)
    written.write(everything=True)
    (file,) = tmp_path.iterdir()
    assert [trajectory.id for trajectory in read_parquet(file).to_trajectories()] == ["a"]
    assert "b cannot be written: " in capsys.readouterr().err


def test_end_of_a_missing_rollout_is_refused(shared):
    say(shared.client("ended"))
    assert [shared.end(name).status_code for name in ("ended", "ended", "never-begun")] == [200, 404, 404]


def test_missing_route_lists_the_known_ones(shared):
    url = shared.url
    assert "expected POST /t/NAME/end" in httpx.get(f"{url}/t/one/end").text
    assert "expected POST /t/NAME/v1 + /messages, /chat/completions" in httpx.get(f"{url}/t/one/v1/responses").text


def test_request_without_key_starts_no_rollout(shared):
    with pytest.raises(openai.AuthenticationError):
        say(shared.client("keyless", "another key"))
    assert httpx.post(f"{shared.url}/t/keyless/end").status_code == 401
    assert shared.end("keyless").status_code == 404


def test_remote_host_needs_a_flag():
    assert "--allow-remote" in refused("serve", RECIPE, "--host", "0.0.0.0")


def test_busy_port_is_reported_before_models_load(tmp_path, monkeypatch):
    monkeypatch.setattr("creditflow.engines.local.policy_set.PolicySet.for_rollouts", None)
    with bound("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        message = f"--port: 127.0.0.1:{port} is taken or reserved; 0 takes a free one"
        assert refused("serve", RECIPE, "--port", port, "-o", tmp_path) == message


@pytest.mark.parametrize("host", ["192.0.2.1", "a..b"], ids=["elsewhere", "no name"])
def test_host_of_another_machine_is_refused(host):
    with pytest.raises(InputError, match=f"^--host: expected an address of this machine, got '{host}'$"):
        bound(host, 0)
