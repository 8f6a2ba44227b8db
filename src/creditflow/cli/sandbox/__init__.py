"""Test the sandbox that runs untrusted code.

Example: creditflow sandbox check --backend bubblewrap
"""

EXTRA = "sandbox"
