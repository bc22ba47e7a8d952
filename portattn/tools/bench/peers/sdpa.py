"""torch's scaled_dot_product_attention: as it chooses, and each of its fused kernels by itself."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as functional

from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender
from portattn.tools.bench.tensors import Tensors

CHOOSES, MATH = "sdpa", "sdpa-math"
KERNELS = {
    "sdpa-cudnn": "CUDNN_ATTENTION",
    "sdpa-flash": "FLASH_ATTENTION",
    "sdpa-efficient": "EFFICIENT_ATTENTION",
    MATH: "MATH",
}
MATH_BYTES = 1 << 31  # of float32 scores, above which the unfused form is left out


def absent() -> str:
    return ""


def contenders(case: Case, t: Tensors) -> dict[str, Build]:
    """Lengths, windows, chosen tokens and a causal corner that is not its own are masks to it, which are made before
    the timed call. It knows no pages."""
    if case.op not in ("attention", "decode_attention", "sparse_attention") or case.page_size or case.magicpig:
        return {}
    builds: dict[str, Build] = {CHOOSES: functools.partial(_build, "", case, t)}
    for name, kernel in KERNELS.items():
        if name == MATH and case.backward:  # it would keep the whole scores
            continue
        if name != MATH or 4 * case.batch * case.heads_q * case.seq_q * case.seq_k <= MATH_BYTES:
            builds[name] = functools.partial(_build, kernel, case, t)
    return builds


def _build(kernel: str, case: Case, t: Tensors) -> Contender:
    """kernel: a member of torch.nn.attention.SDPBackend; empty for torch's own choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    is_causal = case.causal != "none" and not case.windowed and t.seqlens_k is None and case.seq_q == case.seq_k
    mask = None if is_causal else _mask(case, t, kernel)
    grouped = case.group > 1

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            t.q, t.k, t.v, attn_mask=mask, dropout_p=case.dropout, is_causal=is_causal, scale=case.scale,
            enable_gqa=grouped,
        )  # fmt: skip

    if not kernel:
        return Contender(run)
    return Contender(run, around=lambda: sdpa_kernel(getattr(SDPBackend, kernel)))


def _mask(case: Case, t: Tensors, kernel: str) -> torch.Tensor | None:
    """Which keys a query may attend: broadcasts to (B, Hq, Sq, Sk); None where it may attend all."""
    if t.indices is not None:
        mask = torch.zeros(case.batch, case.heads_q, case.seq_k, dtype=torch.bool, device=t.q.device)
        return mask.scatter_(2, t.indices.long(), True)[:, :, None]
    causal = case.causal != "none" and case.seq_q > 1
    if kernel == "FLASH_ATTENTION" and causal and not case.windowed and t.seqlens_k is None:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(case.seq_q, case.seq_k)  # the one mask that its flash kernel knows
    if not (causal or case.windowed or t.seqlens_k is not None):
        return None
    keys = torch.arange(case.seq_k, device=t.q.device)
    allowed = torch.ones(1, 1, 1, case.seq_k, dtype=torch.bool, device=t.q.device)
    if causal or case.windowed:
        # Where lengths are given, queries and keys of a sequence begin at 0 both: its corner is the same.
        rows = torch.arange(case.seq_q, device=t.q.device)[:, None] + (0 if t.seqlens_q is not None else _shift(case))
        left, right = case.window
        right = 0 if causal else right
        if right is not None:
            allowed = allowed & (keys <= rows + right)
        if left is not None:
            allowed = allowed & (keys >= rows - left)
    if t.seqlens_k is not None:
        allowed = allowed & (keys < t.seqlens_k[:, None, None, None])
    return allowed


def _shift(case: Case) -> int:
    return 0 if case.causal == "top_left" else case.seq_k - case.seq_q
