"""The verification page says what the [[verified]] tables say, and enough of the registry has them."""

import msgspec
import pytest

from portattn.planning.registry import Registry
from portattn.schema.quirk import ProbeRun
from portattn.tools.quirks import pages

KNOWN = Registry.load()


def test_the_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    pages.main(["--verification"])
    assert capsys.readouterr().out == pages.render_verification(KNOWN)


def test_unknown_argument() -> None:
    with pytest.raises(SystemExit, match="--verify' is not --verification"):
        pages.main(["--verify"])


def test_enough_is_verified_on_both_sides() -> None:
    """At least twenty entries were seen on an affected and on an unaffected toolchain, and none is red."""
    assert len(KNOWN.quirks) >= 60
    assert len(pages.on_both_sides(KNOWN)) >= 20
    assert "**" not in pages.render_verification(KNOWN)


def test_shows_what_turned_red() -> None:
    quirk = KNOWN.quirks["rocm-0015-kpack"]
    seen = ProbeRun(
        toolchain="triton==3.4.0", target="rocm:gfx950", level="compiles", off="pass", on="not run",
        date=quirk.verified[0].date,
    )  # fmt: skip
    changed = msgspec.structs.replace(quirk, verified=(seen,))
    text = pages.render_verification(msgspec.structs.replace(KNOWN, quirks={quirk.id: changed}))
    assert f"| `{quirk.id}` | workaround | rocm:gfx950 | **stale** {seen.date} |" in text
    bare = msgspec.structs.replace(quirk, verified=())
    assert "none yet" in pages.render_verification(msgspec.structs.replace(KNOWN, quirks={quirk.id: bare}))
