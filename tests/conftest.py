"""Which tests are made in one process, where `pytest -n` has several: those of a file, and all that start Ray."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent
RAY = (HERE / "engines" / "verl", HERE / "reward" / "test_ray_backend.py")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        of_ray = any(item.path.is_relative_to(place) for place in RAY)
        item.add_marker(pytest.mark.xdist_group("ray" if of_ray else str(item.path.relative_to(HERE))))
