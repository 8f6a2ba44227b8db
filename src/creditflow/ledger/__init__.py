"""The append-only record of a run, in its folder. Writes what it is given; computes nothing."""

from creditflow.ledger.run_folder import RunFolder

__all__ = ["RunFolder"]
