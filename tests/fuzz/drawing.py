"""Random cases of `values`: any op, feature, layout and size, drawn from a seed and a case number."""

import random
from typing import Any

import msgspec

from portattn.schema.ops import FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import MAX_TREE

SOFTCAPS = (0.01, 0.7, 5.0, 60.0, 1000.0)
SCALES = (None, None, None, 0.0, -0.0, 1.0, -0.3, 2.5, 1e-45, -1e-40)
STRIDES = ("plain", "plain", "spare", "transposed", "sliced", "expanded", "combined")
# What lies where no query may look. "normal" leaves numbers that would change the result if they counted.
FILLERS = ("nan", "inf", "-inf", "largest", "normal")
# Finite extremes, sinks that are infinite, NaN in a bias where something else masks, and NaN in what is attended; each
# with the field that it needs.
WILD = {
    "bias rows of finfo.min": "bias", "bias of 3e38": "bias", "bias NaN where masked": "bias", "sinks of 3e38": "sinks",
    "log-weights of 3e38": "log_weights", "sinks of infinity": "sinks", "queries of NaN": "", "keys of NaN": "",
}  # fmt: skip
OPS = (
    "attention", "attention", "varlen_attention", "decode_attention", "paged_attention", "sparse_attention",
    "mla_attention",
)  # fmt: skip


class Sizes(msgspec.Struct, frozen=True):
    """What sizes are drawn up to, and head widths from."""

    batch: int
    heads_k: int
    group: int
    rows: int
    decode_rows: int
    keys: int
    widths: tuple[int, ...]
    pages: tuple[int, ...]
    tokens: int


SMALL = Sizes(3, 2, 3, 40, 4, 50, (1, 8, 16, 17, 24, 33, 40), (1, 3, 8, 16, 20), 24)  # the interpreter: tiles of 16
LARGE = Sizes(4, 2, 4, 300, 8, 700, (40, 64, 64, 72, 80, 128, 128, 256), (1, 16, 16, 64, 20), 300)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One call: its repr is Python that makes it again.

    q, k, v  what lies in padding queries, and in keys and values that no query attends (FILLERS)
    wild     a key of WILD, or ""
    """

    problem: Problem
    seed: int
    backend: str
    strides: str = "plain"
    extremes: bool = False
    scale: float | None = None
    softcap: float = 5.0
    q: str = "nan"
    k: str = "nan"
    v: str = "nan"
    wild: str = ""


def draw(seed: int, number: int, device: str) -> Case:
    """Case `number` of a seed; device "cpu" or "cuda"."""
    r = random.Random(f"{seed} {number} {device}")
    sizes = SMALL if device == "cpu" else LARGE
    fields = _problem(r, sizes)
    able = [name for name, field in WILD.items() if _takes(fields, field)]
    wild = r.choice(able) if able and r.random() < 0.35 else ""
    if WILD.get(wild):
        fields[WILD[wild]] = True
        fields["magicpig"] = False if WILD[wild] == "log_weights" else fields.get("magicpig", False)
    strides = r.choice(STRIDES)
    if wild == "keys of NaN" and strides == "expanded":
        strides = "plain"
    if strides == "combined" and (not fields.get("page_size") or fields["op"] == "mla_attention"
            or fields["head_dim"] != fields["head_dim_v"]):  # fmt: skip
        strides = "plain"
    backends = ("interpreter", "interpreter", "reference", "auto") if device == "cpu" else ("auto", "auto", "triton")
    return Case(problem=Problem(**fields), seed=r.randrange(2**20), backend=r.choice(backends), strides=strides,
        extremes=r.random() < 0.4, scale=r.choice(SCALES), softcap=r.choice(SOFTCAPS), q=r.choice(FILLERS),
        k=r.choice(FILLERS), v=r.choice(FILLERS), wild=wild)  # fmt: skip


def _takes(fields: dict[str, Any], field: str) -> bool:
    packed = fields.get("total_q") is not None
    if not field:  # numbers of other formats are wild already, and a latent row is a value too
        return fields.get("kv_format", "as_q") == "as_q" and fields["op"] != "mla_attention"
    return {"bias": fields["op"] != "sparse_attention" and not packed,
        "log_weights": fields["op"] == "sparse_attention"}.get(field, True)  # fmt: skip


def _problem(r: random.Random, sizes: Sizes) -> dict[str, Any]:
    def flag(chance: float = 0.3) -> bool:
        return r.random() < chance

    op, heads_k = r.choice(OPS), r.randint(1, sizes.heads_k)
    width = r.choice(sizes.widths)
    fields: dict[str, Any] = {
        "op": op, "batch": r.randint(0 if flag(0.1) else 1, sizes.batch), "heads_k": heads_k,
        "heads_q": heads_k * r.randint(1, sizes.group), "seq_q": 1, "seq_k": r.randint(0, sizes.keys),
        "head_dim": width, "head_dim_v": width if flag(0.7) else r.choice(sizes.widths),
        "dtype": r.choice(("fp16", "bf16", "fp32")), "aligned": False,
    }  # fmt: skip
    fields |= {name: flag() for name in ("softcap", "alibi_slopes", "sinks")} | {"return_lse": flag(0.8)}
    dense, latent, sparse = op == "attention", op == "mla_attention", op == "sparse_attention"
    if sparse:
        weighed = r.choice(("", "", "log_weights", "magicpig"))
        fields |= {"tokens": r.randint(1, sizes.tokens)} | ({weighed: True} if weighed else {})
    else:
        fields["seq_q"] = r.randint(0, sizes.rows if dense else sizes.decode_rows)
        fields["causal"] = r.choice(("none", "bottom_right", "top_left"))
        fields["window_left"] = r.choice((-1, -1, 0, 3, 17, 100))
        fields["window_right"] = r.choice((-1, -1, 0, 3)) if fields["causal"] == "none" else -1
        fields["chunk"] = r.choice((0, 0, 0, 0, 1, 7, 64, 200))
    if latent:
        widths = (16, 8) if sizes is SMALL else (512, 64)
        fields |= {"heads_k": 1, "head_dim": sum(widths), "head_dim_v": widths[0]}
    if latent or op == "paged_attention" or (sparse and flag(0.5)):
        page = 64 if latent and sizes is LARGE else r.choice(sizes.pages)
        fields |= {"page_size": page, "seq_k": page * r.randint(0, -(-sizes.keys // page))}
        fields["page_layout"] = "phd" if latent else r.choice(("phd", "hpd"))
    if op == "varlen_attention" or (op in ("paged_attention", "mla_attention") and flag(0.4)):
        rows = sizes.rows
        fields |= {"seq_q": r.randint(1, rows), "total_q": r.randint(0, rows)}
        if op == "varlen_attention":
            fields |= {"total_k": r.randint(0, sizes.keys), "seq_k": r.randint(1, sizes.keys)}
    else:
        fields["layout"] = r.choice(("bhsd", "bshd"))
        by_key = (name for name in ROWS[op].tensors if name in FEATURES and "k" in FEATURES[name].axes)
        fields |= {name: flag(0.35) for name in by_key}
    if op in ("decode_attention", "paged_attention") and fields["seq_q"] <= MAX_TREE:
        fields["tree_mask"] = flag(0.25)
    if op in ("attention", "decode_attention"):
        fields |= {"seqlens_k": flag(0.5), "leftpad_k": flag()}
        fields |= {"seqlens_q": dense and flag(), "leftpad_q": dense and flag()}
    elif sparse:
        fields["seqlens_k"] = flag(0.5)
    if op not in ("attention", "varlen_attention"):
        fields["num_splits"] = r.choice((0, 0, 1, 2, 3))
    if op not in ("attention", "varlen_attention") and fields["dtype"] != "fp32" and flag(0.4):
        kind, scales = r.choice(("e4m3", "e5m2", "e4m3fnuz", "int8")), r.choice(("none", "head", "token"))
        even = not latent and fields["head_dim"] % 2 == fields.get("head_dim_v", 0) % 2 == 0
        fields |= {"kv_format": kind, "kv_scales": "head" if (kind, scales) == ("int8", "none") else scales}
        if kind == "int8" and even and flag(0.5):
            fields["kv_format"] = "int4"
            whole = fields["head_dim"] % 16 == fields["head_dim_v"] % 16 == 0 and op != "sparse_attention"
            if whole and flag(0.5):
                fields |= {"kv_format": "nvfp4", "kv_scales": r.choice(("none", "head"))}
    if op in ("attention", "varlen_attention") and fields["dtype"] != "fp32" and flag(0.2):
        kind = r.choice(("e4m3", "e5m2", "e4m3fnuz", "int8"))
        fields |= {"kv_format": kind, "kv_scales": r.choice(("head", "token" if kind == "int8" else "none"))}
    return fields
