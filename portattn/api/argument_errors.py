"""Errors about arguments that an operation lacks or does not have, naming the argument that was meant.
Python would refuse such calls first, without knowing other libraries: so operations take any keyword (`**unknown`)
and position (`*excess`), and required parameters have defaults. Signatures show none of it."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch

from portattn.api.transform_checks import leave_out, left_out
from portattn.errors import ArgumentError, SettingError, TracingError, UnknownArgument
from portattn.schema.ops import PUBLIC

_CODE = re.compile(r"`([^`]+)`")
_NAME = re.compile(r"(\w+)(?:=|$)")


class ArgumentRow(NamedTuple):
    """One argument, or several that go together, in the page's Markdown."""

    theirs: str
    ours: str

    @property
    def names(self) -> tuple[str, ...]:
        return _names(self.theirs)

    @property
    def arguments(self) -> tuple[str, ...]:
        return _names(self.ours)

    def __str__(self) -> str:
        return f"{self.theirs} -> {self.ours}".replace("`", "")


class Table(NamedTuple):
    library: str
    head: ArgumentRow
    ops: tuple[str, ...]
    rows: tuple[ArgumentRow, ...]


def _names(cell: str) -> tuple[str, ...]:
    found = (_NAME.match(code) for code in _CODE.findall(cell))
    return tuple(dict.fromkeys(match[1] for match in found if match))


TABLES = (
    Table(
        "torch: scaled_dot_product_attention",
        ArgumentRow("SDPA", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow("`query`, `key`, `value`", "`q`, `k`, `v`, in the same layout"),
            ArgumentRow("`attn_mask`, boolean", "`mask`: True = attend, too"),
            ArgumentRow("`attn_mask`, floating", "`bias`; both may be given, and `causal` beside them"),
            ArgumentRow(
                "`is_causal=True`",
                '`causal="top_left"`; the same as `causal=True` where there are as many queries as keys',
            ),
            ArgumentRow(
                "`scale`, `dropout_p`",
                "the same; `dropout_seed` says which elements; give `dropout_p` 0 in evaluation, as to SDPA",
            ),
            ArgumentRow("`enable_gqa=True`", "not needed"),
        ),
    ),
    Table(
        "torch: flex_attention",
        ArgumentRow("flex_attention", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow(
                "`score_mod`, `mask_mod`, `block_mask`",
                "the same; `causal`, `window` and `seqlens_k` need no function",
            ),
            ArgumentRow("`kernel_options`", "not needed: the plan chooses"),
            ArgumentRow("`scale`, `return_lse`", "the same"),
        ),
    ),
    Table(
        "transformers and torch.nn",
        ArgumentRow("a module's attention", "`portattn.attention`"),
        ("attention",),
        (
            ArgumentRow(
                "`attention_mask` (B, Sk), 1 = attend",
                "`mask=attention_mask[:, None, None, :].bool()`; an additive one is `bias`",
            ),
            ArgumentRow(
                "`key_padding_mask` (B, Sk), True = ignore",
                "`mask=~key_padding_mask[:, None, None, :]`; right padding: `seqlens_k`",
            ),
            ArgumentRow("`scaling`", "`scale`"),
            ArgumentRow("`sliding_window=W`", "`window=(W - 1, 0)`"),
            ArgumentRow("`attention_chunk_size`", "`chunk`, with `causal`"),
        ),
    ),
    Table(
        "flash-attn",
        ArgumentRow("`flash_attn_func`, `flash_attn_varlen_func`", "`attention`, `varlen_attention`"),
        ("attention", "varlen_attention"),
        (
            ArgumentRow("`q`, `k`, `v` (B, S, H, D)", '`layout="bshd"`; packed tensors are the same'),
            ArgumentRow(
                "`cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`, `max_seqlen_k`",
                "the same, in the same order, of `varlen_attention`",
            ),
            ArgumentRow("`softmax_scale`", "`scale`"),
            ArgumentRow("`causal`", "the same: bottom right since flash-attn 2.1"),
            ArgumentRow("`window_size=(left, right)`", "`window=(left, right)`; -1 or None for no limit"),
            ArgumentRow("`attention_chunk`", "`chunk`, which is `None` for no chunks, not 0"),
            ArgumentRow("`softcap`, 0.0 for none", "the same, or `None`"),
            ArgumentRow("`alibi_slopes`", "the same"),
            ArgumentRow("`return_attn_probs=True`", "`return_lse=True`"),
            ArgumentRow("`dropout_p`", "the same"),
            ArgumentRow(
                "`deterministic`",
                "no: `portattn.settings(deterministic=True)` asks for it, or torch's own setting",
            ),
            ArgumentRow("`learnable_sink`, `s_aux`", "`sinks`"),
            ArgumentRow("`block_sparse_tensors`", "`block_mask=portattn.BlockMask(*tensors[:4], block_size=…)`"),
            ArgumentRow("`q_descale`, `k_descale`, `v_descale` (B, Hk)", "`q_scale`, `k_scale`, `v_scale`"),
            ArgumentRow("`pack_gqa`", "not needed"),
        ),
    ),
    Table(
        "flash-attn",
        ArgumentRow("`flash_attn_with_kvcache`", "`decode_attention`, `paged_attention`"),
        ("decode_attention", "paged_attention"),
        (
            ArgumentRow("`k_cache`, `v_cache` (B, S, H, D)", 'the same with `layout="bshd"`'),
            ArgumentRow("`k_cache`, `v_cache`, pages (P, page, H, D)", "`k_pages`, `v_pages` of `paged_attention`"),
            ArgumentRow("`cache_seqlens`", "`seqlens_k`"),
            ArgumentRow("`cache_leftpad`", "`leftpad_k`"),
            ArgumentRow("`seqused_k`", "`seqlens_k`; with packed queries, of `paged_attention`"),
            ArgumentRow(
                "`block_table`, `block_tables`",
                "`page_table`, of `paged_attention`",
            ),
            ArgumentRow(
                "`cache_batch_idx`",
                "no: a page each, `page_table=cache_batch_idx[:, None]`; or `portattn.integrations.flash_attn`",
            ),
            ArgumentRow(
                "`k`, `v`",
                "no: `append_kv` or `write_pages` writes them first; `portattn.integrations.flash_attn` does both",
            ),
            ArgumentRow(
                "`rotary_cos`, `rotary_sin`",
                "no: `append_kv` and `write_pages` rotate new keys; queries are rotated by the caller",
            ),
            ArgumentRow(
                "`num_splits`, 0 for its own choice", "the same, or `None`; 1 is bitwise the same whatever the batch"
            ),
            ArgumentRow("`k_descale`, `v_descale` (B, Hk)", "`k_scale`, `v_scale`; queries stay in 16 bits"),
        ),
    ),
    Table(
        "FlashInfer",
        ArgumentRow(
            "a paged decode wrapper's `plan` and `run`", "`paged_attention`, or `prepare` once and `run` often"
        ),
        ("paged_attention",),
        (
            ArgumentRow(
                "`indptr`, `indices`, `last_page_len`",
                "`page_table=portattn.PageTable.from_csr(indptr, indices, last_page_len)`",
            ),
            ArgumentRow(
                "`paged_kv_indptr`, `paged_kv_indices`, `paged_kv_last_page_len`",
                "`page_table=portattn.PageTable.from_csr(…)`",
            ),
            ArgumentRow("`kv_indptr`, `kv_indices`, `kv_last_page_len`", "`page_table=portattn.PageTable.from_csr(…)`"),
            ArgumentRow("`page_size`", "not needed: the pages' shape says it"),
            ArgumentRow(
                "`custom_mask`, flat",
                "`mask`, broadcast to (B, Hq, Sq, Sk); of drafted tokens `tree_mask=portattn.tree_mask(…)`",
            ),
            ArgumentRow("`qo_indptr`", "`cu_seqlens_q`"),
            ArgumentRow("`sm_scale`", "`scale`"),
            ArgumentRow("`logits_soft_cap`", "`softcap`"),
            ArgumentRow("`window_left=W`", "`window=(W, None)`"),
            ArgumentRow('`kv_layout="NHD"`, `"HND"`', '`page_layout="phd"`, `"hpd"`'),
            ArgumentRow("LSE in base 2", "natural: divide by log₂ e"),
        ),
    ),
    Table(
        "FlashInfer",
        ArgumentRow("`merge_states`", "`merge_states`"),
        ("merge_states",),
        (
            ArgumentRow("`v` (S, N, H, D)", "`outs`, N tensors or one with N as its first axis, each (..., S, D)"),
            ArgumentRow("`s` (S, N, H), in base 2", "`lses`, likewise, natural: divide by log₂ e"),
        ),
    ),
    Table(
        "DeepGEMM and FlashMLA",
        ArgumentRow("`fp8_mqa_logits`; `flash_mla_sparse_fwd`", "`indexer_logits`; `mla_attention` with `indices`"),
        ("indexer_logits", "mla_attention"),
        (
            ArgumentRow("`cu_seqlen_ks`, `cu_seqlen_ke`", "`row_starts`, `row_ends`"),
            ArgumentRow("`kv`, numbers and scales", "`k`, `k_scale`"),
            ArgumentRow("`context_lens`", "`seqlens_k`"),
            ArgumentRow("`clean_logits`", "not needed: keys that a row does not see are −inf"),
            ArgumentRow("`indices_in_kvcache`", "`indices`"),
            ArgumentRow("`attn_sink`", "`sinks`"),
        ),
    ),
    Table(
        "xformers",
        ArgumentRow("`memory_efficient_attention` (B, S, H, D)", '`attention` with `layout="bshd"`'),
        ("attention", "varlen_attention"),
        (
            ArgumentRow("`attn_bias=LowerTriangularMask()`", '`causal="top_left"`'),
            ArgumentRow("`attn_bias=LowerTriangularFromBottomRightMask()`", "`causal=True`"),
            ArgumentRow("`attn_bias=BlockDiagonalMask…`", "`varlen_attention` with `cu_seqlens_q` and `cu_seqlens_k`"),
            ArgumentRow("`attn_bias` as a tensor", "`bias`"),
            ArgumentRow("`p`", "`dropout_p`"),
            ArgumentRow("`scale`", "the same"),
        ),
    ),
)


F = TypeVar("F", bound=Callable[..., Any])
PAGE = "docs/coming-from.md"


class _Missing:
    """A placeholder for a required argument that is not given."""

    def __repr__(self) -> str:
        return "missing"


MISSING: Any = _Missing()
OPERATIONS: dict[str, Callable[..., Any]] = {}  # the public functions by name
_signatures: dict[str, tuple[str, ...]] = {}
_by_keyword: dict[str, tuple[str, ...]] = {}
_required: dict[str, dict[str, tuple[str, ...]]] = {}  # by operation, and by Python's name of their kind


def register(function: F) -> F:
    """Give a public operation defaults for its required arguments, and a signature that does not show them."""
    signature = inspect.signature(function)
    hidden = [p.name for p in signature.parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    shown = [p for p in signature.parameters.values() if p.name not in hidden]
    required = [p for p in shown if p.default is p.empty]
    positional = tuple(p.name for p in required if p.kind is not p.KEYWORD_ONLY)
    keyword = tuple(p.name for p in required if p.kind is p.KEYWORD_ONLY)
    changed: Any = function
    changed.__defaults__ = (MISSING,) * len(positional) + (function.__defaults__ or ())
    changed.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **dict.fromkeys(keyword, MISSING)}
    changed.__signature__ = signature.replace(parameters=shown)
    for name in hidden:
        changed.__annotations__.pop(name, None)
    OPERATIONS[function.__name__] = function
    _signatures[function.__name__] = tuple(p.name for p in shown)
    _by_keyword[function.__name__] = tuple(p.name for p in shown if p.kind is p.KEYWORD_ONLY)
    _required[function.__name__] = {"positional": positional, "keyword-only": keyword}
    return function


def require(op: str, given: Mapping[str, Any]) -> None:
    """Raise TypeError, in Python's words, if a required argument is missing."""
    if not any(value is MISSING for value in given.values()):
        return
    for kind, required in _required[op].items():
        names = [name for name in required if given[name] is MISSING]
        if names:
            plural = "s" if len(names) > 1 else ""
            raise TypeError(f"{op}() missing {len(names)} required {kind} argument{plural}: {_listed(names)}")


class ShortTraceback:
    """A block whose errors about the caller's arguments show no frame below the block's own line.

    Other errors keep all frames: they may be faults of portattn. Dynamo traces no such block, so an operation enters it
    only if its call is neither cached nor traced."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if frames is not None and (
            isinstance(error, (ArgumentError, SettingError, TracingError)) or _ends_in_require(frames)
        ):
            frames.tb_next = None


short_traceback = ShortTraceback()


def _ends_in_require(frames: TracebackType) -> bool:
    while frames.tb_next is not None:
        frames = frames.tb_next
    return frames.tb_frame.f_code is require.__code__


def _listed(names: list[str]) -> str:
    *most, last = map(repr, names)
    return f"{', '.join(most)}{',' * (len(most) > 1)} and {last}" if most else last


def names_of(op: str) -> tuple[str, ...]:
    return _signatures[op]


def keywords_of(op: str) -> tuple[str, ...]:
    return _by_keyword[op]


def positional_of(op: str) -> tuple[str, ...]:
    return tuple(name for name in _signatures[op] if name not in _by_keyword[op])


def unknown_argument(op: str, names: Iterable[str], more: tuple[str, ...] = ()) -> UnknownArgument:
    """Return the error about keywords that an operation does not have.

    Args:
        more: arguments that are accepted beside the operation's own (`out` of a handle's run)
    """
    if torch.compiler.is_dynamo_compiling():  # it cannot trace the lines below
        left_out["unknown"](op, list(names), more)
    for module in ("ops", "merge_states"):  # each operation of them is known then, whatever was imported before
        importlib.import_module(f"portattn.api.{module}")
    first, *others = names
    hints: dict[str, list[str]] = {}
    for name in (first, *others):
        hints.setdefault(_hint(op, name, more), []).append(name)
    (hint, (_, *same)), *rest = hints.items()
    text = (f"{''.join(f', {name!r}' for name in same[:-1])} or {same[-1]!r}" if same else "") + hint
    text += "".join(f". Nor has it {', '.join(map(repr, several))}{about}" for about, several in rest)
    return UnknownArgument(op, first, text)


def _raise(op: str, names: Iterable[str], more: tuple[str, ...]) -> NoReturn:
    raise unknown_argument(op, names, more)


leave_out("unknown", _raise, "portattn's operation has no such argument: call it eagerly to see which is meant")


def _hint(op: str, name: str, more: tuple[str, ...]) -> str:
    """Return the text after "OP has no argument NAME": punctuation first, no full stop."""
    own = (*_signatures[op], *more)
    sides = [_other_operations(op, name), _from_other_libraries(op, name)]
    if not any(sides):
        close = _nearest(name, own)
        sides = [f"did you mean {close}?" if close else f"it takes {', '.join(own)}"]
    return ": " + "; ".join(filter(None, sides))


def _other_operations(op: str, name: str) -> str:
    if name in ("out", "lse"):  # of every operation's handle
        return f"a handle's run takes it: portattn.prepare({op!r}, ...).run(..., {name}={name})"
    having = [other for other in _known() if name in _signatures[other]]
    return f"it is an argument of {', '.join(having)}" if having else ""


def _known() -> list[str]:
    return [*(op for op in PUBLIC if op in _signatures), *(op for op in _signatures if op not in PUBLIC)]


def _from_other_libraries(op: str, name: str) -> str:
    own = _signatures[op]
    found = [(table, row) for table in TABLES for row in table.rows if name in row.names]
    # The meaning in libraries that have this operation; else in any library.
    found = [(t, r) for t, r in found if op in t.ops] or found
    # A name that is the same here is unknown only to operations without it: _other_operations names the others.
    found = [(t, r) for t, r in found if not r.ours.startswith("the same")]
    if not found:
        return ""
    libraries = dict.fromkeys(table.library.partition(":")[0] for table, _ in found)
    text = f"from {' and '.join(libraries)}: {'; '.join(dict.fromkeys(str(row) for _, row in found))}"
    arguments = dict.fromkeys(name for _, row in found for name in row.arguments if name not in _signatures)
    known = [one for one in arguments if one in own]
    if not known and arguments:
        owners: dict[str, list[str]] = {}
        for one in arguments:
            has = (other for other in _known() if one in _signatures[other])
            owners.setdefault(", ".join(has), []).append(one)
        for having, several in owners.items():
            are = "are arguments" if len(several) > 1 else "is an argument"
            text += f"; {' and '.join(several)} {are} of {having}, not of {op}" if having else ""
    elif not arguments and (longer := _longer(name, own)):
        text += f"; or did you mean {longer[0]}?"
    return f"{text} ({PAGE})"


def _nearest(name: str, own: tuple[str, ...]) -> str:
    close = _longer(name, own) or difflib.get_close_matches(name, own, n=1, cutoff=0.6)
    return close[0] if close else ""


def _longer(name: str, own: tuple[str, ...]) -> list[str]:
    return [one for one in own if one.startswith(f"{name}_") or one.endswith(f"_{name}")]


# Values that only these arguments have.
_WORDS = {"bhsd": "layout", "bshd": "layout", "phd": "page_layout", "hpd": "page_layout"}
_WORDS |= {"bottom_right": "causal", "top_left": "causal"}


def wrong_arguments(op: str, excess: Sequence[Any], unknown: Mapping[str, Any]) -> TypeError:
    """Return the error about keywords that an operation does not have, or values beyond its positional arguments."""
    return unknown_argument(op, unknown) if unknown else _too_many(op, excess)


def _too_many(op: str, excess: Sequence[Any]) -> TypeError:
    names = positional_of(op)
    text = (
        f"{op}() takes {len(names)} arguments by position ({', '.join(names)}), "
        f"but {len(names) + len(excess)} were given"
    )
    keywords = keywords_of(op)
    if keywords:
        meant = next((f"{name}={_shown(value)}" for value in excess if (name := _meant(value, keywords))), "")
        text += "; all others are given by name" + (f": did you mean {meant}?" if meant else f", from {keywords[0]} on")
    return TypeError(text)


def _meant(value: Any, keywords: Sequence[str]) -> str:
    """Return the first keyword argument that takes such a value, or "", as for None, False and 0, which say nothing."""
    return next((name for name in _takers(value) if name in keywords), "")


def _takers(value: Any) -> tuple[str, ...]:
    if isinstance(value, torch.Tensor):
        if value.dtype is torch.bool:
            return ("mask",)
        if value.is_floating_point():
            return ("bias", "log_weights", "alibi_slopes") if value.ndim > 1 else ("alibi_slopes",)
        return ("page_table", "seqlens_k", "cu_seqlens_q") if value.ndim > 1 else ("seqlens_k", "cu_seqlens_q")
    if value is None or value is False or value == 0:
        return ()
    if isinstance(value, bool):
        return ("causal", "return_lse")
    if isinstance(value, (int, float)):
        return ("scale",)
    if isinstance(value, str):
        return (_WORDS.get(value, "backend"),)
    return ("window",) if isinstance(value, (tuple, list)) else ()


def _shown(value: Any) -> str:
    return "..." if isinstance(value, torch.Tensor) else repr(value)
