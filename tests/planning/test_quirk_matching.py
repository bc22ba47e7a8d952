"""When a quirk applies: version ranges, what is not known, patterns, chains, conflicts and overrides."""

import datetime
from pathlib import Path

import msgspec
import pytest
from places import tables
from quirk_files import DECODE, PROBLEM, active, planned, plant, registry

from portattn.errors import PathUnavailable, QuirkConflict, SettingError
from portattn.planning.core_path import hint
from portattn.planning.planner import plan
from portattn.planning.quirk_files import load_quirk
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.plan import Plan
from portattn.schema.toolchain import Toolchain
from portattn.schema.tuning import Entry, Provenance, Tuning

TABLES = tables(__file__)

STAGES = "launch = { num_stages = 1 }"
ID = "cuda-0900-planted"


@pytest.mark.parametrize(("range_", "toolchain", "applies"), TABLES["ranges"])
def test_ranges(tmp_path: Path, range_: str, toolchain: str, applies: bool) -> None:
    plant(tmp_path, ID, STAGES, f"toolchain = {range_}", evidence="")
    made = planned(registry(tmp_path), toolchain=toolchain)
    assert (ID in active(made)) is applies
    assert made.launch.num_stages == (1 if applies else 2)


@pytest.mark.parametrize(("when", "applies"), TABLES["every_value_must_hold_and_one_pattern"])
def test_every_value_must_hold_and_one_pattern(tmp_path: Path, when: str, applies: bool) -> None:
    quirk = load_quirk(plant(tmp_path, ID, 'note = "x"', when))
    target, lowering = parse_target("cuda:sm_80", "triton==3.6.0"), Lowering(load="pointer", exp="exp2")
    launch = Launch(num_warps=4, num_stages=2)
    assert quirk.applies("dense_forward", PROBLEM, target, lowering, launch, 1) is applies


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
    assert all(("unverified" in note) is newer for note in [a.note for a in made.quirks if a.id == ID])


@pytest.mark.parametrize(("when", "target", "applies"), TABLES["machine"])
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


def test_the_compile_environment_is_part_of_the_key(tmp_path: Path) -> None:
    """Code that was compiled with another environment is other code: no record about one is taken for the other's."""
    plant(tmp_path, ID, 'env = { DISABLE_PTXAS_OPT = "1" }')
    known = registry(tmp_path)
    made, plain = planned(known), planned(known, quirks=f"-{ID}")
    assert (made.env, plain.env) == ({"DISABLE_PTXAS_OPT": "1"}, {})
    assert made.specialised == plain.specialised
    assert made.key != plain.key


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
    plant(tmp_path, ID, 'lowering = { select = "branch" }')
    known = registry(tmp_path)
    assert ID in active(planned(known, problem=PROBLEM))
    assert ID not in active(planned(known, problem=DECODE)), "decode_split has no select choice"


def test_conflict_names_both(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-three", "launch = { num_stages = 3 }", 'arch = ["sm_90"]')
    known = registry(tmp_path)
    with pytest.raises(QuirkConflict, match="num_stages differently: 1 and 3") as caught:
        planned(known)
    assert caught.value.quirks == ("cuda-0901-one", "cuda-0902-three")
    assert active(planned(known, target="cuda:sm_80")) == {"cuda-0901-one"}
    assert active(planned(known, quirks="-cuda-0901-one")) == {"cuda-0902-three"}


@pytest.mark.parametrize(
    ("first", "second", "conflict"),
    [
        (("launch = { num_stages = 1 }",), ("launch = { num_stages = 3 }", "launch = { num_stages = 1 }"), True),
        (("launch = { num_stages = 1 }",), ("launch = { num_stages = 1, num_warps = 8 }",), False),
        # Nothing is assumed of a compiler that says its version: somebody made a mistake, and must hear of it.
        (
            ("launch = { num_stages = 1 }", 'toolchain = { triton = "<3.7" }'),
            ("launch = { num_stages = 3 }", 'toolchain = { triton = "==3.6.*" }'), True,
        ),
    ],
    ids=["after a chain", "agreement", "known versions"],
)  # fmt: skip
def test_a_conflict_is_an_error(tmp_path, first, second, conflict):
    bounded = {"evidence": ""} if "toolchain" in str(first) else {}
    plant(tmp_path, "cuda-0901-one", *first, **bounded)
    plant(tmp_path, "cuda-0902-two", *second, **bounded)
    if conflict:
        with pytest.raises(QuirkConflict):
            planned(registry(tmp_path))
    else:
        assert active(planned(registry(tmp_path))) == {"cuda-0901-one", "cuda-0902-two"}


UNKNOWN = Toolchain(distribution="pytorch-triton-xpu", version="3.5.0")


@pytest.mark.parametrize("symptom", ["wrong-result", "slow"])
def test_an_unknown_compiler_counts_as_affected(tmp_path: Path, symptom: str) -> None:
    plant(tmp_path, ID, STAGES, 'toolchain = { triton = "<3.3" }', symptom=symptom, evidence="")
    known = registry(tmp_path)
    assert (ID in active(plan(PROBLEM, known.target("cuda:sm_90", UNKNOWN), known))) is (symptom != "slow")


def test_a_conflict_that_is_only_assumed_speaks_against_the_core_path(tmp_path: Path) -> None:
    """Entries for different releases meet where the release is not known: the call must not fail for it."""
    plant(tmp_path, "cuda-0901-one", "launch = { num_stages = 1 }", 'toolchain = { triton = "<3.3" }', evidence="")
    plant(tmp_path, "cuda-0902-three", "launch = { num_stages = 3 }", 'toolchain = { triton = "==3.6.*" }', evidence="")
    known = registry(tmp_path)
    made = plan(PROBLEM, known.target("cuda:sm_90", UNKNOWN), known)
    assert made.path == "sdpa"
    assert "cuda-0901-one and cuda-0902-three" in made.rejected[0].reason
    assert "both are assumed to apply, since pytorch-triton-xpu==3.5.0" in made.rejected[0].reason


@pytest.mark.parametrize(("symptom", "when", "expected"), TABLES["what_would_help_where_a_quirk_speaks_against_a_path"])
def test_what_would_help_where_a_quirk_speaks_against_a_path(tmp_path, symptom, when, expected):
    plant(tmp_path, ID, 'path = "vendor"', when, symptom=symptom)
    assert hint(registry(tmp_path).quirks[ID]) == expected


def test_what_an_effect_does_is_said_in_words(tmp_path: Path) -> None:
    for number, (effect, words) in enumerate(
        (
            ("launch = { num_stages = 1, num_warps = 8 }", "sets num_stages = 1, num_warps = 8"),
            ('path = "vendor"', "the vendor path is taken"),
            ('note = "look twice"', "nothing is changed: look twice"),
        )
    ):
        name = f"cuda-090{number}-planted"
        plant(tmp_path, name, effect, title="It stops", symptom="hang")
        assert registry(tmp_path).quirks[name].sentence() == f"It stops (hang); {words}"


SHORT = msgspec.structs.replace(PROBLEM, seq_q=5)


@pytest.mark.parametrize(("problem", "block_m"), [(SHORT, 16), (PROBLEM, 64), (DECODE, 16)])
def test_what_a_quirk_sets_is_not_fitted_away(tmp_path: Path, problem, block_m: int) -> None:
    assert planned(registry(tmp_path), problem=problem).specialised[1].block_m == block_m
    plant(tmp_path, ID, "launch = { block_m = 128, splits = 3 }")
    made = planned(registry(tmp_path), problem=problem)
    (applied,) = made.quirks
    _, launch = made.specialised
    assert launch.splits == (3 if problem is DECODE else 1)
    assert {name: launch.get(name) for name in applied.sets} == applied.sets
    assert applied.sets["block_m"] == launch.block_m == 128


def test_splits_are_set_only_where_there_are_any(tmp_path: Path) -> None:
    plant(tmp_path, ID, "launch = { splits = 1 }")
    known = registry(tmp_path)
    assert active(planned(known, problem=PROBLEM)) == set()
    made = planned(known, problem=DECODE)
    assert (active(made), made.specialised[1].splits) == ({ID}, 1)


def starting_from(known: Registry, **lowering: str) -> Registry:
    """The registry with a tuning for sm_90 that asks for these choices."""
    made = Provenance(chip="none", toolchain="none", date=datetime.date(2026, 1, 1), measured=False)
    tuning = Tuning(provenance=made, entry=(Entry(kernel="dense_forward", lowering=lowering),))
    return msgspec.structs.replace(known, tunings={**known.tunings, "cuda": {"sm_90": tuning}})


def crowded(known: Registry, problem=PROBLEM) -> Plan:
    """Planned on a chip that launches up to 100 programs; the default tile makes 256 of PROBLEM."""
    target = known.target("cuda:sm_90", "triton==3.6.0")
    return plan(
        problem, msgspec.structs.replace(target, arch=msgspec.structs.replace(target.arch, max_programs=100)), known
    )


def test_quirks_are_judged_by_the_grid_that_runs(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-persistent", STAGES, 'lowering = { grid = "persistent" }')
    plant(tmp_path, "cuda-0902-tiles", "launch = { num_warps = 8 }", 'lowering = { grid = "tiles" }')
    made = crowded(registry(tmp_path))
    assert active(made) == {"cuda-0901-persistent"}
    assert made.specialised[0].grid == "persistent"
    assert active(planned(registry(tmp_path))) == {"cuda-0902-tiles"}


def test_a_quirk_can_push_the_grid_over_the_limit(tmp_path: Path) -> None:
    """512 rows a head of 16: 128 programs with the tile of 64, and half as many with one of 128."""
    plant(tmp_path, "cuda-0901-small", "launch = { block_m = 16 }")
    plant(tmp_path, "cuda-0902-persistent", STAGES, 'lowering = { grid = "persistent" }')
    few = msgspec.structs.replace(PROBLEM, batch=1, heads_q=4, heads_k=4)
    assert crowded(registry(tmp_path), few).specialised[0].grid == "persistent"
    assert active(crowded(registry(tmp_path), few)) == {"cuda-0901-small", "cuda-0902-persistent"}


@pytest.mark.parametrize("aligned", [True, False])
def test_a_hard_limit_overrules_a_quirk_and_says_so(tmp_path: Path, aligned: bool) -> None:
    plant(tmp_path, ID, 'lowering = { load = "descriptor", pipeline = "rotated" }')
    made = planned(registry(tmp_path), problem=msgspec.structs.replace(PROBLEM, aligned=aligned))
    (applied,) = made.quirks
    lowering, _ = made.specialised
    assert lowering.pipeline == "rotated"
    assert lowering.load == ("descriptor" if aligned else "pointer")
    assert {name: getattr(lowering, name) for name in applied.sets} == applied.sets
    assert ("overruled: load = pointer: descriptors need" in applied.note) is not aligned
    assert any(note.startswith("load = pointer") for note in made.notes) is not aligned


def test_a_hard_limit_overrules_the_tuning(tmp_path: Path) -> None:
    known = starting_from(registry(tmp_path), load="descriptor")
    made = planned(known, problem=msgspec.structs.replace(PROBLEM, aligned=False))
    assert made.specialised[0].load == "pointer"
    assert planned(known).specialised[0].load == "descriptor"


def test_a_tile_that_was_never_timed_is_said_to_be_whose(tmp_path: Path) -> None:
    """The arch's own tuning, or that of the arch that its table names."""
    known = starting_from(registry(tmp_path))
    means = ": this concerns speed alone; `portattn tune` times others"
    assert f"this tile was not timed on sm_90{means}" in planned(known).notes
    for arch, tuning, told in (
        ("sm_80", "sm_90", f"this tile was not timed on sm_80 (it is the one for sm_90){means}"),
        ("sm_90", "sm_90", f"this tile was not timed on sm_90{means}"),
    ):
        target = known.target(f"cuda:{arch}", "triton==3.6.0")
        target = msgspec.structs.replace(target, arch=msgspec.structs.replace(target.arch, tuning=tuning))
        assert told in plan(PROBLEM, target, known).notes


def test_a_tile_that_was_timed_with_another_release_is_said_to_be() -> None:
    known = Registry.load()
    told = "chosen by times with triton==3.6.0, not with triton==3.8.0: speed alone; `portattn tune` compares"
    problem = msgspec.structs.replace(PROBLEM, op="decode_attention", seq_q=1, dtype="bf16")
    notes = {
        version: plan(problem, known.target("cuda:sm_90", f"triton=={version}"), known).notes
        for version in ("3.6.0", "3.8.0")
    }
    assert told in notes["3.8.0"]
    assert not [note for note in notes["3.6.0"] if "timed" in note]


def test_fp32_products_are_of_a_precision_that_the_chip_has(tmp_path: Path) -> None:
    """A tuning entry's precision stays where the chip has it; otherwise the chip's first is taken, for fp32 only."""
    known = starting_from(registry(tmp_path), dot_precision="tf32")
    target = known.target("cuda:sm_90", "triton==3.6.0")

    def precision(dtype: str, *there: str) -> str:
        where = msgspec.structs.replace(target, arch=msgspec.structs.replace(target.arch, dot_precisions=there))
        return plan(msgspec.structs.replace(PROBLEM, dtype=dtype), where, known).specialised[0].dot_precision

    assert precision("fp32", "ieee", "tf32") == "tf32"
    assert precision("fp32", "tf32x3", "ieee") == "tf32x3"
    assert precision("fp16", "tf32x3", "ieee") == "tf32"


def test_note_changes_nothing_and_is_listed(tmp_path: Path) -> None:
    plain = planned(registry(tmp_path))
    plant(tmp_path, ID, 'note = "look twice"')
    made = planned(registry(tmp_path))
    assert (made.path, made.specialised, made.env) == (plain.path, plain.specialised, plain.env)
    assert made.key == plain.key, "a caution does not make another specialisation"
    (applied,) = made.quirks
    assert (applied.id, applied.sets) == (ID, {})
    assert "nothing is changed: look twice" in applied.sentence
    assert (
        f"noted    compiler bugs for which this plan is not changed (`portattn quirks show ID` says why): {ID}"
        in made.explain()
    )
    assert "nothing is changed" not in made.explain()


@pytest.mark.parametrize("paths", [("vendor", "reference"), ("reference", "vendor")])
def test_the_most_restrictive_of_two_paths_is_taken(tmp_path: Path, paths: tuple[str, str]) -> None:
    ids = ("cuda-0901-one", "cuda-0902-two")
    for quirk_id, path in zip(ids, paths, strict=True):
        plant(tmp_path, quirk_id, f'path = "{path}"')
    made = planned(registry(tmp_path))
    strict = ids[paths.index("reference")]
    assert made.path == "reference"
    assert [(a.id, a.sets) for a in made.quirks] == [(i, {"path": p}) for i, p in zip(ids, paths, strict=True)]
    assert [(r.path, r.quirk) for r in made.rejected] == [("triton", strict), ("sdpa", strict)]


def test_a_slow_kernel_is_right_and_runs_where_it_is_asked_for(tmp_path: Path) -> None:
    plant(tmp_path, ID, 'path = "vendor"', symptom="slow")
    known = registry(tmp_path)
    assert (planned(known).path, planned(known, backend="triton").path) == ("sdpa", "triton")
    plant(tmp_path, "cuda-0901-wrong", 'path = "vendor"', symptom="wrong-result")
    made = planned(registry(tmp_path))
    assert (made.path, [a.id for a in made.quirks]) == ("sdpa", [ID, "cuda-0901-wrong"])
    with pytest.raises(PathUnavailable, match="planted"):
        planned(registry(tmp_path), backend="triton")


def test_overrides(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-0901-on", "launch = { num_stages = 1 }")
    plant(tmp_path, "cuda-0902-off", "launch = { num_warps = 8 }", 'toolchain = { triton = "<3.3" }', evidence="")
    known = registry(tmp_path)
    assert active(planned(known)) == {"cuda-0901-on"}
    assert active(planned(known, quirks="-cuda-0901-on")) == set()
    assert active(planned(known, quirks="+cuda-0902-off")) == {"cuda-0901-on", "cuda-0902-off"}
    assert active(planned(known, quirks=" -cuda-0901-on , +cuda-0902-off ")) == {"cuda-0902-off"}
    assert active(planned(known, quirks=", ,-cuda-0901-on,,+cuda-0902-off,")) == {"cuda-0902-off"}
    assert active(planned(known, target="rocm:gfx942", quirks="+cuda-0902-off")) == set(), "another backend's"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-cuda-0900-plantet", "names no quirk; did you mean cuda-0900-planted"),
        ("-cuda-0900-pxanted", "names no quirk; did you mean cuda-0900-planted"), ("+nothing", "names no quirk$"),
        ("cuda-0900-planted", r"must start with \+ \(apply\) or - \(switch off\)"),
        (f"+{ID},-{ID}", "both applies and switches off cuda-0900-planted"), ("-", "names no quirk"),
    ],
)  # fmt: skip
def test_bad_override(tmp_path: Path, text: str, complaint: str) -> None:
    plant(tmp_path, ID, STAGES)
    with pytest.raises(SettingError, match=complaint):
        planned(registry(tmp_path), quirks=text)
