"""Responses that later prompts contain."""

from hypothesis import given
from hypothesis import strategies as st

from creditflow._utils.text_search import SHORTEST, reused

IN_TURN = ([0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11])
"""Starts and ends of consecutive steps."""


def used(prompts: list[list[str]], responses: list[str]) -> list[tuple[int, ...]]:
    return reused(prompts, responses, *(times[: len(prompts)] for times in IN_TURN))


def test_white_space_around_a_response_is_ignored() -> None:
    assert used([["Go."], ["The plan is\n\nadd, then halve\n\n"]], ["\n add, then halve \n", "x"]) == [(), (0,)]


def test_short_response_counts_only_as_a_whole_message() -> None:
    prompts = [["Go."], ["yes, of course yes"], ["Is it right?", " yes "]]
    assert used(prompts, ["yes", "a", "b"]) == [(), (), (0,)]


def test_longest_of_overlapping_texts_counts() -> None:
    responses = ["the result is 17", "They say: the result is 17, and it is", "x"]
    prompts = [["Go."], ["Look: the result is 17"], ["They say: the result is 17, and it is"]]
    assert used(prompts, responses) == [(), (0,), (1,)]


def test_later_response_does_not_hide_an_earlier_one() -> None:
    responses = ["add, then halve", "x", "Plan: add, then halve. I did it."]
    prompts = [["Go."], ["Plan: add, then halve. I did it."], ["Sum up"]]
    assert used(prompts, responses) == [(), (0,), ()]


def test_last_ended_step_counts_among_equal_responses() -> None:
    prompts = [["a"], ["b"], ["c"], ["Now: I agree with that."]]
    responses = ["I agree with that."] * 3 + ["x"]
    assert reused(prompts, responses, [0, 1, 2, 10], [3, 4, 20, 12]) == [(), (), (), (1,)]


def test_response_counts_despite_a_skewed_clock() -> None:
    assert reused([["a"], ["it was: long enough"]], ["long enough", "x"], [0, 5], [9, 7]) == [(), (0,)]


def test_response_from_its_prompt_counts_only_as_a_message() -> None:
    asked = "Say either of: approve the request, reject the request"
    responses = ["approve the request", "reject the request", "approve the request", "x"]
    prompts = [[asked], [asked], [asked], [asked, "reject the request"]]
    assert used(prompts, responses) == [(), (), (), (1,)]


words = st.text("ab", min_size=1, max_size=SHORTEST + 3)


@given(st.lists(st.tuples(st.lists(words, max_size=3), words), max_size=6))
def test_found_responses_occur_and_precede_the_reader(steps: list[tuple[list[str], str]]) -> None:
    prompts, responses = [prompt for prompt, _ in steps], [response for _, response in steps]
    for step, found in enumerate(used(prompts, responses)):
        assert all(source < step for source in found)
        assert all(any(responses[source] in part for part in prompts[step]) for source in found)
        for part in prompts[step]:
            sources = [at for at, response in enumerate(responses[:step]) if response == part]
            assert not sources or sources[-1] in found
