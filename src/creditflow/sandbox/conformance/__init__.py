"""Attacks for testing the isolation of a sandbox. Based on the interface of a sandbox; independent of back ends.

`check_sandbox(sandbox)` tries all attacks; `creditflow sandbox check` does so from the command line.
"""

from creditflow.sandbox.conformance import files, kernel, resources

from creditflow.sandbox.conformance import network  # isort: skip
from creditflow.sandbox.conformance.attack import ATTACKS, Attack, AttackFinding, CannotTry, Outcome, Scene, attack
from creditflow.sandbox.conformance.check import CONTROL, AttackVerdict, check_sandbox, memory_bound
from creditflow.sandbox.conformance.resources import CHECK_LIMITS, LARGEST

__all__ = [
    "ATTACKS",
    "CHECK_LIMITS",
    "CONTROL",
    "LARGEST",
    "Attack",
    "AttackFinding",
    "AttackVerdict",
    "CannotTry",
    "Outcome",
    "Scene",
    "attack",
    "check_sandbox",
    "files",
    "kernel",
    "memory_bound",
    "network",
    "resources",
]
