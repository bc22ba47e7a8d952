"""`python -m portattn`: the same as the `portattn` command."""

from __future__ import annotations

from portattn.cli import main

if __name__ == "__main__":
    main(prog_name="portattn")
