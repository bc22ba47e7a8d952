"""AMD's AITER (distribution amd-aiter) as a vendor path: dense and packed attention, pages, latent decode.

Never run on a chip here. aiter.toml has each function's signatures by release; an installed function with another one
is refused. Planning reads the installed file's text: `aiter` is imported by the first call. Semantics from AITER's
source, 0.1.1 to 0.1.20.post1: aiter/ops/mha.py, aiter/mla.py, aiter/ops/triton/attention/unified_attention.py.

Keys that no query attends may hold NaN, which a masked product spreads: problems that leave such keys in a tile of
AITER's are refused, or the keys are left out."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from portattn.planning.backend import (
    Check,
    VendorPath,
    dropout_check,
    features_check,
    first_refusal,
    op_check,
    splits_check,
)

if TYPE_CHECKING:
    import torch

    from portattn.schema.call import Call
    from portattn.schema.plan import Rejection
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target

DISTRIBUTIONS = ("amd-aiter", "aiter")  # the second name is of releases up to 0.1.6, and of another project
ARCHES = ("gfx942", "gfx950")
DTYPES = ("fp16", "bf16")
MAX_HEAD_DIM = 256
UNEQUAL_HEAD_DIMS = ((192, 128),)  # (head_dim, head_dim_v)
# unified_attention masks a tile only if it is not as long as a page. Tiles have up to 64 keys from this release on, and
# were as long as any page before: unused places of a sequence's last page were multiplied by 0 (seen in the AMD model).
TILES_OF_64_SINCE = (0, 1, 12)
TILE_KEYS = 64
LATENT_HEAD_DIMS = (576, 512)
LATENT_HEADS = (16, 128)  # that AITER's own tests run in bf16

FUNCTIONS = {
    "attention": "flash_attn_func", "varlen_attention": "flash_attn_varlen_func",
    "paged_attention": "unified_attention", "mla_attention": "mla_decode_fwd",
}  # fmt: skip
_FEATURES = {
    "flash_attn_func": ("window", "alibi_slopes"),
    "flash_attn_varlen_func": ("alibi_slopes", "softcap"),
    "unified_attention": ("sinks",),
    "mla_decode_fwd": (),
}
SOFTCAP_SINCE = (0, 1, 8)  # assembly kernels ran in place of CK's with a softcap up to 0.1.7.post2 (aiter PR #1519)
MAX_ALIBI_KEYS = 65536  # CK's distances have 16 bits (v_sad_u16)


class RecordedSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A function's parameters in some releases, as Python's text."""

    function: str
    file: str
    releases: tuple[str, ...]
    parameters: str

    @property
    def names(self) -> tuple[str, ...]:
        return names_of(self.parameters)


class Installation(NamedTuple):
    """An AITER that Python finds: its version, and the text of each function's parameters by (function, file)."""

    version: str
    parameters: dict[tuple[str, str], str]

    @property
    def release(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3])


@functools.cache
def load_signatures() -> tuple[RecordedSignature, ...]:
    from portattn.schema import toml_reader

    path = Path(__file__).with_suffix(".toml")
    data, text = toml_reader.read(path)
    return toml_reader.convert(data["signature"], tuple[RecordedSignature, ...], path, text, "signature")


def names_of(parameters: str) -> tuple[str, ...]:
    function = ast.parse(f"def f({parameters}): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    return tuple(argument.arg for argument in (*function.args.args, *function.args.kwonlyargs))


@functools.cache
def find_installation() -> Installation | None:
    """Return the AITER that this Python would import, from its files alone; None without one."""
    spec = importlib.util.find_spec("aiter")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    version = next(filter(None, map(_version, DISTRIBUTIONS)), None)
    if not folders or version is None:
        return None
    found = parameters_in(Path(folders[0]))
    return Installation(version, found) if found else None


def parameters_in(folder: Path) -> dict[tuple[str, str], str]:
    """Return the text of the parameters of each recorded function in a package's folder, by (function, file)."""
    found = {}
    for function, file in dict.fromkeys((row.function, row.file) for row in load_signatures()):
        try:
            tree = ast.parse((folder / file).read_bytes())
        except (OSError, SyntaxError):  # a release without this file, or for a later Python
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == function:
                for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                    argument.annotation = None
                found[function, file] = ast.unparse(node.args)
    return found


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_name() -> str:
    found = find_installation()
    return "aiter" if found is None else f"aiter {found.version}"


def find_signature(function: str) -> tuple[RecordedSignature | None, str]:
    """Return the recorded signature of the installed function; or None and the reason that forbids a call."""
    found = find_installation()
    if found is None:
        return None, "amd-aiter is not installed"
    rows = [row for row in load_signatures() if row.function == function]
    texts = {file: text for (name, file), text in found.parameters.items() if name == function}
    for row in rows:
        if texts.get(row.file) == row.parameters:
            return row, ""
    who = _installed_name()
    if not texts:
        return None, f"{who}: it has no {function} in {' or '.join(dict.fromkeys(row.file for row in rows))}"
    release = found.version.partition("+")[0]
    expected = next((row for row in rows if release in row.releases), rows[-1])
    has, wants = names_of(next(iter(texts.values()))), expected.names
    lacks, more = [n for n in wants if n not in has], [n for n in has if n not in wants]
    words = [f"has no parameter {', '.join(lacks)}"] if lacks else []
    words += [f"has a parameter {', '.join(more)} that no recorded release has there"] if more else []
    words = words or ["has its parameters in another order, or with other defaults"]
    return None, f"{who}: {function} {' and '.join(words)} (recorded: {expected.releases[-1]})"


class AiterPath(VendorPath):
    """AITER's functions for MI300 and MI350: see FUNCTIONS. LSE is natural; causal masks are bottom-right."""

    name = "aiter"
    ops = tuple(FUNCTIONS)
    takes = frozenset(
        {
            "causal", "causal_top_left", "window", "softcap", "alibi_slopes", "sinks", "return_lse", "needs_grad",
            "deterministic", "gqa", "head_dim_v", "seqlens_k", "packed",
        }
    )  # fmt: skip

    def rejects(self, problem: Problem, target: Target) -> Rejection | None:
        p = problem
        known = op_check("AITER", p, self.ops, f"is called for {', '.join(self.ops)}")
        if known[0]:
            return first_refusal(self.name, known)
        function = FUNCTIONS[p.op]
        signature, lacks = find_signature(function)
        hint = "backend='reference'"
        return first_refusal(
            self.name,
            (
                target.arch.name not in ARCHES,
                f"arch is {target.arch.name}, and AITER is called on {', '.join(ARCHES)}",
                hint,
            ),
            (p.dtype not in DTYPES, f"dtype is {p.dtype}, and {function} takes {' and '.join(DTYPES)}", hint),
            (
                p.kv_format != "as_q",
                f"kv_format is {p.kv_format}, and {function} is called without quantised tensors",
                hint,
            ),
            (p.large, "a tensor spans 2 GiB or more, and AITER's kernels were not read for that", hint),
            *_feature_checks(function, p),
            features_check(function, p, "is called without", _FEATURES[function]),
            dropout_check(function, p),
            splits_check(function, p),
            (
                p.padded and not (p.page_size and p.seqlens_k),
                f"per-sequence lengths or padding given, and {function} takes none",
                "varlen_attention for packed sequences, or backend='reference'",
            ),
            *_mask_checks(function, p),
            *_training_checks(function, p),
            *(_latent_checks(p, signature) if p.op == "mla_attention" else _width_checks(function, p)),
            *(_page_checks(function, p) if p.op == "paged_attention" else ()),
            (bool(lacks), lacks, "install an amd-aiter of backends/rocm/aiter.toml"),
        )

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run AITER's function; it pads heads to multiples of 8 by copies, and a latent cache's queries are copied."""
        signature, lacks = find_signature(FUNCTIONS[call.problem.op])
        if signature is None:
            raise RuntimeError(lacks)
        module = importlib.import_module("aiter." + signature.file.removesuffix(".py").replace("/", "."))
        return _RUNS[call.problem.op](getattr(module, signature.function), call)


def _feature_checks(function: str, p: Problem) -> tuple[Check, ...]:
    flash = function in ("flash_attn_func", "flash_attn_varlen_func")
    alibi, found, hint = flash and p.alibi_slopes, find_installation(), "backend='reference'"
    without_softcap = function == "flash_attn_varlen_func" and found is not None and found.release < SOFTCAP_SINCE
    # CK's AlibiMode::VERTICAL adds slope * key, whatever the row. Seen on gfx950: other outputs, and a memory fault for
    # packed sequences (amd-nprotaso/FlyDSL at 7df9a99, kernels/attention/verify_flash_attn_alibi.py).
    reasons = (
        (flash and p.sinks, f"sinks asked for, and {function} drops them in its assembly kernels and where seq_q is 1"),
        (
            function == "unified_attention" and p.softcap,
            f"softcap asked for, and {function} computes exp(score / softcap), which overflows to NaN above 88",
        ),
        (p.softcap and without_softcap, f"{_installed_name()}: {function} may drop softcap before 0.1.8"),
        (
            alibi and p.causal != "none",
            f"alibi_slopes asked for with causal {p.causal}, and {function} was reported wrong for them on gfx950",
        ),
        (
            alibi and p.return_lse,
            f"return_lse is True with alibi_slopes, and {function} may leave a row's position out of its LSE",
        ),
        (
            alibi and max(p.seq_q, p.seq_k) > MAX_ALIBI_KEYS,
            f"seq_q is {p.seq_q} and seq_k {p.seq_k} with alibi_slopes, and {function} takes up to {MAX_ALIBI_KEYS}",
        ),
    )
    return tuple((holds, reason, hint) for holds, reason in reasons)


def _mask_checks(function: str, p: Problem) -> tuple[Check, ...]:
    only_causal = function in ("unified_attention", "mla_decode_fwd")
    sees_all = p.seq_q == 1  # of a bottom-right mask
    return (
        (
            p.causal == "top_left" and not (p.op == "attention" and p.seq_q == p.seq_k),
            f"causal is top_left with seq_q {p.seq_q} and seq_k {p.seq_k}, and {function} aligns at the bottom right",
            "backend='reference'",
        ),
        (
            only_causal and p.causal == "none" and not sees_all,
            f"causal is none with seq_q {p.seq_q}, and {function} is causal",
            "causal=True, or backend='reference'",
        ),
        (
            max(p.window_left, p.window_right) <= 0 and (p.window_left, p.window_right) != (-1, -1),
            f"window is ({p.window_left}, {p.window_right}), and AITER tells a window by a side above 0",
            "backend='reference'",
        ),
        (
            p.op == "attention"
            and p.seq_q > p.seq_k
            and (p.window_left >= 0 or p.window_right >= 0 or (p.causal != "none" and p.return_lse)),
            f"seq_q is {p.seq_q} over seq_k {p.seq_k}, and {function}'s results for rows without a key are not "
            "documented with a window or for the LSE",
            "drop those rows, or backend='reference'",
        ),
        (
            0 in (p.batch, p.heads_q, p.seq_q, p.seq_k, p.total_q, p.total_k),
            "a size is 0, and AITER's kernels are not defined for empty tensors",
            "backend='reference' gives zeros",
        ),
    )


def _training_checks(function: str, p: Problem) -> tuple[Check, ...]:
    without = [name for name in ("return_lse", "alibi_slopes", "softcap") if getattr(p, name)]
    return (
        (
            p.needs_grad and function not in ("flash_attn_func", "flash_attn_varlen_func"),
            f"gradients are asked for, and {function} is for inference",
            "call it under torch.no_grad()",
        ),
        (
            p.needs_grad and bool(without),
            f"gradients are asked for with {', '.join(without)}, and {function}'s backward pass passes over it",
            "backend='reference'",
        ),
    )


def _width_checks(function: str, p: Problem) -> tuple[Check, ...]:
    pair, widest = (p.head_dim, p.head_dim_v), max(p.head_dim, p.head_dim_v)
    unequal = UNEQUAL_HEAD_DIMS if p.op != "paged_attention" else ()
    return (
        (
            widest > MAX_HEAD_DIM,
            f"head_dim is {widest}, and {function} takes up to {MAX_HEAD_DIM}",
            "backend='reference'",
        ),
        (
            pair[0] != pair[1] and pair not in unequal,
            f"head_dim_v is {p.head_dim_v} with head_dim {p.head_dim}, and {function} takes "
            f"{', '.join(f'{q} with {v}' for q, v in unequal) or 'keys and values of one width'}",
            "backend='reference'",
        ),
    )


def _page_checks(function: str, p: Problem) -> tuple[Check, ...]:
    found = find_installation()
    return (
        (
            p.page_size <= TILE_KEYS or p.page_size & (p.page_size - 1) != 0,
            f"page_size is {p.page_size}, and {function} masks its tiles of {TILE_KEYS} keys only in pages of 128, "
            "256, …: NaN in unused places of another page would spread",
            "backend='reference'",
        ),
        (
            found is not None and found.release < TILES_OF_64_SINCE,
            f"{_installed_name()}: {function} masks no tiles before {'.'.join(map(str, TILES_OF_64_SINCE))}",
            "a later amd-aiter",
        ),
        (p.return_lse, f"return_lse is True, and {function} returns no LSE", "return_lse=False"),
    )


def _latent_checks(p: Problem, signature: RecordedSignature | None) -> tuple[Check, ...]:
    return (
        (
            (p.head_dim, p.head_dim_v) != LATENT_HEAD_DIMS,
            f"head_dim is {p.head_dim} and head_dim_v {p.head_dim_v}, and mla_decode_fwd takes 576 and 512",
            "backend='reference'",
        ),
        (p.dtype != "bf16", f"dtype is {p.dtype}, and mla_decode_fwd is called for bf16", "backend='reference'"),
        (
            p.heads_q not in LATENT_HEADS,
            f"heads_q is {p.heads_q}, and mla_decode_fwd takes {' or '.join(map(str, LATENT_HEADS))}",
            "backend='reference'",
        ),
        (p.seq_q > 1, f"seq_q is {p.seq_q}, and mla_decode_fwd is called for one query", "backend='reference'"),
        (p.has_lists, "indices are given, and mla_decode_fwd is called without", "backend='reference'"),
        (
            p.page_size > 1,
            f"page_size is {p.page_size}, and mla_decode_fwd is called for pages of one token: what it reads beyond a "
            "sequence's end in a longer page is not documented",
            "backend='reference'",
        ),
        # Releases without this parameter return the LSE's memory unwritten.
        (
            p.return_lse and signature is not None and "page_size" not in signature.names,
            f"return_lse is True, and {_installed_name()}: mla_decode_fwd writes no LSE",
            "return_lse=False, or a later amd-aiter",
        ),
    )


def _dense(attend: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    p = call.problem
    q, k, v = (tensor.transpose(1, 2) for tensor in (call.q, call.k, call.v))
    if p.window_left >= 0:  # without the keys before the first row's window
        k, v = (tensor[:, max(p.seq_k - p.seq_q - p.window_left, 0) :] for tensor in (k, v))
    result = attend(q, k, v, deterministic=p.deterministic, **_flash_arguments(call))
    out, lse = result if isinstance(result, tuple) else (result, None)
    return out.transpose(1, 2), lse if p.return_lse else None


def _packed(attend: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    p = call.problem
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (call.q, call.k, call.v))
    assert call.cu_seqlens_q is not None
    assert call.cu_seqlens_k is not None
    given = _flash_arguments(call) | ({"logits_soft_cap": call.softcap} if p.softcap else {})
    result = attend(
        q, k, v, call.cu_seqlens_q, call.cu_seqlens_k, p.seq_q, p.seq_k, deterministic=p.deterministic, **given
    )
    out, lse = result if isinstance(result, tuple) else (result, None)
    lengths = call.cu_seqlens_k.diff()
    out, lse = _cleared(call, out, lse, call.cu_seqlens_q, lengths)  # lse (Hq, Tq)
    return out.transpose(0, 1)[None], lse[None] if lse is not None and p.return_lse else None


def _paged(attend: Callable[..., Any], call: Call) -> tuple[torch.Tensor, None]:
    import torch

    p = call.problem
    assert call.page_table is not None
    assert call.seqlens_k is not None
    q, starts = _token_rows(call, call.q)
    out = torch.empty_like(q)
    attend(
        q, call.k.transpose(1, 2), call.v.transpose(1, 2), out, starts, p.seq_q, call.seqlens_k, p.seq_k, call.scale,
        causal=True, window_size=(-1, -1), block_table=call.page_table, softcap=0.0, q_descale=None,
        k_descale=None, v_descale=None, sinks=call.sinks,
    )  # fmt: skip
    out, _ = _cleared(call, out, None, starts, call.seqlens_k)
    return _as_called(call, out), None


def _latent(attend: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    import torch

    p = call.problem
    assert call.page_table is not None
    assert call.seqlens_k is not None
    assert call.q_rope is not None
    q, starts = _token_rows(call, torch.cat([call.q, call.q_rope], dim=-1))
    ends = torch.nn.functional.pad(call.seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))
    # The slots of all sequences in one line, without asking the device how many: what is left over is not read.
    place, last = _rows(call, 0, call.page_table.shape[1]), call.page_table.numel()
    ids = call.page_table.new_zeros(last + 1)
    ids[torch.where(place < call.seqlens_k[:, None], ends[:-1, None] + place, last)] = call.page_table
    out = q.new_empty(*q.shape[:2], p.head_dim_v)
    given = {"return_lse": True} if p.return_lse else {}
    _, lse = attend(
        q, call.k.transpose(1, 2), out, starts, ends, ids[:-1], torch.ones_like(call.seqlens_k), 1,
        sm_scale=call.scale, **given,
    )  # fmt: skip
    out, lse = _cleared(call, out, lse.T if p.return_lse else None, starts, call.seqlens_k)
    if lse is not None:
        lse = lse[None] if p.packed else lse.T.reshape(p.batch, p.seq_q, p.heads_q).transpose(1, 2)
    return _as_called(call, out), lse


_RUNS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor | None]]] = {
    "attention": _dense, "varlen_attention": _packed, "paged_attention": _paged, "mla_attention": _latent,
}  # fmt: skip


def _flash_arguments(call: Call) -> dict[str, Any]:
    """Return the arguments that both flash functions share; training needs the LSE."""
    p = call.problem
    given: dict[str, Any] = {
        "softmax_scale": call.scale, "causal": p.causal != "none", "return_lse": p.return_lse or p.needs_grad,
        # Two sides: a third one, of releases from 0.1.8, counts leading keys that every row sees.
        "window_size": (p.window_left, p.window_right),
    }  # fmt: skip
    if call.alibi_slopes is not None:
        given["alibi_slopes"] = call.alibi_slopes.contiguous()
    return given


def _rows(call: Call, first: int, last: int) -> torch.Tensor:
    import torch

    return torch.arange(first, last, device=call.q.device)


def _token_rows(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries as (Tq, Hq, D), and the beginnings of the sequences."""
    import torch

    p = call.problem
    if call.cu_seqlens_q is not None:
        return q[0].transpose(0, 1).contiguous(), call.cu_seqlens_q
    starts = torch.arange(0, p.batch * p.seq_q + 1, p.seq_q, dtype=torch.int32, device=q.device)
    return q.transpose(1, 2).reshape(-1, *q.shape[1::2]), starts


def _as_called(call: Call, out: torch.Tensor) -> torch.Tensor:
    p = call.problem
    batch, rows = p.query_rows
    return out.reshape(batch, rows, p.heads_q, p.head_dim_v).transpose(1, 2)


def _cleared(
    call: Call, out: torch.Tensor, lse: torch.Tensor | None, starts: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out (Tq, Hq, Dv) with 0, and LSE (Hq, Tq) with -inf, in rows without a key to attend."""
    import torch

    rows = _rows(call, 0, out.shape[0])
    sequence = torch.bucketize(rows, starts[1:], right=True).clamp(max=len(lengths) - 1)
    keys = lengths[sequence]
    idle = (rows < starts[0]) | (rows >= starts[-1]) | (keys <= 0)
    if call.problem.causal == "bottom_right":
        idle = idle | (rows - starts[sequence + 1] + keys < 0)
    out = out.masked_fill(idle[:, None, None], 0.0)
    return out, None if lse is None else lse.masked_fill(idle, -math.inf)
