"""verl's methods that this engine overrides or relies on, with hashes of their source in each supported version.

An override calls the replaced method or takes over its work, so it may be wrong once that method changes. Constructors
and hooks (`on_step_end`) are not listed. A version of verl without hashes is accepted if none of the methods in
`overridden.json` differs from those of a known version.
`python -m creditflow.engines.verl.overridden` prints the hashes of the installed version.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from importlib.util import find_spec
from pathlib import Path

from creditflow._utils.install import install_command, needs
from creditflow._utils.pins import difference, method_hashes
from creditflow.engines.verl.checks import quiet
from creditflow.errors import ConfigError

SUPPORTED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("overridden.json").read_text())
"""The hash of each method (`file: Class.method`) in each supported version of verl."""
NAMES = frozenset(name for of_version in SUPPORTED.values() for name in of_version)


def expect_verl() -> None:
    """Raise ConfigError if verl is not installed, or its version does not fit."""
    how = install_command("verl") if sys.version_info < (3, 13) else "verl needs Python 3.11 or 3.12"
    try:
        version, root = installed()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"--engine verl: verl is not installed; {how}") from None
    if version not in SUPPORTED and (differs := difference(root, SUPPORTED)):
        raise ConfigError(f"--engine verl: the installed verl {version} {differs}; {how}")
    with quiet(), needs("--engine verl", "verl"):  # verl does not declare all its dependencies
        import transfer_queue  # noqa: F401
        import verl.trainer.main_ppo  # noqa: F401


def installed() -> tuple[str, Path]:
    """The version and the folder of the installed verl. Raises PackageNotFoundError."""
    version, spec = importlib.metadata.version("verl"), find_spec("verl")
    if spec is None or spec.origin is None:
        raise importlib.metadata.PackageNotFoundError("verl")
    return version, Path(spec.origin).parent


if __name__ == "__main__":
    _version, _root = installed()
    print(json.dumps({_version: method_hashes(_root, NAMES)}, indent=1))
