"""Implementations of the commands, one module per command, imported when the command is called."""
