"""An entry that says more than anybody has seen is an error of the audit: its signature, its range, its tracker."""

import datetime
from pathlib import Path

import msgspec
import pytest
from quirk_files import plant

from portattn.planning.quirk_files import load_quirk
from portattn.planning.registry import Registry
from portattn.schema.quirk import ProbeRun
from portattn.tools.quirks import audit
from portattn.tools.quirks.audit import new_location
from portattn.tools.quirks.failure_log import patterns

TODAY = datetime.date(2026, 11, 21)
OPEN = 'last_seen = "triton==3.6.0"\nreview_by = 2027-06-01'


def errors(
    tmp_path: Path, signature: str = '"boom"', quotes: str = '["boom"]', more: str = OPEN, when: str = ""
) -> list[str]:
    path = plant(tmp_path, "cuda-0901-x", 'note = "x"', when, evidence=more)
    text = path.read_text().replace('signature = "boom"', f"signature = {signature}")
    path.write_text(text.replace('quotes    = ["boom"]', f"quotes    = {quotes}"))
    quirk = load_quirk(path)
    return [text for _, text in audit.lacks(quirk)]


def test_the_audit_says_so_at_the_key(tmp_path) -> None:
    assert errors(tmp_path, quotes="[]", when='toolchain = { triton = ">=3.6,<3.9" }')
    signature, range_ = sorted(audit.run(tmp_path, TODAY), key=lambda finding: finding.line or 0, reverse=True)
    lines = (tmp_path / "cuda" / "cuda-0901-x.toml").read_text().splitlines()
    assert (signature.severity, range_.severity) == ("error", "error")
    assert "signature" in lines[(signature.line or 0) - 1]
    assert "toolchain" in lines[(range_.line or 0) - 1]


def test_what_was_seen_is_evidence(tmp_path) -> None:
    assert errors(tmp_path) == []
    assert errors(tmp_path, '"boom|bang"', '["boom", "a bang"]') == []
    assert errors(tmp_path, '"b(o|a)om"', '["boom"]') == [], "only a bar at the top divides"


@pytest.mark.parametrize(
    ("signature", "quotes", "complaint"),
    [
        ('"boom"', "[]", "'boom' is in nothing that was seen"),
        ('"boom|bang"', '["boom"]', "'bang' is in nothing that was seen"),
        (
            '"CompilationError|boom"',
            '["boom", "CompilationError"]',
            "'CompilationError' is found in what any failure has",
        ),
        ('"failed to legalize"', '["failed to legalize"]', "is found in what any failure has"),
        ('"triton-adapter-opt.*(SIGSEGV|signal 11)"', '["x"]', "is found in what any failure has"),
        ('"PassManager::run failed"', '["PassManager::run failed"]', "is found in what any failure has"),
    ],
)
def test_a_signature_without_evidence(tmp_path, signature: str, quotes: str, complaint: str) -> None:
    [error] = errors(tmp_path, signature, quotes)
    assert complaint in error


@pytest.mark.parametrize(
    ("range_", "more", "complaint"),
    [
        (">=3.5,<3.7", 'last_seen = "triton==3.6.0"', "3.5.1, which is older than any on which it was seen (3.6.0)"),
        (">=3.6,<3.9", 'last_seen = "triton==3.6.0"', "3.8.0, which is newer than any on which it was seen (3.6.0)"),
        ("<3.4", 'last_seen = "triton==3.6.0"', "it was seen on no version in triton <3.4"),
        ("==3.5.0", "", "it was seen on no version in triton ==3.5.0"),
        ("<3.4", 'seen_on = ["triton==3.2.0"]', "<3.4 has 3.3.1, which is newer"),
        ("==3.5.0", 'seen_on = ["triton==3.5.0"]', ""),
        ("<3.4", 'seen_on = ["triton<3.4"]', ""),
        ("<3.4", 'seen_on = ["triton==3.3.1"]', ""),  # without an older one that passes there is no lower bound
        (">=3.2,<3.4", 'seen_on = ["triton==3.2.0", "triton==3.3.1"]', ""),
        (">=3.6", OPEN, ""),  # an open end is what review_by is for
        ("<3.4", 'seen_on = ["triton-ascend<3.4"]', "it was seen on no version in triton <3.4"),
    ],
)  # fmt: skip
def test_a_range_without_evidence(tmp_path, range_: str, more: str, complaint: str) -> None:
    found = errors(tmp_path, more=more, when=f'toolchain = {{ triton = "{range_}" }}')
    assert len(found) == bool(complaint)
    assert all(complaint in error for error in found)


def test_a_probe_is_evidence() -> None:
    quirk = Registry.load().quirks["rocm-0015-kpack"]
    assert list(audit.lacks(quirk)) == []
    assert {keys for keys, _ in audit.lacks(msgspec.structs.replace(quirk, verified=()))} == {
        ("evidence", "signature"), ("when", "toolchain", "triton"),
    }  # fmt: skip
    passed = ProbeRun(
        toolchain="triton==3.4.0", target="rocm:gfx950", level="compiles", off="pass", on="not run", date=TODAY,
        saw="gfx950 only accepts kpack == 1",
    )  # fmt: skip
    assert len(list(audit.lacks(msgspec.structs.replace(quirk, verified=(passed,))))) == 2, "it passed there"


def test_what_the_source_quotes_is_evidence() -> None:
    quirk = Registry.load().quirks["rocm-0015-kpack"]
    said = msgspec.structs.replace(quirk.evidence, source='it says "gfx950 only accepts kpack == 1" there')
    bare = msgspec.structs.replace(quirk, verified=(), evidence=said)
    assert ("evidence", "signature") not in {keys for keys, _ in audit.lacks(bare)}


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a|b", ["a", "b"]), (r"a\|b", [r"a\|b"]), ("(a|b)c|d", ["(a|b)c", "d"]), ("[a|b]|c", ["[a|b]", "c"]),
        (r"\(C7600\) x|y", [r"\(C7600\) x", "y"]), ("", [""]),
    ],
)  # fmt: skip
def test_alternatives(text: str, parts: list[str]) -> None:
    assert audit.alternatives(text) == parts


def test_trackers_are_todays(tmp_path) -> None:
    assert not any(new_location(link) for link in patterns().trackers.values())
    assert not set(patterns().moved.values()) & set(patterns().moved)
    for quirk in Registry.load().quirks.values():
        assert not new_location(quirk.evidence.upstream), quirk.id
    path = plant(
        tmp_path, "ascend-0901-x", 'note = "x"', evidence=OPEN.replace("triton==3.6.0", "triton-ascend==3.2.0")
    )
    link = "https://gitcode.com/Ascend/triton-ascend/issues/7"
    path.write_text(path.read_text().replace('"unreported"', f'"{link}"'))
    [error] = [finding for finding in audit.run(tmp_path, TODAY) if finding.severity == "error"]
    assert f"{link} has moved; its project is at https://github.com/triton-lang/triton-ascend now" in error.message
    assert error.line is not None
    assert "upstream" in path.read_text().splitlines()[error.line - 1]


def test_what_ascends_entries_say() -> None:
    """No more than was published of the project's seed, on the one chip that it ran on."""
    quirks = Registry.load().quirks
    for name in ("ascend-0001-k-block-order", "ascend-0003-page-loop", "ascend-0016-branch"):
        assert quirks[name].when.arch == ("ascend910b2",), name
    assert set(quirks["ascend-0001-k-block-order"].when.kernels) == {"dense_forward", "decode_split"}
    assert quirks["ascend-0003-page-loop"].when.kernels == ("paged_split",)
    assert quirks["ascend-0003-page-loop"].evidence.signature == ""
    assert quirks["ascend-0011-unified-buffer"].evidence.signature == ""
    for name in ("ascend-0014-sparse-reshape-crash", "ascend-0015-sparse-paged-div-0"):
        failed = {block.target for block in quirks[name].verified if block.off == "fail:signature"}
        assert failed == {f"ascend:ascend910b{n}" for n in (1, 2, 3, 4)}, "of the family each was looked at"


def test_four_stages_are_four() -> None:
    """At 3 and 5 the probe's problem compiles, on both compilers that abort at 4."""
    quirks = Registry.load().quirks
    for name in ("rocm-0001-four-stages", "rocm-0101-four-stages-rdna3"):
        assert quirks[name].when.launch == {"num_stages": 4}
