"""Map the tokens of a response to its characters, given only a function that decodes tokens.

The tokenizer that produced the tokens is not needed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from creditflow._utils.huggingface import end_ids, load_tokenizer
from creditflow.data import Step
from creditflow.errors import CreditflowError
from creditflow.rollout.chat import ChatTokenizer

MAX_OPEN = 256
"""Maximum number of tokens held open for an incomplete character; beyond it they count as broken bytes."""

_UNFINISHED = "\ufffd"


class AlignmentError(CreditflowError):
    """The tokens of a response cannot be matched to its text."""


class TokenEnds:
    """The position in a text at which each of its tokens ends.

    Found by decoding a few tokens at a time; the cost is linear in the number of tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """`decode`: maps token ids to text, in the same way that the text was made."""
        self._decode = decode
        self._alone: dict[int, str] = {}

    def __call__(self, ids: Sequence[int], text: str) -> list[int]:
        """[T] number of characters of `text` before the end of each token; never decreases, ends with len(text).

        A token without text (an end-of-sequence token) ends where the previous token ends. Tokens that share a
        character all end after it. Raises AlignmentError if the tokens do not decode to the text.
        """
        alone = [self._text_of(token) for token in ids]
        if "".join(alone) == text:
            return list(accumulate(map(len, alone)))
        ends, spelled = self._in_context(ids)
        if spelled != text:
            shared = min(len(spelled), len(text))
            at = next((i for i in range(shared) if spelled[i] != text[i]), shared)
            raise AlignmentError(
                f"the response's tokens decode to another text than the response: {spelled[at : at + 20]!r} at "
                f"character {at}, where the response has {text[at : at + 20]!r}"
            )
        # A broken character may shrink when more bytes arrive. Its tokens then end where it does.
        return list(accumulate((min(end, len(text)) for end in ends), max))

    def _text_of(self, token: int) -> str:
        if token not in self._alone:
            self._alone[token] = self._decode([token])
        return self._alone[token]

    def _in_context(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """The end of each token, and the text that the tokens decode to.

        Each token is decoded after the tokens of the previous characters, because some tokenizers treat the first token
        of a text differently. Tokens that end inside a character stay open until the character is complete.
        """
        ends: list[int] = []
        pieces: list[str] = []
        settled, context, fresh = 0, 0, 0  # characters in `pieces`; the open tokens are ids[fresh:]
        before = now = ""
        for i in range(len(ids)):
            now = self._decode(ids[context : i + 1])
            ends.append(settled + len(now) - len(before))
            if i + 1 - fresh >= MAX_OPEN or not now.endswith(_UNFINISHED):
                pieces.append(now[len(before) :])
                settled += len(pieces[-1])
                context, fresh = fresh, i + 1
                before = now = self._decode(ids[context:fresh])
        return ends, "".join(pieces) + now[len(before) :]


def token_at(ends: Sequence[int], character: int) -> int:
    """Index of the first token that reaches the character, or of the last token if none does. `ends`: sorted."""
    return min(bisect_right(ends, character), len(ends) - 1)


class PolicyTokens:
    """Decodes the tokens of a run's policies, with the policies themselves or with the tokenizer of a folder."""

    def __init__(self, folder: Path | None) -> None:
        """`folder`: a tokenizer folder, loaded on first use; None: the run's policies decode (`connect`)."""
        self._folder = folder
        self._clients: Mapping[str, Any] = {}
        self._chat: ChatTokenizer | None = None
        self._ends: dict[str, TokenEnds] = {}

    def connect(self, clients: Mapping[str, Any]) -> None:
        """Set the run's policies, by name."""
        self._clients = clients
        self._ends.clear()

    def ends(self, step: Step) -> list[int]:
        """[T] end of each response token of the step, as a position in its response. Raises AlignmentError."""
        if step.policy not in self._ends:
            self._ends[step.policy] = TokenEnds(self._decoder(step.policy))
        return self._ends[step.policy](step.response_ids, step.response)

    def _decoder(self, policy: str) -> Callable[[Sequence[int]], str]:
        if chat := self._loaded():
            return chat.decode
        if policy not in self._clients:
            raise AlignmentError(
                f"which characters the response's tokens stand for is not known: no policy {policy!r} is connected; "
                "name its folder in the argument `tokenizer`"
            )
        decode: Callable[[Sequence[int]], str] = self._clients[policy].decode
        return decode

    def _loaded(self) -> ChatTokenizer | None:
        if self._chat is None and self._folder is not None:
            self._chat = ChatTokenizer(load_tokenizer(self._folder, "tokenizer"), end_ids(self._folder))
        return self._chat
