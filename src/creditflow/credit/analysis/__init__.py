"""Analyses of assignments: explanation, findings, metrics, differences."""
