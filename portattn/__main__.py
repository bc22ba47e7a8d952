"""Run `python -m portattn` and the `portattn` command; name the extra to install if its packages are missing."""

from __future__ import annotations

import sys

from portattn.source_tree import install_extra

PACKAGES = ("click", "rich", "jinja2", "tomlkit")  # of the extra `tools`
BAD_INPUT = 2  # as in cli/__init__.py, which needs click


def main() -> None:
    try:
        from portattn.cli import main as command

        command(prog_name="portattn")
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        print(f"portattn: the command line needs {error.name}: {install_extra('tools')}", file=sys.stderr)
        sys.exit(BAD_INPUT)


if __name__ == "__main__":
    main()
