"""A trained model's card for the Hugging Face hub: metadata and a short text.

Names of a run are hostile input: in the text they are code on one line, in the metadata YAML strings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from creditflow.reports.text import plain

_METRICS = {
    "pass_at_1": "pass@1",
    "pass_at_1_greedy": "pass@1, greedy",
    "step_error_rate": "step error rate",
    "step_error_rate_greedy": "step error rate, greedy",
}
_TEMPLATE = """\
---
{{ card_data }}
---

# {{ code(recipe) }}

Trained with reinforcement learning by [creditflow](https://pypi.org/project/creditflow/) {{ code(version) }} in a team
of agents: recipe {{ code(recipe) }}, credit rule {{ code(rule) }}, training step {{ step }}.

| policy | subfolder | base model |
| --- | --- | --- |
{%- for policy in policies %}
| {{ code(policy.name) }} | {{ code(policy.subfolder) }} | {{ code(policy.base) }} |
{%- endfor %}

## Use

An adapter also needs the package peft, and its base model.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
{% for policy in policies %}
model = AutoModelForCausalLM.from_pretrained("ORG/NAME", subfolder={{ policy.subfolder | tojson }})
tokenizer = AutoTokenizer.from_pretrained("ORG/NAME", subfolder={{ policy.subfolder | tojson }})
{% endfor -%}
```

## Results
{% if results %}
On the recipe's validation tasks, which resemble its training tasks unless it names others:

| metric | before training | this checkpoint |
| --- | --- | --- |
{%- for result in results %}
| {{ result.metric_name }} | {{ before[result.metric_type] }} | {{ result.metric_value }} |
{%- endfor %}
{% else %}
This checkpoint was not evaluated.
{% endif %}
## Limits

* One training run. Each agent was trained inside this team and may do worse alone or with other prompts.
* Not evaluated for safety, bias or factual accuracy. A model may have learned to exploit its reward functions.
* Licence of the base model: {{ code(license) }}. Check it, and that of the training data, before you publish.
"""


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


def model_card(
    run: Mapping[str, Any],
    step: int,
    policies: Sequence[PublishedPolicy],
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> str:
    """The card as Markdown with metadata.

    `run`: `run.json`. `step`: the training step of the checkpoint. `before`, `after`: the metrics before training and
    after this step.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    recipe, version = _text(run.get("recipe")), _text(_mapping(run.get("versions")).get("creditflow"))
    rule = _text(_mapping(_mapping(run.get("config")).get("algorithm")).get("propagation"))
    bases = sorted({policy.base for policy in policies if policy.base is not None})
    licences = {policy.licence for policy in policies}
    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type="validation",
            dataset_name=f"validation tasks of {recipe}",
            metric_type=key,
            metric_name=name,
            metric_value=round(value, 6),
        )
        for key, name in _METRICS.items()
        if isinstance(value := after.get(f"val/{key}"), int | float)
    ]
    data = ModelCardData(
        license=licences.pop() if len(licences) == 1 else None,
        library_name="peft" if any(policy.adapter for policy in policies) else "transformers",
        pipeline_tag="text-generation",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        tags=["creditflow", "reinforcement-learning", "multi-agent", "credit-assignment"],
        model_name=recipe,
        eval_results=results or None,
        creditflow={"version": version, "recipe": recipe, "training_steps": step, "propagation": rule},
    )
    return str(
        ModelCard.from_template(
            data,
            template_str=_TEMPLATE,
            code=_code,
            recipe=recipe,
            version=version,
            rule=rule,
            step=step,
            policies=policies,
            results=results,
            before={key: _text(before.get(f"val/{key}")) or "-" for key in _METRICS},
        )
    )


def _code(value: object) -> str:
    """A value as inline code, in which Markdown has no marks; a dash for none."""
    text = _text(value).replace("`", "'").strip()
    return f"`{text}`".replace("|", r"\|") if text else "-"  # a bar ends a table's cell, even in code


def _text(value: object) -> str:
    """A value as one line without control characters."""
    return plain(str("" if value is None else value), 200)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def accepted_licence(value: object) -> str | None:
    """A licence identifier of a base model's card, if it has the form of one."""
    return value if isinstance(value, str) and re.fullmatch(r"[a-z0-9][a-z0-9.\-]{0,60}", value) else None
