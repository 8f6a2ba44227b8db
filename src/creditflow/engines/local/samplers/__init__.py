"""Samplers in separate processes, in place of the built-in one."""
