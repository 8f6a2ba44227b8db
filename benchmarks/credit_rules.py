"""Small teams under rules of credit: `python -m benchmarks.credit_rules [--team TEAM] [--minutes M] [--quick]`.

`arithmetic_chain`, 48 training steps of 8 tasks and 8 rollouts for every rule, in seven cases (`CASES`: properties of
the sub-rewards). Each rule has the best of four learning rates by the mean of the six cases that count, with a
separate seed and separate tasks; then every rule trains on the same seeds in every case.

The teams `13 turns` and `30 turns` train `arithmetic_chain` and `arithmetic_chain_long` with every agent scored, on
larger batches. Targets: the best rule with sub-rewards ends at least 5 points of pass@1 above `identical`, with an
interval above 0, and saves at least 25 % of its step errors.

Finished runs are found again in `runs/credit_rules/`; results are kept by seed in `docs/results/credit_rules/`, from
which a fresh clone builds the tables (`--table`). Writes `docs/results/credit_rules*.json`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.bootstrap import PassCounts, paired_difference
from benchmarks.record import RESULTS, ROOT, Figure, exit_with, fill_page, processor, quick_parser, show, write
from benchmarks.runs import Run, finish
from benchmarks.sources import TRAINING, Work
from creditflow._utils.files import write_whole
from creditflow.config.loading import find_recipe
from creditflow.data import Floats
from creditflow.runs.run_folder import read_metrics
from creditflow.studies.comparison.results import METRICS
from creditflow.studies.intervals import Difference

MEASURES = (
    *TRAINING,
    "benchmarks/cases.py",
    "src/creditflow/recipes/arithmetic_chain_long.yaml",
    *(
        f"src/creditflow/recipes/{name}{end}"
        for name in ("arithmetic_chain", "tool_chain", "tic_tac_toe")
        for end in (".py", ".yaml")
    ),
)
RECIPE = find_recipe("arithmetic_chain")
KEPT, RUNS = RESULTS / "credit_rules", ROOT / "runs" / "credit_rules"
SEEDS, TUNING_SEED = 5, 100
CONFIRMATION = range(5, 15)
"""Seeds on which the best rule of the first ones is compared with own + outcome again."""
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "credit_rules.md", "python -m benchmarks.credit_rules"
STEPS, TASKS = 48, 512
_QUIET = ("trainer.test_freq=-1", "reward.backend=inline", "reward.cache_size=0", "guard.enable=false")
ALWAYS = (
    *_QUIET,
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    f"trainer.total_training_steps={STEPS}",
    f"data.val_max_samples={TASKS}",
)


def rewards(weights: Sequence[float] = (1, 1, 1), wrong: str = "null", digits: str = "digits_right") -> str:
    """The recipe's reward functions from `benchmarks.cases`; `digits`: the function that scores the executor."""
    args = f", args: {{wrong: {wrong}}}"
    entries = ["{fn: 'arithmetic_chain.py:answer_right'}"]
    for name, weight in zip(("plan_right", digits, "verdict_right"), weights, strict=True):
        more = "" if name == "digits_of_reference" else args
        entries.append(f"{{fn: 'benchmarks/cases.py:{name}'{more}, weight: {weight}}}")
    return f"reward.functions=[{', '.join(entries)}]"


_AGENTS = "planner: {system: plan}, executor: {system: exec}, verifier: {system: check}"
CASES: Mapping[str, tuple[str, ...]] = {
    "exact": (rewards(),),
    "executor alone": (rewards((0, 1, 0)),),
    "outcome only": (rewards((0, 0, 0)),),
    "noisy, 20 %": (rewards(wrong="noisy20"),),
    "noisy, 35 %": (rewards(wrong="noisy35"),),
    "inheriting": (rewards((0, 1, 0), digits="digits_of_reference"),),
    "saboteur": (
        rewards((0, 1, 0)),
        "team.workflow='benchmarks/cases.py:solve_sabotaged'",
        f"team.agents={{{_AGENTS}, saboteur: {{system: exec, policy: frozen}}}}",
        "policies={default: {}, frozen: {trainable: false}}",
    ),
}
"""In order: every step is scored exactly; planner and verifier are unscored; no step is scored; 20 % of the verdicts on
all agents are inverted; 35 %; the executor is scored by the story's own chain at that place; planner and verifier are
unscored, and an untrained agent replaces one result in ten."""
OTHER_TEAMS = ("saboteur",)
REALISTIC = tuple(name for name in CASES if name != "exact")
BASELINE, MEAN, OWN = "identical", "identical, mean sub-reward", "own + outcome"


@dataclass(frozen=True)
class Team:
    """A team of the leaderboard. A rule has one learning rate for all its cases."""

    kept: Path
    recipe: Path = RECIPE
    options: tuple[str, ...] = ALWAYS
    """The options of every run."""
    cases: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: CASES)
    rates: Sequence[str] = ("1.0e-4", "2.0e-4", "2.8e-4", "4.0e-4")
    tuning_cases: Sequence[str] = REALISTIC
    tuning_options: tuple[str, ...] = ("recipe.val_split=tune",)
    """Evaluate other tasks than those that are reported."""
    rates_kept: Path | None = None
    """The folder of `rates.json`; default: `kept`."""
    seeds: range = range(SEEDS)
    rules: Sequence[str] = ()
    """The rules that are trained; default: `TRAINED`."""


SECOND = "second start"
"""The same team from another warm-started model, at the rates of the first."""
EXACT = f"{SECOND}, exact"
"""The title of its table of exact scores, which has rules without results in the other cases."""


def _by_turns(name: str, recipe: str, seeds: int, tasks: int, *options: str) -> Team:
    """A team with every agent scored, on tasks that no other comparison uses."""
    unseen = ("recipe.val_split=claims", f"recipe.val_tasks={tasks}")
    return Team(
        KEPT / plain_name(name),
        find_recipe(recipe),
        (*_QUIET, *options, *unseen),
        {name: ()},
        ("1.5e-4", "3.0e-4", "6.0e-4"),
        (name,),
        ("recipe.val_split=tune", "recipe.val_tasks=256"),
        seeds=range(seeds),
        rules=(BASELINE, MEAN, OWN, "discounted", "threshold", "posterior"),
    )


def plain_name(name: str) -> str:
    """`name` without characters that are unusual in a folder's name."""
    return "".join(c if c.isalnum() or c == "." else "_" for c in name).replace("__", "_").strip("_")


TEAMS: Mapping[str, Team] = {
    "arithmetic_chain": Team(KEPT),
    SECOND: Team(KEPT / "second_start", rates_kept=KEPT),
    "tool_chain": Team(
        KEPT / "tool_chain",
        find_recipe("tool_chain"),
        _QUIET,
        {"tool_chain": ()},
        ("3.0e-4", "6.0e-4", "1.2e-3"),
        ("tool_chain",),
    ),
    "tic_tac_toe": Team(
        KEPT / "tic_tac_toe",
        find_recipe("tic_tac_toe"),
        _QUIET,
        {"tic_tac_toe": ()},
        ("7.5e-4", "1.5e-3", "3.0e-3"),
        ("tic_tac_toe",),
        (),
    ),
    "13 turns": _by_turns("13 turns", "arithmetic_chain", 10, 2000, "trainer.total_training_steps=20"),
    "30 turns": _by_turns(
        "30 turns",
        "arithmetic_chain_long",
        5,
        1000,
        "trainer.total_training_steps=16",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ),
}


def _options(*options: str) -> tuple[str, ...]:
    return tuple(f"algorithm.{option}" for option in options)


_OWN = _options("propagation=own")
_BY_TASK = _options("group_by=task_agent")

MAPPO = "mappo"
"""The rule that trains a critic, with the learning rate of the recipe `arithmetic_estimators`."""
RULES: Mapping[str, tuple[str, ...]] = {
    BASELINE: _options("propagation=identical"),
    MEAN: _options("propagation={rule: identical, shared_reward: outcome_plus_mean_sub_reward}"),
    OWN: _OWN,
    "own + outcome, by task": (*_OWN, *_BY_TASK),
    "threshold": _options("propagation=threshold"),
    "threshold, freeze": _options("propagation=threshold", "on_closed_gate=freeze"),
    "discounted": _options("propagation=discounted"),
    "posterior": _options("propagation=posterior"),
    "calibrated": (*_BY_TASK, *_options("propagation={rule: calibrated, w_m: 0}")),
    "calibrated + harm": (*_BY_TASK, *_options("propagation=calibrated")),
    "harm": (*_BY_TASK, *_options("propagation={rule: calibrated, score_weight: fixed, w_r: 0, w_o: 0.3}")),
    **{
        name: _options(f"preset={name}") for name in ("magrpo", "at_grpo", "dr_mas", "gigpo", "gagpo", "irc", "mt_grpo")
    },
    MAPPO: (*_options("preset=mappo"), "critic.optim.lr=1.0e-3", "critic.cliprange_value=10"),
}
"""The rules, as options of credit."""
TRAINED = (
    BASELINE,
    OWN,
    "own + outcome, by task",
    "threshold",
    "threshold, freeze",
    "posterior",
    "calibrated",
    "calibrated + harm",
    "harm",
    "at_grpo",
)
"""The two baselines, both forms of the threshold, and the others with the most signal on each of the two models."""


@dataclass(frozen=True)
class Board:
    """The runs of the leaderboard and their results."""

    folder: Path
    team: Team
    rules: Sequence[str]
    seeds: Sequence[int]
    short: tuple[str, ...] = ()

    def run(self, rule: str, case: str, seed: int, rate: str, *more: str, under: str = "runs") -> Run:
        """One training run."""
        name = "/".join(plain_name(part) for part in (case, rule))
        options = (
            *self.team.options,
            *self.team.cases[case],
            *RULES[rule],
            f"actor_rollout_ref.actor.optim.lr={rate}",
            *more,
            *self.short,
        )
        folder = self.folder / under / rate / name / f"seed{seed}"
        return Run(self.team.recipe, options, folder, seed)

    def tuning(self, rule: str, case: str, rate: str) -> Run:
        """A tuning run, on tasks that are never reported."""
        return self.run(rule, case, TUNING_SEED, rate, *self.team.tuning_options, under="tuning")

    def tune(self, until: float | None) -> dict[str, dict[str, float]]:
        """Mean pass@1 in tuning by rule and rate, for the rules whose best rate is known. Each result is kept.

        The lowest rate is tried only for rules whose best other rate is the second lowest.
        """
        lowest, *others = self.team.rates
        self._tune(self.rules, others or [lowest], until)
        if others:
            means = self.means()
            low = [
                rule for rule in self.rules if set(others) <= set(of := means[rule]) and best(of) in (lowest, others[0])
            ]
            self._tune(low, [lowest], until)
        means = self.means()
        return {
            rule: of
            for rule, of in means.items()
            if of and set(others) <= set(of) and (not others or lowest in of or best(of) != others[0])
        }

    def _tune(self, rules: Sequence[str], rates: Sequence[str], until: float | None) -> None:
        runs = {
            self.tuning(rule, case, rate): (rule, rate, case)
            for rule in rules
            for rate in rates
            for case in self.team.tuning_cases
            if case not in self.tuned().get(rule, {}).get(rate, {})
        }

        def keep(run: Run) -> None:
            rule, rate, case = runs[run]
            found = self.tuned()
            found.setdefault(rule, {}).setdefault(rate, {})[case] = run.result().after.metrics["pass_at_1"]
            _write(self._rates_file, found)

        self._keep_finished(runs, "rates", until, keep)

    def means(self) -> dict[str, dict[str, float]]:
        """The mean over the tuning cases of each rule and rate that has all of them."""
        return {
            rule: {
                rate: fmean(by_case[case] for case in self.team.tuning_cases)
                for rate, by_case in self.tuned().get(rule, {}).items()
                if set(self.team.tuning_cases) <= set(by_case)
            }
            for rule in self.rules
        }

    def tuned(self) -> dict[str, dict[str, dict[str, float]]]:
        """pass@1 in tuning by rule, rate and case."""
        found: dict[str, dict[str, dict[str, float]]] = _read(self._rates_file)
        return found

    @property
    def _rates_file(self) -> Path:
        return (self.team.rates_kept or self.team.kept) / "rates.json"

    def _keep_finished(
        self, runs: Mapping[Run, object], title: str, until: float | None, keep: Callable[[Run], None]
    ) -> None:
        """Do the runs, and keep the result of each one, also of those that an earlier call finished."""
        for run in runs:
            if run.finished:
                keep(run)
        finish(list(runs), title, until, keep)

    def train(self, rates: Mapping[str, str], until: float | None, cases: Sequence[str]) -> None:
        """Train every rule in the given cases, seed by seed, and keep each result as soon as it exists."""
        runs = {
            self.run(rule, case, seed, rates[rule]): (seed, case, rule)
            for seed in self.seeds
            for case in cases
            for rule in rates
            if rule not in self.results(seed).get(case, {})
        }

        def keep(run: Run) -> None:
            seed, case, rule = runs[run]
            found = self.results(seed)
            numbers = {**kept_numbers(run), **course(run), "processor": processor()}
            found.setdefault(case, {})[rule] = {"rate": rates[rule], **numbers}
            _write(self._file(seed), found)

        self._keep_finished(runs, "training", until, keep)

    def results(self, seed: int) -> dict[str, dict[str, Any]]:
        """The results of a seed, by case and rule."""
        found: dict[str, dict[str, Any]] = _read(self._file(seed))
        return found

    def _file(self, seed: int) -> Path:
        return self.team.kept / f"seed{seed}.json"


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _write(path: Path, found: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: part.write_text(json.dumps(found, indent=1) + "\n"))


def kept_numbers(run: Run) -> dict[str, Any]:
    """The kept result of a run: its rates, and its passed tasks, four to a hexadecimal digit."""
    after = run.result().after
    passed = "".join(str(int(value)) for value in after.sampled)
    kept = {name: round(after.metrics.get(name, math.nan), 6) for name in METRICS}
    return {**kept, "tasks": len(passed), "passed": f"{int(passed, 2):x}"}


def _passed(kept: Mapping[str, Any]) -> Floats:
    """[V] 1 for each passed task."""
    return np.array(list(f"{int(kept['passed'], 16):0{kept['tasks']}b}"), dtype=np.float64)


def difference(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], cases: int = 1) -> Difference:
    """`a` - `b`, seed by seed; for several cases in sequence, the difference of their means."""
    parts = [np.array([_passed(one) for one in runs]) for runs in (a, b)]
    parts = [part_RV.reshape(cases, -1, part_RV.shape[1]).sum(axis=0) for part_RV in parts]
    return paired_difference(*(PassCounts(part_RV, np.full_like(part_RV, cases)) for part_RV in parts))


def course(run: Run) -> dict[str, float]:
    """The mean pass@1 over the training steps, and the response tokens that the run generated."""
    rows = read_metrics(run.folder)
    tokens = sum(row["rollout/response_tokens"] for row in rows)
    return {"train_pass_at_1": round(fmean(row["train/pass_at_1"] for row in rows), 6), "tokens": int(tokens)}


def best(by_rate: Mapping[str, float]) -> str:
    """The rate with the highest pass@1; of equal ones the smallest."""
    return max(sorted(by_rate, key=float), key=lambda rate: by_rate[rate])


@dataclass(frozen=True)
class Row:
    """The results of one rule over the seeds that have all cases that count."""

    rule: str
    rate: str
    seeds: int
    by_case: Mapping[str, float]
    """Mean pass@1."""
    above: Mapping[str, Difference]
    """pass@1 minus that of own + outcome."""
    mean: float
    """pass@1 as the mean of the cases that count."""
    mean_above: Difference
    train: float
    """Mean pass@1 of the training rollouts, over all training steps: the area under the curve."""
    tokens: float
    """Response tokens of a run."""


def rows(board: Board) -> list[Row]:
    """The rules by their mean over the cases that count, best first. Rules and seeds without all of these are left out.

    Every rule is compared with own + outcome in the same seeds, on the same kind of processor.
    """
    made, counted = [], board.team.tuning_cases
    for rule in board.rules:
        every = [board.results(seed) for seed in board.seeds]
        of = [one for one in every if all(comparable(one.get(case, {}), rule) for case in counted)]
        if not of:
            continue
        cases = [case for case in board.team.cases if all(comparable(one.get(case, {}), rule) for one in of)]
        ours, own = ([one[case][name] for case in counted for one in of] for name in (rule, OWN))
        made.append(
            Row(
                rule,
                ours[0]["rate"],
                len(of),
                {case: fmean(one[case][rule]["pass_at_1"] for one in of) for case in cases},
                {case: difference([one[case][rule] for one in of], [one[case][OWN] for one in of]) for case in cases},
                fmean(one["pass_at_1"] for one in ours),
                difference(ours, own, len(counted)),
                fmean(one["train_pass_at_1"] for one in ours),
                fmean(one["tokens"] for one in ours),
            )
        )
    return sorted(made, key=lambda row: -row.mean)


def comparable(results: Mapping[str, Mapping[str, Any]], rule: str) -> bool:
    """Whether a rule and own + outcome have results of one case from the same kind of processor.

    The warm-up depends on the last bits of its arithmetic, so another kind makes another warm-started model.
    """
    return {rule, OWN} <= set(results) and results[rule]["processor"] == results[OWN]["processor"]


REALISTIC_MEAN = "mean of six"


def lines(table: Sequence[Row], team: Team) -> list[str]:
    """The table of the page, in percent and points."""
    if not table:
        return ["No runs so far."]
    several = len(team.cases) > 1
    cases = [case for case in team.cases if any(case in row.by_case for row in table)]
    heads = [
        "rule",
        "rate",
        "seeds",
        *cases,
        *[REALISTIC_MEAN] * several,
        "- own + outcome",
        "in training",
        "tokens",
    ]
    made = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for row in table:
        cells = [f"{100 * row.by_case[case]:.1f}" if case in row.by_case else "" for case in cases]
        cells += [f"{100 * row.mean:.1f}"] * several
        one = row.mean_above
        cells.append("" if row.rule == OWN else f"{100 * one.mean:+.1f} [{100 * one.low:+.1f}, {100 * one.high:+.1f}]")
        cells += [f"{100 * row.train:.1f}", f"{row.tokens / 1000:.0f} k"]
        made.append(f"| {' | '.join([row.rule, row.rate, str(row.seeds), *cells])} |")
    return made


def boards() -> dict[str, Board]:
    """The boards of the page by title."""
    main = TEAMS["arithmetic_chain"]
    exact_alone = replace(TEAMS[SECOND], cases={"exact": CASES["exact"]}, tuning_cases=("exact",))
    return {
        "selection": Board(RUNS, main, tuple(RULES), range(SEEDS)),
        "confirmation": Board(RUNS, main, tuple(RULES), CONFIRMATION),
        **{name: Board(RUNS, team, tuple(RULES), team.seeds) for name, team in TEAMS.items() if team is not main},
        EXACT: Board(RUNS, exact_alone, tuple(RULES), range(SEEDS)),
    }


WITH_TARGETS = ("13 turns", "30 turns")
FILES: Mapping[str, tuple[str, ...]] = {
    "credit_rules": ("selection", "confirmation"),
    "credit_rules_second_start": (SECOND, EXACT),
    "credit_rules_teams": ("tool_chain", "tic_tac_toe"),
    "credit_rules_turns": WITH_TARGETS,
}
"""The result files, each with the boards in it: the check of a page's numbers is sharper with small files."""


def gains(title: str, board: Board, table: Sequence[Row]) -> list[Figure]:
    """pass@1 of the best rule with sub-rewards above `identical`, and the share of step errors that it saves."""
    rule = next(row.rule for row in table if row.rule not in (BASELINE, MEAN))
    seeds = [found for seed in board.seeds if {rule, BASELINE} <= set(found := board.results(seed).get(title, {}))]
    ours, shared = ([found[name] for found in seeds] for name in (rule, BASELINE))
    gain = difference(ours, shared)
    errors, shared_errors = (fmean(run["step_error_rate"] for run in runs) for runs in (ours, shared))
    what = f"{title}: pass@1, {rule} - {BASELINE}"
    return [
        Figure(f"{what}, mean and 95 % interval", gain.mean, 0.05, spread=(gain.low, gain.high)),
        Figure(f"{what}, lower end", gain.low, 0.0),
        Figure(f"{title}: share of the step errors of {BASELINE} that {rule} saves", 1 - errors / shared_errors, 0.25),
    ]


def report(measured: Mapping[str, str] | None) -> bool:
    """Print the tables of all kept results, and write result files and page; True if a figure falls short.

    `measured`: the hashes of the sources; None keeps them, date and processor as they are.
    """
    every, short = boards(), False
    tables = {title: rows(board) for title, board in every.items()}
    for file, titles in FILES.items():
        figures, facts = list[Figure](), dict[str, Any](inverted={"noisy, 20 %": 0.20, "noisy, 35 %": 0.35})
        was = {} if measured is not None else _read(RESULTS / f"{file}.json")
        for title in titles:
            board, table = every[title], tables[title]
            shown = lines(table, board.team)
            print(title, *shown, sep="\n", flush=True)
            fill_page(PAGE, f"{COMMAND}, {title}", shown)
            for row in table:
                if row.rule != OWN:
                    spread = (100 * row.mean_above.low, 100 * row.mean_above.high)
                    what = f"{title}, {row.seeds} seeds: pass@1, {row.rule} - own + outcome"
                    figures.append(Figure(what, 100 * row.mean_above.mean, unit="points", spread=spread))
            if title in WITH_TARGETS and table:
                figures += gains(title, board, table)
            facts[title] = {"tuning": board.means(), "rows": [asdict(row) for row in table]}
        if figures:
            short |= show(figures)
            details = {key: was[key] for key in ("date", "processor", "versions") if key in was} | {"tables": facts}
            write(file, figures, ("creditflow", "torch", "transformers"), measured or was["measured"], details)
    return short


def main() -> int:
    """Do the missing runs and report all results."""
    parser = quick_parser(__doc__, "one training step: shows that it runs, proves nothing")
    parser.add_argument("--minutes", type=float, help="begin no run after so many minutes")
    parser.add_argument("--rules", help="names of rules, separated by semicolons; default: those of the team")
    parser.add_argument("--team", choices=TEAMS, default="arithmetic_chain", help="default: %(default)s")
    parser.add_argument("--cases", help="names of cases, separated by semicolons; default: all of the team")
    parser.add_argument("--seeds", help="first and last seed; default: those of the team")
    parser.add_argument("--table", action="store_true", help="train nothing: build page and result files again")
    given = parser.parse_args()
    until = None if given.minutes is None else time.monotonic() + 60 * given.minutes
    team, short = TEAMS[given.team], tuple[str, ...]()
    rules = (team.rules or TRAINED) if given.rules is None else tuple(given.rules.split(";"))
    first, last = (team.seeds[0], team.seeds[-1]) if given.seeds is None else map(int, given.seeds.split("-"))
    cases = tuple(team.cases) if given.cases is None else tuple(given.cases.split(";"))
    for option, names, known in (("rules", rules, RULES), ("cases", cases, team.cases)):
        if unknown := sorted(set(names) - set(known)):
            parser.error(f"--{option}: expected some of {'; '.join(known)}, got {'; '.join(unknown)}")
    if given.table:
        return int(report(None))
    work = Work.begin("credit_rules", MEASURES, quick=given.quick)
    if given.quick:
        rules, first, last = (BASELINE, OWN), 0, 0
        team = replace(team, kept=work.folder / "results", rates=team.rates[:1], rates_kept=None)
        short = ("trainer.total_training_steps=1", "data.val_max_samples=8")
    board = Board(work.folder, team, rules, range(first, last + 1), short)
    tuned = board.tune(until)
    rates = {rule: best(tuned[rule]) for rule in board.rules if rule in tuned}
    print("rates:", {rule: {rate: round(100 * value, 1) for rate, value in tuned[rule].items()} for rule in rates})
    board.train(rates, until, cases)
    if given.quick:
        return int(show([Figure(row.rule, row.mean) for row in rows(board)]))
    return int(report(work.measured))


if __name__ == "__main__":
    exit_with(main)
