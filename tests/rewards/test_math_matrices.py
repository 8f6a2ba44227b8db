"""math_verify on random matrices and vectors in many spellings, against equality in numpy."""

import random
from fractions import Fraction

import numpy as np
import pytest

from creditflow.rewards.builtin.math import math_verify

SHAPES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3)]
ENTRIES = [Fraction(n, d) for n in range(-12, 13) for d in (1, 2, 3, 4, 5, 8)]


def drawn(rng: random.Random) -> np.ndarray:
    rows, columns = rng.choice(SHAPES)
    return np.array([[rng.choice(ENTRIES) for _ in range(columns)] for _ in range(rows)], dtype=object)


def changed(matrix: np.ndarray, rng: random.Random) -> np.ndarray:
    """The matrix itself, or one that is easily mistaken for it."""
    other = matrix.copy()
    row, column = rng.randrange(matrix.shape[0]), rng.randrange(matrix.shape[1])
    kind = rng.choice(["same"] * 5 + ["transposed", "rows", "columns", "sign", "entry", "shuffled", "flat"])
    if kind == "transposed":
        return matrix.T
    if kind == "rows":
        return matrix[::-1]
    if kind == "columns":
        return matrix[:, ::-1]
    if kind == "flat":
        return matrix.reshape(1, -1)
    if kind == "shuffled":
        return np.array(rng.sample(list(matrix.flat), matrix.size), dtype=object).reshape(matrix.shape)
    if kind == "sign":
        other[row, column] *= -1
    elif kind == "entry":
        other[row, column] += rng.choice(ENTRIES)
    return other


def entry(value: Fraction, rng: random.Random) -> str:
    n, d = value.numerator, value.denominator
    sign = "-" if n < 0 else ""
    ways = [
        f"{n}/{d}",
        f"{sign}\\frac{{{abs(n)}}}{{{d}}}",
        f"\\frac{{{n}}}{{{d}}}",
        f"{sign}\\dfrac{{{abs(n)}}}{{{d}}}",
    ]
    if d == 1:
        ways = [str(n)] * 3
    if d in (1, 2, 4, 5, 8):
        ways += [str(float(value)), f"{float(value):.4f}"]
    if abs(n) < 10 and 1 < d < 10:
        ways.append(f"{sign}\\frac{abs(n)}{d}")
    return rng.choice(ways)


def spelled(matrix: np.ndarray, rng: random.Random) -> str:
    left = rng.choice(["&", " & ", " &", "& ", "&\n", "\t&\t"])
    below = rng.choice(["\\\\", "\\\\ ", " \\\\ ", "\\\\\n", "\\\\[4pt]", " \\\\[1ex] ", "\\\\ \n", " \\\\ [2pt]\n"])
    body = below.join(left.join(entry(value, rng) for value in row) for row in matrix)
    body += rng.choice(["", "", " \\\\", "\\\\\n"])
    around = rng.choice(["", " ", "\n"])
    columns = "c" * matrix.shape[1]
    opens, closes = rng.choice(
        [
            *((f"\\begin{{{name}}}", f"\\end{{{name}}}") for name in ("pmatrix", "bmatrix", "bmatrix*")),
            (f"\\left[\\begin{{array}}{{{columns}}}", "\\end{array}\\right]"),
            (f"\\left(\\begin{{array}}{{{columns}}}", "\\end{array}\\right)"),
            ("\\left( \\begin{matrix}", "\\end{matrix} \\right)"),
            ("\\left[\\begin{smallmatrix}", "\\end{smallmatrix}\\right]"),
        ]
    )
    text = f"{opens}{around}{body}{around}{closes}"
    return rng.choice([text, f"\\boxed{{{text}}}", f"The answer is \\[ \\boxed{{ {text} }} \\]", f"${text}$"])


def disagreements(seed: int, cases: int) -> dict[str, list[tuple[str, str]]]:
    """Pairs (answer, truth) with a wrong score. Checks that equal and unequal pairs both occur."""
    rng = random.Random(seed)
    wrong: dict[str, list[tuple[str, str]]] = {"wrong 1": [], "wrong 0": []}
    equal_pairs = 0
    for _ in range(cases):
        matrix = drawn(rng)
        other = changed(matrix, rng)
        equal = np.array_equal(matrix, other)
        equal_pairs += equal
        text, truth = spelled(other, rng), spelled(matrix, rng)
        if math_verify(text, truth, seconds=30) != float(equal):
            wrong["wrong 0" if equal else "wrong 1"].append((text, truth))
    assert cases / 3 < equal_pairs < cases * 2 / 3
    return wrong


def test_matrices_score_as_numpy_compares_them():
    assert disagreements(seed=1, cases=40) == {"wrong 1": [], "wrong 0": []}


@pytest.mark.slow
def test_2000_matrices_score_as_numpy_compares_them():
    assert disagreements(seed=2, cases=2_000) == {"wrong 1": [], "wrong 0": []}
