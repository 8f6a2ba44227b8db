"""Messages for missing packages: the command that installs them beside this installation of creditflow."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from urllib.parse import urlsplit
from urllib.request import url2pathname

from creditflow.errors import ConfigError

_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Distributions that are named otherwise than their module."""


def install_command(extra: str) -> str:
    """The command that adds an extra, by the installer and from the folder or file that creditflow came from."""
    own = metadata.distribution("creditflow")
    tool = "uv pip" if (own.read_text("INSTALLER") or "").strip() == "uv" else "pip"
    origin = json.loads(own.read_text("direct_url.json") or "{}")
    url, what = origin.get("url"), f"creditflow[{extra}]"
    if "dir_info" in origin:
        editable = "-e " * bool(origin["dir_info"].get("editable"))
        return f"{tool} install {editable}{shlex.quote(f'{url2pathname(urlsplit(url).path)}[{extra}]')}"
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"{tool} install {shlex.quote(f'{what} @ {url}' if url else what)}"


def extras_with(module: str | None) -> set[str]:
    """The extras of creditflow that install a module."""
    top = str(module).partition(".")[0]
    name = _DISTRIBUTIONS.get(top, top).replace("_", "[_-]")
    pattern = re.compile(rf"{name}\b[^;]*;.*\bextra == ['\"]([\w-]+)", re.IGNORECASE)
    return {found[1] for line in metadata.requires("creditflow") or () if (found := pattern.match(line))}


@contextmanager
def needs(subject: str, extra: str) -> Iterator[None]:
    """Turn an import error into a ConfigError: `subject` needs the package, and the command to install `extra`."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{subject} needs {error.name}: {install_command(extra)}") from error
