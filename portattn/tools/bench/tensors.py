"""A case's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import torch

from portattn.reference.blocks import E2M1, of_blocks
from portattn.reference.blocks import dequantize as widened_int4
from portattn.reference.write import four_bits, int4_step
from portattn.reference.write import in_blocks as blocks_of
from portattn.schema.problem_limits import FORMATS, cache_format
from portattn.schema.tensors import BLOCK_SCALES, KV_DTYPE, PACKED, TORCH_DTYPE
from portattn.tools.bench.cases import SCALE_BYTES, Case

E4M3_LARGEST = torch.finfo(BLOCK_SCALES).max
INT4 = FORMATS["int4"]


def in_blocks(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return keys or values (…, width) in nvfp4, as write_pages stores them: bytes, scale () or None, block scales.

    Bytes (…, width / 2), e4m3 block scales (…, width / 16); the largest block's scale becomes e4m3's largest."""
    numbers, scale = values.float(), None
    if case.kv_scales != "none":
        scale = (values.abs().amax().float() / (E2M1[-1] * E4M3_LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = numbers / scale
    stored, blocks = blocks_of(numbers)
    return stored.view(PACKED), scale, blocks.view(BLOCK_SCALES)


def quantize_kv(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return keys or values (…, width) in the case's format, and their scales: (…) for each token, (), or None.

    int4 is two numbers a byte, (…, width / 2). A scale maps its largest number to the end of the format's range. With
    `case.inline_scales` numbers and scales are views of rows [numbers | scale], whose bytes must be a multiple of 4."""
    if case.kv_format == "int4":
        return _in_pairs(case, values.float())
    dtype, largest = KV_DTYPE[case.kv_format], FORMATS[case.kv_format].largest
    numbers = values.float()
    scale = None
    if case.kv_scales != "none":
        least = torch.finfo(torch.float32).tiny  # of a token of zeros: a scale has to be positive
        peak = values.abs().amax(-1) if case.kv_scales == "token" else values.abs().amax()
        scale = (peak.float() / largest).clamp_min(least)
        numbers = numbers.div_(scale[..., None])
    if dtype is torch.int8:
        numbers = numbers.round_()
    numbers = numbers.clamp_(-largest, largest).to(dtype)
    return _in_rows(numbers, scale) if case.inline_scales and scale is not None else (numbers, scale)


def _in_pairs(case: Case, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if case.kv_scales == "token":
        step, zero = int4_step(values)
        numbers = four_bits(values / step[..., None], zero[..., None]).view(PACKED)
        scale = (step.view(torch.int32) | zero).view(torch.float32)
    else:
        scale = (values.abs().amax() / INT4.largest).clamp_min(torch.finfo(torch.float32).tiny)
        numbers = four_bits(values / scale, torch.full((), INT4.zero, device=values.device)).view(PACKED)
    return _in_rows(numbers, scale) if case.inline_scales else (numbers, scale)


def _in_rows(numbers: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = numbers.shape[-1]
    rows = numbers.new_empty((*numbers.shape[:-1], width + SCALE_BYTES), dtype=torch.uint8)
    inside, beside = rows[..., :width].view(numbers.dtype), rows[..., width:].view(torch.float32)[..., 0]
    inside.copy_(numbers)
    beside.copy_(scale)
    return inside, beside


def dequantize(
    numbers: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype, blocks: torch.Tensor | None = None
) -> torch.Tensor:
    """Return stored numbers (…, width) as values of `dtype`. scale: (…), () or None; blocks: nvfp4's block scales."""
    if blocks is not None:
        values = of_blocks(numbers, blocks)
        return (values if scale is None else values.mul_(scale)).to(dtype)
    if numbers.dtype is PACKED and scale is not None:
        return widened_int4(numbers, "int4", scale, by_token=scale.ndim > 0).to(dtype)
    values = numbers.float()
    return (values if scale is None else values.mul_(scale[..., None])).to(dtype)


@dataclass(slots=True)
class Tensors:
    """One case's inputs; None for inputs that it lacks.

    int32: seqlens (B,), cu_seqlens (B + 1,), page_table (B, pages a sequence), indices (B, Hq, tokens), counts (B,
    Hq)"""

    q: torch.Tensor  # (B, Hq, Sq, D); packed (Tq, Hq, D); mla_attention: (B, Sq, H, R + E)
    # k, v: (B, Hk, Sk, D) and (B, Hk, Sk, Dv); varlen_attention: (Tk, Hk, …); pages: (P, page, Hk, …), and of
    # mla_attention latent rows (P, page, R + E), of which v is a view
    k: torch.Tensor
    v: torch.Tensor
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    # k_scale, v_scale: of a quantised cache, float32: (), or a scale for each token and head, laid out as k and v
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    # k_block_scale, v_block_scale: of nvfp4, float8_e4m3fn: a scale for each 16 numbers of a row of k and of v
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    grad_out: torch.Tensor | None = None  # of a backward case: the result's gradient

    @classmethod
    def random(cls, case: Case, device: torch.device, seed: int = 0) -> "Tensors":
        """Return normal random values, pages in random order, and a random choice of tokens; on meta without data."""
        generator = None if device.type == "meta" else torch.Generator(device=device).manual_seed(seed)
        dtype = TORCH_DTYPE[case.dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        def int32(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        latent, dims = case.op == "mla_attention", (case.head_dim, case.width_v)
        if case.packed:
            q = normal(sum(case.queries), case.heads_q, case.head_dim)
        elif latent:
            q = normal(case.batch, case.seq_q, case.heads_q, case.head_dim)
        else:
            q = normal(case.batch, case.heads_q, case.seq_q, case.head_dim)
        if latent:
            k = normal(_pages(case), case.page_size, case.head_dim)
            v = k[..., : case.width_v]
        elif case.page_size:
            k, v = (normal(_pages(case), case.page_size, case.heads_k, dim) for dim in dims)
        elif case.op == "varlen_attention":
            k, v = (normal(sum(case.keys), case.heads_k, dim) for dim in dims)
        else:
            k, v = (normal(case.batch, case.heads_k, case.seq_k, dim) for dim in dims)
        made = cls(q, k, v).stored(case)
        if case.packed:
            made.cu_seqlens_q = int32([0, *accumulate(case.queries)])
        elif case.lengths_q:
            made.seqlens_q = int32(case.queries)
        if case.op == "varlen_attention":
            made.cu_seqlens_k = int32([0, *accumulate(case.keys)])
        elif case.lengths_k or case.page_size:
            made.seqlens_k = int32(case.keys)
        if case.page_size:
            made.page_table = _table(case, seed).to(device)
        if case.tokens:
            made.indices = _chosen(case, generator, device)
            made.counts = torch.full((case.batch, case.heads_q), case.tokens, dtype=torch.int32, device=device)
        if case.backward:
            made.grad_out = normal(*q.shape[:-1], case.width_v)
        return made

    def stored(self, case: Case) -> "Tensors":
        """Return the tensors with k and v in the case's format, with scales; self if that is the queries' dtype."""
        if not case.quantised:
            return self
        if cache_format(case.kv_format).block:
            (k, k_scale, k_blocks), (v, v_scale, v_blocks) = (in_blocks(case, x) for x in (self.k, self.v))
            return replace(
                self, k=k, v=v, k_scale=k_scale, v_scale=v_scale, k_block_scale=k_blocks, v_block_scale=v_blocks
            )
        (k, k_scale), (v, v_scale) = (quantize_kv(case, x) for x in (self.k, self.v))
        return replace(self, k=k, v=v, k_scale=k_scale, v_scale=v_scale)

    def unquantised(self) -> "Tensors":
        """Return a copy with k and v dequantized to the queries' dtype, rounded once."""
        k = dequantize(self.k, self.k_scale, self.q.dtype, self.k_block_scale)
        v = dequantize(self.v, self.v_scale, self.q.dtype, self.v_block_scale)
        return replace(self, k=k, v=v, k_scale=None, v_scale=None, k_block_scale=None, v_block_scale=None)

    def leaves(self) -> "Tensors":
        """Return detached tensors of the same memory whose q, k and v require gradients."""
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def part(self, case: Case, sequence: int, head: int) -> "tuple[Case, Tensors]":
        """Return one sequence and one key/value head with its group, unpadded, as a case of its own; all are views."""
        queries, keys = case.queries[sequence], case.keys[sequence]
        group = slice(head * case.group, (head + 1) * case.group)
        this, those = slice(sequence, sequence + 1), slice(head, head + 1)
        one = msgspec.structs.replace(
            case, op="attention" if case.op == "varlen_attention" else case.op,
            batch=1, heads_q=case.group, heads_k=1, seq_q=queries, seq_k=keys, lengths_q=(), lengths_k=(), packed=False,
        )  # fmt: skip
        latent = case.op == "mla_attention"
        if case.packed:
            begin = sum(case.queries[:sequence])
            q = self.q[begin : begin + queries, group][None]
            q = q if latent else q.transpose(1, 2)
        else:
            q = self.q[this, :queries, group] if latent else self.q[this, group, :queries]
        if latent:
            k, v = self.k, self.v
        elif case.page_size:
            k, v = self.k[:, :, those], self.v[:, :, those]
        else:
            k, v = (keys_of(case, x, sequence, head) for x in (self.k, self.v))
        made = Tensors(q, k, v, k_scale=self.k_scale, v_scale=self.v_scale)
        names = ("k_scale", "v_scale") if case.kv_scales == "token" else ()
        for name in (*names, "k_block_scale", "v_block_scale"):
            if (scale := getattr(self, name)) is not None:
                setattr(made, name, scale[:, :, those] if case.page_size else scale[this, those, :keys])
        if self.grad_out is not None:
            made.grad_out = slot_of(case, self.grad_out, sequence, group)
        if self.page_table is not None and self.seqlens_k is not None:
            made.page_table = self.page_table[this, : -(-keys // case.page_size)]
            made.seqlens_k = self.seqlens_k[this]
        if self.indices is not None and self.counts is not None:
            made.indices, made.counts = self.indices[this, group], self.counts[this, group]
        return one, made


def rows_of(case: Case, out: torch.Tensor, sequence: int, head: int, rows: torch.Tensor) -> torch.Tensor:
    """Return (1, group, rows, Dv) of one sequence and key/value head of out, (B, Hq, Sq, Dv) or packed (Tq, Hq, Dv)."""
    group = slice(head * case.group, (head + 1) * case.group)
    if case.packed:
        return out[sum(case.queries[:sequence]) + rows, group].transpose(0, 1)[None]
    return out[sequence : sequence + 1, group].index_select(2, rows)


def slot_of(case: Case, x: torch.Tensor, sequence: int, heads: slice) -> torch.Tensor:
    """Return a view (1, heads, rows, width) of one sequence's rows; x: (B, Hq, Sq, width), packed (Tq, Hq, width)."""
    if case.packed:
        begin = sum(case.queries[:sequence])
        return x[begin : begin + case.queries[sequence], heads].transpose(0, 1)[None]
    return x[sequence : sequence + 1, heads, : case.queries[sequence]]


def keys_of(case: Case, x: torch.Tensor, sequence: int, head: int) -> torch.Tensor:
    """Return a view (1, 1, keys, width) of one sequence's keys; x: (B, Hk, Sk, width), varlen's (Tk, Hk, width)."""
    those = slice(head, head + 1)
    if case.op == "varlen_attention":
        begin = sum(case.keys[:sequence])
        return x[begin : begin + case.keys[sequence], those].transpose(0, 1)[None]
    return x[sequence : sequence + 1, those, : case.keys[sequence]]


def _pages(case: Case) -> int:
    return sum(-(-keys // case.page_size) for keys in case.keys)


def _table(case: Case, seed: int) -> torch.Tensor:
    """Return (B, pages a sequence) int32: every page has one owner, in random order; 0 past a sequence's end."""
    columns = torch.arange(-(-case.seq_k // case.page_size))
    owned = columns[None] * case.page_size < torch.tensor(case.keys)[:, None]
    table = torch.zeros(owned.shape, dtype=torch.int32)
    order = torch.randperm(_pages(case), generator=torch.Generator().manual_seed(seed))
    table[owned] = order.to(torch.int32)
    return table


def _chosen(case: Case, generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """Return (B, Hq, tokens) int32: for each head distinct tokens of its sequence, in random order."""
    chosen = []
    for keys in case.keys:
        drawn = torch.rand(case.heads_q, keys, generator=generator, device=device)
        chosen.append(drawn.topk(case.tokens, dim=1).indices)
    return torch.stack(chosen).to(torch.int32)
