"""The check of a user's reward function.

`check_reward_function` returns a Report, or raises one ConformanceError that lists every failed check. It needs no test
framework and no model.
"""

from creditflow.testing.report import ConformanceError, FailedCheck, Fault, Report
from creditflow.testing.rewards import check_reward_function

__all__ = ["ConformanceError", "FailedCheck", "Fault", "Report", "check_reward_function"]
