"""Docs tell the truth: what they say was measured is found in the files of results that they name."""

import bisect
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted([*DOCS.glob("*.md"), DOCS.parent / "README.md"])
EXEMPT = re.compile(r"<!-- not in a file of results: [^>]+ -->")
"""Before a paragraph or a table: its numbers are none that a benchmark writes, and it says why."""
NAMED = re.compile(r"results/(\w+\.json)")
SAID = re.compile(r"(?<![\w.,/-])(\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?: ?(x|%|points|s|ms|MB|GB|kB)(?![\w-]))?")
WORDS = re.compile(
    r"95 % (?=bootstrap|interval)|`[^`]*`|\]\([^)]*\)|arXiv[^)]*\)|\(\d{4}\.\d{5}[^)]*\)|\d(?:\.\d)?e-\d+"
)
"""What has digits and was not measured: names, code, addresses, papers; and powers of ten, which round otherwise."""


def numbers(found: Any) -> Iterator[float]:
    """All that a file of results holds, and mean and standard deviation of lists, which are of seeds or repeats."""
    if isinstance(found, dict):
        for value in found.values():
            yield from numbers(value)
    elif isinstance(found, list):
        for value in found:
            yield from numbers(value)
        if found and all(isinstance(value, dict) and value.keys() == found[0].keys() for value in found):
            yield from numbers({key: [value[key] for value in found] for key in found[0]})
        if len(found) > 1 and all(isinstance(value, int | float) for value in found):
            yield from (mean(found), stdev(found))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


@cache
def known(files: frozenset[str]) -> list[float]:
    """Sorted: as they are, and as percents or points."""
    values = {abs(value) for file in files for value in numbers(json.loads((DOCS / "results" / file).read_text()))}
    return sorted(values | {100 * value for value in values})


def is_there(text: str, values: list[float]) -> bool:
    """Whether one of `values` is rounded to what was said."""
    digits = text.replace(",", "")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) + 1e-9
    at = bisect.bisect_left(values, float(digits) - half)
    return at < len(values) and values[at] <= float(digits) + half


@dataclass
class Said:
    """A number that a page says was measured."""

    line: int
    text: str
    files: set[str]
    """Of results, that its section names; where it names none, the page so far."""


def measured(text: str) -> Iterator[Said]:
    """Decimals, and whole numbers with a unit, where files of results are named."""
    exempt = code = False
    before, here = set[str](), set(NAMED.findall(text.split("\n## ", maxsplit=1)[0]))
    sections = iter(text.split("\n## ")[1:])
    for place, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        exempt = bool(EXEMPT.search(line)) or (exempt and line.strip() != "")
        if line.startswith("## "):
            before, here = before | here, set(NAMED.findall(next(sections)))
        if code or exempt:
            continue
        plain = WORDS.sub(" ", line)
        for found in SAID.finditer(plain):
            if "." in found[1] or found[2]:
                yield Said(place, found[1], here or before)


@pytest.mark.parametrize("page", [page for page in PAGES if NAMED.search(page.read_text())], ids=lambda page: page.stem)
def test_every_number_that_was_measured_is_in_a_file_of_results(page: Path) -> None:
    values = {}
    for said in measured(page.read_text()):
        files = tuple(sorted(said.files))
        values.setdefault(files, ([], known(frozenset(said.files))))
        if files and not is_there(said.text, values[files][1]):
            values[files][0].append(f"{page.name}:{said.line}: {said.text}")
    assert not any(missing for missing, _ in values.values()), "\n".join(
        f"not in {', '.join(files)}: {'; '.join(missing)}" for files, (missing, _) in values.items() if missing
    )


def test_numbers_at_random_are_missed_more_often_than_not() -> None:
    """The check above would say little if its files held a number for everything."""
    rng, there = random.Random(0), []
    for page in PAGES:
        for said in measured(page.read_text()):
            if said.files:
                other = "".join(rng.choice("0123456789") if c.isdigit() else c for c in said.text)
                there.append(is_there(other, known(frozenset(said.files))))
    assert len(there) > 500
    assert sum(there) / len(there) < 0.4


def test_a_number_that_no_result_is_rounded_to_is_missed() -> None:
    values = [0.1234, 5.0, 12.34]
    assert [is_there(said, values) for said in (".123", "12.3", "12", "5", ".124", "12.4", "6")] == [True] * 4 + [
        False
    ] * 3


def test_what_is_not_measured_is_not_looked_for() -> None:
    text = "\n".join(
        [
            "took 3.5 s of `0.7` and 12 runs",
            "<!-- not in a file of results: by hand -->",
            "| .5 | 7 % |",
            "",
            "1,024 MB",
            "```",
            "x = 0.5",
            "```",
            "## Costs",
            "2.5 x ([a](results/a.json))",
            "## More",
            "9 s",
        ]
    )
    assert [(said.line, said.text, said.files) for said in measured(text)] == [
        (1, "3.5", set()),
        (5, "1,024", set()),
        (10, "2.5", {"a.json"}),
        (12, "9", {"a.json"}),
    ]
