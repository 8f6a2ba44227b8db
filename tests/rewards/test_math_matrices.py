"""math_verify on random matrices: it must agree with numpy's comparison of their entries."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from creditflow.rewards.builtin.math import math_verify

ENTRIES = [Fraction(n, d) for n in range(-12, 13) for d in (1, 2, 3, 4, 5, 8)]
CHANGES = {
    "same": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.T,
    "rows": lambda matrix: matrix[::-1],
    "columns": lambda matrix: matrix[:, ::-1],
    "flat": lambda matrix: matrix.reshape(1, -1),
    "sign": lambda matrix: np.where(np.arange(matrix.size).reshape(matrix.shape) == 0, -matrix, matrix),
    "entry": lambda matrix: matrix + (np.arange(matrix.size).reshape(matrix.shape) == matrix.size - 1),
}
AROUND = [
    *((f"\\begin{{{name}}}", f"\\end{{{name}}}") for name in ("pmatrix", "bmatrix", "bmatrix*")),
    ("\\left[\\begin{array}{ccc}", "\\end{array}\\right]"),
    ("\\left( \\begin{matrix}", "\\end{matrix} \\right)"),
    ("\\left[\\begin{smallmatrix}", "\\end{smallmatrix}\\right]"),
]
SENTENCES = ["{}", "\\boxed{{{}}}", "The answer is \\[ \\boxed{{ {} }} \\]", "${}$"]
SHAPES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (3, 3)]
MATRICES = arrays(object, st.sampled_from(SHAPES), elements=st.sampled_from(ENTRIES), fill=st.nothing())


def entries(value: Fraction) -> st.SearchStrategy[str]:
    n, d, sign = value.numerator, value.denominator, "-" if value < 0 else ""
    signed = [f"{sign}\\{command}{{{abs(n)}}}{{{d}}}" for command in ("frac", "dfrac")]
    fractions = [f"{n}/{d}", f"\\frac{{{n}}}{{{d}}}", *signed]
    fractions += [f"{sign}\\frac{abs(n)}{d}"] if abs(n) < 10 else []
    decimals = [str(float(value)), f"{float(value):.4f}"] if d != 3 else []
    return st.sampled_from([*([str(n)] if d == 1 else fractions), *decimals])


@st.composite
def spelled(draw: st.DrawFn, matrix: np.ndarray) -> str:
    left = draw(st.sampled_from(["&", " & ", "&\n", "\t&\t"]))
    below = draw(st.sampled_from(["\\\\", " \\\\ ", "\\\\\n", "\\\\[4pt]", " \\\\ [2pt]\n"]))
    body = below.join(left.join(draw(entries(value)) for value in row) for row in matrix)
    opens, closes = draw(st.sampled_from(AROUND))
    return draw(st.sampled_from(SENTENCES)).format(f"{opens} {body}{draw(st.sampled_from(['', below]))}{closes}")


@given(MATRICES, st.just("same") | st.sampled_from(list(CHANGES)), st.data())
def test_matrices_score_as_numpy_compares_them(matrix, change, data):
    other = CHANGES[change](matrix)
    score = math_verify(data.draw(spelled(other)), data.draw(spelled(matrix)), seconds=30)
    assert score == float(np.array_equal(matrix, other))
