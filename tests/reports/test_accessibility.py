"""Report and view have no serious findings of axe-core, in light and dark and at the width of a phone.

axe/axe.min.js is axe-core 4.14.1 (MPL-2.0), unchanged from npm; it is for tests alone and in no distribution.
"""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from creditflow.runs import Ledger
from tests.builders import mostly_slow
from tests.reports.browser import opened
from tests.reports.runs import a_run
from tests.reports.test_page import reported, served, with_filter

VIEWS = list(product(("light", "dark"), (1280, 390)))
AXE = (Path(__file__).parent / "axe" / "axe.min.js").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("accessible") / "run", training_steps=12)


def violations(page: Any) -> list[str]:
    """Serious and critical findings: the rule, and the first element."""
    page.evaluate(AXE)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0].get('failureSummary', '')}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("window", mostly_slow(VIEWS, {("light", 1280)}))
def test_report_has_no_serious_violations(ledger: Ledger, tmp_path: Path, window: tuple[str, int]) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path), *window) as page:
        page.locator("svg.trajectory g[role=button]").nth(1).click()
        page.locator("#steps summary").nth(1).click()
        page.wait_for_selector("[data-part=why]")
        with_filter(page)
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= window[1]
        page.keyboard.press("?")
        assert violations(page) == []


@pytest.mark.parametrize("window", mostly_slow(VIEWS, {("dark", 390)}))
def test_view_has_no_serious_violations(ledger: Ledger, window: tuple[str, int]) -> None:
    with served(ledger.path) as (url, _), opened(url, *window) as page:
        page.wait_for_selector("svg.trajectory")
        with_filter(page)
        page.fill("#filter [name=text]", "response 3")
        page.keyboard.press("Enter")
        page.wait_for_selector("#list a")
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= window[1]
