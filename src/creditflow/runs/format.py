"""The version of a run's files."""

from __future__ import annotations

from pathlib import Path

from creditflow.errors import DataError

FORMAT = 3
"""Version of `run.json`, of the names in `metrics.jsonl`, and of the columns of step files.

Version 2 has options and columns of credit that were removed, such as those of the prefix baseline. Version 1 (files
without a number are older still) has other names: `val/plays`, the column `stopped`, and more.
"""


def expect_format(file: Path, version: object) -> None:
    """Raise DataError unless `version` is this one; `file` appears in the message."""
    if version == FORMAT:
        return
    advice = "update creditflow"
    if not isinstance(version, int) or version < FORMAT:
        advice = "read it with the creditflow that wrote it (versions in run.json), or train again in a new folder"
    raise DataError(f"{file}: a file of version {version}; this creditflow reads version {FORMAT}: {advice}")
