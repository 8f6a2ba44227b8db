import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch
from creditflow.engines.local import memory
from tests.engines.test_memory import resident
told = all([memory.suit(int(n), torch.device("cpu")) for n in sys.argv[1:]])
torch.ones(5 << 20)  # freed: from now on glibc keeps what is smaller, unless it was told otherwise
at = torch.ones(1 << 20).data_ptr()
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
before = resident()
some = [torch.ones(4 << 20) for _ in range(16)]
some.clear()
print(told, int(heap[0], 16) <= at < int(heap[1], 16), resident() > before + 200)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ([100_000_000], "True False False"),
        ([1000], "True True True"),
        ([100_000_000, 1000], "True False False"),
        ([1000, 100_000_000], "True False False"),
    ],
)
def test_freed_memory_returns_to_the_system_for_large_models(parameters, expected) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, parameters)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()


RELEASE = """
import torch
from creditflow.engines.local import memory
from tests.engines.test_memory import resident
memory.suit(100_000_000, torch.device("cpu"))
pieces = [torch.ones(1 << 18) for _ in range(512)]  # 1 MiB each, below the size that returns at once
del pieces[:-1]  # the last one holds the end of the heap
before = resident()
memory.release()
print(before - resident() > 400)
"""


def resident() -> int:
    """Resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_release_returns_pieces_between_others() -> None:
    done = subprocess.run([sys.executable, "-c", RELEASE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]
