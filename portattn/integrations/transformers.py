"""portattn as an attention implementation of transformers: `register()`, then `attn_implementation="portattn"`."""

from __future__ import annotations

import functools
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from portattn.source_tree import install_extra

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "portattn.integrations.transformers needs transformers, which is not installed: "
        f"{install_extra('transformers')}"
    ) from None

from portattn.errors import ArgumentError, PortattnError
from portattn.integrations import TRANSFORMERS, check_release

try:
    check_release(TRANSFORMERS, transformers.__version__)
except PortattnError as error:
    raise ImportError(str(error)) from None

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.generation import continuous_batching

from portattn.api import ops
from portattn.api.transform_checks import leave_out, left_out
from portattn.integrations.transformers_mask import ELSEWHERE, WHO, CompactMask, check_window, compact_mask, refuse
from portattn.planning.planner import check_path
from portattn.validate import wants_gradients

# transformers runs checks of its own on names that hold these, reads "a/b" as a kernel to download, and "paged|" as a
# prefix. "eager" is taken without being in the mapping.
RESERVED = ("flash", "sdpa", "flex_attention", "eager", "/", "|")
# Arguments of attention functions that change the result, and that have no counterpart here; and the paged cache.
_SPECIAL = {
    "sinks": "sinks of each query's own are not supported; use attn_implementation='eager'",
    "block_indices": "sparse attention is not supported here; use attn_implementation='eager'",
    "output_attentions": "weights are never written out; use attn_implementation='eager'",
    "cache": f"is none of transformers' caches for continuous batching; {ELSEWHERE}",
}


_WHAT = "continuous batching"


class Batch(NamedTuple):
    """Arguments of a batch that transformers hands to each layer."""

    cache: Any  # transformers' PagedAttentionCache; None from 5.24 on, whose layers write and read it themselves
    begin_q: torch.Tensor  # (requests + 1,) beginnings of the queries
    begin_k: Any  # the same of the keys; a dict by the kind of layer if there are several kinds, from 5.19 on always
    longest_q: int  # the most of one request
    longest_k: Any  # the same of the keys, like begin_k
    named: dict[str, Any]  # other arguments: read_index and write_index, lists of tensors by the cache's groups


class _Group(NamedTuple):
    """A layer's group in a paged cache, whose layers share a page table: an allocator from 5.18 on."""

    number: int  # among the read_index and write_index of a batch
    kind: str
    begins: bool  # whether the layer is the group's first
    page: int  # tokens
    pages: tuple[torch.Tensor, torch.Tensor] | None  # (P, page, Hk, D); None for the ring buffers of windows


class _Pages(NamedTuple):
    """Page table of a batch: its reading positions, (requests, pages) and (requests,) int32."""

    read_index: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


# Of each cache's forward under way, by group. The first layer of a group makes them anew.
_pages: weakref.WeakKeyDictionary[Any, dict[int, _Pages]] = weakref.WeakKeyDictionary()


def is_paged(cache: Any) -> bool:
    return hasattr(cache, "update") and (
        hasattr(cache, "layer_to_allocator") or hasattr(cache, "layer_index_to_group_indices")
    )


def _group_of(cache: Any, layer: int) -> _Group:
    if hasattr(cache, "layer_to_allocator"):
        own = cache.layer_to_allocator[layer]
        kind = next(kind for kind, one in cache.cache_allocators.items() if one is own)
        pages = own.get_cache_for_block_table(layer) if own.supports_block_table else None
        return _Group(own.index, kind, layer == own.layer_indices[0], own.tokens_per_page, pages)
    index, place = cache.layer_index_to_group_indices[layer]
    if cache.sliding_windows[layer] != 1:  # 1 stands for none
        return _Group(index, "sliding_attention", place == 0, cache.block_size, None)
    keys, values = (one[place].unflatten(0, (-1, cache.block_size)) for one in (cache.key_cache, cache.value_cache))
    return _Group(index, "full_attention", place == 0, cache.block_size, (keys, values))


@functools.cache
def _takes_kwargs(cache: type[Any]) -> bool:
    """Return whether a cache's update takes a batch's arguments in one, as from 5.19 on."""
    return "kwargs" in inspect.signature(cache.update).parameters


def attend_batch(*arguments: Any) -> torch.Tensor:
    return left_out["paged cache"](*arguments)


def _attend_batch(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: CompactMask,
    window: int | None, batch: Batch, options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Put keys and values (1, Hk, T, D) into the cache, and attend query (1, Hq, T, D) -> (1, T, Hq, D)."""
    cache, named = batch.cache, batch.named
    if batch.begin_q is None or batch.begin_k is None:
        raise refuse("cu_seq_lens_k", batch.begin_k, f"{_WHAT} gives beginnings of queries and keys; {ELSEWHERE}")
    if named.get("block_table") is not None:
        raise refuse("block_table", named["block_table"], "is for FlashAttention alone; set max_blocks_per_request=0")
    if mask.mask is not None or mask.chunk is not None or (mask.q_length > 1 and not mask.causal):
        raise refuse("attention_mask", mask.shape, f"{_WHAT} is causal and has no mask functions; {ELSEWHERE}")
    q, begin_q = query[0].transpose(0, 1), batch.begin_q.to(torch.int32)
    options = {**options, "causal": True, "window": None if window is None else (window - 1, 0)}
    group = None if cache is None else _group_of(cache, module.layer_idx)  # type: ignore[arg-type]
    begin_k, longest_k = (
        one[group.kind] if group and isinstance(one, dict) else one for one in (batch.begin_k, batch.longest_k)
    )
    begin_k = begin_k.to(torch.int32)
    pages = None
    if group is not None:
        read_index = named["read_index"][group.number]
        if group.pages is not None and read_index.numel():
            pages = _pages_of(cache, group, read_index, begin_k, longest_k)
        # Without positions to read, keys and values are written alone.
        reads = [index[:0] for index in named["read_index"]] if pages else named["read_index"]
        places: dict[str, Any] = {"read_index": reads, "write_index": named["write_index"]}
        if _takes_kwargs(cache.__class__):
            places = {"kwargs": {**places, "cu_seq_lens_k": batch.begin_k, "max_length_k": batch.longest_k}}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    out: Any
    if group is None or group.pages is None or pages is None:
        k, v = (one[0].transpose(0, 1) if one.ndim == 4 else one for one in (key, value))  # (T, Hk, D) up to 5.18
        out = ops.varlen_attention(q, k, v, begin_q, begin_k, batch.longest_q, longest_k, **options)
        return out.unsqueeze(0)
    if batch.longest_q == 1 and len(begin_q) == len(q) + 1:  # a query each: the keys are split over programs
        out = ops.paged_attention(q.unsqueeze(2), *group.pages, pages.table, pages.lengths, **options)
        return out.squeeze(2).unsqueeze(0)
    out = ops.paged_attention(
        q, *group.pages, pages.table, pages.lengths, cu_seqlens_q=begin_q, max_seqlen_q=batch.longest_q, **options
    )
    return out.unsqueeze(0)


# transformers leaves it out, too.
leave_out("paged cache", _attend_batch, "the cache is written in place through views of one tensor, which graphs copy")


def _pages_of(cache: Any, group: _Group, read_index: torch.Tensor, begin_k: torch.Tensor, longest_k: int) -> _Pages:
    """Return a batch's page table: request b's positions begin at begin_k[b], a page at every `group.page`-th."""
    kept = _pages.setdefault(cache, {})
    if group.number in kept and kept[group.number].read_index is read_index and not group.begins:
        return kept[group.number]
    columns = torch.arange(0, max(longest_k, 1), group.page, device=read_index.device)
    places = (begin_k[:-1, None] + columns).clamp(max=read_index.numel() - 1)
    table = read_index[places].div(group.page, rounding_mode="floor").to(torch.int32)
    kept[group.number] = _Pages(read_index, table, begin_k.diff())
    return kept[group.number]


# Wrappers of two methods of transformers that alone decide on loading a model and on continuous batching.

Method = Callable[..., Any]
# A layer of attention that is written here, rather than derived from one of transformers'.
_OWN_LAYER = re.compile(r"^class \w*(?:Attention|Attn)\w*\((?:\w+\.)*Module\):", re.MULTILINE)


def goes_through_interface(model: type[Any]) -> bool:
    """Return whether a model class's layers call AttentionInterface: its author says so, or its source does."""
    if getattr(model, "_supports_attention_backend", False):
        return True
    if not model._can_set_attn_implementation():
        return False
    # transformers finds layers by one spelling alone, and takes everything else.
    source = inspect.getsource(sys.modules[model.__module__])
    return "ALL_ATTENTION_FUNCTIONS" in source or "AttentionInterface" in source or not _OWN_LAYER.search(source)


def _checking(original: Method, names: Collection[str]) -> Method:
    @functools.wraps(original)
    def get_correct_attn_implementation(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> Any:
        if requested_attention in names and not goes_through_interface(type(self)):
            limit = (
                f"{type(self).__name__} computes attention itself: {type(self).__module__} does not call transformers' "
                "AttentionInterface. Use attn_implementation='eager' for it, be it a model or a part of one"
            )
            raise refuse("attn_implementation", requested_attention, limit)
        return original(self, requested_attention, *args, **kwargs)

    return get_correct_attn_implementation


def _admitting(original: Method, names: Collection[str]) -> Method:
    @functools.wraps(original)
    def switch_to_cb_friendly_attn(self: Any, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        # Ours takes the cache as it is. The method would raise ValueError, or switch to FlashAttention.
        if model.config._attn_implementation in names:
            return None
        return original(self, model, *args, **kwargs)

    return switch_to_cb_friendly_attn


_WRAPPED: tuple[tuple[type[Any], str, Callable[[Method, Collection[str]], Method]], ...] = (
    (PreTrainedModel, "get_correct_attn_implementation", _checking),
    (continuous_batching.ContinuousBatchingManager, "switch_to_cb_friendly_attn", _admitting),
)
_installed: list[tuple[type[Any], str, Method, Method]] = []  # class, name, theirs, ours


def _install_hooks(names: Collection[str]) -> None:
    """Wrap the methods, once; `names` is the live collection of registered names."""
    if _installed:
        return
    for owner, name, wrap in _WRAPPED:
        theirs = owner.__dict__.get(name)
        if theirs is None:  # a version of transformers that does it otherwise
            continue
        ours = wrap(theirs, names)
        setattr(owner, name, ours)
        _installed.append((owner, name, theirs, ours))


def _remove_hooks() -> None:
    """Restore transformers' methods; a later wrapper of another library stays, and still calls ours."""
    for owner, name, theirs, ours in _installed:
        if owner.__dict__.get(name) is ours:
            setattr(owner, name, theirs)
    _installed.clear()


class Registration:
    """Handle of `register`: the name and backend, and remove()."""

    def __init__(
        self, name: str, backend: str | None, forward: Callable[..., Any], mask: Callable[..., Any] = compact_mask
    ) -> None:
        self.name, self.backend, self._forward, self._mask = name, backend, forward, mask

    def install(self) -> None:
        """Register attention and mask functions with transformers; without the latter, layers get a mask of None."""
        AttentionMaskInterface.register(self.name, self._mask)
        AttentionInterface.register(self.name, self._forward)
        _registered[self.name] = self
        _install_hooks(_registered.keys())

    def remove(self) -> None:
        """Remove the name from transformers: models set to it then raise; a second call does nothing."""
        if _registered.get(self.name) is not self:
            return
        del _registered[self.name]
        # transformers offers no way to unregister. Whoever has put another function there since keeps it.
        for interface, ours in ((AttentionInterface, self._forward), (AttentionMaskInterface, self._mask)):
            if interface._global_mapping.get(self.name) is ours:
                del interface._global_mapping[self.name]
        if not _registered:
            _remove_hooks()

    def __repr__(self) -> str:
        state = "registered" if _registered.get(self.name) is self else "removed"
        return f"Registration(name={self.name!r}, backend={self.backend!r}, {state})"


_registered: dict[str, Registration] = {}


def register(name: str = "portattn", backend: str | None = None) -> Registration:
    """Make portattn an attention implementation of transformers: `attn_implementation="portattn"`.

    Calls come as transformers makes them: query (B, Hq, Sq, D), key and value (B, Hk, Sk, D). While a name is
    registered, two methods of transformers are wrapped: a model whose layers compute attention themselves raises
    ArgumentError when loaded with it, and continuous batching admits it.

    Args:
        name: under which models find it; none of transformers' own names, nor a part of one
        backend: as in `portattn.attention`: a path that every call must take, or None for the setting

    Returns:
        A Registration, a handle with remove(). The same arguments again give the same handle.

    Raises:
        ArgumentError: The name is used by transformers or another library, or registered with another backend, or no
            device has the backend.

    Examples:
        >>> from portattn.integrations.transformers import register
        >>> registered = register("portattn_reference", backend="reference")
        >>> registered
        Registration(name='portattn_reference', backend='reference', registered)
        >>> registered.remove()
    """
    check_name(name)
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(WHO, "backend", backend, "must be None or a string")
    if backend is not None:
        check_path(WHO, "backend", backend)
    known = _registered.get(name)
    if known is not None:
        if known.backend != backend:
            raise ArgumentError(
                WHO, "backend", backend, f"{name!r} is registered with {known.backend!r}: remove() it, or name another"
            )
        return known
    check_free(name)

    def forward(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: CompactMask | torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
        is_causal: bool | None = None, sliding_window: int | None = None, softcap: float | None = None,
        s_aux: torch.Tensor | None = None, position_bias: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None, cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None, max_length_k: int | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        cache, indices = None, kwargs.pop("indices", None)
        for feature in kwargs:
            if feature in _SPECIAL and kwargs[feature] is not None:
                cache = _special(feature, kwargs[feature], cache)
        in_batch = cache is not None or "read_index" in kwargs
        mask, bias = _read(module, query, key, attention_mask, is_causal, in_batch)
        if indices is not None and in_batch:
            raise refuse("indices", indices, f"{_WHAT} has no sparse attention; {ELSEWHERE}")
        mask = mask if indices is None else _selected(mask, indices)
        options = {"scale": scaling, "softcap": softcap, "sinks": _acceptable(s_aux, query), "backend": backend}
        if in_batch:
            if bias is not None or position_bias is not None or dropout > 0.0:
                raise refuse("cache", type(cache).__name__, f"{_WHAT} has no biases or dropout; {ELSEWHERE}")
            if max_length_q is None:  # up to 5.18
                max_length_q, max_length_k = kwargs.get("max_seqlen_q"), kwargs.get("max_seqlen_k")
            given: Any = (cache, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, kwargs)
            return attend_batch(module, query, key, value, mask, sliding_window, Batch(*given), options), None
        check_window(sliding_window, mask)
        if position_bias is not None:
            if position_bias.shape[-1] == mask.kv_length:
                position_bias = position_bias[..., : mask.kv_used]
            bias = position_bias if bias is None else position_bias + bias
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None or mask.packed is not None:
            dense = bias is not None  # which packed calls do not take
            sequences = None
            if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
                sequences = _given(mask, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, dense)
            if sequences is None and mask.packed is not None and not dense:
                sequences = mask.sequences()
            if sequences is not None:
                return _attend_packed(query, key, value, mask, sequences, dropout, options), None
        return _attend(query, key, value, mask, _acceptable(bias, query), dropout, options), None

    registration = Registration(name, backend, forward)
    registration.install()
    return registration


def check_name(name: Any) -> None:
    if not isinstance(name, str) or not name or any(word in name for word in RESERVED):
        raise ArgumentError(WHO, "name", name, f"must be a string that holds none of {', '.join(RESERVED)}")


def check_free(name: str) -> None:
    if name in AttentionInterface._global_mapping or name in AttentionMaskInterface._global_mapping:
        raise ArgumentError(WHO, "name", name, "is taken in transformers' AttentionInterface")


def _special(feature: str, value: Any, cache: Any) -> Any:
    """Return continuous batching's cache if `feature` is that; raise ArgumentError for unsupported features."""
    if feature == "cache" and is_paged(value):
        return value
    if feature == "output_attentions" and not value:
        return cache
    raise refuse(feature, value, _SPECIAL[feature])


def _read(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: Any, is_causal: bool | None, in_batch: bool
) -> tuple[CompactMask, torch.Tensor | None]:
    batch, heads, q_length, _ = query.shape
    kv_length = key.shape[2]
    if isinstance(mask, CompactMask):
        if mask.batch != batch or mask.q_length != q_length or mask.kv_length != kv_length:
            limit = f"this layer's scores are {(batch, 1, q_length, kv_length)}; {ELSEWHERE}"
            raise refuse("attention_mask", f"made for {tuple(mask.shape)}", limit)
        return mask, None
    if isinstance(mask, torch.Tensor):
        scores = (batch, heads, q_length, kv_length)
        fits = mask.ndim == 4 and all(size in (1, limit) for size, limit in zip(mask.shape, scores, strict=True))
        if not fits:
            limit = f"must broadcast to this layer's scores, {scores}; {ELSEWHERE}"
            raise refuse("attention_mask.shape", tuple(mask.shape), limit)
        # The whole mask, as for transformers' own functions: a window of the layer's is not put on top.
        own = CompactMask(batch, q_length, kv_length, kv_length, written_out=True)
        if mask.dtype == torch.bool:
            own.mask = mask
            return own, None
        if not mask.is_floating_point():
            raise refuse("attention_mask.dtype", mask.dtype, "must be bool (True attends) or floating (added)")
        return own, mask
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if mask is None and (in_batch or not causal):  # from 5.24 on, continuous batching makes no masks
        return CompactMask(batch, q_length, kv_length, kv_length, right=0 if causal else None), None
    raise refuse(
        "attention_mask", mask, f"this model does not make its masks through AttentionMaskInterface; {ELSEWHERE}"
    )


def _selected(mask: CompactMask, indices: torch.Tensor) -> CompactMask:
    """Return a mask that shows, of the keys that `mask` shows, those in indices (B, Sq, topk): DSA's selection."""
    chosen = indices.new_zeros(mask.shape, dtype=torch.bool).scatter_(-1, indices[:, None].long(), True)
    chosen, written = chosen[..., : mask.kv_used], mask.written
    return replace(mask, mask=chosen if written is None else chosen & written, packed=None, _dense=None)


def _acceptable(tensor: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return sinks or a bias in a dtype of the ops; models have them in their own."""
    return tensor if tensor is None or tensor.dtype in (query.dtype, torch.float32) else tensor.to(torch.float32)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: CompactMask, bias: torch.Tensor | None,
    dropout: float, options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    if mask.kv_used < mask.kv_length:
        key, value = key[:, :, : mask.kv_used], value[:, :, : mask.kv_used]
    decodes, named = mask.dense()
    # decode_attention has neither dropout nor gradients: attention takes the same tensors.
    decodes = decodes and not dropout and not wants_gradients(query, key, value, bias, options["sinks"])
    out: Any
    if mask.q_length == 1 and decodes:  # in either layout the output comes out contiguous
        out = ops.decode_attention(query, key, value, bias=bias, **named, **options)
        out = out.transpose(1, 2)
    else:
        # bshd, so that the output comes out contiguous in the layout that transformers wants.
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if decodes:
            out = ops.decode_attention(q, k, v, bias=bias, layout="bshd", **named, **options)
        else:
            out = ops.attention(q, k, v, bias=bias, layout="bshd", dropout_p=dropout, **named, **options)
    if mask.flaw is not None:
        out = out + mask.flaw.to(out.dtype)
        if not torch.compiler.is_compiling():
            # One layer is enough: NaN reaches the logits through the residual stream.
            mask.flaw = None
    return out


_Sequences = tuple[torch.Tensor, int, torch.Tensor, int]  # beginnings and longest of queries and of keys


def _given(
    mask: CompactMask, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, longest_q: Any, longest_k: Any, dense: bool
) -> _Sequences | None:
    """Return the packed sequences that the model's caller describes; None if a mask is needed that knows them."""
    begin_q, begin_k = (cu_k if cu_q is None else cu_q), (cu_q if cu_k is None else cu_k)
    assert begin_q is not None
    assert begin_k is not None
    if mask.mask is not None or mask.chunk is not None or mask.padded or mask.kv_used != mask.q_length:
        raise refuse("cu_seq_lens_q", begin_q, "packed sequences go without a cache and without an attention_mask")
    if dense:
        if mask.packed is None:
            limit = "takes no bias; pack by position_ids that start again, without a cache"
            raise refuse("cu_seq_lens_q", begin_q, limit)
        return None
    rows = mask.batch * mask.q_length  # no sequence is longer; reading a tensor back would wait for the device
    longest = [most if isinstance(most, int) else rows for most in (longest_q, longest_k)]
    return begin_q.to(torch.int32), longest[0], begin_k.to(torch.int32), longest[1]


def _attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: CompactMask, sequences: _Sequences,
    dropout: float, options: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Attend query (B, Hq, S, D), key and value (B, Hk, S, D) as consecutive rows -> (B, S, Hq, D)."""
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    begin_q, longest_q, begin_k, longest_k = sequences
    causal = mask.causal and mask.q_length > 1
    out: Any = ops.varlen_attention(
        q, k, v, begin_q, begin_k, longest_q, longest_k, causal=causal, window=mask.window, dropout_p=dropout,
        **options,
    )  # fmt: skip
    return out.unflatten(0, (query.shape[0], query.shape[2]))
