"""Planned probes: what they state, what their arms plan, and one that is really compiled."""

from pathlib import Path

import msgspec
import pytest
from planted_probe import plant

from portattn.errors import ArgumentError, PortattnError
from portattn.planning.registry import Registry
from portattn.schema.quirk import Quirk
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.quirks import probe as probing
from portattn.tools.quirks import probe_plans
from portattn.tools.quirks.probe import place

SIZES = "--q 2,8,1024,128 --kv 2,8,1024,128 --dtype bf16"
PROBE = f"plan: attention --target rocm:gfx950 {SIZES} --start num_stages=4,k_tile=row"
KNOWN = Registry.load()
FOUR_STAGES = KNOWN.quirks["rocm-0001-four-stages"]


def probing_with(quirk: Quirk, probe: str) -> Quirk:
    return msgspec.structs.replace(quirk, evidence=msgspec.structs.replace(quirk.evidence, probe=probe))


def test_parse() -> None:
    stated = probe_plans.parse(PROBE)
    assert (stated.target, stated.problem.op, stated.problem.head_dim) == ("rocm:gfx950", "attention", 128)
    assert stated.start == {"num_stages": 4, "k_tile": "row"}
    assert probe_plans.parse(PROBE + " --causal").problem.causal == "bottom_right"
    gradients = PROBE.replace("attention", "attention_backward").replace("k_tile=row", "rows_stages=2")
    assert probe_plans.parse(gradients).start == {"num_stages": 4, "rows_stages": 2}


@pytest.mark.parametrize(
    ("probe", "complaint"),
    [
        (f"plan: atention --target rocm:gfx950 {SIZES}", "OP is 'atention'"),
        (f"plan: attention {SIZES}", "Missing option '--target'"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --colour red", "No such option"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start stages=4", "must be NAME=VALUE, with one of block_m"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start num_stages=four", "must be a whole number"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start block_m=48", "power of two"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start load=tma", "must be one of pointer"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start maxnreg=64", "an option of cuda, and not of rocm"),
        (f"plan: attention --target rocm:gfx950 {SIZES} --start rows_m=64", "elsewhere block_m is set"),
        (f"plan: attention_backward --target rocm:gfx950 {SIZES} --start rows_m=48", "power of two"),
        (f"plan: attention_backward --target rocm:gfx950 {SIZES} --start rows_n=0", "must be an integer ≥ 1"),
        ("plan: attention --target rocm:gfx950 --q 2,8 --kv 2,8 --dtype bf16", "must be four whole numbers"),
    ],
)
def test_malformed(probe: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        probe_plans.parse(probe)


def test_arms_differ_by_the_quirk_alone() -> None:
    quirk = probing_with(FOUR_STAGES, PROBE)
    stated = probe_plans.parse(PROBE)
    where = place(quirk, "triton==3.6.0", None, KNOWN)
    started = probe_plans.with_start_values(KNOWN, stated, where)
    off, on = (probe_plans.plan_arm(quirk, arm, stated, where, started) for arm in ("off", "on"))  # type: ignore[arg-type]
    assert (off.specialised[1].num_stages, on.specialised[1].num_stages) == (4, 3)
    assert (off.specialised[0], off.specialised[0].k_tile) == (on.specialised[0], "row")


def test_another_entry_does_not_hide_the_bug_and_a_path_leaves_nothing_to_compile() -> None:
    """On 3.9 a second entry makes RDNA3's tiles smaller still: the probe of the first one is to see its own tile."""
    quirk = KNOWN.quirks["rocm-0021-rdna-tiles"]
    stated = probe_plans.parse(quirk.evidence.probe)
    where = place(quirk, "triton==3.9.0", None, KNOWN)
    off = probe_plans.plan_arm(quirk, "off", stated, where, probe_plans.with_start_values(KNOWN, stated, where))
    assert (off.specialised[1].block_m, off.specialised[1].block_n) == (64, 64)
    quirk = probing_with(KNOWN.quirks["cuda-0007-blackwell"], f"plan: attention --target cuda:sm_100 {SIZES}")
    stated = probe_plans.parse(quirk.evidence.probe)
    where = place(quirk, "triton==3.2.0", None, KNOWN)
    assert probe_plans.plan_arm(quirk, "on", stated, where, KNOWN) is None
    assert probe_plans.plan_arm(quirk, "off", stated, where, KNOWN).path == "triton"


def test_a_probe_about_something_else(tmp_path: Path) -> None:
    """A quirk that leaves the plan of its own probe alone would always look like a work-around that works."""
    probe = f"plan: attention --target rocm:gfx950 {SIZES} --start num_stages=2"
    quirk = probing_with(FOUR_STAGES, probe)
    where = place(quirk, "triton==3.6.0", None, KNOWN)
    started = probe_plans.with_start_values(KNOWN, probe_plans.parse(probe), where)
    other = msgspec.structs.replace(quirk, when=msgspec.structs.replace(quirk.when, kernels=("decode_split",)))
    bent = msgspec.structs.replace(started, quirks=started.quirks | {quirk.id: other})
    with pytest.raises(PortattnError, match="changes nothing in the plan of its probe"):
        probe_plans.plan_arm(other, "on", probe_plans.parse(probe), where, bent)


def test_every_shipped_plan_is_about_its_quirk() -> None:
    """Where it was seen, each planned probe's work-around has a part in the plan, and its off arm a kernel."""
    asked = 0
    for quirk in KNOWN.quirks.values():
        affected = next((v.toolchain for v in quirk.verified if v.off == "fail:signature" and not v.stand_in), None)
        if not quirk.evidence.probe.startswith(probe_plans.PREFIX) or affected is None:
            continue
        stated = probe_plans.parse(quirk.evidence.probe)
        where = place(quirk, affected, None, KNOWN)
        started = probe_plans.with_start_values(KNOWN, stated, where)
        assert probe_plans.plan_arm(quirk, "off", stated, where, started) is not None, quirk.id
        probe_plans.plan_arm(quirk, "on", stated, where, started)
        asked += 1
    assert asked >= 15


@pytest.mark.compiles
def test_real_compiler() -> None:
    """A real compile with the installed Triton: a head of 256 in 64 x 64 tiles does not fit an A10's shared memory."""
    if installed_toolchain().distribution != "triton":
        pytest.skip("needs community Triton")
    sizes = "--q 1,1,128,256 --kv 1,1,128,256 --dtype bf16"
    probe = f"plan: attention --target cuda:sm_86 {sizes} --start block_m=64,block_n=64"
    result = probing.run(probing_with(KNOWN.quirks["cuda-0009-shared-memory"], probe), seconds=300)
    assert result.verdict == "confirmed", result
    assert result.reason.startswith("out of resource: shared memory, required")


@pytest.mark.compiles
def test_the_day_the_compiler_is_fixed(tmp_path: Path) -> None:
    program = Path(KNOWN.quirks["rocm-0018-tf32-refused"].file).parent.parent / "probes" / "tf32.py"
    harness = program.with_name("harness.py")
    quirk = plant(tmp_path, program=program.read_text().replace('precision if arm == "off" else "ieee"', '"ieee"'))
    (tmp_path / "probes" / "harness.py").write_text(harness.read_text())
    result = probing.run(quirk, seconds=300)
    assert (result.verdict, result.control.word, result.off.word) == ("stale", "pass", "pass"), result
    assert result.red
