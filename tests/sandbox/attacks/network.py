"""Attacks over the network: connections to listeners of the harness on this host. No packet leaves the machine."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

from tests.sandbox.attacks.attack import Attack, AttackFinding, Outcome, Scene, attack

_SAY = """
import socket
def say(family, address, kind=socket.SOCK_STREAM):
    sock = socket.socket(family, kind)
    sock.settimeout(1.0)
    sock.connect(address)
    sock.sendall(TOKEN.encode())
    time.sleep(0.1)
    sock.close()
"""


class _Network(Attack):
    """Base class: contained if no listener of the harness on this machine was reached."""

    prelude = _SAY

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        if reached := scene.state.get("reached"):
            return AttackFinding(False, f"the listener on the host was reached: {reached[0]}")
        return outcome.finding(True, scene.state.get("absent") or f"the listener was not reached ({outcome.errors})")


def _listen(scene: Scene, family: int, address: Any, kind: int = socket.SOCK_STREAM) -> Any:
    """Open a listener that records connections that send the token; return its address."""
    reached = scene.state.setdefault("reached", [])
    listener = scene.stack.enter_context(socket.socket(family, kind))
    listener.bind(address)
    listener.settimeout(0.05)
    over = threading.Event()
    where = address if isinstance(address, str) else listener.getsockname()[0]

    def answer() -> None:
        while not over.is_set():
            try:
                if kind == socket.SOCK_DGRAM:
                    message = listener.recv(100)
                else:
                    peer, _ = listener.accept()
                    with peer:
                        peer.settimeout(1.0)
                        message = peer.recv(100)
            except OSError:  # no connection within the timeout, or it was closed
                continue
            if message == scene.token.encode():
                reached.append(where.replace("\0", "@"))

    if kind == socket.SOCK_STREAM:
        listener.listen()
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    scene.stack.callback(thread.join)
    scene.stack.callback(over.set)
    return listener.getsockname()


@attack
class NetworkByIp(_Network):
    """Connect to the host by the address of its network card (127.0.0.1 without one), TCP and UDP."""

    program = """
record("tcp", attempt(say, socket.AF_INET, tuple(FACTS["tcp"])))
record("udp", attempt(say, socket.AF_INET, tuple(FACTS["udp"]), socket.SOCK_DGRAM))
"""

    def address(self) -> str:
        """The host's address if it has a route, else 127.0.0.1; connecting a datagram socket sends nothing."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))
                return str(probe.getsockname()[0])
            except OSError:
                return "127.0.0.1"

    def prepare(self, scene: Scene) -> None:
        scene.facts["tcp"] = _listen(scene, socket.AF_INET, (self.address(), 0))
        scene.facts["udp"] = _listen(scene, socket.AF_INET, (self.address(), 0), socket.SOCK_DGRAM)


@attack
class NetworkByName(_Network):
    """Look up localhost and the host's name, and connect; only names that need no server are looked up."""

    program = """
def known(name):
    try:
        with open("/etc/hosts") as file:
            listed = name in file.read().split()
    except OSError:
        listed = False
    if listed:
        return True
    try:  # without a card but the loopback, a look-up cannot leave either
        return all(card == "lo" for _, card in socket.if_nameindex())
    except OSError:
        return True
def by_name(name, port):
    for family, kind, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM):
        error = attempt(say, family, address, kind)
        if not error:
            return
    raise OSError(111, error)
for name, port in FACTS["names"].items():
    record(name, attempt(by_name, name, port) if known(name) else "not in /etc/hosts")
"""

    def prepare(self, scene: Scene) -> None:
        names = {"localhost": _listen(scene, socket.AF_INET, ("127.0.0.1", 0))[1]}
        own = socket.gethostname()
        if own != "localhost" and own in Path("/etc/hosts").read_text().split():
            names[own] = _listen(scene, socket.AF_INET, (socket.gethostbyname(own), 0))[1]
        scene.facts["names"] = names


@attack
class NetworkLoopback(NetworkByIp):
    """Connect to a listener on 127.0.0.1, TCP and UDP."""

    def address(self) -> str:
        return "127.0.0.1"


@attack
class NetworkIpv6(_Network):
    """Connect to a listener on ::1."""

    host_may_refuse = True
    program = 'if FACTS["tcp"]: record("tcp", attempt(say, socket.AF_INET6, tuple(FACTS["tcp"])))'

    def prepare(self, scene: Scene) -> None:
        scene.facts["tcp"] = None
        try:
            scene.facts["tcp"] = _listen(scene, socket.AF_INET6, ("::1", 0))
        except OSError:
            scene.state["absent"] = "this host has no IPv6 to be reached by"


@attack
class AbstractSocket(_Network):
    """Connect to an abstract unix socket of the host, which no file system can hide."""

    program = 'record("unix", attempt(say, socket.AF_UNIX, "\\0" + FACTS["name"]))'

    def prepare(self, scene: Scene) -> None:
        scene.facts["name"] = f"creditflow-{scene.token}"
        _listen(scene, socket.AF_UNIX, "\0" + scene.facts["name"])


@attack
class PathSocket(_Network):
    """Connect to unix sockets in folders of the host."""

    program = """
for number, path in enumerate(FACTS["paths"], 1):
    record("socket %d" % number, attempt(say, socket.AF_UNIX, path))
"""

    def prepare(self, scene: Scene) -> None:
        paths = [str(canary.parent / "s") for canary in scene.canaries()]
        scene.facts["paths"] = [path for path in paths if len(path) < 100]
        for path in scene.facts["paths"]:
            _listen(scene, socket.AF_UNIX, path)
            Path(path).chmod(0o777)


@attack
class SocketFamilies(Attack):
    """Open sockets that a network namespace does not confine: AF_VSOCK (to the hypervisor), AF_ALG, AF_PACKET (raw).

    The sockets are closed again; nothing is sent.
    """

    host_may_refuse = True
    program = """
import socket
kinds = {"AF_VSOCK": (40, socket.SOCK_STREAM), "AF_ALG": (38, socket.SOCK_SEQPACKET),
         "AF_PACKET": (17, socket.SOCK_RAW)}
for name, (family, kind) in kinds.items():
    record(name, attempt(lambda: socket.socket(family, kind).close()))
"""
