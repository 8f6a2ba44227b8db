"""The live view beyond the page: stored index, search, export, two runs, addresses and keys."""

import re
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from playwright.sync_api import expect

from creditflow.data.table import read_parquet
from creditflow.errors import InputError
from creditflow.reports import index as index_module
from creditflow.reports.comparison import names_of, tasks_apart
from creditflow.reports.index import Filter, Index
from creditflow.reports.search import export, search, words_of
from creditflow.reports.view import Watched, application
from creditflow.runs import Ledger, RunFolder
from tests.builders import examples
from tests.cli.commands import refused
from tests.reports.browser import opened
from tests.reports.runs import a_batch, a_run, indexed, write_step
from tests.reports.test_page import reported, served


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("view") / "run")


@pytest.fixture(scope="module")
def index(ledger: Ledger) -> Index:
    return indexed(ledger)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of stored indexes, used for runs of any size."""
    monkeypatch.setenv("CREDITFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(index_module, "STORED_FROM", 0)
    return tmp_path / "cache" / "index"


# ---- the stored index ------------------------------------------------------------------------------------------------


def read_again(ledger: Ledger) -> tuple[Index, set[int]]:
    """The stored index after a refresh, and the training steps that it held before."""
    index = Index.stored(ledger)
    before = set(index.taken)
    index.refresh(ledger)
    return index, before


def test_stored_index_reads_new_files_alone(tmp_path: Path, stored: Path) -> None:
    ledger = a_run(tmp_path / "run")
    first, before = read_again(ledger)
    rows = first.page(Filter(), 0, 100)
    first.close()
    assert before == set()
    write_step(RunFolder.open(ledger.path), 4)
    again, before = read_again(Ledger.open(ledger.path))
    assert before == {1, 2, 3}
    assert set(again.taken) == {1, 2, 3, 4}
    assert again.page(Filter(), 16, 100)["trajectories"] == rows["trajectories"]
    assert set(again.rules.values()) == {"threshold"}
    again.close()
    assert not list(ledger.path.glob("*duckdb*"))  # nothing is written to the run


def test_stored_index_forgets_replaced_files(tmp_path: Path, stored: Path) -> None:
    ledger = a_run(tmp_path / "run")
    read_again(ledger)[0].close()
    folder = RunFolder.open(ledger.path)
    folder.rewind(1)
    write_step(folder, 2, a_batch(9, tasks=2))
    ledger = Ledger.open(ledger.path)
    index, _ = read_again(ledger)
    fresh = indexed(ledger)
    for query in ("FROM sums ORDER BY ALL", "FROM parts ORDER BY ALL", "FROM steps ORDER BY ALL"):
        assert index.ask(query) == fresh.ask(query)
    index.close()


@pytest.mark.parametrize("harm", ["damaged", "version"])
def test_stored_index_is_made_again(tmp_path: Path, stored: Path, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = a_run(tmp_path / "run")
    read_again(ledger)[0].close()
    (file,) = stored.glob("*.duckdb")
    if harm == "damaged":
        file.write_bytes(b"not a database" * 1000)
    else:
        monkeypatch.setattr(index_module, "_VERSION", "other")
    index, before = read_again(ledger)
    assert before == set()
    assert set(index.taken) == {1, 2, 3}
    index.close()
    assert len(list(stored.glob("*.duckdb"))) == 1


def test_index_that_is_open_is_left_alone(tmp_path: Path, stored: Path) -> None:
    ledger = a_run(tmp_path / "run")
    first, _ = read_again(ledger)
    second, before = read_again(ledger)  # a temporary one
    assert before == set()
    second.close()
    first.close()
    third, before = read_again(ledger)
    third.close()
    assert before == {1, 2, 3}


def test_queries_run_during_a_refresh(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    index = indexed(ledger)
    with index._lock:  # a refresh holds it
        pages: list[int] = []
        asking = threading.Thread(target=lambda: pages.append(index.page(Filter(), 0, 5)["total"]))
        asking.start()
        asking.join(60)
    assert pages == [48]


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


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_is_a_batch_of_the_filtered_trajectories(index: Index, ledger: Ledger, tmp_path: Path) -> None:
    wanted = Filter(outcome="wrong", training_step=2)
    n = export(index, wanted, '"response 3"', tmp_path / "out.parquet")
    batch = read_parquet(tmp_path / "out.parquet")
    ids = [row["trajectory_id"] for row in index.page(wanted, 0, 100)["trajectories"]]
    assert n == len(ids) > 0
    assert list(batch.trajectory_ids) == ids
    whole = ledger.read(2).batch
    first = whole.step_ids.index(batch.step_ids[0])
    assert batch.responses[:6] == whole.responses[first : first + 6]
    with pytest.raises(InputError, match="no trajectory matches the filter"):
        export(index, Filter(outcome="unscored"), "", tmp_path / "none.parquet")


def test_view_sends_the_export_and_removes_its_file(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    watched = Watched(ledger.path)
    watched.look()
    client = TestClient(application([watched], None))
    answer = client.get("/api/export.parquet", params={"outcome": "right"})
    (tmp_path / "got.parquet").write_bytes(answer.content)
    assert (
        read_parquet(tmp_path / "got.parquet").n_trajectories
        == watched.index.page(Filter(outcome="right"), 0, 1)["total"]
    )
    assert list(tmp_path.glob("creditflow-export-*")) == []
    assert client.get("/api/export.parquet", params={"outcome": "unscored"}).status_code == 400
    assert client.get("/api/search", params={"text": "response", "run": 1}).status_code == 404


def test_view_reports_a_file_that_vanished(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    watched = Watched(ledger.path)
    watched.look()
    (ledger.path / "steps" / "000002.parquet").write_bytes(b"damaged")
    (ledger.path / "steps" / "000001.parquet").unlink()
    client = TestClient(application([watched], None), raise_server_exceptions=False)
    for address in ("search", "export.parquet"):
        answer = client.get(f"/api/{address}", params={"text": "response"})
        assert answer.status_code == 503
        assert "try again" in answer.json()["detail"]


# ---- two runs --------------------------------------------------------------------------------------------------------


def test_view_shows_two_runs_side_by_side(tmp_path: Path) -> None:
    first = a_run(tmp_path / "first")
    other = a_run(tmp_path / "other", training_steps=2, gamma=0.5)
    with served(first.path, other.path) as (url, runs), opened(url) as page:
        page.wait_for_selector("#comparison >> text=algorithm.gamma")
        expect(page.locator("#found")).to_have_text(re.compile("^48 trajectories;"))
        page.select_option("#run", label="other")
        expect(page.locator("#found")).to_have_text(re.compile("^32 trajectories;"))
        page.locator("#apart tbody a").first.click()
        expect(page.locator("#trajectory h3").first).to_have_text(re.compile("of first$"))
        expect(page.locator("#beside h3").first).to_have_text(re.compile("of other$"))
        expect(page.locator("#found")).to_have_text(re.compile("^48 trajectories;"))
        page.locator("#beside g[data-step]").nth(2).click()
        expect(page.locator("#step h3").first).to_have_text(re.compile("^Step 0-2-"))
        page.reload()
        expect(page.locator("#beside h3").first).to_have_text(re.compile("of other$"))
        apart = tasks_apart(runs[0].index, runs[1].index)
        assert apart["shared"] == 4
        gaps = [abs(task["ended_right"][0] - task["ended_right"][1]) for task in apart["tasks"]]
        assert gaps == sorted(gaps, reverse=True)


def test_names_of_equal_folders_have_their_parents(tmp_path: Path) -> None:
    ledgers = [a_run(tmp_path / parent / "run", 1) for parent in ("a", "b")]
    assert names_of(ledgers) == ["a/run", "b/run"]


def test_view_refuses_three_runs(ledger: Ledger) -> None:
    assert "view: expected at most 2 runs, got 3" in refused("view", *[ledger.path] * 3)


# ---- addresses and keys ----------------------------------------------------------------------------------------------


def test_address_opens_a_step_and_its_token(ledger: Ledger) -> None:
    with served(ledger.path) as (url, _):
        with opened(f"{url}#step=0-2-1-1%2F3&training_step=2&token=0") as page:
            expect(page.locator("#trajectory h3").first).to_have_text("Trajectory 0-2-1-1")
            expect(page.locator("#step h3").first).to_have_text(re.compile("^Step 0-2-1-1/3"))
            page.wait_for_selector("text=Why this advantage of token 0")
            assert page.get_attribute('[data-step="0-2-1-1/3"]', "aria-current") == "true"
            page.click('[data-step="0-2-1-1/4"]')
            page.wait_for_url(re.compile("step=0-2-1-1%2F4"))
            page.go_back()
            expect(page.locator("#step h3").first).to_have_text(re.compile("^Step 0-2-1-1/3"))
        assert httpx.get(f"{url}api/step", params={"step_id": "0-2-1-1/3", "training_step": 2}).status_code == 200


def test_keys_move_between_trajectories_and_steps(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        ids = [row.get_attribute("data-trajectory") for row in page.locator("#list [data-trajectory]").all()]
        page.keyboard.press("j")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[0]}")
        page.keyboard.press("j")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[1]}")
        page.keyboard.press("k")
        expect(page.locator("#trajectory h3").first).to_have_text(f"Trajectory {ids[0]}")
        page.keyboard.press("l")
        page.keyboard.press("l")
        expect(page.locator("#step h3").first).to_have_text(re.compile(f"^Step {ids[0]}/1"))
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
                page.fill("#filter [name=text]", '"response 4 of 0-3"')
                page.keyboard.press("Enter")
                expect(page.locator("#found")).to_have_text(
                    re.compile(f"^{total} (sample )?trajectories found; .* the end$")
                )
                page.locator("#list td.text a").first.click()
                expect(page.locator("#step h3").first).to_have_text(re.compile("^Step 0-3-.*/4"))
                assert page.is_disabled("#later")
