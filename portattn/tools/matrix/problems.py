"""The matrix's problems: a quick set for every day, and a full one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from portattn.errors import ArgumentError, DataError
from portattn.schema import toml_reader
from portattn.schema.ops import COMMON, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import DTYPES, OPS, formats_of
from portattn.tools import run_log
from portattn.tools.problem_options import problem_of_table

# Of a file: kernels (testing/kernel_cases.py) and shapes, problems of the user's own.
SetName = Literal["quick", "full", "kernels", "shapes"]
SHAPES: SetName = "shapes"
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)  # of published models, and two that are no power of two
COMMON_DIMS = (64, 128, 256)
PAGE_SIZES = (1, 16, 48, 64, 128, 256)  # of serving engines, and one that is no power of two
LATENTS = ((576, 512), (288, 256))  # DeepSeek's latent row and its rank, and one half as wide
MASK_WORDS = {"none": "full", "bottom_right": "causal", "top_left": "causal top-left"}

Fields = dict[str, Any]
# Sizes that fill a large chip. Compiled code depends on them through strides and the split over keys only.
_DENSE: Fields = {"batch": 4, "heads_q": 16, "heads_k": 16, "seq_q": 2048, "seq_k": 2048}
_VARLEN: Fields = _DENSE | {"batch": 8, "total_q": 8192, "total_k": 8192}
_FEWER: Fields = {"heads_q": 8, "heads_k": 8}
_DECODE: Fields = {"batch": 16, "heads_q": 32, "heads_k": 8, "seq_q": 1, "seq_k": 8192, "seqlens_k": True}
_PAGED: Fields = _DECODE | {"pages_in_line": True}
# A chunk of a prompt of DeepSeek V3.2.
_INDEXER: Fields = {"batch": 1, "heads_q": 64, "heads_k": 1, "seq_q": 1024, "seq_k": 16384}
_BLOCKS: Fields = _INDEXER | {"heads_k": 4, "seq_q": 8192, "seq_k": 8192, "tokens": 16, "block_k": 64}
# op -> its word in names, and its sizes
SIZES: dict[str, tuple[str, Fields]] = {
    "attention": ("dense", _DENSE), "varlen_attention": ("varlen", _VARLEN),
    "attention_backward": ("gradients", _DENSE | _FEWER),
    "varlen_attention_backward": ("packed gradients", _VARLEN | _FEWER), "decode_attention": ("decode", _DECODE),
    "paged_attention": ("paged", _PAGED), "sparse_attention": ("sparse", _DECODE | {"seq_k": 32768, "tokens": 1024}),
    "block_sparse_attention": ("blocks", _BLOCKS), "block_sparse_attention_backward": ("gradients of blocks", _BLOCKS),
    "mla_attention": ("MLA", _PAGED | {"heads_q": 128, "heads_k": 1, "seq_k": 4096, "page_size": 64}),
    "append_kv": ("append", _DECODE | _FEWER),
    "write_pages": ("write", _FEWER | {"batch": 1, "seq_q": 64, "seq_k": 131072, "page_size": 16}),
    "indexer_logits": ("indexer", _INDEXER),
    "topk_indices": ("top-k", _INDEXER | {"heads_q": 1, "seq_k": 65536, "head_dim": 1, "tokens": 2048}),
}  # fmt: skip
PADDED: Fields = {"seqlens_q": True, "seqlens_k": True}
LEFT_PADDED: Fields = PADDED | {"leftpad_q": True, "leftpad_k": True}
ROTARY: Fields = {"rotary": "neox", "rotary_dim": 128}
WINDOW: Fields = {"window_left": 511}
CHUNK: Fields = {"chunk": 1000}  # of no whole tiles
PREFILL: Fields = {"seq_q": 512, "causal": "bottom_right"}  # a chunk of a prompt
# A batch of decoding sequences with a chunk of a prompt among them, packed.
RAGGED: Fields = PREFILL | {"total_q": 1024}
E4M3: Fields = {"kv_format": "e4m3", "kv_scales": "token"}
TREE: Fields = {"seq_q": 16, "tree_mask": True}
WIDE: Fields = {"dtype": "bf16", "head_dim": 128}
CAUSAL: Fields = WIDE | {"causal": "bottom_right"}
# Programs of ALiBi as a function, and of documents that attend nothing of each other (kernels/score_program.py).
ALIBI = "c0 f 1 0\nt0 f load c0 h\nt1 i sub kv_idx q_idx\nt2 f to_f t1\nt3 f mul t0 t2\nt4 f add score t3\nout t4"
DOCUMENTS = "c1 i 1 1\nt0 i load c1 q_idx\nt1 i load c1 kv_idx\nt2 b eq t0 t1\nout t2"
FUNCTIONS: Fields = {"score_mod": ALIBI, "mask_mod": DOCUMENTS}
LATENT: Fields = {"dtype": "bf16", "head_dim": 576, "head_dim_v": 512}


class NamedProblem(msgspec.Struct, frozen=True):
    name: str
    problem: Problem


def named_problem(op: str, words: str = "", kind: str = "", **changes: Any) -> NamedProblem:
    """Name a problem by op, kind of queries, mask, dtype, width, page and `words`; a capacity is whole pages."""
    word, sizes = SIZES[op]
    size = changes.get("page_size") or sizes.get("page_size") or 1
    p = Problem(**({"op": op, **sizes, "seq_k": -(-sizes["seq_k"] // size) * size} | changes))
    mask = MASK_WORDS[p.causal] if sizes["seq_q"] > 1 and not ROWS[op].writes else ""
    width = f"D={p.head_dim}" + (f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else "")
    page = f"page {p.page_size}" if p.page_size and op != "mla_attention" else ""
    return NamedProblem(" ".join(filter(None, (word, kind, mask, p.dtype, width, page, words))), p)


dense = partial(named_problem, "attention")
varlen = partial(named_problem, "varlen_attention")
gradients = partial(named_problem, "attention_backward")
packed_gradients = partial(named_problem, "varlen_attention_backward")
decode = partial(named_problem, "decode_attention")
sparse = partial(named_problem, "sparse_attention")
blocks, block_gradients = (partial(named_problem, f"block_sparse_attention{end}") for end in ("", "_backward"))
mla = partial(named_problem, "mla_attention")
append = partial(named_problem, "append_kv")
write = partial(named_problem, "write_pages")
indexer = partial(named_problem, "indexer_logits")
topk = partial(named_problem, "topk_indices")


def paged(kind: str, words: str = "", **changes: Any) -> NamedProblem:
    return named_problem("paged_attention", words, kind, **changes)


def quick() -> list[NamedProblem]:
    """Return a handful that touches every op and kernel, every dtype and every kind of masking."""
    return [
        dense(dtype="fp16", head_dim=64, causal="bottom_right"), dense("GQA", **CAUSAL, heads_k=4),
        dense("padded, LSE", dtype="fp16", head_dim=80, return_lse=True, **PADDED), dense(dtype="fp32", head_dim=64),
        dense("functions", **WIDE, **FUNCTIONS), varlen("window, softcap", **CAUSAL, softcap=True, **WINDOW),
        gradients("GQA", **CAUSAL, heads_k=2),
        gradients("functions", **WIDE, **FUNCTIONS, block_mask=True, grad_captured=1),
        packed_gradients(dtype="fp16", head_dim=64, causal="bottom_right"), decode("GQA", **WIDE),
        paged("GQA", **WIDE, page_size=16), sparse("weights", dtype="fp16", head_dim=128, log_weights=True),
        *(make(**CAUSAL) for make in (blocks, block_gradients)), mla(**LATENT), append(**WIDE),
        write("rotary, e4m3 cache, scales token", **WIDE, **E4M3, **ROTARY),
        indexer("e4m3, scales token", **WIDE, **E4M3), topk(dtype="fp32"),
    ]  # fmt: skip


def full() -> list[NamedProblem]:
    """Return for each op every supported dtype × head_dim × mask or page size, and each feature once or more."""
    parts = (_dense(), _varlen(), _gradients(), _decode(), _paged(), _sparse(), _mla(), _append(), _write())
    return list(itertools.chain(*parts, _indexer()))


def _each_feature(op: str) -> list[tuple[str, Fields]]:
    row = ROWS[op]
    found: list[tuple[str, Fields]] = [
        pair for pair in (("window", WINDOW), ("chunk", CHUNK)) if pair[0] in row.options
    ]
    found += [(FEATURES[name].title or name, {name: True}) for name in COMMON if name in row.options]
    return found + ([("mask by key", {"mask": True, "mask_by_key": True})] if "mask" in row.options else [])


def _operands() -> list[tuple[str, Fields]]:
    found = ("bf16 e4m3 head", "bf16 e5m2 head", "bf16 e4m3fnuz head", "bf16 e4m3 none", "bf16 int8 token",
             "bf16 int8 head", "fp16 e4m3 head", "fp16 int8 token")  # fmt: skip
    return [
        (f"{kind} operands, scales {scales}", {"dtype": dtype, "kv_format": kind, "kv_scales": scales})
        for dtype, kind, scales in map(str.split, found)
    ]


def _quantised(op: str) -> list[tuple[str, Fields]]:
    """Return (words, fields) of each cache format that the op takes, and each unit of its scales."""
    taken = {name: row for name, row in formats_of(op).items() if not row.latent}
    found = [("bf16", name, "token") for name, row in taken.items() if "token" in row.scales]
    found += [("fp16", "e4m3", "token"), ("bf16", "e4m3", "head"), ("bf16", "e4m3", "none")]
    found += [("fp16", name, "head") for name, row in taken.items() if row.default_scales == "token"]
    for name in (name for name, row in taken.items() if row.block):
        found += [("bf16", name, "head"), ("fp16", name, "none")]
    return [
        (f"{name} cache, scales {scales}", {"dtype": dtype, "kv_format": name, "kv_scales": scales})
        for dtype, name, scales in found
    ]


def _dense() -> Iterator[NamedProblem]:
    for dtype in DTYPES:
        yield from (dense(dtype=dtype, head_dim=dim, causal=causal) for causal in MASK_WORDS for dim in HEAD_DIMS)
        yield from (dense("padded", dtype=dtype, head_dim=dim, causal="bottom_right", **PADDED) for dim in HEAD_DIMS)
    for dtype in DTYPES:
        causal = CAUSAL | {"dtype": dtype}
        yield from (dense(words, **causal, heads_k=heads) for words, heads in (("GQA", 4), ("MQA", 1)))
        yield dense("LSE", **causal, return_lse=True)
        yield dense("left-padded", **causal, **LEFT_PADDED)
        yield dense("bshd", **causal, layout="bshd")
        yield dense("unaligned", **causal, aligned=False)
        yield dense(**causal | {"head_dim": 192}, head_dim_v=128)
        yield dense("short queries", **causal | {"seq_q": 16})
        yield dense(**causal | {"head_dim": 512})
        yield dense(**causal | {"head_dim": 576}, head_dim_v=512)
        yield from (dense(word, **causal, **fields) for word, fields in _each_feature("attention"))
    found = _operands()
    for dim, some in ((128, found), (64, found[:5:4] + found[6:7]), (256, found[:5:4] + found[6:7])):
        yield from (dense(words, **CAUSAL | {"head_dim": dim} | fields) for words, fields in some)
    yield dense("window on both sides", dtype="bf16", head_dim=64, window_left=255, window_right=255)
    several: Fields = dict.fromkeys(("bias", "mask", "alibi_slopes", "sinks", "softcap"), True)
    yield dense("bias, mask, ALiBi, sinks, softcap", dtype="bf16", head_dim=64, **several)


def _varlen() -> Iterator[NamedProblem]:
    for dtype, dim in itertools.product(DTYPES, COMMON_DIMS):
        yield varlen(dtype=dtype, head_dim=dim, causal="bottom_right")
    for words, fields in (*_each_feature("varlen_attention"), *_operands()):
        yield varlen(words, **CAUSAL | fields)
    yield varlen("GQA, LSE", **CAUSAL, heads_k=4, return_lse=True)
    yield varlen("window, softcap", **CAUSAL, softcap=True, **WINDOW)
    yield varlen(**WIDE)
    yield varlen(**CAUSAL | {"head_dim": 192}, head_dim_v=128)
    # 256 sequences of 32 rows on average: tiles are short.
    yield varlen("short sequences", **CAUSAL, batch=256, seq_q=128, seq_k=128)


def _gradients() -> Iterator[NamedProblem]:
    for dtype, causal, dim in itertools.product(DTYPES, ("none", "bottom_right"), COMMON_DIMS):
        yield gradients(dtype=dtype, head_dim=dim, causal=causal)
    more: dict[str, Fields] = {"bias": {"grad_bias": True}, "ALiBi": {"grad_slopes": True}}
    for word, fields in _each_feature("attention_backward"):
        yield gradients(word, **CAUSAL, **fields, **more.get(word, {}))
    yield gradients("GQA", **CAUSAL, heads_k=2)
    yield gradients("padded, LSE's gradient", **CAUSAL, **PADDED, grad_lse=True)
    yield gradients("left-padded", **CAUSAL, **LEFT_PADDED)
    yield gradients("unaligned", **CAUSAL, aligned=False)
    yield gradients("dropout", **CAUSAL, dropout=True)
    yield gradients(**CAUSAL | {"head_dim": 192}, head_dim_v=128)
    yield dense("dropout", **CAUSAL, dropout=True)
    yield from (packed_gradients(**CAUSAL | {"dtype": dtype}) for dtype in DTYPES)
    yield packed_gradients("GQA, window, softcap", **CAUSAL, heads_k=2, softcap=True, **WINDOW)
    yield packed_gradients("ALiBi", **CAUSAL, alibi_slopes=True, grad_slopes=True)
    yield packed_gradients("sinks", **CAUSAL, sinks=True)
    yield packed_gradients("chunk", **CAUSAL, **CHUNK)


def _decode() -> Iterator[NamedProblem]:
    yield from (decode("GQA", dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in HEAD_DIMS)
    for dtype in DTYPES:
        wide = WIDE | {"dtype": dtype}
        yield decode("one head a group", **wide, heads_k=32)
        yield decode("MQA", **wide, heads_k=1)
        yield decode("no lengths", **wide, seqlens_k=False)
        yield decode("left-padded, LSE", **wide, leftpad_k=True, return_lse=True)
        yield decode("4 queries, causal", **wide, seq_q=4, causal="bottom_right")
        yield decode("GQA", dtype=dtype, head_dim=512)
        yield decode("GQA", **LATENT | {"dtype": dtype})
    yield from (decode(word, **WIDE, **fields) for word, fields in _each_feature("decode_attention"))
    yield decode("one split", **WIDE, num_splits=1)
    yield decode("tree of 16", **WIDE, **TREE)
    yield from (decode(f"GQA {words}", **WIDE | fields) for words, fields in _quantised("decode_attention"))


def _paged() -> Iterator[NamedProblem]:
    yield from (paged("GQA", **WIDE, page_size=size) for size in PAGE_SIZES)
    for dtype, dim in itertools.product(DTYPES, COMMON_DIMS):
        if (dtype, dim) != ("bf16", 128):
            yield paged("GQA", dtype=dtype, head_dim=dim, page_size=64)
    of_16, of_64 = (WIDE | {"page_size": size} for size in (16, 64))
    for wide in (of_16, of_64):
        yield paged("chunked prefill", **wide, **PREFILL)
        yield paged("ragged", **wide, **RAGGED)
    yield from (paged("GQA", word, **of_16, **fields) for word, fields in _each_feature("paged_attention"))
    yield paged("GQA", "hpd", **of_16, page_layout="hpd", pages_in_line=False)
    yield paged("GQA", "pages apart", **of_64, pages_in_line=False)
    yield paged("GQA", "one split", **of_16, num_splits=1)
    yield paged("GQA", "unaligned", **of_16, aligned=False)
    yield paged("GQA", "2 queries, causal, LSE", **of_16, seq_q=2, causal="bottom_right", return_lse=True)
    yield paged("GQA", **of_64 | {"head_dim": 192}, head_dim_v=128)
    yield paged("one head a group", **of_16, heads_k=32)
    yield from (
        paged("GQA", words, **wide | fields)
        for wide in (of_16, of_64)
        for words, fields in _quantised("paged_attention")
    )
    yield paged("ragged", "e4m3 cache, scales token", **of_16, **RAGGED, **E4M3)
    yield paged("ragged", "window, sinks", **of_16, **RAGGED, **WINDOW, sinks=True)
    yield paged("GQA", "tree of 16", **of_16, **TREE)
    yield paged("ragged", "trees of 16", **of_16, **TREE, total_q=256)


def _sparse() -> Iterator[NamedProblem]:
    yield from (sparse(dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in COMMON_DIMS)
    of_16 = WIDE | {"page_size": 16}
    for wide in (WIDE, of_16):
        yield sparse("weights", **wide, log_weights=True)
        yield sparse("MagicPIG", **wide, magicpig=True)
    yield sparse(**of_16)
    yield sparse(**WIDE, page_size=64)
    yield sparse("hpd", **of_16, page_layout="hpd")
    yield sparse("softcap, ALiBi, sinks, LSE", **WIDE, softcap=True, alibi_slopes=True, sinks=True, return_lse=True)
    yield sparse("no lengths", **WIDE, seqlens_k=False)
    yield sparse("few tokens", **WIDE, tokens=64)
    yield sparse("one split", **WIDE, num_splits=1)
    yield sparse(**LATENT)
    yield from (sparse(words, **WIDE | fields) for words, fields in _quantised("sparse_attention"))
    yield sparse("MagicPIG, e4m3 cache, scales token", **of_16, magicpig=True, **E4M3)
    for make in (blocks, block_gradients):
        yield from (make(**CAUSAL | {"dtype": dtype, "head_dim": dim}) for dtype in DTYPES for dim in (64, 128))
        yield make("24 heads of Q, 2 of K", **CAUSAL | {"head_dim": 256, "heads_q": 24, "heads_k": 2})
        yield make("one head a group, unaligned", **CAUSAL, heads_q=4, tokens=5, block_k=128, aligned=False)
        yield make("of 16 keys, lengths, sinks", **CAUSAL, block_k=16, tokens=64, seqlens_k=True, sinks=True)
    decode: Fields = WIDE | {"batch": 64, "seq_q": 1, "seq_k": 32768, "tokens": 32, "seqlens_k": True}
    yield from (blocks(word, **decode, num_splits=n) for n, word in enumerate(("decode", "decode, one split")))


def _mla() -> Iterator[NamedProblem]:
    two: Fields = {"seq_q": 2, "causal": "bottom_right"}
    for dtype, (dim, rank) in itertools.product(DTYPES, LATENTS):
        latent: Fields = {"dtype": dtype, "head_dim": dim, "head_dim_v": rank}
        yield mla(**latent)
        yield mla("2 queries, causal", **latent, **two)
    listed: Fields = {"seq_k": 2048, "tokens": 2048}  # slots of each query's keys
    for words, fields in (
        ("page 1", {"page_size": 1}), ("page 16", {"page_size": 16}), ("LSE", {"return_lse": True}),
        ("16 heads", {"heads_q": 16}), ("one split", {"num_splits": 1}),  # 16: what one of eight chips has
        ("ragged", RAGGED), ("tree of 16", TREE), ("listed", listed), ("listed", listed | {"head_dim": 512}),
        ("16 heads, listed", listed | {"heads_q": 16}), ("prompt, listed", listed | {"batch": 1, "seq_q": 4096}),
        ("fp8_ds_mla cache, listed", listed | {"kv_format": "fp8_ds_mla"}),
    ):  # fmt: skip
        yield mla(words, **LATENT | fields)
    yield from (mla(words, **LATENT | fields) for words, fields in _quantised("mla_attention"))
    for name in (name for name, row in formats_of("mla_attention").items() if row.latent):
        for words, fields in (("", {}), ("page 16, ", {"page_size": 16}), ("2 queries, causal, ", two)):
            yield mla(f"{words}{name} cache", **LATENT, kv_format=name, **fields)


def _append() -> Iterator[NamedProblem]:
    yield from _new_rows("append_kv", append)
    yield append("a prompt", **WIDE, batch=1, seq_q=8192)


def _write() -> Iterator[NamedProblem]:
    yield from _new_rows("write_pages", write)
    yield from (write(**WIDE, page_size=size) for size in PAGE_SIZES if size != SIZES["write_pages"][1]["page_size"])
    yield write("hpd", **WIDE, page_layout="hpd")
    yield write("a prompt", **WIDE, seq_q=8192)
    yield write("rotary, a prompt, e4m3 cache", **WIDE, seq_q=8192, **E4M3 | {"kv_scales": "head"}, **ROTARY)


def _indexer() -> Iterator[NamedProblem]:
    decode: Fields = {"batch": 64, "seq_q": 1, "seq_k": 32768, "page_size": 64, "seqlens_k": True}
    for words, fields in (("", {}), ("decode", decode), ("decode of 2 rows", decode | {"seq_q": 2})):
        yield from (indexer(words, **fields, dtype=dtype, head_dim=128) for dtype in DTYPES)
        yield indexer(f"{words} e4m3, scales token".strip(), **WIDE, **E4M3, **fields)
    yield indexer("e4m3, no scales", **WIDE, **E4M3 | {"kv_scales": "none"})
    yield indexer("32 heads", **WIDE, heads_q=32)
    yield indexer("unaligned", **WIDE, aligned=False)
    yield from (topk(dtype=dtype) for dtype in DTYPES)
    yield topk("decode, of 131072", dtype="fp32", batch=64, seq_q=1, seq_k=131072)
    yield topk("512 of 8192", dtype="fp32", seq_k=8192, tokens=512)
    yield topk("unaligned", dtype="fp32", aligned=False)


def _new_rows(op: str, make: Callable[..., NamedProblem]) -> Iterator[NamedProblem]:
    yield from (make(dtype=dtype, head_dim=dim) for dtype in DTYPES for dim in (*HEAD_DIMS, 576))
    yield from (make(words, **WIDE | fields) for words, fields in _quantised(op))
    yield make("e4m3 cache, scales token", dtype="fp32", head_dim=80, **E4M3)
    yield make("rotary", **WIDE, **ROTARY)
    yield make("rotary", **WIDE | {"dtype": "fp32"}, **ROTARY)
    yield make("rotary of neighbours, half", **WIDE, rotary="interleaved", rotary_dim=64)
    for kind in (kind for kind, row in formats_of(op).items() if row.default_scales == "token"):
        yield make(f"rotary, {kind} cache, scales token", **WIDE, kv_format=kind, kv_scales="token", **ROTARY)
    yield make("unaligned", **WIDE, aligned=False)
    yield make(dtype="bf16", head_dim=192, head_dim_v=128)


SETS: dict[SetName, Callable[[], list[NamedProblem]]] = {"quick": quick, "full": full}


def read_shapes(path: Path) -> list[NamedProblem]:
    """Read a file of [[problem]] tables, whose keys are options of `portattn plan`. Raises DataError with the line."""
    data, text = run_log.read_toml(path)
    found: dict[str, NamedProblem] = {}
    tables = data.pop("problem", [])
    if data or not isinstance(tables, list) or not tables or not all(isinstance(one, dict) for one in tables):
        raise DataError(path, None, "must have [[problem]] tables and nothing else")
    for number, table in enumerate(tables):
        op, name = (table.pop(key, "") for key in ("op", "name"))
        try:
            if op not in OPS:
                raise ArgumentError("problem", "op", op, f"must be one of {', '.join(OPS)}")
            problem = problem_of_table(op, table)
            name = name or str(problem)
            if not isinstance(name, str) or not name.isprintable() or name in found:
                raise ArgumentError(op, "name", name, "must be printable, and no other problem's name")
        except ArgumentError as error:
            key = error.argument.split()[0].removesuffix("'s").strip("-").replace("-", "_")
            raise DataError(path, toml_reader.line_of(text, "problem", str(number), key), str(error)) from None
        found[name] = NamedProblem(name, problem)
    return list(found.values())
