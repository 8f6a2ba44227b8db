"""Signatures of reward functions that were written for other libraries, one library a file."""
