"""Every form of the scheduled forward, compiled for sm_90, which need not be here: registers, spills, ptxas's warnings.
A handful each time, all of them with `--forms` (`make forms`): each takes some seconds."""

from typing import Any

import msgspec
import pytest
from gluon_ptx import assert_synchronised

from portattn import Problem
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.schedules import ALIBI, DOCUMENTS, LISTED, PREFIX
from portattn.compile.ensure_compiled import compile_in
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.testing import findings
from portattn.testing.findings import KernelFacts

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = ForwardVariant()
# Enough tiles for every chip of this kind: where there are few, keys are split over blocks.
BASE: dict[str, Any] = {
    "batch": 2, "heads_q": 40, "heads_k": 8, "seq_q": 333, "seq_k": 333, "dtype": "bf16", "return_lse": True,
}  # fmt: skip
PACKED: dict[str, Any] = {
    "op": "varlen_attention", "batch": 4, "seq_q": 300, "seq_k": 300, "total_q": 700, "total_k": 700,
}  # fmt: skip
LENGTHS: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
FEW_TILES: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 100, "seq_k": 3000}
# Four heads' rows in a tile; one load a tile, and one for each of several pages.
PAGED: dict[str, Any] = {
    "op": "paged_attention", "heads_q": 32, "seq_k": 768, "page_size": 256, "seqlens_k": True, "batch": 4,
}  # fmt: skip
SMALL_PAGES: dict[str, Any] = PAGED | {"page_size": 16, "total_q": 700}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {"seq_q": 384, "seq_k": 512}, "ragged": {}, "no LSE": {"return_lse": False}, "packed": PACKED,
    "packed, window": PACKED | {"window_left": 30}, "packed, sinks, softcap": PACKED | {"sinks": True, "softcap": True},
    "padded": LENGTHS, "padded, window": LENGTHS | {"window_left": 40}, "window": {"window_left": 100},
    "window on both sides": {"window_left": 17, "window_right": 5}, "split": FEW_TILES | {"seq_q": 128, "seq_k": 4096},
    "split, padded": FEW_TILES | LENGTHS | {"batch": 3}, "split, window": FEW_TILES | {"window_left": 700},
    "softcap": {"softcap": True}, "function": {"score_mod": ALIBI}, "sinks": {"sinks": True},
    "everything": LENGTHS | {"softcap": True, "sinks": True, "window_left": 40}, "pages": PAGED,
    "pages, one head a tile, window": PAGED | {"heads_q": 40, "window_left": 40}, "small pages, packed": SMALL_PAGES,
    "small pages, packed, sinks, softcap, window": SMALL_PAGES | {"sinks": True, "softcap": True, "window_left": 40},
    "e4m3 pages": PAGED | {"kv_format": "e4m3", "kv_scales": "head"},
    "small e5m2 pages, packed, window": SMALL_PAGES | {"kv_format": "e5m2", "window_left": 40},
    "lists": LISTED, "lists, prefix, ragged": LISTED | {"mask_mod": PREFIX},
    "lists, documents": LISTED | {"mask_mod": DOCUMENTS, "seq_q": 384, "seq_k": 512},
    "lists, documents, function": LISTED | {"mask_mod": DOCUMENTS, "score_mod": ALIBI},
}  # fmt: skip
CAUSAL = ("none", "bottom_right", "top_left")
# One of each loop and each width, for every run of the suite.
FEW = (
    ("plain", 64, "none"), ("plain", 128, "bottom_right"), ("plain", 256, "bottom_right"), ("packed", 128, "none"),
    ("padded", 64, "bottom_right"), ("window", 128, "none"), ("split", 64, "none"), ("sinks", 128, "bottom_right"),
    ("split", 128, "bottom_right"), ("ragged", 64, "top_left"), ("pages", 128, "bottom_right"),
    ("small pages, packed", 128, "none"), ("e4m3 pages", 128, "bottom_right"), ("function", 64, "none"),
    ("lists, documents, function", 64, "none"), ("lists", 128, "none"),
)  # fmt: skip
MOST_SPILLED = 256  # bytes a thread, with the release that the schedules were timed with
WIDE_LISTS = 768  # likewise, of functions beside lists and heads of 256 columns: numbers that a tile of rows has once
ALL = [
    (form, head_dim, causal) for form, fields in FORMS.items() for head_dim in (64, 128, 256) for causal in CAUSAL
    if (causal == "none" or not {"window_right", "block_mask"} & {*fields})
    and not ("kv_format" in fields and head_dim == 256)
]  # fmt: skip


def problem(form, head_dim, causal):
    return Problem(**BASE | {"head_dim": head_dim, "causal": causal} | FORMS[form])


def plan_of(p, target=SM_90, name=VARIANT.name):
    return Plan(problem=p, target=target.name, toolchain=str(target.toolchain), requested=name, path=name)


def compiled(worker, target, variant, p):
    """Return the facts of the kernels of `p`, all compiled, no product serialized and no gate broken."""
    assert variant.rejects(p, target) is None
    kernels, failed, _ = findings.compile_variant(variant, plan_of(p, target, variant.name), target, worker, 120.0)
    assert failed is None, failed
    assert "serialized_wgmma" not in next(one for one in kernels if one.function == "scheduled_forward").facts
    assert findings.broken_gates(findings.check_variant(variant, p, target, kernels)) == []
    return kernels


def skip_one_of_many(request, few):
    if not few and not request.config.getoption("--forms"):
        pytest.skip("one of many forms: --forms compiles it")


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal"), ALL, ids=[" ".join(map(str, one)) for one in ALL])
def test_it_compiles_clean(gluon_compiler, gluon_target, request, form, head_dim, causal):
    skip_one_of_many(request, (form, head_dim, causal) in FEW)
    kernels = compiled(gluon_compiler, gluon_target, VARIANT, problem(form, head_dim, causal))
    # And the one that merges splits, or the one that looks for keys which a mask function hides.
    others = ["combine"] * form.startswith("split") + ["find_hidden_keys"] * ("mask_mod" in FORMS[form])
    (main,) = (kernel for kernel in kernels if kernel.function == "scheduled_forward")
    assert [kernel.function for kernel in kernels if kernel is not main] == others
    if str(gluon_target.toolchain) == str(SM_90.toolchain):
        # Wide heads and packed rows take all registers; packed ones were timed with what they spill. What other
        # releases spill, which concerns speed alone, is in docs/performance/hopper-forward.md.
        few = (form, head_dim, causal) in FEW and "e4m3" not in form
        most = WIDE_LISTS if "lists" in form and head_dim == 256 else MOST_SPILLED
        assert main.facts["spills"] <= (0 if few else most)


@pytest.mark.compiles
def test_the_compiler_keeps_to_its_part_of_synchronisation(gluon_compiler, gluon_target):
    p = problem("plain", 128, "none")
    plan, (signature, *_) = plan_of(p, gluon_target), signatures(VARIANT, meta_call(p))
    reply = compile_in(gluon_compiler, signature, plan, gluon_target, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    assert_synchronised(str(reply.facts["ptx"]))


@pytest.mark.parametrize(
    ("facts", "broken"),
    [
        ({}, ""),
        ({"spills": 96}, ""),  # the schedule was timed with them
        ({"serialized_wgmma": 1}, "products made to wait by ptxas"),
        ({"scratchpad_bytes": 240_000}, "bytes of shared memory"),
        ({"wgmma": 0}, "matrix instructions"),
    ],
)
def test_what_is_not_as_it_is_scheduled_is_a_gate(facts, broken):
    good = {"scratchpad_bytes": 197_000, "registers": 168, "spills": 0, "wgmma": 64}
    kernels = (KernelFacts(function="scheduled_forward", facts=good | facts),)
    p = problem("plain", 128, "none")
    assert VARIANT.timed_with(p)
    seen = findings.check_variant(VARIANT, p, SM_90, kernels)
    assert [gate.name for gate in seen if not gate.passed] == ([broken] if broken else [])
    status = findings.gate_fields(kernels, seen)
    assert (status["status"], status["level"]) == (("FAIL", "declared") if broken else ("PASS", "compiles"))


def test_a_signature_says_what_a_compiler_sees():
    pytest.importorskip("triton.experimental.gluon")
    forward, merging = signatures(VARIANT, meta_call(problem("split", 128, "none")))
    assert (forward.module, forward.function) == ("portattn.backends.cuda.hopper_forward.kernel", "scheduled_forward")
    assert forward.types["q_desc"].startswith("tensordesc<bf16[1, 1, 64, 128],NVMMASharedLayout(")
    assert forward.types["lse"] == "*fp32"
    assert forward.types["out"] == "*fp32"  # partial results
    assert forward.types["batches"] == "i32"  # it is 1, and the kernel does not specialise on it
    assert forward.constants["lengths_q"] is None
    assert (forward.constants["DIM"], forward.constants["SPLIT"]) == (128, True)
    assert {"lse", "out", "counter"} <= set(forward.divisible)
    assert forward.options == {"num_warps": 4, "maxnreg": 168, "enable_fp_fusion": True}
    assert merging.function == "combine"
    assert merging.options == {"num_warps": 1, "launch_pdl": True, "enable_fp_fusion": True}
    assert msgspec.json.decode(msgspec.json.encode(forward), type=type(forward)) == forward


def test_what_is_not_aligned_is_another_signature():
    """Sinks and lengths come as their caller has them."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton.experimental.gluon")
    call = meta_call(problem("sinks", 128, "none"))
    call.sinks = torch.zeros(8)[:4]
    assert "sinks" in signatures(VARIANT, call)[0].divisible
    call.sinks = torch.zeros(8)[1:5]
    assert "sinks" not in signatures(VARIANT, call)[0].divisible
