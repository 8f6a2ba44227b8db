"""Progress of long commands, with a clock that the tests set."""

import asyncio
import io
import subprocess
import sys

import pytest
from rich.console import Console

from creditflow._utils.progress import Bar, Reporter, duration, phase, spend
from creditflow.rollout import Generation, GenerationRequest, Scheduler
from tests.builders import mostly_slow
from tests.paths import TOY


class Clock:
    """A clock that only moves when a test moves it."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def reporter(clock):
    return Reporter(Console(file=io.StringIO(), width=200), clock)


def lines(reporter):
    return reporter.console.file.getvalue().splitlines()


def test_silence_of_30_seconds_is_ended_by_one_line(reporter, clock):
    shown = []
    with reporter.bar("train", 20, "steps") as bar:
        for second in range(100):
            clock.now = 1000.0 + second
            if second == 40:
                bar.advance(2, "a result")
            reporter.show_overdue()
            shown += [second] * (len(lines(reporter)) - len(shown))

    assert shown == [25, 40, 65, 90]
    assert lines(reporter)[:2] == ["train 0/20 steps", "train 2/20 a result"]
    assert lines(reporter)[2] == "train 2/20 steps, 20 s each, about 6 min left"


def test_fast_work_prints_only_its_results(reporter, clock):
    with reporter.bar("train", 20, "steps") as bar:
        for step in range(20):
            with phase("sampling", 8, "trajectories") as inner:
                inner.advance(8)
            clock.now += 2.0
            bar.advance(status=f"result {step}")
            reporter.show_overdue()

    assert lines(reporter) == [f"train {step + 1}/20 result {step}" for step in range(20)]


def test_line_spells_out_escapes_of_a_terminal(reporter):
    reporter.say("it failed: \x1b[2J\x9b5m\r42 né 七\nnext")
    assert lines(reporter) == [r"it failed: \x1b[2J\x9b5m\r42 né 七", "next"]


def test_line_names_every_open_bar(reporter, clock):
    with reporter.bar("train", 10, "steps") as bar:
        bar.skip(4)
        clock.now += 60.0
        bar.advance()
        with phase("updating", 40_960, "tokens") as inner:
            clock.now += 30.0
            inner.advance(10_240)
            clock.now += 10.0
            reporter.show_overdue()

    # One of six steps took 60 s: 300 s for five others, 40 s of which are over. 10,240 of 40,960 tokens took 30 s: 90 s
    # for the others, 10 s of which are over.
    assert lines(reporter) == [
        "train 5/10 steps, 60 s each, about 4 min left: updating 10,240/40,960 tokens, 341 tokens/s, about 80 s left"
    ]


def test_bar_without_total_shows_its_time(reporter, clock):
    with reporter.bar("loading toy", announce=True):
        clock.now += 30.0
        reporter.show_overdue()

    assert lines(reporter) == ["loading toy ...", "loading toy, 30 s so far"]


def test_pace_counts_tokens_before_a_part_is_finished(clock):
    bar = Bar("sampling", 4, "trajectories", clock=clock)
    assert bar.pace() == ""
    clock.now += 10.0
    bar.spend(300)
    assert bar.pace() == "30 tokens/s"
    bar.advance()
    assert bar.describe() == "sampling 1/4 trajectories, 300 tokens, 30 tokens/s, about 30 s left"


def test_phase_without_an_open_bar_shows_nothing(capsys):
    with phase("sampling", 4, "trajectories") as bar:
        spend(10)
        bar.advance()

    assert capsys.readouterr() == ("", "")


def test_tokens_of_a_generation_reach_the_open_phase(reporter):
    class Model:
        version, max_positions = 0, 100

        def generate(self, requests):
            spend(5 * len(requests))
            return [Generation((1,) * 5, (0.0,) * 5, "stop") for _ in requests]

    async def sample():
        scheduler = Scheduler({"default": Model()})
        await asyncio.gather(*(scheduler.generate("default", GenerationRequest((1,), 5, 1.0, (k,))) for k in range(3)))

    with reporter.bar("check"), phase("sampling", 3, "trajectories") as bar:
        asyncio.run(sample())

    assert bar.amount() == "0/3 trajectories, 15 tokens"


def test_terminal_shows_bars_inside_the_bar(clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    reporter = Reporter(console, clock)

    def shown():
        other = Console(file=io.StringIO(), width=200)
        other.print(reporter.table())
        return other.file.getvalue()

    with reporter.bar("train", 3, "steps") as bar:
        clock.now += 20.0
        bar.advance(1, "pass@1 0.5")
        with phase("updating", 400, "tokens") as inner:
            clock.now += 10.0
            inner.advance(100)
            during = shown()
        after = shown()

    assert "3 steps" in console.file.getvalue()
    assert "1/3 steps" in during
    assert "pass@1 0.5" in during
    assert "100/400 tokens" in during
    assert "10 tokens/s, about 30 s left" in during
    assert "updating" not in after


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h")]
)
def test_duration_has_a_fitting_unit(seconds, text):
    assert duration(seconds) == text


ORDER = """
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            print(f"import of {name}", file=sys.stderr, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
from creditflow.cli import app
app(sys.argv[1:], prog_name="creditflow")
"""


COMMANDS = (
    ("train",),
    ("compare", "--vary", "algorithm.propagation=own,identical"),
    ("eval",),
    ("check",),
    ("serve",),
)


@pytest.mark.parametrize(
    "arguments",
    mostly_slow(COMMANDS, COMMANDS[:2]),
    ids=lambda arguments: arguments[0],
)
def test_first_line_comes_before_heavy_imports(arguments):
    command, *options = arguments
    words = [sys.executable, "-c", ORDER, command, str(TOY), *options]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["loading toy ...", "import of torch"]
