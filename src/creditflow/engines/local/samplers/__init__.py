"""Samplers in a process of their own, in place of the built-in one."""
