import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, torch
from creditflow.engines.local import memory
from tests.engines.test_memory import resident

def freed(*parameters):
    told = all([memory.suit(n, torch.device("cpu")) for n in parameters])
    torch.ones(5 << 20)  # freed: from now on glibc keeps what is smaller, unless it was told otherwise
    at = torch.ones(1 << 20).data_ptr()
    heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
    before = resident()
    some = [torch.ones(4 << 20) for _ in range(16)]
    some.clear()
    print(*parameters, told, int(heap[0], 16) <= at < int(heap[1], 16), resident() > before + 200, flush=True)

def released(parameters):
    memory.suit(parameters, torch.device("cpu"))
    pieces = [torch.ones(1 << 18) for _ in range(512)]  # 1 MiB each, below the size that returns at once
    del pieces[:-1]  # the last one holds the end of the heap
    before = resident()
    memory.release()
    print("released", before - resident() > 400, flush=True)

for test, *parameters in (freed, 1000), (freed, 100_000_000, 1000), (freed, 1000, 100_000_000), (released, 100_000_000):
    if (child := os.fork()) == 0:  # settings belong to a process
        test(*parameters)
        os._exit(0)
    os.waitpid(child, 0)
"""


def resident() -> int:
    """Resident memory of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) >> 10


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the settings")
def test_memory_of_large_models_returns_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "1000 True True True",
        "100000000 1000 True False False",
        "1000 100000000 True False False",
        "released True",
    ]
