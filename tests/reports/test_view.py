"""The live view beyond the page: search, addresses and keys."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from creditflow.errors import CreditflowError, InputError
from creditflow.reports.index import Filter, Index
from creditflow.reports.search import search, words_of
from creditflow.reports.view import Watched, application
from creditflow.runs import Ledger, RunFolder
from tests.builders import examples
from tests.reports.browser import opened
from tests.reports.runs import a_batch, a_run, indexed, write_step
from tests.reports.test_page import reported, served, with_filter


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture(scope="module")
def index(ledger: Ledger) -> Index:
    return indexed(ledger)


def test_queries_run_during_a_refresh(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    index = indexed(ledger)
    with index._lock:  # a refresh holds it
        pages: list[int] = []
        asking = threading.Thread(target=lambda: pages.append(index.page(Filter(), 0, 5)["total"]))
        asking.start()
        asking.join(60)
    assert pages == [48]


def test_view_removes_its_tables_when_terminated(ledger: Ledger, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "creditflow", "view", str(ledger.path), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        assert said.startswith("view: http://"), said
        assert list(tmp_path.iterdir()) != []
        process.send_signal(signal.SIGTERM)
        assert process.communicate()[1].endswith("interrupted\n")
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


# ---- search ----------------------------------------------------------------------------------------------------------


def test_words_of_a_query_keep_phrases() -> None:
    assert words_of('Two "exact Words" x') == ["two", "exact words", "x"]
    for text in ("", '""', " ".join("abcdefghijklmnopq"), "x" * 1001):
        with pytest.raises(InputError, match="text: expected 1 to 16 words"):
            words_of(text)


def searched(index: Index, wanted: Filter, text: str, limit: int, seconds: float = 60.0) -> list[str]:
    """All ids that a search finds, portion by portion."""
    ids: list[str] = []
    begin = None
    while True:
        portion = search(index, wanted, text, begin, limit, seconds)
        ids += [row["trajectory_id"] for row in portion["trajectories"]]
        assert len(portion["trajectories"]) <= limit
        if portion["next"] is None:
            assert portion["searched"] == portion["of"]
            return ids
        begin = portion["next"]


@examples(25)
@given(
    training_step=st.sampled_from([None, 2, 3]),
    outcome=st.sampled_from([None, "right", "wrong"]),
    words=st.sampled_from(["response", "RESPONSE 3", '"prompt 5 of 0-2"', "0-3-1-2/4", "nowhere", "response nowhere"]),
    limit=st.integers(1, 20),
)
def test_search_finds_each_matching_trajectory_once(
    index: Index, ledger: Ledger, training_step: int | None, outcome: str | None, words: str, limit: int
) -> None:
    wanted = Filter(outcome=outcome, training_step=training_step)
    among = [row["trajectory_id"] for row in index.page(wanted, 0, 200)["trajectories"]]
    texts: dict[str, list[str]] = {}
    for recorded in ledger:
        batch = recorded.batch
        for s in range(batch.n_steps):
            id = batch.trajectory_ids[batch.trajectory_of_step[s]]
            texts.setdefault(id, []).append(f"{batch.prompts[s]}\n{batch.responses[s]}\n{batch.step_ids[s]}".lower())
    expected = [id for id in among if any(all(word in text for word in words_of(words)) for text in texts[id])]
    assert searched(index, wanted, words, limit) == expected


def test_search_continues_after_its_time(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("creditflow.reports.search._FILES", 1)
    portion = search(index, Filter(), "nowhere", None, 5, seconds=0.0)
    assert (portion["searched"], portion["of"], portion["next"]) == (1, 3, (2, -1))
    assert len(searched(index, Filter(), "response", 5, seconds=0.0)) == 48
    after_a_rollback = search(index, Filter(), "response", (4, 4 << 32), 60)  # step 4 is gone
    assert len(after_a_rollback["trajectories"]) == 48


def test_search_excerpt_is_around_the_match(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    batch = a_batch(1)
    responses = [f"{'a' * 5000} Needle {'b' * 5000}", *batch.responses[1:]]
    write_step(folder, 1, replace(batch, responses=tuple(responses)))
    ledger = Ledger.open(folder.path)
    index = indexed(ledger)
    (row,) = search(index, Filter(), "needle", None, 5)["trajectories"]
    assert row["match"]["excerpt"] == f"{'a' * 59} Needle {'b' * 133}"
    assert (row["match"]["index"], row["match"]["agent"], row["match"]["steps"]) == (0, "planner", 1)


def test_view_reports_a_file_that_vanished(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    watched = Watched(ledger.path)
    watched.look()
    (ledger.path / "steps" / "000002.parquet").write_bytes(b"damaged")
    (ledger.path / "steps" / "000001.parquet").unlink()
    client = TestClient(application(watched, None), raise_server_exceptions=False)
    answer = client.get("/api/search", params={"text": "response"})
    assert answer.status_code == 503
    assert "try again" in answer.json()["detail"]


def test_full_disk_below_the_index_damages_no_file(tmp_path: Path) -> None:
    watched = Watched(a_run(tmp_path / "run").path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CreditflowError, match="the tables of the run cannot be written"):
            watched.look()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert watched.index.damaged == {}
    watched.look()
    assert set(watched.index.taken) == {1, 2, 3}


# ---- addresses and keys ----------------------------------------------------------------------------------------------


def test_address_opens_a_step_and_its_token(ledger: Ledger, tmp_path: Path) -> None:
    report = reported(tmp_path / "report.html", ledger.path)
    with opened(report) as page:
        address = page.locator("#steps a").first.get_attribute("href")
    with opened(f"{report}{address}&token=0") as page:  # which has the terms of steps alone
        page.wait_for_selector("text=Why the advantage of the whole step")
    with served(ledger.path) as (url, _):
        with opened(f"{url}#step=0-2-1-1%2F3&training_step=2&token=0") as page:
            expect(page.locator("#trajectory h3").first).to_have_text("Trajectory 0-2-1-1")
            page.wait_for_selector("text=Why this advantage of token 0")
            marked = page.locator("#steps > li[aria-current=true]")
            expect(marked).to_have_attribute("data-step", "0-2-1-1/3")
            page.click('[data-node="0-2-1-1/4"]')
            page.wait_for_url(re.compile("step=0-2-1-1%2F4"))
            page.go_back()
            expect(marked).to_have_attribute("data-step", "0-2-1-1/3")
        assert httpx.get(f"{url}api/step", params={"step_id": "0-2-1-1/3", "training_step": 2}).status_code == 200


def test_keys_move_between_trajectories_and_steps(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        ids = [row.get_attribute("data-trajectory") for row in page.locator("#list [data-trajectory]").all()]
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[0]}")
        page.keyboard.press("j")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[1]}")
        page.keyboard.press("k")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[0]}")
        page.keyboard.press("l")
        page.keyboard.press("l")
        expect(page.locator("#steps > li[aria-current]")).to_have_attribute("data-step", f"{ids[0]}/1")
        page.keyboard.press("/")
        page.keyboard.type("jj")
        assert page.input_value("#filter [name=text]") == "jj"
        page.keyboard.press("Tab")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("?")
        page.uncheck("#keys-on")
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.keyboard.press("j")
        page.keyboard.press("?")
        assert not page.is_visible("#keys")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[0]}")


def test_search_field_lists_matches(ledger: Ledger, tmp_path: Path) -> None:
    with served(ledger.path) as (live, _):
        for url, total in ((live, 16), (reported(tmp_path / "report.html", ledger.path), 10)):
            with opened(url) as page:
                with_filter(page)
                page.fill("#filter [name=text]", '"response 4 of 0-3"')
                page.keyboard.press("Enter")
                expect(page.locator("#found")).to_have_text(
                    re.compile(f"^{total} (sample )?trajectories found; .* the end$")
                )
                page.locator("#list a").first.click()
                expect(page.locator("#steps > li[aria-current]")).to_have_attribute(
                    "data-step", re.compile("^0-3-.*/4$")
                )
                assert page.is_disabled("#later")
