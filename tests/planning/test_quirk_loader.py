"""Quirk files that break the schema: each gives a DataError with the file, the line and the key."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from places import tables

from portattn.errors import DataError
from portattn.planning.quirk_files import check_file, load_quirk
from portattn.planning.registry import Registry, find_backends
from portattn.tools.quirks import audit

TABLES = tables(__file__)

GOOD = TABLES["good"]
BACKENDS = ("cuda", "rocm", "ascend", "cpu")


def write(folder: Path, text: str, name: str = "rocm-0042-planted.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_every_key(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    quirk = load_quirk(path, BACKENDS)
    assert quirk.when.toolchain == {"triton": ">=3.4,<3.5"}
    assert (quirk.when.launch, quirk.effect.kind) == ({"num_stages": ">=3", "kpack": 2}, "launch")
    assert quirk.effect.sets == {"num_stages": 2}
    assert [v.date for v in quirk.verified] == [datetime.date(2026, 11, 21), datetime.date(2026, 11, 22)]
    assert quirk.file == str(path)


BROKEN = TABLES["broken"]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: str(case[4]))
def test_broken_file(tmp_path: Path, case: tuple[Any, ...]) -> None:
    old, new, at, key, complaint = case
    assert old in GOOD, "the case does not change the file"
    # The second [[verified]] table is what "unknown level" is about: replace the last occurrence.
    head, _, tail = GOOD.rpartition(old)
    text = head + new + tail
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=f"^{path}") as caught:
        load_quirk(path, BACKENDS)
    error = caught.value
    assert error.path == str(path)
    assert complaint in error.problem
    if key:
        assert error.problem.startswith(f"key '{key}': ")
    if at:
        named = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith(at) or at in line]
        assert error.line == named[-1]
        assert str(error).startswith(f"{path}:{error.line}: ")


@pytest.mark.parametrize("symptom", ["wrong-result", "slow", "hang", "compile-error"])
def test_what_shows_no_text_needs_no_signature(tmp_path: Path, symptom: str) -> None:
    """And a compile error that was reported without its text, and that no probe shows."""
    text = GOOD.replace('signature = "boom"\n', "").replace('"compile-error"', f'"{symptom}"')
    assert load_quirk(write(tmp_path, text), BACKENDS).evidence.signature == ""


def test_where_it_was_seen(tmp_path: Path) -> None:
    more = 'signature = "boom"\nstage = "ttgir"\nquotes = ["a boom"]\nseen_on = ["triton==3.4.0", "ptxas <13.3"]\n'
    evidence = load_quirk(write(tmp_path, GOOD.replace('signature = "boom"\n', more)), BACKENDS).evidence
    assert (evidence.stage, evidence.quotes, evidence.seen_on) == (
        "ttgir", ("a boom",), ("triton==3.4.0", "ptxas <13.3"),
    )  # fmt: skip


def test_unknown_backend(tmp_path: Path) -> None:
    text = GOOD.replace("rocm-0042", "rcom-0042").replace('backend   = "rocm"', 'backend   = "rcom"')
    text = text.replace(", kpack = 2", "")  # an option of rocm
    path = write(tmp_path, text, "rcom-0042-planted.toml")
    with pytest.raises(DataError, match=r":7: key 'when.backend': unknown backend 'rcom'; known: cuda, rocm"):
        load_quirk(path, BACKENDS)
    assert load_quirk(path).when.backend == "rcom", "an installed package's backend is known by its own name"


def test_an_option_needs_its_backend(tmp_path: Path) -> None:
    """An entry for every backend, or for one that an installed package brings, sets no backend's option."""
    text = GOOD.replace("{ num_stages = 2 }", "{ waves_per_eu = 2 }").replace(", kpack = 2", "")
    anywhere = text.replace("rocm-0042", "any-0042").replace('backend   = "rocm"\n', "")
    with pytest.raises(DataError, match="waves_per_eu is an option of rocm, and not of every backend"):
        load_quirk(write(tmp_path, anywhere, "any-0042-planted.toml"), BACKENDS)
    other = text.replace("rocm-0042", "acme-0042").replace('"rocm"', '"acme"')
    with pytest.raises(DataError, match="waves_per_eu is an option of rocm, and not of acme"):
        load_quirk(write(tmp_path, other, "acme-0042-planted.toml"))
    assert load_quirk(write(tmp_path, text), BACKENDS).effect.sets == {"waves_per_eu": 2}


def test_open_range_needs_last_seen_too(tmp_path: Path) -> None:
    _, errors = check_file(write(tmp_path, GOOD.replace('">=3.4,<3.5"', '">=3.4"')))
    assert [e.problem.split(":")[0] for e in errors] == ["key 'evidence.review_by'", "key 'evidence.last_seen'"]


def test_probes_and_tombstones(tmp_path: Path) -> None:
    """The forms of a probe; a tombstone needs no review date, and is kept apart by the registry."""
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "x.py").write_text("")
    (tmp_path / "rocm").mkdir()
    for probe in ("probes/x.py", "probes/x.py:second", "plan: attention --target rocm:gfx942", "none: for a reason"):
        path = write(tmp_path / "rocm", GOOD.replace("none: planted by a test", probe))
        assert load_quirk(path, BACKENDS).evidence.probe == probe
    tombstone = (
        '[retired]\ndate = 2026-11-21\nreason = "fixed"\nfixed_in = "triton==3.9.0"\nreplaced_by = "rocm-0043-x"\n'
    )
    text = GOOD.replace(">=3.4,<3.5", ">=3.4") + tombstone
    retired = load_quirk(write(tmp_path / "rocm", text), BACKENDS).retired
    assert (retired.fixed_in, retired.replaced_by) == ("triton==3.9.0", "rocm-0043-x")
    known = Registry.read(find_backends(), tmp_path)
    assert (list(known.quirks), list(known.retired)) == ([], ["rocm-0042-planted"])


def test_limit_needs_neither(tmp_path: Path) -> None:
    text = GOOD.replace('">=3.4,<3.5"', '">=3.4"').replace('"workaround"', '"limit"')
    assert load_quirk(write(tmp_path, text)).kind == "limit"


def test_all_complaints_of_a_file(tmp_path: Path) -> None:
    text = GOOD.replace('"planted"', '""').replace("<3.5", "<three").replace('load = "pointer"', 'load = "tma"')
    quirk, errors = check_file(write(tmp_path, text))
    assert quirk is not None
    assert [(e.line, e.problem.split(":")[0]) for e in errors] == [
        (2, "key 'title'"), (9, "key 'when.toolchain.triton'"), (12, "key 'when.lowering.load'"),
    ]  # fmt: skip


def test_complaints_about_evidence_do_not_hide_each_other(tmp_path: Path) -> None:
    text = GOOD.replace('source    = "planted by a test"', 'source = ""\nlast_seen = "triton 3.4"\nstand_in = "x==1"')
    _, errors = check_file(write(tmp_path, text), BACKENDS)
    told = [str(error).partition("key ")[2] for error in errors]
    assert [complaint.partition(":")[0] for complaint in told] == [
        "'evidence.source'", "'evidence.last_seen'", "'evidence.stand_in'",
    ]  # fmt: skip


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "rocm-0042-planted.toml"
    path.write_bytes(GOOD.encode() + b"# caf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8") as caught:
        load_quirk(path)
    assert caught.value.line == len(GOOD.splitlines()) + 1


def test_hidden_files_are_no_quirks(tmp_path: Path) -> None:
    (tmp_path / "rocm").mkdir()
    write(tmp_path / "rocm", GOOD)
    write(tmp_path / "rocm", "", ".rocm-0042-planted.toml")
    (tmp_path / "rocm" / ".#rocm-0042-planted.toml").symlink_to("nobody@nowhere.1")
    assert list(Registry.read(find_backends(), tmp_path).quirks) == ["rocm-0042-planted"]
    assert not [finding for finding in audit.run(tmp_path, datetime.date(2026, 11, 24)) if "/." in finding.file]
