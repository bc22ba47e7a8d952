"""The sets of gradients: the dense shapes, and one or two cases of everything else that training asks for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from portattn.tools.bench import sets_dense
from portattn.tools.bench.cases import Case
from portattn.tools.bench.sets_dense import GROUP, LENGTHS, ROOM, WINDOW, causality

DROPOUT = 0.1
_SHAPE: dict[str, Any] = {"seqs": (4096,), "dims": (128,)}  # of what is timed in one size alone


def backward() -> list[Case]:
    """The gradients of the dense set: B·S = 16k and H·D = 2048, bf16, full and causal."""
    return _gradients(sets_dense.dense(), "dense")


def more() -> list[Case]:
    """GQA 8:1, packed, a window, fp32, dropout; and deterministic gradients, beside those of any order."""
    packed = Case(
        name="packed D=128 causal", op="varlen_attention", packed=True, batch=len(LENGTHS), seq_q=ROOM, seq_k=ROOM,
        lengths_q=LENGTHS, lengths_k=LENGTHS, **sets_dense.heads(128), **causality(True),
    )  # fmt: skip
    window = [
        case for case in sets_dense.window() if (case.head_dim, case.seq_q, case.window) == (128, 16384, WINDOW)
    ]  # fmt: skip
    full, causal = sets_dense.dense(**_SHAPE)
    return [
        *_gradients(sets_dense.dense(group=GROUP, **_SHAPE)),
        *_gradients([packed, *window]),
        *_gradients(sets_dense.dense((2048,), (64, 128), "fp32"), "dense"),
        *_gradients([causal], "dense", f" dropout={DROPOUT}", dropout=DROPOUT),
        *_gradients([full, causal], "dense", " deterministic", deterministic=True),
    ]


def _gradients(cases: Iterable[Case], without: str = "", after: str = "", **fields: Any) -> list[Case]:
    """The backward of forward cases, named after them."""
    return [
        msgspec.structs.replace(
            case, name=f"backward {case.name.removeprefix(without).strip()}{after}", backward=True, **fields
        )
        for case in cases
    ]  # fmt: skip
