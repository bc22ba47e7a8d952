"""Options that are numbers: what is none, and what no clock takes, is refused before anything is touched."""

import click
import pytest
from handmade import make_cell, make_run

from portattn.cli import main
from portattn.tools.matrix import results

# Larger than what poll(2) waits for, and no numbers.
REFUSED = ("nan", "inf", "-inf", "3e6")


def floats(command, path=("portattn",)):
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from floats(command.get_command(ctx, name), (*path, name))
    for option in command.params:
        if isinstance(option.type, (click.FloatRange, click.types.FloatParamType)):
            yield (*path, option.opts[0]), option


OPTIONS = {" ".join(path): option for path, option in floats(main)}


def test_these_are_all():
    names = set(OPTIONS)
    assert {"portattn matrix run --seconds", "portattn ci --seconds", "portattn tune --budget"} <= names
    assert len(names) >= 9


@pytest.mark.parametrize("name", OPTIONS)
def test_what_is_no_number_of_the_range_is_refused(name):
    option = OPTIONS[name]
    for text in REFUSED:
        with pytest.raises(click.BadParameter):
            option.type.convert(text, option, None)
    least = option.type.min or 0.5
    assert option.type.convert(str(least), option, None) == least


@pytest.mark.parametrize("text", REFUSED)
def test_earlier_results_stay_where_they_are(portattn, tmp_path, text):
    made, cells = make_run([make_cell()])
    with results.Results(tmp_path) as file:
        file.replace(made, cells)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    called = portattn("matrix", "run", "--out", str(tmp_path), "--targets", "sm_90", "--seconds", text, exits=2)
    assert "--seconds" in called.err
    assert len(called.err.splitlines()) == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
