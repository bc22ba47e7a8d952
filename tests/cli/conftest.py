"""Calling the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click.testing
import pytest
from planted import planted as planted

from portattn.cli import main


class Called:
    """What a call left: its exit status, standard output, standard error, and output as JSON."""

    def __init__(self, result: click.testing.Result) -> None:
        self.status, self.out, self.err = result.exit_code, result.stdout, result.stderr

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def portattn() -> Callable[..., Called]:
    """portattn("plan", "attention", …): run a command; an exception that no user should see fails the test."""

    def call(*arguments: str) -> Called:
        result = click.testing.CliRunner().invoke(main, list(arguments), prog_name="portattn")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Called(result)

    return call
