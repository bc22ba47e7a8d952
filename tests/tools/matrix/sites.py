"""A run made by hand that has every kind of cell, for the tests of its site."""

from collections.abc import Callable
from typing import Any

from portattn.schema.plan import Rejection
from portattn.testing.findings import Gate, KernelFacts, Numerics
from portattn.tools.matrix.cells import Cell, Footnote, PlanSummary, Run
from portattn.tools.matrix.problems import decode, dense

SCRIPT = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
KNOWN = "cuda-0012-serialised-wgmma"  # an entry of the registry
UNKNOWN = "cuda-9999-gone"  # of another portattn's
TARGETS = ("cuda:sm_80", "cuda:sm_86", "cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "rocm:gfx90a", "rocm:gfx942")
NARROW = ("rocm:gfx1100", "rocm:gfx1201", "ascend:ascend910b2", "cpu:generic")


def run_of_every_kind(cell: Callable[..., Cell], run_of: Callable[..., tuple[Run, list[Cell]]]) -> tuple[Run, Any]:
    """21 cells of 11 columns and 2 problems: one place has none."""
    right = Numerics(outcome="pass", where="interpreter, triton==3.6.0", error=1e-4, budget=1e-3)
    here = Numerics(outcome="pass", where="cpu:generic with triton==3.6.0", error=1e-4, budget=1e-3)
    fits = KernelFacts(function="dense_forward", facts={"registers": 168, "scratchpad_bytes": 40960, "spills": 0})
    note = Footnote(id=KNOWN, role="applied", sentence=f"spills {SCRIPT}", upstream="unreported", sets={"num_warps": 8})
    gone = Footnote(id=UNKNOWN, role="rejected", sentence=f"gone {SCRIPT}", upstream="https://example.org/1, open")
    no = Rejection(path="gluon_forward", reason=f"needs sm_90 {SCRIPT}", hint="use an H100")
    core = PlanSummary(path="triton", kernel="dense_forward", rejected=(no,))
    variant = PlanSummary(path="gluon_forward", core_taken=False, kernel="dense_forward", schedule={"keys": 128})
    sdpa = PlanSummary(path="sdpa", core_taken=False)
    broken = Gate(name="bytes spilled", function="dense_forward", value=96, limit="none allowed", passed=False)
    changes: dict[str, dict[str, Any]] = {
        "cuda:sm_80": {"plan": core, "footnotes": (gone,), "kernels": (fits,), "interpreter": right},
        "cuda:sm_90": {"plan": variant, "footnotes": (note,), "kernels": (fits,), "interpreter": right},
        "rocm:gfx942": {"level": "emulated", "emulated": right, "interpreter": right, "kernels": (fits,)},
        "rocm:gfx90a": {"status": "FAIL", "level": "declared", "gates": (broken,), "kernels": (fits,), "log": SCRIPT,
                        "stage": "llir", "reason": f"96 bytes spilled {SCRIPT}"},
        "ascend:ascend910b2": {"toolchain": "triton-ascend==3.2.0", "status": "NOT_RUN", "level": "declared",
                               "reason": "not compiled here: triton-ascend==3.2.0: its lab environment is not there; "
                                         "`portattn lab create triton-ascend==3.2.0` makes it"},
        "cpu:generic": {"level": "runs", "native": here, "plan": sdpa},
    }  # fmt: skip
    problems = (dense(dtype="fp16", head_dim=64), decode("GQA", dtype="bf16", head_dim=128))
    cells = [
        cell(target=target, named=named, **changes.get(target, {})) for target in (*TARGETS, *NARROW)
        for named in problems if (target, named) != ("cuda:sm_86", problems[1])
    ]  # fmt: skip
    command = "portattn matrix run " + " ".join(f"--targets {target}" for target in (*TARGETS, *NARROW))
    return run_of(cells, host="made <b>by hand</b>", command=command)
