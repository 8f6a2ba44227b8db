"""A trained model's card for the Hugging Face hub: metadata and text, made of the run's record.

Names and texts of a run are hostile input: in the text they are code on one line, in the metadata YAML strings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from creditflow.monitoring import Evaluation
from creditflow.reports.text import counted, number, plain
from creditflow.studies.comparison.bootstrap import COVERAGE, PassCounts, paired_difference

_TEXT = 200
"""Maximum characters of a name or value in the card."""
_PROMPT = 600
"""Maximum characters of a system prompt."""


@dataclass(frozen=True, slots=True)
class PublishedPolicy:
    """One policy in the published folder."""

    name: str
    subfolder: str
    """Empty if its files are in the folder itself."""
    adapter: bool
    """Whether it is an adapter of the base model rather than a model."""
    base: str | None
    """The name of its base model on the hub; None if unknown."""
    licence: str | None
    """The licence of the base model, as the hub names it; None if unknown."""


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of the published checkpoint on the validation tasks."""

    key: str
    name: str
    value: float
    low: float
    high: float
    """Bounds of a bootstrap interval over tasks; NaN without one."""
    before: float
    """The same before training; NaN if it was not measured."""


def results_of(evaluation: Evaluation | None, metrics: Mapping[str, Any], before: Mapping[str, Any]) -> list[Result]:
    """The results of a checkpoint.

    `evaluation`: the evaluation of this checkpoint, for intervals; None: the values in `metrics`, the line of its
    training step. `before`: the line before training.
    """
    intervals = {} if evaluation is None else _intervals(evaluation)
    values = dict(metrics) if evaluation is None else {f"val/{key}": one for key, one in evaluation.metrics.items()}
    results = []
    for key, name in _METRICS.items():
        value = _known(values.get(f"val/{key}"))
        if math.isfinite(value):
            low, high = intervals.get(key, (math.nan, math.nan))
            results.append(Result(key, name, value, low, high, _known(before.get(f"val/{key}"))))
    return results


_METRICS = {
    "pass_at_1": "pass@1",
    "pass_at_1_greedy": "pass@1, greedy",
    "step_error_rate": "step error rate",
    "step_error_rate_greedy": "step error rate, greedy",
}


def _known(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _intervals(evaluation: Evaluation) -> dict[str, tuple[float, float]]:
    """Bootstrap intervals over tasks, by metric."""
    ones = np.ones((1, len(evaluation.sampled)))
    errors = np.array(evaluation.step_errors, dtype=np.float64).reshape(-1, 2)
    counts = {
        "pass_at_1": PassCounts(np.array([evaluation.sampled], dtype=np.float64), ones),
        "pass_at_1_greedy": PassCounts(np.array([evaluation.greedy], dtype=np.float64), ones),
        "step_error_rate": PassCounts(errors[None, :, 0], errors[None, :, 1]),
    }
    found = {}
    for key, one in counts.items():
        if one.part_RV.size:
            rate = paired_difference(one, PassCounts(np.zeros_like(one.part_RV), one.whole_RV))
            found[key] = (rate.low, rate.high)
    return found


def model_card(
    run: Mapping[str, Any], step: int, policies: Sequence[PublishedPolicy], results: Sequence[Result], n_tasks: int
) -> str:
    """The card as Markdown with metadata.

    `run`: `run.json`. `step`: the training step of the checkpoint. `n_tasks`: the number of validation tasks.
    """
    from huggingface_hub import EvalResult, ModelCardData

    config = _mapping(run.get("config"))
    recipe = _text(run.get("recipe"))
    rule = _text(_mapping(config.get("algorithm")).get("propagation"))
    bases = sorted({one.base for one in policies if one.base is not None})
    licences = {one.licence for one in policies}
    licence = next(iter(licences)) if len(licences) == 1 else None
    data = ModelCardData(
        license=licence,
        library_name="peft" if any(one.adapter for one in policies) else "transformers",
        pipeline_tag="text-generation",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        tags=["creditflow", "reinforcement-learning", "multi-agent", "credit-assignment"],
        model_name=recipe,
        eval_results=[
            EvalResult(
                task_type="text-generation",
                task_name="team rollouts",
                dataset_type="validation",
                dataset_name=f"validation tasks of {recipe}",
                metric_type=one.key,
                metric_name=one.name + _interval(one, " (95 % interval {} to {})"),
                metric_value=round(one.value, 6),
            )
            for one in results
        ]
        or None,
        creditflow={
            "version": _text(_mapping(run.get("versions")).get("creditflow")),
            "recipe": recipe,
            "engine": _text(run.get("engine")),
            "seed": run.get("seed") if isinstance(run.get("seed"), int) else None,
            "training_steps": step,
            "credit": {"propagation": rule, **{key: _text(value) for key, value in _credit(config)}},
            "data": _files(config),
        },
    )
    body = "\n\n".join(_sections(run, config, step, policies, results, n_tasks, licence))
    return f"---\n{data.to_yaml()}\n---\n\n{body}\n"


def _sections(
    run: Mapping[str, Any],
    config: Mapping[str, Any],
    step: int,
    policies: Sequence[PublishedPolicy],
    results: Sequence[Result],
    n_tasks: int,
    licence: str | None,
) -> list[str]:
    recipe, algorithm = _code(run.get("recipe")), _mapping(config.get("algorithm"))
    agents = _mapping(_mapping(config.get("team")).get("agents"))
    versions = ", ".join(f"{_code(name)} {_code(one)}" for name, one in _mapping(run.get("versions")).items())
    sections = [
        f"# {recipe}",
        f"A team of {counted(len(agents), 'agent')}, trained with reinforcement learning by "
        f"[creditflow](https://pypi.org/project/creditflow/), which decides for every step of every agent how much of "
        f"the reward it earned. This is the checkpoint of training step {step}.",
        "## Agents",
        _table(
            ("agent", "policy", "system prompt"),
            [
                (
                    _code(name),
                    _code(_mapping(one).get("policy", "default")),
                    _code(_mapping(one).get("system"), _PROMPT),
                )
                for name, one in agents.items()
            ],
        ),
        "An agent's prompts are messages of its system prompt and of what the recipe's workflow writes, in the "
        "tokenizer's chat template.",
        "## Use",
        "\n\n".join(map(_usage, policies)),
        "## Training",
        _table(
            ("", ""),
            [
                ("recipe", recipe),
                ("data", ", ".join(map(_code, _files(config)))),
                ("engine", _code(run.get("engine"))),
                ("credit rule", _code(algorithm.get("propagation"))),
                *((_code(key), _code(value)) for key, value in (*_credit(config), *_options(config))),
                ("base model", ", ".join(sorted({_code(one.base or "unknown") for one in policies}))),
            ],
        ),
        f"Versions: {versions}." if versions else "",
        "## Results",
    ]
    if results:
        sections += [
            f"On {counted(n_tasks, 'validation task')} of the recipe." if n_tasks else "On the validation tasks.",
            _table(
                ("metric", "before training", "this checkpoint", f"{COVERAGE:.0%} interval"),
                [
                    (one.name, number(one.before), number(one.value), _interval(one, "{} to {}") or "-")
                    for one in results
                ],
            ),
        ]
    else:
        sections.append("This checkpoint was not evaluated.")
    known = f"The base model's licence is {_code(licence)}" if licence else "The base model's licence is not recorded"
    sections += [
        "## Limits",
        "\n".join(
            [
                "* One training run. The intervals are over validation tasks: they cover no other seed.",
                "* The validation tasks come from the recipe; unless it names other files, they resemble or are the "
                "training tasks. No other task was measured.",
                "* Each agent was trained inside this team and its workflow. Alone, or with other prompts, it may "
                "do worse than its base model.",
                "* Not evaluated for safety, bias or factual accuracy. Reward functions measure what they compute, and "
                "a model may have learned to exploit them.",
                f"* {known}: check it, and that of the training data, before you publish.",
            ]
        ),
    ]
    return [section for section in sections if section]


def _usage(policy: PublishedPolicy) -> str:
    where = f", subfolder={json.dumps(_text(policy.subfolder).replace('`', ' '))}" if policy.subfolder else ""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if policy.adapter:
        base = f'"{policy.base}"' if policy.base else "BASE"
        comment = "" if policy.base else "  # BASE: the model that the adapter was trained on"
        lines.insert(0, "from peft import PeftModel")
        lines += [
            f"model = AutoModelForCausalLM.from_pretrained({base}){comment}",
            f"model = PeftModel.from_pretrained(model, REPOSITORY{where})",
        ]
    else:
        lines.append(f"model = AutoModelForCausalLM.from_pretrained(REPOSITORY{where})")
    lines.append(f"tokenizer = AutoTokenizer.from_pretrained(REPOSITORY{where})")
    code = "\n".join(lines)
    return f"Policy {_code(policy.name)}:\n\n```python\n{code}\n```"


def _credit(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The main options of credit that a run has set, besides the rule."""
    algorithm = _mapping(config.get("algorithm"))
    return [(key, algorithm[key]) for key in _CREDIT if algorithm.get(key) is not None]


_CREDIT = ("adv_estimator", "group_by", "propagation_threshold", "gate", "outcome_to", "gamma", "preset")


def _options(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for key in _OPTIONS:
        value: Any = config
        for part in key.split("."):
            value = _mapping(value).get(part)
        if value:
            found.append((key, value))
    return found


_OPTIONS = (
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length", "data.seed"),
    *("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.temperature", "actor_rollout_ref.actor.optim.lr"),
    "actor_rollout_ref.model.lora_rank",
)


def _files(config: Mapping[str, Any]) -> list[str]:
    """The training data without what may be private: folders of files, hosts, and values of options."""
    given = _mapping(config.get("data")).get("train_files")
    files = given if isinstance(given, list) else [] if given is None else [given]
    return [_text(_source(str(name))) for name in files]


def _source(name: str) -> str:
    """A file's name, or an address with the names of its options alone."""
    scheme, mark, rest = name.partition("://")
    if not mark:
        return PurePath(name).name
    path, _, query = rest.partition("?")
    options = [option.partition("=")[0] for option in query.split("&") if option]
    shown = f"{scheme}://{path if scheme in _PUBLIC else '...'}"
    return f"{shown} (options: {', '.join(options)})" if options else shown


_PUBLIC = ("gymnasium", "pettingzoo", "reasoning-gym", "textarena", "verifiers")
"""Schemes of which the part before the options names a package's content, rather than a host, a store or a path."""


def _interval(result: Result, form: str) -> str:
    known = math.isfinite(result.low) and math.isfinite(result.high)
    return form.format(number(result.low), number(result.high)) if known else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def _code(value: object, limit: int = _TEXT) -> str:
    """A value as inline code, in which Markdown has no marks; a dash for none."""
    text = plain(str("" if value is None else value), limit).replace("`", "'").strip()
    return f"`{text}`".replace("|", r"\|") if text else "-"  # a bar ends a table's cell, even in code


def _text(value: object) -> str:
    """A value as one line without control characters."""
    return plain(str("" if value is None else value), _TEXT)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def accepted_licence(value: object) -> str | None:
    """A licence identifier of a base model's card, if it has the form of one."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z0-9][a-z0-9.\-]{0,60}", value) else None
