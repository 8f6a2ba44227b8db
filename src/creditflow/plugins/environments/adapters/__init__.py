"""Adapters of libraries of environments, one a file."""
