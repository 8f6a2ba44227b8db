"""Engines that sample and train. Control flow, rewards and credit are the same on each."""

from __future__ import annotations

import os

# MKL chooses a kernel for a product by the memory alignment of its operands, and kernels differ in the last bits. Two
# processes, or a run and its resumption, would diverge. MKL reads this at its first product; no measurable cost.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
