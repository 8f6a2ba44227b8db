"""Check that measured numbers in the docs occur in the result files that they cite, and that links lead to files."""

import ast
import bisect
import dataclasses
import json
import random
import re
import runpy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import creditflow
from benchmarks import which_credit
from benchmarks.studies import STUDIES
from creditflow import Step, Task, Trajectory
from creditflow.config import Config
from creditflow.config.loading import shipped_recipes
from creditflow.runs.step_files import FORMAT
from tests.paths import DOCS, ROOT

PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
EXEMPT = re.compile(r"<!-- not in a file of results: [^>]+ -->")
"""Marks a paragraph or a table with numbers from other sources than a result file, and gives the reason."""
NAMED = re.compile(r"results/(\w+\.json)")
SAID = re.compile(r"(?<![\w.,/-])(\d{1,3}(?:,\d{3})+|\d*\.\d+|\d+)(?: ?(x|%|points|s|ms|MB|GB|kB)(?![\w-]))?")
WORDS = re.compile(
    r"95 % (?=bootstrap|interval)|`[^`]*`|\]\([^)]*\)|arXiv[^)]*\)|\(\d{4}\.\d{5}[^)]*\)|\d(?:\.\d)?e-\d+"
)
"""Text with unmeasured digits: names, code, addresses, papers; and powers of ten, which round differently."""


MADE, MADE_END, MADE_BY = "<!-- made by", "<!-- to here -->", re.compile(r"<!-- made by `(.*)` -->")


TABLES: Mapping[str, Callable[[], list[str]]] = {
    **{f"{which_credit.COMMAND}, {name}": partial(which_credit.study_lines, name) for name in STUDIES},
    which_credit.HEADLINE: which_credit.headline,
}
"""The generated tables that are compared with their results as a whole, by command. Others are checked by number."""


@pytest.mark.parametrize("command", TABLES)
def test_generated_table_equals_its_results(command: str) -> None:
    (page,) = [text for page in PAGES if f"<!-- made by `{command}` -->" in (text := page.read_text())]
    _, _, rest = page.partition(f"<!-- made by `{command}` -->\n")
    assert rest.partition(MADE_END)[0].splitlines() == TABLES[command]()


def numbers(found: Any) -> Iterator[float]:
    """All numbers in a result file, and mean and standard deviation of its lists, which run over seeds or repeats."""
    if isinstance(found, dict):
        for value in found.values():
            yield from numbers(value)
    elif isinstance(found, list):
        for value in found:
            yield from numbers(value)
        if found and all(isinstance(value, dict) and value.keys() == found[0].keys() for value in found):
            yield from numbers({key: [value[key] for value in found] for key in found[0]})
        if len(found) > 1 and all(isinstance(value, int | float) for value in found):
            yield from (float(np.mean(found)), float(np.std(found, ddof=1)))
    elif isinstance(found, int | float) and not isinstance(found, bool):
        yield float(found)


@cache
def numbers_in(file: str) -> frozenset[float]:
    """The numbers of a result file: unchanged, and as percents or points."""
    values = {abs(value) for value in numbers(json.loads((DOCS / "results" / file).read_text()))}
    return frozenset(values | {100 * value for value in values})


@cache
def known(files: frozenset[str]) -> list[float]:
    """The sorted numbers of result files."""
    return sorted(frozenset().union(*map(numbers_in, files)))


def is_there(text: str, values: list[float]) -> bool:
    """Whether one of `values` rounds to `text`."""
    digits = text.replace(",", "")
    half = 0.5 * 10.0 ** -len(digits.partition(".")[2]) + 1e-9
    at = bisect.bisect_left(values, float(digits) - half)
    return at < len(values) and values[at] <= float(digits) + half


@dataclass
class Said:
    """A measured number on a page."""

    line: int
    text: str
    files: set[str]
    """The result files that its section names, or else those named earlier on the page."""


def measured(text: str) -> Iterator[Said]:
    """Decimals, and whole numbers with a unit, on a page that names result files."""
    exempt = code = generated = False
    before, here = set[str](), set(NAMED.findall(text.split("\n## ", maxsplit=1)[0]))
    sections = iter(text.split("\n## ")[1:])
    for place, line in enumerate(text.splitlines(), 1):
        code ^= line.startswith("```")
        exempt = bool(EXEMPT.search(line)) or (exempt and line.strip() != "")
        if line.startswith(MADE):
            generated = MADE_BY.sub(r"\1", line) in TABLES
        elif line.startswith(MADE_END):
            generated = False
        if line.startswith("## "):
            before, here = before | here, set(NAMED.findall(next(sections)))
        if code or exempt or generated:
            continue
        plain = WORDS.sub(" ", line)
        for found in SAID.finditer(plain):
            if "." in found[1] or found[2]:
                yield Said(place, found[1], here or before)


@pytest.mark.parametrize("page", [page for page in PAGES if NAMED.search(page.read_text())], ids=lambda page: page.stem)
def test_measured_numbers_are_in_the_cited_results(page: Path) -> None:
    values = {}
    for said in measured(page.read_text()):
        files = tuple(sorted(said.files))
        values.setdefault(files, ([], known(frozenset(said.files))))
        if files and not is_there(said.text, values[files][1]):
            values[files][0].append(f"{page.name}:{said.line}: {said.text}")
    assert not any(missing for missing, _ in values.values()), "\n".join(
        f"not in {', '.join(files)}: {'; '.join(missing)}" for files, (missing, _) in values.items() if missing
    )


LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(?:#[^)\s]*)?\)")
PAGE_NAME = re.compile(r"\bdocs/[\w/]+\.md\b")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = LINK.findall(page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


FRAGMENT = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)#([^)\s]+)\)")


def fragments(page: Path) -> set[str]:
    """The addresses of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    links = [(page.parent / name if name else page, heading) for name, heading in FRAGMENT.findall(page.read_text())]
    assert [link for link in links if link[1] not in fragments(link[0])] == []


def test_pages_named_in_the_code_exist() -> None:
    sources = [path for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = {name for path in [*sources, ROOT / "Makefile"] for name in PAGE_NAME.findall(path.read_text())}
    assert names
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


CODE = re.compile(r"^```(?:python|py)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def imports_of(code: str) -> Iterator[str]:
    """The import statements of a block of code that import from creditflow."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "creditflow":
            yield ast.unparse(node)


def test_ledger_page_names_the_format() -> None:
    page = (DOCS / "reference" / "ledger.md").read_text()
    assert re.findall(r"version of the run's files, (\d+)|^Version (\d+)\.", page, re.M) == [
        (str(FORMAT), ""),
        ("", str(FORMAT)),
    ]


def test_imports_in_the_docs_resolve() -> None:
    statements = {line for page in PAGES for block in CODE.findall(page.read_text()) for line in imports_of(block)}
    assert len(statements) > 20
    for statement in sorted(statements):
        if not re.search(
            r"plugins\.(trl|verifiers)", statement
        ):  # these need other trainers; their own tests run the pages
            exec(statement, {})


def rows_of(page: Path) -> list[list[str]]:
    """The cells of the first table of a page, without its head."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_glossary_words_are_used_and_unique() -> None:
    glossary = DOCS / "concepts" / "glossary.md"
    words = [word for cell, *_ in rows_of(glossary) for word in cell.split(", ")]
    others = " ".join(page.read_text().lower() for page in PAGES if page != glossary)
    assert len(words) == len(set(words)) > 20
    assert [word for word in words if not re.search(rf"\b{word}", others)] == []


def test_glossary_fields_exist() -> None:
    """Names in code type in the glossary are fields, columns of the data set, or two estimators."""
    meanings = " ".join(meaning for _, meaning in rows_of(DOCS / "concepts" / "glossary.md"))
    fields = {field.name for kind in (Task, Step, Trajectory) for field in dataclasses.fields(kind)}
    known = fields | {"n", "data_source", "reward_model.ground_truth", "grpo", "gae", "..."}
    assert set(re.findall(r"`([^`]+)`", meanings)) - known == set()


def test_layout_page_shows_the_folders() -> None:
    tree = (DOCS / "design" / "layout.md").read_text().split("```")[1].splitlines()[2:]
    shown, parent = set(), ""
    for line in filter(None, tree):
        name = line.split()[0]
        parent = parent if line.startswith("    ") else name
        shown.add(name if name == parent else parent + name)
    root = ROOT / "src" / "creditflow"
    folders = [path for pattern in ("*/", "*/*/") for path in root.glob(pattern) if "__pycache__" not in path.parts]
    assert shown == {f"{path.relative_to(root)}/" for path in folders if any(path.iterdir())}
    files = {path.name for path in root.iterdir() if path.is_file()}
    assert files == {"__init__.py", "__main__.py", "errors.py", "registry.py", "removed.py", "py.typed"}


PIN = re.compile(r"^([\w.-]+)==([\w.]+)", re.MULTILINE)
TARGET = re.compile(r"^([a-z-]+):", re.MULTILINE)


def pins_by_test() -> dict[str, set[tuple[str, str]]]:
    """Libraries with their versions, by where they are pinned: `make test`, the Makefile's own, and recordings."""
    makefile, traces = (ROOT / "Makefile").read_text(), (DOCS / "how_to" / "traces.md").read_text()
    recordings = traces.partition("| recording | versions |\n")[2].partition("\n\n")[0]
    axe = (ROOT / "tests" / "reports" / "axe" / "axe.min.js").read_text(encoding="utf-8").split("\n")[0]
    return {
        "make test": {*PIN.findall((ROOT / "constraints.txt").read_text()), ("axe-core", axe.split()[-1].lstrip("v"))},
        "make": set(re.findall(r"[=\s]([\w-]+)(?:\[\w+\])?==([\w.]+)", makefile)),
        "recording": set(re.findall(r"([\w-]+) (\d+\.\d+\.\d+)", recordings)),
    }


def test_tested_versions_are_the_pinned_ones() -> None:
    page = (DOCS / "design" / "dependencies.md").read_text().split("## Tested versions\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([\w.-]+)`[^|]*\| (\S+) \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == page.count("\n| `") > 30
    pins = pins_by_test()
    targets = TARGET.findall((ROOT / "Makefile").read_text())
    for library, version, tested_by in rows:
        made = re.findall(r"make ([\w-]+)", tested_by)
        assert set(made) <= set(targets), library
        assert (library, version) in pins["make test" if made == ["test"] else "make" if made else tested_by], library
    dialects = re.findall(r"`(openai|anthropic)` (\d[\d.]*\d)", (DOCS / "reference" / "api_dialects.md").read_text())
    assert len(dialects) == 2
    assert set(dialects) <= pins["make test"]


REFERENCE = DOCS / "reference"


@pytest.mark.parametrize("name", ["cli", "configuration", "metrics", "python_api", "rewards"])
def test_generated_reference_is_current(name: str) -> None:
    page = (REFERENCE / f"{name}.md").read_text()
    is_current = runpy.run_path(str(DOCS / "generate.py"))["filled"](page) == page
    assert is_current, f"docs/reference/{name}.md differs from the docstrings: run `make reference`"


def test_python_api_page_names_the_public_names() -> None:
    page = (REFERENCE / "python_api.md").read_text()
    assert sorted(re.findall(r": creditflow\.(\w+) -->$", page, re.MULTILINE)) == sorted(creditflow.__all__)


def test_configuration_page_has_every_kind_of_key() -> None:
    page = (REFERENCE / "configuration.md").read_text()
    keys = {"algorithm": "propagation", "data": "train_files", "policies.<name>.pool": "size"}
    for section, name in {**keys, "reward.functions[]": "agent_match"}.items():
        table = page.split(f"\n## `{section}`\n")[1].split("\n## ")[0]
        assert re.search(rf"^\| `{name}` \| .+ \| .* \| .+ \|$", table, re.MULTILINE), (section, name)
    assert "| `theta` | a number or a mapping of options | `0.5` |" in page
    rates = re.findall(r"^\| `lr` \| a number above 0 \| `(.+?)` \|", page, re.MULTILINE)
    config = Config()
    assert list(map(float, rates)) == [config.actor_rollout_ref.actor.optim.lr, config.critic.optim.lr]


def test_rewards_page_describes_each_function_and_option() -> None:
    page = (REFERENCE / "rewards.md").read_text()
    assert set(re.findall(r"^## `(\w+)`$", page, re.MULTILINE)) >= {"code_tests", "judge", "information_gain"}
    assert re.findall(r"^\| `(\w+)` \|.* \|  \|$", page, re.MULTILINE) == []
    for section in page.split("\n## ")[1:]:
        assert re.findall(r"^\* \*\*(Range|Cost|Source)", section, re.MULTILINE) == ["Range", "Cost", "Source"], section


def test_recipes_page_lists_the_shipped_recipes() -> None:
    rows = rows_of(DOCS / "get_started" / "recipes.md")
    assert sorted(name for cell, *_ in rows for name in re.findall(r"`(\w+)`", cell)) == shipped_recipes()


def test_random_numbers_are_mostly_missing() -> None:
    """The check above would be vacuous if its files held almost every number."""
    rng, there = random.Random(0), []
    for page in PAGES:
        for said in measured(page.read_text()):
            if said.files:
                other = "".join(rng.choice("0123456789") if c.isdigit() else c for c in said.text)
                there.append(is_there(other, known(frozenset(said.files))))
    assert len(there) > 100
    assert sum(there) / len(there) < 0.4
