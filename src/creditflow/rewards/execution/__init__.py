"""Execution of reward functions: in this process, in worker processes, on Ray."""
