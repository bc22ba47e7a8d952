"""Schedules of the Gluon variants, and the compilers that take them: community Triton from 3.6 on (quirk cuda-0016).

Schedules are entries of tuning/sm_90.toml; the first match counts, so an entry for a range stands before general ones.
Releases outside verified.toml are tried: if a compile or a canary fails, the core runs, with an Incident."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import msgspec

from portattn.kernels.score_program import FLOAT_INDICES, gradient, parse, python_source
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import most
from portattn.schema.toolchain import Toolchain

if TYPE_CHECKING:
    from portattn.schema.tuning import Tuning

NEEDS = "Triton 3.6 or newer"
# The compiler of schedules that no entry of tuning/sm_90.toml holds, and the default release of a variant's entries
# (Variant.for_toolchain).
TIMED_WITH = Toolchain.parse("triton==3.6.0")


def described_by(toolchain: Toolchain) -> bool:
    """Return whether a variant's launches can be described and so compiled with this compiler."""
    return toolchain.within("triton", ">=3.6") is True


def foreign(toolchain: Toolchain) -> bool:
    """Return whether this is another compiler than community Triton; its Gluon is unknown."""
    return toolchain.distribution != "triton"


def tuning() -> Tuning:
    """Return the registry's copy of the file: parsing it once more took 7 ms of a process's first call."""
    from portattn.planning.registry import Registry  # which imports the backends

    return Registry.load().tunings["cuda"]["sm_90"]


def find_schedule(variant: str, problem: Problem, toolchain: Toolchain) -> tuple[dict[str, Any], str] | None:
    """Return a variant's first matching flags and the compiler (NAME==VERSION, or "") that they were timed with."""
    entry = tuning().find(variant, problem.features(), toolchain, variant=True)
    return None if entry is None else (dict(entry.flags), tuning().timed_with(entry))


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How gluon_forward is scheduled; tile_scheduler.Form describes the fields. in_turn: tiles of many heads in turn.

    kept, halved, columns: of e4m3 operands alone (columns 0: all of a head); lazy: of any others. Raises ValueError for
    reg_q or parts without own_out, and for other columns than 0 and 64."""

    groups: int
    keys: int
    stages: int
    turns: bool
    late: bool
    early: bool
    pairs: bool
    own_out: bool
    columns: int = 0
    kept: bool = False
    halved: bool = False
    queries: int = 1
    reg_q: bool = False
    parts: int = 1
    in_turn: bool = True
    lazy: bool = False

    def __post_init__(self) -> None:
        if not self.own_out and (self.reg_q or self.parts > 1):
            raise ValueError("reg_q and parts need own_out: the next queries come to where the output would be staged")
        if self.columns not in (0, 64):
            raise ValueError(f"columns is {self.columns}, but must be 0 (all) or 64")


# What larger caps count as: no score comes near it, and it is small enough for log2(e) times it to be a float32.
LARGEST_CAP = 1e30

# In a few words, for people.
LEGEND = MappingProxyType(
    {
        "width": "columns that heads are padded to",
        "groups": "warp groups, of 64 query rows each",
        "keys": "keys of a tile",
        "stages": "buffers for keys, and as many for values",
        "turns": "groups issue their products in turns",
        "late": "sums are rescaled after the next scores are issued",
        "early": "the values' product is waited for before the exponentials",
        "pairs": "probabilities go from step to step in pairs of 16 bits",
        "own_out": "the output has shared memory of its own",
        "columns": "columns of a product of values, 0 for all",
        "kept": "keys' buffers are returned after the exponentials",
        "halved": "the tile before's values are added between two halves of the exponentials",
        "queries": "buffers for queries",
        "reg_q": "queries are read from registers",
        "parts": "column parts in which the output leaves",
        "in_turn": "tiles of several heads are worked on in turn where they differ in length",
        "lazy": "sums are rescaled only where a row's maximum has grown much",
        "splits": "blocks that share a tile's keys",
        "heads_together": "heads whose tiles are worked on side by side",
    }
)


# Operations of many steps each, with which a thread spills up to 12 KB (Triton 3.6.0).
SPILLED = frozenset({"sin", "cos", "mod", "floordiv"})
# gelu has 8 operations, ALiBi 7: with either, the forward's heads of 64 and 128 columns spill nothing (Triton 3.6.0).
# Gradients spill 730 bytes a thread with the 14 of gelu's derivative (128 columns), and 5,000 with one of 31.
MOST_OPERATIONS = 16


BLOCK = 128  # queries and keys of a block that lists name: a multiple of so many


def _loads_for_each_score(text: str) -> bool:
    """Return whether a program loads a number for each score: with 64 addresses a thread spills up to 6 KB (3.6.0)."""
    along = {"q_idx": {"q"}, "kv_idx": {"k"}, "score": {"q", "k"}}
    for node in parse(text).nodes if text else ():
        along[node.name] = set[str]().union(*(along.get(word, ()) for word in node.operands))
        if node.op == "load" and len(along[node.name]) > 1:
            return True
    return False


def function_reasons(p: Problem) -> dict[str, bool]:
    """Return the reasons why a variant takes no functions or lists of blocks of a problem, and whether each holds."""
    nodes = [node for text in (p.score_mod, p.mask_mod) if text for node in parse(text).nodes]
    spilled, count = sorted({node.op for node in nodes} & SPILLED), len(nodes)
    slope = len(parse(gradient(p.score_mod)).nodes) if p.backward and p.score_mod else 0
    captures = bool(p.score_mod) and bool(parse(p.score_mod).captures)
    loads = any(map(_loads_for_each_score, (p.score_mod, p.mask_mod)))
    limited = p.causal != "none" or p.window or p.seqlens_q or p.seqlens_k
    return {
        f"takes functions of attention alone, not of {p.op}": p.op not in ("attention", "attention_backward"),
        "takes no gradients of score functions that read tensors": p.backward and captures,
        f"takes functions without {', '.join(spilled)}": bool(spilled),
        "takes functions that read tensors by query or by key, not by both": loads,
        f"takes functions of at most {MOST_OPERATIONS} operations, not {count}": count > MOST_OPERATIONS,
        f"takes a score_mod whose derivative has at most {MOST_OPERATIONS} operations, not {slope}": slope
        > MOST_OPERATIONS,
        "takes neither a softcap beside a score_mod, nor invariant beside functions": p.invariant
        or bool(p.score_mod and p.softcap),
        "takes a mask_mod beside lists of blocks alone": bool(p.mask_mod) and not p.block_mask,
        f"takes lists of blocks of a multiple of {BLOCK}, not ({p.block_q}, {p.block_k})": p.block_mask
        and (p.block_q % BLOCK != 0 or p.block_k % BLOCK != 0),
        "takes lists of blocks without causal, window and lengths of sequences": p.block_mask and bool(limited),
    }


def function_source(p: Problem) -> str | None:
    """Return the source of a problem's score function for numbers that broadcast with the tile, or None."""
    return python_source(p.score_mod, floats=most(p.seq_q, p.seq_k) <= FLOAT_INDICES) if p.score_mod else None


def vector_source(p: Problem, text: str, long: tuple[int, ...], axes: str = "qk") -> str | None:
    """Return the source of a problem's function of vectors of queries and keys, or None.

    long: numbers of captured tensors' sizes that no tile of queries or keys reaches behind."""
    if not text:
        return None
    return python_source(text, floats=most(p.seq_q, p.seq_k) <= FLOAT_INDICES, axes=axes, long=long)


def gradient_source(p: Problem) -> str | None:
    """Return the source of the derivative of a problem's score function; None where that is 1, or there is none."""
    if not p.score_mod or gradient(p.score_mod) == "out grad":
        return None
    return python_source(p.score_mod, derivative=True, floats=most(p.seq_q, p.seq_k) <= FLOAT_INDICES)


# Small problems for the variants' canaries: each form of the kernels' loops once, by lengths and Triton's release.
# tests/backends/cuda/test_canary_forms.py compares the forms with the tuning data's, per release.
_COMMON: dict[str, Any] = {"batch": 3, "heads_q": 4, "heads_k": 2, "return_lse": True}
_LENGTHS: dict[str, Any] = {"seqlens_q": True, "seqlens_k": True}
_PACKED: dict[str, Any] = {"op": "varlen_attention", "seq_q": 177, "seq_k": 341, "total_q": 350, "total_k": 680}
_LATENT: dict[str, Any] = {
    "op": "mla_attention", "batch": 3, "heads_q": 16, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "page_size": 64,
    "pages_in_line": True, "seqlens_k": True, "return_lse": True, "seq_k": 448,
}  # fmt: skip

_NARROW: dict[str, Any] = {"kv_format": "e4m3", "kv_scales": "head"}
_WHOLE: dict[str, Any] = {"kv_format": "int8", "kv_scales": "token"}
LISTED: dict[str, Any] = {"block_mask": True, "block_q": BLOCK, "block_k": BLOCK}
_PAGED: dict[str, Any] = {"op": "paged_attention", "seq_q": 177, "seqlens_k": True}

# A program of scores (kernels/score_program.py): ALiBi, with slopes 2^-(h + 1).
ALIBI = "t0 i sub kv_idx q_idx\nt1 f to_f t0\nt2 f to_f h\nt3 f sub -1.0 t2\nt4 f exp2 t3\nt5 f mul t1 t4\n"
ALIBI += "t6 f add score t5\nout t6"
# tanh(score) + (kv_idx - q_idx)·h / 64: another derivative than 1, and other numbers for each head, query and key.
BENT = "t0 f tanh score\nt1 i sub kv_idx q_idx\nt2 f to_f t1\nt3 f to_f h\nt4 f mul t2 t3\nt5 f mul t4 0.015625\n"
BENT += "t6 f add t0 t5\nout t6"
# Masks of causal documents, whose numbers captured tensor 0 holds, and of a causal sequence behind a prefix.
DOCUMENTS = "c0 i 1 0\nt0 i load c0 q_idx\nt1 i load c0 kv_idx\nt2 b eq t0 t1\nt3 b ge q_idx kv_idx\n"
DOCUMENTS += "t4 b and t2 t3\nout t4"
PREFIX = "t0 b ge q_idx kv_idx\nt1 b lt kv_idx 200\nt2 b or t0 t1\nout t2"

# Lengths (queries, keys) that take the forms which the problems before them do not.
_FULL: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((77, 341), (77, 2541), (277, 341), (277, 541)),
    128: ((77, 341), (177, 2541), (177, 8705)),
    256: ((77, 341),),
}
_CAUSAL: dict[int, tuple[tuple[int, int], ...]] = {
    64: ((77, 341), (177, 8705), (541, 341)),
    128: ((77, 341), (77, 541), (77, 1541)),
    256: ((77, 341), (541, 8705)),
}
# Both numbers of consumers; whole, causal, windowed, padded and packed; keys split over blocks; caps and sinks; over
# pages a load for each of several, and one for a whole tile; trees over a contiguous cache.
FORWARD = (
    Problem(**_COMMON, seq_q=277, seq_k=541, head_dim=64, dtype="fp16", causal="bottom_right"),
    Problem(**_COMMON, **_LENGTHS, seq_q=277, seq_k=541, head_dim=128, dtype="bf16", sinks=True, window_left=70),
    Problem(**_COMMON, seq_q=77, seq_k=1541, head_dim=256, dtype="bf16", softcap=True),
    Problem(**_COMMON, **_PACKED, head_dim=64, dtype="bf16", window_left=70, sinks=True),
    Problem(**_COMMON, **_PACKED, head_dim=128, dtype="fp16", causal="bottom_right"),
    Problem(
        **_COMMON, **_PAGED, page_size=16, seq_k=528, total_q=350, head_dim=128, dtype="bf16", causal="bottom_right"
    ),
    Problem(**_COMMON, **_PAGED, page_size=256, seq_k=768, head_dim=64, dtype="fp16", sinks=True),
    Problem(**_COMMON, **_PAGED, page_size=64, seq_k=4160, head_dim=128, dtype="bf16", causal="bottom_right"),
    Problem(**_COMMON, **_PAGED, page_size=64, seq_k=576, head_dim=128, dtype="bf16", causal="bottom_right"),
    Problem(**_COMMON, **_PAGED, page_size=64, seq_k=576, head_dim=128, dtype="bf16"),
    Problem(**_COMMON, **_PAGED, page_size=64, seq_k=576, head_dim=256, dtype="bf16"),
    Problem(**_COMMON, **_PAGED, page_size=64, seq_k=576, head_dim=64, dtype="bf16"),
    Problem(op="decode_attention", **_COMMON, seqlens_k=True, seq_q=17, seq_k=2541, head_dim=128, dtype="bf16",
            tree_mask=True),
    Problem(**_COMMON, seq_q=177, seq_k=2541, head_dim=128, dtype="bf16", softcap=True),
    Problem(**_COMMON, seq_q=177, seq_k=541, head_dim=128, dtype="bf16", causal="bottom_right", score_mod=ALIBI),
    Problem(**_COMMON, **LISTED, seq_q=277, seq_k=541, head_dim=64, dtype="bf16", mask_mod=PREFIX, score_mod=ALIBI),
    Problem(**_COMMON, **LISTED, seq_q=277, seq_k=541, head_dim=128, dtype="fp16", mask_mod=DOCUMENTS),
    *(
        Problem(**_COMMON, seq_q=rows, seq_k=keys, head_dim=dim, dtype="bf16")
        for dim, lengths in _FULL.items()
        for rows, keys in lengths
    ),
    *(
        Problem(**_COMMON, seq_q=rows, seq_k=keys, head_dim=dim, dtype="bf16", causal="bottom_right")
        for dim, lengths in _CAUSAL.items()
        for rows, keys in lengths
    ),
    Problem(**_COMMON, **_PACKED | {"seq_q": 77, "seq_k": 2541, "total_q": 150, "total_k": 5080}, head_dim=64,
            dtype="bf16"),
)  # fmt: skip
# Both numbers of chunks; whole, causal, padded and packed.
WIDE = (
    Problem(**_COMMON, seq_q=277, seq_k=541, head_dim=512, dtype="bf16"),
    Problem(**_COMMON, **_LENGTHS, seq_q=277, seq_k=541, head_dim=512, dtype="fp16", causal="bottom_right"),
    Problem(**_COMMON, **_PACKED, head_dim=320, dtype="bf16", causal="bottom_right"),
)
# The forms that differ with e4m3 operands: each width, scales of a batch and of packed sequences, values out of sight.
FP8_FORWARD = (
    Problem(**_COMMON, **_NARROW, seq_q=277, seq_k=541, head_dim=64, dtype="fp16", causal="bottom_right"),
    Problem(**_COMMON, **_NARROW, **_LENGTHS, seq_q=277, seq_k=541, head_dim=128, dtype="bf16", window_left=70),
    Problem(**_COMMON, **_NARROW, seq_q=77, seq_k=1541, head_dim=128, dtype="bf16", softcap=True),
    Problem(**_COMMON, **_NARROW, **_PACKED, head_dim=128, dtype="bf16", causal="bottom_right", sinks=True),
    Problem(**_COMMON, **_NARROW, seq_q=277, seq_k=541, head_dim=256, dtype="bf16", causal="bottom_right"),
    Problem(**_COMMON, **_NARROW, **_LENGTHS, seq_q=277, seq_k=541, head_dim=192, dtype="bf16", window_left=70),
)
# The forms that differ with int8 queries and keys: scales of each row and key, of a batch and of packed sequences.
INT8_FORWARD = (
    Problem(**_COMMON, **_WHOLE, seq_q=277, seq_k=541, head_dim=64, dtype="fp16", causal="bottom_right"),
    Problem(**_COMMON, **_WHOLE, **_LENGTHS, seq_q=277, seq_k=541, head_dim=128, dtype="bf16", window_left=70),
    Problem(**_COMMON, **_WHOLE, seq_q=77, seq_k=1541, head_dim=128, dtype="bf16"),
    Problem(**_COMMON, **_WHOLE, **_PACKED, head_dim=128, dtype="bf16", causal="bottom_right", sinks=True),
)
LATENT = (
    Problem(**_LATENT, seq_q=1, dtype="bf16", num_splits=2),
    Problem(**_LATENT, seq_q=3, dtype="fp16", causal="bottom_right", num_splits=1),
    Problem(**_LATENT, seq_q=2, dtype="bf16", tokens=300, num_splits=2),
    Problem(**_LATENT, seq_q=1, dtype="bf16", tokens=300, num_splits=1, kv_format="fp8_ds_mla"),
)
_INDEXER: dict[str, Any] = {
    "op": "indexer_logits", "heads_q": 64, "heads_k": 1, "head_dim": 128, "dtype": "bf16", "kv_format": "e4m3",
}  # fmt: skip
INDEXER = (
    Problem(**_INDEXER, batch=1, seq_q=77, seq_k=541, kv_scales="token"),
    Problem(**_INDEXER, batch=3, seq_q=2, seq_k=448, page_size=64, seqlens_k=True, kv_scales="token"),
)
# Every width and the three ways to dQ (added, added in turns, a kernel of its own); whole, causal, windowed, padded and
# packed.
_PACKED_GRADIENTS: dict[str, Any] = _PACKED | {"op": "varlen_attention_backward"}
_GRADIENTS: dict[str, Any] = {"batch": 3, "heads_q": 4, "heads_k": 2}
_DENSE_GRADIENTS: dict[str, Any] = {"op": "attention_backward", "seq_q": 277, "seq_k": 541}
_UNGROUPED: dict[str, Any] = {"op": "attention_backward", "batch": 3, "heads_q": 4, "heads_k": 4, "seq_q": 77}
_REPEATABLE: dict[str, Any] = _GRADIENTS | {"op": "attention_backward", "deterministic": True}
BACKWARD = (
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=64, dtype="fp16", causal="bottom_right"),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, **_LENGTHS, head_dim=128, dtype="bf16", window_left=70),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=256, dtype="bf16", grad_lse=True),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=128, dtype="fp16", deterministic=True),
    Problem(**_GRADIENTS, **_PACKED_GRADIENTS, head_dim=64, dtype="bf16", window_left=70),
    Problem(**_GRADIENTS, **_PACKED_GRADIENTS, head_dim=128, dtype="fp16", causal="bottom_right"),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=64, dtype="bf16", causal="bottom_right", score_mod=BENT),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=128, dtype="bf16", score_mod=BENT),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, head_dim=128, dtype="bf16", softcap=True),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, **LISTED, head_dim=64, dtype="bf16", mask_mod=PREFIX, score_mod=BENT),
    Problem(**_GRADIENTS, **_DENSE_GRADIENTS, **LISTED, head_dim=128, dtype="fp16", mask_mod=DOCUMENTS),
    Problem(**_REPEATABLE, seq_q=77, seq_k=341, head_dim=64, dtype="bf16"),
    Problem(**_REPEATABLE, seq_q=541, seq_k=341, head_dim=64, dtype="bf16"),
    Problem(**_REPEATABLE, seq_q=541, seq_k=341, head_dim=128, dtype="bf16"),
    *(
        Problem(**_UNGROUPED, seq_k=keys, head_dim=dim, dtype="bf16")
        for dim, keys in ((64, 541), (64, 8705), (128, 541), (128, 2541), (128, 8705))
    ),
    Problem(**_UNGROUPED, seq_k=2541, head_dim=128, dtype="bf16", causal="bottom_right"),
)
