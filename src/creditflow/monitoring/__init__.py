"""Metrics of training steps and evaluations, and the guard rules on them. Reads a run without changing it."""
