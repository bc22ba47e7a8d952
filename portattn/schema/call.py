"""Call: the tensors and numbers of one call, beside its Problem. All tensors are (B, H, S, D) views."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from portattn.schema.problem import Problem


@dataclass(slots=True)
class Call:
    """One call, validated. `k` and `v` are the caches of an op that reads one.

    q                (B, Hq, Sq, D); packed: (1, Hq, Tq, D)
    k, v             (B, Hk, Sk, D), (B, Hk, Sk, Dv); packed: (1, Hk, Tk, D), (1, Hk, Tk, Dv);
                     paged: (P, Hk, page, D), (P, Hk, page, Dv)
    k_scale, v_scale  float32 factors of a cache's numbers, with strides of 0 if several share one: (B, Hk), or for each
                     token (B, Hk, Sk), paged (P, Hk, page). k and v are then the cache's numbers, int8, or the bytes
                     of float8 numbers as int8 (Problem.kv_format). int4, two numbers a byte, is D/2 and Dv/2 wide. For
                     fp8_ds_mla k is the bytes of whole rows, (P, 1, page, width), without scales
    k_block_scale, v_block_scale  nvfp4 only, the bytes of e4m3 numbers as int8: each block of 16 numbers of a row has
                     one, (B, Hk, Sk, D/16), paged (P, Hk, page, D/16), the last axis contiguous. k and v are as for
                     int4
    new_v            append and write: the new values, (B, Hk, Sq, Dv); q are then the new keys, k and v the cache
    slots            write_pages: (Sq,) int32 or int64, the slot of each new token, page·page_size + row; negative: none
    cos, sin         of a rotary embedding, (positions, rotary_dim / 2)
    positions        write_pages: (Sq,) int32 or int64, the row of cos and sin of each new token
    q_scale          the same for q, if queries are quantised too (Problem.q_format): (B, Hk), or for each token
                     (B, Hq, Sq). Scales for each token of packed tensors are (1, H, T). With int8 queries and keys, v
                     has the results' dtype and no scale
    q_rope           mla_attention: the last D - Dv columns of the queries, (B, H, Sq, D - Dv) or packed; q holds the
                     first Dv, k whole latent rows (P, 1, page, D), and v is k[..., :Dv]
    scale            factor on the scores, 1/√D unless the caller named one
    softcap          scores become softcap·tanh(score / softcap); 0 for none
    seqlens_q/k      (B,) int32 on the same device: valid rows of each sequence; None for all
    leftpad_q/k      (B,) int32 on the same device: padding rows before the first valid one; None for none
    cu_seqlens_q/k   (B + 1,) int32: first row of each sequence of packed tensors, then the end of the last
    page_table       (B, pages a sequence) int32: page ids of each sequence, in its order
    indices, counts  (B, Hq, Lmax) and (B, Hq) int32: tokens that each head attends, and how many places hold one
    log_weights      (B, Hq, Lmax) float32, added to the scores of those tokens
    magicpig_bits, magicpig_tables   int32 (Hq,): bits a hash table (MagicPIG's K) and number of tables (its L)
    magicpig         the same two as numbers, for all heads; (0, 0) where they are tensors or not given
    alibi_slopes     (B, Hq) float32; stride 0 over B where all sequences have the same
    sinks            (Hq,) float32: a further score of each row, which has no value
    bias, mask       (B, Hq, Sq, Sk) views, broadcast by strides of 0: added to the scores; True = attend
    tree_mask        (B, Sq) int64, packed (1, Tq): bit j of a query's word: it attends number j of its sequence's last
                     keys, as many as its queries. The mask does not concern earlier keys
    block_mask       (B, Hq, blocks of queries, blocks of keys) bool, broadcast by strides of 0: whether the queries of
                     a block attend any key of the other; each row of blocks is contiguous
    forward_out, forward_lse  of gradients: the forward's results, (B, Hq, Sq, Dv) and (B, Hq, Sq) float32
    grad_out, grad_lse        of gradients: the results' gradients, in the results' shapes; grad_lse may be None
    grad_q, grad_k, grad_v    of gradients: memory for dQ, dK and dV, in the shapes of q, k and v
    grad_bias        of gradients: memory for dBias, float32, as large along each axis as the bias was, or 1
    grad_slopes      of gradients: memory for each row's part of the slopes' gradient, (B, Hq, Sq) float32
    dropout_seed     (1,) int64 on q's device: key of the random numbers that decide dropout
    copied           q, k or v is a contiguous copy of the caller's (its rows lay too far apart for 32-bit offsets)
    dry              nothing will be launched: what the call allocates has no memory
    """

    problem: Problem
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    seqlens_q: torch.Tensor | None = None
    seqlens_k: torch.Tensor | None = None
    leftpad_q: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None
    copied: bool = False
    dry: bool = False
    softcap: float = 0.0
    q_scale: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    k_block_scale: torch.Tensor | None = None
    v_block_scale: torch.Tensor | None = None
    new_v: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    cos: torch.Tensor | None = None
    sin: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    q_rope: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    indices: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    log_weights: torch.Tensor | None = None
    magicpig_bits: torch.Tensor | None = None
    magicpig_tables: torch.Tensor | None = None
    magicpig: tuple[int, int] = (0, 0)
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None
    block_mask: torch.Tensor | None = None
    forward_out: torch.Tensor | None = None
    forward_lse: torch.Tensor | None = None
    grad_out: torch.Tensor | None = None
    grad_lse: torch.Tensor | None = None
    grad_q: torch.Tensor | None = None
    grad_k: torch.Tensor | None = None
    grad_v: torch.Tensor | None = None
    grad_bias: torch.Tensor | None = None
    grad_slopes: torch.Tensor | None = None

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An uninitialised tensor on q's device, of the results' dtype unless another is named."""
        return self.q.new_empty(shape, dtype=dtype or self.dtype, device="meta" if self.dry else self.q.device)

    @property
    def dtype(self) -> torch.dtype:
        """That of the results: q's, unless q is quantised."""
        if self.problem.q_format == "as_q":
            return self.q.dtype
        from portattn.schema.tensors import TORCH_DTYPE

        return TORCH_DTYPE[self.problem.dtype]

    def new_out(self) -> torch.Tensor:
        """An uninitialised output (B, Hq, Sq, Dv) in the results' dtype, laid out in memory as the caller's layout is.

        Packed: (1, Hq, Tq, Dv), which is (Tq, Hq, Dv) in memory. The result of gradients, beside what they fill, is
        delta, (B, Hq, Sq) float32: the sum of each row's gradient times its result, less the gradient of its LSE.
        What fills a cache has no result: a tensor without elements.
        """
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
        """MagicPIG's K and L as (Hq,) int32 tensors, made anew of numbers; None where they are not asked for."""
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

    def new_lse(self) -> torch.Tensor:
        """An uninitialised LSE (B, Hq, Sq) float32; packed: (1, Hq, Tq)."""
        import torch

        batch, rows = self.problem.query_rows
        return self.empty(batch, self.problem.heads_q, rows, dtype=torch.float32)


# Every tensor that a call can have, by the name that it has in Call and in kernels' arguments.
TENSORS = tuple(field.name for field in fields(Call) if str(field.type).startswith("torch.Tensor"))
