"""Tests of `open_sandbox`: back ends by name, and no unprotected one without its name."""

import warnings

import pytest

from creditflow.errors import ConfigError
from creditflow.sandbox import (
    BACKENDS,
    SandboxBackend,
    SandboxOptionError,
    SandboxUnavailable,
    UnsafeSandboxWarning,
    open_sandbox,
)


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


@pytest.mark.parametrize(
    ("backend", "options", "said"),
    [
        ("bubblewarp", {}, "did you mean 'bubblewrap'"),
        ("unsafe", {}, "not one of auto, bubblewrap"),
        ("bubblewrap", {"memory": 5}, "did you mean 'memory_mb'"),
        ("auto", {"image": "x"}, "unknown option 'image'"),
        ("bubblewrap", {"wall_s": -1}, "wall_s"),
        ("bubblewrap", {"ro_bind": 5}, "ro_bind: expected a list"),
        ("bubblewrap", {"python": 5}, "python: expected a path"),
        ("bubblewrap", {"cgroup": 5}, "cgroup: expected auto, none or"),
        ("bubblewrap", {"site": "false"}, "site: expected true or false"),
        (None, {}, "expected a name"),
        (["auto"], {}, "expected a name"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(backend, options, said):
    with pytest.raises(SandboxOptionError, match=said) as caught:
        open_sandbox(backend, **options)
    assert isinstance(caught.value, ConfigError)
    assert isinstance(caught.value, ValueError)
