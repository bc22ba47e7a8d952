"""When a quirk applies: version ranges, what is not known, patterns, chains, conflicts and overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
from quirk_files import DECODE, PROBLEM, active, planned, plant, registry

from portattn.errors import QuirkConflict, SettingError

STAGES = "launch = { num_stages = 1 }"
ID = "cuda-0900-planted"


@pytest.mark.parametrize(
    ("range_", "toolchain", "applies"),
    [
        ('{ triton = ">=3.4,<3.7" }', "triton==3.4.0", True),
        ('{ triton = ">=3.4,<3.7" }', "triton==3.6.0", True),
        ('{ triton = ">=3.4,<3.7" }', "triton==3.6.0+rocm7.2", True),
        ('{ triton = ">=3.4,<3.7" }', "triton==3.7.0", False),
        ('{ triton = ">=3.4,<3.7" }', "triton==3.3.1", False),
        ('{ triton = "==3.6.*" }', "triton==3.6.1", True),
        ('{ triton-ascend = "<3.3" }', "triton==3.2.0", False),
        ('{ triton-ascend = "<3.3" }', "triton-ascend==3.2.0", True),
        ('{ triton = "<3.3" }', "triton-ascend==3.2.0", False),
        ('{ triton = "<3.7", numpy = ">=2.4" }', "triton==3.6.0,numpy==2.4.1", True),
        ('{ triton = "<3.7", numpy = ">=2.4" }', "triton==3.6.0,numpy==2.3.0", False),
        ('{ triton = "<3.7", numpy = ">=2.4" }', "triton==3.9.0,numpy==2.4.1", False),
    ],
)
def test_ranges(tmp_path: Path, range_: str, toolchain: str, applies: bool) -> None:
    plant(tmp_path, ID, STAGES, f"toolchain = {range_}", evidence="")
    made = planned(registry(tmp_path), toolchain=toolchain)
    assert (ID in active(made)) is applies
    assert made.launch is not None
    assert made.launch.num_stages == (1 if applies else 2)


@pytest.mark.parametrize(
    "symptom", ["compile-error", "compiler-crash", "hang", "wrong-result", "resource-limit", "slow"]
)
def test_unknown_component(tmp_path: Path, symptom: str) -> None:
    """Fails closed, except `slow`. No toolchain of this test knows its driver."""
    plant(tmp_path, ID, STAGES, 'toolchain = { driver = "<500" }', symptom=symptom, evidence="")
    assert (ID in active(planned(registry(tmp_path)))) is (symptom != "slow")


@pytest.mark.parametrize("symptom", ["wrong-result", "hang", "compile-error", "slow"])
@pytest.mark.parametrize(
    ("toolchain", "newer"), [("triton==3.5.1", False), ("triton==3.6.0", False), ("triton==3.7.1", True)]
)
def test_newer_than_seen(tmp_path: Path, symptom: str, toolchain: str, newer: bool) -> None:
    """An open range: what is newer than any version that showed the bug is unverified; only `slow` lets go there."""
    plant(tmp_path, ID, STAGES, 'toolchain = { triton = ">=3.4" }', symptom=symptom)
    made = planned(registry(tmp_path), toolchain=toolchain)
    assert (ID in active(made)) is not (newer and symptom == "slow")
    notes = [a.note for a in made.quirks if a.id == ID]
    assert all(("unverified" in note) is newer for note in notes)


@pytest.mark.parametrize(
    ("when", "target", "applies"),
    [
        ('arch = ["sm_9*"]', "cuda:sm_90", True),
        ('arch = ["sm_9*"]', "cuda:sm_80", False),
        ('arch = ["sm_80", "sm_90"]', "cuda:sm_80", True),
        ('arch = ["sm_8[69]"]', "cuda:sm_89", True),
        ('arch = ["sm_8[69]"]', "cuda:sm_80", False),
        ("", "cuda:sm_120", True),
        ("", "rocm:gfx942", False),
    ],
)
def test_machine(tmp_path: Path, when: str, target: str, applies: bool) -> None:
    plant(tmp_path, ID, STAGES, when)
    assert (ID in active(planned(registry(tmp_path), target=target))) is applies


def test_every_backend(tmp_path: Path) -> None:
    plant(tmp_path, "any-0900-planted", STAGES)
    known = registry(tmp_path)
    for target in ("cuda:sm_90", "rocm:gfx942"):
        assert active(planned(known, target=target)) == {"any-0900-planted"}


@pytest.mark.parametrize(
    ("when", "applies"),
    [
        ('kernels = ["dense_forward"]', {"attention"}),
        ('kernels = ["decode_*"]', {"decode_attention"}),
        ('kernels = ["*"]', {"attention", "decode_attention"}),
        ('features = ["seq_q>1"]', {"attention"}),
        ('features = ["dtype=fp16", "head_dim>=128"]', {"attention", "decode_attention"}),
        ('features = ["dtype=fp16", "head_dim>=129"]', set()),
        # The default tile has 64 rows: 2 * 8 * 16 programs.
        ('features = ["programs=256"]', {"attention"}),
        ('lowering = { load = "pointer" }', {"attention", "decode_attention"}),
        ('lowering = { load = "block_ptr" }', set()),
        ("launch = { num_warps = 4 }", {"attention", "decode_attention"}),
        ("launch = { num_warps = 8 }", set()),
        ('launch = { num_stages = ">=2", block_m = "<=64" }', {"attention", "decode_attention"}),
        ('launch = { num_stages = ">2" }', set()),
        ('launch = { num_stages = "!=2" }', set()),
        ("launch = { maxnreg = 250 }", set()),
        ('launch = { maxnreg = "<300" }', set()),  # not set, so nothing to compare
    ],
)
def test_kernel_problem_and_launch(tmp_path: Path, when: str, applies: set[str]) -> None:
    plant(tmp_path, ID, 'env = { DISABLE_PTXAS_OPT = "1" }', when)
    known = registry(tmp_path)
    assert {p.op for p in (PROBLEM, DECODE) if ID in active(planned(known, problem=p))} == applies


def test_chain(tmp_path: Path) -> None:
    """The effect of one makes another apply, whatever the order in which they were read."""
    plant(tmp_path, "cuda-0901-second", "launch = { num_warps = 8 }", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-first", STAGES, 'launch = { num_stages = ">=2" }')
    plant(tmp_path, "cuda-0903-third", 'lowering = { pipeline = "rotated" }', "launch = { num_warps = 8 }")
    made = planned(registry(tmp_path))
    assert [a.id for a in made.quirks] == ["cuda-0902-first", "cuda-0901-second", "cuda-0903-third"]
    lowering, launch = made.specialised
    assert (launch.num_stages, launch.num_warps, lowering.pipeline) == (1, 8, "rotated")


def test_choice_that_the_kernel_does_not_read(tmp_path: Path) -> None:
    plant(tmp_path, ID, 'lowering = { pipeline = "rotated" }')
    known = registry(tmp_path)
    assert ID in active(planned(known, problem=PROBLEM))
    assert ID not in active(planned(known, problem=DECODE)), "decode_split has no pipeline choice"


def test_conflict_names_both(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-three", "launch = { num_stages = 3 }", 'arch = ["sm_90"]')
    known = registry(tmp_path)
    with pytest.raises(QuirkConflict, match="num_stages differently: 1 and 3") as caught:
        planned(known)
    assert caught.value.quirks == ("cuda-0901-one", "cuda-0902-three")
    assert active(planned(known, target="cuda:sm_80")) == {"cuda-0901-one"}
    assert active(planned(known, quirks="-cuda-0901-one")) == {"cuda-0902-three"}


def test_conflict_after_a_chain(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-three", "launch = { num_stages = 3 }", "launch = { num_stages = 1 }")
    with pytest.raises(QuirkConflict):
        planned(registry(tmp_path))


def test_agreement_is_no_conflict(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-two", "launch = { num_stages = 1, num_warps = 8 }")
    assert active(planned(registry(tmp_path))) == {"cuda-0901-one", "cuda-0902-two"}


def test_note_changes_nothing_and_is_listed(tmp_path: Path) -> None:
    plain = planned(registry(tmp_path))
    plant(tmp_path, ID, 'note = "look twice"')
    made = planned(registry(tmp_path))
    assert (made.path, made.specialised, made.env) == (plain.path, plain.specialised, plain.env)
    assert made.key == plain.key, "a caution does not make another specialisation"
    (applied,) = made.quirks
    assert (applied.id, applied.sets) == (ID, {})
    assert "nothing is changed: look twice" in applied.sentence
    assert "look twice" in made.explain()


@pytest.mark.parametrize(("path", "reached"), [("vendor", False), ("reference", True)])
def test_path(tmp_path: Path, path: str, reached: bool) -> None:
    plant(tmp_path, ID, f'path = "{path}"')
    made = planned(registry(tmp_path))
    assert made.path != "triton"
    assert (made.path == "reference") is reached
    assert made.rejected[0].quirk == ID


def test_overrides(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-on", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-off", "launch = { num_warps = 8 }", 'toolchain = { triton = "<3.3" }', evidence="")
    known = registry(tmp_path)
    assert active(planned(known)) == {"cuda-0901-on"}
    assert active(planned(known, quirks="-cuda-0901-on")) == set()
    assert active(planned(known, quirks="+cuda-0902-off")) == {"cuda-0901-on", "cuda-0902-off"}
    assert active(planned(known, quirks=" -cuda-0901-on , +cuda-0902-off ")) == {"cuda-0902-off"}


def test_override_cannot_move_a_quirk_to_another_backend(tmp_path: Path) -> None:
    plant(tmp_path, ID, STAGES, 'toolchain = { triton = "<3.3" }', evidence="")
    assert active(planned(registry(tmp_path), target="rocm:gfx942", quirks=f"+{ID}")) == set()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-cuda-0900-plantet", "names no quirk; did you mean cuda-0900-planted"),
        ("+nothing", "names no quirk$"),
        ("cuda-0900-planted", r"must start with \+ \(apply\) or - \(switch off\)"),
        (f"+{ID},-{ID}", "both applies and switches off cuda-0900-planted"),
        ("-", "names no quirk"),
    ],
)
def test_bad_override(tmp_path: Path, text: str, complaint: str) -> None:
    plant(tmp_path, ID, STAGES)
    with pytest.raises(SettingError, match=complaint):
        planned(registry(tmp_path), quirks=text)
