"""The embedded engine: actor, rollout and reference in one process, on the CPU or one CUDA device."""
