"""Attacks for testing the isolation of a sandbox. Based on the interface of a sandbox; independent of back ends.

`check_sandbox(sandbox)` tries all attacks.
"""

from tests.sandbox.attacks import files, kernel, resources

from tests.sandbox.attacks import network  # isort: skip
from tests.sandbox.attacks.attack import ATTACKS, Attack, AttackFinding, CannotTry, Outcome, Scene, attack
from tests.sandbox.attacks.check import CONTROL, AttackVerdict, check_sandbox, memory_bound
from tests.sandbox.attacks.resources import CHECK_LIMITS, LARGEST

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
