"""portattn as an attention implementation of Hugging Face transformers: `register()`, then
`attn_implementation="portattn"`.

Masks come as transformers_mask describes them, windows, caps, sinks and biases as transformers' own attention functions
get them. What is not supported raises ArgumentError with the feature's name and value; nothing is ever ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

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

from transformers import masking_utils

if not {"q_length", "q_offset"} <= inspect.signature(masking_utils.sdpa_mask).parameters.keys():
    raise ImportError(
        f"portattn.integrations.transformers needs transformers 5.4 or later, found {transformers.__version__}: "
        "earlier ones describe masks in another way"
    )

from transformers import AttentionInterface, AttentionMaskInterface

from portattn.api import ops
from portattn.errors import ArgumentError
from portattn.integrations import transformers_hooks
from portattn.integrations.transformers_batching import Batch, attend_batch, is_paged
from portattn.integrations.transformers_mask import (
    ELSEWHERE,
    WHO,
    CompactMask,
    check_window,
    compact_mask,
    refuse,
)
from portattn.planning.requested_backend import check_path
from portattn.validate import wants_gradients

# transformers runs checks of its own on names that hold these, reads "a/b" as a kernel to download, and "paged|" as a
# prefix. "eager" is taken without being in the mapping.
RESERVED = ("flash", "sdpa", "flex_attention", "eager", "/", "|")
# Arguments of attention functions that change the result, and that have no counterpart here; and the paged cache.
_SPECIAL = {
    "sinks": "sinks of each query's own are not supported; use attn_implementation='eager'",
    "indices": "sparse attention is not supported here; use attn_implementation='eager'",
    "block_indices": "sparse attention is not supported here; use attn_implementation='eager'",
    "output_attentions": "weights are never written out; use attn_implementation='eager'",
    "cache": f"is none of transformers' caches for continuous batching; {ELSEWHERE}",
}


class Registration:
    """What register() returns: the name and backend, and remove()."""

    def __init__(
        self, name: str, backend: str | None, forward: Callable[..., Any], mask: Callable[..., Any] = compact_mask
    ) -> None:
        self.name, self.backend, self._forward, self._mask = name, backend, forward, mask

    def install(self) -> None:
        """Put it into transformers. Both, or transformers hands every layer a mask of None."""
        AttentionMaskInterface.register(self.name, self._mask)
        AttentionInterface.register(self.name, self._forward)
        _registered[self.name] = self
        transformers_hooks.install(_registered.keys())

    def remove(self) -> None:
        """Take the name out of transformers again. Models set to it raise from then on. Twice is once."""
        if _registered.get(self.name) is not self:
            return
        del _registered[self.name]
        # transformers offers no way to unregister. Whoever has put another function there since keeps it.
        for interface, ours in ((AttentionInterface, self._forward), (AttentionMaskInterface, self._mask)):
            if interface._global_mapping.get(self.name) is ours:
                del interface._global_mapping[self.name]
        if not _registered:
            transformers_hooks.remove()

    def __repr__(self) -> str:
        state = "registered" if _registered.get(self.name) is self else "removed"
        return f"Registration(name={self.name!r}, backend={self.backend!r}, {state})"


_registered: dict[str, Registration] = {}


def register(name: str = "portattn", backend: str | None = None) -> Registration:
    """Make portattn an attention implementation of transformers: `attn_implementation="portattn"`.

    name     under which models find it; none of transformers' own names, nor a part of one
    backend  as in `portattn.attention`: a path that every call must take, or None for the setting

    Calls come as transformers makes them: query (B, Hq, Sq, D), key and value (B, Hk, Sk, D).

    While a name is registered, two methods of transformers are wrapped (transformers_hooks.py): models whose layers
    compute attention themselves raise ArgumentError when they are loaded with it, and continuous batching admits it.

    Returns a Registration, a handle with remove(). The same arguments again give the same handle.

    Raises ArgumentError for a name that transformers or somebody else uses, for a name registered with another
    backend, and for a backend that no device has.

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
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: CompactMask | torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        position_bias: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        cache = None
        for feature in kwargs:
            if feature in _SPECIAL and kwargs[feature] is not None:
                cache = _special(feature, kwargs[feature], cache)
        mask, bias = _read(module, query, key, attention_mask, is_causal)
        options = {"scale": scaling, "softcap": softcap, "sinks": _acceptable(s_aux, query), "backend": backend}
        if cache is not None:
            if bias is not None or position_bias is not None or dropout > 0.0:
                raise refuse(
                    "cache", type(cache).__name__, f"continuous batching has no biases or dropout; {ELSEWHERE}"
                )
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
    """Raise ArgumentError for a name that transformers would read in another way."""
    if not isinstance(name, str) or not name or any(word in name for word in RESERVED):
        raise ArgumentError(WHO, "name", name, f"must be a string that holds none of {', '.join(RESERVED)}")


def check_free(name: str) -> None:
    """Raise ArgumentError for a name that is in use."""
    if name in AttentionInterface._global_mapping or name in AttentionMaskInterface._global_mapping:
        raise ArgumentError(WHO, "name", name, "is taken in transformers' AttentionInterface")


def _special(feature: str, value: Any, cache: Any) -> Any:
    """The cache of continuous batching, where that is the feature. Raises ArgumentError for what is not supported."""
    if feature == "cache" and is_paged(value):
        return value
    if feature == "output_attentions" and not value:
        return cache
    raise refuse(feature, value, _SPECIAL[feature])


def _read(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, mask: Any, is_causal: bool | None
) -> tuple[CompactMask, torch.Tensor | None]:
    """The layer's mask, and what it adds to the scores. Raises ArgumentError for what says neither."""
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
    if mask is None and not causal:
        return CompactMask(batch, q_length, kv_length, kv_length), None
    raise refuse(
        "attention_mask", mask, f"this model does not make its masks through AttentionMaskInterface; {ELSEWHERE}"
    )


def _acceptable(tensor: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Sinks or a bias in a dtype that the ops take. Models have them in their own, which is."""
    return tensor if tensor is None or tensor.dtype in (query.dtype, torch.float32) else tensor.to(torch.float32)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: CompactMask,
    bias: torch.Tensor | None,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """query (B, Hq, Sq, D), key and value (B, Hk, Sk, D) -> (B, Sq, Hq, D)."""
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
    mask: CompactMask,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    longest_q: Any,
    longest_k: Any,
    dense: bool,
) -> _Sequences | None:
    """The packed sequences that the model's caller describes, as for FlashAttention; None where a mask is needed that
    knows them too. Raises ArgumentError where they do not go with the rest."""
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
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: CompactMask,
    sequences: _Sequences,
    dropout: float,
    options: dict[str, Any],
) -> torch.Tensor:
    """query (B, Hq, S, D), key and value (B, Hk, S, D), whose rows follow one another -> (B, S, Hq, D)."""
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    begin_q, longest_q, begin_k, longest_k = sequences
    causal = mask.causal and mask.q_length > 1
    out: Any = ops.varlen_attention(
        q, k, v, begin_q, begin_k, longest_q, longest_k, causal=causal, window=mask.window, dropout_p=dropout,
        **options,
    )  # fmt: skip
    return out.unflatten(0, (query.shape[0], query.shape[2]))
