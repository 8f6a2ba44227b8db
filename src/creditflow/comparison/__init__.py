"""Trains the same recipe several ways, every way with the same seeds, each run in a process of its own."""
