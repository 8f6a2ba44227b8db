"""Fidelity of each rule's credit: `python -m benchmarks.fidelity [--quick] [--table]`.

In every case of `benchmarks.credit_rules`, `arithmetic_chain` trains for four steps of 512 rollouts, and `creditflow
audit --decisions` measures single decisions of the last step: continuations with the decision kept, and with it sampled
anew, by other seeds than those of training. The fidelity of a rule is the rank correlation of its advantages with these
values. Two cases at a time, about ten minutes on two cores. Writes to `runs/fidelity/` and reuses finished runs there.
No targets: it is a measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.credit_rules import CASES, REALISTIC, RULES
from benchmarks.record import MISSED, RESULTS, ROOT, Figure, exit_with, fill_page, write
from benchmarks.sources import TRAINING, Work
from benchmarks.study import plain_name
from creditflow.credit.presets import PRESETS

MEASURES = (
    *TRAINING,
    "src/creditflow/studies/decisions.py",
    "src/creditflow/recipes/arithmetic_chain.py",
    "src/creditflow/recipes/arithmetic_chain.yaml",
    "benchmarks/cases.py",
    "benchmarks/credit_rules.py",
)
PAGE, COMMAND = ROOT / "docs" / "benchmarks" / "credit_rules.md", "python -m benchmarks.fidelity"
STEPS, TASKS, DECISIONS, CONTINUATIONS = 4, 64, 400, 8


def words_of(options: Sequence[str]) -> str:
    """The rule's options as the command line takes them: the propagation rule, then KEY=VALUE."""
    values = dict(option.removeprefix("algorithm.").split("=", 1) for option in options)
    if preset := values.pop("preset", None):
        plain = {key.removeprefix("algorithm."): value for key, value in PRESETS[preset].options.items()}
        values = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in plain.items()}
    rule = values.pop("propagation")
    return " ".join([rule, *(f"{key}={value}" for key, value in values.items())])


def measured(case: str, folder: Path, steps: int, tasks: int, decisions: int, continuations: int) -> dict[str, Any]:
    """The audit of a case's run, trained first if it does not exist."""
    path = folder / plain_name(case)
    command = [sys.executable, "-m", "creditflow"]
    if not (path / "evaluation.json").exists():
        options = [
            *CASES[case],
            f"trainer.total_training_steps={steps}",
            f"trainer.save_freq={steps - 1}",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "data.val_max_samples=16",
            f"data.train_batch_size={tasks}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={tasks // 2}",
            "actor_rollout_ref.actor.optim.lr=2.0e-4",
            f"trainer.default_local_dir={path}",
            "algorithm.propagation=none",
        ]
        subprocess.run([*command, "train", "arithmetic_chain", *options], cwd=ROOT, check=True)
    out = path / "fidelity.json"
    if not out.exists():
        rules = [word for options in RULES.values() for word in ("--rule", words_of(options))]
        how = ["--decisions", str(decisions), "--continuations", str(continuations), "--top", "0", "--json", str(out)]
        subprocess.run([*command, "audit", str(path), *how, *rules], cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def table_lines(results: Mapping[str, Any]) -> list[str]:
    """The table of the page: fidelity of advantages in percent, with half of its 95 % interval."""
    lines = [f"| rule | {' | '.join(CASES)} |", f"|{' --- |' * (len(CASES) + 1)}"]
    for rule in RULES:
        if not all(rule in results[case]["rules"] for case in CASES):
            continue  # added after the last measurement
        cells = [results[case]["rules"][rule] for case in CASES]
        lines.append(f"| {rule} | {' | '.join(_cell(one) for one in cells)} |")
    ceilings = [_cell(results[case]["ceiling"]) for case in CASES]
    return [*lines, f"| *noise ceiling* | {' | '.join(ceilings)} |"]


def _cell(one: Mapping[str, float | None]) -> str:
    value, low, high = one["value"], one["low"], one["high"]
    if value is None or low is None or high is None:
        return "none"
    return f"{100 * value:.0f} ± {50 * (high - low):.0f}"


def main() -> int:
    """Measure the missing cases; write the result file and the page's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small steps of one case: shows that it runs")
    parser.add_argument("--table", action="store_true", help="write the page's table from the committed result file")
    given = parser.parse_args()
    if given.table:
        fill_page(PAGE, COMMAND, table_lines(json.loads((RESULTS / "fidelity.json").read_text())["results"]))
        return 0
    work = Work.begin("fidelity", MEASURES, quick=given.quick)
    if given.quick:
        measured("executor alone", work.folder, 2, 4, 8, 2)
        print(f"{MISSED}: 0 of 0")
        return 0
    began = time.monotonic()
    one = partial(
        measured, folder=work.folder, steps=STEPS, tasks=TASKS, decisions=DECISIONS, continuations=CONTINUATIONS
    )
    with ThreadPoolExecutor(2) as two_at_a_time:
        audits = dict(zip(CASES, two_at_a_time.map(one, CASES), strict=True))
    details = {case: _details(found) for case, found in audits.items()}
    figures = [
        Figure(
            f"{rule}: fidelity of advantages, mean over the cases but exact",
            sum(details[case]["rules"][rule]["value"] or 0.0 for case in REALISTIC) / len(REALISTIC),
        )
        for rule in RULES
    ]
    for line in table_lines(details):
        print(line)
    facts = {"seconds": time.monotonic() - began, "results": details}  # less if audits were kept from an earlier call
    write("fidelity", figures, ("creditflow", "torch", "numpy"), work.measured, facts)
    fill_page(PAGE, COMMAND, table_lines(details))
    print(f"{MISSED}: 0 of 0")
    return 0


def _details(found: Mapping[str, Any]) -> dict[str, Any]:
    """The kept numbers of one audit. The first rule is the one in force."""
    rules = dict(zip(RULES, found["rules"][1:], strict=True))
    return {
        "rules": {name: one["advantage"]["correlation"] for name, one in rules.items()},
        "ceiling": found["rules"][0]["advantage"]["ceiling"],
        "reliability": found["reliability"],
        "decisions": found["rules"][0]["advantage"]["decisions"],
        "tokens": found["tokens"],
        "continuations": found["continuations"],
        "refused": found["refused"],
    }


if __name__ == "__main__":
    exit_with(main)
