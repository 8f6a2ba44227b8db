"""Tests of cgroup location and settings, on folders that imitate the kernel's."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess

import pytest

from creditflow.sandbox import Limits, SandboxError, cgroup
from tests.sandbox import boxes

LIMITS = Limits(memory_mb=10, processes=7)


def opened(parents: cgroup.Parents) -> cgroup.Group:
    """Make a group; remove it if an exception comes."""
    with contextlib.ExitStack() as stack:
        group = parents.group()
        stack.callback(group.close)
        group.make(LIMITS)
        stack.pop_all()
    return group


def v1(tmp_path):
    lines = [f"20 1 0:24 / {tmp_path} rw - tmpfs {source} rw" for source in ("tmpfs", "")]  # a source may be empty
    for name in ("memory", "pids"):
        (tmp_path / name / "ours").mkdir(parents=True)
        lines.append(f"30 25 0:27 / {tmp_path / name} rw,relatime - cgroup cgroup rw,{name}")
    return "\n".join(lines)


def v2(tmp_path, controllers="cpu memory pids", subtree="", procs=""):
    ours = tmp_path / "ours"
    ours.mkdir()
    (ours / "cgroup.controllers").write_text(controllers)
    (ours / "cgroup.subtree_control").write_text(subtree)
    (ours / "cgroup.procs").write_text(procs)
    return f"31 25 0:28 / {tmp_path} rw - cgroup2 cgroup2 rw,nsdelegate"


@pytest.fixture
def kernel(monkeypatch):
    """Make the files of a new group, as the kernel does, and remove them with the folder."""
    files = ["memory.limit_in_bytes", "memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cgroup.procs"]
    real = cgroup.Path.mkdir

    def mkdir(self, mode=0o777, parents=False, exist_ok=False):
        real(self, mode, parents, exist_ok)
        for name in files if self.name.startswith("creditflow") else ():
            (self / name).touch()

    monkeypatch.setattr(cgroup.Path, "mkdir", mkdir)
    monkeypatch.setattr(cgroup.Path, "rmdir", shutil.rmtree)


def test_version_1_uses_our_group_in_each_hierarchy(tmp_path):
    found = cgroup.locate(v1(tmp_path), "4:memory:/ours\n8:pids:/\n0::/\n")
    assert found == cgroup.Parents(1, tmp_path / "memory" / "ours", tmp_path / "pids")


def test_locate_uses_the_mounted_part_of_the_tree(tmp_path):
    (tmp_path / "x").mkdir()
    mountinfo = f"30 25 0:27 /docker/abc {tmp_path} rw - cgroup cgroup rw,memory"
    assert cgroup.locate(mountinfo, "4:memory:/docker/abc/x").memory == tmp_path / "x"
    with pytest.raises(cgroup.NoCgroupError, match="/elsewhere"):
        cgroup.locate(mountinfo, "4:memory:/elsewhere")


def test_version_1_group_is_limited_and_removed_on_close(tmp_path, kernel):
    group = opened(cgroup.locate(v1(tmp_path), "4:memory:/ours\n8:pids:/ours"))
    memory, pids = group.folders
    assert subprocess.check_output(group.joined(["echo", "a b"])) == b"a b\n"
    assert [(folder / "tasks").read_text() for folder in group.folders] == ["0\n", "0\n"]
    assert (memory / "memory.limit_in_bytes").read_text() == str(10 * 1024 * 1024)
    assert (pids / "pids.max").read_text() == "7"
    (memory / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert group.oom_kills() == 3
    group.close()
    assert [folder.exists() for folder in group.folders] == [False, False]


def test_close_waits_for_a_lingering_process(tmp_path, monkeypatch):
    refusals = [OSError(errno.EBUSY, "busy")] * 3
    monkeypatch.setattr(cgroup.Path, "rmdir", lambda self: refusals and (_ for _ in ()).throw(refusals.pop()))
    cgroup.Group(1, [tmp_path / "a", tmp_path / "b"]).close()
    assert refusals == []
    monkeypatch.setattr(cgroup, "_LINGER_S", 0.01)
    refusals += [OSError(errno.EBUSY, "busy")] * 999
    with pytest.raises(SandboxError, match="could not be removed"):
        cgroup.Group(1, [tmp_path / "a"]).close()


def test_version_2_group_is_limited_and_removed_on_close(tmp_path, kernel):
    group = opened(cgroup.locate(v2(tmp_path, subtree="memory pids"), "0::/ours"))
    (folder,) = group.folders
    assert subprocess.check_output(group.joined(["echo", "a b"])) == b"a b\n"
    assert (folder / "cgroup.procs").read_text() == "0\n"
    names = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")
    assert [(folder / name).read_text() for name in names] == [str(10 * 1024 * 1024), "0", "1", "7"]
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 1\n")
    assert group.oom_kills() == 1
    group.close()
    assert not folder.exists()


def test_version_2_needs_both_controllers_and_a_mount(tmp_path):
    with pytest.raises(cgroup.NoCgroupError, match="controllers memory and pids"):
        cgroup.locate(v2(tmp_path, controllers="hugetlb"), "0::/ours")
    with pytest.raises(cgroup.NoCgroupError, match="mounted"):
        cgroup.locate("", "0::/ours")


def busy(monkeypatch, until):
    """Imitate the kernel's rule: a folder with processes cannot enable controllers for its groups."""
    real = cgroup._set

    def write(file, value, **options):
        if file.name == "cgroup.subtree_control" and not until(file.parent):
            raise OSError(errno.EBUSY, "busy")
        real(file, value, **options)

    monkeypatch.setattr(cgroup, "_set", write)


def test_own_scope_moves_its_process_to_enable_controllers(tmp_path, kernel, monkeypatch):
    text = v2(tmp_path, procs=f"{os.getpid()}\n")
    busy(monkeypatch, until=lambda folder: (folder / "creditflow-self" / "cgroup.procs").exists())
    assert cgroup.locate(text, "0::/ours") == cgroup.Parents(2, tmp_path / "ours", None)
    assert (tmp_path / "ours" / "creditflow-self" / "cgroup.procs").read_text() == str(os.getpid())
    assert (tmp_path / "ours" / "cgroup.subtree_control").read_text() == "+memory +pids"


def test_folder_with_foreign_processes_is_left_unchanged(tmp_path, kernel, monkeypatch):
    text = v2(tmp_path, procs=f"1\n{os.getpid()}\n")
    busy(monkeypatch, until=lambda folder: False)
    with pytest.raises(cgroup.NoCgroupError, match="other processes"):
        cgroup.locate(text, "0::/ours")
    assert not (tmp_path / "ours" / "creditflow-self").exists()


def test_moved_process_makes_groups_beside_its_own(tmp_path, kernel):
    text = v2(tmp_path, subtree="memory pids")
    (tmp_path / "ours" / "creditflow-self").mkdir()
    assert cgroup.locate(text, "0::/ours/creditflow-self").memory == tmp_path / "ours"


def test_sweep_removes_only_groups_of_dead_processes(tmp_path):
    owner = cgroup._owner()
    for name in (f"{owner}-{os.getpid()}-0", f"{owner}-999999999-0", "creditflow-1-999999999-0", "other"):
        (tmp_path / name).mkdir()
    cgroup.Parents(2, tmp_path, None).sweep()
    kept = {f"{owner}-{os.getpid()}-0", "creditflow-1-999999999-0", "other"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_sweep_kills_processes_left_in_a_group(tmp_path, monkeypatch):
    folder = tmp_path / f"{cgroup._owner()}-999999999-0"
    folder.mkdir()
    with subprocess.Popen(["sleep", "60"]) as left:
        (folder / "cgroup.procs").write_text(f"0\n{left.pid}\n")

        def rmdir(self):
            if left.poll() is None:
                raise OSError(errno.EBUSY, "busy")
            shutil.rmtree(self)

        monkeypatch.setattr(cgroup.Path, "rmdir", rmdir)
        cgroup.Parents(2, tmp_path, None).sweep()
        assert left.returncode == -signal.SIGKILL
    assert not folder.exists()


def test_group_names_differ_from_those_of_a_reused_pid(tmp_path, kernel):
    (tmp_path / "ours").mkdir()
    parents = cgroup.Parents(2, tmp_path / "ours", None)
    for number in range(100):  # groups that a dead process with our pid may have left
        (tmp_path / "ours" / f"{cgroup._owner()}-{os.getpid()}-{number}").mkdir()
    names = {opened(parents).folders[0].name for _ in range(20)}
    assert len(names) == 20


def test_failed_group_is_removed(tmp_path):
    (tmp_path / "memory").mkdir()
    with pytest.raises(SandboxError, match="could not be made"):
        opened(cgroup.Parents(1, tmp_path / "memory", tmp_path / "missing"))
    assert list((tmp_path / "memory").iterdir()) == []


def test_box_without_a_group_states_the_reason(monkeypatch):
    def find(choice):
        raise cgroup.NoCgroupError("out of numbers")

    monkeypatch.setattr(cgroup, "find", find)
    assert boxes.bubblewrap().memory_bound()[1].endswith("no cgroup: out of numbers")
