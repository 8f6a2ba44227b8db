"""The embedded engine: actor, rollout and reference in one process, on the CPU or one CUDA device."""

from __future__ import annotations

import os

# MKL chooses how it computes a product by where its operands lie in memory, and another way has other last bits: two
# processes, or a run and the one that goes on with it, would part. Read at its first product; costs nothing measurable.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
