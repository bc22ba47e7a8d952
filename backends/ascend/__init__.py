"""Huawei Ascend NPUs: detection through torch_npu, versions of CANN and driver, and torch_npu's fused attention."""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from portattn.backends.ascend.vendor import INFER, MAX_INTERLEAVED, blind_rows, run_fusion, run_infer
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
    import torch

    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.testing.executor import Executor

# Of the other features softcap has no argument, and a boolean mask has one that is not passed.
CALLED_WITHOUT = "is called without"

SUPPORTED_ARCHES = ("ascend910b*", "ascend910_93")  # Atlas A2 and A3


class NpuFusionAttention(VendorPath):
    """torch_npu.npu_fusion_attention: dense and packed, whose LSE is differentiated here: its formula ignores that.

    The LSE is max + log(sum) of its statistics, (B, N, Sq, 8) or (T, N, 8) float32 with eight equal columns, and
    counts the sink. A bias goes to npu_fusion_attention_v2, which adds it after the scale. Packed lengths are lists of
    Python ints: a call with packed sequences waits for the device."""

    name = "npu_fusion_attention"
    ops = ("attention", "varlen_attention")
    takes = frozenset(
        {
            "causal", "causal_top_left", "return_lse", "needs_grad", "negative_scale", "gqa", "packed", "window",
            "sinks", "alibi_slopes", "bias", "head_dim_v",
        }
    )  # fmt: skip

    MAX_HEADS = 256
    MAX_SEQ = 1 << 20  # "1M", also of packed rows
    MAX_BATCH = 2 << 20  # "2M"
    MAX_PACKED = 1024  # sequences

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        added = [name for name in ("alibi_slopes", "bias") if getattr(p, name)]
        return first_refusal(
            self.name,
            _arch_check(self.name, target),
            op_check(
                self.name,
                p,
                self.ops,
                "is called for dense and packed tensors alone",
                "npu_fused_infer_attention_score takes caches, for inference"
                if p.op in ("decode_attention", "paged_attention")
                else "backend='reference'",
            ),
            features_check(self.name, p, CALLED_WITHOUT, self.takes),
            dropout_check(self.name, p),
            _padding_check(self.name, p, ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")),
            _empty_check(self.name, p),
            _blind_rows_check(self.name, p),
            _band_check(self.name, p),
            (
                bool(added) and p.packed,
                f"{', '.join(added)} asked for, and {self.name} is documented to add a bias to dense scores alone",
                "backend='reference'",
            ),
            (
                bool(added) and p.needs_grad,
                f"gradients are asked for with {', '.join(added)}, and {self.name} documents no gradient of a bias",
                "call it under torch.no_grad(), or backend='reference'",
            ),
            (
                p.head_dim_v > p.head_dim,
                f"head_dim_v is {p.head_dim_v}, and {self.name} takes up to head_dim, {p.head_dim}",
                "pad the keys, or backend='reference'",
            ),
            _limit(self.name, "heads_q", p.heads_q, self.MAX_HEADS),
            _limit(self.name, "seq_q", p.seq_q, self.MAX_SEQ),
            _limit(self.name, "seq_k", p.seq_k, self.MAX_SEQ),
            _limit(self.name, "total_q", p.total_q or 0, self.MAX_SEQ),
            _limit(self.name, "total_k", p.total_k or 0, self.MAX_SEQ),
            _limit(self.name, "batch", p.batch, self.MAX_PACKED if p.packed else self.MAX_BATCH),
            _schema_check(p.sinks, "sinks", self.name, "sink"),
            _schema_check(p.packed and p.return_lse, "the LSE of packed sequences", self.name, "softmax_layout"),
            _schema_check(
                bool(added), ", ".join(added), "npu_fusion_attention_v2", "pse_type", *(["sink"] if p.sinks else [])
            ),
        )

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        return run_fusion(call)


class NpuFusedInferAttentionScore(VendorPath):
    """torch_npu.npu_fused_infer_attention_score: inference; a call with lengths waits for their copy to the host.

    Rows that attend nothing are documented as imprecise: they are overwritten with 0, and their LSE with -inf. Packed
    sequences go to npu_fused_infer_attention_score_v2, whose documents take grouped heads of 128 there."""

    name = INFER
    ops = ("attention", "decode_attention", "varlen_attention", "paged_attention")
    takes = frozenset(
        {
            "causal", "causal_top_left", "seqlens_q", "seqlens_k", "return_lse", "negative_scale", "gqa", "packed",
            "window", "paged", "head_dim_v", "kv_format",
        }
    )  # fmt: skip

    DTYPES = ("fp16", "bf16")
    MAX_HEAD_DIM = 512
    HEAD_DIM_MULTIPLE = 16  # its tiling (ops-transformer): "D should be 16 elements aligned when with FP16/BF16"
    MAX_HEADS = 256
    MAX_GROUP = 64
    MAX_BATCH = 65536
    MAX_SEQ = 20 * (1 << 20)  # 20,971,520
    MAX_SEQ_K_OF_ONE_ROW = 1 << 18  # seq_q = 1 goes to its incremental branch, with limits of its own
    MAX_PAGE = 512
    PAGE_MULTIPLE, PAGE_MULTIPLE_OF_ONE_ROW, PAGE_MULTIPLE_OF_INT8 = 128, 16, 32  # int8: of one row too
    PACKED_HEADS = ((128, 128), (192, 128), (192, 192))  # of keys and of values
    MAX_PACKED, MAX_PACKED_ROWS = 4096, 1 << 20

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        one_row = p.seq_q == 1 and not p.packed
        return first_refusal(
            self.name,
            _arch_check(self.name, target),
            op_check(self.name, p, self.ops, "is called for dense and packed tensors and caches alone"),
            features_check(self.name, p, CALLED_WITHOUT, self.takes),
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
            _band_check(self.name, p),
            (
                p.window_left >= 0 and (p.padded or p.page_size > 0),
                f"window ({p.window_left}, {p.window_right}) with lengths, and {self.name} multiplies masked values: "
                "NaN in keys before every window would spread",
                "backend='reference'",
            ),
            *self._packed_checks(p),
            *self._cache_checks(p),
            (
                p.head_dim_v != p.head_dim and not p.packed,
                f"head_dim_v is {p.head_dim_v} with head_dim {p.head_dim}, and {self.name} takes keys and values of "
                "one shape",
                "pad the narrower one, or backend='reference'",
            ),
            _limit(self.name, "head_dim", p.head_dim, self.MAX_HEAD_DIM),
            (
                p.head_dim % self.HEAD_DIM_MULTIPLE != 0,
                f"head_dim is {p.head_dim}, and {self.name} takes multiples of {self.HEAD_DIM_MULTIPLE}",
                "npu_fusion_attention, or pad the heads",
            ),
            _limit(self.name, "heads_q", p.heads_q, self.MAX_HEADS),
            _limit(self.name, "query heads for each key/value head", p.group, self.MAX_GROUP),
            _limit(self.name, "batch", p.batch, self.MAX_BATCH),
            _limit(self.name, "seq_q", p.seq_q, self.MAX_SEQ),
            _limit(self.name, "seq_k", p.seq_k, self.MAX_SEQ_K_OF_ONE_ROW if one_row else self.MAX_SEQ),
        )

    def _packed_checks(self, p: Problem) -> Iterable[Check]:
        if not p.packed:
            return ()
        path, heads = f"{self.name}_v2", (p.head_dim, p.head_dim_v)
        known = ", ".join(f"({keys}, {values})" for keys, values in self.PACKED_HEADS)
        trained = "npu_fusion_attention, or backend='reference'"
        return (
            (
                p.op == "paged_attention",
                f"packed queries over pages, and {path} takes no page table with them",
                "pad the queries, or backend='reference'",
            ),
            (p.dtype != "bf16", f"dtype is {p.dtype}, and {path} takes packed sequences of bf16 alone", trained),
            (
                heads not in self.PACKED_HEADS,
                f"head_dim, head_dim_v are {heads}, and {path} takes packed sequences of {known}",
                trained,
            ),
            (
                p.causal == "top_left",
                f"causal top-left, and {path} takes bottom-right masks of packed sequences alone",
                trained,
            ),
            _limit(path, "total_q", p.total_q or 0, self.MAX_PACKED_ROWS),
            _limit(path, "total_k", p.total_k or 0, self.MAX_PACKED_ROWS),
            _limit(path, "batch", p.batch, self.MAX_PACKED),
            _schema_check(True, "packed sequences", path),
        )

    def _cache_checks(self, p: Problem) -> Iterable[Check]:
        if p.page_size and not p.packed:
            multiple = self.PAGE_MULTIPLE
            if p.seq_q == 1:
                multiple = self.PAGE_MULTIPLE_OF_ONE_ROW if p.kv_format == "as_q" else self.PAGE_MULTIPLE_OF_INT8
            yield (
                p.page_size % multiple != 0 or p.page_size > self.MAX_PAGE,
                f"page_size is {p.page_size}, and {self.name} takes multiples of {multiple} up to {self.MAX_PAGE} "
                f"with seq_q {p.seq_q}",
                "other pages, or backend='reference'",
            )
            width = p.heads_k * p.head_dim
            yield (
                p.page_layout == "phd" and width > MAX_INTERLEAVED,
                f"heads_k · head_dim is {width}, and {self.name} takes up to {MAX_INTERLEAVED} where a page's tokens "
                "come before its heads",
                "page_layout='hpd', or backend='reference'",
            )
        if p.kv_format != "as_q":
            cached = p.op in ("decode_attention", "paged_attention")
            yield (
                p.kv_format != "int8" or p.kv_scales != "token" or p.seq_q > 1 or not cached,
                f"kv_format is {p.kv_format} with kv_scales {p.kv_scales} in {p.op} of seq_q {p.seq_q}, and "
                f"{self.name} takes int8 caches with a scale for each token and head, for seq_q 1",
                "backend='reference'",
            )
            yield (
                p.page_layout == "phd" and p.page_size > 0 and p.heads_k > 1,
                f"a page's {p.page_size} tokens come before its {p.heads_k} heads, and {self.name} takes scales "
                "(pages, heads, tokens)",
                "page_layout='hpd', or backend='reference'",
            )
            yield _schema_check(True, "quantised caches", self.name, "key_antiquant_scale")

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        return run_infer(call)


def registered_arguments(function: str) -> frozenset[str] | None:
    """Return the arguments of an operator of the loaded torch_npu, none if it lacks the operator; None if not loaded.

    Plans for a machine without torch_npu are made for the newest documented one."""
    if "torch_npu" not in sys.modules:
        return None
    import torch

    operator = getattr(torch.ops.npu, function, None)
    return frozenset() if operator is None else frozenset(a.name for a in operator.default._schema.arguments)


def _schema_check(asked: bool, feature: str, function: str, *arguments: str) -> Check:
    """Return a check that holds if a feature is asked for whose arguments the loaded torch_npu does not have."""
    known = registered_arguments(function) if asked else None
    if known is None:
        return False, "", ""
    missing = [name for name in arguments if name not in known]
    lacks = f"no {', '.join(missing)} in {function}" if known else f"no {function}"
    version = getattr(sys.modules["torch_npu"], "__version__", "")
    reason = f"{feature} asked for, and torch_npu {version} has {lacks}"
    return not known or bool(missing), reason, "a newer torch_npu, or backend='reference'"


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
    empty = [name for name in ("batch", "seq_q", "seq_k", "total_q", "total_k") if getattr(p, name) == 0]
    reason = f"{', '.join(empty)} is 0, and {path} takes sizes from 1"
    return bool(empty), reason, "backend='reference' gives zeros"


def _blind_rows_check(path: str, p: Problem) -> Check:
    blind = 0 if p.packed else blind_rows(p, p.seq_q, p.seq_k)
    mask = "causal bottom-right" if p.causal != "none" else f"window ({p.window_left}, {p.window_right})"
    return (
        blind > 0,
        f"{mask} with seq_q {p.seq_q} over seq_k {p.seq_k} leaves the first {blind} rows without a key, and what "
        f"{path} gives for them is not documented",
        "drop those rows, or backend='reference'",
    )


def _band_check(path: str, p: Problem) -> Check:
    uneven = p.packed or p.padded or p.seq_q != p.seq_k
    return (
        p.window and p.causal == "top_left" and uneven,
        f"window ({p.window_left}, {p.window_right}) beside causal top-left with seq_q {p.seq_q} and seq_k {p.seq_k}, "
        f"and a band of {path} lies at the lower right corner",
        "sequences of one length, or backend='reference'",
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
    except (Exception, SystemExit) as error:  # noqa: BLE001 - as in `_device_name`
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
        "ConvertTritonIRToLinalgIR",
        "ConvertLinalgRToBinary",
        "ConvertLinalgIRToBinary",
        "torch_npu",
        "BiSheng",
        "kernel.ttadapter.mlir",
    )
    device_words = ("huawei", "npu", "[0-9]*gb")
    options = MappingProxyType({"multibuffer": bool, "enable_fp_fusion": bool})
    compilers = ("triton-ascend", "flagtree")
    adapter = "portattn.worker.ascend:compile_kernel"
    vendor = (NpuFusedInferAttentionScore(), NpuFusionAttention())

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
