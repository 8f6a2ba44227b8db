"""Tests of `open_sandbox`: back ends by name, and no unprotected one without its name."""

import warnings

import pytest

from creditflow.errors import ConfigError
from creditflow.sandbox import BACKENDS, Limits, SandboxBackend, SandboxUnavailable, UnsafeSandboxWarning, open_sandbox


def test_unsafe_back_end_warns_only_when_it_is_opened():
    with pytest.warns(UnsafeSandboxWarning, match="all your rights"):
        box = open_sandbox("unsafe_subprocess")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert box.run(["true"]).ok


def test_auto_never_falls_back_to_running_unprotected(monkeypatch):
    def missing(limits=None):
        raise SandboxUnavailable("no bwrap; install it")

    monkeypatch.setitem(BACKENDS._entries, "bubblewrap", SandboxBackend("bubblewrap", missing))
    with pytest.raises(SandboxUnavailable, match="install"):
        open_sandbox()


def test_back_end_with_keywords_of_its_own_opens(monkeypatch):
    def create(limits, *, size=1, **kwargs):
        return limits, size, kwargs

    monkeypatch.setitem(BACKENDS._entries, "own", SandboxBackend("own", create))
    assert open_sandbox("own", size=2, files=5) == (Limits(files=5), 2, {})


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("bubblewarp", {}, "did you mean 'bubblewrap'"),
        ("unsafe", {}, "expected one of bubblewrap"),
        ("bubblewrap", {"memory": 5}, "did you mean 'bubblewrap.memory_mb'"),
        ("auto", {"image": "x"}, "unknown key 'bubblewrap.image'"),
        ("bubblewrap", {"wall_s": -1}, "wall_s: expected a number above 0 and of at most 1000000, got -1"),
        ("bubblewrap", {"ro_bind": 5}, "ro_bind: expected a list"),
        ("bubblewrap", {"python": 5}, "python: expected a text"),
        ("bubblewrap", {"site": "false"}, "site: expected true or false"),
        ("container", {}, "container.image: expected a name, got nothing"),
        (None, {}, "expected one of"),
        (["auto"], {}, "expected one of"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(backend, options, said):
    with pytest.raises(ConfigError, match=said):
        open_sandbox(backend, **options)
