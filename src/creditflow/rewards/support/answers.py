"""Find the answer in a text, in one order for all comparisons.

0. The last `<answer>...</answer>`: if there is one, the other places are inside of it.
1. The last box, with the boxes that `and`, `or` or a comma joins to it. Text outside of it is not read.
2. An answer line: `#### answer`. A Markdown heading (`#### Step 2: Check`) is none.
3. The text after `answer is`, `answer:`, or another word with a colon.
4. The whole text, if it is nothing but an answer.
5. The last formula between `$` or brackets, with those that commas, `and` or `or` join to it, unless a number follows.
6. The last number, point or calculation without letters, with those that `and` or `or` joins to it. Commas join if one
   of these words does, or if the sentence ends there. Exponents and subscripts of letters are no numbers.

The text comes from a model, so every regular expression here takes time linear in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate

from creditflow.rewards.support.mathematics import AND_OR
from creditflow.rewards.support.text import MAX_CHARACTERS, as_ascii, without_thoughts

_EMOJI = r"[\u20e3\u220e\u25a0-\u2775\u2794-\u27bf\u2b00-\u2bff\U0001f000-\U0001f0ff\U0001f200-\U0001faff\u200d\ufe0f]"
_QED = r"(\\?[$(])?\\(?:blacksquare|square|Box|checkmark|qed|q?quad|[ ,;])(?![a-zA-Z])(?(1)\\?[$)])"
_SIGNS = rf"(?<=[^\s:=+/<>({{\[,&^\\-])(?<!\s\*)\s{{0,3}}(?:(?:{_EMOJI}|{_QED})\s{{0,3}}){{1,9}}(?=[}}<]|\W{{0,9}}$)"
"""Emoji, check marks and signs that end a proof, at the end of a line, box or tag, and behind no operator."""
_DELETED = re.compile(rf"(?m)<\|[^|<>\s]{{2,24}}\|>|</s>|<eos>|<end_of_turn>|~~[^~\n]{{1,200}}~~|{_SIGNS}")
_TAGGED = re.compile(r"(?is)<answer>((?:(?!</?answer>).)*)</answer>")
_BOX, _COLON = re.compile(r"\\{1,2}(?:boxed|fbox)(?![a-zA-Z])\s{0,3}"), re.compile(r"(?<=[^\W\d_])\s?:\s?\}?")
_JOINS = re.compile(rf"[^.!?]{{0,40}}(?:[,;]|{AND_OR})[^.!?]{{0,40}}|[^\w.!?]{{0,12}}")
_EMPHASIS = re.compile(r"(?<![\w)}\]\\])(\*{1,3}|_{1,3}|`{1,3})(?=[^\s*_`])([^\n]{1,200}?)(?<=\S)\1(?!\w)")
_EXCLAMATION = re.compile(r"(?<![\\\w])([^\W\d_]{2,20}:?\s{1,3}\S{0,40}?[\d$)])!{1,3}(?!\s?[a-z0-9=+*/^$\\(){},.!-])")
"""A mark at the end of a sentence, right behind a word and a number or formula: no factorial."""
_ANSWER_LINE = re.compile(r"####[ \t]*(?!(?:[A-Z][a-z]+ )?\d{1,3}[.:)][ \t]+[^\W\d])(?=.*[\d$\\]|.*\s*\Z)(\S.*)")
_PHRASE = re.compile(r"(?i)\banswer[ \t]{0,3}(?:is|:|=)[ \t]{0,3}:?\}?|(?:答案|答え)[是为は:]{1,2}")
_CLAUSE_ENDS = (r"\n", r"[.!?](?:\s|\Z)", r"[,;]\s|\s(?:because|since|which|as)\s|\s\((?=[^\W\d]{2})")
_FORMULA = r"\$\$([^$]{1,2000})\$\$|(?<![\\\d$])\$([^$\n]{1,2000})\$|\\\(([^\n]{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]"
_FORMULAS, _BETWEEN = re.compile(rf"(?s){_FORMULA}"), re.compile(rf"(?:,?\s{{0,3}}{AND_OR}|,)\s{{0,3}}")
_GROUPS = r"[0-9]{1,3}(?:(?:[ '~]|\\[ ,;!]|\{,\})[0-9]{3})+(?![0-9]|\s?/)"
_DECIMAL = rf"(?:(?:{_GROUPS}|[0-9](?:,?[0-9])*)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)(?:[eE][-+]?[0-9]{{1,4}}(?!\w))?"
_NUMBER = rf"(?:[$\u20ac\u00a3]?{_DECIMAL}!*|\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}})[\u00b2\u00b3\u00b9\u2070-\u207b]*"
_SCALE = r"\$?(?:\s?\\?%|\s(?:hundred|thousand|(?:m|b|tr)illion)\b)"
# no exponent, no subscript and no part of a name (x2, CO2), unless letters are a word or currency; also a mixed number
_LATIN = r"0-9_a-zA-Z\u00c0-\u03ff"  # in other scripts, a number needs no space before it
_SIGNED = rf"(?<![\^_]\{{)(?<![\^_{{]-)(?:(?<![{_LATIN})])-)?(?:[0-9]{{1,9}}\s?(?=[0-9]+\s?/\s?[0-9]|\\[dt]?frac))?"
_START = rf"(?:(?<![{_LATIN}^])|(?<=[a-zA-Z]{{3}})(?![0-9]*[A-Z])|(?<=Rs))(?<!\d\.){_SIGNED}"
_OPERATION = r"\s?(?:[-+*/^\u00d7\u00b7]|\\times|\\cdot|(?<=\d):(?=\d)|(?<= ):(?= ))\s?"  # also a ratio or a time
_CALCULATION = rf"{_START}{_NUMBER}(?:{_OPERATION}\{{?-?{_NUMBER}\}}?){{0,50}}(?:{_SCALE})?"
_PART = rf"(?:{_CALCULATION}|[(\[]{_CALCULATION}(?:,\s?{_CALCULATION})+[)\]])"
_JOIN = rf",?\s?{AND_OR}\s?"
_LIST = rf"(?:(?:{_JOIN}|,\s){_PART}){{0,24}}{_JOIN}{_PART}|(?:,\s{_PART}){{1,24}}(?=[ .!*]*\Z|[.!]\s)"
_CALCULATIONS = re.compile(rf"{_PART}(?:{_LIST})?")


def places(text: str, last_number: bool = True) -> Iterator[tuple[str, ...]]:
    """Yield the places where the answer may be, most definite first; each as texts of which the later are shorter.

    `last_number=False` leaves out the last number, which is a guess.
    """
    text = _DELETED.sub("", without_thoughts(as_ascii(text[-MAX_CHARACTERS:])))
    text = _EXCLAMATION.sub(r"\1", _EMPHASIS.sub(r"\2", (_TAGGED.findall(text) or [text])[-1]))
    if (boxed := last_box(text)) is not None:
        yield (boxed,)
        text, last_number = boxed, False
    yield from ((line,) for line in reversed(answer_lines(text)))
    # the last 24 only, as each reads all text behind it
    conclusions = [_clauses(text[match.end() :].strip()) for match in list(_PHRASE.finditer(text))[-24:]]
    yield from reversed(conclusions)
    if len(pieces := _COLON.split(text)) > 1 and not re.search(r"[.!?]\s|\n", pieces[-1].strip()):
        yield _clauses(pieces[-1].strip())
    yield (text.strip(),)
    yield _last_formula(text)
    sentence = "".join(conclusions[-1][:2][-1:]) if conclusions else text
    yield from ((numbers,) for numbers in _CALCULATIONS.findall(sentence)[-1:] if last_number)


def answer_lines(text: str) -> list[str]:
    """The lines `#### answer`; a line of words alone is a heading if more text follows."""
    return _ANSWER_LINE.findall(text)


def _clauses(text: str) -> tuple[str, ...]:
    """The text up to the end of its line, of its sentence and of its clause; then what follows `is`, or a formula."""
    _, sentence, clause = clauses = [text := re.split(end, text, maxsplit=1)[0].strip() for end in _CLAUSE_ENDS]
    clauses += [sentence.rpartition(" is ")[2], clause.rpartition(" is ")[2], *_last_formula(sentence)]
    return tuple(dict.fromkeys(clause for clause in clauses if clause.strip("*$ ")))


def _last_formula(text: str) -> tuple[str, ...]:
    pieces = [(match.start(), match[match.lastindex or 0], match.end()) for match in _FORMULAS.finditer(text)]
    is_last = pieces and not re.search(rf"[0-9]|\A{_SCALE}", text[pieces[-1][2] :])
    return (", ".join(_joined(text, pieces, _BETWEEN)),) if is_last else ()


def _joined(text: str, pieces: list[tuple[int, str, int]], between: re.Pattern[str]) -> list[str]:
    """The last piece, given as start, content and end, with those before it that the text between them joins to it."""
    apart = [i for i in range(1, len(pieces)) if not between.fullmatch(text, pieces[i - 1][2], pieces[i][0])]
    return [content for _, content, _ in pieces[max(apart, default=0) :]]


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, and of the boxes joined to it; None without a box.

    An unclosed box holds the rest of the text. An empty box is an empty answer.
    """
    # the last 24 only: nested ones take quadratic time
    boxes = [(match.start(), *_content(text, match.end())) for match in list(_BOX.finditer(text))[-24:]]
    boxes = [box for i, box in enumerate(boxes) if not any(box[0] < before[2] for before in boxes[:i])]  # not nested
    joined = _joined(text, boxes, _JOINS)
    contents = [content if (inner := last_box(content)) is None else inner for content in joined]
    return None if not boxes else ", ".join(dict.fromkeys(contents)) if all(contents) else ""


def _content(text: str, start: int) -> tuple[str, int]:
    r"""The content and the end of a box that begins at `start`; for `\boxed 7` the word."""
    if text[start : start + 1] != "{":
        word = "".join(text[start:].split(maxsplit=1)[:1]).rstrip("$.,;")
        return word, start + len(word)
    braces = list(re.finditer(r"(?<!\\)[{}]", text[start:]))
    depths = accumulate(1 if brace[0] == "{" else -1 for brace in braces)
    end = next((start + brace.end() for brace, depth in zip(braces, depths, strict=True) if depth == 0), len(text) + 1)
    return text[start + 1 : end - 1].strip(), end
