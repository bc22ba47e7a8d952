"""The audit is green on the shipped registry, and red on a copy with a planted defect or a claim without evidence."""

import datetime
import time

import msgspec
import pytest
from places import tables
from quirk_files import plant, registry

from portattn.planning.quirk_files import load_quirk
from portattn.planning.registry import Registry, shipped_quirks
from portattn.schema.quirk import ProbeRun
from portattn.tools.quirks import audit
from portattn.tools.quirks.audit import new_location
from portattn.tools.quirks.failure_log import patterns

TABLES = tables(__file__)

TODAY = datetime.date(2026, 11, 21)
CAP = "launch = {{ num_stages = {} }}"
OPEN = 'last_seen = "triton==3.6.0"\nreview_by = 2027-06-01'


def audited(folder, today=TODAY):
    return audit.run(folder, today)


def test_shipped_registry_is_green():
    started = time.monotonic()
    assert audit.run(today=TODAY) == []
    assert time.monotonic() - started < 60, "the audit is to take seconds"


def test_a_clean_folder_is_green_and_the_same_value_is_no_conflict(tmp_path):
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "any-0901-two", 'lowering = { load = "pointer" }', 'lowering = { load = "block_ptr" }')
    plant(tmp_path, "rocm-0901-one", CAP.format(1))
    plant(tmp_path, "rocm-0902-two", CAP.format(1))
    assert audited(tmp_path) == []


@pytest.mark.parametrize(
    ("due", "severity"),
    [("2026-11-20", "error"), ("2026-11-21", "warning"), ("2026-12-21", "warning"), ("2026-12-22", "")],
)
def test_review_date(tmp_path, due, severity):
    path = plant(tmp_path, "cuda-0901-one", 'note = "x"', evidence=f'last_seen = "triton==3.6.0"\nreview_by = {due}')
    found = audited(tmp_path)
    assert [f.severity for f in found] == ([severity] if severity else [])
    for finding in found:
        assert (finding.quirk, finding.file) == ("cuda-0901-one", str(path))
        assert "review_by" in path.read_text().splitlines()[finding.line - 1]


@pytest.mark.parametrize(("quirk_id", "effect", "when", "whole"), TABLES["takes_a_whole_core"])
def test_an_entry_that_takes_a_whole_backends_core_is_warned_of(tmp_path, quirk_id, effect, when, whole):
    seen = 'last_seen = "triton==3.6.0"\nseen_on = ["triton<4"]\nreview_by = 2027-06-01'  # as far as the ranges go
    path = plant(tmp_path, quirk_id, effect, when, evidence=seen)
    found = audited(tmp_path)
    assert [f.severity for f in found] == (["warning"] if whole else [])
    for finding in found:
        assert f"takes the core kernels from all of {whole}" in finding.message
        assert path.read_text().splitlines()[finding.line - 1].startswith("path")


@pytest.mark.parametrize(("when", "missing"), [("", True), ('kernels = ["*"]', False), ('kernels = ["k"]', False)])
def test_a_failure_of_every_kernel_is_said_in_words(tmp_path, when, missing):
    plant(tmp_path, "rocm-0901-x", CAP.format(1), when, symptom="hang")
    assert [f.severity for f in audited(tmp_path) if "when.kernels is missing" in f.message] == ["error"] * missing


def test_goes_on_after_a_broken_file(tmp_path):
    plant(tmp_path, "cuda-0901-one", 'note = "x"\nprice = "high"')
    plant(tmp_path, "cuda-0902-two", 'note = "x"', 'toolchain = { trition = "<3" }')
    plant(tmp_path, "rocm-0903-three", 'note = "x"', title="")
    plant(tmp_path, "rocm-0904-four", 'note = "x')
    plant(tmp_path, "rocm-0905-five", 'note = "x"')
    path = plant(tmp_path, "cuda-0906-six", 'note = "x"')
    path.write_text(path.read_text().replace('upstream  = "unreported"\n', ""))
    found = audited(tmp_path)
    assert {f.quirk: f.severity for f in found} == dict.fromkeys(
        ("cuda-0901-one", "cuda-0902-two", "rocm-0903-three", "rocm-0904-four", "cuda-0906-six"), "error"
    )
    assert all(f.file and f.line for f in found)
    shown = "\n".join(map(str, found))
    for complaint in (
        "unknown key `price`", "key 'when.toolchain.trition'", "key 'title': is empty", "not TOML",
        "lacks the key `upstream`",
    ):  # fmt: skip
        assert complaint in shown
    known, same = audit.load_for_audit(tmp_path)
    assert (list(known.quirks), same) == (["rocm-0905-five"], found)


def test_id_or_number_used_twice(tmp_path):
    first = plant(tmp_path, "cuda-0901-one", 'note = "x"')
    second = tmp_path / "rocm" / first.name
    plant(tmp_path, "rocm-0901-three", 'note = "x"')
    second.write_text(first.read_text())
    (finding,) = audited(tmp_path)
    assert (finding.severity, finding.file) == ("error", str(second))
    assert f"cuda-0901 is already taken by {first}" in finding.message
    second.unlink()
    plant(tmp_path, "cuda-0901-two", 'note = "x"')
    (finding,) = audited(tmp_path)
    assert (finding.quirk, "already taken" in finding.message) == ("cuda-0901-two", True)


def test_number_of_a_shipped_entry_is_used_once():
    numbers = ["-".join(name.split("-")[:2]) for name in Registry.load().quirks]
    assert len(set(numbers)) == len(numbers)
    for folder in shipped_quirks().iterdir():
        for path in folder.glob("*.toml"):
            assert path.stem.startswith(f"{folder.name}-"), "a file lies with its backend"


@pytest.mark.parametrize(("quirk_id", "effect", "when", "complaint"), TABLES["entry_that_can_never_apply"])
def test_entry_that_can_never_apply(tmp_path, quirk_id, effect, when, complaint):
    plant(tmp_path, quirk_id, effect, when)
    found = audited(tmp_path)
    assert any(complaint in f.message for f in found), found
    assert {f.severity for f in found} == {"error"}


def test_conflict_in_plans(tmp_path):
    """Both hold with default tiles: found by planning as well as by comparing conditions, and told once."""
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-two", "launch = { num_stages = 3 }", 'arch = ["sm_90"]')
    (finding,) = audited(tmp_path)
    assert finding.severity == "error"
    assert finding.message == (
        "cuda-0901-one and cuda-0902-two can both apply and set launch num_stages differently: 1 and 3; "
        "narrow [when] of one so that no plan meets both, or give both the same value"
    )
    planned = dict(audit._conflicts_by_planning(registry(tmp_path)))
    assert set(planned) == {frozenset(("cuda-0901-one", "cuda-0902-two"))}


@pytest.mark.parametrize(
    ("one", "two", "meets"),
    [
        ("", "", True), ('launch = { num_stages = ">=4" }', 'launch = { num_stages = ">=3" }', True),
        ('launch = { num_stages = ">=4" }', 'launch = { num_stages = "<=3" }', True),  # 3 is what the first leaves
        ('launch = { num_stages = ">=4" }', "launch = { num_stages = 2 }", False),
        ('arch = ["gfx942"]', 'arch = ["gfx950"]', False), ('arch = ["gfx9*"]', 'arch = ["gfx950"]', True),
        ('kernels = ["dense_forward"]', 'kernels = ["decode_split"]', False),
        ('toolchain = { triton = "<3.5" }', 'toolchain = { triton = ">=3.5" }', False),
        ('toolchain = { triton = "<=3.5" }', 'toolchain = { triton = ">=3.5" }', True),
        ('toolchain = { triton = "<3.5" }', 'toolchain = { triton-ascend = "<3.5" }', False),
        ('toolchain = { triton = "<3.5" }', 'toolchain = { rocm = "<7" }', True),
        ('features = ["head_dim>16"]', 'features = ["head_dim<=16"]', False),
        ('features = ["head_dim>16"]', 'features = ["head_dim_v<=16"]', True),
        ('features = ["dtype=fp32"]', 'features = ["dtype!=fp32"]', False),
        ('features = ["causal"]', 'features = ["!causal"]', False),
        ('lowering = { load = "pointer" }', 'lowering = { load = "block_ptr" }', False),
        ("launch = { waves_per_eu = 3 }", 'launch = { waves_per_eu = "<3" }', False),
        ("launch = { waves_per_eu = 3 }", "launch = { num_warps = 8 }", True),
    ],
)  # fmt: skip
def test_conflict_by_conditions(tmp_path, one, two, meets):
    """Compared without planning, since the tuning that asks for four stages may come later."""
    plant(tmp_path, "rocm-0901-one", CAP.format(3), one)
    plant(tmp_path, "rocm-0902-two", CAP.format(1), two)
    known, _ = audit.load_for_audit(tmp_path)
    assert bool(dict(audit._conflicts_by_condition(list(known.quirks.values()), known))) is meets


def test_a_draft_is_audited_beside_the_registry(tmp_path):
    """Alone it is green; copied to quirks/ it would leave gfx1100 without a plan."""
    when = 'arch = ["gfx942", "gfx1100"]\ntoolchain = { triton = "==3.9.0" }'
    effect = "launch = { num_stages = 1, num_warps = 8 }"
    plant(tmp_path, "rocm-0991-draft", effect, when, evidence='last_seen = "triton==3.9.0"')
    assert not [f for f in audited(tmp_path) if "rocm-0121" in f.message]
    [found] = [f for f in audit.beside_shipped(tmp_path) if "rocm-0121" in f.message]
    assert found.severity == "error"
    assert "rocm-0991-draft" in found.message
    # Nor may its number be one of the registry's.
    plant(tmp_path / "more", "rocm-0121-another", 'note = "mind"', 'arch = ["gfx942"]')
    [found] = audit.beside_shipped(tmp_path / "more")
    assert found.message.startswith("rocm-0121 is already taken by ")
    assert found.file.endswith("rocm-0121-another.toml")


def test_planned_probe_that_cannot_be_read(tmp_path):
    path = plant(tmp_path, "rocm-0901-one", "launch = { num_stages = 1 }")
    good = path.read_text()
    for probe, complaint in (
        ("plan: attention --target rocm:gfx942 --colour red", "must be the options of `portattn plan`"),
        ("plan: attention --target cuda:sm_90 --q 1,1,8,64 --kv 1,1,8,64 --dtype fp16", "concerns rocm:gfx90a"),
    ):
        path.write_text(good.replace("none: planted by a test", probe))
        found = audited(tmp_path)
        assert [f.severity for f in found] == ["error"]
        assert complaint in found[0].message
        assert path.read_text().splitlines()[found[0].line - 1].startswith("probe")


def test_tombstones(tmp_path):
    """A tombstone's number stays taken, nothing else of it is looked at, and it may not point at nothing."""
    path = plant(
        tmp_path, "cuda-0901-one", 'note = "x"', evidence='last_seen = "triton==3.6.0"\nreview_by = 2020-01-01'
    )
    tombstone = '\n[retired]\ndate = 2026-11-01\nreason = "fixed"\n'
    path.write_text(path.read_text() + tombstone)
    assert audited(tmp_path) == []
    path.write_text(path.read_text() + 'replaced_by = "cuda-0902-two"\n')
    assert [f.message for f in audited(tmp_path)] == ["no quirk has the id 'cuda-0902-two'"]
    plant(tmp_path, "cuda-0902-two", 'note = "x"')
    assert audited(tmp_path) == []
    plant(tmp_path, "cuda-0901-again", 'note = "x"')
    assert ["is already taken by" in f.message for f in audited(tmp_path)] == [True]


def errors(tmp_path, signature='"boom"', quotes='["boom"]', more=OPEN, when=""):
    path = plant(tmp_path, "cuda-0901-x", 'note = "x"', when, evidence=more)
    text = path.read_text().replace('signature = "boom"', f"signature = {signature}")
    path.write_text(text.replace('quotes    = ["boom"]', f"quotes    = {quotes}"))
    return [text for _, text in audit.lacks(load_quirk(path))]


def test_the_audit_says_so_at_the_key(tmp_path):
    assert errors(tmp_path, quotes="[]", when='toolchain = { triton = ">=3.6,<3.9" }')
    signature, range_ = sorted(audit.run(tmp_path, TODAY), key=lambda finding: finding.line or 0, reverse=True)
    lines = (tmp_path / "cuda" / "cuda-0901-x.toml").read_text().splitlines()
    assert (signature.severity, range_.severity) == ("error", "error")
    assert "signature" in lines[(signature.line or 0) - 1]
    assert "toolchain" in lines[(range_.line or 0) - 1]


def test_what_was_seen_is_evidence(tmp_path):
    assert errors(tmp_path) == []
    assert errors(tmp_path, '"boom|bang"', '["boom", "a bang"]') == []
    assert errors(tmp_path, '"b(o|a)om"', '["boom"]') == [], "only a bar at the top divides"


@pytest.mark.parametrize(
    ("signature", "quotes", "complaint"),
    [
        ('"boom"', "[]", "'boom' is in nothing that was seen"),
        ('"boom|bang"', '["boom"]', "'bang' is in nothing that was seen"),
        ('"CompilationError|boom"', '["boom", "CompilationError"]', "'CompilationError' is found in what any failure"),
        ('"failed to legalize"', '["failed to legalize"]', "is found in what any failure has"),
        ('"triton-adapter-opt.*(SIGSEGV|signal 11)"', '["x"]', "is found in what any failure has"),
        ('"PassManager::run failed"', '["PassManager::run failed"]', "is found in what any failure has"),
    ],
)
def test_a_signature_without_evidence(tmp_path, signature, quotes, complaint):
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
def test_a_range_without_evidence(tmp_path, range_, more, complaint):
    found = errors(tmp_path, more=more, when=f'toolchain = {{ triton = "{range_}" }}')
    assert len(found) == bool(complaint)
    assert all(complaint in error for error in found)


def test_a_probe_and_what_the_source_quotes_are_evidence():
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
    # So is what the source quotes.
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
def test_alternatives(text, parts):
    assert audit.alternatives(text) == parts


def test_trackers_are_todays(tmp_path):
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
    assert "upstream" in path.read_text().splitlines()[error.line - 1]


def test_entries_say_no_more_than_was_seen():
    """Of Ascend: than was published of the project's seed, on the one chip that it ran on."""
    quirks = Registry.load().quirks
    for name in ("ascend-0001-k-block-order", "ascend-0003-page-loop", "ascend-0016-branch"):
        assert quirks[name].when.arch == ("ascend910b2",), name
    assert set(quirks["ascend-0001-k-block-order"].when.kernels) == {"dense_forward", "decode_split"}
    assert quirks["ascend-0003-page-loop"].when.kernels == ("paged_split",)
    assert {quirks[f"ascend-{name}"].evidence.signature for name in ("0003-page-loop", "0011-unified-buffer")} == {""}
    for name in ("ascend-0014-sparse-reshape-crash", "ascend-0015-sparse-paged-div-0"):
        failed = {block.target for block in quirks[name].verified if block.off == "fail:signature"}
        assert failed == {f"ascend:ascend910b{n}" for n in (1, 2, 3, 4)}, "of the family each was looked at"
    for name in ("rocm-0001-four-stages", "rocm-0101-four-stages-rdna3"):
        assert quirks[name].when.launch == {"num_stages": 4}, "3 and 5 compile, on both compilers that abort at 4"
