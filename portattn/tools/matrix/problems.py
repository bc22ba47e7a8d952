"""The problems that the matrix asks about: a quick set for every day, and a full one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from portattn.schema.features import COMMON, FEATURES
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DS_MLA, DTYPES, INTEGERS, NVFP4
from portattn.schema.tensors import CACHE_DTYPE, INT4

SetName = Literal["quick", "full"]
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)  # of published models, and two that are no power of two
COMMON_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 48, 64, 128, 256)  # of serving engines, and one that is no power of two

# Sizes that fill a large chip. Compiled code depends on them through strides and the split over keys only.
DENSE: dict[str, Any] = {"op": "attention", "batch": 4, "heads_q": 16, "heads_k": 16, "seq_q": 2048, "seq_k": 2048}
VARLEN: dict[str, Any] = DENSE | {"op": "varlen_attention", "batch": 8, "total_q": 8192, "total_k": 8192}
GRADIENTS: dict[str, Any] = DENSE | {"op": "attention_backward", "heads_q": 8, "heads_k": 8}
PACKED_GRADIENTS: dict[str, Any] = VARLEN | {"op": "varlen_attention_backward", "heads_q": 8, "heads_k": 8}
DECODE: dict[str, Any] = {
    "op": "decode_attention", "batch": 16, "heads_q": 32, "heads_k": 8, "seq_q": 1, "seq_k": 8192, "seqlens_k": True,
}  # fmt: skip
PAGED: dict[str, Any] = DECODE | {"op": "paged_attention", "pages_in_line": True}
SPARSE: dict[str, Any] = DECODE | {"op": "sparse_attention", "seq_k": 32768, "tokens": 1024}
MLA: dict[str, Any] = PAGED | {"op": "mla_attention", "heads_q": 128, "heads_k": 1, "seq_k": 4096, "page_size": 64}
APPEND: dict[str, Any] = {
    "op": "append_kv", "batch": 16, "heads_q": 8, "heads_k": 8, "seq_q": 1, "seq_k": 8192, "seqlens_k": True,
}  # fmt: skip
PAGES: dict[str, Any] = {
    "op": "write_pages", "batch": 1, "heads_q": 8, "heads_k": 8, "seq_q": 64, "seq_k": 131072, "page_size": 16,
}  # fmt: skip
PADDED: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
ROTARY: dict[str, Any] = {"rotary": "neox", "rotary_dim": 128}
WINDOW: dict[str, Any] = {"window_left": 511}
CHUNK: dict[str, Any] = {"chunk": 1000}  # of no whole tiles
PREFILL: dict[str, Any] = {"seq_q": 512, "causal": "bottom_right"}  # a chunk of a prompt
# A batch of decoding sequences with a chunk of a prompt among them, packed.
RAGGED: dict[str, Any] = PREFILL | {"total_q": 1024}
LATENTS = ((576, 512), (288, 256))  # DeepSeek's latent row and its rank, and one half as wide
MASK_WORDS = {"none": "full", "bottom_right": "causal", "top_left": "causal top-left"}


def each_feature(op: str) -> list[tuple[str, dict[str, Any]]]:
    """Words and fields of each feature that an op has, alone."""
    row = ROWS[op]
    by_position = (("window", WINDOW), ("chunk", CHUNK))
    found: list[tuple[str, dict[str, Any]]] = [pair for pair in by_position if pair[0] in row.options]
    found += [(FEATURES[name].title or name, {name: True}) for name in COMMON if name in row.options]
    found += [("mask by key", {"mask": True, "mask_by_key": True})] if "mask" in row.options else []
    return found


class NamedProblem(msgspec.Struct, frozen=True):
    """A problem and the words for it in reports."""

    name: str
    problem: Problem


def dense(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(DENSE | changes))
    return _named(problem, "dense", MASK_WORDS[problem.causal], problem.dtype, _width(problem), words)


def varlen(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(VARLEN | changes))
    return _named(problem, "varlen", MASK_WORDS[problem.causal], problem.dtype, _width(problem), words)


def gradients(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(GRADIENTS | changes))
    return _named(problem, "gradients", MASK_WORDS[problem.causal], problem.dtype, _width(problem), words)


def packed_gradients(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(PACKED_GRADIENTS | changes))
    return _named(problem, "packed gradients", MASK_WORDS[problem.causal], problem.dtype, _width(problem), words)


def decode(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(DECODE | changes))
    return _named(problem, "decode", problem.dtype, _width(problem), words)


def paged(what: str, words: str = "", **changes: Any) -> NamedProblem:
    """`what` says what kind of queries there are. The capacity is whole pages."""
    size = changes["page_size"]
    problem = Problem(**({**PAGED, "seq_k": -(-PAGED["seq_k"] // size) * size} | changes))
    return _named(problem, "paged", what, problem.dtype, _width(problem), f"page {size}", words)


def sparse(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(SPARSE | changes))
    pages = f"page {problem.page_size}" if problem.page_size else ""
    return _named(problem, "sparse", problem.dtype, _width(problem), pages, words)


def mla(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(MLA | changes))
    return _named(problem, "MLA", problem.dtype, _width(problem), words)


def append(words: str = "", **changes: Any) -> NamedProblem:
    problem = Problem(**(APPEND | changes))
    return _named(problem, "append", problem.dtype, _width(problem), words)


def write(words: str = "", **changes: Any) -> NamedProblem:
    size = changes.get("page_size", PAGES["page_size"])
    problem = Problem(**(PAGES | changes | {"seq_k": -(-PAGES["seq_k"] // size) * size}))
    return _named(problem, "write", problem.dtype, _width(problem), f"page {problem.page_size}", words)


def _named(problem: Problem, *words: str) -> NamedProblem:
    return NamedProblem(" ".join(filter(None, words)), problem)


def _width(problem: Problem) -> str:
    return f"D={problem.head_dim}" + (f"/{problem.head_dim_v}" if problem.head_dim_v != problem.head_dim else "")


def quick() -> list[NamedProblem]:
    """A handful that touches every op and kernel, every dtype and every kind of masking."""
    return [
        dense(dtype="fp16", head_dim=64, causal="bottom_right"),
        dense("GQA", dtype="bf16", head_dim=128, causal="bottom_right", heads_k=4),
        dense("padded, LSE", dtype="fp16", head_dim=80, return_lse=True, **PADDED),
        dense(dtype="fp32", head_dim=64),
        varlen("window, softcap", dtype="bf16", head_dim=128, causal="bottom_right", softcap=True, **WINDOW),
        gradients("GQA", dtype="bf16", head_dim=128, causal="bottom_right", heads_k=2),
        packed_gradients(dtype="fp16", head_dim=64, causal="bottom_right"),
        decode("GQA", dtype="bf16", head_dim=128),
        paged("GQA", dtype="bf16", head_dim=128, page_size=16),
        sparse("weights", dtype="fp16", head_dim=128, log_weights=True),
        mla(dtype="bf16", head_dim=576, head_dim_v=512),
        append(dtype="bf16", head_dim=128),
        write("rotary, e4m3 cache, scales token", dtype="bf16", head_dim=128, kv_format="e4m3", kv_scales="token",
              **ROTARY),
    ]  # fmt: skip


def full() -> list[NamedProblem]:
    """For each op every dtype × head_dim × mask or page size that it has kernels for, and each feature once or more."""
    return [*_dense(), *_varlen(), *_gradients(), *_decode(), *_paged(), *_sparse(), *_mla(), *_append(), *_write()]


def _dense() -> list[NamedProblem]:
    found = [
        dense(dtype=dtype, head_dim=dim, causal=causal)
        for dtype in DTYPES
        for causal in MASK_WORDS
        for dim in HEAD_DIMS
    ]
    found += [
        dense("padded", dtype=dtype, head_dim=dim, causal="bottom_right", **PADDED)
        for dtype in DTYPES
        for dim in HEAD_DIMS
    ]
    for dtype in DTYPES:
        causal: dict[str, Any] = {"dtype": dtype, "head_dim": 128, "causal": "bottom_right"}
        found += [
            dense("GQA", **causal, heads_k=4),
            dense("MQA", **causal, heads_k=1),
            dense("LSE", **causal, return_lse=True),
            dense("left-padded", **causal, **PADDED, leftpad_q=True, leftpad_k=True),
            dense("bshd", **causal, layout="bshd"),
            dense("unaligned", **causal, aligned=False),
            dense("", **causal | {"head_dim": 192}, head_dim_v=128),
            dense("short queries", **causal | {"seq_q": 16}),
            dense("", **causal | {"head_dim": 512}),
            dense("", **causal | {"head_dim": 576}, head_dim_v=512),
        ]
        found += [dense(word, **causal, **fields) for word, fields in each_feature("attention")]
    wide: dict[str, Any] = {"head_dim": 128, "causal": "bottom_right"}
    found += [dense(words, **wide, **fields) for words, fields in _operands()]
    found += [dense(words, **wide | {"head_dim": dim}, **fields) for dim in (64, 256) for words, fields in
              (_operands()[0], _operands()[4], _operands()[6])]  # fmt: skip
    found += [
        dense("window on both sides", dtype="bf16", head_dim=64, window_left=255, window_right=255),
        dense("bias, mask, ALiBi, sinks, softcap", dtype="bf16", head_dim=64, bias=True, mask=True, alibi_slopes=True,
              sinks=True, softcap=True),
    ]  # fmt: skip
    return found


def _operands() -> list[tuple[str, dict[str, Any]]]:
    """Words and fields of quantised q, k and v: each format, each dtype of the results, and both kinds of scales."""
    formats = [("e4m3", "head"), ("e5m2", "head"), ("e4m3fnuz", "head"), ("e4m3", "none"), ("int8", "token"),
               ("int8", "head")]  # fmt: skip
    found = [("bf16", kind, scales) for kind, scales in formats]
    found += [("fp16", "e4m3", "head"), ("fp16", "int8", "token")]
    return [
        (f"{kind} operands, scales {scales}", {"dtype": dtype, "kv_format": kind, "kv_scales": scales})
        for dtype, kind, scales in found
    ]


def _varlen() -> list[NamedProblem]:
    found = [
        varlen(dtype=dtype, head_dim=dim, causal="bottom_right") for dtype in DTYPES for dim in COMMON_DIMS
    ]  # fmt: skip
    causal: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "causal": "bottom_right"}
    found += [varlen(word, **causal, **fields) for word, fields in each_feature("varlen_attention")]
    found += [varlen(words, **causal | fields) for words, fields in _operands()]
    found += [
        varlen("GQA, LSE", **causal, heads_k=4, return_lse=True),
        varlen("window, softcap", **causal, softcap=True, **WINDOW),
        varlen(dtype="bf16", head_dim=128),
        varlen("", **causal | {"head_dim": 192}, head_dim_v=128),
        # 256 sequences of 32 rows on average: tiles are short.
        varlen("short sequences", **causal, batch=256, seq_q=128, seq_k=128),
    ]  # fmt: skip
    return found


def _gradients() -> list[NamedProblem]:
    found = [
        gradients(dtype=dtype, head_dim=dim, causal=causal)
        for dtype in DTYPES
        for causal in ("none", "bottom_right")
        for dim in COMMON_DIMS
    ]
    causal: dict[str, Any] = {"dtype": "bf16", "head_dim": 128, "causal": "bottom_right"}
    of = {"bias": {"grad_bias": True}, "ALiBi": {"grad_slopes": True}}
    found += [
        gradients(word, **causal, **fields, **of.get(word, {})) for word, fields in each_feature("attention_backward")
    ]
    found += [
        gradients("GQA", **causal, heads_k=2),
        gradients("padded, LSE's gradient", **causal, **PADDED, grad_lse=True),
        gradients("left-padded", **causal, **PADDED, leftpad_q=True, leftpad_k=True),
        gradients("unaligned", **causal, aligned=False),
        gradients("dropout", **causal, dropout=True),
        gradients("", **causal | {"head_dim": 192}, head_dim_v=128),
        dense("dropout", dtype="bf16", head_dim=128, causal="bottom_right", dropout=True),
        *(packed_gradients(dtype=dtype, head_dim=128, causal="bottom_right") for dtype in DTYPES),
        packed_gradients("GQA, window, softcap", **causal, heads_k=2, softcap=True, **WINDOW),
        packed_gradients("ALiBi", **causal, alibi_slopes=True, grad_slopes=True),
        packed_gradients("sinks", **causal, sinks=True),
        packed_gradients("chunk", **causal, **CHUNK),
    ]
    return found


def _decode() -> list[NamedProblem]:
    found = [decode("GQA", dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in HEAD_DIMS]
    for dtype in DTYPES:
        wide: dict[str, Any] = {"dtype": dtype, "head_dim": 128}
        found += [
            decode("one head a group", **wide, heads_k=32),
            decode("MQA", **wide, heads_k=1),
            decode("no lengths", **wide, seqlens_k=False),
            decode("left-padded, LSE", **wide, leftpad_k=True, return_lse=True),
            decode("4 queries, causal", **wide, seq_q=4, causal="bottom_right"),
            decode("GQA", dtype=dtype, head_dim=512),
            decode("GQA", dtype=dtype, head_dim=576, head_dim_v=512),
        ]
    wide = {"dtype": "bf16", "head_dim": 128}
    found += [decode(word, **wide, **fields) for word, fields in each_feature("decode_attention")]
    found.append(decode("one split", **wide, num_splits=1))
    found.append(decode("tree of 16", **wide, seq_q=16, tree_mask=True))
    found += [decode(f"GQA {words}", **wide | {"dtype": dtype}, **fields) for dtype, words, fields in _quantised(True)]
    return found


def _quantised(blocks: bool = False) -> list[tuple[str, str, dict[str, Any]]]:
    """Return (queries' dtype, words, fields) of each format of a cache and granularity of its scales; with `blocks`
    also of the format whose blocks have scales."""
    found = [("bf16", name, "token") for name in CACHE_DTYPE]
    found += [("fp16", "e4m3", "token"), ("bf16", "e4m3", "head"), ("bf16", "e4m3", "none"), ("fp16", "int8", "head"),
              ("fp16", "int4", "head")]  # fmt: skip
    found += [("bf16", NVFP4, "head"), ("fp16", NVFP4, "none")] if blocks else []
    return [
        (dtype, f"{name} cache, scales {scales}", {"kv_format": name, "kv_scales": scales})
        for dtype, name, scales in found
    ]


def _paged() -> list[NamedProblem]:
    found = [paged("GQA", dtype="bf16", head_dim=128, page_size=size) for size in PAGE_SIZES]
    found += [
        paged("GQA", dtype=dtype, head_dim=dim, page_size=64)
        for dtype in DTYPES
        for dim in COMMON_DIMS
        if (dtype, dim) != ("bf16", 128)
    ]
    wide: dict[str, Any] = {"dtype": "bf16", "head_dim": 128}
    for size in (16, 64):
        found += [
            paged("chunked prefill", **wide, page_size=size, **PREFILL),
            paged("ragged", **wide, page_size=size, **RAGGED),
        ]
    features = each_feature("paged_attention")
    found += [paged("GQA", word, **wide, page_size=16, **fields) for word, fields in features]
    found += [
        paged("GQA", "hpd", **wide, page_size=16, page_layout="hpd", pages_in_line=False),
        paged("GQA", "pages apart", **wide, page_size=64, pages_in_line=False),
        paged("GQA", "one split", **wide, page_size=16, num_splits=1),
        paged("GQA", "unaligned", **wide, page_size=16, aligned=False),
        paged("GQA", "2 queries, causal, LSE", **wide, page_size=16, seq_q=2, causal="bottom_right", return_lse=True),
        paged("GQA", dtype="bf16", head_dim=192, head_dim_v=128, page_size=64),
        paged("one head a group", **wide, page_size=16, heads_k=32),
        *(
            paged("GQA", words, **wide | {"dtype": dtype}, page_size=size, **fields)
            for size in (16, 64)
            for dtype, words, fields in _quantised(True)
        ),
        paged(
            "ragged", "e4m3 cache, scales token", **wide, page_size=16, **RAGGED, kv_format="e4m3", kv_scales="token"
        ),
        paged("ragged", "window, sinks", **wide, page_size=16, **RAGGED, **WINDOW, sinks=True),
        paged("GQA", "tree of 16", **wide, page_size=16, seq_q=16, tree_mask=True),
        paged("ragged", "trees of 16", **wide, page_size=16, seq_q=16, total_q=256, tree_mask=True),
    ]
    return found


def _sparse() -> list[NamedProblem]:
    found = [sparse(dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in COMMON_DIMS]
    wide: dict[str, Any] = {"dtype": "bf16", "head_dim": 128}
    for page in ({}, {"page_size": 16}):
        found += [
            sparse("weights", **wide, **page, log_weights=True),
            sparse("MagicPIG", **wide, **page, magicpig=True),
        ]
    found += [
        sparse("", **wide, page_size=16),
        sparse("", **wide, page_size=64),
        sparse("hpd", **wide, page_size=16, page_layout="hpd"),
        sparse("softcap, ALiBi, sinks, LSE", **wide, softcap=True, alibi_slopes=True, sinks=True, return_lse=True),
        sparse("no lengths", **wide, seqlens_k=False),
        sparse("few tokens", **wide, tokens=64),
        sparse("one split", **wide, num_splits=1),
        sparse("", dtype="bf16", head_dim=576, head_dim_v=512),
        *(sparse(words, **wide | {"dtype": dtype}, **fields) for dtype, words, fields in _quantised()),
        sparse(
            "MagicPIG, e4m3 cache, scales token",
            **wide,
            page_size=16,
            magicpig=True,
            kv_format="e4m3",
            kv_scales="token",
        ),
    ]
    return found


def _mla() -> list[NamedProblem]:
    found = [
        mla(
            words, dtype=dtype, head_dim=dim, head_dim_v=rank, seq_q=rows, causal="bottom_right" if rows > 1 else "none"
        )
        for dtype in DTYPES
        for dim, rank in LATENTS
        for rows, words in ((1, ""), (2, "2 queries, causal"))
    ]
    wide: dict[str, Any] = {"dtype": "bf16", "head_dim": 576, "head_dim_v": 512}
    found += [
        mla("page 1", **wide, page_size=1),
        mla("page 16", **wide, page_size=16),
        mla("16 heads", **wide, heads_q=16),  # what one of eight chips has
        mla("LSE", **wide, return_lse=True),
        mla("one split", **wide, num_splits=1),
        mla("ragged", **wide, **RAGGED),
        mla("tree of 16", **wide, seq_q=16, tree_mask=True),
        *(
            mla(words, **wide | {"dtype": dtype}, **fields)
            for dtype, words, fields in _quantised()
            if fields["kv_format"] != INT4
        ),
        *(
            mla(f"{words}{DS_MLA} cache", **wide, kv_format=DS_MLA, **fields)
            for words, fields in (
                ("", {}),
                ("page 16, ", {"page_size": 16}),
                ("2 queries, causal, ", {"seq_q": 2, "causal": "bottom_right"}),
            )
        ),
    ]
    return found


def _append() -> list[NamedProblem]:
    return [
        *_new_rows(append),
        append("a prompt", dtype="bf16", head_dim=128, batch=1, seq_q=8192),
    ]


def _write() -> list[NamedProblem]:
    wide: dict[str, Any] = {"dtype": "bf16", "head_dim": 128}
    return [
        *_new_rows(write),
        *(write(**wide, page_size=size) for size in PAGE_SIZES if size != PAGES["page_size"]),
        write("hpd", **wide, page_layout="hpd"),
        write("a prompt", **wide, seq_q=8192),
        write("rotary, a prompt, e4m3 cache", **wide, seq_q=8192, kv_format="e4m3", kv_scales="head", **ROTARY),
    ]


def _new_rows(make: Callable[..., NamedProblem]) -> list[NamedProblem]:
    """Every dtype and width, format and scales, and rotation of what writes a cache."""
    found = [make(dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in (*HEAD_DIMS, 576)]
    wide: dict[str, Any] = {"dtype": "bf16", "head_dim": 128}
    found += [make(words, **wide | {"dtype": dtype}, **fields) for dtype, words, fields in _quantised(True)]
    found += [
        make("e4m3 cache, scales token", dtype="fp32", head_dim=80, kv_format="e4m3", kv_scales="token"),
        make("rotary", **wide, **ROTARY),
        make("rotary", **wide | {"dtype": "fp32"}, **ROTARY),
        make("rotary of neighbours, half", **wide, rotary="interleaved", rotary_dim=64),
        *(
            make(f"rotary, {kind} cache, scales token", **wide, kv_format=kind, kv_scales="token", **ROTARY)
            for kind in INTEGERS
        ),
        make("unaligned", **wide, aligned=False),
        make("", dtype="bf16", head_dim=192, head_dim_v=128),
    ]
    return found


SETS = {"quick": quick, "full": full}
