"""`creditflow convert`: turn traces of other systems into trajectories."""

from __future__ import annotations

import json
import math
import shlex
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from creditflow._utils.files import write_named
from creditflow._utils.huggingface import load_tokenizer
from creditflow._utils.progress import Reporter
from creditflow.credit import CreditOptions, assign
from creditflow.credit.analysis.metrics import credit_metrics
from creditflow.data import Message, Score, Trajectory, TrajectoryBatch, read_parquet, write_parquet
from creditflow.errors import BatchError, DataError, InputError
from creditflow.reports.tables import new_table, results_console, show
from creditflow.reports.text import number
from creditflow.rollout.chat import ChatTokenizer
from creditflow.runs import RunFolder
from creditflow.traces import Converted, ConvertOptions, Span, Tokens, convert, read_spans


def convert_files(
    sources: Sequence[Path],
    out: Path,
    options: ConvertOptions,
    ranges: Sequence[str],
    tokenizer: Path | None,
    left_out: Path | None,
    run: Path | None,
    reporter: Reporter,
) -> None:
    """Read, convert and write, and print a summary. `run`: a folder for the trajectories with their credit."""
    if out.suffix != ".parquet":
        raise InputError(f"--out: expected a name that ends with .parquet, got {out}")
    if run is not None and (run / "run.json" if run.is_dir() else run).exists():
        raise InputError(f"--credit: {run} is a {'run' if run.is_dir() else 'file'} already; name another folder")
    tokens = None if tokenizer is None else _Tokenizer.load(tokenizer)
    options = replace(options, ranges=_ranges(ranges), tokens=tokens)
    ours: list[Trajectory] = []
    with reporter.bar("read", len(sources)) as bar:

        def each(files: Sequence[Path]) -> Iterator[Path]:
            for file in files:
                yield file
                bar.advance()

        for source in each([one for one in sources if one.suffix == ".parquet"]):
            ours += _own(source, options)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spans = read_spans(each([one for one in sources if one.suffix != ".parquet"]))
    for one in caught:
        reporter.say(f"warning: {one.message}")
    made = convert(spans, options)
    _expect_what_is_named(spans, made, options)
    if left_out is not None:
        lines = "".join(json.dumps(asdict(one)) + "\n" for one in made.left_out)
        write_named(left_out, lambda path: path.write_text(lines), "--left-out")
    _tell(made)
    _warn(made, reporter)
    if ours:
        results_console().print(f"our own Parquet: {_size(ours)}, as they are", soft_wrap=True)
    made.trajectories += ours
    if not made.trajectories:
        raise DataError(f"{', '.join(map(str, sources))}: nothing to write, no model call has become a step")
    if twice := [name for name, n in Counter(trajectory.id for trajectory in made.trajectories).items() if n > 1]:
        raise DataError(
            f"{', '.join(map(str, sources))}: trajectory {twice[0]} stands in it twice; give each trajectory once"
        )
    batch = TrajectoryBatch.from_trajectories(made.trajectories)
    write_named(out, partial(write_parquet, batch), "--out")
    results_console().print(f"written: {out}", soft_wrap=True)
    if run is not None:
        _credit(batch, run, sources)
        words = [str(run), batch.step_ids[-1]]
        ended = ["--"] if any(word.startswith("-") for word in words) else []
        why = shlex.join(["creditflow", "why", *ended, *words])
        results_console().print(f"written: {run}; see {why}", soft_wrap=True)


def _expect_what_is_named(spans: Sequence[Span], made: Converted, options: ConvertOptions) -> None:
    """Raise InputError if an option names a missing attribute or reward; it would silently have no effect."""
    for option, key in (("--trajectory-by", options.trajectory_by), ("--uid-by", options.uid_by)):
        if key and spans and not any(key in span.attributes or key in span.resource for span in spans):
            raise InputError(f"{option}: no span has an attribute {key!r}")
    if not made.trajectories:
        return
    found = {
        reward
        for trajectory in made.trajectories
        for reward in (trajectory.info.get("outcome"), *trajectory.info.get("rewards", ()))
    }
    found |= {reward for trajectory in made.trajectories for step in trajectory.steps for reward in step.scores}
    there = ", ".join(sorted(map(str, found - {None}))) or "none"
    named = [("--outcome", options.outcome)] if options.outcome else []
    for option, name in (*named, *(("--range", name) for name in options.ranges)):
        if name not in found:
            raise InputError(f"{option}: no reward is called {name!r}; there is {there}")


def _own(source: Path, options: ConvertOptions) -> list[Trajectory]:
    """Read trajectories written by `serve` or `convert`, unchanged."""
    if options != ConvertOptions():
        raise InputError(f"{source}: trajectories come as they are; the options are for traces, convert those apart")
    try:
        return read_parquet(source).to_trajectories()
    except BatchError as error:
        raise DataError(str(error)) from error  # the message names the file
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror or error}") from error


def _credit(batch: TrajectoryBatch, run: Path, sources: Sequence[Path]) -> None:
    """Write the trajectories as a run of one training step, with credit under the default options."""
    facts = {"engine": "none", "converted_from": [str(source.resolve()) for source in sources], "config": {}}
    assignment = assign(batch, CreditOptions())
    folder = RunFolder.create(run, facts, "{}\n")
    folder.write_steps(1, batch, assignment)
    folder.append_metrics(1, credit_metrics(assignment))


def _ranges(texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for name, range_ in map(_range, texts):
        if name in found:
            raise InputError(f"--range: {name} is given twice")
        found[name] = range_
    return found


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition(":")
    try:
        return name, (float(low), float(high))
    except ValueError as error:
        raise InputError(f"--range: expected NAME=LOW:HIGH, such as right=-1:1, got {text!r}") from error


class _Tokenizer(Tokens):
    """A Hugging Face tokenizer, with its chat template if it has one."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat

    @classmethod
    def load(cls, folder: Path) -> _Tokenizer:
        if not folder.is_dir():
            raise InputError(f"--tokenizer: {folder} is no folder")
        return cls(ChatTokenizer(load_tokenizer(folder, "--tokenizer")))

    def prompt(self, messages: Sequence[Message]) -> Sequence[int]:
        return self._chat.encode(messages)[1]

    def response(self, text: str, *, ended: bool) -> Sequence[int]:
        tokenizer = self._chat.tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return [*ids, tokenizer.eos_token_id] if ended and tokenizer.eos_token_id is not None else ids


def _tell(made: Converted) -> None:
    console = results_console()
    if not made.spans:
        return
    steps = [step for trajectory in made.trajectories for step in trajectory.steps]
    console.print(f"{_counted(made.spans, 'span')}: {_size(made.trajectories)}", soft_wrap=True)
    if steps:
        table = new_table("agent", "steps", "parents by text", "with tokens")
        for agent, n in Counter(step.agent for step in steps).most_common():
            own = [step for step in steps if step.agent == agent]
            by_text = sum(step.info.get("parents_by") == "text" for step in own)
            table.add_row(agent, str(n), str(by_text), str(sum(bool(step.response_ids) for step in own)))
        show(console, "steps", table)
    scores: dict[str, list[Score]] = defaultdict(list)
    kept: dict[str, list[Any]] = defaultdict(list)
    """Further rewards of whole trajectories."""
    for step in steps:
        for name, score in step.scores.items():
            scores[name].append(score)
    for trajectory in made.trajectories:
        if trajectory.outcome is not None:
            scores[f"{trajectory.info.get('outcome', '')} (outcome)".strip()].append(trajectory.outcome)
        for name, value in trajectory.info.get("rewards", {}).items():
            kept[f"{name} (in info)"].append(value)
    if scores or kept:
        table = new_table("reward", "given", "mean", "failed")
        for name, given in scores.items():
            ok = [float(score.value) for score in given if score.status == "ok" and isinstance(score.value, float)]
            table.add_row(name, str(len(given)), number(mean(ok)) if ok else "", str(len(given) - len(ok)))
        for name, values in kept.items():
            numbers = [value for value in values if isinstance(value, float) and math.isfinite(value)]
            table.add_row(
                name, str(len(values)), number(mean(numbers)) if numbers else "", str(len(values) - len(numbers))
            )
        show(console, "rewards", table)
        for name, why in {name: s.reason for name, given in scores.items() for s in given if s.status != "ok"}.items():
            console.print(f"{name}: {why}", soft_wrap=True)
    _count("left out", Counter(f"{one.what}: {_kind(one.reason)}" for one in made.left_out))
    _count("mended", made.mended)
    _count("passed over", made.passed_over)


def _warn(made: Converted, reporter: Reporter) -> None:
    if not made.trajectories or any(trajectory.outcome is not None for trajectory in made.trajectories):
        return
    given = {name for trajectory in made.trajectories for step in trajectory.steps for name in step.scores}
    which = (
        f"name one of the rewards with --outcome ({', '.join(sorted(given)[:8])})" if given else "there is no reward"
    )
    reporter.say(f"warning: no trajectory has an outcome, so credit is of the steps' own rewards alone; {which}")


def _size(trajectories: Sequence[Trajectory]) -> str:
    steps, tasks = (
        sum(len(trajectory.steps) for trajectory in trajectories),
        len({trajectory.uid for trajectory in trajectories}),
    )
    recorded = _counted(len(trajectories), "trajectory", "trajectories")
    return f"{recorded} of {_counted(tasks, 'task')}, {_counted(steps, 'step')}"


def _counted(n: int, what: str, several: str = "") -> str:
    return f"{n} {what if n == 1 else several or what + 's'}"


def _kind(reason: str) -> str:
    """`reason` without the ids in it."""
    return "the same call as another span" if reason.startswith("the same call as span") else reason


_MOST_ROWS = 20


def _count(title: str, counts: Mapping[str, int]) -> None:
    if counts:
        table = new_table(title, "spans")
        rows = sorted(counts.items(), key=lambda pair: -pair[1])
        for what, n in rows[:_MOST_ROWS]:
            table.add_row(what, str(n))
        if rest := rows[_MOST_ROWS:]:
            table.add_row(f"{len(rest)} others", str(sum(n for _, n in rest)))
        show(results_console(), title, table)
