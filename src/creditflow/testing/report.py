"""Run a table of checks on cases and report the results. Independent of the checked objects.

A check is a function of one case that yields a Fault for each error. Its name and the first paragraph of its docstring
appear in reports.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from creditflow.errors import ConfigError, CreditflowError, did_you_mean

Case = TypeVar("Case")

_SHOWN = 3
_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Fault:
    """One error that a check found."""

    on: str
    """The input of the error."""
    expected: str
    got: str

    def __str__(self) -> str:
        return f"on {self.on}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True)
class FailedCheck:
    """A failed check with its findings."""

    check: str
    sentence: str
    """The description of the check: the first paragraph of its docstring."""
    findings: tuple[Fault, ...]

    def __str__(self) -> str:
        more = len(self.findings) - _SHOWN
        lines = [f"{self.check}: {self.sentence}", *map(str, self.findings[:_SHOWN]), f"and {more} more"]
        return "\n  ".join(lines if more > 0 else lines[:-1])


@dataclass(frozen=True, slots=True)
class Report:
    """Results of the checks of one subject, by name, in order."""

    subject: str
    passed: tuple[str, ...]
    failures: tuple[FailedCheck, ...]
    not_run: tuple[str, ...]
    """Checks that were skipped, or had no case left because the basic checks failed."""

    def __str__(self) -> str:
        n, failed = len(self.passed) + len(self.failures), len(self.failures)
        lines = [f"{self.subject}: {f'{failed} of {n} checks failed' if failed else f'all {n} checks passed'}"]
        lines += map(str, self.failures) if failed else [f"  {name}" for name in self.passed]
        return "\n".join(lines + ([f"not run: {', '.join(self.not_run)}"] if self.not_run else []))


class ConformanceError(CreditflowError):
    """Some checks failed; `report` lists them, and the message is the text of the report."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report


Checks = Sequence[Callable[[Case], Iterator[Fault]]]


def run(
    subject: str, basics: Checks[Case], checks: Checks[Case], cases: Sequence[Case], skip: Collection[str]
) -> Report:
    """Run `basics` and then `checks` on every case, except the checks named in `skip`.

    A case that fails a basic check is excluded from all later checks, which would report the same fault again. Raises
    ConformanceError if a check found a fault, ConfigError if `skip` names an unknown check.
    """
    table = {name_of(check): check for check in (*basics, *checks)}
    for name in skip:
        if name not in table:
            hint = did_you_mean(name, table)
            raise ConfigError(f"skip: expected names of checks ({', '.join(table)}), got {name!r}{hint}")
    standing, passed, failures = list(cases), list[str](), list[FailedCheck]()
    for name, check in table.items():
        if name in skip or not standing:
            continue
        findings = [_findings(check, case) for case in standing]
        if any(findings):
            failures.append(FailedCheck(name, sentence_of(check), tuple(f for of_case in findings for f in of_case)))
        else:
            passed.append(name)
        if check in basics:
            standing = [case for case, of_case in zip(standing, findings, strict=True) if not of_case]
    not_run = [name for name in table if name not in {*passed, *(failure.check for failure in failures)}]
    report = Report(subject, tuple(passed), tuple(failures), tuple(not_run))
    if failures:
        raise ConformanceError(report)
    return report


def _findings(check: Callable[[Case], Iterator[Fault]], case: Case) -> list[Fault]:
    faults: list[Fault] = []
    try:
        faults.extend(check(case))
    except Exception as error:  # user code may raise any exception at any point
        faults.append(Fault(str(case), "no exception", described(error)))
    return faults


def described(error: Exception) -> str:
    """An exception's type and message in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_CHARACTERS]


def name_of(subject: object) -> str:
    """A function's name, or the name of an object's class."""
    return str(getattr(subject, "__name__", type(subject).__name__))


def sentence_of(check: Callable[..., object]) -> str:
    """The description of a check: the first paragraph of its docstring, in one line."""
    return " ".join((check.__doc__ or "").split("\n\n", maxsplit=1)[0].split())
