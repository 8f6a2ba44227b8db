from tests.credit.walk import walk_of_assign


def test_assign_is_a_short_walk() -> None:
    seen = walk_of_assign()
    assert len(seen.stops) <= 25
    assert seen.returns <= 5
    assert len(seen.records) <= 8
