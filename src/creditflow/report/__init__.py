"""Reads finished runs and makes tables, figures and files of them. Trains nothing, and changes no run."""
