"""The report and the live view in a browser: they show the ledger's values and execute no text."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi.testclient import TestClient
from playwright.sync_api import Page, expect
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
from creditflow.reports.plugin_tables import PluginTable
from creditflow.reports.view import Watched, application
from creditflow.runs import Ledger, RunFolder
from tests.builders import mostly_slow, unregister
from tests.cli.commands import creditflow, refused
from tests.reports.browser import opened
from tests.reports.runs import HOSTILE, a_batch, a_run, a_trajectory, write_step
from tests.rewards.processes import HANG_S


def reported(out: Path, *runs: Path | str) -> str:
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
        for name in ("val/pass_at_1", "actor/entropy", "propagation/pass_rate", "credit", "advantages"):
            label = page.get_attribute(f'[data-chart="{name}"]', "aria-label")
            assert label is not None
            assert " from " in label
            assert page.locator(f'[data-chart="{name}"] svg path').count() > 3
        assert re.search(r"; planner \d+ lowered, \d+ raised;", label)  # of the advantages
        assert "from 0.100 to 0.300" in page.get_attribute('[data-chart="val/pass_at_1"]', "aria-label")
        captions = page.locator("figcaption").all_inner_texts()
        assert {"pass@1 in validation", "entropy nats/token", "mean credit in reward"} <= {
            text.strip() for text in captions
        }
        assert page.locator('figcaption[title^="val/pass_at_1: mean over"]').count() == 1
        assert page.inner_text("#change") == "Validation, training step 1 → 3: pass@1 10.0 % → 30.0 %."
        assert "entropy" in page.inner_text("#notes")
        assert page.locator("#of-agents tbody tr").count() == 3
        with_filter(page)
        before = page.locator("#list [data-trajectory]").count()
        page.select_option("#filter [name=outcome]", "right")
        page.click("#filter button")
        rows = page.locator("#list button").all_inner_texts()
        assert 0 < len(rows) < before
        assert all(" right\n" in row for row in rows)


def with_filter(page: Page) -> None:
    """Unfold the filter."""
    page.locator("#filter").evaluate("form => { form.parentElement.open = true; }")


def test_head_names_what_was_trained(tmp_path: Path) -> None:
    optim = {"lr": 6e-4, "lr_scheduler_type": "cosine"}
    config = {
        "algorithm": {"propagation": "threshold", "adv_estimator": "grpo", "group_by": "agent"},
        "actor_rollout_ref": {"model": {"path": "smollm2"}, "actor": {"optim": optim}},
        "data": {"train_files": "tasks.py:make", "val_files": None},
        "policies": {
            "judge": {"model": {"path": None}, "endpoint": {"model": "remote"}, "optim": {}},
            "small": {"model": {"path": None}, "endpoint": None, "optim": {"lr": 1e-5}},
        },
    }
    facts = {
        "recipe": "chain", "engine": "local", "seed": 1234, "python": "3.11.7", "versions": {"torch": "2.13.0"},
        "tasks": {"data.train_files": "4096 tasks"}, "parameters": 339072, "config": config,
    }  # fmt: skip
    folder = RunFolder.create(tmp_path / "run", facts, "")
    write_step(folder, 1, group_by="task")
    with opened(reported(tmp_path / "report.html", folder.path)) as page:
        rows = dict(row.split("\n") for row in page.locator("#facts div").all_inner_texts())
        assert page.get_attribute("#facts div:has-text('learning rate')", "title") == "actor_rollout_ref.actor.optim"
    assert rows.pop("rule").startswith("threshold (w_r: 1.0, ")
    assert rows == {
        "advantage": "grpo, grouped by task",  # as the step file records, which a recredit changes
        "model": "remote, smollm2, 339,072 parameters",
        "learning rate": "0.0006, small 1e-05, cosine",
        "training data": "tasks.py:make, 4096 tasks",
        "recorded": "training steps 1, trajectories 16, steps 96",
        "run": "chain, engine local, seed 1234",
        "versions": "torch 2.13.0, Python 3.11.7",
    }


def test_agents_have_one_colour_everywhere(ledger: Ledger, tmp_path: Path) -> None:
    """In the table, the graph, the transcript and the lines of the charts."""
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        names = page.locator(".agent")
        pairs = set(
            zip(names.all_inner_texts(), names.evaluate_all("all => all.map((one) => one.style.cssText)"), strict=True)
        )
        assert len(pairs) == len({agent for agent, _ in pairs}) == len({colour for _, colour in pairs}) == 3
        colours = {agent: style.split(": ")[1].rstrip(";") for agent, style in pairs}
        for step in page.locator("#steps > li").all():
            agent = step.locator(".agent").inner_text()
            assert colours[agent] in step.get_attribute("style")
            node = page.locator(f'g[data-node="{step.get_attribute("data-step")}"] circle.step')
            assert node.get_attribute("stroke") == colours[agent]
        drawn = page.locator('[data-chart="credit"] svg').evaluate("svg => svg.outerHTML")
        assert all(colour in drawn for colour in colours.values())


def test_constant_curves_are_folded_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = PluginTable("Mail", [("step", "n")], [["7"]], "mail", curves={"sent": "mail/never finite"})
    monkeypatch.setattr("creditflow.reports.overview.plugin_tables", lambda rows: [asdict(table)])
    folder = RunFolder.create(tmp_path / "run", {}, "")
    for training_step in (1, 2, 3):
        folder.append_metrics(
            training_step, {"val/pass_at_1": 1.0, "solver/actor/entropy": training_step, "memory/peak_gib": 2}
        )
    folder.append_events([{"step": 1, "rule": f"rule{k}"} for k in range(60)])
    with opened(reported(tmp_path / "report.html", folder.path)) as page:
        assert page.locator("#charts [data-chart]").get_attribute("data-chart") == "solver/actor/entropy"
        assert "Guard events: the newest 50" in page.inner_text("#notes")
        assert page.inner_text("#more-tables td") == "7"
        page.click("#constant summary")
        assert page.locator("#constant li").all_inner_texts() == ["pass@1 in validation: 100 %"]
        assert page.inner_text("#change") == "Validation, training step 1 → 3: pass@1 100.0 %."
        page.fill("#metric", "memory/peak_gib")
        page.keyboard.press("Enter")
        page.wait_for_selector('#chosen [data-chart="memory/peak_gib"] svg')


def test_last_turns_share_a_column(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("index", "overview"):
        monkeypatch.setattr(f"creditflow.reports.{module}.TURNS", 3)
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        heads = page.locator("#heat th").all_inner_texts()
    assert heads == ["agent", "turn 0", "turn 1", "turn 2 and later"]


def test_cells_without_steps_differ_from_zero(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        page.select_option("#heat-of", "error_rate")
        planner, verifier = (
            page.locator("#heat tr", has_text=agent).locator("td") for agent in ("planner", "verifier")
        )
        assert planner.nth(1).inner_text() == "-"  # no score
        assert "empty" in planner.nth(1).get_attribute("class")
        assert verifier.nth(1).inner_text().endswith(" %")
        page.select_option("#heat-of", "credit")
        assert planner.nth(1).get_attribute("title") == "48 steps"
        assert planner.nth(2).get_attribute("title") == "no steps"


def test_transcript_shows_texts_and_numbers_of_each_step(ledger: Ledger, tmp_path: Path) -> None:
    """Without a click: a trajectory is open, with all of its texts."""
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        trajectory = page.locator("#list [aria-current]").get_attribute("data-trajectory")
        recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
        batch, made = recorded.batch, recorded.assignment
        steps = page.locator("#steps > li").all()
        assert len(steps) == 6
        for index, step in enumerate(steps):
            s = batch.step_ids.index(f"{trajectory}/{index}")
            assert step.locator('[data-part="prompt"]').inner_text() == batch.prompts[s]
            assert step.locator('[data-part="response"]').inner_text() == batch.responses[s]
            said, advantage = step.locator(".numbers").inner_text(), made.advantage.advantage_S[s]
            scored = made.rewards.scored_S[s]
            assert (f"score {made.rewards.sub_reward_S[s]:.2f}" if scored else "no score") in said
            assert f"{'open' if made.credit.gate_open_S[s] else 'closed'} gate" in said
            assert f"credit {made.credit.total_S[s]:+.3f}".replace("+0.000", "0.000") in said
            assert f"advantage {advantage:+.3f} {'raised' if advantage > 0 else 'lowered'}" in said
            for colour in (
                page.locator(f'g[data-node="{trajectory}/{index}"] circle.step').get_attribute("fill"),
                step.locator(".value").get_attribute("style"),
            ):
                red, _, blue = map(int, re.findall(r"\d+", colour))
                assert (blue > red) == (advantage > 0)  # whatever the sign of its credit
        assert not re.search("prais|blam|reward(ed|s)", page.inner_text("main"))


def test_step_unfolds_its_terms_and_tokens(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        step = page.locator("#steps > li").nth(3)
        recorded = ledger.read(ledger.training_step_of(step.get_attribute("data-step")))
        s = recorded.batch.step_ids.index(step.get_attribute("data-step"))
        step.locator("summary").click()
        said = explain(recorded.assignment, s)
        expect(step.locator('[data-part="why"]')).to_have_text(re.compile(f"= {re.escape(repr(said.advantage))}$"))
        n_tokens = recorded.batch.token_offsets[s + 1] - recorded.batch.token_offsets[s]
        assert step.locator("span.token").count() == n_tokens


def test_link_to_a_step_scrolls_to_it_and_marks_it(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        step = page.locator("#steps > li").last
        step.locator("a").click()
        expect(step).to_have_attribute("aria-current", "true")
        expect(step).to_be_in_viewport()
        page.locator("g[data-node]").first.click()
        expect(page.locator("#steps > li[aria-current], g[aria-current]")).to_have_count(2)
        expect(page.locator("#steps > li").first).to_be_in_viewport()


def test_graph_shows_gates_and_flow_and_accepts_keys(ledger: Ledger, tmp_path: Path) -> None:
    with opened(reported(tmp_path / "report.html", ledger.path)) as page:
        wrong = page.locator("#list [data-trajectory]:has-text('wrong')").first
        trajectory = wrong.get_attribute("data-trajectory")
        wrong.focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(f"text=Trajectory {trajectory}")
        recorded = ledger.read(ledger.training_step_of(trajectory, "trajectory_id"))
        made = recorded.assignment
        first = recorded.batch.step_ids.index(f"{trajectory}/0")
        shut = sum(not made.credit.gate_open_S[s] for s in range(first + 1, first + 6))
        assert page.locator("svg.trajectory line.gate").count() == shut > 0
        flows = [float(p.get_attribute("data-flow")) for p in page.locator("svg.trajectory path[data-flow]").all()]
        assert sum(flows) == pytest.approx(made.credit.received_S[first : first + 6].sum())
        page.locator("svg.trajectory g[role=button]").first.focus()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(page.locator(f'[data-step="{trajectory}/1"]')).to_have_attribute("aria-current", "true")


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
                shown = page.locator('[data-step="0-1-0-0/0"] [data-part="response"]').inner_text()
                assert shown.startswith("</script><script>")
                assert f"({1_000_000 + len(HOSTILE):,} characters)" in shown
                assert len(shown) < 30_000
                assert HOSTILE.split(">")[0] in page.inner_text("#facts")
                assert "task 0: </script>" in page.inner_text("#list")
                assert page.locator("img").count() == 0
                assert page.title() == title == "creditflow: run"


def test_report_compares_up_to_four_runs(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / f"run{k}", gamma=gamma) for k, gamma in enumerate((0.9, 0.99, 0.5, 0.3))]
    with opened(reported(tmp_path / "report.html", *(run.path for run in runs))) as page:
        text = page.inner_text("#compared")
        assert "algorithm.gamma\t0.9\t0.99\t0.5\t0.3" in text
        assert "pass@1 in validation\t30 %\t30 %\t30 %\t30 %" in text
        label = page.get_attribute('[data-chart="val/pass_at_1"]', "aria-label")
        assert all(f"run{k} from" in label for k in range(4))
    assert "expected at most 4 runs, got 5" in refused("report", *[runs[0].path] * 5, "-o", tmp_path / "x.html")


def test_view_follows_a_run_and_filters_all_trajectories(tmp_path: Path) -> None:
    ledger = a_run(tmp_path / "run")
    folder = RunFolder.open(ledger.path)
    with served(ledger.path) as (url, watched), opened(url) as page:
        page.wait_for_selector("text=3 of 3 training steps indexed")
        assert page.inner_text("#found").startswith("48 trajectories;")
        page.fill("#metric", "actor/entropy")
        page.keyboard.press("Enter")
        page.click("#found-out summary")
        focused = page.locator("#list button").nth(3)
        focused.focus()
        before = focused.inner_text()
        write_step(folder, 4)
        page.wait_for_selector("text=4 of 4 training steps indexed")
        expect(page.locator("#found")).to_have_text(re.compile("^64 trajectories;"))
        assert page.locator("#list [data-trajectory]").first.get_attribute("data-trajectory").startswith("0-4-")
        expect(page.locator("#found-out details")).to_have_attribute("open", "")
        expect(page.locator("#list button:focus")).to_have_text(before, use_inner_text=True)
        chosen = page.locator('#chosen [data-chart="actor/entropy"]')
        expect(chosen).to_have_attribute("aria-label", re.compile(r"from 1\.000 to 0\.250$"))
        page.click("#later")
        page.wait_for_selector("text=64 trajectories; 26 to 50 shown")
        page.click("#later")
        page.wait_for_selector("text=64 trajectories; 51 to 64 shown")
        assert page.is_disabled("#later")
        with_filter(page)
        page.select_option("#filter [name=agent]", "verifier")
        page.select_option("#filter [name=gate]", "closed")
        page.fill("#filter [name=training_step]", "2")
        page.click("#filter button")
        batch, made = ledger.read(2).batch, ledger.read(2).assignment
        verifier = batch.agent_names.index("verifier")
        such = {int(batch.trajectory_of_step[s]) for s in range(batch.n_steps)
                if batch.agent_of_step[s] == verifier and not made.credit.gate_open_S[s]}  # fmt: skip
        expect(page.locator("#found")).to_have_text(re.compile(f"^{len(such)} trajectories;"))
        row = page.locator("#list [data-trajectory]").first
        row.click()
        page.wait_for_selector(
            f"#told:has-text('trajectory {row.get_attribute('data-trajectory')} is shown')", state="attached"
        )
        page.locator("#steps summary").first.click()
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


CHECKPOINT = "checkpoints/global_step_1"
FROZEN = {"trainable": False, "model": {"path": "smollm2"}}
VERL = f"{CHECKPOINT}/actor/huggingface"
PARTNER = f"{CHECKPOINT}/policies/actor/actor/huggingface"


@pytest.mark.parametrize(
    ("policies", "folders"),
    [
        ({"red": {}, "blue": {}, "green": {}}, {"red": f"{CHECKPOINT}/red", "blue": f"{CHECKPOINT}/blue"}),
        ({"red": {}, "green": FROZEN}, {"red": CHECKPOINT}),
        ({"red": {}}, {"red": "tokenizer"}),
        ({"red": {}, "actor": {}, "green": {}}, {"red": VERL, "actor": PARTNER}),
        ({"green": {}, "actor": {}}, {"actor": PARTNER}),
    ],
    ids=["local", "frozen", "alone", "verl", "partner"],
)
def test_tokens_use_the_tokenizer_of_their_policy(tmp_path: Path, policies: Any, folders: dict[str, str]) -> None:
    for policy, folder in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        made = Tokenizer(WordLevel({policy: 0, "a": 1}, unk_token="a"))
        made.save(str(tmp_path / folder / "tokenizer.json"))
    RunFolder.create(tmp_path, {"config": {"policies": policies}}, "")
    spelling = Spelling(Ledger.open(tmp_path))
    for policy in folders:
        assert "".join(spelling.for_policy(policy)([0, 1])).split() == [policy, "a"]
    assert spelling.for_policy("green") is None or "green" not in policies


@pytest.mark.slow
def test_trajectory_of_a_thousand_steps_is_drawn(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", {}, "")
    trajectories = [a_trajectory(1, 0, n, np.random.default_rng(n), steps=1000) for n in range(2)]
    write_step(folder, 1, TrajectoryBatch.from_trajectories(trajectories))
    with opened(reported(tmp_path / "report.html", folder.path)) as page:
        assert page.locator("svg.trajectory g[role=button]").count() == 1000
        assert page.locator("#steps > li").count() == 1000
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
        assert f"--port: 127.0.0.1:{port} is taken or reserved" in refused("view", ledger.path, "--port", port)


def test_pages_of_empty_and_damaged_runs_state_the_reason(tmp_path: Path) -> None:
    empty = RunFolder.create(tmp_path / "empty", {}, "")
    with opened(reported(tmp_path / "empty.html", empty.path)) as page:
        assert "training steps 0, trajectories 0, steps 0" in page.inner_text("#facts")
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
    with opened(reported(tmp_path / "none.html", a_run(tmp_path / "whole").path, "--samples", "0")) as page:
        assert page.inner_text("#found") == "no sample trajectories: the report was written with --samples 0"


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
    unregister(PROPAGATION_RULES, "halves")


def test_report_of_an_unknown_rule_states_missing_parts(tmp_path: Path, own_rule: str) -> None:
    ledger = a_run(tmp_path / "run", propagation=own_rule)
    with opened(reported(tmp_path / "known.html", ledger.path)) as page:
        assert "flow" not in page.inner_text("#left-out")
        assert page.get_by_text("Lines show no credit: the rule declares no flow.").count() > 0
        lines = page.locator("svg.trajectory path[data-flow]")
        assert lines.count() == 5
        assert {line.get_attribute("data-flow") for line in lines.all()} == {"unknown"}
        assert {line.get_attribute("stroke-width") for line in lines.all()} == {"1"}
        assert page.locator("svg.trajectory line.gate").count() == 0
    unregister(PROPAGATION_RULES, own_rule)
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
        titles = page.locator("svg.trajectory g title").all_text_contents()
        assert len(titles) == 6
        assert not any("gate" in title for title in titles)
        assert "gate" not in page.inner_text("#trajectory")
