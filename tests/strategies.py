"""Random trajectories that use every field, for property tests of columns, tables and files."""

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from creditflow.data import Score, Step, Task, Trajectory, TrajectoryBatch

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
infos = st.dictionaries(st.text(max_size=4), json_values, max_size=2)
unit = st.floats(0, 1)


@st.composite
def scores(draw: st.DrawFn, n_tokens: int) -> Score:
    status = draw(st.sampled_from(["ok", "failed", "timeout"]))
    value = draw(
        st.lists(unit, min_size=n_tokens, max_size=n_tokens).map(tuple) if n_tokens and draw(st.booleans()) else unit
    )
    return Score(value, (-1.0, 3.0), draw(unit), status, draw(st.text(max_size=5)), draw(unit), "v1")


@st.composite
def version_spans(draw: st.DrawFn, first_version: int, n_tokens: int) -> tuple[tuple[int, int], ...]:
    if not n_tokens or draw(st.booleans()):
        return ()
    later = sorted(draw(st.sets(st.integers(1, n_tokens - 1)))) if n_tokens > 1 else []
    return ((0, first_version), *((start, draw(st.integers(0, 9))) for start in later))


@st.composite
def trajectory(draw: st.DrawFn, number: int) -> Trajectory:
    steps = []
    turns: dict[str, int] = {}
    for index in range(draw(st.integers(0, 4))):
        n_tokens = draw(st.integers(0, 3))
        agent = draw(st.sampled_from("abc"))
        names = draw(st.sets(st.sampled_from(["f", "g"])))
        first_version = draw(st.integers(0, 9))
        steps.append(
            Step(
                id=f"{number}/{index}",
                trajectory_id=str(number),
                index=index,
                agent=agent,
                turn=turns.get(agent, 0),
                parents=tuple(sorted(draw(st.sets(st.integers(0, index - 1)) if index else st.just(set())))),
                prompt=draw(st.text(max_size=5)),
                response=draw(st.text(max_size=5)),
                prompt_ids=tuple(draw(st.lists(st.integers(0, 99), max_size=3))),
                response_ids=tuple(draw(st.lists(st.integers(0, 99), min_size=n_tokens, max_size=n_tokens))),
                response_mask=tuple(draw(st.lists(st.integers(0, 1), min_size=n_tokens, max_size=n_tokens))),
                temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
                logprobs=tuple(draw(st.lists(st.floats(-20, 0), min_size=n_tokens, max_size=n_tokens))),
                ref_logprobs=draw(
                    st.just(()) | st.lists(st.floats(-20, 0), min_size=n_tokens, max_size=n_tokens).map(tuple)
                ),
                policy=draw(st.sampled_from(["default", "other"])),
                policy_version=first_version,
                version_spans=draw(version_spans(first_version, n_tokens)),
                scores={name: draw(scores(n_tokens)) for name in sorted(names)},
                stratum=draw(st.none() | st.sampled_from(["right", "wrong"])),
                info=draw(infos),
            )
        )
        turns[agent] = turns.get(agent, 0) + 1
    return Trajectory(
        id=str(number),
        uid=draw(st.sampled_from(["u", "v"])),
        task=Task(draw(st.text(max_size=4)), ({"role": "user", "content": "q"},), draw(json_values), draw(infos)),
        steps=steps,
        answer_steps=tuple(sorted(draw(st.sets(st.sampled_from(range(len(steps)))) if steps else st.just(set())))),
        answer=draw(st.none() | st.text(max_size=4)),
        outcome=draw(st.none() | scores(0)),
        outcomes=draw(st.just({}) | st.dictionaries(st.sampled_from("abc"), scores(0), max_size=2)),
        status=draw(st.sampled_from(["ok", "failed", "truncated"])),
        info=draw(infos),
    )


@st.composite
def trajectories(draw: st.DrawFn) -> list[Trajectory]:
    return [draw(trajectory(k)) for k in range(draw(st.integers(0, 4)))]


def assert_same(one: TrajectoryBatch, other: TrajectoryBatch) -> None:
    """Assert that all columns are equal in value, type and shape."""
    for field in fields(TrajectoryBatch):
        mine, its = getattr(one, field.name), getattr(other, field.name)
        if isinstance(its, np.ndarray):
            np.testing.assert_array_equal(mine, its, err_msg=field.name)
            assert mine.dtype == its.dtype, field.name
            assert mine.shape == its.shape, field.name
        else:
            assert tuple(mine) == tuple(its), field.name
