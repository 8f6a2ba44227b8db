"""Ten probes of a sandbox, through its interface alone: a harmless program must work, and nine attacks must fail.

Each attack is bounded, so that it does no lasting harm without containment. Verdicts are based on observations on the
host where possible; the program's own report counts only for facts that the host does not show.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from creditflow.errors import first_line
from creditflow.sandbox.base import Limits, Result, Sandbox, SandboxError

CHECK_LIMITS = Limits(wall_s=4.0, cpu_s=3.0, memory_mb=256, processes=32, open_files=128, file_mb=8, disk_mb=32)
"""Small limits: a check takes seconds. The attacks test at most 600 MB, 149 processes and 6 MB of output."""
CONTAINED, BREACHED, UNTRIED = "contained", "NOT CONTAINED", "could not be tried"

Finding = tuple[bool, str]
"""Whether the sandbox passed the probe, and the observation."""

_PRELUDE = """
import json, os, signal, socket, sys, time
TOKEN, FACTS = {token!r}, json.loads({facts!r})
def report(**facts):
    os.write(1, (chr(10) + json.dumps(facts) + chr(10)).encode())
def attempt(action, *args):
    try:
        return action(*args)
    except (OSError, MemoryError):
        return None
report(started=True)
"""


@dataclass(frozen=True, slots=True)
class ProbeVerdict:
    """The verdict on one probe."""

    probe: str
    fate: str
    """CONTAINED, BREACHED or UNTRIED."""
    seen: str
    """One line: the observation, or the reason why it could not be tried."""


def check_sandbox(box: Sandbox) -> Iterator[ProbeVerdict]:
    """Try every probe on a sandbox; yields a verdict for each. If a harmless program fails, no attack is tried.

    A back end that does not return makes the check wait.
    """
    for probe in PROBES:
        try:
            passed, seen = probe(box, secrets.token_hex(12))
            fate = CONTAINED if passed else BREACHED
        except SandboxError as error:
            fate, seen = UNTRIED, first_line(error)
        except Exception as error:  # outside the contract of `Sandbox`: the program caused an error in the back end
            fate, seen = BREACHED, f"the back end raised {type(error).__name__}: {first_line(error)}"
        yield ProbeVerdict(probe.__name__, fate, "".join(c if c.isprintable() else " " for c in seen)[:240])
        if probe is works and fate != CONTAINED:
            return


def works(box: Sandbox, token: str) -> Finding:
    """Read the input and a file, and write to the folder."""
    box.write("given", token.encode())
    _, facts = _run(box, "open('own', 'w'); report(read=sys.stdin.read() + open('given').read())")
    return facts.get("read") == "input" + token, "input and files arrive"


def network(box: Sandbox, token: str) -> Finding:
    """Connect to this machine, by loopback and by its outward address."""
    addresses = ["127.0.0.1"]
    with socket.socket(type=socket.SOCK_DGRAM) as outward, suppress(OSError):
        outward.connect(("192.0.2.1", 9))  # sends no packet
        addresses.append(outward.getsockname()[0])
    body = "for address in FACTS['to']: attempt(socket.create_connection, (address, FACTS['port']), 1)"
    with socket.create_server(("", 0)) as server:
        _run(box, body, to=addresses, port=server.getsockname()[1])
        reached = bool(select.select([server], [], [], 0.1)[0])
    return not reached, f"a listener on this machine was {'' if reached else 'not '}reached"


def write_outside(box: Sandbox, token: str) -> Finding:
    """Write files into folders of the host."""
    with _canaries(token) as paths:
        _run(box, "for path in FACTS['paths']: attempt(open, path, 'w')", paths=list(map(str, paths)))
        written = [str(path.parent) for path in paths if path.exists()]
    return not written, f"written on the host: {', '.join(written) or 'nothing'}"


def read_host(box: Sandbox, token: str) -> Finding:
    """Read a secret in files and in the environment of this process."""
    with _canaries(token) as paths:
        for path in paths:
            path.write_text(token)
        body = "for path in FACTS['paths']: print((attempt(open, path) or sys.stdin).read())\nprint(os.environ)"
        result, _ = _run(box, body, paths=list(map(str, paths)))
    read = token.encode() in result.stdout
    return not read, f"a secret in files and in the environment was {'' if read else 'not '}read"


def processes(box: Sandbox, token: str) -> Finding:
    """Start child processes, at most 148, which end after 2 s."""
    body = """
for count in range(2, 150):
    pid = attempt(os.fork)
    if pid == 0:
        time.sleep(2)
        os._exit(0)
    if pid:
        report(amount=count)
"""
    return _within(_run(box, body)[1].get("amount", 1), box.limits.processes, "processes at a time", 149)


def memory(box: Sandbox, token: str) -> Finding:
    """Fill memory in one process, at most 600 MB."""
    body = """
held = []
while len(held) < 60:
    held.append(b"x" * 10_000_000)
    report(amount=len(held) * 10)
"""
    return _within(_run(box, body)[1].get("amount", 0), int(box.limits.memory_mb * 1.048576), "MB in one process", 600)


def clock(box: Sandbox, token: str) -> Finding:
    """Run past the time limit, and ignore the signal of the CPU limit."""
    body = """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
end = time.time() + FACTS["seconds"]
while time.time() < end:
    pass
report(done=True)
"""
    result, facts = _run(box, body, seconds=box.limits.wall_s + 10)
    return not facts.get("done"), f"an endless program ended after {result.seconds:.1f} s"


def output(box: Sandbox, token: str) -> Finding:
    """Write 6 MB of output."""
    result, _ = _run(box, "for _ in range(60): os.write(1, b'x' * 100_000)")
    return _within(len(result.stdout) + len(result.stderr), box.limits.output_bytes, "bytes of output", 6_000_000)


def privileges(box: Sandbox, token: str) -> Finding:
    """Look for capabilities and for setuid programs that work."""
    body = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
report(capabilities=int(status["CapEff"], 16), setuid_programs=status["NoNewPrivs"].strip() == "0")
"""
    held = [name for name, value in _run(box, body)[1].items() if value]
    return not held, f"it has: {', '.join(held) or 'no capabilities, no setuid programs'}"


def leftovers(box: Sandbox, token: str) -> Finding:
    """Leave a sleeping process behind."""
    body = """
if os.fork() == 0:
    os.setsid()
    os.closerange(0, 3)
    time.sleep(30)
"""
    _run(box, body, token)
    time.sleep(0.2)  # the kernel may still be ending it
    alive = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended, or permission is missing
            if token in path.read_text(errors="replace"):
                alive += 1
                os.kill(int(path.parent.name), 9)
    return not alive, f"{alive} processes alive on the host after the run"


PROBES = (works, network, write_outside, read_host, processes, memory, clock, output, privileges, leftovers)


def _run(box: Sandbox, body: str, token: str = "", **facts: Any) -> tuple[Result, dict[str, Any]]:
    """Run a program; returns its result and its last report. Raises SandboxError if it did not start or failed."""
    program = _PRELUDE.format(token=token, facts=json.dumps(facts)) + body
    result = box.run(["python", "-c", program], stdin=b"input")
    reports = [line for line in result.stdout.split(b"\n") if line.startswith(b'{"') and line.endswith(b"}")]
    if not reports or (b"Traceback" in result.stderr and b"MemoryError" not in result.stderr):
        raise SandboxError(f"the program did not run: {result.stderr[-200:].decode(errors='replace').strip()}")
    return result, json.loads(reports[-1])


def _within(amount: int, most: int, unit: str, attack: int) -> Finding:
    """Compare an amount with its limit. Raises SandboxError if the attack cannot reach that limit."""
    if most >= attack:
        raise SandboxError(f"the limit of {most:,} {unit} is not below the attack's {attack:,}")
    return amount <= most, f"{amount:,} {unit}, {most:,} allowed"


@contextmanager
def _canaries(token: str) -> Iterator[list[Path]]:
    """Files to use in the host's writable folders, and the token in this process's environment; removed at the end.

    The folders are the temporary ones, home and the current folder.
    """
    folders = (tempfile.gettempdir(), "/var/tmp", "/dev/shm", Path.home(), Path.cwd())
    paths = [Path(folder) / f"creditflow-canary-{token}" for folder in folders if os.access(folder, os.W_OK)]
    os.environ["CREDITFLOW_CANARY"] = token
    try:
        yield paths
    finally:
        del os.environ["CREDITFLOW_CANARY"]
        for path in paths:
            path.unlink(missing_ok=True)
