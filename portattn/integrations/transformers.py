"""portattn as an attention implementation of Hugging Face transformers: `register()`, then
`attn_implementation="portattn"`.

Supported: causal self-attention, dense or with a cache, padded left or right. Everything else raises ArgumentError with
the feature's name and value; no mask is ever ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "portattn.integrations.transformers needs transformers, which is not installed: "
        "pip install 'portattn[transformers]'"
    ) from None

from transformers import masking_utils

if not {"q_length", "q_offset"} <= inspect.signature(masking_utils.sdpa_mask).parameters.keys():
    raise ImportError(
        f"portattn.integrations.transformers needs transformers 5.4 or later, found {transformers.__version__}: "
        "earlier ones describe masks in another way"
    )

from transformers import AttentionInterface, AttentionMaskInterface

from portattn import ops
from portattn.errors import ArgumentError
from portattn.integrations.transformers_mask import ELSEWHERE, WHO, LengthMask, check_window, length_mask, refuse

# transformers runs checks of its own on names that hold these, reads "a/b" as a kernel to download, and "paged|" as a
# prefix. "eager" is taken without being in the mapping.
RESERVED = ("flash", "sdpa", "flex_attention", "eager", "/", "|")
# Queries a sequence up to which a call over a longer cache counts as decoding, which splits the keys over programs.
DECODE_QUERIES = 16
# Arguments of attention functions that change the result, and that only the eager functions of a model know.
_EAGER_ONLY = {
    "softcap": "capped scores are not supported yet; use attn_implementation='eager'",
    "s_aux": "attention sinks are not supported yet; use attn_implementation='eager'",
    "sinks": "attention sinks are not supported yet; use attn_implementation='eager'",
    "position_bias": f"an additive bias is not supported yet; {ELSEWHERE}",
    "indices": "sparse attention is not supported here; use attn_implementation='eager'",
    "block_indices": "sparse attention is not supported here; use attn_implementation='eager'",
    "cu_seq_lens_q": f"packed sequences are not supported here yet; {ELSEWHERE}",
    "cu_seq_lens_k": f"packed sequences are not supported here yet; {ELSEWHERE}",
    "cache": f"transformers' paged cache (continuous batching) is not supported; {ELSEWHERE}",
}


class Registration:
    """What register() returns: the name and backend, and remove()."""

    def __init__(self, name: str, backend: str | None, forward: Callable[..., Any]) -> None:
        self.name, self.backend, self._forward = name, backend, forward

    def remove(self) -> None:
        """Take the name out of transformers again. Models set to it raise from then on. Twice is once."""
        if _registered.get(self.name) is not self:
            return
        del _registered[self.name]
        # transformers offers no way to unregister. Whoever has put another function there since keeps it.
        for interface, ours in ((AttentionInterface, self._forward), (AttentionMaskInterface, length_mask)):
            if interface._global_mapping.get(self.name) is ours:
                del interface._global_mapping[self.name]

    def __repr__(self) -> str:
        state = "registered" if _registered.get(self.name) is self else "removed"
        return f"Registration(name={self.name!r}, backend={self.backend!r}, {state})"


_registered: dict[str, Registration] = {}


def register(name: str = "portattn", backend: str | None = None) -> Registration:
    """Make portattn an attention implementation of transformers, under `name`.

    backend   as in `portattn.attention`: a path that every call must take, or None for the setting

    Returns a handle with remove(). The same arguments again give the same handle. Raises ArgumentError for a name
    that transformers or somebody else uses, and for a name registered with another backend.
    """
    if not isinstance(name, str) or not name or any(word in name for word in RESERVED):
        raise ArgumentError(WHO, "name", name, f"must be a string that holds none of {', '.join(RESERVED)}")
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(WHO, "backend", backend, "must be None or a string")
    known = _registered.get(name)
    if known is not None:
        if known.backend != backend:
            raise ArgumentError(
                WHO, "backend", backend, f"{name!r} is registered with {known.backend!r}: remove() it, or name another"
            )
        return known
    if name in AttentionInterface._global_mapping or name in AttentionMaskInterface._global_mapping:
        raise ArgumentError(WHO, "name", name, "is taken in transformers' AttentionInterface")

    # Dispatch keeps dictionaries and warns; Dynamo steps around the call instead of tracing it.
    @torch.compiler.disable
    def forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: LengthMask | torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        mask = _checked(query, key, attention_mask, sliding_window, kwargs)
        return _attend(query, key, value, mask, dropout, scaling, backend), None

    registration = Registration(name, backend, forward)
    # Both, or transformers hands every layer a mask of None.
    AttentionMaskInterface.register(name, length_mask)
    AttentionInterface.register(name, forward)
    _registered[name] = registration
    return registration


def _checked(
    query: torch.Tensor, key: torch.Tensor, mask: Any, sliding_window: int | None, kwargs: dict[str, Any]
) -> LengthMask:
    """The mask, once nothing is asked for that would be ignored. Raises ArgumentError."""
    for feature, reason in _EAGER_ONLY.items():
        if kwargs.get(feature) is not None:
            given = kwargs[feature]
            shown = f"tensor of shape {tuple(given.shape)}" if isinstance(given, torch.Tensor) else given
            raise refuse(feature, shown, reason)
    if kwargs.get("output_attentions"):
        raise refuse("output_attentions", True, "weights are never written out; use attn_implementation='eager'")
    if sliding_window is not None:
        check_window("sliding_window", sliding_window, key.shape[2])
    if isinstance(mask, torch.Tensor):
        shape = tuple(mask.shape)
        raise refuse("attention_mask", f"tensor of shape {shape}", f"a mask of one's own is not supported; {ELSEWHERE}")
    if not isinstance(mask, LengthMask):
        raise refuse(
            "attention_mask", mask, f"this model does not make its masks through AttentionMaskInterface; {ELSEWHERE}"
        )
    found = (query.shape[0], 1, query.shape[2], key.shape[2])
    if mask.shape != found:
        raise refuse("attention_mask", f"made for {tuple(mask.shape)}", f"this layer's scores are {found}; {ELSEWHERE}")
    return mask


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: LengthMask,
    dropout: float,
    scaling: float | None,
    backend: str | None,
) -> torch.Tensor:
    """query (B, Hq, Sq, D), key and value (B, Hk, Sk, D) -> (B, Sq, Hq, D)."""
    if mask.kv_used < mask.kv_length:
        key, value = key[:, :, : mask.kv_used], value[:, :, : mask.kv_used]
    # bshd, so that the output comes out contiguous in the layout that transformers wants.
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    few = mask.q_length == 1 or (not mask.padded and mask.q_length <= DECODE_QUERIES and mask.q_length < mask.kv_used)
    out: Any
    if few and not dropout:
        # A single query sees every valid key, so it needs no bounds and no causality of its own.
        out = ops.decode_attention(
            q, k, v, mask.seqlens_k, leftpad_k=mask.leftpad_k, scale=scaling, causal=mask.q_length > 1,
            layout="bshd", backend=backend,
        )  # fmt: skip
    else:
        out = ops.attention(
            q, k, v, scale=scaling, causal=True, seqlens_q=mask.seqlens_q, seqlens_k=mask.seqlens_k,
            leftpad_q=mask.leftpad_q, leftpad_k=mask.leftpad_k, dropout_p=dropout, layout="bshd", backend=backend,
        )  # fmt: skip
    if mask.flaw is not None:
        # One layer is enough: NaN reaches the logits through the residual stream.
        out, mask.flaw = out + mask.flaw.to(out.dtype), None
    return out
