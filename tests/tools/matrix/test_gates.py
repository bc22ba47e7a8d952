"""Compiled code against the chip."""

import datetime

import pytest
from msgspec.structs import replace

from portattn.config import Settings
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, parse_target
from portattn.schema.ops import ROWS
from portattn.schema.tuning import TIMED_SPILLS, ProblemFigures, Source
from portattn.testing import findings
from portattn.testing.findings import KernelFacts
from portattn.tools.matrix.problems import dense, quick

FITS = {"scratchpad_bytes": 1024, "registers": 64, "spills": 0, "mma": 4, "wgmma": 4, "mfma": 4}


def with_tunings(registry: Registry, measured: bool) -> Registry:
    tunings = {
        backend: {
            name: replace(tuning, provenance=replace(tuning.provenance, measured=measured))
            for name, tuning in found.items()
        }
        for backend, found in registry.tunings.items()
    }
    return replace(registry, tunings=tunings)


def check(
    target="cuda:sm_90", dtype="fp16", dot_precision="ieee", registry=None, timed=False, named=None, **facts
):  # fmt: skip
    registry = with_tunings(registry or Registry.load(), timed)
    where = parse_target(target, "triton==3.6.0")
    problem = (named or dense(dtype=dtype, head_dim=64)).problem
    made = plan(problem, where, registry, settings=Settings(backend="triton"))  # no variant
    made = replace(made, lowering=replace(made.lowering, dot_precision=dot_precision))
    kernels = (KernelFacts(function=made.form or CORES[problem.op].function, facts=FITS | facts),)
    return {g.name: g.explained_by for g in findings.check_gates(made, where, kernels, registry) if not g.passed}


@pytest.mark.parametrize(("target", "facts", "broken"), [
    ("cuda:sm_90", {}, ""), ("rocm:gfx942", {}, ""), ("cuda:sm_90", {"spills": 4}, "bytes spilled"),
    ("cuda:sm_90", {"registers": 256}, "registers"),
    ("cuda:sm_90", {"scratchpad_bytes": 232449}, "bytes of shared memory"),
    ("cuda:sm_90", {"mma": 0, "wgmma": 0}, "matrix instructions"), ("rocm:gfx942", {"registers": 512}, ""),
    ("rocm:gfx942", {"scratchpad_bytes": 65537}, "bytes of LDS"),
    ("rocm:gfx942", {"mfma": 0}, "matrix instructions"),  # mma is no instruction of that chip
    ("cuda:sm_90", {"dtype": "fp32", "mma": 0, "wgmma": 0}, ""),  # an exact product needs none
    ("cuda:sm_90", {"dtype": "fp32", "dot_precision": "tf32", "mma": 0, "wgmma": 0}, "matrix instructions"),
])  # fmt: skip
def test_each_limit_of_an_arch_is_a_gate(target, facts, broken):
    assert check(target, **facts) == ({broken: ""} if broken else {})


def test_a_tile_that_was_timed_on_the_chip_may_spill_so_much():
    unrecorded = with_spills(Registry.load(), "*_forward", spills=0)
    assert check(timed=True, registry=unrecorded, spills=TIMED_SPILLS) == {}
    assert check(timed=True, registry=unrecorded, spills=TIMED_SPILLS + 4) == {"bytes spilled": ""}
    assert check(timed=True, scratchpad_bytes=232449) == {"bytes of shared memory": ""}


def planned(registry, toolchain="triton==3.6.0", **fields):
    """A core plan of a dense problem on sm_90, and its gate of spills by their number."""
    target = parse_target("cuda:sm_90", toolchain)
    made = plan(replace(dense(dtype="fp16", head_dim=64).problem, **fields), target, registry,
                settings=Settings(backend="triton"))  # fmt: skip

    def spilled(number):
        facts = KernelFacts(function="dense_forward", facts=FITS | {"spills": number})
        (gate,) = [one for one in findings.check_gates(made, target, (facts,), registry) if one.name == "bytes spilled"]
        return gate

    return spilled


def with_spills(registry, kernel, **fields):
    """The registry whose entries of a kernel on sm_90 have these fields."""
    tuning = registry.tunings["cuda"]["sm_90"]
    entries = tuple(replace(one, **fields) if one.kernel == kernel else one for one in tuning.entry)
    cuda = registry.tunings["cuda"] | {"sm_90": replace(tuning, entry=entries)}
    return replace(registry, tunings=registry.tunings | {"cuda": cuda})


def test_a_timed_tile_may_spill_what_its_entry_says_or_tune_recorded_of_it():
    registry = with_spills(Registry.load(), "*_forward", spills=1024)
    spilled = planned(registry)
    assert [spilled(number).passed for number in (1024, 1028)] == [True, False]
    assert str(spilled(1028)) == "dense_forward: 1028 bytes spilled, 1024 allowed by the tuning entry"
    assert not planned(registry, "triton==3.8.0")(4).passed, "it was timed with another compiler"
    recorded = Source(chip="H200", toolchain="triton==3.6.0", date=datetime.date(2026, 11, 22), measured=True,
                      spills=488, figures=(ProblemFigures(problem="a problem"),))  # fmt: skip
    spilled = planned(with_spills(Registry.load(), "*_forward", spills=0, provenance=recorded))
    assert [spilled(number).passed for number in (488, 492)] == [True, False]
    few = with_spills(Registry.load(), "*_forward", spills=0, provenance=replace(recorded, spills=8))
    assert [planned(few)(number).passed for number in (TIMED_SPILLS, TIMED_SPILLS + 4)] == [True, False]


@pytest.mark.parametrize(("toolchain", "allowed"), [("triton==3.6.0", TIMED_SPILLS), ("triton==3.9.0", 488)])
def test_a_timed_schedule_may_spill_so_much(toolchain, allowed):
    """Of long causal heads of 64 columns, whose schedule for 3.9 has a record of its own."""
    target = parse_target("cuda:sm_90", toolchain)
    long = replace(dense(dtype="fp16", head_dim=64).problem, seq_q=16384, seq_k=16384, causal="bottom_right")
    variant = next(one for one in Registry.load().backends["cuda"].variants if one.name == "gluon_forward")

    def passed(number):
        facts = KernelFacts(function="scheduled_forward", facts=FITS | {"spills": number})
        found = findings.check_variant(variant, long, target, (facts,))
        return next(gate for gate in found if gate.name == "bytes spilled").passed

    assert [passed(number) for number in (allowed, allowed + 4)] == [True, False]


@pytest.mark.parametrize("named", quick(), ids=lambda named: named.name)
def test_the_kernel_of_every_op_is_looked_at_for_matrix_instructions(named):
    exact = named.problem.dtype == "fp32"
    gathers = named.problem.op == "sparse_attention"  # row by row: there is no product of matrices
    stores = ROWS[named.problem.op].writes and named.problem.op != "indexer_logits"
    expected = {} if exact or gathers or stores else {"matrix instructions": ""}
    assert check(named=named, mma=0, wgmma=0) == expected


def test_a_quirk_whose_signature_matches_explains_a_gate():
    registry = Registry.load()
    quirk = next(q for q in registry.quirks.values() if q.id == "cuda-0012-serialised-wgmma")
    evidence = replace(quirk.evidence, signature=r"8 bytes spilled", last_seen="")
    spill = replace(quirk, id="cuda-9999-spill", when=type(quirk.when)(backend="cuda"), evidence=evidence)
    planted = replace(registry, quirks={spill.id: spill})
    elsewhere = replace(registry, quirks={spill.id: replace(spill, when=type(quirk.when)(backend="rocm"))})
    for known, spills, explained in ((planted, 8, spill.id), (planted, 12, ""), (elsewhere, 8, "")):
        assert check(registry=known, spills=spills) == {"bytes spilled": explained}


def test_a_quirk_is_asked_with_the_real_number_of_programs(monkeypatch):
    registry = Registry.load()
    quirk = next(q for q in registry.quirks.values() if q.id == "cuda-0012-serialised-wgmma")
    spill = replace(quirk, id="cuda-9999-spill", evidence=replace(quirk.evidence, signature="8 bytes spilled"))
    asked = []
    monkeypatch.setattr(type(quirk), "applies", lambda self, *given: asked.append(given) or True)
    where = parse_target("cuda:sm_90", "triton==3.6.0")
    core = Settings(backend="triton")
    made = plan(dense(dtype="fp16", head_dim=64).problem, where, replace(registry, quirks={}), settings=core)
    kernels = (KernelFacts(function=made.kernel, facts=FITS | {"spills": 8}),)
    planted = replace(with_tunings(registry, False), quirks={spill.id: spill})
    assert [g.explained_by for g in findings.check_gates(made, where, kernels, planted) if not g.passed] == [spill.id]
    p = made.problem
    assert asked[0][-1] == p.batch * p.heads_q * -(-p.seq_q // made.launch.block_m) > 0


def test_spills_of_a_tile_that_was_chosen_with_another_compiler_are_noted() -> None:
    """They cost time and are no fault; what does not fit the chip stays one."""
    registry = with_tunings(Registry.load(), False)
    sm_90, core = parse_target("cuda:sm_90", "triton==3.6.0"), Settings(backend="triton")
    made = plan(dense(dtype="fp16", head_dim=64).problem, sm_90, registry, settings=core)
    facts = FITS | {"spills": 8, "scratchpad_bytes": 10**6}
    for toolchain, noted in (("triton==3.6.0", False), ("triton==3.8.0", True)):
        target = parse_target("cuda:sm_90", toolchain)
        found = findings.check_gates(made, target, (KernelFacts(function="dense_forward", facts=facts),), registry)
        by_name = {gate.name: gate for gate in found if not gate.passed}
        assert by_name["bytes spilled"].noted is noted
        assert ("chosen with triton==3.6.0" in str(by_name["bytes spilled"])) is noted
        assert not by_name["bytes of shared memory"].noted


def test_both_kernels_of_gradients_have_matrix_instructions():
    sm_90, core, registry = parse_target("cuda:sm_90", "triton==3.6.0"), Settings(backend="triton"), Registry.load()
    problem = next(named.problem for named in quick() if named.problem.op == "attention_backward")
    made = plan(problem, sm_90, registry, settings=core)
    for without in ("backward_keys", "backward_rows"):
        none = FITS | {"mma": 0, "wgmma": 0}
        kernels = tuple(
            KernelFacts(function=name, facts=none if name in (without, "backward_delta") else FITS)
            for name in ("backward_delta", "backward_keys", "backward_rows")
        )
        gates = findings.check_gates(made, sm_90, kernels, registry)
        assert [(one.name, one.function) for one in gates if not one.passed] == [("matrix instructions", without)]
