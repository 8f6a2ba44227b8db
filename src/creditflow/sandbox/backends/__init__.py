"""Back ends of the sandbox, one a file. A module here that defines `BACKEND` is found by itself."""
