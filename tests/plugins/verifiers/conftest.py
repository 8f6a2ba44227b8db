"""The test's own tasksets, importable here and in the processes of their tool servers."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plugins.verifiers.model import save_model

TASKSETS = Path(__file__).parent / "tasksets"


@pytest.fixture(scope="session", autouse=True)
def tasksets() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TASKSETS))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TASKSETS), os.environ.get("PYTHONPATH")])))
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "words")
