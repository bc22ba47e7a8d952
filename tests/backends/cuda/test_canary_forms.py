"""Canaries of the Gluon variants run every form of their loops that the tuning data has, whatever the release."""

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from portattn.backends.cuda.hopper_backward.variant import BackwardVariant
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant
from portattn.backends.cuda.schedules import BACKWARD, FORWARD, tuning
from portattn.planning.backend import Variant
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem
from portattn.schema.target import Target

RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.10.0")
# What chooses other code in a loop. Buffers, and the order in which tiles are drawn, do not.
FORWARD_LOOP = ("width", "groups", "keys", "turns", "late", "early", "lazy")
BACKWARD_LOOP = ("width", "keys", "messages", "late", "apart", "turns")
# Lengths on both sides of every limit in the tuning data.
ROWS = (1, 128, 129, 256, 257, 512, 513, 1024, 1025, 4096)
KEYS = (64, 512, 513, 1024, 1025, 2047, 2048, 2049, 8192, 8193)
WIDTHS, MASKS = (64, 128, 256), ("none", "bottom_right")


def sm_90(release: str) -> Target:
    return parse_target("cuda:sm_90", f"triton=={release}")


def forms(variant: Variant, problems: Iterable[Problem], fields: tuple[str, ...], target: Target) -> set[Any]:
    """The forms of these problems that the variant takes."""
    own = variant.for_toolchain(target.toolchain)
    taken = (own.describe(problem) for problem in problems if own.rejects(problem, target) is None)
    return {tuple(shown[name] for name in fields) for shown in taken}


def dense(op: str, **more: Any) -> list[Problem]:
    every = itertools.product(ROWS, KEYS, WIDTHS, MASKS, ((2, 1), (64, 1), (4, 8)))
    return [
        Problem(op=op, batch=batch, heads_q=16, heads_k=16 // share, seq_q=rows, seq_k=keys, head_dim=dim,
                dtype="bf16", causal=mask, **more)
        for rows, keys, dim, mask, (batch, share) in every
    ]  # fmt: skip


def packed(op: str) -> list[Problem]:
    return [
        Problem(op=op, batch=8, heads_q=16, heads_k=16, seq_q=n, seq_k=n, total_q=4 * n, total_k=4 * n, head_dim=dim,
                dtype="bf16", causal=mask)
        for n, dim, mask in itertools.product(KEYS, WIDTHS, MASKS)
    ]  # fmt: skip


def paged() -> list[Problem]:
    every = itertools.product((64, 200), (512, 4096, 4160), WIDTHS, MASKS, (3, 64), (16, 64, 256), (False, True))
    return [
        Problem(op="paged_attention", batch=batch, heads_q=16, heads_k=4, seq_q=rows, seq_k=keys, head_dim=dim,
                page_size=page, seqlens_k=True, dtype="bf16", causal=mask, total_q=rows * 2 if rows_vary else None)
        for rows, keys, dim, mask, batch, page, rows_vary in every
    ]  # fmt: skip


def of_the_forward() -> list[Problem]:
    return [*dense("attention"), *dense("attention", softcap=True), *packed("varlen_attention")]


def of_the_backward() -> list[Problem]:
    repeatable = dense("attention_backward", deterministic=True)
    return [*dense("attention_backward"), *repeatable, *packed("varlen_attention_backward")]


# Variant, problems, its canaries, what chooses its loop, more forms than so many; and of some the last field is set:
# sums rescaled seldom, which are hand-written PTX, and blocks that wait for each other.
LOOPS: dict[str, tuple[Variant, Any, Sequence[Problem], tuple[str, ...], int]] = {
    "forward": (ForwardVariant(), of_the_forward, FORWARD, FORWARD_LOOP, 10),
    "forward over pages": (ForwardVariant(), paged, [p for p in FORWARD if p.page_size], FORWARD_LOOP, 3),
    "backward": (BackwardVariant(), of_the_backward, BACKWARD, BACKWARD_LOOP, 5),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("release", RELEASES)
def test_every_form_of_a_loop_is_a_canarys(release: str, name: str) -> None:
    variant, problems, canaries, fields, least = LOOPS[name]
    wanted = forms(variant, problems(), fields, sm_90(release))
    assert len(wanted) > least
    assert "pages" in name or any(form[-1] for form in wanted)
    assert wanted - forms(variant, canaries, fields, sm_90(release)) == set()


def test_lengths_are_looked_at_on_both_sides_of_every_limit_in_the_tuning_data() -> None:
    looked_at = {"seq_q": ROWS, "seq_k": KEYS}
    limits = 0
    for entry in tuning().entry:
        for condition in entry.when if entry.kernel in ("gluon_forward", "gluon_backward") else ():
            if "paged" not in entry.when and (found := re.fullmatch(r"(seq_[qk])(<=|>=|<|>)(\d+)", condition)):
                field, sign, limit = found[1], found[2], int(found[3])
                below, above = (limit, limit + 1) if sign in ("<=", ">") else (limit - 1, limit)
                assert {below, above} <= {*looked_at[field]}, condition
                limits += 1
    assert limits
