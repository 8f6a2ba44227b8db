"""The append-only record of a run in its folder: writer, reader and SQL access. Computes nothing."""

from creditflow.runs.reader import Ledger
from creditflow.runs.run_folder import RunFolder
from creditflow.runs.step_files import Recorded

__all__ = ["Ledger", "Recorded", "RunFolder"]
