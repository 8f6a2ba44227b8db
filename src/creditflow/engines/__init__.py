"""Engines: what computes. The control flow, the rewards and the credit are the same on each."""
