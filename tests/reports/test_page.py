"""The report and the live view in a browser: they show the ledger's values and execute no text."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient
from playwright.sync_api import expect
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from creditflow._utils.loopback import LOOPBACK
from creditflow.credit import explain
from creditflow.credit.records import PROPAGATION_RULES, Credit, RuleInput, propagation_rule
from creditflow.credit.rules.base import ScoreRule
from creditflow.data import TrajectoryBatch
from creditflow.reports import view
from creditflow.reports.detail import Spelling
from creditflow.reports.index import Filter
from creditflow.reports.view import Watched, application
from creditflow.runs import Ledger, RunFolder
from tests.builders import mostly_slow
from tests.cli.commands import creditflow, refused
from tests.reports.browser import opened
from tests.reports.runs import HOSTILE, a_batch, a_run, a_trajectory, write_step
from tests.rewards.processes import HANG_S


def reported(out: Path, *runs: Path) -> str:
    result = creditflow("report", *runs, "-o", out)
    assert result.exit_code == 0, result.output
    return out.as_uri()


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return a_run(tmp_path_factory.mktemp("report") / "run")


@contextmanager
def served(path: Path) -> Iterator[tuple[str, Watched]]:
    """Serve a run; yield its address and the run."""
    watched = Watched(path)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application(watched, LOOPBACK), log_level="error"))
        threads = [threading.Thread(target=work) for work in (watched.follow, lambda: server.run(sockets=[bound]))]
        for thread in threads:
            thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}/", watched
        finally:
            server.should_exit = True
            watched.stop()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("scheme", mostly_slow(["light", "dark"], {"light"}))
def test_report_has_charts_and_a_filter_of_samples(ledger: Ledger, tmp_path: Path, scheme: str) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path), scheme) as page:
        for name in ("val/pass_at_1", "actor/entropy", "propagation/pass_rate", "credit", "threshold"):
            label = page.get_attribute(f'[data-chart="{name}"]', "aria-label")
            assert label is not None
            assert " from " in label
            assert page.locator(f'[data-chart="{name}"] svg path').count() > 3
        assert "from 0.100 to 0.300" in page.get_attribute('[data-chart="val/pass_at_1"]', "aria-label")
        assert page.locator("#heat svg path").count() > 5
        assert page.locator("#advantages svg path").count() > 5
        assert page.locator("#tiles .tile").first.inner_text().split() == ["3", "training", "steps"]
        assert "entropy" in page.inner_text("#notes")
        assert page.locator("#of-agents tbody tr").count() == 3
        page.select_option("#heat-of", "error_rate")
        assert "share of wrong steps" in page.get_attribute("#heat", "aria-label")
        before = page.locator("#list [data-trajectory]").count()
        page.select_option("#filter [name=outcome]", "right")
        page.click("#filter button")
        rows = page.locator("#list tbody tr").all_inner_texts()
        assert 0 < len(rows) < before
        assert all("\tright\t" in row for row in rows)


def test_click_on_a_node_shows_the_step_and_its_advantage(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        row = page.locator("#list [data-trajectory]").first
        trajectory = row.get_attribute("data-trajectory")
        row.click()
        recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
        for index in (0, 3):
            id = f"{trajectory}/{index}"
            page.click(f'[data-step="{id}"]')
            s = recorded.batch.step_ids.index(id)
            assert page.inner_text('[data-part="prompt"]') == recorded.batch.prompts[s]
            assert page.inner_text('[data-part="response"]') == recorded.batch.responses[s]
            said = explain(recorded.assignment, s)
            assert page.inner_text('[data-part="why"]').splitlines()[-1] == f"= {said.advantage!r}"
            assert (
                page.locator("span.token").count()
                == recorded.batch.token_offsets[s + 1] - recorded.batch.token_offsets[s]
            )


def test_graph_shows_gates_and_flow_and_accepts_keys(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        wrong = page.locator("#list tr:has-text('wrong') [data-trajectory]").first
        trajectory = wrong.get_attribute("data-trajectory")
        wrong.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector("svg.trajectory")
        recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
        made = recorded.assignment
        first = recorded.batch.step_ids.index(f"{trajectory}/0")
        shut = sum(not made.credit.gate_open_S[s] for s in range(first + 1, first + 6))
        assert page.locator("svg.trajectory line.gate").count() == shut > 0
        flows = [float(p.get_attribute("data-flow")) for p in page.locator("svg.trajectory path[data-flow]").all()]
        assert sum(flows) == pytest.approx(made.credit.received_S[first : first + 6].sum())
        page.locator("svg.trajectory g[role=button]").first.focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"text=Step {trajectory}/1")
        assert page.get_attribute(f'[data-step="{trajectory}/1"]', "aria-current") == "true"


def test_hostile_text_of_a_model_stays_text(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {"recipe": HOSTILE}, "")
    batch = a_batch(1)
    responses = [HOSTILE + "x" * 1_000_000, *batch.responses[1:]]
    write_step(folder, 1, replace(batch, responses=tuple(responses), prompts=tuple(HOSTILE for _ in responses)))
    url = reported(tmp_path / "report.html", folder.path)
    assert (tmp_path / "report.html").stat().st_size < 5_000_000
    with served(folder.path) as (live, _):
        for address in (url, live):
            with opened(address) as page:
                title = page.title()
                page.click('#list [data-trajectory="0-1-0-0"]')
                page.click('[data-step="0-1-0-0/0"]')
                shown = page.inner_text('[data-part="response"]')
                assert shown.startswith("</script><script>")
                assert f"({1_000_000 + len(HOSTILE):,} characters)" in shown
                assert len(shown) < 30_000
                assert "task 0: </script>" in page.inner_text("#hardest")
                assert page.locator("img").count() == 0
                assert page.title() == title == "creditflow: run"


def test_report_compares_up_to_four_runs(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"run{k}", gamma=gamma) for k, gamma in enumerate((0.9, 0.99, 0.5, 0.3))]
    with opened(reported(tmp_path / "report.html", *(run.path for run in runs))) as page:
        text = page.inner_text("#compared")
        assert "algorithm.gamma\t0.9\t0.99\t0.5\t0.3" in text
        assert text.count("{rule: threshold, w_r: 1.0, ") == 4
        label = page.get_attribute('[data-chart="val/pass_at_1"]', "aria-label")
        assert all(f"run{k} from" in label for k in range(4))
    assert "expected at most 4 runs, got 5" in refused("report", *[runs[0].path] * 5, "-o", tmp_path / "x.html")


def test_view_follows_a_run_and_filters_all_trajectories(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    folder = RunFolder.open(ledger.path)
    with served(ledger.path) as (url, watched), opened(url) as page:
        page.wait_for_selector("text=3 of 3 training steps indexed")
        assert page.inner_text("#found").startswith("48 trajectories;")
        write_step(folder, 4)
        page.wait_for_selector("text=4 of 4 training steps indexed")
        expect(page.locator("#found")).to_have_text(re.compile("^64 trajectories;"))
        assert page.locator("#list [data-trajectory]").first.get_attribute("data-trajectory").startswith("0-4-")
        page.click("#later")
        page.wait_for_selector("text=64 trajectories; 26 to 50 shown")
        page.click("#later")
        page.wait_for_selector("text=64 trajectories; 51 to 64 shown")
        assert page.is_disabled("#later")
        page.select_option("#filter [name=agent]", "verifier")
        page.select_option("#filter [name=gate]", "closed")
        page.fill("#filter [name=training_step]", "2")
        page.click("#filter button")
        batch, made = ledger.read(2).batch, ledger.read(2).assignment
        verifier = batch.agent_names.index("verifier")
        such = {int(batch.trajectory_of_step[s]) for s in range(batch.n_steps)
                if batch.agent_of_step[s] == verifier and not made.credit.gate_open_S[s]}  # fmt: skip
        expect(page.locator("#found")).to_have_text(re.compile(f"^{len(such)} trajectories;"))
        page.locator("#list [data-trajectory]").first.click()
        page.locator("svg.trajectory g[role=button]").first.click()
        page.wait_for_selector("[data-part=why]")
        page.locator("span.token").last.click()
        page.wait_for_selector("text=Why this advantage of token")
        folder.rewind(1)
        page.wait_for_selector("text=1 of 1 training steps indexed")
        assert set(watched.index.taken) == {1}


def test_view_reads_a_replaced_file_after_a_rollback(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    watched = Watched(ledger.path)
    watched.look()
    before = watched.index.page(Filter(training_step=3), 0, 5)["total"]
    folder = RunFolder.open(ledger.path)
    folder.rewind(2)
    write_step(folder, 3, a_batch(7, tasks=2))
    watched.look()
    assert before == 16
    assert watched.index.page(Filter(training_step=3), 0, 5)["total"] == 8
    assert watched.recorded(3).batch.n_trajectories == 8
    ledger.file(3).write_bytes(b"damaged PAR1")
    watched.look()
    assert set(watched.index.taken) == {1, 2}
    folder.rewind(2)
    write_step(folder, 3)
    watched.look()
    assert set(watched.index.taken) == {1, 2, 3}


def test_first_page_waits_for_the_newest_training_step(ledger: Ledger) -> None:
    waiting = threading.Event()

    class ReportedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            return super().wait(timeout)

    watched = Watched(ledger.path)
    watched.index.has_read = ReportedEvent()
    with ThreadPoolExecutor(1) as pool:
        page = pool.submit(TestClient(application(watched, None)).get, "/api/trajectories")
        assert waiting.wait(HANG_S)
        watched.look()
        assert page.result().json()["trajectories"][0]["training_step"] == 3


def test_loopback_host_is_checked_even_with_remote(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []
    monkeypatch.setattr(view, "application", lambda watched, names: hosts.append(names))
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
    for host in ("127.0.0.1", "0.0.0.0"):
        view.serve(ledger.path, host, 0, remote=True, say=lambda text: None)
    assert hosts == [LOOPBACK, None]


def test_tokens_use_the_tokenizer_of_their_policy(tmp_path: Path) -> None:
    for policy, words in (("red", ["a", "b"]), ("blue", ["c", "d"])):
        folder = tmp_path / f"checkpoints/global_step_1/{policy}"
        folder.mkdir(parents=True)
        made = Tokenizer(WordLevel({word: id for id, word in enumerate(words)}, unk_token=words[0]))
        made.save(str(folder / "tokenizer.json"))
    agents = {"x": {"policy": "red"}, "y": {"policy": "blue"}, "z": {"policy": "green"}}
    RunFolder.create(tmp_path, {"config": {"team": {"agents": agents}}}, "")
    spelling = Spelling(Ledger.open(tmp_path))
    assert "".join(spelling.for_policy("red")([1, 0])).split() == ["b", "a"]
    assert "".join(spelling.for_policy("blue")([1, 0])).split() == ["d", "c"]
    assert spelling.for_policy("green") is None


@pytest.mark.slow
def test_trajectory_of_a_thousand_steps_is_drawn(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    trajectories = [a_trajectory(1, 0, n, np.random.default_rng(n), steps=1000) for n in range(2)]
    write_step(folder, 1, TrajectoryBatch.from_trajectories(trajectories))
    with opened(reported(tmp_path / "report.html", folder.path)) as page:
        page.locator("#list [data-trajectory]").first.click()
        assert page.locator("svg.trajectory g[role=button]").count() == 1000
    assert (tmp_path / "report.html").stat().st_size < 8_000_000


def test_view_refuses_other_hosts_and_bad_queries(ledger: Ledger) -> None:
    with served(ledger.path) as (url, _), httpx.Client(base_url=url) as client:
        assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 421
        assert client.get("/").headers["x-frame-options"] == "DENY"
        assert client.get("/api/trajectories", params={"gate": "ajar"}).json() == {
            "detail": "gate: expected open or closed, got 'ajar'"
        }
        assert client.get("/api/trajectories", params={"limit": 10_000}).status_code == 422
        assert client.get("/api/trajectory", params={"trajectory_id": "x", "training_step": 1}).status_code == 404
        assert client.get("/api/trajectory", params={"trajectory_id": "x", "training_step": 99}).status_code == 400
        assert client.get("/api/step", params={"step_id": "x", "training_step": 1}).status_code == 404
        for host, status in (("[", 421), ("[::1]:80", 200), ("localhost.example", 421), ("", 421)):
            assert client.get("/api/trajectories", headers={"Host": host}).status_code == status
        for far in ({"offset": 10**20}, {"training_step": 10**20}, {"training_step": -1}):
            assert client.get("/api/trajectories", params=far).status_code == 422
        for method in ("post", "put", "delete", "patch"):
            assert getattr(client, method)("/api/trajectories").status_code == 405


def test_view_refuses_a_remote_host_and_a_taken_port(ledger: Ledger) -> None:
    message = refused("view", ledger.path, "--host", "0.0.0.0")
    assert message.startswith("--host: 0.0.0.0 can be reached from other machines")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"--port: 127.0.0.1:{port} cannot be had" in refused("view", ledger.path, "--port", port)


def test_pages_of_empty_and_damaged_runs_state_the_reason(tmp_path: Path) -> None:
    empty = RunFolder.create(tmp_path / "empty", {}, "")
    with opened(reported(tmp_path / "empty.html", empty.path)) as page:
        assert page.locator("#tiles .tile").first.inner_text().split()[0] == "0"
        assert page.inner_text("#found") == "no sample trajectories: none is on record yet"
    ledger = a_run(tmp_path / "run")
    whole = ledger.file(2).read_bytes()
    ledger.file(2).write_bytes(whole[: len(whole) // 2])
    ledger.file(3).write_bytes(b"PAR1 nothing")
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        text = page.inner_text("#left-out")
        assert "000002.parquet is left out: it is incomplete, a crash cut it off" in text
        assert "000003.parquet is left out: it is incomplete, a crash cut it off" in text
        assert page.locator("#list [data-trajectory]").count() == 10


def test_agent_names_stay_in_view_of_a_wide_graph(ledger: Ledger, tmp_path: Path) -> None:
    """A name moves with the frame of the graph, and above its row."""
    with opened(reported(tmp_path / "report.html", ledger.path), width=390) as page:
        page.locator("#list [data-trajectory]").first.click()
        frame, name = page.locator(".scroll:has(> svg.trajectory)"), page.locator("svg.trajectory > .lane").first
        before = name.bounding_box()
        frame.evaluate("box => { box.scrollLeft = 60; }")
        expect(name).to_have_attribute("transform", "translate(60,-25)")
        after = name.bounding_box()
        assert before is not None
        assert after is not None
        assert after["x"] == pytest.approx(before["x"], abs=1)
        assert after["y"] < before["y"]


def test_embedded_content_does_not_end_the_script_early() -> None:
    from creditflow.reports.html import page

    made = page({"live": True}, "</title><script>x</script>")
    assert made.count("<script") == made.count("</script>") == 3


@pytest.fixture
def own_rule() -> Iterator[str]:
    """A registered rule without a declared flow, removed after the test."""

    @propagation_rule("halves")
    @dataclass(frozen=True)
    class Halves(ScoreRule):
        def credit(self, inputs: RuleInput) -> Credit:
            own_S = np.nan_to_num(inputs.rewards.sub_reward_S)
            return Credit(own_S, own_S / 2, np.zeros_like(own_S), np.ones(len(own_S), np.uint8))

    yield "halves"
    PROPAGATION_RULES.remove("halves")


def test_report_of_an_unknown_rule_states_missing_parts(tmp_path: Path, own_rule: str) -> None:
    ledger = a_run(tmp_path / "run", propagation=own_rule)
    with opened(reported(tmp_path / "known.html", ledger.path)) as page:
        assert "the rule 'halves' declares no `flow`" in page.inner_text("#left-out")
        page.locator("#list [data-trajectory]").first.click()
        lines = page.locator("svg.trajectory path[data-flow]")
        assert lines.count() == 5
        assert {line.get_attribute("data-flow") for line in lines.all()} == {"unknown"}
        assert {line.get_attribute("stroke-width") for line in lines.all()} == {"1"}
        assert page.locator("svg.trajectory line.gate").count() == 0
    PROPAGATION_RULES.remove(own_rule)
    result = creditflow("report", ledger.path, "-o", tmp_path / "unknown.html")
    assert result.exit_code == 0, result.output
    files = "000001.parquet, 000002.parquet, 000003.parquet"
    said = f"the trajectories in {files} cannot be shown, nor their credit explained: "
    assert f"warning: {said}" in result.stderr
    assert "got 'halves'" in result.stderr
    assert "import the module that registers what it was made with" in result.stderr
    with served(ledger.path) as (live, _):
        for url in ((tmp_path / "unknown.html").as_uri(), live):
            with opened(url) as page:
                page.wait_for_selector(f"#left-out >> text={said}")
    with opened((tmp_path / "unknown.html").as_uri()) as page:
        assert page.inner_text("#found") == ("no sample trajectories can be shown: the notices at the top say why")
        assert page.locator("#of-agents tbody tr").count() == 3  # sums need no rule


def test_report_of_a_rule_without_gates_shows_none(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run", propagation="own")
    recorded = ledger.read(3)
    for id in recorded.batch.trajectory_ids:
        edges = view.trajectory_graph(recorded, id)["edges"]
        assert {(edge["flow"], edge["open"]) for edge in edges} == {(0.0, 1.0)}
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        assert "threshold" not in page.inner_text("#of-agents")
        assert "gates" not in page.inner_text("#of-agents")
        assert page.locator('[data-chart="pass_rate"], [data-chart="threshold"]').count() == 0
        assert page.locator("#filter [name=gate]").is_hidden()
        page.locator("#list [data-trajectory]").first.click()
        titles = page.locator("svg.trajectory g title").all_text_contents()
        assert len(titles) == 6
        assert not any("gate" in title for title in titles)
        assert "gate" not in page.inner_text("#trajectory .hint")
