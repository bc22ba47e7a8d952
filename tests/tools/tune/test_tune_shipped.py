"""Shipped tuning says of every entry whether it was timed, and where and with what."""

import msgspec
import pytest
from faketunable import TIMED

from portattn.errors import DataError
from portattn.planning.data_files import load_tuning
from portattn.planning.registry import Registry
from portattn.schema.ops import EVERY_SCORE
from portattn.schema.tuning import Source

SHIPPED = [
    (f"{backend}/{name}", tuning)
    for backend, found in Registry.load().tunings.items()
    for name, tuning in found.items()
]


@pytest.mark.parametrize(("name", "tuning"), SHIPPED, ids=[name for name, _ in SHIPPED])
def test_every_entry_is_measured_with_provenance_or_marked_and_excludes_nothing_that_it_asks_for(name, tuning):
    """`featured` is whatever is done to every score, a window too."""
    for entry in tuning.entry:
        source = tuning.source(entry)
        assert source.toolchain.count("==") == 1, entry
        assert source.date.year >= 2025
        if tuning.measured(entry):
            assert "not present" not in source.chip, (
                f"{name}: {entry.kernel} {entry.when} claims a chip that was not there"
            )
            assert source.chip
        if isinstance(source, Source) and source.measured:
            assert source.figures
            assert all(figure.us and figure.error is not None for figure in source.figures)
        if isinstance(source, Source) and not source.measured:
            assert not any(figure.us for figure in source.figures)
        asked = set(entry.when)
        both = [word for word in asked if f"!{word}" in asked]
        both += [word for word in EVERY_SCORE if word in asked and "!featured" in asked]
        assert both == [], f"{name}: {entry.kernel} {entry.when} is never used"
    assert not (tuning.provenance.measured and "not present" in tuning.provenance.chip), name


ENTRY = f"""{TIMED}
[[entry]]
kernel = "dense_forward"
launch = {{ block_m = 64 }}

[entry.provenance]
chip = "NVIDIA H200"
toolchain = "triton==3.6.0"
date = 2026-11-02
measured = true
"""


def test_a_claim_to_have_measured_needs_figures(tmp_path):
    path = tmp_path / "sm_90.toml"
    path.write_text(ENTRY)
    with pytest.raises(DataError, match="without figures"):
        load_tuning(path, "cuda")
    path.write_text(ENTRY + 'figures = [ { problem = "p", us = 3.0, error = 0.0, budget = 1.0 } ]\n')
    tuning = load_tuning(path, "cuda")
    assert tuning.measured(tuning.entry[0])
    assert not tuning.measured(msgspec.structs.replace(tuning.entry[0], timed=False))
    path.write_text(ENTRY.replace("measured = true", "measured = false"))
    assert not (tuning := load_tuning(path, "cuda")).measured(tuning.entry[0])
