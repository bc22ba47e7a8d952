"""From command-line options to a Problem and a Target. Complaints name the option, its value and the limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click
import msgspec

from portattn.errors import ArgumentError
from portattn.schema.features import FEATURES
from portattn.schema.ops import ROWS
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import (
    ASKED,
    DTYPES,
    INTEGERS,
    MAX_SPLITS,
    NVFP4,
    UNLIMITED,
    KvFormat,
    KvScales,
    Rotary,
    chunk_or_none,
)
from portattn.schema.target import Target
from portattn.tools import shell_values
from portattn.tools.shell_values import ALIGNMENTS as CAUSAL

F = TypeVar("F", bound=Callable[..., Any])

AXES = ("B", "H", "S", "D")

# Options that an op cannot do without.
NEEDS: dict[str, tuple[str, ...]] = {
    "paged_attention": ("page_size",),
    "sparse_attention": ("tokens",),
    "mla_attention": ("page_size", "dv"),
    "write_pages": ("page_size",),
}
_DEFAULTS = {
    "layout": "bhsd",
    "page_layout": "phd",
    "kv_format": "as_q",
    "rotary": "none",
}  # of options that are no flag and not None by default


# Other names of the types that --dtype takes, and of the formats that --kv-format takes.
_TYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_FORMATS = {
    "fp8": "e4m3", "float8": "e4m3", "fp8_e4m3": "e4m3", "e4m3fn": "e4m3", "float8_e4m3fn": "e4m3",
    "fp8_e5m2": "e5m2", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz", "fp4": NVFP4,
}  # fmt: skip
_FORMATS |= {name: name for name in get_args(KvFormat) if name != _DEFAULTS["kv_format"]}
_OF_OPERANDS = ("e4m3", "e5m2", "e4m3fnuz", "int8")  # q, k and v may be of these
_FLAGS = tuple(name for name in ASKED if name != "return_lse")  # which is --lse


class CausalCommand(click.Command):
    """A command whose --causal may stand alone, also before an argument: click alone would take that for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        full = [
            f"--causal={CAUSAL[0]}"
            if arg == "--causal" and (following is None or _causal(following) not in CAUSAL)
            else arg
            for arg, following in zip(args, [*args, None][1:], strict=True)
        ]
        return super().parse_args(ctx, full)


def _causal(text: str) -> str:
    return text.replace("-", "_")


def problem_options(function: F) -> F:
    """The options that describe a Problem."""
    for option in reversed(
        [
            click.option(
                "--q",
                "q",
                required=True,
                metavar="B,H,S,D",
                help="Shape of the queries, or of new keys, in this order; packed: B sequences, the longest of S.",
            ),
            click.option(
                "--kv",
                "kv",
                required=True,
                metavar="B,H,S,D",
                help="Shape of the keys; of a cache S is its capacity, for mla_attention D a whole latent row.",
            ),
            click.option(
                "--dv",
                type=int,
                metavar="N",
                help="Width of the values, for mla_attention the latent rank; D by default.",
            ),
            click.option(
                "--dtype",
                type=shell_values.DTYPE,
                required=True,
                metavar="|".join(DTYPES),
                help="Type of q, k and v; where they or a cache are quantised (--kv-format) of what is not.",
            ),
            click.option(
                "--causal",
                type=shell_values.CAUSAL,
                metavar="[=bottom_right|top_left]",
                help="Causal mask; the last query sees the last key, or with top_left query i sees keys 0..i.",
            ),
            click.option(
                "--window", metavar="L,R", help="Keys seen before and after a query's own position; -1 for all of them."
            ),
            click.option("--chunk", type=int, metavar="N", help="Keys of a chunk; a query sees its own chunk."),
            *(click.option(_option(name), name, is_flag=True, help=f"{FEATURES[name].help}.") for name in _FLAGS),
            click.option("--bias-by-key", is_flag=True, help="A bias is given, one row for all heads and queries."),
            click.option(
                "--mask-by-key", is_flag=True, help="A boolean mask is given, one row for all heads and queries."
            ),
            click.option(
                "--kv-format",
                default="as_q",
                show_default=True,
                metavar="|".join(get_args(KvFormat)),
                help="Format of the numbers of a quantised cache, or of quantised q, k and v (portattn.quantize).",
            ),
            click.option(
                "--kv-scales",
                metavar="|".join(get_args(KvScales)),
                help="What a scale of quantised tensors belongs to; of int8 and int4 token by default, of float8 none.",
            ),
            click.option(
                "--rotary",
                default="none",
                show_default=True,
                metavar="|".join(get_args(Rotary)),
                help="New keys are rotated on their way into the cache.",
            ),
            click.option("--rotary-dim", type=int, metavar="N", help="Columns that are rotated; all by default."),
            click.option("--total-q", type=int, metavar="N", help="Queries are packed, N rows together."),
            click.option("--total-k", type=int, metavar="N", help="Keys are packed, N rows together."),
            click.option("--page-size", type=int, metavar="N", help="The cache has pages of N tokens."),
            click.option(
                "--page-layout",
                default="phd",
                show_default=True,
                metavar="phd|hpd",
                help="Whether tokens or heads come first in a page.",
            ),
            click.option(
                "--pages-apart",
                is_flag=True,
                help="Pages do not follow each other row by row, as in a cache of K and V together (no TMA).",
            ),
            click.option("--tokens", type=int, metavar="N", help="Places for chosen tokens of each head."),
            click.option("--num-splits", type=int, metavar="N", help="Programs that must share a row's keys."),
            click.option("--lse", is_flag=True, help="The log-sum-exp is returned as well."),
            click.option("--layout", default="bhsd", show_default=True, metavar="bhsd|bshd", help="Order in memory."),
            click.option("--unaligned", is_flag=True, help="Rows or bases are not 16-byte aligned (no TMA)."),
            click.option(
                "--unaligned-words",
                is_flag=True,
                help="Those of a quantised cache are not 4-byte aligned either (no words).",
            ),
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
    window: str | None,
    chunk: int | None,
    lse: bool,
    unaligned: bool,
    unaligned_words: bool,
    pages_apart: bool,
    **given: Any,
) -> Problem:
    """The Problem that the options describe, as a call with such arguments makes it. Raises ArgumentError."""
    for name in ("bias", "mask"):
        given[name] = given[name] or given[f"{name}_by_key"]
    _check_taken(
        op, {"causal": causal if causal != "none" else None, "window": window, "chunk": chunk, "dv": dv} | given
    )
    _check_dtype(op, dtype)
    batch, heads_q, seq_q, head_dim = shape(op, "--q", q)
    batch_k, heads_k, seq_k, head_dim_k = shape(op, "--kv", kv)
    if batch_k != batch:
        raise ArgumentError(op, "--kv's batch", batch_k, f"must be --q's, {batch}")
    if head_dim_k != head_dim:
        raise ArgumentError(op, "--kv's head_dim", head_dim_k, f"must be --q's, {head_dim}")
    if dv is not None and dv < 1:
        raise ArgumentError(op, "--dv", dv, "must be 1 or more")
    _check_numbers(op, given)
    page_size = given["page_size"] or 0
    if op == "mla_attention" and heads_k != 1:
        raise ArgumentError(op, "--kv's heads", heads_k, "must be 1: all heads share the latent rows")
    if op == "mla_attention" and dv is not None and dv >= head_dim:
        raise ArgumentError(op, "--dv", dv, f"must be below {head_dim}, a latent row with its rotary part")
    if op == "sparse_attention" and seq_q != 1:
        raise ArgumentError(op, "--q's S", seq_q, "must be 1: tokens are chosen for one query a sequence")
    if page_size and seq_k % page_size:
        raise ArgumentError(op, "--kv's S", seq_k, f"must be a multiple of --page-size, {page_size}")
    if given["page_layout"] != _DEFAULTS["page_layout"] and not page_size:
        raise ArgumentError(op, "--page-layout", given["page_layout"], "goes with --page-size, which is not given")
    if pages_apart and not page_size:
        raise ArgumentError(op, "--pages-apart", True, "goes with --page-size, which is not given")
    if unaligned_words and given["kv_format"] == _DEFAULTS["kv_format"]:
        raise ArgumentError(op, "--unaligned-words", True, "goes with --kv-format, which is not given")
    for name, longest in (("total_q", seq_q), ("total_k", seq_k)):
        if given[name] is None and name in ROWS[op].needs:  # then all sequences are as long as the longest
            given[name] = batch * longest
        _check_total(op, name, given[name], batch, longest)
    if "total_q" not in ROWS[op].needs and given["total_q"] is not None:
        for name in ("bias", "mask"):
            if given[name]:
                raise ArgumentError(op, _option(name), True, "goes with queries that are not packed (--total-q)")
    given["kv_scales"] = given["kv_scales"] or ("token" if given["kv_format"] in INTEGERS else "none")
    given["seqlens_k"] = given["seqlens_k"] or ROWS[op].always_lengths
    if given["rotary"] != _DEFAULTS["rotary"] and given["rotary_dim"] is None:
        given["rotary_dim"] = head_dim
    given["rotary_dim"] = given["rotary_dim"] or 0
    counts: dict[str, Any] = {name: given.pop(name) or 0 for name in ("page_size", "tokens", "num_splits")}
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
        return_lse=lse,
        aligned=not (unaligned or unaligned_words),
        word_aligned=not unaligned_words,
        # With tokens first, rows of one head are equally far apart in a page and from one page to the next.
        pages_in_line=ROWS[op].always_lengths
        and page_size > 0
        and not pages_apart
        and (given["page_layout"] == "phd" or heads_k == 1),
        **_masked(op, causal, window, chunk, seq_q, seq_k),
        **counts,
        **given,
    )


def training_problem(problem: Problem, grad: bool, dropout: bool, deterministic: bool) -> Problem:
    """The problem of a training call: what its forward is asked for, or its gradients. Raises ArgumentError."""
    p, backward = problem, problem.backward
    forward = p.op in ("attention", "varlen_attention")
    if grad and not forward:
        raise ArgumentError(p.op, "--grad", True, "goes with attention and varlen_attention, which have gradients")
    if dropout and not (forward or backward):
        raise ArgumentError(p.op, "--dropout", True, "goes with attention, varlen_attention and their gradients")
    if deterministic and not backward:
        limit = "goes with attention_backward and varlen_attention_backward: a forward is repeatable"
        raise ArgumentError(p.op, "--deterministic", True, limit)
    if backward and p.return_lse:
        p = msgspec.structs.replace(p, return_lse=False, grad_lse=True)
    changed = {"needs_grad": grad, "dropout": dropout, "deterministic": deterministic}
    return msgspec.structs.replace(p, **{name: True for name, asked in changed.items() if asked})


def _option(name: str) -> str:
    return "--alibi" if name == "alibi_slopes" else f"--{name.replace('_', '-')}"


def _check_taken(op: str, given: dict[str, Any]) -> None:
    """Options that the op has not, and those that it cannot do without."""
    for name, value in given.items():
        absent = value is None or value is False or value == _DEFAULTS.get(name)
        if name != "dv" and not absent and name.removesuffix("_by_key") not in ROWS[op].options:
            raise ArgumentError(op, _option(name), value, f"{op} has none")
        if absent and name in NEEDS.get(op, ()):
            raise ArgumentError(op, _option(name), value, f"must be given for {op}")


def _check_dtype(op: str, dtype: str) -> None:
    """The type that is no type of queries: a quantised call has the results' here, and its numbers' in --kv-format."""
    if dtype in DTYPES:
        return
    limit, kind, row = f"must be one of {', '.join(DTYPES)}", _FORMATS.get(dtype.lower(), ""), ROWS[op]
    operands = "q_scale" in row.tensors
    if dtype.lower() in _TYPES:
        limit += f": write {_TYPES[dtype.lower()]}"
    elif kind and "kv_format" in row.options and (not operands or kind in _OF_OPERANDS):
        stored = "q and k" if kind == "int8" else "q, k and v"
        whose = f"{stored} of {kind}, as portattn.quantize makes them," if operands else f"a cache of {kind}"
        limit += f"; for {whose} write --dtype bf16 --kv-format {kind}, where --dtype is the type of the results"
    raise ArgumentError(op, "--dtype", dtype, limit)


def _check_numbers(op: str, given: dict[str, Any]) -> None:
    for name, least, most in (
        ("page_size", 1, None),
        ("tokens", 0, None),
        ("num_splits", 1, MAX_SPLITS),
        ("total_q", 0, None),
        ("total_k", 0, None),
    ):
        value = given[name]
        if value is not None and (value < least or (most is not None and value > most)):
            limit = f"must be {least} or more" if most is None else f"must be in {least}..{most}"
            raise ArgumentError(op, _option(name), value, limit)


def _check_total(op: str, name: str, total: int | None, batch: int, longest: int) -> None:
    """Rows of packed sequences, as many as there can be: a description is of rows that are somebody's.

    A call may have more: engines pad packed rows to the sizes of their graphs, so a Problem has no such limit.
    """
    if total is None:
        return
    if total < longest * min(batch, 1):
        raise ArgumentError(op, _option(name), total, f"must be at least the longest sequence's rows, {longest}")
    if total > batch * longest:
        limit = f"must be at most {batch * longest}: {batch} sequences, the longest of {longest} rows"
        raise ArgumentError(op, _option(name), total, limit)


def _masked(op: str, causal: str | None, window: str | None, chunk: int | None, rows: int, keys: int) -> dict[str, Any]:
    """Fields of the causal mask, the window and the chunk in one form, as validate/features.py makes them of a call's.

    A side of as many keys and rows as there are hides nothing, a right side of 0 is causal, and beside a causal mask
    there is none.
    """
    alignment = _causal(causal or "none")
    if alignment not in CAUSAL:
        raise ArgumentError(op, "--causal", causal, f"must be one of {', '.join(CAUSAL)}, or stand alone")
    left = right = UNLIMITED
    if window is not None:
        try:
            left, right = (int(part) for part in window.split(","))
        except ValueError:
            left = UNLIMITED - 1
        if min(left, right) < UNLIMITED:
            raise ArgumentError(op, "--window", window, "must be L,R, whole numbers from -1 (no limit) on, as in 127,0")
        left, right = (UNLIMITED if side >= rows + keys else side for side in (left, right))
    if chunk is not None and chunk < 1:
        raise ArgumentError(op, "--chunk", chunk, "must be 1 or more")
    if alignment == "none" and right == 0:
        alignment = "bottom_right"
    if alignment != "none":
        right = UNLIMITED
    given = {} if chunk is None else {"chunk": chunk_or_none(chunk, alignment, rows, keys)}
    return {"causal": alignment, "window_left": left, "window_right": right} | given


def target_from(target: str | None, toolchain: str | None, argument: str = "--target") -> Target:
    """The target that a command's `argument` names, or this machine's, with the compiler that its --toolchain names.

    Raises ArgumentError, naming the command and the option, on an unknown backend, arch or toolchain.
    """
    from portattn.planning.detect_target import this_target
    from portattn.planning.registry import Registry

    registry = Registry.load()
    if target is None and not toolchain:
        return this_target()
    name = this_target().name if target is None else target
    try:
        return registry.target(name, toolchain)
    except ArgumentError as error:
        command = _command() or error.op
        if error.argument == "toolchain":
            raise ArgumentError(command, "--toolchain", toolchain, error.limit) from None
        whose = "its backend " if error.argument == "backend" and error.limit.startswith("must") else ""
        raise ArgumentError(command, argument, name, f"{whose}{error.limit}") from None


def _command() -> str:
    """The command that is being run, without the program's own name; empty outside of one."""
    context = click.get_current_context(silent=True)
    return context.command_path.partition(" ")[2] if context else ""
