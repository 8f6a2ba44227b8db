import platform
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from creditflow.engines.local import memory
said = memory.keep_little(int(sys.argv[1]), torch.device("cpu"))
torch.ones(5 << 20)  # freed: from now on glibc keeps what is smaller, unless it was told otherwise
at = torch.ones(1 << 20).data_ptr()
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0].split("-")
print(said, int(heap[0], 16) <= at < int(heap[1], 16))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
@pytest.mark.parametrize(("parameters", "expected"), [(100_000_000, "True False"), (1000, "False True")])
def test_large_tensors_of_large_models_are_given_back_and_small_ones_kept(parameters, expected) -> None:
    command = [sys.executable, "-c", PROGRAM, str(parameters)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected.split()
