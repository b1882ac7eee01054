"""`python -m headloom` is the `headloom` command."""

from headloom.cli.app import main

if __name__ == "__main__":
    main()
