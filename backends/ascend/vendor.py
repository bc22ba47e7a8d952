"""Calls of torch_npu's fused attention, as its documents have it; they were never run on an NPU here.

Sources: torch_npu 2.13.0's own documents (torch_npu/_op_plugin_docs.py), schemas and meta functions; Ascend/op-plugin,
docs/zh/custom_APIs/torch_npu; hicann/ops-transformer, aclnnFlashAttentionScore.md (softmax statistics, chips)."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from portattn.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from portattn.schema.call import Call
    from portattn.schema.problem import Problem

INFER = "npu_fused_infer_attention_score"
# sparse_mode: 0 everything, 1 a whole mask, 2 causal from the upper left corner, 3 causal from the lower right corner,
# 4 a band around the lower right corner's diagonal. 2, 3 and 4 take one compressed mask for every length.
SPARSE_MODE = {"none": 0, "whole": 1, "top_left": 2, "bottom_right": 3, "band": 4}
COMPRESSED_MASK_SIZE = 2048
EVERY_TOKEN = (1 << 31) - 1  # a side of a band that hides nothing
ROWS_MAY_BE_EMPTY = 2  # inner_precise: high precision, and rows that are masked whole are corrected
PSE_AFTER_SCALE = 0  # pse_type: scale · QKᵀ + pse; npu_fusion_attention, without pse_type, has scale · (QKᵀ + pse)
TOKEN_AND_HEAD, PAGED_TOKEN_AND_HEAD = 3, 5  # key_antiquant_mode
MAX_INTERLEAVED = 65535  # numbers of all heads of a token, where they lie together
MAX_CACHE = (1 << 31) - 1  # numbers of a paged cache that a single row attends


def run_fusion(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run npu_fusion_attention; a gradient of the LSE costs one more forward and backward pass.

    A bias costs its memory once more, a mask of its shape, and copies of keys and values."""
    import torch_npu

    if call.problem.packed:
        return _run_packed_fusion(call)
    call = _with_attended_keys(call)
    p = call.problem
    if p.bias or p.alibi_slopes:
        return _run_biased_fusion(call)
    attend = functools.partial(
        torch_npu.npu_fusion_attention,
        head_num=p.heads_q,
        input_layout="BNSD",
        scale=float(call.scale),  # its default is 1.0, not 1/√D
        **_mask(p, call.q.device, ("pre_tockens", "next_tockens")),
    )
    return _fused(call, attend, call.q, call.k, call.v)


def _run_packed_fusion(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch_npu

    p, packed = call.problem, _PackedRows(call)
    if not packed.ends_q:
        return packed.spread(*packed.nothing())
    attend = functools.partial(
        torch_npu.npu_fusion_attention,
        head_num=p.heads_q,
        input_layout="TND",
        scale=float(call.scale),
        actual_seq_qlen=packed.ends_q,
        actual_seq_kvlen=packed.ends_k,
        **({"softmax_layout": "TND"} if p.return_lse else {}),  # its default is (N, T, D) within (T, N, D)'s shape
        **_mask(p, call.q.device, ("pre_tockens", "next_tockens")),
    )
    out, lse = _fused(call, attend, *packed.operands())
    return packed.spread(out, lse)


def _run_biased_fusion(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch
    import torch_npu

    p, q, k, v = call.problem, call.q, call.k, call.v
    pse, hidden = _added_scores(call)
    if pse.dtype != q.dtype:  # documented: all of one dtype
        q, k, v = q.float(), k.float(), v.float()
    if hidden is None:
        given = _mask(p, q.device)
    else:  # documented masks: (B, N, Sq, Sk), (B, 1, Sq, Sk), (1, 1, Sq, Sk)
        # A key that a bias hides from all rows may hold NaN.
        idle_k = hidden.all(dim=2)  # (1 or B, 1 or N, Sk)
        idle_k = idle_k if hidden.shape[1] == 1 else idle_k.unflatten(1, (-1, p.group)).all(dim=2)
        k, v = (tensor.masked_fill(idle_k[..., None], 0.0) for tensor in (k, v))
        whole = hidden if hidden.shape[1] == 1 else hidden.expand(p.batch, -1, -1, -1)
        given = {
            "sparse_mode": SPARSE_MODE["whole"],
            "atten_mask": whole.contiguous(),
            "inner_precise": ROWS_MAY_BE_EMPTY,
        }
    attend = functools.partial(
        torch_npu.npu_fusion_attention_v2,
        head_num=p.heads_q,
        input_layout="BNSD",
        scale=float(call.scale),
        pse=pse.contiguous(),
        pse_type=PSE_AFTER_SCALE,
        **given,
    )
    out, lse = _fused(call, attend, q, k, v)
    if hidden is not None:
        idle = hidden.all(dim=3)  # (1 or B, 1 or N, Sq)
        out = out.masked_fill(idle[..., None], 0.0)
        nothing: Any = -math.inf if call.sinks is None else call.sinks.float()[:, None]
        lse = None if lse is None else torch.where(idle, nothing, lse)
    return out.to(call.q.dtype), lse


def run_infer(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run npu_fused_infer_attention_score; waits for the device if lengths are given.

    Raises:
        ArgumentError: Pages are too many."""
    import torch_npu

    if call.problem.packed:
        return _run_packed_infer(call)
    call = _with_attended_keys(call)
    p = call.problem
    attending = _attending_rows(call)
    # A single row's own length is documented as ignored.
    lengths_q = None if p.seq_q == 1 else _host_lengths(call.seqlens_q, p.seq_q)
    lengths_k = _host_lengths(call.seqlens_k, p.seq_k)
    if p.causal == "top_left" and (lengths_q or lengths_k):  # without the keys behind every row's position
        rows, keys = lengths_q or [p.seq_q] * p.batch, lengths_k or [p.seq_k] * p.batch
        lengths_k = [min(pair) for pair in zip(rows, keys, strict=True)]
    # Tokens before heads, where the caller has them so: a cache is not copied.
    narrow = p.seq_q == 1 or p.heads_q * p.head_dim < MAX_INTERLEAVED
    tokens_first = p.layout == "bshd" and not p.page_size and narrow
    axes = (1, 2) if tokens_first else (0, 0)
    given: dict[str, Any] = {}
    cache = {name: getattr(call, name) for name in ("k", "v", "k_scale", "v_scale")}
    if call.page_table is not None:
        assert lengths_k is not None
        cache, table = _pages(call, cache, lengths_k)
        given = {"block_table": table, "block_size": p.page_size}
    k, v = cache["k"], cache["v"]
    if call.k_scale is not None:
        mode = PAGED_TOKEN_AND_HEAD if p.page_size else TOKEN_AND_HEAD
        for whose, scale in (("key", cache["k_scale"]), ("value", cache["v_scale"])):
            given |= {f"{whose}_antiquant_scale": scale.contiguous(), f"{whose}_antiquant_mode": mode}
    out, lse = torch_npu.npu_fused_infer_attention_score(
        call.q.transpose(*axes).contiguous(),  # documented: no support for strided tensors
        k.transpose(*axes).contiguous(),
        v.transpose(*axes).contiguous(),
        actual_seq_lengths=lengths_q,
        actual_seq_lengths_kv=lengths_k,
        num_heads=p.heads_q,
        num_key_value_heads=p.heads_k,
        input_layout="BSND" if tokens_first else "BNSD",
        scale=float(call.scale),  # its default is 1.0, not 1/√D
        inner_precise=ROWS_MAY_BE_EMPTY if attending is not None and p.seq_q > 1 else 0,
        softmax_lse_flag=p.return_lse,
        **_mask(p, call.q.device),
        **given,
    )
    out = out.transpose(*axes)
    lse = lse[..., 0] if p.return_lse else None  # (B, N, Sq, 1)
    if attending is not None:
        idle = ~attending[:, None, :]  # (B, 1, Sq)
        out = out.masked_fill(idle[..., None], 0.0)
        lse = None if lse is None else lse.masked_fill(idle, -math.inf)
    return out, lse


def _run_packed_infer(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch_npu

    p, packed = call.problem, _PackedRows(call)
    if not packed.ends_q:
        return packed.spread(*packed.nothing())
    q, k, v = (tensor.contiguous() for tensor in packed.operands())
    out, lse = torch_npu.npu_fused_infer_attention_score_v2(
        q, k, v, actual_seq_qlen=packed.ends_q, actual_seq_kvlen=packed.ends_k, num_query_heads=p.heads_q,
        num_key_value_heads=p.heads_k, input_layout="TND",
        softmax_scale=float(call.scale),
        return_softmax_lse=p.return_lse,
        # Mode 3 is documented for sequences of more keys than queries alone.
        **_mask(p, call.q.device, band=True),
    )  # fmt: skip
    return packed.spread(out, lse[..., 0] if p.return_lse else None)  # (T, N, 1)


def _pages(
    call: Call, cache: dict[str, torch.Tensor | None], lengths: list[int]
) -> tuple[dict[str, torch.Tensor | None], torch.Tensor]:
    """Return caches (P, Hk, page, D), or (P, page, Hk · D) if tokens come before heads, and their page table.

    They are the caller's memory, or copies of the attended pages if its pages are not contiguous or fewer than the
    sequences' pages added up, as shared prefixes make them. Scales are (P, Hk, page). Ids behind a sequence's last page
    may be anything: the last page's stands there, and 0 for a sequence without keys.

    Raises:
        ArgumentError: A cache is too large for a single row."""
    import torch

    p, table, own = call.problem, call.page_table, call.seqlens_k
    assert table is not None
    assert own is not None
    last = ((own.long().clamp(1, p.seq_k) - 1) // p.page_size)[:, None]  # attended page of each sequence
    columns = torch.arange(table.shape[1], device=table.device)
    attended = columns.minimum(last)
    table = table.gather(1, attended).masked_fill((own <= 0)[:, None], 0).clamp(0, len(call.k) - 1)
    tokens_first = p.page_layout == "phd"
    pages = {
        name: tensor.transpose(1, 2) if tokens_first and tensor.ndim == 4 else tensor
        for name, tensor in cache.items() if tensor is not None
    }  # fmt: skip
    needed = sum(-(-length // p.page_size) for length in lengths)
    if len(call.k) < needed or not all(tensor.is_contiguous() for tensor in pages.values()):
        ids = table[columns <= last]
        pages = {name: tensor.index_select(0, ids) for name, tensor in pages.items()}
        table = (attended + (last + 1).cumsum(0) - last - 1).int()
    for name, tensor in pages.items():
        if p.seq_q == 1 and tensor.numel() > MAX_CACHE:
            limit = f"must be at most {MAX_CACHE} for {INFER} with seq_q 1; backend='reference' takes it"
            raise ArgumentError(p.op, f"{name}_pages.numel()", tensor.numel(), limit)
    if tokens_first:
        pages = {name: tensor.flatten(2) for name, tensor in pages.items()}
    return cache | pages, table.contiguous()


def _fused(
    call: Call, attend: Callable[..., Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and LSE of a fusion function: (B, N, Sq, Dv) and (B, N, Sq), or (T, N, Dv) and (T, N)."""
    p = call.problem
    sinks = alone = None
    if call.sinks is not None:  # documented: of float32
        alone = (call.sinks == math.inf).view(
            -1, *(1 for _ in range(q.ndim - 3))
        )  # the sink has all of a head's weight
        sinks = call.sinks.float().masked_fill(call.sinks == math.inf, 0.0)
    out, softmax_max, softmax_sum, *_ = attend(q, k, v, **_sink(sinks))
    if alone is not None:
        out = out.masked_fill(alone[..., None], 0.0)
    if not p.return_lse:
        return out, None
    # Detached: the vendor's node would be run without a gradient where a loss depends on the LSE alone.
    lse = softmax_max.detach()[..., 0] + softmax_sum.detach()[..., 0].log()
    lse = _differentiable_lse().apply(q, k, sinks, lse, call.scale, attend) if p.needs_grad else lse
    return out, lse if alone is None else lse.masked_fill(alone, math.inf)


def _sink(sinks: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {} if sinks is None else {"sink": sinks}  # an older torch_npu has no such argument


@functools.cache
def _differentiable_lse() -> Any:
    """Return the autograd function (q, k, sinks, lse, scale, attend) -> lse, made at first use: plans need no torch.

    With weights P and the LSE's gradient g, dq = scale · g · (P k), dk = scale · Pᵀ (g · q) and, for a sink s,
    ds = Σ g · exp(s - lse)."""
    import torch

    class DifferentiableLse(torch.autograd.Function):
        @staticmethod
        def forward(
            q: torch.Tensor, k: torch.Tensor, sinks: torch.Tensor | None, lse: torch.Tensor, scale: float,
            attend: Callable[..., Any],
        ) -> torch.Tensor:  # fmt: skip
            return lse.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
            q, k, sinks, lse, ctx.scale, ctx.attend = inputs
            ctx.save_for_backward(q, k, lse, sinks)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad_lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            q, k, lse, sinks = ctx.saved_tensors
            q, k, lse = q.detach(), k.detach(), lse.detach()
            if sinks is not None:
                sinks = sinks.detach()
            weight = (ctx.scale * grad_lse)[..., None]  # [B, Hq, Sq, 1], or [T, Hq, 1]
            grad_q = grad_k = grad_sinks = None
            if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
                with torch.enable_grad(), torch.autocast(q.device.type, enabled=False):
                    values = k.detach().requires_grad_(ctx.needs_input_grad[1])
                    mean_keys = ctx.attend(q, k, values, **_sink(sinks))[0]  # as q
                grad_q = (weight * mean_keys.detach()).to(q.dtype) if ctx.needs_input_grad[0] else None
                if ctx.needs_input_grad[1]:
                    (grad_k,) = torch.autograd.grad(mean_keys, values, (weight * q).to(q.dtype))
            if ctx.needs_input_grad[2]:
                by_row = grad_lse * torch.exp(sinks[:, None] - lse if lse.ndim == 3 else sinks - lse)
                grad_sinks = by_row.sum(dim=(0, 2) if lse.ndim == 3 else 0)
            return grad_q, grad_k, grad_sinks, None, None, None

    return DifferentiableLse


class _PackedRows:
    """The packed rows of a call that attend something, and the ends of their sequences as the host's numbers.

    A sequence's rows without a key, and rows of no sequence, are documented by neither function: they are left out. So
    are keys that no row attends."""

    def __init__(self, call: Call) -> None:
        """Wait for the device once, for 2 · (batch + 1) numbers."""
        import torch

        p = call.problem
        self._call = call
        assert call.cu_seqlens_q is not None
        assert call.cu_seqlens_k is not None
        bounds_q, bounds_k = torch.stack([call.cu_seqlens_q, call.cu_seqlens_k]).tolist()
        self._sequences = _spans(bounds_q, p.total_q or 0, p.seq_q)
        self._q: list[tuple[int, int]] = []
        self._k: list[tuple[int, int]] = []
        for (first, end), (start, stop) in zip(self._sequences, _spans(bounds_k, p.total_k or 0, p.seq_k), strict=True):
            rows, keys = end - first, stop - start
            if rows and keys:
                attended = _attended_keys(p, rows, keys)
                self._q.append((first + blind_rows(p, rows, keys), end))
                self._k.append((start + attended.start, start + attended.stop))
        self.ends_q, self.ends_k = _ends(self._q), _ends(self._k)

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v of these rows, (T, H, D): views of the caller's, unless rows between them are left out."""
        call = self._call
        return _rows_of(call.q, self._q), _rows_of(call.k, self._k), _rows_of(call.v, self._k)

    def nothing(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results of no rows, that depend on q, k and v for autograd."""
        call = self._call
        none = call.q[0].transpose(0, 1)[:0]  # (0, H, D)
        zero = none[..., :1] + call.k[..., :0].sum() + call.v[..., :0].sum()
        return none.new_zeros(0, none.shape[1], call.problem.head_dim_v) + zero, zero[..., 0]

    def spread(self, out: torch.Tensor, lse: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return results in the shapes of the call's, (1, Hq, Tq, Dv) and (1, Hq, Tq) or None, from these rows'."""
        import torch

        call, p = self._call, self._call.problem
        total = p.total_q or 0
        index = None if self.ends_q[-1:] == [total] else _index(self._q, call.q.device)
        if index is not None:
            out = out.new_zeros(total, p.heads_q, p.head_dim_v).index_copy(0, index, out)
        if lse is None or not p.return_lse:
            return out.transpose(0, 1)[None], None
        if index is not None:
            nothing = torch.full((total, p.heads_q), -math.inf, device=call.q.device)
            if call.sinks is not None:
                own = torch.zeros(total, dtype=torch.bool, device=call.q.device)
                own[_index(self._sequences, call.q.device)] = True
                nothing = torch.where(own[:, None], call.sinks.float(), nothing)
            lse = nothing.index_copy(0, index, lse.float())
        return out.transpose(0, 1)[None], lse.transpose(0, 1)[None]


def _spans(bounds: list[int], total: int, longest: int) -> list[tuple[int, int]]:
    inside = [min(max(n, 0), total) for n in bounds]
    return [(a, a + min(max(b - a, 0), longest)) for a, b in itertools.pairwise(inside)]


def _ends(spans: list[tuple[int, int]]) -> list[int]:
    ends: list[int] = []
    for first, end in spans:
        ends.append((ends[-1] if ends else 0) + end - first)
    return ends


def _index(spans: list[tuple[int, int]], device: torch.device) -> torch.Tensor:
    import torch

    return torch.cat([torch.arange(0), *(torch.arange(first, end) for first, end in spans)]).to(device)


def _rows_of(tensor: torch.Tensor, spans: list[tuple[int, int]]) -> torch.Tensor:
    """Return the rows (T, H, D) of a packed tensor (1, H, T, D)."""
    packed = tensor[0].transpose(0, 1)
    if all(before[1] == after[0] for before, after in itertools.pairwise(spans)):
        return packed[spans[0][0] : spans[-1][1]]
    return packed.index_select(0, _index(spans, packed.device))


def _right_side(p: Problem) -> int:
    """Return how many keys a row sees behind its own position."""
    if p.causal != "none":
        return 0
    return EVERY_TOKEN if p.window_right == -1 else p.window_right


def blind_rows(p: Problem, rows: int, keys: int) -> int:
    """Return how many of a sequence's first rows see no key."""
    return 0 if p.causal == "top_left" else min(max(rows - keys - _right_side(p), 0), rows)


def _attended_keys(p: Problem, rows: int, keys: int) -> slice:
    """Return the keys that a sequence's rows attend. Others may hold NaN, and a weight of 0 spreads it: 0 · NaN."""
    first = 0 if p.window_left == -1 else max(keys - rows - p.window_left, 0)
    return slice(first, min(rows, keys) if p.causal == "top_left" else keys)


def _with_attended_keys(call: Call) -> Call:
    """Return the call with views of the keys that some row attends; pages are whole, their lengths bound the keys."""
    p = call.problem
    kept = _attended_keys(p, p.seq_q, p.seq_k)
    if p.page_size or kept == slice(0, p.seq_k):
        return call
    parts = {name: getattr(call, name) for name in ("k", "v", "k_scale", "v_scale")}
    cut: dict[str, Any] = {name: part if part is None else part[:, :, kept] for name, part in parts.items()}
    bias = None if call.bias is None else call.bias[..., kept]
    return replace(call, problem=msgspec.structs.replace(p, seq_k=kept.stop - kept.start), bias=bias, **cut)


def _mask(
    p: Problem,
    device: torch.device,
    tokens: tuple[str, str] = ("pre_tokens", "next_tokens"),
    *,
    band: bool = False,
) -> dict[str, Any]:
    """Return a problem's sparse_mode and atten_mask, and its band's sides under the names `tokens`.

    A single row sees every key that is left: no mask. With `band` a causal mask is a band too."""
    if p.seq_q == 1 or (not p.window and p.causal == "none"):
        return {"sparse_mode": SPARSE_MODE["none"]}
    if not p.window and (p.causal != "bottom_right" or not band):
        return {"sparse_mode": SPARSE_MODE[p.causal], "atten_mask": compressed_causal_mask(device)}
    left = EVERY_TOKEN if p.window_left == -1 else p.window_left
    return {
        "sparse_mode": SPARSE_MODE["band"],
        "atten_mask": compressed_causal_mask(device),
        tokens[0]: left,
        tokens[1]: _right_side(p),
    }


def _added_scores(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the bias and ALiBi's terms, (1 or B, N, Sq, Sk), and hidden scores if a bias may hide some by -inf."""
    import torch

    p, device = call.problem, call.q.device
    rows, keys = torch.arange(p.seq_q, device=device)[:, None], torch.arange(p.seq_k, device=device)
    after = keys - rows - (0 if p.causal == "top_left" else p.seq_k - p.seq_q)  # of a key, behind its row's position
    pse = None
    if call.alibi_slopes is not None:
        slopes = call.alibi_slopes[: 1 if call.alibi_slopes.stride(0) == 0 else None]
        pse = -slopes[:, :, None, None] * after.abs()
    if call.bias is None:
        assert pse is not None
        return pse, None
    bias = call.bias[: 1 if call.bias.stride(0) == 0 else None]
    hidden = (bias[:, :1] if bias.stride(1) == 0 else bias) == -math.inf
    left = EVERY_TOKEN if p.window_left == -1 else p.window_left
    hidden = hidden | (after > _right_side(p)) | (after < -left)
    bias = bias.masked_fill(bias == -math.inf, 0.0)
    return bias if pse is None else pse + bias, hidden


@functools.lru_cache(maxsize=16)
def compressed_causal_mask(device: torch.device) -> torch.Tensor:
    """Return the mask of sparse modes 2 to 4 for every length: (2048, 2048) bool, True = masked, 4 MiB a device."""
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
    if call.seqlens_q is None and call.seqlens_k is None and not blind_rows(p, p.seq_q, p.seq_k):
        return None
    rows = torch.arange(p.seq_q, device=call.q.device)  # [Sq]

    def ends(lengths: torch.Tensor | None, capacity: int) -> torch.Tensor:  # [B, 1]
        given = torch.full((p.batch,), capacity, device=rows.device) if lengths is None else lengths
        return given.to(rows.dtype).clamp(0, capacity)[:, None]

    end_q, end_k = ends(call.seqlens_q, p.seq_q), ends(call.seqlens_k, p.seq_k)
    attending = (rows < end_q) & (end_k > 0)
    if p.causal != "top_left":
        attending &= rows + end_k - end_q + _right_side(p) >= 0  # the last valid row's position is the last valid key
    return attending
