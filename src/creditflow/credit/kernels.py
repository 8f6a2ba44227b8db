"""Compiled loops over edges and tokens, for passes in which one result depends on the previous one.

The functions are plain arithmetic on arrays, in a fixed order, without fused or reordered operations, so that
`explain` can repeat every operation and get the same bits. numba compiles them on first use and caches them on disk.
Large results are written to arrays of the caller: numpy requests huge pages, numba does not, and the page faults would
cost more than the arithmetic.

Edges are sorted by child, and parents precede children. A pass from the last edge to the first therefore visits every
step after all of its descendants; a pass from the first to the last, after all of its ancestors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from creditflow.data import Bools, Floats, Ints

Function = TypeVar("Function", bound=Callable[..., Any])


def _compiled(function: Function) -> Function:
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


@_compiled
def flow_up(
    child_E: Ints,
    parent_E: Ints,
    own_S: Floats,
    gate_S: Floats,
    share_S: Floats,
    gamma: float,
    received_S: Floats,
    reached_S: NDArray[np.uint8],
) -> None:
    """Add `gamma * sum over children k of share_k * gate_k * h_k` to `received_S`, with h = own + received.

    Adds to `reached_S` the bits that children pass through open gates.
    """
    for e in range(child_E.size - 1, -1, -1):
        k, t = child_E[e], parent_E[e]
        received_S[t] += gamma * share_S[k] * (gate_S[k] * (own_S[k] + received_S[k]))
        if gamma > 0.0:
            reached_S[t] |= reached_S[k] * (gate_S[k] > 0.0)


@_compiled
def frozen_upstream(child_E: Ints, parent_E: Ints, gate_S: Floats) -> Bools:
    """[S] steps neither at or after a closed step, nor on a path of open gates to a step without children."""
    at_or_after_S = gate_S == 0.0
    heard_S = np.ones(gate_S.size, dtype=np.bool_)
    for e in range(child_E.size):
        at_or_after_S[child_E[e]] |= at_or_after_S[parent_E[e]]
        heard_S[parent_E[e]] = False
    for e in range(child_E.size - 1, -1, -1):
        k = child_E[e]
        heard_S[parent_E[e]] |= heard_S[k] and gate_S[k] > 0.0
    frozen_S: Bools = ~(at_or_after_S | heard_S)
    return frozen_S


@_compiled
def moments_of_steps(token_offsets: Ints, trained_T: Bools, values_T: Floats, moments_S: Floats) -> None:
    """Write [S, 5]: count, mean, sum of squared differences from it, minimum and maximum of a step's trained tokens.

    One pass. Squares are taken of differences from the first value visited, which avoids cancellation.
    """
    for s in range(token_offsets.size - 1):
        n, first, total, squares, low, high = 0, 0.0, 0.0, 0.0, np.inf, -np.inf
        for j in range(token_offsets[s + 1] - 1, token_offsets[s] - 1, -1):
            if trained_T[j]:
                if n == 0:
                    first = values_T[j]
                n += 1
                total += values_T[j] - first
                squares += (values_T[j] - first) ** 2
                low, high = min(low, values_T[j]), max(high, values_T[j])
        mean = total / n if n else 0.0
        moments_S[s, 0], moments_S[s, 1], moments_S[s, 2] = n, first + mean, squares - total * mean
        moments_S[s, 3], moments_S[s, 4] = low, high


@_compiled
def gae(
    child_E: Ints,
    parent_E: Ints,
    token_offsets: Ints,
    trained_T: Bools,
    values_T: Floats,
    reward_S: Floats,
    token_reward_T: Floats,
    gate_S: Floats,
    kept_S: Floats,
    share_S: Floats,
    discounts: tuple[float, float, float, float],
    down_S: Floats,
    first_S: Floats,
    moments_S: Floats,
) -> None:
    """Write `down_S`, `first_S` and `moments_S` of generalised advantage estimation.

    `down_S`: the part received from children. `first_S`: the advantage at the first trained token, 0 without one.
    `moments_S`: moments of the token advantages, as in `moments_of_steps`; `gae_tokens` computes the advantages again
    when needed. `kept_S`: the part that a step does not pass on. `discounts`: gamma, lam, gamma_token, lam_token.
    `token_reward_T` may be empty: a reward at the last token only. See `creditflow.credit.estimators.gae` for the
    formula.
    """
    gamma, lam, gamma_token, lam_token = discounts
    e = child_E.size - 1
    for s in range(reward_S.size - 1, -1, -1):
        last = reward_S[s] + down_S[s]
        value, advantage = 0.0, 0.0
        n, first, total, squares, low, high = 0, 0.0, 0.0, 0.0, np.inf, -np.inf
        for j in range(token_offsets[s + 1] - 1, token_offsets[s] - 1, -1):
            if not trained_T[j]:
                continue
            delta = gamma_token * value - values_T[j] if n else last - values_T[j]
            if token_reward_T.size:
                delta += token_reward_T[j]
            advantage = delta + gamma_token * lam_token * advantage
            value = values_T[j]
            if n == 0:
                first = advantage
            n += 1
            total += advantage - first
            squares += (advantage - first) ** 2
            low, high = min(low, advantage), max(high, advantage)
        mean = total / n if n else 0.0
        moments_S[s, 0], moments_S[s, 1], moments_S[s, 2] = n, first + mean, squares - total * mean
        moments_S[s, 3], moments_S[s, 4] = low, high
        first_S[s] = advantage
        # A step without trained tokens has no value; it passes on its reward.
        worth = (value + lam * advantage if n else last) - kept_S[s]
        while e >= 0 and child_E[e] == s:
            t = parent_E[e]
            down_S[t] += gamma * share_S[s] * (gate_S[s] * worth)
            e -= 1


@_compiled
def gae_tokens(
    token_offsets: Ints,
    trained_T: Bools,
    values_T: Floats,
    last_S: Floats,
    token_reward_T: Floats,
    gamma_token: float,
    lam_token: float,
    factors: tuple[Floats, Floats, Floats, Floats],
    learns_S: Bools,
    out_T: NDArray[Any],
) -> None:
    """Write the token advantages of `gae`, scaled as by `scale_tokens`.

    `last_S`: the step's reward plus the part received from its children, paid at its last trained token.
    """
    weight_S, baseline_S, shift_S, divisor_S = factors
    for s in range(last_S.size):
        weight, baseline, shift, divisor = weight_S[s], baseline_S[s], shift_S[s], divisor_S[s]
        value, advantage, n = 0.0, 0.0, 0
        for j in range(token_offsets[s + 1] - 1, token_offsets[s] - 1, -1):
            out_T[j] = 0.0
            if not trained_T[j] or not learns_S[s]:
                continue
            delta = gamma_token * value - values_T[j] if n else last_S[s] - values_T[j]
            if token_reward_T.size:
                delta += token_reward_T[j]
            advantage = delta + gamma_token * lam_token * advantage
            value = values_T[j]
            n += 1
            out_T[j] = weight * ((advantage - baseline - shift) / divisor)


@_compiled
def scale_tokens(
    values_T: Floats,
    factors: tuple[Floats, Floats, Floats, Floats],
    token_offsets: Ints,
    trained_T: Bools,
    learns_S: Bools,
    out_T: NDArray[Any],
) -> None:
    """Write `weight * ((value - baseline - shift) / divisor)` at sampled tokens of steps that learn, 0 at the others.

    `factors`: weight, baseline, shift and divisor, each [S].
    """
    weight_S, baseline_S, shift_S, divisor_S = factors
    for s in range(token_offsets.size - 1):
        weight, baseline, shift, divisor = weight_S[s], baseline_S[s], shift_S[s], divisor_S[s]
        for j in range(token_offsets[s], token_offsets[s + 1]):
            if learns_S[s] and trained_T[j]:
                out_T[j] = weight * ((values_T[j] - baseline - shift) / divisor)
            else:
                out_T[j] = 0.0


@_compiled
def spread_over_tokens(values_S: NDArray[Any], token_offsets: Ints, trained_T: Bools, out_T: NDArray[Any]) -> None:
    """Write the step's value at every trained token, 0 at the others."""
    zero = out_T.dtype.type(0)
    for s in range(values_S.size):
        value = values_S[s]
        # Slices are indexed from 0, so the compiler rules out negative indices and vectorizes the loop.
        out, trained = out_T[token_offsets[s] :], trained_T[token_offsets[s] : token_offsets[s + 1]]
        for j in range(trained.size):
            out[j] = value if trained[j] else zero


@_compiled
def discounted_sums(token_offsets: Ints, trained_T: Bools, values_T: Floats, gamma: float) -> Floats:
    """[T] `sum over trained tokens j' >= j of gamma^(trained tokens from j to j') * values_j'`; 0 if not trained."""
    sums_T = np.zeros_like(values_T)
    for s in range(token_offsets.size - 1):
        running = 0.0
        for j in range(token_offsets[s + 1] - 1, token_offsets[s] - 1, -1):
            if trained_T[j]:
                running = values_T[j] + gamma * running
                sums_T[j] = running
    return sums_T


@_compiled
def compact(table_KS: Ints, width_K: Ints, affordable: int, code: Ints) -> int:
    """Write codes of the table's columns, in order without gaps; return their number, -1 if a table of pairs is larger.

    `table_KS`: values from 0, below `width_K`. `code`: zeros.
    """
    n = 1
    for k in range(width_K.size):
        width = width_K[k]
        if n * width > affordable:
            return -1
        rank = np.zeros(n * width, dtype=np.int64)
        for i in range(code.size):
            code[i] = code[i] * width + table_KS[k, i]
            rank[code[i]] = 1
        n = 0
        for j in range(rank.size):
            n += rank[j]
            rank[j] = n - 1
        for i in range(code.size):
            code[i] = rank[code[i]]
    return n


@_compiled
def group_moments(
    code: Ints, trajectory: Ints, values: Floats, n: int
) -> tuple[Ints, Ints, Floats, Ints, Floats, Floats]:
    """The fields of `Cells` for M members of n groups with the codes `code`.

    Trajectories must not decrease, so a member can only belong to the latest cell of its code.
    """
    cell, code_C = np.empty_like(code), np.empty_like(code)
    latest, trajectory_of = np.empty(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
    n_cells = 0
    for i in range(code.size):
        c = code[i]
        if trajectory_of[c] != trajectory[i]:
            trajectory_of[c], latest[c] = trajectory[i], n_cells
            code_C[n_cells] = c
            n_cells += 1
        cell[i] = latest[c]
    steps_C, mean_C, square_C = np.zeros(n_cells), np.zeros(n_cells), np.zeros(n_cells)
    size_G, mean_G, spread_G = np.zeros(n, dtype=np.int64), np.zeros(n), np.zeros(n)
    for i in range(code.size):
        steps_C[cell[i]] += 1
        mean_C[cell[i]] += values[i]
    for c in range(n_cells):
        mean_C[c] /= steps_C[c]
        size_G[code_C[c]] += 1
        mean_G[code_C[c]] += mean_C[c]
    for g in range(n):
        mean_G[g] /= max(size_G[g], 1)
    for i in range(code.size):
        square_C[cell[i]] += (values[i] - mean_G[code[i]]) ** 2
    for c in range(n_cells):
        spread_G[code_C[c]] += square_C[c] / steps_C[c]
    for g in range(n):
        # n/(n-1) times the mean over n trajectories is their sum over n-1.
        spread_G[g] = np.sqrt(spread_G[g] / max(size_G[g] - 1, 1))
    return cell, code_C[:n_cells], mean_C, size_G, mean_G, spread_G


@_compiled
def group_level(
    members: Ints,
    code: Ints,
    values: Floats,
    trajectory: Ints,
    tie: float,
    numbers: tuple[int, int, int],
    places: tuple[Ints, Ints, Ints],
    results: tuple[Floats, Floats, Floats, Bools],
) -> tuple[int, int]:
    """Write the group of each member without one, if it has two trajectories.

    `numbers`: of groups, of the first group, of the level. `places`: group, level and size; `results`: mean, mean of
    the others, spread and tied, each [S]; see `Groups`. Returns how many members have no group yet, and the number of
    groups of one trajectory.
    """
    n, first_group, level = numbers
    group_S, level_S, size_S = places
    mean_S, others_S, spread_S, tied_S = results
    cell, _, mean_C, size_G, mean_G, spread_G = group_moments(code, trajectory, values, n)
    low_G, high_G = np.full(n, np.inf), np.full(n, -np.inf)
    for i in range(members.size):
        low_G[code[i]] = min(low_G[code[i]], values[i])
        high_G[code[i]] = max(high_G[code[i]], values[i])
    missing = 0
    for i in range(members.size):
        s, g = members[i], code[i]
        if group_S[s] >= 0:
            continue
        size = size_G[g]
        if size < 2:
            missing += 1
            continue
        group_S[s], level_S[s], size_S[s] = first_group + g, level, size
        mean_S[s], spread_S[s] = mean_G[g], spread_G[g]
        tied_S[s] = high_G[g] - low_G[g] <= tie * max(1.0, abs(mean_G[g]))
        others_S[s] = (size * mean_G[g] - mean_C[cell[i]]) / (size - 1)
    return missing, (size_G == 1).sum()


@_compiled
def weigh(
    scores_SK: Floats, weights_SK: Floats, status_SK: Ints, ok: int, value_S: Floats, case_S: NDArray[np.uint8]
) -> None:
    """Write each step's weighted mean of scores, NaN unless all are ok, and its case.

    Case 0: no function of positive weight matched; 1: all that matched are ok; 2: at least one is not.
    """
    steps, functions = scores_SK.shape
    for s in range(steps):
        total, weight, case = 0.0, 0.0, 0
        for k in range(functions):
            if weights_SK[s, k] > 0.0 and status_SK[s, k] != 0:
                case = 2 if status_SK[s, k] != ok or case == 2 else 1
                total += weights_SK[s, k] * scores_SK[s, k]
                weight += weights_SK[s, k]
        value_S[s] = total / weight if case == 1 else np.nan
        case_S[s] = case
