"""torch's flex_attention and create_block_mask by portattn: names, arguments and results of
torch.nn.attention.flex_attention, whose BlockMask and combiners of masks are used as they are.

Errors have torch's types: ArgumentError is a ValueError, FlexArgumentError is a NotImplementedError too.
"""

from __future__ import annotations

import re
import types
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.attention import flex_attention as _torchs
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask, noop_mask, or_masks

from portattn.api import ops
from portattn.api.autocast import is_on
from portattn.api.masks import made_lists
from portattn.api.score_functions import cached_trace
from portattn.api.signatures import request_of
from portattn.api.transform_checks import leave_out, left_out
from portattn.errors import ArgumentError
from portattn.kernels.score_program import fits
from portattn.reference.blockwise import largest_scores
from portattn.reference.score_functions import WHOLE, block_marks
from portattn.schema.ops import CAPTURED
from portattn.validate.checks import check_size
from portattn.validate.dense import without_layout

__all__ = [
    "AuxOutput", "AuxRequest", "BlockMask", "FlexArgumentError", "and_masks", "create_block_mask", "create_mask",
    "flex_attention", "noop_mask", "or_masks", "register_in_transformers",
]  # fmt: skip

# torch's types and constants that code annotates its functions with.
_OF_TORCH = ("FlexKernelOptions", "_DEFAULT_SPARSE_BLOCK_SIZE", "_mask_mod_signature", "_score_mod_signature")
WHO = "flex_attention"
_NAMES = {"q": "query", "k": "key", "v": "value"}


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        return getattr(_torchs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class FlexArgumentError(ArgumentError, NotImplementedError):
    """An argument that torch's flex_attention refuses by a RuntimeError or a NotImplementedError.

    Examples:
        >>> from portattn.integrations.flex_attention import FlexArgumentError
        >>> issubclass(FlexArgumentError, NotImplementedError)
        True
    """


if hasattr(_torchs, "AuxRequest"):
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
else:  # before torch 2.9
    AuxRequest = namedtuple("AuxRequest", "lse max_scores", defaults=(False, False))  # type: ignore[no-redef]
    AuxOutput = namedtuple("AuxOutput", "lse max_scores", defaults=(None, None))  # type: ignore[no-redef]


# torch's documented options that decide how its own kernels are tiled, and no result: portattn's plan has its own.
_HINTS = frozenset({
    "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "PRESCALE_QK",
    "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack",
    "matrix_instr_nonkdim", "waves_per_eu",
})  # fmt: skip
# BACKEND: portattn's path. No path of portattn's calls the library that "FLASH" names.
_PATHS = {"AUTO": None, "TRITON": "triton", "TRITON_DECODE": "triton"}


def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Callable[..., torch.Tensor] | None = None,
    block_mask: BlockMask | None = None, scale: float | None = None, enable_gqa: bool = False, return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None, *, return_aux: AuxRequest | None = None,
) -> Any:  # fmt: skip
    """Run torch's flex_attention, argument for argument, by `portattn.attention`, compiled or not.

    query, key, value and the tensors that score_mod reads can have gradients on every device. The result has query's
    memory order.

    Args:
        query: (B, Hq, L, E); float16, bfloat16 or float32
        key, value: (B or 1, Hkv, S, E) and (B or 1, Hkv, S, Ev), of query's dtype or a narrower one, which is cast. A
            batch of 1 is every sequence's, if block_mask has B
        score_mod: function (score, b, h, q_idx, kv_idx) -> score, as of `portattn.attention`
        block_mask: blocks of keys and their mask_mod, made for L and S; in whole blocks of its full lists mask_mod is
            not called
        scale: factor on the scores; None for 1/√E
        enable_gqa: Hq may be a multiple of Hkv
        return_lse: also return the LSE (torch's older form of return_aux)
        kernel_options: torch's names, with fwd_ or bwd_ before them or without. BACKEND "TRITON" or "TRITON_DECODE"
            names the path "triton"; the others tile torch's kernels, and change nothing
        return_aux: AuxRequest(lse, max_scores): the further results. max_scores have no gradient, and torch operations
            compute them

    Returns:
        out (B, Hq, L, Ev) in query's dtype; with return_lse (out, lse); with return_aux (out, AuxOutput). lse and
        max_scores are float32 (B, Hq, L): the natural log of each row's sum of exponentials, and its largest score.
        Both are -inf for a row without keys, and out is 0.

    Raises:
        ArgumentError: A shape, dtype, device or option is wrong; torch raises ValueError.
        FlexArgumentError: torch raises NotImplementedError or RuntimeError.
        PathUnavailable: No kernel runs the call, and kernel_options name one.

    Examples:
        >>> import torch
        >>> from portattn.integrations.flex_attention import create_block_mask, flex_attention
        >>> q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
        >>> causal = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, device="cpu")
        >>> out = flex_attention(q, k, v, score_mod=lambda s, b, h, q_idx, kv_idx: 2 * s, block_mask=causal)
        >>> right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=2 / 32**0.5)
        >>> torch.allclose(out, right, atol=1e-5)
        True
    """
    _check(query, key, value, block_mask, enable_gqa)
    if return_lse and return_aux is not None:
        raise ArgumentError(WHO, "return_lse", return_lse, "must not go with return_aux, which has an lse of its own")
    if not isinstance(return_aux, (AuxRequest, types.NoneType)):
        raise ArgumentError(WHO, "return_aux", type(return_aux).__name__, "must be an AuxRequest or None")
    backend = _path(kernel_options)
    batch = query.shape[0]
    k, v = key, value
    if not (key.shape[0] == value.shape[0] == batch and key.dtype == value.dtype == query.dtype):
        k, v = (t.to(query.dtype).expand(batch, *t.shape[1:]) for t in (key, value))
    mask_mod: Any = None
    if isinstance(block_mask, BlockMask) and _is_one_block(block_mask):
        mask_mod = None if block_mask.mask_mod is noop_mask else block_mask.mask_mod
        block_mask = None
    aux = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    # Results have query's memory order, as torch's.
    bshd = query.stride(2) > query.stride(1)
    turn = (lambda t: t.transpose(1, 2)) if bshd else (lambda t: t)
    arguments: dict[str, Any] = {
        "scale": scale, "score_mod": score_mod, "block_mask": block_mask, "mask_mod": mask_mod,
        "layout": "bshd" if bshd else "bhsd",
    }  # fmt: skip
    try:
        found = ops.attention(turn(query), turn(k), turn(v), return_lse=aux.lse, backend=backend, **arguments)
    except ArgumentError as error:
        if torch.compiler.is_dynamo_compiling():  # it shows the first error alone
            raise
        raise _in_torchs_names(error) from None
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = turn(out)
    if return_aux is None:
        return (out, lse) if return_lse else out
    largest = None
    if aux.max_scores:
        largest = left_out["largest scores"](turn(query), turn(k), **arguments)
    return out, AuxOutput(lse=lse, max_scores=largest)


def _in_torchs_names(error: ArgumentError) -> ArgumentError:
    def named(text: str) -> str:
        return re.sub(r"\b[qkv]\b", lambda found: _NAMES[found[0]], text)

    limit = without_layout(error.limit, ("q", "k", "v"))
    return ArgumentError(WHO, named(error.argument), error.value, named(limit))


def _check(query: Any, key: Any, value: Any, block_mask: Any, enable_gqa: bool) -> None:
    """Raise the errors of torch's that portattn.attention raises not at all, or as another type."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(WHO, name, type(tensor).__name__, "must be a torch.Tensor")
        if tensor.is_nested:
            raise FlexArgumentError(
                WHO, name, "a nested tensor", "must be dense (hint: portattn.attention takes jagged)"
            )
        if tensor.ndim != 4:
            kind = ArgumentError if tensor.ndim < 2 else FlexArgumentError
            raise kind(WHO, f"{name}.ndim", tensor.ndim, "must be 4: (B, H, S, D)")
        wider = tensor.dtype != query.dtype and tensor.dtype.itemsize >= query.dtype.itemsize
        if wider and not is_on(query):  # autocast gives all of them its own
            raise ArgumentError(
                WHO, f"{name}.dtype", tensor.dtype, f"must be query's, {query.dtype}, or a narrower one"
            )
    if not enable_gqa and query.shape[1] != key.shape[1]:
        limit = f"must be query's, {query.shape[1]} (hint: enable_gqa=True)"
        raise ArgumentError(WHO, "key's heads", key.shape[1], limit)
    batch, own = query.shape[0], key.shape[0]
    if batch != own and (not isinstance(block_mask, BlockMask) or block_mask.kv_num_blocks.shape[0] != batch):
        raise ArgumentError(
            WHO, "key's batch", own, f"must be query's, {batch}, unless it is 1 and block_mask has {batch}"
        )
    if own not in (1, batch):
        raise FlexArgumentError(WHO, "key's batch", own, f"must be 1 or query's, {batch}")
    if not isinstance(block_mask, BlockMask):  # portattn.attention says what it must be
        return
    if block_mask.mask_mod is getattr(_torchs, "_sliced_mask_mod_error", block_mask):
        limit = "must be set anew after block_mask[...], from the whole mask's mask_mod"
        raise FlexArgumentError(WHO, "block_mask.mask_mod", "that of a sliced BlockMask", limit)
    wanted = query.shape[2], key.shape[2]
    if tuple(block_mask.seq_lengths) != wanted and not _is_one_block(block_mask):
        limit = f"must be query's and key's, {wanted}: make a mask for these, or crop it by block_mask._adjust()"
        raise ArgumentError(WHO, "block_mask's lengths", tuple(block_mask.shape[-2:]), limit)
    if block_mask.kv_num_blocks.device != query.device:
        own = str(block_mask.kv_num_blocks.device)
        raise FlexArgumentError(WHO, "block_mask's device", own, f"must be query's, {query.device}")


def _is_one_block(block_mask: BlockMask) -> bool:
    """Return whether a BlockMask is one block for everything, of any length."""
    return set(block_mask.BLOCK_SIZE) == {_torchs._LARGE_SPARSE_BLOCK_SIZE}


def _path(options: Mapping[str, Any] | None) -> str | None:
    """Return the path that kernel_options name, or None."""
    if options is None:
        return None
    if not isinstance(options, Mapping):
        raise ArgumentError(WHO, "kernel_options", type(options).__name__, "must be a dict or None")
    given = dict(options)
    for name in given:
        if str(name).removeprefix("fwd_").removeprefix("bwd_") not in (*_HINTS, "BACKEND"):
            limit = f"must be one of BACKEND, {', '.join(sorted(_HINTS))}"
            raise ArgumentError(WHO, "kernel_options' name", name, limit)
    backend = given.get("BACKEND", "AUTO")
    if "BACKEND" in given and given.get("FORCE_USE_FLEX_ATTENTION"):
        raise FlexArgumentError(WHO, "FORCE_USE_FLEX_ATTENTION", True, "must not go with BACKEND, which replaces it")
    if backend == "FLASH":
        raise FlexArgumentError(
            WHO, "BACKEND", backend, f"must be one of {', '.join(_PATHS)}: portattn does not call it"
        )
    if backend not in _PATHS:
        raise ArgumentError(WHO, "BACKEND", backend, f"must be one of {', '.join(_PATHS)}")
    return _PATHS[backend]


def _largest(query: torch.Tensor, key: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return largest_scores(request_of("attention", query, key, key, **arguments).build())


leave_out("largest scores", _largest, "portattn computes max_scores outside the graph")


def create_block_mask(
    mask_mod: Callable[..., torch.Tensor], B: int | None, H: int | None, Q_LEN: int, KV_LEN: int,
    device: torch.device | str | None = None, BLOCK_SIZE: int | tuple[int, int] = 128, _compile: bool = False,
    separate_full_blocks: bool = True, compute_dq_write_order: bool = False, dq_kv_order: bool = True,
) -> BlockMask:  # fmt: skip
    """Return torch's BlockMask of a mask function, without its mask of Q_LEN × KV_LEN: some rows of blocks at a time.

    A function that portattn cannot trace is torch's own create_block_mask's, and so are calls with
    compute_dq_write_order.

    Args:
        mask_mod: function (b, h, q_idx, kv_idx) -> bool, True = attend, as of `portattn.attention`
        B, H: sequences and query heads; None for 1. Lists that mask_mod has in common for them are stored once
        Q_LEN, KV_LEN: queries and keys
        device: the tensors' device; None for torch's current accelerator, or the CPU
        BLOCK_SIZE: queries and keys of a block, or one number for both
        _compile: ignored: nothing need be compiled
        separate_full_blocks: list blocks that mask_mod shows whole apart, for which it is not called again
        compute_dq_write_order, dq_kv_order: torch's own

    Returns:
        BlockMask with int32 lists (B, H, blocks of queries) and (B, H, blocks of queries, blocks of keys).

    Raises:
        ArgumentError: BLOCK_SIZE is no number above 0, or two.

    Examples:
        >>> from portattn.integrations.flex_attention import create_block_mask
        >>> window = create_block_mask(lambda b, h, q, k: (q - k).abs() < 128, None, None, 1024, 1024, device="cpu")
        >>> window.kv_num_blocks.tolist()
        [[[1, 2, 2, 2, 2, 2, 2, 1]]]
    """
    arguments = (mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE)
    if compute_dq_write_order:
        return _torchs.create_block_mask(*arguments, False, separate_full_blocks, True, dq_kv_order)
    return left_out["create_block_mask"](*arguments, separate_full_blocks)


def _create(
    mask_mod: Any, batch: int | None, heads: int | None, rows: int, keys: int, device: Any, size: Any, separate: bool
) -> BlockMask:
    block = size if isinstance(size, (tuple, list)) else (size, size)
    if len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise ArgumentError("create_block_mask", "BLOCK_SIZE", size, "must be an integer above 0, or two of them")
    sizes = {"B": batch, "H": heads, "Q_LEN": rows, "KV_LEN": keys}
    for name, number in sizes.items():
        if number is not None or name in ("Q_LEN", "KV_LEN"):
            check_size("create_block_mask", name, number)
    place = torch.device(device or torch.accelerator.current_accelerator() or "cpu")
    whole = batch or 1, heads or 1
    try:
        text, own = cached_trace("create_block_mask", "mask_mod", mask_mod)
    except ArgumentError:  # torch's errors for what is no mask_mod
        text, own = "", []
    if not text or not fits([tensor.ndim for tensor in own]):
        given = (mask_mod, *whole, rows, keys, place, tuple(block))
        return _torchs.create_block_mask(*given, separate_full_blocks=separate)
    captured = dict(zip(CAPTURED, (tensor.to(place) for tensor in own), strict=False))
    marks = block_marks(text, captured, (*whole, rows, keys), (block[0], block[1]), place)
    # Blocks over the last query or key are never full.
    marks[:, :, rows // block[0] :].clamp_(max=1)
    marks[..., keys // block[1] :].clamp_(max=1)
    counts, indices = _ordered(marks == 1 if separate else marks > 0)
    full: Any = _ordered(marks == WHOLE) if separate else (None, None)
    made = BlockMask.from_kv_blocks(
        counts, indices, full[0], full[1], BLOCK_SIZE=(block[0], block[1]), mask_mod=mask_mod, seq_lengths=(rows, keys)
    )
    for name, tensor in vars(made).items():
        if isinstance(tensor, torch.Tensor):
            setattr(made, name, tensor.expand(*whole, *tensor.shape[2:]))
    lists = [(name, each) for name, each in vars(made).items() if isinstance(each, torch.Tensor)]
    if not any(each.is_inference() for _, each in lists):  # those count no versions
        made_lists[made] = text, [(name, each, each._version) for name, each in lists]
    return made


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of True in each row of (..., R, C) bools and their places, in torch's order: False last."""
    marks = blocks.to(torch.int8)
    return marks.sum(dim=-1, dtype=torch.int32), marks.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


leave_out("create_block_mask", _create, "portattn looks which blocks mask_mod hides outside the graph")


def register_in_transformers() -> Callable[[], None]:
    """Have transformers' attn_implementation="flex_attention" call portattn's flex_attention and create_block_mask.

    Returns:
        A function that puts torch's back.

    Examples:
        >>> from portattn.integrations.flex_attention import register_in_transformers
        >>> put_back = register_in_transformers()  # now from_pretrained(..., attn_implementation="flex_attention")
        >>> put_back()
    """
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
    from transformers.integrations import flex_attention as theirs

    def attend(query: Any, key: Any, value: Any, training: bool = False, **arguments: Any) -> Any:
        return flex_attention(query, key, value, **arguments)

    forward = _calling(theirs.flex_attention_forward, compile_friendly_flex_attention=attend)
    mask = _calling(masking_utils.flex_attention_mask, create_block_mask=create_block_mask)
    interfaces = ((AttentionInterface, forward), (AttentionMaskInterface, mask))
    before = [interface._global_mapping[WHO] for interface, _ in interfaces]
    for interface, ours in interfaces:
        interface.register(WHO, ours)

    def put_back() -> None:
        for (interface, ours), own in zip(interfaces, before, strict=True):
            if interface._global_mapping[WHO] is ours:
                interface.register(WHO, own)

    return put_back


def _calling(function: Any, **names: Any) -> Any:
    """Return a copy of transformers' function that finds other functions under global names."""
    scope = function.__globals__ | names
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
