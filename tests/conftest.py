"""Which tests are made in one process, where `pytest -n` has several: those of a file, and all that start Ray."""

from typing import Any

import pytest

RAY = ("tests/engines/verl/", "tests/reward/test_ray_backend.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Not by marks (`--dist loadgroup`): xdist 3.8 reads none with pytest 9.2, whose ids it cannot write.
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return "ray" if file.startswith(RAY) else file

    return ByFile(config, log)
