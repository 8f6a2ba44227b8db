"""Signatures of reward functions that were written for other libraries."""
