"""examples/ci/portattn.yml is a workflow, and its commands exist and take the options that it gives."""

import re
import shlex
from typing import Any

import click
import pytest
import yaml
from places import ROOT

from portattn.cli import main

FILE = ROOT / "examples" / "ci" / "portattn.yml"


def workflow() -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow()["jobs"].values() for step in job["steps"]]


def commands() -> list[list[str]]:
    """The words of each `portattn` command, its variables as the workflow's environment has them."""
    made = workflow()
    inputs = made[True]["workflow_dispatch"]["inputs"]  # YAML 1.1 reads `on` as true
    values = {name: re.sub(r"\$\{\{ inputs\.(\w+) \|\| .*? \}\}", lambda m: inputs[m[1]]["default"], str(text))
              for name, text in made["env"].items()}  # fmt: skip
    lines = [line for step in steps() for line in step.get("run", "").splitlines() if line.startswith("portattn ")]
    return [[re.sub(r"^\$(\w+)$", lambda m: values[m[1]], word) for word in shlex.split(line)[1:]] for line in lines]


def parsed(words: list[str]) -> click.Context:
    """The command that the words mean, with its options read. Raises click.UsageError on one that it has not."""
    context = click.Context(main, info_name="portattn")
    command = main.get_command(context, words[0])
    assert command is not None, f"no command {words[0]}"
    return command.make_context(words[0], list(words[1:]), parent=context)


def test_it_is_a_workflow_of_two_jobs():
    made = workflow()
    assert set(made) == {"name", True, "permissions", "env", "jobs"}
    assert (made["permissions"], set(made["jobs"])) == ({"contents": "read"}, {"plans", "cells"})
    assert all(job["runs-on"] and job["timeout-minutes"] for job in made["jobs"].values())
    for step in steps():
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "actions/x@v1"))


def test_its_commands_take_their_options():
    found = commands()
    assert [words[0] for words in found] == ["ci", "ci"]
    assert [parsed(words).params["compiled"] for words in found] == [False, True]
    with pytest.raises(click.UsageError, match="No such option"):
        parsed([*found[0], "--no-such-option"])


def test_what_it_says_by_plans_is_what_the_command_says(portattn_cli):
    words = commands()[0]
    assert portattn_cli(words).exit_code == 0
    assert "triton==3.6.0 -> triton==3.9.0 on cuda:sm_90, rocm:gfx942" in portattn_cli(words).output


@pytest.fixture
def portattn_cli(monkeypatch):
    from click.testing import CliRunner

    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return lambda words: CliRunner().invoke(main, words)


def test_the_pages_link_it():
    assert "[ci/portattn.yml](ci/portattn.yml)" in (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert "(../examples/ci/portattn.yml)" in (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
