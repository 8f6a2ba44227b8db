"""The append-only record of a run in its folder: writer, reader and SQL access. Computes nothing."""

from creditflow.ledger.reader import Ledger
from creditflow.ledger.run_folder import RunFolder
from creditflow.ledger.step_files import Recorded

__all__ = ["Ledger", "Recorded", "RunFolder"]
