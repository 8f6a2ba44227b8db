"""Sockets of this machine's own servers, and who may reach them. Knows nothing of what is served."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from creditflow.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def expect_loopback(host: str, danger: str, *, remote: bool) -> None:
    """Raises InputError for a host that others can reach, unless `remote`; `danger`: what they could do."""
    if host not in LOOPBACK and not remote:
        raise InputError(
            f"--host: {host} can be reached from other machines, and whoever reaches it {danger}: expected "
            f"{' or '.join(LOOPBACK)}, or --allow-remote"
        )


def hosts_of(host: str) -> tuple[str, ...] | None:
    """Whose names may stand in Host, for a server that listens on `host`; None: any.

    A page elsewhere whose name is made to point here (DNS rebinding) comes with its own.
    """
    return LOOPBACK if host in LOOPBACK else None


def host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None where it is none."""
    if "@" in host:  # a user's name belongs to addresses, not to hosts
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_proxied(host: str) -> bool:
    """Whether most clients would ask a proxy for `host`, by what the environment says."""
    return not getproxies().keys().isdisjoint(("http", "all")) and not proxy_bypass(host)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens: who comes before its server is ready waits. Raises InputError where it cannot be had."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise InputError(f"--port: {host}:{port} cannot be had: {error.strerror}; 0 takes a free one") from error
    return made


def url_of(host: str, listening: socket.socket) -> str:
    """`http://...`, without a slash at its end."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"
