"""Tests of the Sandbox Fusion back end: its requests, its retries, and the refusal of malformed answers."""

import base64
import json
import time
from types import SimpleNamespace

import pytest

from creditflow.errors import ConfigError
from creditflow.rollout.toolbox import READY_MADE
from creditflow.sandbox import SandboxError, SandboxUnavailable, open_sandbox
from creditflow.sandbox.backends import fusion
from tests.sandbox.boxes import fusion_service, run_python


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fusion, "_BACKOFF_S", 0.01)


class Service:
    """Answer the opening call properly, and later calls with `answers` in order."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.delay_s = 0.0
        self.answers: list[tuple[int, bytes]] = []

    def __call__(self, request):
        self.requests.append(request)
        if len(self.requests) == 1:
            return run_python(request)
        time.sleep(self.delay_s)
        return self.answers.pop(0) if self.answers else run_python(request)


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def box(service):
    with fusion_service(service) as url:
        yield open_sandbox("sandbox_fusion", url=url, wall_s=1.5, memory_mb=100, output_bytes=1000)


def answer(run=None, **fields):
    run = {"status": "Finished", "return_code": 0, "execution_time": 0.5, "stdout": "", "stderr": "", **(run or {})}
    body = {"status": "Success", "message": "", "compile_result": None, "run_result": run, "files": {}, **fields}
    return 200, json.dumps(body).encode()


def test_request_has_the_fields_of_verl(box, service):
    box.write("main.py", b"print(1)")
    box.write("d/x", b"\xff")
    assert box.run(["python", "main.py"], stdin=b"in").ok
    request = service.requests[-1]
    assert request == {
        "code": "print(1)",
        "stdin": "in",
        "language": "python",
        "compile_timeout": 10,
        "run_timeout": 2,
        "memory_limit_MB": 100,
        "files": {"main.py": base64.b64encode(b"print(1)").decode(), "d/x": "/w=="},
        "fetch_files": [],
    }


def test_unusable_commands_and_binary_input_raise_value_error(box):
    for command in (["ls"], ["python"], ["python", "missing.py"], ["python", "-c", "1", "argument"]):
        with pytest.raises(ValueError, match="sandbox_fusion runs"):
            box.run(command)
    with pytest.raises(ValueError, match="UTF-8"):
        box.run(["python", "-c", "1"], stdin=b"\xff")


def test_tool_runs_a_program_from_standard_input(service):
    with fusion_service(service) as url:
        tool = READY_MADE["python"](sandbox={"backend": "sandbox_fusion", "url": url})
        assert tool("print(6 * 7)") == "42\n"
    assert service.requests[-1]["stdin"] == ""


def test_call_is_retried_after_429_and_5xx_with_pauses(box, service, monkeypatch):
    pauses = []
    monkeypatch.setattr(fusion, "_BACKOFF_S", 0.25)
    monkeypatch.setattr(fusion, "time", SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic))
    monkeypatch.setattr(box, "_retries", 12)
    service.answers = [(status, b"") for status in (429, 500, 503, 504)] * 3
    assert box.run(["python", "-c", "print(1)"]).stdout == b"1\n"
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, *[32.0] * 5]


@pytest.mark.parametrize(("status", "calls"), [(500, 3), (400, 1), (404, 1), (302, 1)])
def test_failing_service_raises_after_its_retries(box, service, status, calls):
    service.answers = [(status, b"")] * 9
    with pytest.raises(SandboxError, match=f"status {status}"):
        box.run(["python", "-c", "print(1)"])
    assert len(service.requests) == 1 + calls


def test_slow_service_raises_a_timeout(box, service, monkeypatch):
    monkeypatch.setattr(box, "_timeout", lambda: 0.1)
    monkeypatch.setattr(box, "_retries", 0)
    service.delay_s = 0.5
    with pytest.raises(SandboxError, match="Timeout"):
        box.run(["python", "-c", "print(1)"])


MALFORMED = [
    b"",
    b"garbage",
    b"[]",
    b"null",
    b"{}",
    b"[" * 100000,
    answer(status="SandboxError", message="no pod")[1],
    answer(status="Done")[1],
    answer(status=None)[1],
    answer(run_result=None)[1],
    answer(run_result="x")[1],
    answer({"status": "Finished", "return_code": 1})[1],
    answer({"status": "Error", "return_code": 0}, status="Failed")[1],
    answer({"return_code": None})[1],
    answer({"return_code": "0"})[1],
    answer({"return_code": True})[1],
    answer({"return_code": -(10**30), "status": "Error"}, status="Failed")[1],
    answer({"return_code": 10**30, "status": "Error"}, status="Failed")[1],
    answer({"execution_time": 10**400})[1],
    answer({"stdout": 1})[1],
    answer({"status": "Lost"})[1],
]


def test_malformed_answers_raise(box, service):
    for body in MALFORMED:
        service.answers = [(200, body)]
        with pytest.raises(SandboxError):
            box.run(["python", "-c", "print(1)"])


def test_results_are_parsed_from_the_answer(box, service):
    service.answers = [
        answer({"status": "Error", "return_code": 3, "stderr": "é\ud800"}, status="Failed"),
        answer({"status": "Error", "return_code": -9}, status="Failed"),
        answer({"status": "TimeLimitExceeded", "return_code": None, "stdout": "a"}, status="Failed"),
        answer({"stdout": "x" * 1001}),
        answer({"stdout": "x" * 5_000_000}),
        answer({"execution_time": None}),
    ]
    results = [box.run(["python", "-c", "1"]) for _ in range(6)]
    assert [(r.exit_code, r.signal, r.limit) for r in results] == [
        (3, None, None),
        (None, 9, None),
        (None, None, "wall"),
        (None, None, "output"),
        (None, None, "output"),
        (0, None, None),
    ]
    assert results[0].stderr == b"\xc3\xa9\xed\xa0\x80"
    assert (results[0].seconds, len(results[3].stdout)) == (0.5, 1000)
    assert 0 < results[5].seconds < 60


def test_missing_service_raises_when_the_box_is_opened():
    with pytest.raises(SandboxUnavailable, match="url"):
        open_sandbox("sandbox_fusion", url="http://127.0.0.1:9", retries=0)
    with (
        fusion_service(lambda request: answer()) as url,
        pytest.raises(SandboxUnavailable, match="does not run Python"),
    ):
        open_sandbox("sandbox_fusion", url=url)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"url": "ftp://x"},
        {"url": "http://[::1"},
        {"url": "http://"},
        {"url": "http://x:y"},
        {"url": "http://x", "retries": -1},
        {"url": "http://x", "urls": 1},
    ],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match="sandbox_fusion"):
        open_sandbox("sandbox_fusion", **options)
