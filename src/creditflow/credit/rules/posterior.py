"""`posterior`: a step's own reward is that of its expected sub-reward, given all scores and the outcome."""

from __future__ import annotations

from dataclasses import replace

from creditflow.credit.records import GATE_OPTIONS, NOTHING, propagation_rule
from creditflow.credit.rules.base import OUTCOME, SIGNAL, Credit, PropagationInput, sources
from creditflow.credit.rules.none import none


@propagation_rule(
    "posterior",
    ignores=(*GATE_OPTIONS, "shared_reward"),
    comparison_rank=5,
    flows=NOTHING,
    decomposed=True,
    expects=True,
)
def posterior(inputs: PropagationInput) -> Credit:
    """`none`, with the expected sub-reward in place of the sub-reward (`creditflow.credit.posteriors`)."""
    credit = none(inputs)
    if not inputs.options.pays_expected_score:
        return credit
    return replace(credit, reached_S=sources(inputs) | (inputs.known_S & inputs.is_paid_S) * (SIGNAL | OUTCOME))
