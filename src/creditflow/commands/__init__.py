"""One module a command: what it does with what the command line gave it. Imported when the command is called."""
