"""Bridges to other trainers, one a file. Each imports its trainer, and is imported by name only."""
