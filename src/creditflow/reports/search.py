"""Full-text search over a run's step files.

A search goes from the newest training step to the first, in portions of bounded time and memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from creditflow.errors import InputError
from creditflow.reports.index import NUMBER, ROW, Filter, Index
from creditflow.runs.sql import source_of

SECONDS = 1.0
"""Seconds of one portion of a search; a step file that has begun is finished."""
_FILES = 8
"""Step files read per query."""
_WORDS, _LONGEST = 16, 1000
_ROWS = ", file_row_number = true"
"""Option of a source of rows with their places in the files."""
_BEFORE, _EXCERPT = 60, 200
"""Characters of an excerpt before the match, and in all."""


def words_of(text: str) -> list[str]:
    """The words of a query, in lower case; words in double quotes are one phrase.

    Raises InputError for an empty query, or one of more than 16 words or 1,000 characters.
    """
    words = [phrase or word for phrase, word in re.findall(r'"([^"]+)"|([^\s"]+)', text.lower())]
    if not words or len(words) > _WORDS or len(text) > _LONGEST:
        raise InputError(
            f"text: expected 1 to {_WORDS} words in at most {_LONGEST} characters, got {len(words)} in {len(text)}"
        )
    return words


def _condition(words: Sequence[str]) -> tuple[str, list[str]]:
    """An SQL condition on rows of step files, and its values: every word is in the prompt, the response or the id."""
    contains = "(contains(lower(response), ?) OR contains(lower(prompt), ?) OR contains(lower(step_id), ?))"
    return " AND ".join([contains] * len(words)), [word for word in words for _ in range(3)]


def search(
    index: Index, where: Filter, text: str, begin: tuple[int, int] | None, limit: int, seconds: float = SECONDS
) -> dict[str, Any]:
    """Find rollouts with a step that contains all words, among those that `where` selects.

    Returns `{trajectories, searched, of, next}`: rows of the list, each with the `match` of its first such step;
    numbers of training steps; and where the next call begins, None at the end. `begin`: a training step, and the number
    of the last trajectory of it that was returned, or -1.
    """
    words = words_of(text)
    steps = [step for step in sorted(index.taken, reverse=True) if where.training_step in (None, step)]
    done = 0 if begin is None else sum(step > begin[0] for step in steps)
    after = -1 if begin is None else begin[1]
    rows: list[dict[str, Any]] = []
    first, started = done, time.monotonic()
    while done < len(steps) and (done == first or time.monotonic() - started < seconds):  # at least one portion
        portion = steps[done : done + _FILES]
        rows += _matches(index, portion, words, where, after, limit - len(rows))
        if len(rows) == limit:
            last = rows[-1]
            done = sum(step > last["training_step"] for step in steps)
            return _portion(rows, done, len(steps), (last["training_step"], last["number"]))
        done, after = done + len(portion), -1
    return _portion(rows, done, len(steps), (steps[done], -1) if done < len(steps) else None)


def _portion(rows: Sequence[dict[str, Any]], done: int, n_steps: int, place: tuple[int, int] | None) -> dict[str, Any]:
    trajectories = [{key: value for key, value in row.items() if key != "number"} for row in rows]
    return {"trajectories": trajectories, "searched": done, "of": n_steps, "next": place}


def _matches(
    index: Index, steps: Sequence[int], words: Sequence[str], where: Filter, after: int, limit: int
) -> list[dict[str, Any]]:
    matches, word_values = _condition(words)
    clause, values = where.clauses((min(steps), max(steps)))
    source = source_of([index.ledger.file(step) for step in steps], _ROWS)
    query = f"""
        WITH matched AS (
            SELECT {NUMBER} AS number, "index" AS position, agent, {_excerpt()} AS excerpt
            FROM {source} WHERE {matches}
        ), firsts AS (
            SELECT number, min(position) AS position, arg_min((agent, excerpt), position) AS first, count(*) AS n
            FROM matched WHERE number > ? OR (number >> 32) <> ? GROUP BY number
        )
        SELECT {ROW}, number, {{'index': position, 'agent': first[1], 'excerpt': first[2], 'steps': n}} AS match
        FROM firsts JOIN trajectories USING (number) LEFT JOIN tasks USING (task_key)
        WHERE {clause} ORDER BY training_step DESC, number LIMIT ?
    """
    with_excerpt = [words[0]] * 4
    return index.ask(query, [*with_excerpt, *word_values, after, after >> 32, *values, limit])


def _excerpt() -> str:
    """SQL of the text around the first word: of the response if it is there, else of the prompt."""
    around = (
        f"substr({{0}}, greatest(1, instr(lower({{0}}), ?) - {_BEFORE}), {_EXCERPT})"  # length may differ in lower case
    )
    return (
        f"CASE WHEN contains(lower(response), ?) THEN {around.format('response')} "
        f"WHEN contains(lower(prompt), ?) THEN {around.format('prompt')} ELSE left(response, {_EXCERPT}) END"
    )
