import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from creditflow.engines.local import memory
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) >> 10
told = all([memory.suit(int(n), torch.device("cpu")) for n in sys.argv[1:]])
torch.ones(5 << 20)  # freed: from now on glibc keeps what is smaller, unless it was told otherwise
at = torch.ones(1 << 20).data_ptr()
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
before = resident()
some = [torch.ones(4 << 20) for _ in range(16)]
some.clear()
print(told, int(heap[0], 16) <= at < int(heap[1], 16), resident() > before + 200)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
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
