"""Sockets of local servers."""

import pytest

from creditflow._utils.loopback import is_proxied


@pytest.mark.parametrize(
    ("environment", "proxied"),
    [
        ({}, False),
        ({"http_proxy": "http://10.0.0.1:3128"}, True),
        ({"ALL_PROXY": "http://10.0.0.1:3128", "no_proxy": "localhost"}, True),
        ({"http_proxy": "http://10.0.0.1:3128", "no_proxy": "localhost,127.0.0.1"}, False),
        ({"https_proxy": "http://10.0.0.1:3128"}, False),
    ],
)
def test_is_proxied_follows_the_environment(
    environment: dict[str, str], proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http", "https", "all", "no"):
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_proxied("127.0.0.1") == proxied
