"""Sockets of local servers, and the rules for who may reach them."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from creditflow.errors import InputError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def expect_loopback(host: str, danger: str, *, remote: bool) -> None:
    """Raise InputError for a host that others can reach, unless `remote`; `danger`: the harm that they could do."""
    if host not in LOOPBACK and not remote:
        raise InputError(
            f"--host: {host} can be reached from other machines, and whoever reaches it {danger}: expected "
            f"{' or '.join(LOOPBACK)}, or --allow-remote"
        )


def hosts_of(host: str) -> tuple[str, ...] | None:
    """Return the names allowed in the Host header of a server on `host`; None: any name.

    A page elsewhere whose name resolves to this machine (DNS rebinding) sends that name.
    """
    return LOOPBACK if host in LOOPBACK else None


def host_name(host: str) -> str | None:
    """Return the name in a Host header, without its port; None if the header is invalid."""
    if "@" in host:  # user names belong to URLs, not to hosts
        return None
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def is_proxied(host: str) -> bool:
    """Whether most clients would use a proxy for `host`, according to the environment."""
    return not getproxies().keys().isdisjoint(("http", "all")) and not proxy_bypass(host)


def bound(host: str, port: int) -> socket.socket:
    """Return a listening socket. Clients that connect before the server is ready wait.

    Raises InputError if the address is not available.
    """
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(1024)
    except (OSError, UnicodeError) as error:
        listening.close()
        if getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES):
            raise InputError(f"--port: {host}:{port} is taken or reserved; 0 takes a free one") from error
        raise InputError(f"--host: expected an address of this machine, got {host!r}") from error
    return listening


def url_of(host: str, listening: socket.socket) -> str:
    """Return `http://...` without a slash at the end."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}"
