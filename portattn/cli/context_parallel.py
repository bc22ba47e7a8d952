"""`portattn context-parallel`: computation, traffic, memory and modelled time of a call over several ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from portattn.cli.output import emit_json, json_option
from portattn.errors import ArgumentError
from portattn.tools.param_types import FLAG
from portattn.tools.param_types import options as option_table
from portattn.tools.problem_options import shape

if TYPE_CHECKING:
    from portattn.distributed.cost_report import Cost

OP = "context-parallel"


@click.command("context-parallel")
@option_table(
    ("--q", {"required": True, "metavar": "B,H,S,D"}, "Shape of the whole queries."),
    ("--kv", {"required": True, "metavar": "B,H,S,D"}, "Shape of the whole keys."),
    ("--dv", {"type": int, "metavar": "N"}, "Width of the values; D by default."),
    ("--dtype", {"default": "bf16", "metavar": "DTYPE"}, "bf16, fp16 or fp32; bf16 by default."),
    ("--ranks", {"required": True, "type": int, "metavar": "N"}, "GPUs, in all."),
    ("--inner", {"type": int, "metavar": "N"},
     "Ranks of each Ulysses group: 1 (by default) for a ring alone, as many as --ranks for Ulysses alone."),
    ("--layout", {"metavar": "LAYOUT"}, "How a sequence is cut: zigzag (by default) or contiguous."),
    ("--causal", FLAG, "A row sees no later key."),
    ("--window", {"metavar": "L,R"}, "Keys seen before and after a row's own; -1 for all."),
    ("--decode", FLAG, "Decoding over a sharded cache: S of --kv is its length."),
    ("--heads", {"metavar": "HEADS"}, "With --decode, what each rank gets: all (by default) or shard."),
    ("--rate", {"multiple": True, "metavar": "NAME=NUMBER"}, "A rate of the model, such as link=450e9; repeatable."),
)  # fmt: skip
@json_option
def context_parallel(
    q: str, kv: str, dv: int | None, dtype: str, ranks: int, rate: tuple[str, ...], as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Print the cost of attention over several GPUs for each of them.

    Operations and bytes are exactly portattn.distributed's. Times are a model of the rates that it prints, whose
    defaults were measured on an H200, except the links' rates. The command runs nothing and needs no GPU.

    \b
    portattn context-parallel --q 1,32,131072,128 --kv 1,8,131072,128 --ranks 8 --causal
    portattn context-parallel --q 1,32,8388608,128 --kv 1,8,8388608,128 --ranks 2048 --inner 8 --causal
    portattn context-parallel --decode --q 1,64,1,128 --kv 1,8,1048576,128 --ranks 2 --rate link=300e9"""
    from portattn.distributed.cost import context_parallel_cost, decode_parallel_cost

    given: dict[str, Any] = {"q": shape(OP, "--q", q), "kv": shape(OP, "--kv", kv)}
    given |= {"ranks": ranks, "dim_v": dv, "dtype": dtype, "rates": _rates(rate)}
    if options.pop("decode"):
        for name in ("inner", "layout", "causal", "window"):
            if options.pop(name):
                raise click.UsageError(f"--{name} does not go with --decode")
        if options["heads"] is None:
            del options["heads"]
        function: Callable[..., Cost] = decode_parallel_cost
        given |= options
    else:
        if options.pop("heads"):
            raise click.UsageError("--heads goes with --decode alone")
        given |= {"window": _window(options.pop("window"))}
        given |= {name: value for name, value in options.items() if value is not None}
        function = context_parallel_cost
    try:
        found = function(**given)
    except ArgumentError as error:
        limit = re.sub(r"\b(inner|heads_k)\b", lambda word: _option(word[0]), error.limit)
        raise ArgumentError(OP, _option(error.argument), error.value, limit) from None
    if as_json:
        emit_json(found.data())
    else:
        click.echo(found.explain())


def _option(argument: str) -> str:
    """Return the command's words for an argument of the cost functions."""
    named = {"S": "S of --q", "heads_q": "H of --q", "heads_k": "H of --kv", "dim_v": "--dv"}
    return named.get(argument, f"--{argument}")


def _rates(given: tuple[str, ...]) -> Any:
    import msgspec

    from portattn.distributed.cost_report import Rates

    rates, known = Rates(), Rates.__struct_fields__
    for text in given:
        name, _, number = text.partition("=")
        if name not in known:
            raise ArgumentError(OP, "--rate", text, f"must be one of {', '.join(known)}, = and a number")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not 0.0 < value < float("inf"):
            raise ArgumentError(OP, "--rate", text, "must have a positive number behind =")
        rates = msgspec.structs.replace(rates, **{name: int(value) if name == "per_host" else value})
    if rates.per_host < 1:
        raise ArgumentError(OP, "--rate", f"per_host={rates.per_host}", "must be at least 1")
    return rates


def _window(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        raise ArgumentError(OP, "--window", text, "must be two integers, L,R") from None
    for side in (left, right):
        if side < -1:
            raise ArgumentError(OP, "--window", text, "must be integers ≥ 0, or -1 for all keys")
    return tuple(None if side < 0 else side for side in (left, right))  # type: ignore[return-value]
