"""Tests of the unprotected back end: it removes the folders of its programs."""

import tempfile
import warnings

import pytest

from creditflow.sandbox import UnsafeSandboxWarning, open_sandbox


@pytest.fixture
def box(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnsafeSandboxWarning)
        return open_sandbox("unsafe_subprocess", wall_s=20)


def test_deep_folder_is_removed(box, tmp_path):
    # Its path is longer than the system's limit of 4096 bytes.
    assert box.run(["python", "-c", "import os\nfor _ in range(2100): os.mkdir('d'); os.chdir('d')"]).ok
    assert list(tmp_path.iterdir()) == []
