from collections.abc import Iterator

import pytest

from tests.reports.browser import disconnect


@pytest.fixture(scope="module", autouse=True)
def connection_ends_with_the_module() -> Iterator[None]:
    yield
    disconnect()
