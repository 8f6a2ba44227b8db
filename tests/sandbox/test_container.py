"""Tests of the container back end: its command line, refused options, and the engine's own failures.

test_conformance tests its runs together with those of the other back ends, on a stub for docker.
"""

import ast
import itertools
import os

import pytest

from creditflow.errors import ConfigError
from creditflow.sandbox import SandboxError, SandboxUnavailable, open_sandbox
from tests.sandbox import boxes


@pytest.fixture
def log(tmp_path, monkeypatch):
    boxes.bubblewrap()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return boxes.fake_docker(tmp_path)


@pytest.fixture
def box(log):
    return open_sandbox("container", image="img:1", engine="docker", memory_mb=64, processes=5, files=9, cpu_s=1.5)


def calls(log):
    return [ast.literal_eval(line) for line in log.read_text().splitlines()]


def test_container_has_no_network_no_rights_and_every_limit(box, log):
    box.run(["python", "-c", "pass"])
    args = calls(log)[-1]
    assert args[:2] == ["run", "--rm"]
    options = args[: args.index("img:1")]
    pairs = set(itertools.pairwise(options))
    assert pairs >= {
        ("--network", "none"),
        ("--cap-drop", "ALL"),
        ("--security-opt", "no-new-privileges"),
        ("--user", "65534:65534"),
        ("--pull", "never"),
        ("--ipc", "none"),
        ("--log-driver", "none"),
        ("--memory", "64m"),
        ("--memory-swap", "64m"),
        ("--pids-limit", "10"),
        ("--cpus", "1.0"),
        ("--ulimit", "cpu=2:2"),
        ("--ulimit", "fsize=16777216:16777216"),
        ("--ulimit", "nofile=256:256"),
        ("--ulimit", "core=0:0"),
        ("--tmpfs", "/tmp:rw,nosuid,nodev,exec,mode=1777,size=64m,nr_inodes=12"),
        ("--entrypoint", "/bin/sh"),
    }
    assert "--read-only" in options
    assert not {"--volume", "-v", "--mount", "--privileged", "--env-file"} & set(options)


def test_every_run_has_a_unique_container_name(box, log):
    for _ in range(2):
        box.run(["python", "-c", "pass"])
    names = [args[args.index("--name") + 1] for args in calls(log) if args[0] == "run"]
    assert len(set(names)) == 3  # opening the box runs one


def test_program_cannot_use_the_time_allowed_for_the_start(log):
    box = open_sandbox("container", image="img:1", engine="docker", wall_s=0.5)
    result = box.run(["sh", "-c", "echo begun; sleep 1.5"])
    assert (result.ok, result.exit_code, result.limit, result.stdout) == (False, None, "wall", b"begun\n")
    assert calls(log)[-1][0] == "run"


def test_container_above_its_time_limit_is_removed(log, monkeypatch):
    from creditflow.sandbox.backends import container

    monkeypatch.setattr(container, "_START_S", 0.2)
    box = open_sandbox("container", image="img:1", engine="docker", wall_s=1.0)
    assert box.run(["sh", "-c", "kill -STOP $PPID; sleep 9"]).limit == "wall"  # it stops the watch inside
    run, *removals = calls(log)[-3:]
    assert removals == [["rm", "--force", run[run.index("--name") + 1]]] * 2


def test_engine_failures_raise_but_equal_exit_codes_do_not(box, tmp_path):
    for code in (125, 126, 127):
        assert box.run(["python", "-c", f"import sys; sys.exit({code})"]).exit_code == code
    for code in (0, 1, 125, 137):
        (tmp_path / "docker").write_text(f"#!/bin/sh\necho docker: no such image >&2\nexit {code}\n")
        with pytest.raises(SandboxError, match="no such image"):
            box.run(["python", "-c", "pass"])


def test_container_without_a_working_engine_is_unavailable(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="docker and podman not found"):
        open_sandbox("container", image="img")
    (tmp_path / "docker").write_text("#!/bin/sh\necho cannot connect to the daemon >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(SandboxUnavailable, match="cannot connect to the daemon"):
        open_sandbox("container", image="img")


def test_missing_image_raises_when_the_box_is_opened(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "docker").write_text('#!/bin/sh\n[ "$1" = info ] && exit 0\necho No such image: img >&2\nexit 125\n')
    (tmp_path / "docker").chmod(0o755)
    with pytest.raises(SandboxUnavailable, match="No such image: img"):
        open_sandbox("container", image="img", engine="docker")


@pytest.mark.parametrize(
    "options",
    [{}, {"image": ""}, {"image": "--privileged"}, {"image": "x", "engine": "lxc"}, {"image": "x", "cpus": 0}],
)
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError, match="container"):
        open_sandbox("container", **options)
