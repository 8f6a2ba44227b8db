"""Attacks succeed without a box, bubblewrap contains them, and a broken box does not pass the check."""

import contextlib
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from creditflow.sandbox import (
    Result,
    SandboxError,
    SandboxUnavailable,
    open_sandbox,
)
from tests.sandbox.attacks import ATTACKS, CHECK_LIMITS, Outcome, Scene, check_sandbox, memory_bound, resources
from tests.sandbox.attacks import check as checking

LIMITS = replace(CHECK_LIMITS, wall_s=2.0, cpu_s=1.0, files=100)

HELD_BY_CARE = {
    "huge_return",
    "deaf_sleeper",
    "inherited_files",
    "write_through_link",
    "hostile_pickle",
    "deep_folders",
    "wrecked_folder",
}
"""Attacks that a back end may contain without a box. `CarelessBox` shows that they can succeed."""

# fmt: off
NAMED = {
    "fork_bomb", "memory_bomb", "memory_over_processes", "memfd", "huge_return",
    "left_behind", "left_behind_with_stdout", "read_passwd", "read_ssh", "parent_environment",
    "write_outside", "kept_links", "write_through_link", "proc_root", "proc_sys_write", "ptrace", "mount",
    "user_namespace", "network_by_ip", "network_by_name", "network_loopback", "network_ipv6", "abstract_socket",
    "path_socket", "signal_to_parent", "fill_disk", "fill_dev", "sysv_shared_memory", "many_files",
    "hostile_pickle", "clock", "setuid_binaries", "no_new_privileges", "capabilities", "bpf", "perf_event_open",
    "keyring", "io_uring", "userfaultfd", "host_uid", "core_dump", "deep_folders",
}
# fmt: on


class CarelessBox:
    """A back end with the typical faults of a careless author: one folder for all runs, no clock, no cap, links
    followed, open files passed on, and the result unpickled."""

    def __init__(self, folder, limits=LIMITS):
        self.folder, self.limits = Path(folder), limits

    def run(self, command, *, stdin=b"", keep=()):
        line = [sys.executable, *command[1:]]
        done = subprocess.run(
            line, input=stdin, capture_output=True, cwd=self.folder, close_fds=False, timeout=30, check=False
        )
        for name in keep:
            if name.endswith(".pickle"):
                pickle.loads(self.read(name))
        return Result(done.returncode, done.stdout, done.stderr)

    def write(self, path, content):
        (self.folder / path).write_bytes(content)

    def read(self, path):
        return (self.folder / path).read_bytes()


class StubBox:
    """A back end that returns a function's result from every run."""

    def __init__(self, answer, limits=LIMITS):
        self.answer, self.limits = answer, limits

    def run(self, command, *, stdin=b"", keep=()):
        return self.answer(command)

    def write(self, path, content):
        pass

    def read(self, path):
        raise FileNotFoundError(path)


def opened(backend, limits=LIMITS):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_sandbox(backend, **asdict(limits))


def free_to_do_anything():
    """Whether this process is root with CAP_SYS_ADMIN and without a filter; in a container it may not be."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    may_admin = int(status["CapEff"], 16) & (1 << 21)  # CAP_SYS_ADMIN
    return os.geteuid() == 0 and may_admin and status["Seccomp"].strip() == "0"


def by_name(verdicts):
    return {verdict.attack: verdict for verdict in verdicts}


def leftovers(token="creditflow-canary-"):
    places = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm"), Path.home()]
    return {path for place in places for path in place.glob(f"{token}*")}


def tried(folder, backend, names):
    """Return the verdicts on a back end.

    Attacks that could not be tried, because a busy machine's clock ended them too soon, are repeated with more time.
    """
    verdicts = quietly(folder, opened(backend), names, jobs=4)
    for _ in range(3):
        late = [name for name, verdict in verdicts.items() if verdict.fate == "could not be tried"]
        if not late:
            break
        verdicts |= quietly(folder, opened(backend, replace(LIMITS, wall_s=resources.LARGEST.wall_s)), late)
    return verdicts


def quietly(folder, sandbox, names, **options):
    with contextlib.chdir(folder):
        return by_name(check_sandbox(sandbox, names, **options))


@pytest.fixture(scope="module")
def unprotected(tmp_path_factory):
    """Verdicts on every attack without a box, from one check."""
    names = [name for name in ATTACKS if name not in HELD_BY_CARE]
    before = leftovers()
    verdicts = tried(tmp_path_factory.mktemp("unprotected"), "unsafe_subprocess", names)
    assert leftovers() <= before
    return verdicts


@pytest.fixture(scope="module")
def boxed(tmp_path_factory):
    try:
        box = opened("bubblewrap")
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    verdicts = tried(tmp_path_factory.mktemp("boxed"), "bubblewrap", ())
    if memory_bound(box)[0] > LIMITS.memory_mb << 20:  # this machine gives no cgroup; the check must report that
        assert verdicts.pop("memory_over_processes").fate == "NOT CONTAINED"
    return verdicts


# Attacks succeed without a box


def test_attacks_include_every_named_attack():
    assert set(ATTACKS) >= NAMED


def test_every_attack_has_a_description():
    assert [name for name, attack in ATTACKS.items() if not attack.about.endswith(".") or len(attack.about) < 15] == []


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in HELD_BY_CARE])
def test_attack_succeeds_without_a_box(unprotected, name):
    if ATTACKS[name].host_may_refuse and unprotected[name].contained and not free_to_do_anything():
        pytest.skip(f"this machine refuses it by itself: {unprotected[name].seen}")

    assert unprotected[name].fate == "NOT CONTAINED", unprotected[name].seen


def test_careless_back_end_fails_the_harness_attacks(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "SLACK_S", 1.0)
    monkeypatch.setattr(checking, "PATIENCE_S", 4.0)

    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as own:
        box = CarelessBox(folder, replace(LIMITS, wall_s=0.5))
        verdicts = quietly(tmp_path, box, HELD_BY_CARE - {"wrecked_folder"}, jobs=10)
        # It removes the folder that the other attacks use.
        Path(own, "folder").mkdir()
        verdicts |= quietly(tmp_path, CarelessBox(Path(own, "folder")), ["wrecked_folder"])
    fates = {name: verdicts[name].fate for name in HELD_BY_CARE}
    assert fates == dict.fromkeys(HELD_BY_CARE, "NOT CONTAINED")


# A box contains the attacks


@pytest.mark.parametrize("name", ["control", *ATTACKS])
def test_bubblewrap_contains_the_attack(boxed, name):
    if name not in boxed:
        pytest.skip("no cgroup can be had here")

    assert boxed[name].fate == "contained", boxed[name].seen


# Broken attacks do not pass


def test_failing_back_end_contains_nothing():
    def fail(command):
        raise SandboxError("the box is broken")

    verdicts = check_sandbox(StubBox(fail), ["memfd", "mount"])

    assert [verdict.fate for verdict in verdicts] == ["could not be tried"] * 3
    assert verdicts[0].seen == "the back end failed: the box is broken"
    assert verdicts[1].seen == "the control did not succeed"


def test_program_ended_by_the_clock_proves_nothing():
    def late(command):
        token = re.search("tk[0-9a-f]{24}", command[-1])
        return Result(None, token[0].encode() + b"\n", limit="wall")

    verdicts = check_sandbox(StubBox(late), ["mount", "user_namespace"])
    assert {verdict.fate for verdict in verdicts} == {"could not be tried"}


def test_back_end_that_runs_nothing_contains_nothing():
    verdicts = check_sandbox(StubBox(lambda command: Result(0, b"all is well\n")), ["mount"])

    assert verdicts[0].fate == "could not be tried"
    assert verdicts[0].seen.startswith("the program did not start (exit code 0")


def test_program_that_does_not_start_is_not_contained(tmp_path):
    class Box(CarelessBox):
        def run(self, command, *, stdin=b"", keep=()):
            if "c.mount" in command[-1]:
                return Result(127, b"", b"python: not found\n")
            return super().run(command, stdin=stdin, keep=keep)

    verdicts = quietly(tmp_path, Box(tmp_path), ["mount"])

    assert verdicts["control"].contained
    assert verdicts["mount"].fate == "could not be tried"
    assert verdicts["mount"].seen.endswith("python: not found)")


def test_program_that_fails_by_itself_is_not_contained(tmp_path):
    class Box(CarelessBox):
        def run(self, command, *, stdin=b"", keep=()):
            broken = command[-1].replace("ctypes, c = libc()", "import no_such_module")
            return super().run([*command[:-1], broken], stdin=stdin, keep=keep)

    verdicts = quietly(tmp_path, Box(tmp_path), ["mount"])

    assert verdicts["mount"].fate == "could not be tried"
    assert "ModuleNotFoundError" in verdicts["mount"].seen


def test_undocumented_error_of_a_back_end_is_not_contained(tmp_path):
    class Box(CarelessBox):
        def run(self, command, *, stdin=b"", keep=()):
            if "c.mount" in command[-1]:
                raise RecursionError("too deep")
            return super().run(command, stdin=stdin, keep=keep)

    verdicts = quietly(tmp_path, Box(tmp_path), ["mount"])

    assert (verdicts["mount"].fate, verdicts["mount"].seen) == (
        "NOT CONTAINED",
        "the back end raised RecursionError: too deep",
    )


def test_hanging_back_end_does_not_hang_the_check(monkeypatch):
    monkeypatch.setattr(checking, "PATIENCE_S", 0.2)

    verdicts = check_sandbox(StubBox(lambda command: time.sleep(3), replace(LIMITS, wall_s=0.1)), ["mount"])

    assert (verdicts[0].fate, verdicts[0].seen) == ("NOT CONTAINED", "the back end did not return within 0 s")


def test_control_without_its_exit_code_fails(tmp_path):
    class Box(CarelessBox):
        def run(self, command, *, stdin=b"", keep=()):
            return replace(super().run(command, stdin=stdin, keep=keep), exit_code=0)

    verdicts = quietly(tmp_path, Box(tmp_path), ["mount"])

    assert verdicts["control"].fate == "NOT CONTAINED"
    assert verdicts["control"].seen == "its exit code was 0 instead of 7"


def test_unavailable_back_end_raises():
    def refuse(command):
        raise SandboxUnavailable("install it first")

    with pytest.raises(SandboxUnavailable, match="install it first"):
        check_sandbox(StubBox(refuse), ["mount"])


# The judge


def scene(**changes):
    return Scene(LIMITS, changes.pop("memory_bound", None), "secret", ExitStack(), **changes)


@pytest.mark.parametrize(
    ("bound", "contained"),
    [
        (None, True),
        ((256 << 20, "by a cgroup"), True),
        ((32 * (256 << 20), "256 MB per process times 32 processes"), False),
    ],
)
def test_memory_over_processes_needs_a_bound_within_the_limit(bound, contained):
    outcome = Outcome([Result(0)], reports={"amount": 250_000_000, "done": True})

    finding = ATTACKS["memory_over_processes"].judge(scene(memory_bound=bound), outcome)

    assert finding.contained is contained
    assert bound is None or bound[1] in finding.seen


@pytest.mark.parametrize(("held", "contained"), [(256 << 20, True), ((256 << 20) + 1, False)])
def test_memory_limit_is_exact_to_the_byte(held, contained):
    outcome = Outcome([Result(0)], reports={"amount": held, "done": True})

    assert ATTACKS["memory_bomb"].judge(scene(), outcome).contained is contained


def test_many_files_in_memory_need_a_cgroup_bound():
    outcome = Outcome([Result(0)], reports={"files": 50_000, "done": True})

    def judged(bound, taken=0):
        return ATTACKS["many_files"].judge(scene(memory_bound=bound, state={"taken": taken}), outcome)

    assert judged((256 << 20, "by a cgroup")).contained
    assert not judged((256 << 20, "by a cgroup"), taken=50_000).contained
    assert not judged((32 * (256 << 20), "256 MB per process times 32; no cgroup")).contained
    assert not judged(None).contained


def test_unseen_process_is_judged_by_its_uid_map():
    def judged(maps):
        reports = {"uid": 1000, "maps": maps, "status": {}}
        return ATTACKS["host_uid"].judge(scene(), Outcome([Result(0)], reports=reports))

    assert not judged([[1000, 0, 1]]).contained
    assert judged([[1000, 65534, 1]]).contained


# Leftovers


def test_check_leaves_nothing_on_the_host(tmp_path, monkeypatch):
    monkeypatch.setenv("CREDITFLOW_CANARY", "mine")
    before = leftovers(), set(tmp_path.iterdir())

    quietly(tmp_path, opened("unsafe_subprocess"), ["read_ssh", "write_outside", "earlier_run", "left_behind"])

    assert (leftovers(), set(tmp_path.iterdir())) == before
    assert os.environ["CREDITFLOW_CANARY"] == "mine"
    assert not list(Path("/").glob("creditflow-tk*"))
