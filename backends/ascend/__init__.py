"""Huawei Ascend NPUs: detection through torch_npu, versions of CANN and driver, and torch_npu's fused attention.

The fused attention follows published signatures and was never run on an NPU here. Sources: Ascend/op-plugin,
docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention.md, torch_npu-npu_fused_infer_attention_score.md and
op_plugin_functions.yaml; hicann/ops-transformer, aclnnFlashAttentionScore.md (softmax statistics, chips)."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from portattn.backends.detection import first_line_matching, version_in
from portattn.planning.backend import (
    Backend,
    Check,
    VendorPath,
    dropout_check,
    features_check,
    first_refusal,
    op_check,
    splits_check,
)
from portattn.schema.target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.testing.executor import Executor

# sparse_mode: 0 everything, 2 causal from the upper left corner, 3 causal from the lower right corner. 2 and 3
# take one compressed mask for every length.
SPARSE_MODE = {"none": 0, "top_left": 2, "bottom_right": 3}
COMPRESSED_MASK_SIZE = 2048
INFER_ROWS_MAY_BE_EMPTY = 2  # inner_precise: high precision, and rows that are masked whole are corrected

# Both functions have arguments for some features (pse, atten_mask, sink). None is passed before it was seen to work.
CALLED_WITHOUT = "is called without"

SUPPORTED_ARCHES = ("ascend910b*", "ascend910_93")  # Atlas A2 and A3


class NpuFusionAttention(VendorPath):
    """torch_npu.npu_fusion_attention: dense attention, whose LSE is differentiated here: its formula ignores that.

    The LSE is max + log(sum) of its statistics, (B, N, Sq, 8) float32 with eight equal columns."""

    name = "npu_fusion_attention"
    ops = ("attention",)
    takes = frozenset({"causal", "causal_top_left", "return_lse", "needs_grad", "negative_scale", "gqa"})

    MAX_HEAD_DIM = 768
    MAX_HEADS = 256
    MAX_SEQ = 1 << 20  # "1M"
    MAX_BATCH = 2 << 20  # "2M"

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        return first_refusal(
            self.name,
            _arch_check(self.name, target),
            op_check(
                self.name,
                p,
                ("attention",),
                "is called for dense tensors alone",
                "npu_fused_infer_attention_score takes decode_attention, for inference"
                if p.op == "decode_attention"
                else "backend='reference'",
            ),
            features_check(self.name, p, CALLED_WITHOUT),
            dropout_check(self.name, p),
            _padding_check(self.name, p, ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")),
            _empty_check(self.name, p),
            _blind_rows_check(self.name, p),
            _head_dim_v_check(self.name, p),
            _limit(self.name, "head_dim", p.head_dim, self.MAX_HEAD_DIM),
            _limit(self.name, "heads_q", p.heads_q, self.MAX_HEADS),
            _limit(self.name, "seq_q", p.seq_q, self.MAX_SEQ),
            _limit(self.name, "seq_k", p.seq_k, self.MAX_SEQ),
            _limit(self.name, "batch", p.batch, self.MAX_BATCH),
        )

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run npu_fusion_attention; a gradient of the LSE costs one more forward and backward pass."""
        import torch_npu

        p = call.problem
        attend = functools.partial(
            torch_npu.npu_fusion_attention,
            head_num=p.heads_q,
            input_layout="BNSD",
            scale=float(call.scale),  # its default is 1.0, not 1/√D
            **_mask(p, call.q.device),
        )
        out, softmax_max, softmax_sum, *_ = attend(call.q, call.k, call.v)
        if not p.return_lse:
            return out, None
        # Detached: the vendor's node would be run without a gradient where a loss depends on the LSE alone.
        lse = softmax_max.detach()[..., 0] + softmax_sum.detach()[..., 0].log()
        return out, _differentiable_lse().apply(call.q, call.k, lse, call.scale, attend) if p.needs_grad else lse


class NpuFusedInferAttentionScore(VendorPath):
    """torch_npu.npu_fused_infer_attention_score: inference; a call with lengths waits for their copy to the host.

    Rows that attend nothing are documented as imprecise: they are overwritten with 0, and their LSE with -inf."""

    name = "npu_fused_infer_attention_score"
    ops = ("attention", "decode_attention")
    takes = frozenset({"causal", "causal_top_left", "seqlens_q", "seqlens_k", "return_lse", "negative_scale", "gqa"})

    DTYPES = ("fp16", "bf16")
    MAX_HEAD_DIM = 512
    HEAD_DIM_MULTIPLE = 16
    MAX_HEADS = 256
    MAX_GROUP = 64
    MAX_BATCH = 65536
    MAX_SEQ = 20 * (1 << 20)  # 20,971,520
    MAX_SEQ_K_OF_ONE_ROW = 1 << 18  # seq_q = 1 goes to its incremental branch, with a limit of its own

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        return first_refusal(
            self.name,
            _arch_check(self.name, target),
            op_check(self.name, p, ("attention", "decode_attention"), "is called for dense tensors and caches alone"),
            features_check(self.name, p, CALLED_WITHOUT),
            splits_check(self.name, p),
            (
                p.dtype not in self.DTYPES,
                f"dtype is {p.dtype}, and {self.name} takes {' and '.join(self.DTYPES)}",
                "npu_fusion_attention takes fp32",
            ),
            (
                p.needs_grad,
                f"gradients are asked for, and {self.name} is for inference",
                "npu_fusion_attention for training, or call it under torch.no_grad()",
            ),
            (
                p.dropout,
                f"dropout_p > 0, and {self.name} has no dropout",
                "dropout_p=0.0, or backend='reference'",
            ),
            _padding_check(self.name, p, ("leftpad_q", "leftpad_k")),
            _empty_check(self.name, p),
            (
                p.causal == "top_left" and p.seq_q == 1,
                f"causal top-left with seq_q 1, and {self.name} applies no sparse mode to a single row",
                "pass the first key and value only",
            ),
            _head_dim_v_check(self.name, p),
            _limit(self.name, "head_dim", p.head_dim, self.MAX_HEAD_DIM),
            (
                p.head_dim % self.HEAD_DIM_MULTIPLE != 0,
                f"head_dim is {p.head_dim}, and {self.name} takes multiples of {self.HEAD_DIM_MULTIPLE}",
                "pad the heads, or backend='reference'",
            ),
            _limit(self.name, "heads_q", p.heads_q, self.MAX_HEADS),
            _limit(self.name, "query heads for each key/value head", p.group, self.MAX_GROUP),
            _limit(self.name, "batch", p.batch, self.MAX_BATCH),
            _limit(self.name, "seq_q", p.seq_q, self.MAX_SEQ),
            _limit(self.name, "seq_k", p.seq_k, self.MAX_SEQ_K_OF_ONE_ROW if p.seq_q == 1 else self.MAX_SEQ),
        )

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run npu_fused_infer_attention_score; waits for the device if lengths are given."""
        import torch_npu

        p = call.problem
        attending = _attending_rows(call)
        # A single row's own length is documented as ignored.
        lengths_q = None if p.seq_q == 1 else _host_lengths(call.seqlens_q, p.seq_q)
        out, lse = torch_npu.npu_fused_infer_attention_score(
            call.q.contiguous(),  # documented: no support for strided tensors
            call.k.contiguous(),
            call.v.contiguous(),
            actual_seq_lengths=lengths_q,
            actual_seq_lengths_kv=_host_lengths(call.seqlens_k, p.seq_k),
            num_heads=p.heads_q,
            num_key_value_heads=p.heads_k,
            input_layout="BNSD",
            scale=float(call.scale),  # its default is 1.0, not 1/√D
            inner_precise=INFER_ROWS_MAY_BE_EMPTY if attending is not None and p.seq_q > 1 else 0,
            softmax_lse_flag=p.return_lse,
            **_mask(p, call.q.device),
        )
        lse = lse[..., 0] if p.return_lse else None  # (B, N, Sq, 1)
        if attending is not None:
            idle = ~attending[:, None, :]  # (B, 1, Sq)
            out = out.masked_fill(idle[..., None], 0.0)
            lse = None if lse is None else lse.masked_fill(idle, -math.inf)
        return out, lse


@functools.cache
def _differentiable_lse() -> Any:
    """Return the autograd function (q, k, lse, scale, attend) -> lse, made at first use: plans need no torch.

    With weights P and the LSE's gradient g, dq = scale · g · (P k) and dk = scale · Pᵀ (g · q)."""
    import torch

    class DifferentiableLse(torch.autograd.Function):
        @staticmethod
        def forward(
            q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, attend: Callable[..., Any]
        ) -> torch.Tensor:
            return lse.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            q, k, _, ctx.scale, ctx.attend = inputs
            ctx.save_for_backward(q, k)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k = (tensor.detach() for tensor in ctx.saved_tensors)
            weight = (ctx.scale * grad_lse)[..., None]  # [B, Hq, Sq, 1]
            with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                values = k.detach().requires_grad_(ctx.needs_input_grad[1])
                mean_keys = ctx.attend(q, k, values)[0]  # [B, Hq, Sq, D]
            grad_q = (weight * mean_keys.detach()).to(q.dtype) if ctx.needs_input_grad[0] else None
            grad_k = None
            if ctx.needs_input_grad[1]:
                (grad_k,) = torch.autograd.grad(mean_keys, values, (weight * q).to(q.dtype))
            return grad_q, grad_k, None, None, None

    return DifferentiableLse


def _mask(p: Problem, device: torch.device) -> dict[str, Any]:
    """Return a problem's sparse_mode and atten_mask. A single bottom-right row sees every key: no mask."""
    if p.causal == "none" or (p.causal == "bottom_right" and p.seq_q == 1):
        return {"sparse_mode": SPARSE_MODE["none"]}
    return {"sparse_mode": SPARSE_MODE[p.causal], "atten_mask": compressed_causal_mask(device)}


@functools.lru_cache(maxsize=16)
def compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Return the mask of sparse modes 2 and 3 for every length: (2048, 2048) bool, True = masked, 4 MiB a device."""
    import torch

    # Kept for later calls, which may ask for gradients: a tensor born under inference_mode could not serve them.
    with torch.inference_mode(False):
        size = COMPRESSED_MASK_SIZE
        return torch.ones(size, size, dtype=torch.bool, device=device).triu(diagonal=1)


def _host_lengths(lengths: torch.Tensor | None, capacity: int) -> list[int] | None:
    """Return lengths as ints in 1..capacity; None for all. A length of 0 is undocumented: 1 is passed instead."""
    if lengths is None:
        return None
    return [min(max(n, 1), capacity) for n in lengths.tolist()]


def _attending_rows(call: Call) -> torch.Tensor | None:
    """Return the rows that attend a key, (B, Sq) bool; None if every row always does."""
    import torch

    p = call.problem
    some_see_nothing = p.causal == "bottom_right" and p.seq_q > p.seq_k
    if call.seqlens_q is None and call.seqlens_k is None and not some_see_nothing:
        return None
    rows = torch.arange(p.seq_q, device=call.q.device)  # [Sq]

    def ends(lengths: torch.Tensor | None, capacity: int) -> torch.Tensor:  # [B, 1]
        given = torch.full((p.batch,), capacity, device=rows.device) if lengths is None else lengths
        return given.to(rows.dtype).clamp(0, capacity)[:, None]

    end_q, end_k = ends(call.seqlens_q, p.seq_q), ends(call.seqlens_k, p.seq_k)
    attending = (rows < end_q) & (end_k > 0)
    if p.causal == "bottom_right":
        attending &= rows + end_k - end_q >= 0  # the last valid row sees the last valid key
    return attending


def _arch_check(path: str, target: Target) -> Check:
    arch = target.arch.name
    return (
        not any(fnmatch.fnmatchcase(arch, pattern) for pattern in SUPPORTED_ARCHES),
        f"arch is {arch}, and {path} is documented for {', '.join(SUPPORTED_ARCHES)} (Atlas A2 and A3)",
        "backend='reference'",
    )


def _padding_check(path: str, p: Problem, names: tuple[str, ...]) -> Check:
    given = [name for name in names if getattr(p, name)]
    what = "lengths or left padding" if "seqlens_k" in names else "left padding (one amount serves a whole batch)"
    reason = f"{', '.join(given)} given, and {path} takes no per-sequence {what}"
    return bool(given), reason, "backend='reference'"


def _empty_check(path: str, p: Problem) -> Check:
    sizes = {"batch": p.batch, "seq_q": p.seq_q, "seq_k": p.seq_k}
    empty = [name for name, size in sizes.items() if size == 0]
    reason = f"{', '.join(empty)} is 0, and {path} takes sizes from 1"
    return bool(empty), reason, "backend='reference' gives zeros"


def _blind_rows_check(path: str, p: Problem) -> Check:
    return (
        p.causal == "bottom_right" and p.seq_q > p.seq_k,
        f"causal bottom-right with seq_q {p.seq_q} over seq_k {p.seq_k} leaves the first {p.seq_q - p.seq_k} rows "
        f"without a key, and what {path} gives for them is not documented",
        "drop those rows, or backend='reference'",
    )


def _head_dim_v_check(path: str, p: Problem) -> Check:
    return (
        p.head_dim_v != p.head_dim,
        f"head_dim_v is {p.head_dim_v} with head_dim {p.head_dim}, and {path} takes keys and values of one shape",
        "pad the narrower one, or backend='reference'",
    )


def _limit(path: str, what: str, value: int, most: int) -> Check:
    return value > most, f"{what} is {value}, and {path} takes up to {most}", "backend='reference'"


DEFAULT_CANN_HOME = "/usr/local/Ascend/ascend-toolkit/latest"
DRIVER_VERSION_FILE = Path("/usr/local/Ascend/driver/version.info")


@functools.cache
def _import_error() -> str:
    """Return the error of torch_npu's first import, or an empty string: a second import fails by the first's halves."""
    try:
        import torch_npu as torch_npu
    except Exception as error:  # noqa: BLE001 - as in `_device_name`
        return f"{type(error).__name__}: {error}"
    return ""


def _device_name(index: int | None) -> tuple[str, str]:
    """Return the SoC name of NPU `index`, or the error that torch_npu raised instead; both empty without an NPU."""
    step = "import torch_npu"
    try:
        if importlib.util.find_spec("torch_npu") is None:
            return "", ""
        if trouble := _import_error():
            return "", f"{step} raised {trouble}"
        import torch_npu

        step = "torch_npu.npu.is_available()"
        if not torch_npu.npu.is_available():
            return "", ""
        step = f"torch_npu.npu.get_device_name({'' if index is None else index})"
        return torch_npu.npu.get_device_name(index).strip(), ""
    except Exception as error:  # noqa: BLE001 - where CANN or the driver is half configured, torch_npu raises anything
        return "", f"{step} raised {type(error).__name__}: {error}"


class AscendBackend(Backend):
    name = "ascend"
    title = "Huawei Ascend"
    device_type = "npu"
    default_toolchain = "triton-ascend==3.2.0"
    folder = Path(__file__).parent
    compiler_folders = ("backends/ascend/",)
    compiler_words = ("triton-ascend",)
    compiler_says = (
        "[ConvertTritonIRToLinalgIR]",
        "[ConvertLinalgRToBinary]",
        "[ConvertLinalgIRToBinary]",
        "BiShengHIR",
    )
    device_words = ("huawei", "npu", "[0-9]*gb")
    options = MappingProxyType({"multibuffer": bool, "enable_fp_fusion": bool})
    compilers = ("triton-ascend", "flagtree")
    adapter = "portattn.worker.ascend:compile_kernel"
    vendor = (NpuFusionAttention(), NpuFusedInferAttentionScore())

    def detect(self, index: int | None = None) -> str | None:
        """Return the arch of NPU `index`; None without an NPU, torch_npu or CANN, and for a chip without an arch."""
        name = _device_name(index)[0]
        return self.arch_of(name) if name else None

    def describe(self, index: int | None = None) -> str:
        return _device_name(index)[0]

    def trouble(self, index: int | None = None) -> str:
        return _device_name(index)[1]

    def machine_components(self) -> dict[str, str]:
        homes = (os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME"), DEFAULT_CANN_HOME)
        home = next(h for h in homes if h)
        install = Path(home) / f"{platform.machine()}-linux" / "ascend_toolkit_install.info"
        found = {
            "cann": version_in(first_line_matching(install, r"^version=(\S+)")),
            "driver": version_in(first_line_matching(DRIVER_VERSION_FILE, r"^Version=(\S+)")),
        }
        return {name: version for name, version in found.items() if version}

    def executors(self, seconds: float, here: Sequence[Target] = ()) -> tuple[Executor, ...]:
        from portattn.backends.ascend.linalg.executor import LinalgExecutor

        return (LinalgExecutor(seconds),)
