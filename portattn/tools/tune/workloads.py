"""What to tune for: benchmark cases, or problems that a line of text states."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import torch

from portattn.errors import ArgumentError
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import INTEGERS, KvFormat, KvScales
from portattn.schema.tensors import TORCH_DTYPE
from portattn.tools.bench.cases import STORED_OPS, Case
from portattn.tools.bench.sets import SETS
from portattn.tools.bench.tensors import Tensors
from portattn.tools.tune.gradients import call_of


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """A case to time, and the Problem that its call is."""

    case: Case
    problem: Problem

    @property
    def name(self) -> str:
        return self.case.name


def workload(case: Case) -> Workload:
    return Workload(case=case, problem=call_of(case, shapes(case)).problem)


def tunable_sets() -> list[str]:
    """The sets with cases to tune for."""
    return [name for name, cases in SETS.items() if any(map(_tuned, cases))]


def _tuned(case: Case) -> bool:
    """Whether there is something to tune for it: the core's gradients are deterministic whatever is asked for."""
    return not case.deterministic


def from_sets(names: tuple[str, ...], only: str | None) -> list[Case]:
    """The cases of named sets whose names hold a text. Raises ArgumentError on an unknown set or text.

    Deterministic gradients are left out.
    """
    known = tunable_sets()
    wanted = known if "all" in names else list(dict.fromkeys(names))
    for name in wanted:
        if name not in known:
            raise ArgumentError("tune", "--set", name, f"must be one of {', '.join([*known, 'all'])}")
    cases = [case for name in wanted for case in SETS[name] if _tuned(case)]
    found = {case.name: case for case in cases if only is None or only in case.name}
    if names and not found:
        raise ArgumentError("tune", "--only", only, f"must match a case of {', '.join(wanted)}")
    return list(found.values())


_NUMBERS = ("head_dim_v", "page_size", "tokens")
_WORDS: dict[str, tuple[str, ...]] = {"kv_format": get_args(KvFormat), "kv_scales": get_args(KvScales)}
_FORM = (
    "must be an op and NAME=VALUE words, as in 'attention q=4,16,4096,128 kv=4,16,4096,128 dtype=bf16 causal'; "
    f"words: q, kv (B,H,S,D), dtype, causal[=top_left], window=L,R, dropout=P, {', '.join(_NUMBERS)}, "
    f"{', '.join(_WORDS)}"
)


def parse(text: str) -> Case:
    """A case of one line of text: `attention q=B,H,S,D kv=B,H,S,D dtype=bf16 causal window=1023,0 page_size=64`.

    All sequences are full. Without kv_scales a cache of int8 or int4 has a scale for each token, and others have
    none. Raises ArgumentError naming the word that is wrong.
    """

    def bad(limit: str = _FORM) -> ArgumentError:
        return ArgumentError("tune", "--problem", text, limit)

    op, *words = text.split()
    tuned = [name for name, row in ROWS.items() if not row.writes]
    if op not in tuned:
        raise bad(f"its first word must be one of {', '.join(tuned)}")
    backward = bool(ROWS[op].gradient_of)
    given = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    fields: dict[str, Any] = {
        "name": text,
        "op": ROWS[op].gradient_of or op,
        "backward": backward,
        "dtype": given.pop("dtype", "bf16"),
    }
    try:
        batch, heads_q, seq_q, dim = (int(part) for part in given.pop("q").split(","))
        batch_k, heads_k, seq_k, dim_k = (int(part) for part in given.pop("kv").split(","))
        fields |= {name: int(given.pop(name)) for name in _NUMBERS if name in given}
        fields["dropout"] = float(given.pop("dropout", "0"))
        if "window" in given:
            left, right = (None if int(side) < 0 else int(side) for side in given.pop("window").split(","))
            fields["window"] = (left, right)
    except (KeyError, ValueError):
        raise bad() from None
    if "causal" in given:
        fields["causal"] = given.pop("causal") or "bottom_right"
    for name, known in _WORDS.items():
        if name in given:
            fields[name] = given.pop(name)
            if fields[name] not in known:
                raise bad(f"{name} must be one of {', '.join(known)}")
    stored = fields.get("kv_format", "as_q")
    if stored in INTEGERS:
        fields.setdefault("kv_scales", "token")
    if stored == "as_q" and fields.get("kv_scales", "none") != "none":
        raise bad("kv_scales goes with a kv_format other than as_q")
    if stored != "as_q" and op not in STORED_OPS:
        raise bad(f"kv_format goes with {' and '.join(STORED_OPS)}")
    if fields["dropout"] and (op != "attention_backward" or heads_q != heads_k or not 0 < fields["dropout"] < 1):
        raise bad("dropout must be from 0 to below 1, of attention_backward with as many heads in q as in kv")
    if given:
        raise bad(f"it has the unknown word {next(iter(given))!r}; {_FORM}")
    if (batch, dim) != (batch_k, dim_k) or min(batch, heads_q, seq_q, dim, heads_k, seq_k) < 1:
        raise bad("q and kv must agree in B and D, and hold positive numbers")
    if fields["dtype"] not in TORCH_DTYPE:
        raise bad(f"dtype must be one of {', '.join(TORCH_DTYPE)}")
    if op in ("paged_attention", "mla_attention") and not fields.get("page_size"):
        raise bad(f"page_size must be given for {op}")
    if op == "mla_attention":
        fields["scale"] = dim**-0.5  # which its callers must say, and on which no time depends
    if op == "sparse_attention" and not fields.get("tokens"):
        raise bad(f"tokens must be given for {op}")
    sizes: dict[str, Any] = {
        "batch": batch,
        "heads_q": heads_q,
        "seq_q": seq_q,
        "head_dim": dim,
        "heads_k": heads_k,
        "seq_k": seq_k,
    }
    case = Case(**fields, **sizes, packed=fields["op"] == "varlen_attention")
    workload(case)  # raises ArgumentError on what no call of the op can be
    return case


def shapes(case: Case) -> Tensors:
    """A case's inputs without data, laid out as Tensors.random lays them out."""
    dtype = TORCH_DTYPE[case.dtype]

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def int32(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    latent = case.op == "mla_attention"
    if case.packed:
        q = normal(sum(case.queries), case.heads_q, case.head_dim)
    elif latent:
        q = normal(case.batch, case.seq_q, case.heads_q, case.head_dim)
    else:
        q = normal(case.batch, case.heads_q, case.seq_q, case.head_dim)
    width_v = case.width_v
    pages = sum(-(-keys // case.page_size) for keys in case.keys) if case.page_size else 0
    if latent:
        k = normal(pages, case.page_size, case.head_dim)
        v = k[..., :width_v]
    elif case.page_size:
        k, v = (normal(pages, case.page_size, case.heads_k, width) for width in (case.head_dim, width_v))
    elif case.op == "varlen_attention":
        k, v = (normal(sum(case.keys), case.heads_k, width) for width in (case.head_dim, width_v))
    else:
        k, v = (normal(case.batch, case.heads_k, case.seq_k, width) for width in (case.head_dim, width_v))
    made = Tensors(q, k, v).stored(case)
    if case.packed:
        made.cu_seqlens_q = int32(case.batch + 1)
    elif case.lengths_q:
        made.seqlens_q = int32(case.batch)
    if case.op == "varlen_attention":
        made.cu_seqlens_k = int32(case.batch + 1)
    elif case.lengths_k or case.page_size:
        made.seqlens_k = int32(case.batch)
    if case.page_size:
        made.page_table = int32(case.batch, -(-case.seq_k // case.page_size))
    if case.tokens:
        made.indices = int32(case.batch, case.heads_q, case.tokens)
        made.counts = int32(case.batch, case.heads_q)
    return made
