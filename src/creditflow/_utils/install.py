"""Messages for missing packages: the command that installs them beside this installation of creditflow."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from urllib.parse import urlsplit

from creditflow.errors import ConfigError

_DISTRIBUTIONS = {"yaml": "pyyaml"}
"""Distributions whose name differs from their module's."""


def pip_install(*words: str) -> str:
    """The command that installs `words`, by the installer that installed creditflow."""
    return f"{'uv pip' if _read('INSTALLER').strip() == 'uv' else 'pip'} install {shlex.join(words)}"


def _read(name: str) -> str:
    """The text of a file of creditflow's installation; empty where creditflow is on the path alone."""
    try:
        return metadata.distribution("creditflow").read_text(name) or ""
    except metadata.PackageNotFoundError:
        return ""


def install_command(extra: str) -> str:
    """The command that adds an extra, from the folder or file that creditflow came from."""
    from urllib.request import url2pathname  # slow to import

    origin = json.loads(_read("direct_url.json") or "{}")
    url, what = origin.get("url"), f"creditflow[{extra}]"
    if "dir_info" in origin:
        editable = ["-e"] * bool(origin["dir_info"].get("editable"))
        return pip_install(*editable, f"{url2pathname(urlsplit(url).path)}[{extra}]")
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return pip_install(f"{what} @ {url}" if url else what)


def extras_with(module: str | None) -> set[str]:
    """The extras of creditflow that install a module."""
    top = str(module).partition(".")[0]
    name = _DISTRIBUTIONS.get(top, top).replace("_", "[_-]")
    pattern = re.compile(rf"Requires-Dist: {name}\b[^;]*;.*\bextra == ['\"]([\w-]+)", re.IGNORECASE)
    return {found[1] for line in _read("METADATA").splitlines() if (found := pattern.match(line))}


def missing_package(subject: str, error: ImportError, extra: str) -> ConfigError:
    """The error for a package that `subject` needs: `extra` installs it, or `train`. Raises `error` if neither does."""
    extras = extras_with(error.name)
    if not extras & {extra, "train"}:
        raise error
    return ConfigError(f"{subject} needs {error.name}: {install_command(extra if extra in extras else 'train')}")


@contextmanager
def needs(subject: str, extra: str) -> Iterator[None]:
    """Turn an import error into a ConfigError: `subject` needs the package, and the command to install `extra`."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{subject} needs {error.name}: {install_command(extra)}") from error
