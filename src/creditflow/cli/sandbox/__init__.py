"""Test the sandbox that runs untrusted code."""

EXTRA = "sandbox"
