"""Benchmarks: each module measures one part and compares it with a target."""
