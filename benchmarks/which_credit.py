"""Which credit should I use? Teams under rules of credit: `python -m benchmarks.which_credit [STUDY] [--minutes M]`.

A study (`benchmarks.studies`) has cases (a team and its scores), arms (options of credit) and seeds. `small` trains
models of 0.3 M parameters, 48 steps of 8 tasks and 8 rollouts, from a warm start of each seed's own; `sums` and `logic`
train SmolLM2-135M, `qwen` LoRA adapters of Qwen2.5-Coder-0.5B. Every arm has its own learning rate for each group of
cases: the best by the mean of the group's tuning cases on separate seeds and separate tasks. The grid grows by factors
of two until the best rate is inside it. In `qwen` all arms have one rate, without tuning.

A block is one seed: all its cases and arms, one run after another in one process, from the same initial weights. Every
finished run is one line of `docs/results/which_credit/STUDY/seedN.jsonl` and is not run again; an interrupted block
goes on with its next run. A line has the hash of the initial weights, the hash and the commit of the measured code, the
processor and the versions; only runs that agree in them are compared.

The score of a run is the mean pass@1 of its last three evaluations. Differences are paired by seed, with Student's t
intervals. `--table` builds tables and result file from the committed lines alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.record import RESULTS, ROOT, Figure, exit_with, fill_page, processor, quick_parser, show, write
from benchmarks.runs import Job, in_parallel
from benchmarks.sources import TRAINING, hashes
from benchmarks.studies import ARMS, GRPO, MEAN, OWN, STUDIES, Study
from creditflow._utils.files import write_whole
from creditflow._utils.intervals import LEAST_SEEDS, Difference, paired_difference
from creditflow.config import load_recipe, trained_policies
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.results import METRICS

MEASURES = (
    *TRAINING,
    "src/creditflow/data",
    "src/creditflow/engines/common",
    "src/creditflow/engines/models",
    "src/creditflow/plugins/gym/tasks.py",
    "src/creditflow/plugins/model_rewards",
    "benchmarks/cases.py",
    *(
        f"src/creditflow/recipes/{name}.{end}"
        for name in ("arithmetic_chain", "tool_chain", "sums_team", "logic_team")
        for end in ("py", "yaml")
    ),
)
PACKAGES = ("creditflow", "torch", "transformers", "numpy", "numba")
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "which_credit.md", "python -m benchmarks.which_credit"
README, HEADLINE = ROOT / "README.md", f"{COMMAND}, the default"
KEPT, WORK = RESULTS / "which_credit", ROOT / "runs" / "which_credit"
SCORE, EVALUATIONS = METRICS[0], 3
"""A run's score is the mean pass@1 of this number of last evaluations."""

# ---- runs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One training run: a line of its block's file."""

    case: str
    arm: str
    rate: str
    seed: int
    recipe: str
    settings: tuple[str, ...]
    """All overrides but the folder."""

    @property
    def key(self) -> tuple[str, str, str]:
        """The place of the run in its block."""
        return self.case, self.arm, self.rate

    @property
    def settings_hash(self) -> str:
        return _digest(self.recipe, self.settings)

    @property
    def config_hash(self) -> str:
        """The hash of all options, defaults and those of presets included."""
        return _digest(load_recipe(self.recipe, [*self.settings, "trainer.default_local_dir=run"]).to_dict())

    def train(self, facts: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        """Train in `folder`, and return the run's line."""
        from creditflow._utils.progress import Reporter
        from creditflow.engines.local.trainer import train

        recipe = load_recipe(self.recipe, [*self.settings, f"trainer.default_local_dir={folder}"])
        weights, began, processor_s = initial_weights(recipe), time.monotonic(), time.process_time()
        train(recipe, Reporter())
        rows = read_metrics(folder)
        trained = [row for row in rows if "train/pass_at_1" in row]
        tested = [row for row in rows if "val/pass_at_1" in row][-EVALUATIONS:]
        return {
            **dict(zip(("case", "arm", "rate"), self.key, strict=True)),
            "seed": self.seed,
            **{name: [round(row[f"val/{name}"], 5) for row in tested] for name in METRICS},
            "train_pass_at_1": [round(trained[0]["train/pass_at_1"], 5), _mean(trained, "train/pass_at_1")],
            "tokens": int(sum(row["rollout/response_tokens"] for row in trained)),
            "processor_s": round(time.process_time() - processor_s),
            "wall_s": round(time.monotonic() - began),
            "settings": self.settings_hash,
            "config": self.config_hash,
            "weights": weights,
            **facts,
        }


def _mean(rows: Sequence[Mapping[str, Any]], metric: str) -> float:
    return round(fmean(row[metric] for row in rows), 5)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def initial_weights(recipe: Any) -> str:
    """The hash of the initial weights of the trained policies."""
    from creditflow.engines.models.folders import model_folder

    digest = hashlib.sha256()
    for policy in trained_policies(recipe.config):
        for file in sorted(model_folder(recipe, policy).glob("*.safetensors")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


@cache
def machine() -> dict[str, Any]:
    """The facts of a line that are the same for all runs of this process.

    The commit is the newest one that changed the measured code, so that commits of results do not change it.
    """
    import torch

    instructions = torch.backends.cpu.get_cpu_capability()
    return {
        "code": code(),
        "commit": _git("log", "-1", "--format=%h", "--", *MEASURES),
        "processor": f"{processor()}, {instructions}",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def code() -> str:
    """The hash of the measured code on disk."""
    return _digest(hashes(MEASURES))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


MACHINE = ("code", "processor", "versions")
COMPARED = ("case", "seed", "weights", *MACHINE)
"""The facts in which comparable runs agree. Equal code has an equal hash under any commit."""


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{name}: {a.get(name)}, {b.get(name)}" for name in names if a.get(name) != b.get(name)]


@dataclass(frozen=True)
class Board:
    """The blocks of a study."""

    name: str
    study: Study
    kept: Path = KEPT
    more: tuple[str, ...] = ()
    """Further overrides of every run."""

    def file(self, seed: int) -> Path:
        """The file of a block."""
        return self.kept / self.name / f"seed{seed}.jsonl"

    def lines(self, seed: int) -> dict[tuple[str, str, str], dict[str, Any]]:
        """The finished runs of a block by case, arm and rate.

        Raises ValueError for a line that is damaged, repeated, or not of a run of this block.
        """
        file, lines = self.file(seed), dict[tuple[str, str, str], dict[str, Any]]()
        for number, text in enumerate(file.read_text().splitlines() if file.exists() else [], 1):
            try:
                line = json.loads(text)
                key = line["case"], line["arm"], line["rate"]
                run = self.run(*key, seed)
            except (ValueError, LookupError) as error:
                raise ValueError(f"{file}:{number}: not a run of {self.name}: {error!r}") from error
            if differing := _differing(line, {"seed": seed, "settings": run.settings_hash}, ("seed", "settings")):
                raise ValueError(f"{file}:{number}: {'; '.join(differing)}; remove the line, or restore its study")
            if key in lines:
                raise ValueError(f"{file}:{number}: another line has this case, arm and rate")
            lines[key] = line
        return lines

    def keep(self, line: Mapping[str, Any]) -> None:
        """Add a line to its block. Raises ValueError if an arm of the same case had other weights."""
        lines = self.lines(line["seed"])
        lines[line["case"], line["arm"], line["rate"]] = dict(line)
        for other in lines.values():
            if other["case"] == line["case"] and other["weights"] != line["weights"]:
                raise ValueError(f"{self.file(line['seed'])}: {other['arm']} and {line['arm']} have other weights")
        file = self.file(line["seed"])
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(lines[key]) + "\n" for key in sorted(lines))
        write_whole(file, lambda part: part.write_text(text))

    def run(self, case: str, arm: str, rate: str, seed: int) -> Run:
        """A run of the study."""
        tuning = self.study.tuning_options if seed in self.study.tuning_seeds else ()
        of_seed = [self.study.by_seed.format(seed=seed)] if self.study.by_seed else []
        of_arm = (*ARMS[arm], f"actor_rollout_ref.actor.optim.lr={rate}")
        of_case = self.study.cases[case]
        settings = (*of_case.options, *of_arm, *of_seed, *tuning, f"data.seed={seed}", *self.more)
        return Run(case, arm, rate, seed, of_case.recipe, settings)

    def missing(self, runs: Sequence[Run]) -> list[Run]:
        """The runs without a line.

        Raises ValueError if a line has other options or code, or if a block has lines of another machine: its further
        runs could not be compared with them.
        """
        missing = []
        for run in runs:
            lines = self.lines(run.seed)
            line = lines.get(run.key)
            if line is None:
                found = [_differing(other, machine(), MACHINE) for other in lines.values()]
                missing.append(run)
            else:
                names = ["code", *(["config"] if "config" in line else [])]
                found = [_differing(line, {"config": run.config_hash, **machine()}, names)]
            if reason := next(filter(None, found), None):
                raise ValueError(
                    f"{self.file(run.seed)}: its runs cannot be compared with a new one of {run.arm} in {run.case}: "
                    f"{'; '.join(reason)}; go back to what made them, remove the file, or leave its seed out"
                )
        return missing

    def do(self, runs: Sequence[Run], until: float) -> bool:
        """Do the missing runs, a block in a process. False if `until`, in `time.monotonic()`, passed before the end."""
        waiting = self.missing(runs)
        print(f"{self.name}: {len(waiting)} of {len(runs)} runs are to be done", flush=True)
        if not waiting:
            return True
        jobs = [
            Job(WORK / f"{self.name}-seed{seed}.log", partial(self._block, block, machine(), until))
            for seed in dict.fromkeys(run.seed for run in waiting)
            for block in [[run for run in waiting if run.seed == seed]]
        ]
        in_parallel(jobs, self.name, WORK)
        return time.monotonic() < until

    def repeat(self, runs: Sequence[Run], until: float) -> None:
        """Do the runs again, beside their lines, and print how many have the same score as before."""
        again = replace(self, kept=WORK / "again")
        again.do(runs, until)
        was, found = ([board.lines(run.seed).get(run.key) for run in runs] for board in (self, again))
        repeated = [(a[SCORE], b[SCORE]) for a, b in zip(was, found, strict=True) if a and b]
        print(f"{sum(a == b for a, b in repeated)} of {len(repeated)} repeated runs have the same pass@1 as before")

    def _block(self, runs: Sequence[Run], facts: Mapping[str, Any], until: float) -> None:
        """Do the runs of a block one after another, and keep each line.

        Raises ValueError if the measured code on disk changed: recipes are read from there by each run.
        """
        for run in runs:
            if time.monotonic() > until:
                return
            print(f"{run.case}, {run.arm}, {run.rate}, seed {run.seed}", flush=True)
            with tempfile.TemporaryDirectory(dir=WORK) as folder:
                line = run.train(facts, Path(folder) / "run")
            if code() != facts["code"]:
                raise ValueError("the measured code changed during a run: train in a worktree that nobody edits")
            self.keep(line)

    # rates

    def means(self, group: str, arm: str) -> dict[str, float]:
        """The score of each finished rate of an arm: its mean over the tuning cases of a group and the seeds."""
        cases = [case for case in self.study.cases_of(arm) if case in self.study.tuning_cases]
        cases = [case for case in cases if self.study.cases[case].group == group]
        blocks = [self.lines(seed) for seed in self.study.tuning_seeds]
        rates = {rate for block in blocks for _, of, rate in block if of == arm}
        found = {rate: [block.get((case, arm, rate)) for case in cases for block in blocks] for rate in rates}
        return {
            rate: fmean(score(line) for line in lines if line) for rate, lines in found.items() if all(lines) and lines
        }

    def tuning_runs(self, arms: Sequence[str]) -> list[Run]:
        """The runs of the rates that are to be tried; none once the best rate of every arm is inside its grid."""
        return [
            self.run(case, arm, rate, seed)
            for seed in self.study.tuning_seeds
            for case in self.study.tuning_cases
            for arm in arms
            if case in self.study.cases_of(arm)
            for group in [self.study.cases[case].group]
            for rate in rates_to_try(self.means(group, arm), self.study.rates[group])
        ]

    def best_rate(self, group: str, arm: str) -> str:
        """The rate of an arm. Raises LookupError if it is not tuned yet."""
        if self.study.rate:
            return self.study.rate
        if self.study.rates_of:
            of = replace(self, name=self.study.rates_of, study=STUDIES[self.study.rates_of])
            (group,) = of.study.rates
            return of.best_rate(group, arm)
        means = self.means(group, arm)
        if rates_to_try(means, self.study.rates[group]):
            raise LookupError(f"{self.name}: the rate of {arm} in {group} is not tuned")
        return _best(means)

    def final_runs(self, arms: Sequence[str], cases: Sequence[str], seeds: Sequence[int]) -> list[Run]:
        """The runs that are compared."""
        return [
            self.run(case, arm, self.best_rate(self.study.cases[case].group, arm), seed)
            for seed in seeds
            for case in cases
            for arm in arms
            if case in self.study.cases_of(arm)
        ]


def score(line: Mapping[str, Any]) -> float:
    """The score of a run."""
    return fmean(line[SCORE])


WIDEST = 8
"""How far rates may be below the lowest, or above the highest, of the first ones, as a factor."""


def rates_to_try(means: Mapping[str, float], first: Sequence[float]) -> list[str]:
    """The first rates without a mean; then the next one beyond the end at which the best one is, within `WIDEST`.

    An arm that only loses by training would be better at each lower rate; one that learns nothing is equal at all.
    """
    if missing := [rate for rate in map(rate_text, first) if rate not in means]:
        return missing
    best, tried = float(_best(means)), [float(rate) for rate in means]
    beyond = {min(tried): best / 2, max(tried): best * 2}
    wide = len(set(means.values())) > 1 and min(first) / WIDEST <= beyond.get(best, 0.0) <= max(first) * WIDEST
    return [rate_text(beyond[best])] if wide else []


def _best(means: Mapping[str, float]) -> str:
    """The rate with the highest mean; of equal ones the smallest."""
    return max(sorted(means, key=float), key=lambda rate: means[rate])


def rate_text(rate: float) -> str:
    """A learning rate as in a recipe."""
    return f"{rate:.1e}"


# ---- tables --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """An arm on the seeds with all cases of it and of the references."""

    arm: str
    rates: Mapping[str, str]
    seeds: int
    means: Mapping[str, Mapping[str, float]]
    """The mean of each metric by case, and of the cases (`MEAN`) if the arm is valid in all cases."""
    above: Mapping[str, Mapping[str, Difference]]
    """The score minus that of each reference, by case and likewise in the mean of the cases."""
    tokens: float
    processor_s: float


def rows(board: Board) -> list[Row]:
    """The arms with results, the best mean first, and last those of some cases only.

    Raises ValueError for runs that are not comparable, and for an arm with several rates in a case.
    """
    blocks = [by_arm(board.lines(seed)) for seed in board.study.seeds]
    found = []
    for arm in ARMS:
        cases = board.study.cases_of(arm)
        complete = [block for block in blocks if all((case, of) in block for case in cases for of in (arm, GRPO, OWN))]
        if not complete or not cases:
            continue
        scores = {of: [[score(block[case, of]) for block in complete] for case in cases] for of in (arm, GRPO, OWN)}
        for case in cases:
            if len(found_rates := {block[case, arm]["rate"] for block in complete}) > 1:
                raise ValueError(f"{board.name}: {arm} in {case} has the rates {sorted(found_rates)}")
            for block in complete:
                for line, of in ((block[case, arm], block[case, of]) for of in (GRPO, OWN)):
                    if differing := _differing(line, of, COMPARED):
                        place = f"{board.file(line['seed'])}: {arm} and {of['arm']} in {case}"
                        raise ValueError(f"{place} are not comparable: {'; '.join(differing)}")
        named = [*cases, MEAN] if len(cases) == len(board.study.cases) else cases
        every = [block[case, arm] for case in cases for block in complete]
        means = {
            metric: [fmean(fmean(block[case, arm][metric]) for block in complete) for case in cases]
            for metric in METRICS
        }
        found.append(
            Row(
                arm,
                {board.study.cases[line["case"]].group: line["rate"] for line in every},
                len(complete),
                {metric: dict(zip(named, [*values, fmean(values)], strict=False)) for metric, values in means.items()},
                {of: _differences(named, scores[arm], scores[of]) for of in (GRPO, OWN)},
                fmean(line["tokens"] for line in every),
                fmean(line["processor_s"] for line in every),
            )
        )
    return sorted(found, key=lambda row: -row.means[SCORE].get(MEAN, -1))


def by_arm(lines: Mapping[tuple[str, str, str], dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """The runs of a block by case and arm. Raises ValueError if an arm has several rates."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for (case, arm, rate), line in lines.items():
        if (case, arm) in found:
            raise ValueError(f"seed {line['seed']}: {arm} in {case} has the rates {found[case, arm]['rate']}, {rate}")
        found[case, arm] = line
    return found


def _differences(
    named: Sequence[str], a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> dict[str, Difference]:
    """The differences of each case, and last of the mean of all cases if `named` has it, paired by seed."""
    means_a, means_b = ([fmean(of_seed) for of_seed in zip(*side, strict=True)] for side in (a, b))
    pairs = zip(named, [*a, means_a], [*b, means_b], strict=False)
    return {case: paired_difference(of_a, of_b) for case, of_a, of_b in pairs}


NO_WORSE = -0.02


def winner(table: Sequence[Row]) -> str | None:
    """The criterion of the default rule; None if an arm that is valid in all cases has too few seeds for an interval.

    The arm with the best mean over all cases among those whose lower bound against `own` is above -2 points in every
    case and whose lower bound against `grpo` is above 0 in the mean; `own` without such a rule.
    """
    whole = [row for row in table if MEAN in row.means[SCORE]]
    if not whole or min(row.seeds for row in whole) < LEAST_SEEDS:
        return None
    passing = [
        row
        for row in whole
        if all(row.above[OWN][case].low > NO_WORSE for case in row.above[OWN] if case != MEAN)
        and row.above[GRPO][MEAN].low > 0
    ]
    return max(passing, key=lambda row: row.above[OWN][MEAN].mean).arm if passing else OWN


def table_lines(table: Sequence[Row]) -> list[str]:
    """Markdown: pass@1 of each arm by case, and the differences to the references in points with 95 % intervals."""
    if not table:
        return ["No seed has all runs yet."]
    cases = list(table[0].means[SCORE])
    made = [_line("arm", "rates", "seeds", *cases), _line(*["---"] * (3 + len(cases)))]
    for row in table:
        cells = [f"{100 * row.means[SCORE][case]:.1f}" if case in row.means[SCORE] else "" for case in cases]
        made.append(_line(row.arm, ", ".join(row.rates.values()), str(row.seeds), *cells))
    for of in (GRPO, OWN):
        made += ["", _line(f"above `{of}`", *cases), _line(*["---"] * (1 + len(cases)))]
        made += [
            _line(row.arm, *(_points(row.above[of][case]) if case in row.above[of] else "" for case in cases))
            for row in table
            if row.arm != of
        ]
    return made


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _points(found: Difference) -> str:
    interval = f" [{100 * found.low:+.1f}, {100 * found.high:+.1f}]" if found.low == found.low else ""
    return f"{100 * found.mean:+.1f}{interval}"


def study_lines(name: str) -> list[str]:
    """The table of a study on the page, from the committed lines."""
    return table_lines(rows(Board(name, STUDIES[name])))


def headline() -> list[str]:
    """The table of the README, from the committed lines of `small`: pass@1 of `grpo` and the default by case."""
    arms = {row.arm: row for row in rows(Board("small", STUDIES["small"]))}
    above = arms[OWN].above[GRPO]
    means = {f"`{of}`": [f"{100 * arms[of].means[SCORE][case]:.1f}" for case in above] for of in (GRPO, OWN)}
    head = {f"pass@1 in %, {arms[OWN].seeds} seeds": above, "---": ["---"] * len(above)}
    lines = {**head, **means, "difference": map(_points, above.values())}
    return [_line(name, *cells) for name, cells in lines.items()]


def report(boards: Sequence[Board]) -> int:
    """Print the tables of all studies and write the result file; 1 if `own` does not beat `grpo`."""
    figures, facts = list[Figure](), dict[str, Any]()
    lines: list[dict[str, Any]] = []
    for board in boards:
        table = rows(board)
        decided = winner([row for row in table if row.arm in board.study.arms])
        default = decided or f"not enough seeds, expected {LEAST_SEEDS} of every arm that is valid in all cases"
        print(board.name, *table_lines(table), f"default by the criterion: {default}", sep="\n", flush=True)
        fill_page(PAGE, f"{COMMAND}, {board.name}", table_lines(table))
        if not table:
            continue
        facts[board.name] = {"rows": [asdict(row) for row in table], "default": decided}
        lines += [line for seed in board.study.seeds for line in board.lines(seed).values()]
        for row in table:
            for case in [MEAN] if MEAN in row.means[SCORE] else row.means[SCORE]:
                for of in (name for name in (GRPO, OWN) if name != row.arm):
                    one, what = row.above[of][case], f"{board.name}: pass@1, {row.arm} - {of}, {case}"
                    spread = None if math.isnan(one.low) else (100 * one.low, 100 * one.high)
                    figures.append(Figure(what, 100 * one.mean, unit="points", spread=spread))
                    if spread and (row.arm, of) == (OWN, GRPO):
                        figures.append(Figure(f"{what}, lower end", 100 * one.low, 0.0, unit="points"))
    if not figures:
        return int(show([]))
    fill_page(README, HEADLINE, headline())
    short = show(figures)
    newest = max(lines, key=lambda line: line["date"])
    made = {name: newest[name] for name in ("date", "versions")}
    made["processor"] = "; ".join(sorted({line["processor"] for line in lines}))
    measured = measured_by({line["code"]: line["commit"] for line in lines})
    write("which_credit", figures, PACKAGES, measured, {**made, "studies": facts})
    return int(short)


def measured_by(commit_of: Mapping[str, str]) -> dict[str, str]:
    """The hashes of the measured code: those of the result file, or the current ones, whichever made lines.

    `commit_of`: the commit of each code with lines. Raises SystemExit if there are several, or neither made a line.
    """
    if len(commit_of) > 1:
        raise SystemExit(f"error: the lines are of several codes, made by the commits {sorted(commit_of.values())}")
    file = RESULTS / "which_credit.json"
    kept: dict[str, str] = json.loads(file.read_text())["measured"] if file.exists() else {}
    for measured in (kept, hashes(MEASURES)):
        if _digest(measured) in commit_of:
            return measured
    raise SystemExit(
        f"error: {file}: the lines are of older code, whose hashes are not there. "
        f"Run git checkout {next(iter(commit_of.values()))} -- src benchmarks, then {COMMAND} --table"
    )


# ---- command -------------------------------------------------------------------------------------------------------


def main() -> int:
    """Do the missing runs of a study and report all results."""
    parser = quick_parser(__doc__, "one training step of two arms: shows that it runs, proves nothing")
    parser.add_argument("study", nargs="?", choices=STUDIES, default="small", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after so many minutes")
    parser.add_argument("--arms", help="names of arms, separated by semicolons; default: those of the study")
    parser.add_argument("--cases", help="names of cases, separated by semicolons; default: all of the study")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: those of the study")
    parser.add_argument("--again", action="store_true", help="repeat the runs of --seeds, to see if they are the same")
    parser.add_argument("--table", action="store_true", help="train nothing: tables and result file from the lines")
    given = parser.parse_args()
    boards = [Board(name, study) for name, study in STUDIES.items()]
    if given.table:
        return report(boards)
    board, study = Board(given.study, STUDIES[given.study]), STUDIES[given.study]
    arms = given.arms.split(";") if given.arms else study.arms
    cases = given.cases.split(";") if given.cases else list(study.cases)
    seeds = given.seeds or study.seeds
    for option, names, known in (("arms", arms, ARMS), ("cases", cases, study.cases), ("seeds", seeds, study.seeds)):
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"--{option}: expected some of {'; '.join(map(str, known))}, got {unknown}")
    if given.again and not given.seeds:
        parser.error("--again: expected --seeds with it, which names the blocks to repeat")
    if given.quick:
        return quick()
    if changed := _git("status", "--porcelain", "--", *MEASURES):
        raise SystemExit(f"error: commit the measured code before a run, so that its lines name it:\n{changed}")
    until, in_time = time.monotonic() + 60 * given.minutes, True
    while in_time and (runs := board.tuning_runs(arms)):
        in_time = board.do(runs, until)
    if in_time:
        final = board.final_runs(arms, cases, seeds)
        board.repeat(final, until) if given.again else board.do(final, until)
    return report(boards)


def quick() -> int:
    """Train one step of two arms in every case of the small study."""
    short = ("trainer.total_training_steps=1", "data.val_max_samples=8", "trainer.test_delay=0")
    with tempfile.TemporaryDirectory() as folder:
        board = Board("small", replace(STUDIES["small"], by_seed=""), Path(folder), short)
        runs = [board.run(case, arm, "1.0e-04", 0) for case in board.study.cases for arm in (GRPO, OWN)]
        board.do(runs, float("inf"))
        lines = board.lines(0).values()
        return int(show([Figure(f"{line['case']}, {line['arm']}", score(line)) for line in lines]))


if __name__ == "__main__":
    exit_with(main)
