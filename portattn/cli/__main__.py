"""`python -m portattn.cli`: the same as the `portattn` command."""

from portattn.cli import main

if __name__ == "__main__":
    main(prog_name="portattn")
