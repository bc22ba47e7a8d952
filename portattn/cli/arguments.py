"""From command-line options to a Problem and a Target. Complaints name the option, its value and the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from portattn.errors import ArgumentError
from portattn.problem import DTYPES, Problem
from portattn.target import Target

F = TypeVar("F", bound=Callable[..., Any])

AXES = ("B", "H", "S", "D")
CAUSAL = ("bottom_right", "top_left", "none")


class CausalCommand(click.Command):
    """A command whose --causal may stand alone, also before an argument: click alone would take that for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        full = [
            f"--causal={CAUSAL[0]}"
            if arg == "--causal" and (following is None or _causal(following) not in CAUSAL)
            else arg
            for arg, following in zip(args, [*args[1:], None], strict=True)
        ]
        return super().parse_args(ctx, full)


def _causal(text: str) -> str:
    return text.replace("-", "_")


def problem_options(function: F) -> F:
    """The options that describe a Problem."""
    for option in reversed(
        [
            click.option("--q", "q", required=True, metavar="B,H,S,D", help="Shape of the queries, in this order."),
            click.option(
                "--kv", "kv", required=True, metavar="B,H,S,D", help="Shape of the keys; for decode, of the cache."
            ),
            click.option("--dv", type=int, metavar="N", help="Width of the values; that of the keys by default."),
            click.option("--dtype", required=True, metavar="|".join(DTYPES), help="Type of q, k and v."),
            click.option(
                "--causal",
                metavar="[=bottom_right|top_left]",
                help="Causal mask; the last query sees the last key, or with top_left query i sees keys 0..i.",
            ),
            click.option("--seqlens-q", is_flag=True, help="Query lengths are given per sequence."),
            click.option("--seqlens-k", is_flag=True, help="Key lengths are given per sequence."),
            click.option("--leftpad-q", is_flag=True, help="Queries are padded on the left."),
            click.option("--leftpad-k", is_flag=True, help="Keys are padded on the left."),
            click.option("--lse", is_flag=True, help="The log-sum-exp is returned as well."),
            click.option("--layout", default="bhsd", show_default=True, metavar="bhsd|bshd", help="Order in memory."),
            click.option("--unaligned", is_flag=True, help="Rows or bases are not 16-byte aligned (no TMA)."),
        ]
    ):
        function = option(function)
    return function


def shape(op: str, option: str, text: str) -> tuple[int, int, int, int]:
    """Read "8,64,1024,64". Raises ArgumentError naming the option, the text and the form."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != len(AXES) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(op, option, text, f"must be four whole numbers {','.join(AXES)}, as in 8,64,1024,64")
    batch, heads, seq, dim = map(int, parts)
    return batch, heads, seq, dim


def problem_from(
    op: str,
    q: str,
    kv: str,
    dv: int | None,
    dtype: str,
    causal: str | None,
    lse: bool,
    unaligned: bool,
    **flags: Any,
) -> Problem:
    """The Problem that the options describe. Raises ArgumentError."""
    batch, heads_q, seq_q, head_dim = shape(op, "--q", q)
    batch_k, heads_k, seq_k, head_dim_k = shape(op, "--kv", kv)
    if batch_k != batch:
        raise ArgumentError(op, "--kv's batch", batch_k, f"must be --q's, {batch}")
    if head_dim_k != head_dim:
        raise ArgumentError(op, "--kv's head_dim", head_dim_k, f"must be --q's, {head_dim}")
    if dv is not None and dv < 1:
        raise ArgumentError(op, "--dv", dv, "must be 1 or more")
    alignment = _causal(causal or "none")
    if alignment not in CAUSAL:
        raise ArgumentError(op, "--causal", causal, f"must be one of {', '.join(CAUSAL)}, or stand alone")
    return Problem(
        op=op,  # type: ignore[arg-type]  # Problem checks its vocabulary, and names what it does not know
        batch=batch,
        heads_q=heads_q,
        heads_k=heads_k,
        seq_q=seq_q,
        seq_k=seq_k,
        head_dim=head_dim,
        head_dim_v=dv or head_dim,
        dtype=dtype,  # type: ignore[arg-type]
        causal=alignment,  # type: ignore[arg-type]
        return_lse=lse,
        aligned=not unaligned,
        **flags,
    )


def target_from(target: str | None, toolchain: str | None) -> Target:
    """The named target, or this machine's. Raises ArgumentError on an unknown backend, arch or toolchain."""
    from portattn.machine import this_target
    from portattn.registry import Registry

    registry = Registry.load()
    if target is None:
        here = this_target()
        return registry.target(here.name, toolchain) if toolchain else here
    if ":" not in target:
        known = ", ".join(f"{name}:{next(iter(arches))}" for name, arches in registry.arches.items())
        raise ArgumentError("target", "target", target, f"must be BACKEND:ARCH, such as {known}")
    return registry.target(target, toolchain)
