"""The named problem sets that `portattn bench` times, from sets.toml."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from portattn.schema import toml_reader
from portattn.tools.bench.cases import Case

WIDTH = 2048  # heads · head_dim of cases without heads, as FlashAttention's papers time them
TOKENS = 16384  # batch · seq of cases without a batch


def _read(path: Path) -> dict[str, list[Case]]:
    data, _ = toml_reader.read(path)
    shapes = data["shapes"]
    return {
        name: [case for group in made["cases"] for case in _expand(shapes, **group)]
        for name, made in data["set"].items()
    }


def _expand(
    shapes: dict[str, list[dict[str, Any]]], each: dict[str, Any] | None = None, **fixed: Any
) -> Iterator[Case]:
    """Yield a case for each combination of the axes whose fields do not contradict each other."""
    axes = []
    for name, values in (each or {}).items():
        values = shapes[values] if isinstance(values, str) else values
        axes.append([value if isinstance(value, dict) else {name: value} for value in values])
    for combination in itertools.product(*axes):
        fields = dict(fixed)
        for part in combination:
            if any(fields.setdefault(name, value) != value for name, value in part.items()):
                break
        else:
            yield _case(**fields)


def _case(
    *, name: str, op: str = "attention", causal: bool = False, seq: int = 1, group: int = 1, lengths: Any = (),
    text: str = "", head_dim: int, **fields: Any,
) -> Case:  # fmt: skip
    heads = fields.setdefault("heads_q", WIDTH // head_dim)
    for field, value in {
        "seq_q": seq, "seq_k": seq, "batch": max(TOKENS // seq, 1), "heads_k": heads // group, "lengths_q": lengths,
        "lengths_k": lengths, "dtype": "bf16",
    }.items():  # fmt: skip
        fields.setdefault(field, value)
    for field in ("lengths_q", "lengths_k"):
        runs = ([run] if isinstance(run, int) else run[:0:-1] * run[0] for run in fields[field])
        fields[field] = tuple(itertools.chain.from_iterable(runs))
    words = fields | {"head_dim": head_dim, "seq": seq, "causal": " causal" * causal}
    fields |= {"name": name.format(**words, text=text.format(**words)), "op": op, "head_dim": head_dim}
    fields["causal"] = "bottom_right" if causal else "none"
    return msgspec.convert(msgspec.to_builtins(Case(**fields)), Case)  # no unknown field, and tuples of the right types


SETS = _read(Path(__file__).with_suffix(".toml"))
