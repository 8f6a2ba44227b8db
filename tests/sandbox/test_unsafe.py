"""Tests of the unprotected back end: it removes the folders of its programs."""

import tempfile
import warnings
from pathlib import Path

import pytest

from creditflow.sandbox import UnsafeSandboxWarning, open_sandbox


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)
        return open_sandbox("unsafe_subprocess", wall_s=20)


# Its path is longer than the system's limit of 4096 bytes.
DEEP = "import os\nfor _ in range(2100): os.mkdir('d'); os.chdir('d')"


@pytest.mark.parametrize(
    "code",
    [
        f"import os; here = os.getcwd()\n{DEEP}\nos.chmod('.', 0); os.rename(here, here + '-moved')",
        "import os; os.makedirs('a/b'); os.chmod('a/b', 0); os.chmod('a', 0); os.chmod('.', 0)",
        "import os; os.rmdir(os.getcwd())",
        "import os; os.rename(os.getcwd(), os.getcwd() + ' (deleted)')",
    ],
)
def test_folder_is_removed_even_if_deep_locked_or_moved(code, box, tmp_path):
    assert box.run(["python", "-c", code]).ok
    assert list(tmp_path.iterdir()) == []


def test_replacement_of_the_folder_is_not_removed(box, tmp_path):
    code = "import os; here = os.getcwd(); os.rename(here, here + 'x'); os.mkdir(here); open(here + '/kept', 'w')"
    assert box.run(["python", "-c", code]).ok
    (left,) = tmp_path.iterdir()
    assert [path.name for path in Path(left).iterdir()] == ["kept"]
