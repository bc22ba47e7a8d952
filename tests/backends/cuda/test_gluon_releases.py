"""The scheduled kernels under each release of Triton that this machine has: their names, their code, their launches.
The installed release, and those of the lab: `portattn lab create triton==3.9.0`."""

from pathlib import Path

import gluon_ptx
import pytest
from fakedriver import run, triton_folders
from packaging.version import Version
from test_gluon_backward import FORMS as BACKWARD_FORMS
from test_gluon_forms import problem as forward_problem
from test_gluon_indexer import PAGED
from test_gluon_indexer import problem as indexer_problem
from test_gluon_mla import problem as latent_problem
from test_gluon_narrow import problem as narrow_problem
from test_gluon_wide import problem as wide_problem

from portattn import Problem
from portattn.compile.ensure_compiled import compile_in
from portattn.config import Settings
from portattn.planning.backend import Variant
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.testing import findings

TRITONS = triton_folders()
HERE = Path(__file__).parent
TMA = "triton.experimental.gluon.language.nvidia.hopper.tma"
COPY = "triton.experimental.gluon.language.nvidia.ampere.async_copy"
MEMORY = "triton.experimental.gluon.language._core.shared_memory_descriptor"
OLD = {
    "load": f"{TMA}.async_copy_global_to_shared", "gather": f"{COPY}.async_copy_global_to_shared",
    "store": f"{TMA}.async_copy_shared_to_global",
    "reduce_add": "portattn.backends.cuda.gluon_names.reduce_add", "reinterpreted": f"{MEMORY}._reinterpret",
    "aggregate": "triton.language.core._aggregate",
}  # fmt: skip
NEW = OLD | {
    "load": f"{TMA}.async_load", "gather": f"{COPY}.async_load", "store": f"{TMA}.async_store",
    "reduce_add": f"{TMA}.async_atomic_add",
}  # fmt: skip
NAMES = {"3.6.0": OLD, "3.7.1": OLD, "3.8.0": NEW, "3.9.0": NEW | {"reinterpreted": f"{MEMORY}.reinterpret"}}
VARIANTS: dict[str, Variant] = {variant.name: variant for variant in Registry.load().backends["cuda"].variants}
# One form of each kernel; between them every name, masks, packed rows and split keys.
FORMS: dict[str, tuple[str, Problem, tuple[str, ...]]] = {
    "forward, packed": ("gluon_forward", forward_problem("packed", 128, "none"), ("scheduled_forward",)),
    "forward, split": ("gluon_forward", forward_problem("split", 64, "none"), ("scheduled_forward", "combine")),
    "forward, e4m3": (
        "gluon_forward_fp8", narrow_problem("packed", 128, "none"), ("transpose_values", "scheduled_forward"),
    ),
    "forward, int8": (
        "gluon_forward_int8", narrow_problem("plain", 128, "bottom_right", "int8"), ("scheduled_forward",),
    ),
    "forward, int8, full": ("gluon_forward_int8", narrow_problem("plain", 128, "none", "int8"), ("scheduled_forward",)),
    "wide": ("gluon_wide", wide_problem(causal="bottom_right"), ("wide_forward",)),
    "latent": ("gluon_mla", latent_problem(num_splits=1), ("latent_decode",)),
    "latent, lists": ("gluon_mla", latent_problem(num_splits=1, tokens=300), ("latent_decode",)),
    "latent, lists of bytes": (
        "gluon_mla", latent_problem(num_splits=1, tokens=300, kv_format="fp8_ds_mla"), ("latent_decode",),
    ),
    "indexer": ("gluon_indexer", indexer_problem(**PAGED), ("scheduled_index_scores",)),
    "backward": (
        "gluon_backward", BACKWARD_FORMS["64, packed, causal"],
        ("row_statistics", "scheduled_backward", "query_gradients"),
    ),
    "backward, repeatable": (
        "gluon_backward", BACKWARD_FORMS["128, repeatable"],
        ("row_statistics", "scheduled_backward", "scheduled_queries"),
    ),
    "backward, in turns": (
        "gluon_backward", BACKWARD_FORMS["128, in turns, causal"],
        ("row_statistics", "scheduled_backward", "query_gradients"),
    ),
}  # fmt: skip
# The core is taken unless they are asked for.
ASKED = {name: Settings(backend=name) for name in ("gluon_forward_fp8", "gluon_forward_int8")}
MOST_SPILLED = 128  # bytes a thread; docs/performance/hopper-forward.md has what each release spills


def test_each_kernel_has_a_form():
    assert {name for name, _, _ in FORMS.values()} == set(VARIANTS)


def test_the_names_of_a_release(release, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    found = run(str(HERE / "gluon_names_child.py"), tmp_path, TRITONS[release])
    assert Version(found.pop("triton")).base_version == release
    assert found == NAMES[release]


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_a_release_compiles_them(release_compiler, release_target, form):
    pytest.importorskip("triton.experimental.gluon")
    name, problem, functions = FORMS[form]
    variant = VARIANTS[name]
    made = plan(problem, release_target, settings=ASKED.get(name, Settings()))
    assert made.path == name
    kernels, failed, _ = findings.compile_variant(variant, made, release_target, release_compiler, 240.0)
    assert failed is None, failed
    assert tuple(kernel.function for kernel in kernels) == functions
    for kernel in kernels:
        assert "serialized_wgmma" not in kernel.facts, kernel.function
        assert kernel.facts["spills"] <= MOST_SPILLED, kernel.function
    assert findings.broken_gates(findings.check_variant(variant, problem, release_target, kernels)) == []
    for signature in findings.variant_launches(variant, problem):
        if signature.function.startswith(("scheduled_", "latent_", "wide_")):
            reply = compile_in(release_compiler, signature, made, release_target, 240.0, "text")
            gluon_ptx.assert_synchronised(str(reply.facts["ptx"]))


@pytest.mark.compiles
def test_a_release_launches_them_with_the_tensor_maps_that_it_makes_itself(release, tmp_path):
    """By native.c, by Python, and by Triton: the driver's library records what it is given."""
    found = run("differing_child.py", tmp_path, TRITONS[release], "maps")
    assert Version(found["triton"]).base_version == release
    assert found["maps"]["path"] == "gluon_forward"
    assert (found["maps"]["C"], found["maps"]["python"]) == (True, True)
    assert found["maps"]["made by native.c"] == [True] * 4


PTX = """
	st.shared.b32 	[%r1], %r2;
	{bar}
	// begin inline asm
	add.s32 	%r3, %r4, 8;
	@%p1 mbarrier.arrive.shared::cta.b64 _, [%r3];
	bar.sync 	{number}, 128;
"""


@pytest.mark.parametrize(
    ("bar", "number", "right"),
    [
        ("bar.sync 0, 128;", 2, True), ("bar.warp.sync -1;", 2, True), ("barrier.sync 0;", 2, True), ("", 2, False),
        ("mbarrier.arrive.expect_tx.shared.b64 _, [%r9], 8;", 2, False), ("bar.sync 0, 128;", 5, False),
    ],
)  # fmt: skip
def test_what_is_not_synchronised_is_seen(bar, number, right):
    ptx = PTX.format(bar=bar, number=number)
    if right:
        gluon_ptx.assert_synchronised(ptx)
    else:
        with pytest.raises(AssertionError):
            gluon_ptx.assert_synchronised(ptx)
