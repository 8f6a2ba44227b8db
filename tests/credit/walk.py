"""The walk of a batch through `assign`: python -m tests.credit.walk

A stop is an entry into a file of `creditflow/credit` other than the caller's; a return is a stop in a file that the
walk has left before. The records are the dataclasses of the package that are made on the way.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from types import FrameType
from typing import Any

from creditflow.credit import CreditOptions, assign, make_threshold
from tests.builders import batch_of, make_trajectory, step

PACKAGE = "creditflow/credit/"


@dataclass(frozen=True)
class Walk:
    """The stops, returns and records of one call."""

    stops: tuple[str, ...]
    """The files, in order of entry."""
    returns: int
    records: frozenset[str]


def walk(call: Callable[[], Any]) -> Walk:
    """Follow a call through the package."""
    stops: list[str] = []
    records: set[str] = set()
    returns = 0
    stack: list[str] = []

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal returns
        name = frame.f_code.co_filename
        if event == "call":
            made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
            if made is not None and is_dataclass(made) and type(made).__module__.startswith("creditflow.credit"):
                records.add(type(made).__name__)
            before = stack[-1] if stack else ""
            inside = name.partition(PACKAGE)[2] if PACKAGE in name else before
            stack.append(inside)
            if inside and inside != before:
                returns += inside in stops
                stops.append(inside)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return Walk(tuple(stops), returns, frozenset(records))


def example() -> Any:
    """A batch of two agents with scores between 0 and 1."""
    return batch_of(
        *(
            make_trajectory(f"t{n}", [step("a", score), step("b", 1 - score), step("a", 0.5)], outcome=n % 2)
            for n, score in enumerate((0.0, 1.0, 0.75, 0.25))
        )
    )


def walk_of_assign() -> Walk:
    """The walk under the rule `threshold`, with the state that training keeps between batches."""
    options, batch = CreditOptions(propagation="threshold"), example()
    first = assign(example(), options)  # loads modules and compiles kernels
    threshold = make_threshold(0.5)
    return walk(lambda: assign(batch, options, threshold=threshold, history=first.history))


def main() -> None:
    seen = walk_of_assign()
    print(
        f"{len(seen.stops)} stops in {len(set(seen.stops))} files, {seen.returns} returns, {len(seen.records)} records"
    )
    print("stops:", ", ".join(seen.stops))
    print("records:", ", ".join(sorted(seen.records)))


if __name__ == "__main__":
    main()
