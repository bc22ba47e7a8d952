"""What other libraries call the arguments of attention: the rows of docs/coming-from.md, as data.

An error about an unknown argument quotes them (unknown_arguments.py), and a test compares them with the page.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CODE = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"(\w+)(?:=|$)")


class ArgumentRow(NamedTuple):
    """One argument, or several that go together, in Markdown as the page has it.

    theirs  what the other library calls it
    ours    what it is called here, or what to do instead
    """

    theirs: str
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments of the other library that the row is about."""
        return _names(self.theirs)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments and operations of portattn that it names."""
        return _names(self.ours)

    def __str__(self) -> str:
        return f"{self.theirs} -> {self.ours}".replace("`", "")


class Table(NamedTuple):
    """One table of the page.

    library  the page's heading
    head     what is called: theirs, and ours
    ops      the operations that take what `ours` names
    rows     its arguments
    """

    library: str
    head: ArgumentRow
    ops: tuple[str, ...]
    rows: tuple[ArgumentRow, ...]


def _names(cell: str) -> tuple[str, ...]:
    found = (_NAME.match(code) for code in _CODE.findall(cell))
    return tuple(dict.fromkeys(match[1] for match in found if match))


TABLES = (
    Table(
        "torch: scaled_dot_product_attention",
        ArgumentRow("SDPA", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow("`query`, `key`, `value`", "`q`, `k`, `v`, in the same layout"),
            ArgumentRow("`attn_mask`, boolean", "`mask`: True = attend, too"),
            ArgumentRow("`attn_mask`, floating", "`bias`; both may be given, and `causal` beside them"),
            ArgumentRow(
                "`is_causal=True`",
                '`causal="top_left"`; the same as `causal=True` where there are as many queries as keys',
            ),
            ArgumentRow(
                "`scale`, `dropout_p`",
                "the same; `dropout_seed` says which elements; give `dropout_p` 0 in evaluation, as to SDPA",
            ),
            ArgumentRow("`enable_gqa=True`", "not needed"),
        ),
    ),
    Table(
        "torch: flex_attention",
        ArgumentRow("flex_attention", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow("`score_mod`", "no: scores change by `bias`, `alibi_slopes` and `softcap` alone"),
            ArgumentRow(
                "`block_mask`",
                "the same; at each call its mask_mod is computed for each query and key, with a warning",
            ),
            ArgumentRow(
                "`mask_mod`", "`mask`; better `causal`, `window` or `seqlens_k`, which skip tiles that see nothing"
            ),
            ArgumentRow("`kernel_options`", "not needed: the plan chooses"),
            ArgumentRow("`scale`, `return_lse`", "the same"),
        ),
    ),
    Table(
        "transformers and torch.nn",
        ArgumentRow("a module's attention", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow(
                "`attention_mask` (B, Sk), 1 = attend",
                "`mask=attention_mask[:, None, None, :].bool()`; an additive one is `bias`",
            ),
            ArgumentRow(
                "`key_padding_mask` (B, Sk), True = ignore",
                "`mask=~key_padding_mask[:, None, None, :]`; right padding: `seqlens_k`",
            ),
            ArgumentRow("`scaling`", "`scale`"),
            ArgumentRow("`sliding_window=W`", "`window=(W - 1, 0)`"),
            ArgumentRow("`attention_chunk_size`", "`chunk`, with `causal`"),
        ),
    ),
    Table(
        "flash-attn",
        ArgumentRow("`flash_attn_func`, `flash_attn_varlen_func`", "`attention`, `varlen_attention`"),
        ("attention", "varlen_attention"),
        (
            ArgumentRow("`q`, `k`, `v` (B, S, H, D)", '`layout="bshd"`; packed tensors are the same'),
            ArgumentRow(
                "`cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`",
                "the same, in the same order, of `varlen_attention`",
            ),
            ArgumentRow("`softmax_scale`", "`scale`"),
            ArgumentRow("`causal`", "the same: bottom right since flash-attn 2.1"),
            ArgumentRow("`window_size=(left, right)`", "`window=(left, right)`; -1 or None for no limit"),
            ArgumentRow("`attention_chunk`", "`chunk`, which is `None` for no chunks, not 0"),
            ArgumentRow("`softcap`, 0.0 for none", "the same, or `None`"),
            ArgumentRow("`alibi_slopes`", "the same"),
            ArgumentRow("`return_attn_probs=True`", "`return_lse=True`"),
            ArgumentRow("`dropout_p`", "the same"),
            ArgumentRow(
                "`deterministic`",
                "no: `portattn.settings(deterministic=True)` asks for it, or torch's own setting",
            ),
            ArgumentRow("`learnable_sink`, `s_aux`", "`sinks`"),
            ArgumentRow("`block_sparse_tensors`", "`block_mask=portattn.BlockMask(*tensors[:4], block_size=…)`"),
            ArgumentRow("`q_descale`, `k_descale`, `v_descale` (B, Hk)", "`q_scale`, `k_scale`, `v_scale`"),
            ArgumentRow("`pack_gqa`", "not needed"),
        ),
    ),
    Table(
        "flash-attn",
        ArgumentRow("`flash_attn_with_kvcache`", "`decode_attention`, `paged_attention`"),
        ("decode_attention", "paged_attention"),
        (
            ArgumentRow("`k_cache`, `v_cache` (B, S, H, D)", 'the same with `layout="bshd"`'),
            ArgumentRow("`k_cache`, `v_cache`, pages (P, page, H, D)", "`k_pages`, `v_pages` of `paged_attention`"),
            ArgumentRow("`cache_seqlens`", "`seqlens_k`"),
            ArgumentRow("`cache_leftpad`", "`leftpad_k`"),
            ArgumentRow("`seqused_k`", "`seqlens_k`; with packed queries, of `paged_attention`"),
            ArgumentRow(
                "`block_table`, `block_tables`",
                "`page_table`, of `paged_attention`",
            ),
            ArgumentRow(
                "`cache_batch_idx`",
                "no: a page each, `page_table=cache_batch_idx[:, None]`; or `portattn.integrations.flash_attn`",
            ),
            ArgumentRow(
                "`k`, `v`",
                "no: `append_kv` or `write_pages` writes them first; `portattn.integrations.flash_attn` does both",
            ),
            ArgumentRow(
                "`rotary_cos`, `rotary_sin`",
                "no: `append_kv` and `write_pages` rotate new keys; queries are rotated by the caller",
            ),
            ArgumentRow(
                "`num_splits`, 0 for its own choice", "the same, or `None`; 1 is bitwise the same whatever the batch"
            ),
            ArgumentRow("`k_descale`, `v_descale` (B, Hk)", "`k_scale`, `v_scale`; queries stay in 16 bits"),
        ),
    ),
    Table(
        "FlashInfer",
        ArgumentRow(
            "a paged decode wrapper's `plan` and `run`", "`paged_attention`, or `prepare` once and `run` often"
        ),
        ("paged_attention",),
        (
            ArgumentRow(
                "`indptr`, `indices`, `last_page_len`",
                "`page_table=portattn.PageTable.from_csr(indptr, indices, last_page_len)`",
            ),
            ArgumentRow(
                "`paged_kv_indptr`, `paged_kv_indices`, `paged_kv_last_page_len`",
                "`page_table=portattn.PageTable.from_csr(…)`",
            ),
            ArgumentRow("`kv_indptr`, `kv_indices`, `kv_last_page_len`", "`page_table=portattn.PageTable.from_csr(…)`"),
            ArgumentRow("`page_size`", "not needed: the pages' shape says it"),
            ArgumentRow(
                "`custom_mask`, flat",
                "`mask`, broadcast to (B, Hq, Sq, Sk); of drafted tokens `tree_mask=portattn.tree_mask(…)`",
            ),
            ArgumentRow("`qo_indptr`", "`cu_seqlens_q`"),
            ArgumentRow("`sm_scale`", "`scale`"),
            ArgumentRow("`logits_soft_cap`", "`softcap`"),
            ArgumentRow("`window_left=W`", "`window=(W, None)`"),
            ArgumentRow('`kv_layout="NHD"`, `"HND"`', '`page_layout="phd"`, `"hpd"`'),
            ArgumentRow("LSE in base 2", "natural: divide by log₂ e"),
        ),
    ),
    Table(
        "FlashInfer",
        ArgumentRow("`merge_states`", "`merge_states`"),
        ("merge_states",),
        (
            ArgumentRow("`v` (S, N, H, D)", "`outs`, N tensors or one with N as its first axis, each (..., S, D)"),
            ArgumentRow("`s` (S, N, H), in base 2", "`lses`, likewise, natural: divide by log₂ e"),
        ),
    ),
    Table(
        "xformers",
        ArgumentRow("`memory_efficient_attention` (B, S, H, D)", '`attention` with `layout="bshd"`'),
        ("attention", "varlen_attention"),
        (
            ArgumentRow("`attn_bias=LowerTriangularMask()`", '`causal="top_left"`'),
            ArgumentRow("`attn_bias=LowerTriangularFromBottomRightMask()`", "`causal=True`"),
            ArgumentRow("`attn_bias=BlockDiagonalMask…`", "`varlen_attention` with `cu_seqlens_q` and `cu_seqlens_k`"),
            ArgumentRow("`attn_bias` as a tensor", "`bias`"),
            ArgumentRow("`p`", "`dropout_p`"),
            ArgumentRow("`scale`", "the same"),
        ),
    ),
)
