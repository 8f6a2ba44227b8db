"""Ray's worker launcher: requests a forked worker (see `forks.py`) and lives as long as it. Standard library only.

Without a fork server, it becomes the worker itself, which is slower but otherwise the same.
"""

import json
import os
import socket
import sys
from pathlib import Path

path, *argv = sys.argv[1:]
asked = {"argv": argv, "environ": dict(os.environ), "cwd": str(Path.cwd())}
connection = socket.socket(socket.AF_UNIX)
try:
    connection.connect(path)
    socket.send_fds(connection, [b"f"], [0, 1, 2])
    connection.sendall(json.dumps(asked).encode())
    connection.shutdown(socket.SHUT_WR)
    forked = connection.recv(1) != b""
except OSError as error:
    print(f"a worker starts without a fork: {error}", file=sys.stderr)
    forked = False
if not forked:
    os.execv(sys.executable, [sys.executable, *argv])
connection.recv(1)
