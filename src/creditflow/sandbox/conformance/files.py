"""Attacks on the host's files: read or write them, directly or by tricking the harness with files left by a run."""

from __future__ import annotations

import base64
import os
import pickle
import threading
from pathlib import Path

from creditflow.sandbox.base import Sandbox
from creditflow.sandbox.conformance.attack import (
    ENVIRONMENT_CANARY,
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    attack,
    host_folders,
    no_secret,
    remove_files,
    run_program,
    with_end,
)
from creditflow.sandbox.conformance.resources import marked_folders, remove_marked_folders

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
        tell(way=way)
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
    found = os.fstat(file)
    opened[path] = [found.st_ino, found.st_size, found.st_mtime_ns]
tell(opened=opened)
"""

    def prepare(self, scene: Scene) -> None:
        paths = [path for path in ("/etc/passwd", "/etc/shadow") if Path(path).exists()]
        if not paths:
            raise CannotTry("this host has no /etc/passwd")
        scene.facts["paths"] = paths

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        opened = outcome.told.get("opened", {})
        breached = [path for path in scene.facts["paths"] if path in opened and tuple(opened[path]) == _identity(path)]
        others = [path for path in opened if path not in breached]
        seen = f"{', '.join(breached)} of the host opened" if breached else "neither could be opened"
        if others and not breached:
            seen = f"{', '.join(others)} of the box, not the host's"
        return AttackFinding(not breached, seen)


def _identity(path: str) -> tuple[int, int, int]:
    found = Path(path).stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


@attack
class ReadSsh(Attack):
    """Read an SSH key from canary homes on the host: in temporary folders, the home and the current folder."""

    program = (
        _READ
        + """
for path in FACTS["keys"]:
    show(path, path)
show(os.path.expanduser("~/.ssh/id_ed25519"), "~")
tell(ways=len(FACTS["keys"]))
"""
    )

    def prepare(self, scene: Scene) -> None:
        scene.facts["keys"] = [str(path) for path in scene.canaries(".ssh/id_ed25519")]

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return no_secret(scene, outcome, "the key")


@attack
class ParentEnvironment(Attack):
    """Search for a secret of the harness's environment in the program's own, in /proc/1/environ and all /proc/PID."""

    why = "it stops at the first find, and prints nothing but that secret"
    program = (
        _READ
        + """
NAME = FACTS["name"].encode() + b"="
def look(way):
    for entry in read(way, 1_000_000).split(b"\\0"):
        if entry.startswith(NAME):
            tell(way=way)
            os.write(1, entry[len(NAME):])
            return True
    return False
first = ["self", str(os.getppid()), str(FACTS["pid"])]
others = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)
ways = ["/proc/%s/environ" % name for name in first + others]
if FACTS["name"] in os.environ:
    tell(way="os.environ")
    os.write(1, os.environ[FACTS["name"]].encode())
else:
    any(look(way) for way in ways)
tell(ways=len(ways))
"""
    )

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(name=ENVIRONMENT_CANARY, pid=scene.victim().pid)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return no_secret(scene, outcome, "the secret", scene.environment_secret)


@attack
class InheritedFiles(Attack):
    """Read every open file inherited from the harness by mistake."""

    program = """
tried = 0
for name in os.listdir("/proc/self/fd"):
    if int(name) > 2:
        tried += 1
        try:
            content = os.pread(int(name), 1000, 0)
        except OSError:
            continue
        tell(way="descriptor " + name)
        os.write(1, content)
tell(tried=tried)
"""

    def prepare(self, scene: Scene) -> None:
        opened = os.open(scene.canary(), os.O_RDONLY)
        scene.stack.callback(os.close, opened)
        os.set_inheritable(opened, True)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return no_secret(scene, outcome, "an open file of the harness")


@attack
class WriteOutside(Attack):
    """Overwrite canaries on the host, and make files beside them and in /, /etc, /usr, /usr/bin, /var/tmp, /home."""

    why = "new files of a random name, which the harness removes"
    program = """
def overwrite(path):
    with open(path, "wb") as file:
        file.write(b"overwritten")
def make(path):
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
ways = 0
for path in FACTS["canaries"]:
    attempt(overwrite, path)
    attempt(os.rename, path, path + ".moved")
    ways += 2
for path in FACTS["new"]:
    attempt(make, path)
    ways += 1
tell(ways=ways)
"""

    def prepare(self, scene: Scene) -> None:
        canaries = scene.canaries()
        folders = [path.parent for path in canaries]
        folders += [Path(name) for name in ("/", "/etc", "/usr", "/usr/bin", "/var/tmp", "/home", "/root")]
        new = [folder / f"creditflow-{scene.token}-new" for folder in folders]
        scene.notes.update(canaries=canaries, new=new)
        scene.facts.update(canaries=[str(path) for path in canaries], new=[str(path) for path in new])
        scene.stack.callback(remove_files, new)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        written = [path for path in scene.notes["canaries"] if not _intact(path, scene.secret)]
        written += [path for path in scene.notes["new"] if os.path.lexists(path)]  # also in unreadable folders
        if written:
            return AttackFinding(False, f"{len(written)} files changed or made on the host: {written[0]}")
        return AttackFinding(True, with_end(f"nothing changed on the host in {outcome.number('ways')} ways", outcome))


def _intact(path: Path, secret: str) -> bool:
    return path.is_file() and path.read_text() == secret


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
tell(ways=len(ways))
"""

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(canary=str(scene.canary()), pid=scene.victim().pid)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if outcome.holds(scene.environment_secret):
            return AttackFinding(False, "the harness read the environment of a process through a kept link")
        given = [
            name
            for name, content in outcome.kept.items()
            if isinstance(content, bytes) and scene.secret.encode() in content
        ]
        if given:
            return AttackFinding(False, f"the harness read the secret through {', '.join(given)}")
        return AttackFinding(True, with_end("no link was followed: " + _kept(outcome), outcome))


@attack
class KeptDevices(Attack):
    """Replace kept files with a pipe, a socket, a device and a folder, so that a careless reader waits forever."""

    keep = ("pipe", "socket", "zero", "folder")
    program = """
import socket
attempt(os.mkfifo, "pipe")
attempt(socket.socket(socket.AF_UNIX).bind, "socket")
attempt(os.symlink, "/dev/zero", "zero")
attempt(os.mkdir, "folder")
"""

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        given = [name for name, content in outcome.kept.items() if isinstance(content, bytes)]
        if given:
            return AttackFinding(False, f"read gave content for {', '.join(given)}")
        return AttackFinding(True, _kept(outcome))


def _kept(outcome: Outcome) -> str:
    return ", ".join(
        f"{name} {content if isinstance(content, str) else f'{len(content)} bytes'}"
        for name, content in outcome.kept.items()
    )


@attack
class WriteThroughLink(Attack):
    """Leave symbolic links in the working folder that would lead the harness's next write to the host."""

    program = """
attempt(os.symlink, os.path.dirname(FACTS["canary"]), "door")
attempt(os.symlink, FACTS["canary"], "link")
attempt(os.symlink, os.path.dirname(FACTS["canary"]), "later")
"""

    def prepare(self, scene: Scene) -> None:
        canary = scene.notes["canary"] = scene.canary()
        scene.facts["canary"] = str(canary)

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        for path in ("door/planted", "link"):
            box.write(path, b"written by the harness")
        run_program(scene, box, outcome, "tell(again=True)", ("door/planted", "later/canary"))
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        canary: Path = scene.notes["canary"]
        if not _intact(canary, scene.secret) or (canary.parent / "planted").exists():
            return AttackFinding(False, "the harness wrote to the host's folder through the link")
        if outcome.holds(scene.secret):
            return AttackFinding(False, "the harness read the host's file through the link")
        return AttackFinding(True, with_end("the host's folder is as it was", outcome))


@attack
class PathsThatLeave(Attack):
    """Make the harness write and keep paths outside the working folder: each must be refused with ValueError."""

    program = "pass"

    def prepare(self, scene: Scene) -> None:
        canary = scene.notes["canary"] = scene.canary()
        up = "../" * 12 + str(canary).lstrip("/")
        scene.notes["paths"] = [str(canary), up, "folder/../" + up, "/proc/self/environ", ".."]

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        accepted = scene.notes["accepted"] = []
        for path in scene.notes["paths"]:
            try:
                box.write(path, b"written by the harness")
                accepted.append(f"write({path!r})")
            except ValueError:
                pass
            try:
                box.run(["python", "-c", "pass"], keep=[path])
                accepted.append(f"keep {path!r}")
            except ValueError:
                pass
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not _intact(scene.notes["canary"], scene.secret):
            return AttackFinding(False, "the harness wrote to the host")
        accepted = scene.notes["accepted"]
        if accepted:
            return AttackFinding(False, f"not refused: {accepted[0]}")
        return AttackFinding(True, f"{2 * len(scene.notes['paths'])} refused with ValueError")


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

    def prepare(self, scene: Scene) -> None:
        scene.stack.callback(remove_marked_folders, scene.token)

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        run_program(scene, box, outcome, "open('fresh', 'w').close(); tell(fresh=not os.path.exists('a'))")
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        left = marked_folders(scene.token)
        if left:
            return AttackFinding(False, f"left on the host: {left[0]}")
        fresh = bool(outcome.told.get("fresh"))
        return AttackFinding(
            fresh, "the next run found a fresh folder" if fresh else "the next run found what was left"
        )


@attack
class LeftFiles(Attack):
    """Leave files for a later run in the working folder, /tmp, /var/tmp, /dev/shm and the home."""

    why = "a few small files of a random name, which the harness removes"
    program = """
places = [os.getcwd(), "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~")]
names = [os.path.join(place, "creditflow-%s-left" % TOKEN) for place in places]
def leave(name):
    os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
tell(left=[name for name in names if not attempt(leave, name)])
"""

    def prepare(self, scene: Scene) -> None:
        name = f"creditflow-{scene.token}-left"
        places = [*host_folders(), Path("/tmp")]
        scene.stack.callback(remove_files, [place / name for place in places])

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program)
        scene.facts["left"] = outcome.told.get("left", [])
        run_program(
            scene, box, outcome, 'tell(found=[name for name in FACTS["left"] if os.path.exists(name)], again=True)'
        )
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not outcome.told.get("again"):
            raise CannotTry("the second program did not run to its end")
        left, found = outcome.told.get("left", []), outcome.told.get("found", [])
        if found:
            return AttackFinding(False, f"the next run found {found[0]}")
        return AttackFinding(True, f"{len(left)} files left, none found by the next run")


@attack
class Neighbour(Attack):
    """Search for the files and processes of a concurrent run."""

    why = "two small files of a random name, which the programs remove"
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
    attempt(lambda: os.close(os.open(os.path.join(place, mine), os.O_CREAT | os.O_WRONLY)))
end = time.monotonic() + 1.5
met = []
while time.monotonic() < end and not met:
    met = [place for place in (".", "/tmp") if os.path.exists(os.path.join(place, other))]
    met += ["a process"] if any(MARK in line for line in lines()) else []
    time.sleep(0.05)
tell(met=met)
time.sleep(max(0, end - time.monotonic()))
for place in (".", "/tmp"):
    attempt(os.unlink, os.path.join(place, mine))
# {me}-here
"""

    def prepare(self, scene: Scene) -> None:
        names = [f"creditflow-{scene.token}-{i}" for i in range(2)]
        scene.facts["names"] = names
        scene.stack.callback(remove_files, [place / name for place in host_folders() for name in names])

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcomes = [Outcome(), Outcome()]
        errors: list[BaseException] = []

        def run(me: int) -> None:
            mine = Scene(scene.limits, None, "", scene.stack, token=scene.token, facts={**scene.facts, "me": me})
            body = self.program.replace("{me}", scene.facts["names"][me])
            try:
                run_program(mine, box, outcomes[me], body)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(me,), daemon=True) for me in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        met = [place for outcome in outcomes for place in outcome.told.get("met", [])]
        told = {"met": met, "done": all(outcome.told.get("done") for outcome in outcomes)}
        return Outcome([result for outcome in outcomes for result in outcome.results], told=told)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not outcome.told["done"]:
            raise CannotTry("one of the two programs did not run to its end")
        met = outcome.told["met"]
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
import base64
content = base64.b64decode(FACTS["pickle"])
for name in ("result.pickle", "result.pkl"):
    with open(name, "wb") as file:
        file.write(content)
os.write(1, content)
os.write(2, content)
"""

    def prepare(self, scene: Scene) -> None:
        canary = scene.notes["canary"] = scene.canary()
        hostile = scene.notes["pickle"] = pickle.dumps(_Hostile(str(canary)))
        scene.facts["pickle"] = base64.b64encode(hostile).decode()

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if not _intact(scene.notes["canary"], scene.secret):
            return AttackFinding(False, "the harness loaded the pickle")
        hostile = scene.notes["pickle"]
        came = [name for name, content in outcome.kept.items() if content == hostile]
        return AttackFinding(True, f"the canary is as it was; {len(came)} of 2 files came back as bytes")


@attack
class ProcRoot(Attack):
    """Read a canary of the host through /proc: the root and working folder of every visible process."""

    why = "it reads the canary alone, by its random name"
    program = (
        _READ
        + """
canary = FACTS["canary"].lstrip("/")
seen = sorted((name for name in os.listdir("/proc") if name.isdigit()), key=int)[:300]
ways = []
for name in ["self", str(FACTS["pid"]), "1"] + seen:
    ways += ["/proc/%s/%s" % (name, door) for door in ("root", "cwd")]
any(show("%s/%s%s" % (way, "../" * 20, canary), way) for way in ways)
tell(ways=len(ways))
"""
    )

    def prepare(self, scene: Scene) -> None:
        scene.facts.update(canary=str(scene.canary()), pid=scene.victim().pid)

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        return no_secret(scene, outcome, "the canary")
