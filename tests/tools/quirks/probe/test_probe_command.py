"""`portattn quirks probe` and what `audit` says afterwards: exit statuses, the table, recording."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
from planted_probe import BOOM, ID, arms_of, child, plant

from portattn.cli import main
from portattn.planning.quirk_files import load_quirk
from portattn.schema.toolchain import Toolchain
from portattn.tools.quirks import audit

Probe = Callable[..., click.testing.Result]
HERE = Toolchain(distribution="triton", version="3.6.0")


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """probe("--record", off=BOOM): run the command on the planted folder with a planted compiler, triton==3.6.0."""
    monkeypatch.setattr("portattn.tools.quirks.probe.installed_toolchain", lambda: HERE)
    monkeypatch.setattr("portattn.schema.toolchain.installed_toolchain", lambda: HERE)

    def call(*arguments: str, arms: dict[str, str] | None = None, exits: int | None = None) -> click.testing.Result:
        monkeypatch.setattr("portattn.tools.lab.worker", lambda *_, **__: child(tmp_path, **(arms or {})))
        words = ["quirks", "probe", "--folder", str(tmp_path), *arguments]
        result = click.testing.CliRunner().invoke(main, words, prog_name="portattn")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert exits in (None, result.exit_code), result.output
        return result

    return call


def findings(folder: Path) -> list[str]:
    return [finding.message for finding in audit.run(folder) if finding.severity == "error"]


def test_confirmed_is_green(tmp_path: Path, probe: Probe) -> None:
    plant(tmp_path)
    result = probe(arms={"off": BOOM}, exits=0)
    row = result.stdout.splitlines()[1].split()
    assert row == [ID, "rocm:gfx942", "triton==3.6.0", "fail:signature", "pass", "confirmed"]
    assert "1 probe: 1 confirmed" in result.stdout
    assert "[1/1] confirmed" in result.stderr
    result = probe("--all-toolchains", arms={"off": BOOM}, exits=0)
    assert "triton==3.9.0 is not here: `portattn lab create triton==3.9.0` makes it" in result.stdout
    assert "1 probe: 1 confirmed" in result.stdout


def test_probes_that_cannot_run_are_status_3(tmp_path: Path, probe: Probe) -> None:
    """Also beside nothing at all; a probe that ran beside one that could not is enough."""
    plant(tmp_path, more='needs = "rocm:gfx942"\n')
    result = probe(exits=3)
    assert "1 probe: 1 unverified" in result.stdout
    assert "portattn: nothing was probed: needs rocm:gfx942" in result.stderr
    elsewhere = probe("--target", "ascend:ascend910b2", exits=3)
    assert "portattn: nothing was probed: no entry has a probe there" in elsewhere.stderr


@pytest.mark.parametrize(
    ("range_", "arms", "verdict"),
    [
        (">=3.4,<3.9", {"off": "pass"}, "stale"), (">=3.4,<3.9", {"off": "ValueError:other"}, "changed"),
        (">=3.4,<3.9", {"off": BOOM, "on": "crash"}, "ineffective"), (">=3.7,<3.9", {"off": BOOM}, "too narrow"),
    ],
)  # fmt: skip
def test_red_here_and_in_the_audit(tmp_path, probe, range_, arms, verdict):
    plant(tmp_path, range_=range_)
    result = probe("--record", arms=arms, exits=1)
    assert f"{verdict}: {ID} on triton==3.6.0" in result.stdout
    assert "1 table recorded" in result.stdout
    (said,) = findings(tmp_path)
    assert f"{ID} is {verdict} on triton==3.6.0 (rocm:gfx942" in said
    for text in (result.stdout, said):
        assert ('\n+toolchain = { triton = "' in text) is (verdict in ("stale", "too narrow"))


def test_a_corrected_range_is_green_again(tmp_path: Path, probe: Probe) -> None:
    """What was seen is recorded, and judged against the range that the entry has now."""
    quirk = plant(tmp_path, range_=">=3.4,<3.9")
    probe("--record", arms={"off": "pass"})
    assert findings(tmp_path)
    path = Path(quirk.file)
    path.write_text(path.read_text().replace(">=3.4,<3.9", ">=3.4,<3.6.0"))
    assert findings(tmp_path) == []


def test_never_probed_is_a_warning_and_a_broken_probe_red_and_not_recorded(tmp_path: Path, probe: Probe) -> None:
    plant(tmp_path)
    assert "0 tables recorded" in probe("--record", arms={"control": "ValueError:no compiler"}, exits=1).stdout
    assert findings(tmp_path) == []
    said = audit.run(tmp_path)
    assert [f.severity for f in said] == ["warning"]
    assert f"{ID} was never probed" in said[0].message
    probe("--record", arms={"off": BOOM})
    assert audit.run(tmp_path) == []


def test_json(tmp_path: Path, probe: Probe) -> None:
    plant(tmp_path)
    result = probe("--json", arms={"off": BOOM, "on": BOOM})
    found: dict[str, Any] = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (found["red"], found["recorded"], found["missing"], found["interrupted"]) == (1, 0, [], False)
    first = found["results"][0]
    assert (first["quirk"], first["verdict"], first["off"]["matched"]) == (ID, "ineffective", True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["rocm-0999"], "ID is 'rocm-0999', but no quirk has this id"), (["--jobs", "0"], "--jobs"),
        (["--toolchain", "triton==3.5.0"], "triton==3.5.0: its lab environment is not there; `portattn lab create"),
        (["--toolchain", "3.5"], "toolchain is '3.5'"), (["--target", "rocm:gfx1"], "arch is 'gfx1'"),
        (["--toolchain", "triton==3.6.0", "--all-toolchains"], "goes without --all-toolchains"),
        (["rocm-0901", "--target", "rocm:gfx950"], "is 'rocm:gfx950', but rocm-0901-planted concerns rocm:gfx942"),
    ],
)  # fmt: skip
def test_bad_input(tmp_path: Path, probe: Probe, arguments: list[str], complaint: str) -> None:
    plant(tmp_path)
    assert complaint in probe(*arguments, exits=2).stderr
    assert not (tmp_path / "arms").exists() or arms_of(tmp_path) == []


def test_retired_id(tmp_path: Path, probe: Probe) -> None:
    plant(tmp_path, more='\n[retired]\ndate = 2026-11-01\nreason = "fixed upstream"\nfixed_in = "triton==3.9.0"\n')
    assert "it was retired on 2026-11-01: fixed upstream" in probe("rocm-0901", exits=2).stderr
    assert "0 probes: none" in probe().stdout, "what is retired is probed no more"


def test_only_what_was_asked_for(tmp_path: Path, probe: Probe) -> None:
    quirk = plant(tmp_path)
    result = probe("rocm-0901", "--target", "rocm:gfx942", "--toolchain", "triton==3.6.0", arms={"off": BOOM})
    assert "1 probe: 1 confirmed" in result.stdout
    assert load_quirk(Path(quirk.file)).verified == (), "nothing is recorded unless it is asked for"
    assert "0 probes: none" in probe("--target", "rocm:gfx950").stdout
