"""Attacks on the host's files: read or write them, directly or by tricking the harness with files left by a run."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path

from creditflow.sandbox.base import Sandbox
from tests.sandbox.attacks.attack import (
    ENVIRONMENT_CANARY,
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    SecretAttack,
    attack,
    host_folders,
    remove_files,
    run_program,
)
from tests.sandbox.attacks.resources import marked_folders, remove_marked_folders

_READ = """
def read(path, most=200_000):
    try:
        with open(path, "rb") as file:
            return file.read(most)
    except (OSError, ValueError):
        return b""
def show(path, way):
    content = read(path)
    if content:
        report(way=way)
        os.write(1, content)
    return bool(content)
"""


@attack
class ReadPasswd(Attack):
    """Open the host's /etc/passwd and /etc/shadow; the box's own files of these names do not count."""

    program = """
opened = {}
for path in FACTS["paths"]:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        continue
    status = os.fstat(file)
    opened[path] = [status.st_ino, status.st_size, status.st_mtime_ns]
report(opened=opened)
"""

    def prepare(self, scene: Scene) -> None:
        paths = [path for path in ("/etc/passwd", "/etc/shadow") if Path(path).exists()]
        if not paths:
            raise CannotTry("this host has no /etc/passwd")
        scene.facts["paths"] = paths

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        opened = outcome.reports.get("opened", {})
        breached = [path for path in scene.facts["paths"] if path in opened and opened[path] == _identity(path)]
        if breached:
            return AttackFinding(False, f"{', '.join(breached)} of the host opened")
        return AttackFinding(
            True, f"{', '.join(opened)} of the box, not the host's" if opened else "neither could be opened"
        )


def _identity(path: str) -> list[int]:
    status = Path(path).stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


@attack
class ReadSsh(SecretAttack):
    """Read an SSH key from canary homes on the host: in temporary folders, the home and the current folder."""

    target = "the key"
    prelude = _READ
    program = """
for path in FACTS["keys"]:
    show(path, path)
show(os.path.expanduser("~/.ssh/id_ed25519"), "~")
report(ways=len(FACTS["keys"]))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["keys"] = [str(path) for path in scene.canaries(".ssh/id_ed25519")]


@attack
class ParentEnvironment(SecretAttack):
    """Search for a secret of the harness's environment in the program's own, in /proc/1/environ and all /proc/PID.

    It stops at the first find, and prints nothing but that secret.
    """

    target = "the secret"
    prelude = _READ
    program = """
NAME = FACTS["name"].encode() + b"="
def look(way):
    for entry in read(way, 1_000_000).split(b"\\0"):
        if entry.startswith(NAME):
            report(way=way)
            os.write(1, entry[len(NAME):])
            return True
    return False
first = ["self", str(os.getppid()), str(FACTS["pid"])]
others = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)
ways = ["/proc/%s/environ" % name for name in first + others]
if FACTS["name"] in os.environ:
    report(way="os.environ")
    os.write(1, os.environ[FACTS["name"]].encode())
else:
    any(look(way) for way in ways)
report(ways=len(ways))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(name=ENVIRONMENT_CANARY, pid=scene.victim().pid)


@attack
class InheritedFiles(SecretAttack):
    """Read every open file inherited from the harness by mistake."""

    target = "an open file of the harness"
    program = """
tried = 0
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        tried += 1
        try:
            content = os.pread(int(name), 1000, 0)
        except OSError:
            continue
        report(way="descriptor " + name)
        os.write(1, content)
report(tried=tried)
"""

    def prepare(self, scene: Scene) -> None:
        opened = os.open(scene.canary(), os.O_RDONLY)
        scene.stack.callback(os.close, opened)
        os.set_inheritable(opened, True)


@attack
class WriteOutside(Attack):
    """Overwrite canaries on the host, and make files beside them and in /, /etc, /usr, /usr/bin, /var/tmp, /home.

    The new files have a random name, and the harness removes them.
    """

    program = """
def overwrite(path):
    with open(path, "wb") as file:
        file.write(b"overwritten")
for path in FACTS["canaries"]:
    attempt(overwrite, path)
    attempt(os.rename, path, path + ".moved")
for path in FACTS["new"]:
    attempt(open_and_close, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
report(ways=2 * len(FACTS["canaries"]) + len(FACTS["new"]))
"""

    def prepare(self, scene: Scene) -> None:
        canaries = scene.canaries()
        places = ("/", "/etc", "/usr", "/usr/bin", "/var/tmp", "/home", "/root")
        folders = [path.parent for path in canaries] + [Path(name) for name in places]
        new = [folder / f"creditflow-{scene.token}-new" for folder in folders]
        scene.facts.update(canaries=[str(path) for path in canaries], new=[str(path) for path in new])
        scene.stack.callback(remove_files, new)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        written = [path for path in scene.facts["canaries"] if not scene.intact(path)]
        written += [path for path in scene.facts["new"] if os.path.lexists(path)]  # also in unreadable folders
        if written:
            return AttackFinding(False, f"{len(written)} files changed or made on the host: {written[0]}")
        return outcome.finding(True, f"nothing changed on the host in {outcome.number('ways')} ways")


@attack
class KeptLinks(Attack):
    """Replace kept files with links to a secret of the host: symbolic, hard, through a folder, and to /proc."""

    keep = ("symbolic", "hard", "folder/canary", "environ", "fd")
    program = """
ways = {
    "symbolic": lambda: os.symlink(FACTS["canary"], "symbolic"),
    "hard": lambda: os.link(FACTS["canary"], "hard"),
    "folder/canary": lambda: os.symlink(os.path.dirname(FACTS["canary"]), "folder"),
    "environ": lambda: os.symlink("/proc/%d/environ" % FACTS["pid"], "environ"),
    "fd": lambda: os.symlink("/proc/%d/root%s" % (FACTS["pid"], FACTS["canary"]), "fd"),
}
for way in ways.values():
    attempt(way)
report(ways=len(ways))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(canary=str(scene.canary()), pid=scene.victim().pid)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if outcome.holds(scene.environment_secret):
            return AttackFinding(False, "the harness read the environment of a process through a kept link")
        if outcome.holds(scene.secret):
            return AttackFinding(False, f"the harness read the secret through a kept link: {outcome.kept_sizes}")
        return outcome.finding(True, f"no link was followed: {outcome.kept_sizes}")


@attack
class WriteThroughLink(Attack):
    """Leave symbolic links in the working folder that would lead the harness's next write to the host."""

    program = """
attempt(os.symlink, os.path.dirname(FACTS["canary"]), "door")
attempt(os.symlink, FACTS["canary"], "link")
attempt(os.symlink, os.path.dirname(FACTS["canary"]), "later")
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts["canary"] = str(scene.canary())

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        for path in ("door/planted", "link"):
            box.write(path, b"written by the harness")
        run_program(scene, box, outcome, "report(again=True)", ("door/planted", "later/canary"))
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        canary = scene.facts["canary"]
        if not scene.intact(canary) or (Path(canary).parent / "planted").exists():
            return AttackFinding(False, "the harness wrote to the host's folder through the link")
        if outcome.holds(scene.secret):
            return AttackFinding(False, "the harness read the host's file through the link")
        return outcome.finding(True, "the host's folder is as it was")


@attack
class WreckedFolder(Attack):
    """Make the working folder unreadable and move it; the next run must find a fresh one, and nothing may stay."""

    program = """
attempt(os.makedirs, "a/b")
attempt(os.chmod, "a/b", 0)
attempt(os.chmod, "a", 0)
attempt(os.rmdir, os.getcwd())
attempt(os.rename, os.getcwd(), os.path.join(os.path.dirname(os.getcwd()), TOKEN))
attempt(os.chmod, ".", 0)
"""
    second = "open('fresh', 'w').close(); report(fresh=not os.path.exists('a'))"

    def prepare(self, scene: Scene) -> None:
        scene.stack.callback(remove_marked_folders, scene.token)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if left := marked_folders(scene.token):
            return AttackFinding(False, f"left on the host: {left[0]}")
        fresh = bool(outcome.reports.get("fresh"))
        return AttackFinding(fresh, f"the next run found {'a fresh folder' if fresh else 'the wrecked one'}")


@attack
class LeftFiles(Attack):
    """Leave files for a later run in the working folder, /tmp, /var/tmp, /dev/shm and the home.

    The files are small and have a random name, and the harness removes them.
    """

    prelude = """
places = [os.getcwd(), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")]
names = [os.path.join(place, "creditflow-%s-left" % TOKEN) for place in places]
"""
    program = """
flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
report(left=[name for name in names if not attempt(open_and_close, name, flags)])
"""
    second = "report(later=[name for name in names if os.path.exists(name)])"

    def prepare(self, scene: Scene) -> None:
        places = [*host_folders(), Path("/tmp")]
        scene.stack.callback(remove_files, [place / f"creditflow-{scene.token}-left" for place in places])

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if "later" not in outcome.reports:
            raise CannotTry("the second program did not run to its end")
        left, later = outcome.reports.get("left", []), outcome.reports["later"]
        if later:
            return AttackFinding(False, f"the next run found {later[0]}")
        return AttackFinding(True, f"{len(left)} files left, none found by the next run")


@attack
class Neighbour(Attack):
    """Search for the files and processes of a concurrent run.

    Each program makes two small files of a random name, and removes them.
    """

    program = """
import glob
def lines():
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            with open(path, "rb") as file:
                yield file.read()
        except OSError:
            pass
mine, other = FACTS["names"][FACTS["me"]], FACTS["names"][1 - FACTS["me"]]
MARK = (other + "-here").encode()
for place in (".", "/tmp"):
    attempt(open_and_close, os.path.join(place, mine), os.O_CREAT | os.O_WRONLY)
end = time.monotonic() + 1.5
met = []
while time.monotonic() < end and not met:
    met = [place for place in (".", "/tmp") if os.path.exists(os.path.join(place, other))]
    met += ["a process"] if any(MARK in line for line in lines()) else []
    time.sleep(0.05)
report(met=met)
time.sleep(max(0, end - time.monotonic()))
for place in (".", "/tmp"):
    attempt(os.unlink, os.path.join(place, mine))
# {me}-here
"""

    def prepare(self, scene: Scene) -> None:
        names = scene.facts["names"] = [f"creditflow-{scene.token}-{i}" for i in range(2)]
        scene.stack.callback(remove_files, [place / name for place in host_folders() for name in names])

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcomes = [Outcome(), Outcome()]
        errors: list[Exception] = []

        def run(me: int) -> None:
            mine = replace(scene, facts={**scene.facts, "me": me})
            try:
                run_program(mine, box, outcomes[me], self.program.replace("{me}", scene.facts["names"][me]))
            except Exception as error:
                errors.append(error)

        other = threading.Thread(target=run, args=(1,), daemon=True)
        other.start()
        run(0)
        other.join()
        if errors:
            raise errors[0]
        met = [place for outcome in outcomes for place in outcome.reports.get("met", [])]
        reports = {"met": met, "done": all(outcome.reports.get("done") for outcome in outcomes)}
        return Outcome([result for outcome in outcomes for result in outcome.results], reports=reports)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not outcome.reports["done"]:
            raise CannotTry("one of the two programs did not run to its end")
        met = outcome.reports["met"]
        return AttackFinding(
            not met, f"the other run was met: {met[0]}" if met else "two runs at once, neither met the other"
        )


class _Hostile:
    """Overwrite a canary when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, (f"open({self.path!r}, 'w').write('unpickled')",)


@attack
class HostilePickle(Attack):
    """Print and keep a pickle that would overwrite a canary if the harness loaded it; bytes must stay bytes."""

    keep = ("result.pickle", "result.pkl")
    program = """
content = bytes.fromhex(FACTS["pickle"])
for name in ("result.pickle", "result.pkl"):
    with open(name, "wb") as file:
        file.write(content)
os.write(1, content)
os.write(2, content)
"""

    def prepare(self, scene: Scene) -> None:
        canary = scene.state["canary"] = str(scene.canary())
        scene.facts["pickle"] = pickle.dumps(_Hostile(canary)).hex()

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not scene.intact(scene.state["canary"]):
            return AttackFinding(False, "the harness loaded the pickle")
        unchanged = list(outcome.kept.values()).count(bytes.fromhex(scene.facts["pickle"]))
        return AttackFinding(True, f"the canary is as it was; {unchanged} of 2 files came back as bytes")


@attack
class ProcRoot(SecretAttack):
    """Read a canary of the host through /proc: the root and working folder of every visible process.

    It reads the canary alone, by its random name.
    """

    target = "the canary"
    prelude = _READ
    program = """
canary = FACTS["canary"].lstrip("/")
seen = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)[:300]
ways = []
for name in ["self", str(FACTS["pid"]), "1"] + seen:
    ways += ["/proc/%s/%s" % (name, door) for door in ("root", "cwd")]
any(show("%s/%s%s" % (way, "../" * 20, canary), way) for way in ways)
report(ways=len(ways))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(canary=str(scene.canary()), pid=scene.victim().pid)
