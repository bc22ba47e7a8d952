"""Call: the tensors and numbers of one call, beside its Problem. All tensors are (B, H, S, D) views."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from portattn.schema.problem import Problem


@dataclass(slots=True, kw_only=True)
class FeatureTensors:
    """The features' tensors: a Call's fields."""

    seqlens_q: torch.Tensor | None = None  # (B,) int32 on q's device: valid rows of each sequence; None: all
    seqlens_k: torch.Tensor | None = None
    # (B,) int32 on q's device: padding rows before the first valid row; None: none
    leftpad_q: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    # Read by the score and mask functions, contiguous, at most 4 axes.
    captured_0: torch.Tensor | None = None
    captured_1: torch.Tensor | None = None
    captured_2: torch.Tensor | None = None
    captured_3: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None  # (B, Hq, Lmax) float32, added to the scores of those tokens
    alibi_slopes: torch.Tensor | None = None  # (B, Hq) float32; stride 0 over B where all sequences have the same
    sinks: torch.Tensor | None = None  # (Hq,) float32: one more score of each row, without a value
    bias: torch.Tensor | None = None  # (B, Hq, Sq, Sk) view, broadcast by strides of 0
    mask: torch.Tensor | None = None  # the same; True = attend
    # (B, Sq) int64, packed (1, Tq): bit j of a query's word is set if the query attends key j of its sequence's last
    # keys, as many as its queries. Earlier keys are not masked.
    tree_mask: torch.Tensor | None = None
    # (B, Hq, R blocks of queries, C blocks of keys + 2) int32, broadcast by strides of 0, the last axis contiguous: how
    # many blocks of keys are attended whole but for other limits, how many of which a mask function tells the keys, and
    # the numbers of these blocks, the whole ones first; places behind them count for nothing. No block is whole that
    # ends behind the last query or key.
    block_mask: torch.Tensor | None = None


@dataclass(slots=True)
class Call(FeatureTensors):
    """One validated call. `k` and `v` are the caches of an op that reads one; packed tensors have a batch of 1."""

    problem: Problem
    q: torch.Tensor  # (B, Hq, Sq, D); packed: (1, Hq, Tq, D); append and write: the new keys
    k: torch.Tensor  # (B, Hk, Sk, D); packed: (1, Hk, Tk, D); paged: (P, Hk, page, D)
    v: torch.Tensor  # the same with Dv
    scale: float  # factor on the scores, 1/√D unless the caller named one
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None  # (1,) int64 on q's device: key of dropout's random numbers
    copied: bool = False  # q, k or v is a contiguous copy: the caller's rows lay too far apart for 32-bit offsets
    dry: bool = False  # nothing will be launched: tensors that the call allocates have no memory
    softcap: float = 0.0  # scores become softcap·tanh(score / softcap); 0 for none
    # Factors of quantised q (Problem.q_format), float32: (B, Hk), or a token each (B, Hq, Sq), packed (1, Hq, Tq).
    # With int8 queries and keys v has the results' dtype and no scale.
    q_scale: torch.Tensor | None = None
    # Factors of a cache's numbers, float32, with strides of 0 where several share one: (B, Hk), or a token each (B, Hk,
    # Sk), paged (P, Hk, page). k and v then hold int8, or float8's bytes as int8 (Problem.kv_format). int4, two numbers
    # a byte, is D/2 and Dv/2 wide. For fp8_ds_mla k holds the bytes of whole rows, (P, 1, page, width), without scales.
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    # nvfp4 alone: bytes of e4m3 numbers as int8, one for each block of 16 numbers of a row: (B, Hk, Sk, D/16), paged
    # (P, Hk, page, D/16), the last axis contiguous. k and v are as for int4.
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    new_v: torch.Tensor | None = None  # append and write: the new values, (B, Hk, Sq, Dv)
    # write_pages: (Sq,) int32 or int64, each new token's slot, page·page_size + row; negative: none
    slots: torch.Tensor | None = None
    cos: torch.Tensor | None = None  # rotary embedding, (positions, rotary_dim / 2)
    sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None  # write_pages: (Sq,) int32 or int64, the row of cos and sin of each new token
    # mla_attention: the queries' last D - Dv columns, (B, H, Sq, D - Dv) or packed; q has the first Dv, k whole latent
    # rows (P, 1, page, D), and v is k[..., :Dv].
    q_rope: torch.Tensor | None = None
    # (B + 1,) int32: first row of each packed sequence, then the end of the last
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None  # (B, pages a sequence) int32: page ids of each sequence, in its order
    # (B, Hq, Lmax) int32: tokens that each head attends. With Problem.has_lists (B, Sq, tokens) or packed (Tq, tokens):
    # slots of each query's keys, page·page_size + row, below 0 for none
    indices: torch.Tensor | None = None
    # (B, Hq), (B, Sq) or (Tq,) int32: how many places of `indices` count. With Problem.has_blocks (B, Hk, Sq), and
    # indices (B, Hk, Sq, tokens): blocks of keys, below 0 for none.
    counts: torch.Tensor | None = None
    # Gradients with Problem.has_blocks: the rows whose lists name each block, in order (B, Hk, Sq·tokens) int32, their
    # beginnings (B, Hk, blocks + 1), and chunks of them (launch/backward.py, rows_by_block).
    block_rows: torch.Tensor | None = None
    block_starts: torch.Tensor | None = None
    block_chunks: torch.Tensor | None = None
    # Gradients with a block mask: for each block of keys its blocks of queries, (B, Hq, C, R + 2), as block_mask.
    block_queries: torch.Tensor | None = None
    magicpig_bits: torch.Tensor | None = None  # (Hq,) int32: bits a hash table (MagicPIG's K)
    magicpig_tables: torch.Tensor | None = None  # (Hq,) int32: number of tables (its L)
    magicpig: tuple[int, int] = (0, 0)  # both as numbers, for all heads; (0, 0): tensors, or not given
    forward_out: torch.Tensor | None = None  # gradients: the forward's out (B, Hq, Sq, Dv)
    forward_lse: torch.Tensor | None = None  # gradients: the forward's LSE (B, Hq, Sq) float32
    grad_out: torch.Tensor | None = None  # gradients of the two results, in their shapes; grad_lse may be None
    grad_lse: torch.Tensor | None = None
    grad_q: torch.Tensor | None = None  # memory for dQ, dK and dV, in the shapes of q, k and v
    grad_k: torch.Tensor | None = None
    grad_v: torch.Tensor | None = None
    grad_bias: torch.Tensor | None = None  # memory for dBias, float32; each axis is as long as the bias's, or 1
    weights: torch.Tensor | None = None  # indexer_logits: (B, Sq, Hq) float32, each head's factor; k is (P, 1, page, D)
    # (B·Sq,) int32: the first key that each row sees, and the end of its keys; None: all
    row_starts: torch.Tensor | None = None
    row_ends: torch.Tensor | None = None
    # Memory for the result: logits (B, Sq, Sk) float32, or indices (B, Sq, tokens) int32, of logits (B, 1, Sq, Sk) as q
    result: torch.Tensor | None = None
    # Memory for the gradients of the tensors that score_mod reads, float32 and zeros: kernels add to it.
    grad_captured_0: torch.Tensor | None = None
    grad_captured_1: torch.Tensor | None = None
    grad_captured_2: torch.Tensor | None = None
    grad_captured_3: torch.Tensor | None = None
    grad_slopes: torch.Tensor | None = None  # memory for each row's part of the slopes' gradient, (B, Hq, Sq) float32

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialised tensor on q's device, by default of the results' dtype."""
        return self.q.new_empty(shape, dtype=dtype or self.dtype, device="meta" if self.dry else self.q.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the results' dtype: q's, unless q is quantised."""
        if self.problem.q_format == "as_q":
            return self.q.dtype
        from portattn.schema.tensors import TORCH_DTYPE

        return TORCH_DTYPE[self.problem.dtype]

    def new_out(self) -> torch.Tensor:
        """Return an uninitialised output (B, Hq, Sq, Dv), packed (1, Hq, Tq, Dv), contiguous in the caller's layout.

        Gradients return delta, (B, Hq, Sq) float32: each row's sum of grad_out·out, less grad_lse. Ops that fill a
        cache return a tensor without elements."""
        if self.problem.writes:
            return self.empty(0)
        if self.problem.backward:
            return self.new_lse()
        p = self.problem
        batch, rows = p.query_rows
        if p.layout == "bshd" or p.packed:
            return self.empty(batch, rows, p.heads_q, p.head_dim_v).transpose(1, 2)
        return self.empty(batch, p.heads_q, rows, p.head_dim_v)

    def hashing(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return MagicPIG's K and L as (Hq,) int32 tensors, or None if the call has none."""
        import torch

        if self.magicpig_bits is not None and self.magicpig_tables is not None:
            return self.magicpig_bits, self.magicpig_tables
        if not self.problem.magicpig:
            return None
        bits, tables = (
            torch.full((self.problem.heads_q,), number, dtype=torch.int32, device=self.q.device)
            for number in self.magicpig
        )
        return bits, tables

    def by_query(self) -> Call:
        """Return a call over lists of slots (Problem.has_lists) with each query as a sequence of its own.

        q is (N, Hq, 1, D) for N queries, page_table (N, tokens), seqlens_k (N,) or None."""
        import msgspec

        batch, rows = self.problem.query_rows

        def by_row(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.transpose(1, 2).flatten(0, 1)[:, :, None]

        assert self.indices is not None
        scales = {
            name: scale[:1].expand(batch * rows, 1)
            for name in ("k_scale", "v_scale")
            if (scale := getattr(self, name)) is not None and scale.ndim == 2
        }
        return replace(
            self,
            problem=msgspec.structs.replace(self.problem, batch=batch * rows, seq_q=1, total_q=None),
            q=by_row(self.q),  # type: ignore[arg-type]
            q_rope=by_row(self.q_rope),
            page_table=self.indices.reshape(batch * rows, self.indices.shape[-1]),
            seqlens_k=None if self.counts is None else self.counts.flatten(),
            indices=None,
            counts=None,
            **scales,
        )

    def new_lse(self) -> torch.Tensor:
        """Return an uninitialised LSE (B, Hq, Sq) float32; packed: (1, Hq, Tq)."""
        import torch

        batch, rows = self.problem.query_rows
        return self.empty(batch, self.problem.heads_q, rows, dtype=torch.float32)


# Names of a Call's tensors, which kernels' arguments have too.
TENSORS = tuple(field.name for field in fields(Call) if str(field.type).startswith("torch.Tensor"))
