"""The benchmark's cases scaled down to what a CPU computes at once, and their wrong contenders."""

from __future__ import annotations

import msgspec

from portattn.tools.bench.cases import SETS, Case

MOST_HEADS, MOST_BATCH = 2, 3  # key/value heads, sequences


def shrunk(case: Case) -> Case:
    """The case with everything that makes it the case it is, and small sizes."""
    heads = min(case.heads_k, MOST_HEADS)
    lengths_q, lengths_k = (_lengths(given, case, most) for given, most in ((case.lengths_q, 20), (case.lengths_k, 70)))
    latent = case.op == "mla_attention"
    return msgspec.structs.replace(
        case, batch=len(lengths_k) or min(case.batch, MOST_BATCH), heads_q=heads * min(case.group, 3), heads_k=heads,
        seq_q=max(lengths_q, default=min(case.seq_q, 20)),
        seq_k=max(lengths_k, default=20 if case.seq_k == case.seq_q else 70), head_dim=24 if latent else 16,
        head_dim_v=16 if latent else 0, lengths_q=lengths_q, lengths_k=lengths_k,
        page_size=case.page_size and min(case.page_size, 32), tokens=case.tokens and 9,
        window=(5, 0) if case.windowed else case.window,
    )  # fmt: skip


def _lengths(given: tuple[int, ...], case: Case, most: int) -> tuple[int, ...]:
    """The first and the last two lengths, at most so many; queries and keys stay equal where they are."""
    if case.lengths_q == case.lengths_k:
        most = 20
    kept = (given[0], *given[-2:]) if given else ()
    return tuple(max(min(length, most) - i, 1) for i, length in enumerate(kept))


CASES = {case.name: shrunk(case) for cases in SETS.values() for case in cases}


def distinct() -> list[Case]:
    """One case of each kind: of those that differ in their names and clocks alone, the first."""
    kinds = {msgspec.structs.replace(case, name="", timing="hot"): case for case in reversed(CASES.values())}
    return list(kinds.values())[::-1]
