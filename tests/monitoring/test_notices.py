"""Texts about truncated responses."""

from creditflow.monitoring.notices import truncations
from tests.builders import batch_of, make_trajectory, step

CUT = {"info": {"finish_reason": "length"}}


def test_truncations_name_agent_share_and_option():
    batch = batch_of(
        make_trajectory("a", [step("planner", tokens=3), step("solver", tokens=16, **CUT)], 0.0),
        make_trajectory("b", [step("planner", tokens=8, **CUT), step("solver", tokens=16, **CUT)], 0.0),
        make_trajectory("c", [step("critic", tokens=16), step("solver", tokens=2)], 0.0),
    )

    assert [cut.text(16) for cut in truncations(batch)] == [
        "50% of planner's responses are truncated (1 of 2): raise the limit of its calls (max_tokens, here 8), or ask "
        "for shorter responses",
        "67% of solver's responses are truncated (2 of 3): raise data.max_response_length, now 16, or ask for shorter "
        "responses",
    ]
