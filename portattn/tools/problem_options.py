"""From command-line options to a Problem and a Target; errors name the option, its value and the limit."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_args

import click
import msgspec

from portattn.errors import ArgumentError
from portattn.schema import problem_limits
from portattn.schema.ops import BACKWARD, FEATURES, ROWS
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.tools import param_types
from portattn.tools.param_types import ALIGNMENTS as CAUSAL
from portattn.tools.param_types import FLAG

F = TypeVar("F", bound=Callable[..., Any])

AXES = ("B", "H", "S", "D")

# Options that an op cannot do without.
NEEDS: dict[str, tuple[str, ...]] = {
    "paged_attention": ("page_size",), "mla_attention": ("page_size", "dv"), "write_pages": ("page_size",),
    **{op: ("tokens",) for op, row in ROWS.items() if "tokens" in row.needs},
}  # fmt: skip
# Of options that are no flag and not None by default.
_DEFAULTS = {"layout": "bhsd", "page_layout": "phd", "kv_format": "as_q", "rotary": "none"}


# Other names of the types that --dtype takes, and of the formats that --kv-format takes.
_TYPES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
_FORMATS = {
    "fp8": "e4m3", "float8": "e4m3", "fp8_e4m3": "e4m3", "e4m3fn": "e4m3", "float8_e4m3fn": "e4m3",
    "fp8_e5m2": "e5m2", "float8_e5m2": "e5m2", "float8_e4m3fnuz": "e4m3fnuz", "fp4": "nvfp4",
}  # fmt: skip
_FORMATS |= {name: name for name in problem_limits.FORMATS}
_BY_TOKEN = " and ".join(name for name, row in problem_limits.FORMATS.items() if row.default_scales == "token")
# Numbers with their limits.
_NUMBERS: tuple[tuple[str, int, int | None], ...] = (
    ("page_size", 1, None), ("tokens", 0, None), ("num_splits", 1, problem_limits.MAX_SPLITS), ("total_q", 0, None),
    ("total_k", 0, None),
)  # fmt: skip
_FLAGS = tuple(name for name in problem_limits.ASKED if name != "return_lse")  # which is --lse


class CausalCommand(click.Command):
    """A command whose --causal may stand alone, also before an argument, which click would take for its value."""

    @staticmethod
    def expand(args: list[str]) -> list[str]:
        """Return the arguments, a --causal that stands alone with its value."""
        return [
            f"--causal={CAUSAL[0]}"
            if arg == "--causal" and (following is None or _causal(following) not in CAUSAL)
            else arg
            for arg, following in zip(args, [*args, None][1:], strict=True)
        ]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.expand(args))


def _causal(text: str) -> str:
    return text.replace("-", "_")


_SHAPE: dict[str, Any] = {"required": True, "metavar": "B,H,S,D"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}


def _choice(words: Iterable[str], default: str | None = None, **more: Any) -> dict[str, Any]:
    shown = {} if default is None else {"default": default, "show_default": True}  # None counts as given to click
    return {"metavar": "|".join(words)} | shown | more


def _offered() -> list[tuple[str, dict[str, Any], str]]:
    causal = {"type": param_types.CAUSAL, "metavar": "[=bottom_right|top_left]"}
    return [
        ("--q", _SHAPE, "Shape of the queries, or of new keys, in this order; packed: B sequences, the longest of S."),
        ("--kv", _SHAPE, "Shape of the keys; of a cache S is its capacity, for mla_attention D a whole latent row."),
        ("--dv", _NUMBER, "Width of the values, for mla_attention the latent rank; D by default."),
        ("--dtype", _choice(problem_limits.DTYPES, type=param_types.DTYPE, required=True),
         "Type of q, k and v; with --kv-format, of the queries or results that are not quantised."),
        ("--causal", causal, "Causal mask; the last query sees the last key, or with top_left query i sees keys 0..i."),
        ("--window", {"metavar": "L,R"}, "Keys seen before and after a query's own position; -1 for all of them."),
        ("--chunk", _NUMBER, "Keys of a chunk; a query sees its own chunk."),
        *((name, FLAG, f"{FEATURES[name].help}.") for name in _FLAGS),
        ("--bias-by-key", FLAG, "A bias is given, one row for all heads and queries."),
        ("--mask-by-key", FLAG, "A boolean mask is given, one row for all heads and queries."),
        ("--kv-format", _choice(get_args(problem_limits.KvFormat), "as_q"),
         "Format of the numbers of a quantised cache, or of quantised q, k and v (portattn.quantize)."),
        ("--kv-scales", _choice(get_args(problem_limits.KvScales)),
         f"What a scale of quantised tensors belongs to; of {_BY_TOKEN} token by default, of float8 none."),
        ("--rotary", _choice(get_args(problem_limits.Rotary), "none"), "New keys are rotated on the way to the cache."),
        ("--rotary-dim", _NUMBER, "Columns that are rotated; all by default."),
        ("--total-q", _NUMBER, "Queries are packed, N rows together."),
        ("--total-k", _NUMBER, "Keys are packed, N rows together."),
        ("--page-size", _NUMBER, "The cache has pages of N tokens."),
        ("--page-layout", _choice(("phd", "hpd"), "phd"), "Whether tokens or heads come first in a page."),
        ("--pages-apart", FLAG,
         "Pages do not follow each other row by row, as in a cache of K and V together (no TMA)."),
        ("--tokens", _NUMBER, "Places of a list of chosen tokens, blocks, slots or logits."),
        ("--block-size", _NUMBER, "Keys of a chosen block; 64 by default."),
        ("--num-splits", _NUMBER, "Programs that must share a row's keys."),
        ("--lse", FLAG, "The log-sum-exp is returned as well."),
        ("--layout", _choice(("bhsd", "bshd"), "bhsd"), "Order in memory."),
        ("--unaligned", FLAG, "Rows or bases are not 16-byte aligned (no TMA)."),
        ("--unaligned-words", FLAG, "Those of a quantised cache are not 4-byte aligned either (no words)."),
    ]  # fmt: skip


def problem_options(function: F) -> F:
    named = [(n if n.startswith("--") else f"{_option(n)} {n}", kind, text) for n, kind, text in _offered()]
    return param_types.options(*named)(function)


def shape(op: str, option: str, text: str) -> tuple[int, int, int, int]:
    """Read "8,64,1024,64". Raises ArgumentError naming the option, the text and the form."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != len(AXES) or not all(part.isascii() and part.isdigit() for part in parts):
        raise ArgumentError(op, option, text, f"must be four whole numbers {','.join(AXES)}, as in 8,64,1024,64")
    batch, heads, seq, dim = map(int, parts)
    return batch, heads, seq, dim


def window_sides(op: str, text: str) -> tuple[int, int]:
    """Read the value of --window, "127,0"; -1 is no limit. Raises ArgumentError."""
    try:
        left, right = (int(part) for part in text.split(","))
    except ValueError:
        left = right = problem_limits.UNLIMITED - 1
    if min(left, right) < problem_limits.UNLIMITED:
        raise ArgumentError(op, "--window", text, "must be L,R, whole numbers from -1 (no limit) on, as in 127,0")
    return left, right


def problem_from(
    op: str, q: str, kv: str, dv: int | None, dtype: str, causal: str | None, window: str | None, chunk: int | None,
    lse: bool, unaligned: bool, unaligned_words: bool, pages_apart: bool, block_size: int | None, **given: Any,
) -> Problem:  # fmt: skip
    """Return the Problem of the options, as a call with such arguments makes it. Raises ArgumentError."""
    row = ROWS[op]
    for name in ("bias", "mask"):
        given[name] = given[name] or given[f"{name}_by_key"]
    masks = {"causal": causal if causal != "none" else None, "window": window, "chunk": chunk, "dv": dv}
    _check_taken(op, masks | given)
    _check_dtype(op, dtype)
    batch, heads_q, seq_q, head_dim = shape(op, "--q", q)
    batch_k, heads_k, seq_k, head_dim_k = shape(op, "--kv", kv)
    page_size, layout, latent = given["page_size"] or 0, given["page_layout"], op == "mla_attention"
    pages = "goes with --page-size, which is not given"
    blocks, sizes = "block_indices" in row.parameters, problem_limits.KEY_BLOCKS
    _check(op, [
        (batch_k != batch, "--kv's batch", batch_k, f"must be --q's, {batch}"),
        (head_dim_k != head_dim, "--kv's head_dim", head_dim_k, f"must be --q's, {head_dim}"),
        (dv is not None and dv < 1, "--dv", dv, "must be 1 or more"),
        *(_number(name, given[name], least, most) for name, least, most in _NUMBERS),
        (latent and heads_k != 1, "--kv's heads", heads_k, "must be 1: all heads share the latent rows"),
        (latent and (dv or 0) > head_dim, "--dv", dv, f"must be at most {head_dim}, a latent row with its rotary part"),
        (op == "sparse_attention" and seq_q != 1, "--q's S", seq_q,
         "must be 1: tokens are chosen for one query a sequence"),
        (block_size is not None and not blocks, "--block-size", block_size, f"{op} has none"),
        (block_size is not None and block_size not in sizes, "--block-size", block_size,
         f"must be one of {', '.join(map(str, sizes))}"),
        (page_size and seq_k % page_size, "--kv's S", seq_k, f"must be a multiple of --page-size, {page_size}"),
        (layout != _DEFAULTS["page_layout"] and not page_size, "--page-layout", layout, pages),
        (pages_apart and not page_size, "--pages-apart", True, pages),
        (unaligned_words and given["kv_format"] == _DEFAULTS["kv_format"], "--unaligned-words", True,
         "goes with --kv-format, which is not given"),
    ])  # fmt: skip
    for name, longest in (("total_q", seq_q), ("total_k", seq_k)):
        if given[name] is None and name in row.needs:  # then all sequences are as long as the longest
            given[name] = batch * longest
        total = given[name] if given[name] is not None else longest * min(batch, 1)
        # More rows than the longest sequence has are fine: engines pad them to their graphs' sizes.
        _check(op, [
            (total < longest * min(batch, 1), _option(name), total,
             f"must be at least the longest sequence's rows, {longest}"),
            (total > batch * longest, _option(name), total,
             f"must be at most {batch * longest}: {batch} sequences, the longest of {longest} rows"),
        ])  # fmt: skip
    packed = "total_q" not in row.needs and given["total_q"] is not None
    unpacked = "goes with queries that are not packed (--total-q)"
    _check(op, [(packed and given[name], _option(name), True, unpacked) for name in ("bias", "mask")])
    given["kv_scales"] = given["kv_scales"] or problem_limits.cache_format(given["kv_format"]).default_scales
    given |= {"block_k": block_size or 64} if blocks else {}
    lengths = (row.always_lengths and not given["tokens"]) or bool(row.allocates and page_size)
    given["seqlens_k"] = given["seqlens_k"] or lengths
    if given["rotary"] != _DEFAULTS["rotary"] and given["rotary_dim"] is None:
        given["rotary_dim"] = head_dim
    given |= {name: given[name] or 0 for name in ("rotary_dim", "page_size", "tokens", "num_splits")}
    # With tokens first, rows of one head are equally far apart in a page and from one page to the next.
    in_line = row.always_lengths and page_size > 0 and not pages_apart and (layout == "phd" or heads_k == 1)
    return Problem(
        op=op, batch=batch, heads_q=heads_q, heads_k=heads_k, seq_q=seq_q, seq_k=seq_k,  # type: ignore[arg-type]
        head_dim=head_dim, head_dim_v=dv or head_dim, dtype=dtype, return_lse=lse,  # type: ignore[arg-type]
        aligned=not (unaligned or unaligned_words), word_aligned=not unaligned_words, pages_in_line=in_line,
        **_masked(op, causal, window, chunk, seq_q, seq_k), **given,
    )  # fmt: skip


def _check(op: str, rows: Iterable[tuple[Any, str, Any, str]]) -> None:
    """Raise the ArgumentError of the first row (wrong, argument, value, limit) that is wrong."""
    for wrong, argument, value, limit in rows:
        if wrong:
            raise ArgumentError(op, argument, value, limit)


def _number(name: str, value: int | None, least: int, most: int | None) -> tuple[Any, str, Any, str]:
    wrong = value is not None and (value < least or (most is not None and value > most))
    return wrong, _option(name), value, f"must be {least} or more" if most is None else f"must be in {least}..{most}"


def training_problem(problem: Problem, grad: bool, dropout: bool, deterministic: bool) -> Problem:
    p, backward = problem, problem.backward
    forward = p.op in BACKWARD
    _check(p.op, [
        (grad and not forward, "--grad", True, f"goes with {' and '.join(BACKWARD)}, which have gradients"),
        (dropout and "dropout_p" not in ROWS[p.op].values, "--dropout", True,
         "goes with attention, varlen_attention and their gradients"),
        (deterministic and not backward, "--deterministic", True,
         "goes with the gradients' operations: a forward is repeatable"),
    ])  # fmt: skip
    if backward and p.return_lse:
        p = msgspec.structs.replace(p, return_lse=False, grad_lse=True)
    changed = {"needs_grad": grad, "dropout": dropout, "deterministic": deterministic}
    return msgspec.structs.replace(p, **{name: True for name, asked in changed.items() if asked})


def _option(name: str) -> str:
    return "--alibi" if name == "alibi_slopes" else f"--{name.replace('_', '-')}"


TRAINING: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("--grad", FLAG, "Gradients of the tensors will be asked for."),
    ("--dropout", FLAG, "Probabilities are dropped, by a seed."),
    ("--deterministic", FLAG, "Of gradients: repeatable bit by bit."),
)


@click.command(cls=CausalCommand, add_help_option=False)
@problem_options
@param_types.options(*TRAINING)
def _keys(**_: Any) -> None:
    """Never called: only its parser is of use."""


def problem_of_table(op: str, table: Mapping[str, Any]) -> Problem:
    """Return the Problem of a table of the options of `portattn plan`: `{"q": [1, 8, 64, 128], "causal": True, …}`.

    Raises ArgumentError naming the key or the option."""
    options = {name: option for option in _keys.params for name in option.opts}
    known = {name.strip("-").replace("-", "_"): name for name in options}
    words = []
    for key, value in table.items():
        if key not in known:
            raise ArgumentError(op, key, value, f"is unknown: keys are op, name, {', '.join(known)}")
        if getattr(options[known[key]], "is_flag", False) and not isinstance(value, bool):
            raise ArgumentError(op, key, value, "must be true or false")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [] if value is False else [known[key]] if value is True else [f"{known[key]}={text}"]
    try:
        given = _keys.make_context("plan", words).params
    except click.UsageError as error:
        option = getattr(error, "param", None)
        given_name = option.name if option else getattr(error, "option_name", None)
        key = (given_name or "q").strip("-").replace("-", "_")
        limit = "must have a value" if table.get(key) is True else error.format_message()
        raise ArgumentError(op, key, table.get(key), limit) from None
    training = {name.strip("-"): given.pop(name.strip("-")) for name, _, _ in TRAINING}
    return training_problem(problem_from(op, **given), **training)


def _check_taken(op: str, given: dict[str, Any]) -> None:
    for name, value in given.items():
        absent = value is None or value is False or value == _DEFAULTS.get(name)
        if name != "dv" and not absent and name.removesuffix("_by_key") not in ROWS[op].options:
            raise ArgumentError(op, _option(name), value, f"{op} has none")
        if absent and name in NEEDS.get(op, ()):
            raise ArgumentError(op, _option(name), value, f"must be given for {op}")


def _check_dtype(op: str, dtype: str) -> None:
    """Check the queries' dtype: a quantised call has the results' here, and its numbers' in --kv-format."""
    if dtype in problem_limits.DTYPES:
        return
    limit, kind, row = f"must be one of {', '.join(problem_limits.DTYPES)}", _FORMATS.get(dtype.lower(), ""), ROWS[op]
    operands = "q_scale" in row.tensors
    if dtype.lower() in _TYPES:
        limit += f": write {_TYPES[dtype.lower()]}"
    elif kind and "kv_format" in row.options and (not operands or op in problem_limits.FORMATS[kind].ops):
        stored = "q and k" if kind == "int8" else "q, k and v"
        whose = f"{stored} of {kind}, as portattn.quantize makes them," if operands else f"a cache of {kind}"
        limit += f"; for {whose} write --dtype bf16 --kv-format {kind}, where --dtype is the type of the results"
    raise ArgumentError(op, "--dtype", dtype, limit)


def _masked(op: str, causal: str | None, window: str | None, chunk: int | None, rows: int, keys: int) -> dict[str, Any]:
    """Return the fields of the causal mask, window and chunk in canonical form, as validate/features.py makes them."""
    alignment = _causal(causal or "none")
    if alignment not in CAUSAL:
        raise ArgumentError(op, "--causal", causal, f"must be one of {', '.join(CAUSAL)}, or stand alone")
    left = right = problem_limits.UNLIMITED
    if window is not None:
        sides = window_sides(op, window)
        left, right = (problem_limits.UNLIMITED if side >= rows + keys else side for side in sides)
    if chunk is not None and chunk < 1:
        raise ArgumentError(op, "--chunk", chunk, "must be 1 or more")
    if alignment == "none" and right == 0:
        alignment = "bottom_right"
    if alignment != "none":
        right = problem_limits.UNLIMITED
    given = {} if chunk is None else {"chunk": problem_limits.chunk_or_none(chunk, alignment, rows, keys)}
    return {"causal": alignment, "window_left": left, "window_right": right} | given


def target_from(target: str | None, toolchain: str | None, argument: str = "--target") -> Target:
    """Return the target that option `argument` names, or this machine's, with --toolchain. Raises ArgumentError."""
    from portattn.planning.registry import Registry, this_target

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
    context = click.get_current_context(silent=True)
    return context.command_path.partition(" ")[2] if context else ""
