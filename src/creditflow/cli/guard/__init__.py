"""Test guard rules, the monitors of a run."""
