"""`python -m creditflow`, the same as the command `creditflow`."""

from creditflow.cli import main

if __name__ == "__main__":
    main()
