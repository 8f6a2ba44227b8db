"""A trained model's card for the Hugging Face hub: metadata and a short text.

Names of a run are hostile input: in the text they are code on one line, in the metadata YAML strings.
"""

from __future__ import annotations

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

Trained in a team of agents by [creditflow](https://pypi.org/project/creditflow/): recipe {{ code(recipe) }},
credit rule {{ code(rule) }}, training step {{ step }}. Each agent may do worse alone or with other prompts.
{% for policy in policies %}
Policy {{ code(policy.name) }}, base model {{ code(policy.base) }}, which an adapter needs beside the package peft:

```python
transformers.AutoModelForCausalLM.from_pretrained("ORG/NAME", subfolder={{ policy.subfolder | tojson }})
```
{% endfor %}
## Results
{% for result in results %}
* {{ result.metric_name }}: {{ result.metric_value }} (before training {{ code(before["val/" + result.metric_type]) }})
{%- else %}
This checkpoint was not evaluated.
{%- endfor %}

The validation tasks resemble the training tasks unless the recipe names others. This is one run, not evaluated for
safety, bias or factual accuracy. Licence: {{ code(license) }}; check those of the base model and of the training data.
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


def model_card(
    run: Mapping[str, Any],
    step: int,
    policies: Sequence[PublishedPolicy],
    licence: str | None,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> str:
    """The card as Markdown with metadata.

    `run`: `run.json`. `step`: the training step of the checkpoint. `licence`: as the hub names it. `before`, `after`:
    the metrics before training and after this step.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    recipe = _text(run.get("recipe"))
    spec = _mapping(_mapping(run.get("config")).get("algorithm")).get("propagation")
    rule = _text(spec.get("rule") if isinstance(spec, Mapping) else spec)
    bases = sorted({policy.base for policy in policies if policy.base is not None})
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
        license=licence,
        library_name="peft" if any(policy.adapter for policy in policies) else "transformers",
        pipeline_tag="text-generation",
        base_model=bases[0] if len(bases) == 1 else bases or None,
        tags=["creditflow", "reinforcement-learning", "multi-agent", "credit-assignment"],
        model_name=recipe,
        eval_results=results or None,
        creditflow={"recipe": recipe, "training_steps": step, "propagation": rule},
    )
    facts: Any = {"code": _code, "recipe": recipe, "rule": rule, "step": step, "policies": policies, "results": results}
    return str(ModelCard.from_template(data, template_str=_TEMPLATE, before=dict(before), **facts))


def _code(value: object) -> str:
    """A value as inline code, in which Markdown has no marks; a dash for none."""
    text = _text(value).replace("`", "'").strip()
    return f"`{text}`" if text else "-"


def _text(value: object) -> str:
    """A value as one line without control characters."""
    return plain(str("" if value is None else value), 200)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
