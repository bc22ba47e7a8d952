"""docs/quirk-verification.md says what the [[verified]] tables say, and enough of the registry has them."""

from __future__ import annotations

import msgspec
import pytest
from places import DOCS

from portattn.planning.registry import Registry
from portattn.schema.quirk import ProbeRun
from portattn.tools.quirks import pages, verification

PAGE = DOCS / "quirk-verification.md"
KNOWN = Registry.load()


def test_page_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    pages.main(["--verification"])
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8"), (
        "run: python -m portattn.tools.quirks.pages --verification > docs/quirk-verification.md"
    )


def test_unknown_argument() -> None:
    with pytest.raises(SystemExit, match="--verify' is not --verification"):
        pages.main(["--verify"])


def test_enough_is_verified_on_both_sides() -> None:
    """At least twenty entries were seen on an affected and on an unaffected toolchain, and none is red."""
    assert len(KNOWN.quirks) >= 60
    assert len(verification.on_both_sides(KNOWN)) >= 20
    assert "**" not in verification.render(KNOWN)


def test_shows_what_turned_red() -> None:
    quirk = KNOWN.quirks["rocm-0015-kpack"]
    seen = ProbeRun(
        toolchain="triton==3.4.0", target="rocm:gfx950", level="compiles", off="pass", on="not run",
        date=quirk.verified[0].date,
    )  # fmt: skip
    changed = msgspec.structs.replace(quirk, verified=(seen,))
    text = verification.render(msgspec.structs.replace(KNOWN, quirks={quirk.id: changed}))
    assert f"| `{quirk.id}` | workaround | rocm:gfx950 | **stale** {seen.date} |" in text
    bare = msgspec.structs.replace(quirk, verified=())
    assert "none yet" in verification.render(msgspec.structs.replace(KNOWN, quirks={quirk.id: bare}))
