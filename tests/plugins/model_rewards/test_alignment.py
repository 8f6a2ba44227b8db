from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from creditflow.plugins.model_rewards.alignment import MAX_OPEN, AlignmentError, TokenEnds, token_at
from tests.builders import examples
from tests.plugins.model_rewards.tiny_models import bpe_tokenizer, metaspace_tokenizer

BPE, METASPACE = bpe_tokenizer(), metaspace_tokenizer()


def test_leading_spaces_stripped_by_a_decoder_are_recovered() -> None:
    ids = METASPACE.encode("the sum is eight").ids
    assert [METASPACE.decode([token]) for token in ids] == ["the", "sum", "is", "eight"]
    assert TokenEnds(METASPACE.decode)(ids, "the sum is eight") == [3, 7, 10, 16]


@examples(150)
@given(
    st.text(max_size=30).map(lambda text: BPE.encode(text).ids)
    | st.lists(st.integers(0, BPE.get_vocab_size() - 1), max_size=40)
)
@example([])
@example([0])
@example(BPE.encode("the sum is 5 漢!\n#### 8").ids)
def test_alignment_equals_prefix_decoding(ids: list[int]) -> None:
    """Also of bytes that are no text; the reference implementation is quadratic in the number of tokens."""
    ends = [len(BPE.decode(ids[: k + 1])) for k in range(len(ids))]
    assert TokenEnds(BPE.decode)(ids, BPE.decode(ids)) == ends


@examples(150)
@given(st.text("thesumi 8#.\n€漢", max_size=30))
def test_byte_fallback_texts_are_aligned(text: str) -> None:
    ids = METASPACE.encode(text).ids
    ends = TokenEnds(METASPACE.decode)(ids, METASPACE.decode(ids))
    assert ends == sorted(ends)
    assert ends[-1:] == [len(METASPACE.decode(ids))][: len(ids)]


def test_broken_bytes_are_aligned_in_linear_time() -> None:
    character = BPE.encode("漢").ids
    assert len(character) == 3
    ids = [*character[:1] * 2000, *character]
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return str(BPE.decode(list(ids)))

    assert TokenEnds(decode)(ids, BPE.decode(ids)) == [*range(1, 2001), 2001, 2001, 2001]
    assert decoded < 2 * MAX_OPEN * len(ids)


def test_tokens_of_another_text_raise_with_the_position() -> None:
    with pytest.raises(AlignmentError, match="'x' at character 4, where the response has 'y'"):
        TokenEnds(BPE.decode)(BPE.encode("the x").ids, "the y")
    with pytest.raises(AlignmentError, match="at character 3, where the response has ''"):
        TokenEnds(BPE.decode)(BPE.encode("the end").ids, "the")


def test_character_belongs_to_the_first_token_reaching_it() -> None:
    ends = [2, 2, 5, 7]
    assert [token_at(ends, character) for character in range(9)] == [0, 0, 2, 2, 2, 3, 3, 3, 3]
