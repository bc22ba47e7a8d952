"""Attention whose sequence lies on several devices: what diffusers' templates of context parallelism call.

A template moves keys, values or heads between processes, calls `forward` for what it has here, and `backward` for the
gradients of it. Ring attention calls `forward` once for each part of the keys, merges by the LSE, and calls `backward`
once for each part with the merged output and LSE. Ulysses attention calls either once, for some of the heads.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from portattn.api import kernel_backward as kernels
from portattn.api import ops, training
from portattn.api.graph_call import new_seed
from portattn.api.request import request_of
from portattn.config import current, using
from portattn.errors import ArgumentError

_QKV = ("q", "k", "v")
# Every other argument of portattn.attention, as a request of it wants them.
_DEFAULTS = {
    name: p.default for name, p in inspect.signature(ops.attention).parameters.items() if p.default is not p.empty
}
_DEFAULTS["layout"] = "bshd"


class Parallel:
    """The two functions that a template gets, for one name in the registry.

    who      the operation, in errors
    backend  the path that every call must take, or None for the setting
    """

    def __init__(self, who: str, backend: str | None) -> None:
        self.who, self.backend = who, backend

    def check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
        dropout_p: float, is_causal: bool, enable_gqa: bool, return_lse: bool, config: Any,
    ) -> None:  # fmt: skip
        """Raise ArgumentError for what the templates cannot do, or do without a word as something else."""
        ring = config.ring_degree > 1
        if is_causal:
            raise self._refuse("is_causal", True, "context parallelism of diffusers has no causal attention")
        if query.shape[2] != key.shape[2]:
            limit = f"context parallelism of diffusers takes as many key heads as query heads ({query.shape[2]})"
            raise self._refuse("key.shape[2]", key.shape[2], limit)
        if enable_gqa:  # the templates refuse it whatever the heads are
            limit = "must be False: context parallelism of diffusers takes as many key heads as query heads, and not it"
            raise self._refuse("enable_gqa", True, limit)
        if ring and attn_mask is not None:
            limit = "ring attention of diffusers gives every part of the keys the same mask: use ulysses_degree"
            raise self._refuse("attn_mask.shape", tuple(attn_mask.shape), limit)
        if ring and dropout_p:
            raise self._refuse("dropout_p", dropout_p, "ring attention takes no dropout: use ulysses_degree")
        if torch.is_grad_enabled():
            if attn_mask is not None and attn_mask.requires_grad:
                raise self._refuse("attn_mask.requires_grad", True, "context parallelism gives a mask no gradient")
            if return_lse and any(tensor.requires_grad for tensor in (query, key, value)):
                limit = "context parallelism has no gradients through the LSE: call it under torch.no_grad()"
                raise self._refuse("return_lse", True, limit)

    def _refuse(self, argument: str, value: object, limit: str) -> ArgumentError:
        return ArgumentError(self.who, argument, value, limit)

    def forward(
        self, ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool,
        return_lse: bool, _save_ctx: bool = True, _parallel_config: Any = None,
    ) -> Any:  # fmt: skip
        """Run attention of this rank's tensors: (B, Sq, H, D) -> (B, Sq, H, Dv), and the LSE (B, Sq, H) if asked for.

        is_causal and enable_gqa are False: `check`. The template calls it without recording gradients.
        """
        query, key, value = _waited(query, key, value)
        ring = _parallel_config.context_parallel_config.ring_degree > 1
        if ring and key.shape[1] == 0:
            raise self._refuse("key.shape[1]", 0, "ring attention cannot merge a part without keys")
        seed = new_seed(query) if dropout_p else None
        named: dict[str, Any] = {"scale": scale, "dropout_p": dropout_p, "dropout_seed": seed, "backend": self.backend}
        named |= mask_argument(attn_mask)
        kept = _save_ctx and not ring  # the ring's own is merged, and the template has it
        found: Any = ops.attention(query, key, value, layout="bshd", return_lse=return_lse or kept, **named)
        out, lse = found if isinstance(found, tuple) else (found, None)
        if _save_ctx:  # query, key and value first: templates read them
            ctx.save_for_backward(query, key, value, attn_mask, seed, *((out, lse) if kept else (None, None)))
            ctx.scale, ctx.dropout_p, ctx.settings = scale, dropout_p, current()
        return (out, lse.transpose(1, 2)) if return_lse else out

    def backward(
        self, ctx: Any, grad_out: torch.Tensor, *_: Any, query: torch.Tensor | None = None,
        key: torch.Tensor | None = None, value: torch.Tensor | None = None, out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return the gradients of query, key and value, (B, S, H, D) each.

        query, key, value  a part of the keys, in place of the tensors that `forward` took
        out, lse           of all keys together, (B, Sq, H, Dv) and (B, Sq, H)
        """
        own_q, own_k, own_v, attn_mask, seed, own_out, own_lse = ctx.saved_tensors
        pairs = ((own_q, query), (own_k, key), (own_v, value))
        qkv = _waited(*(own if given is None else given for own, given in pairs))
        if out is None or lse is None:
            out, lse = own_out, own_lse
        else:
            lse = lse.transpose(1, 2).contiguous()
        named: dict[str, Any] = {
            "scale": ctx.scale,
            "dropout_p": ctx.dropout_p,
            "dropout_seed": seed,
            "backend": self.backend,
        }
        named |= mask_argument(attn_mask)
        with using(ctx.settings):  # torch runs a backward pass in threads of its own
            return _gradients(qkv, named, out, lse, grad_out.to(qkv[0].dtype))


def mask_argument(attn_mask: torch.Tensor | None) -> dict[str, Any]:
    """The argument of portattn.attention that a mask is."""
    if attn_mask is None:
        return {}
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _waited(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """What other processes sent, once it is here: templates hand over wrappers, whose memory no kernel may read yet."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # not in every build of torch

    return [t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in tensors]


def _gradients(
    qkv: list[torch.Tensor], named: dict[str, Any], out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return gradients for a part of the keys, given out and lse of all keys: all that kernels need."""
    leaves = q, k, v = [tensor.detach().requires_grad_() for tensor in qkv]
    request = request_of("attention", {**_DEFAULTS, **named, **dict(zip(_QKV, leaves, strict=True))})
    if training.is_planned(request):
        with torch.no_grad():
            given = (*request.parts, out, lse, grad_out, None)
            made = kernels.gradients("attention", *given, asked=_QKV)
        if made is not None:
            return tuple(made[name] for name in _QKV)
    # Torch differentiates attention over these keys alone, with another softmax: the whole's probabilities are `share`
    # times this part's. The gradient of the scores, P·(dP − Σ dO·out), has the output of all keys in its sum; the
    # difference goes in as a gradient of the LSE.
    with torch.enable_grad():
        found: Any = ops.attention(q, k, v, layout="bshd", return_lse=True, **named)
    own, own_lse = found
    share = torch.exp(own_lse.detach() - lse)  # [B, H, Sq]
    rows = (grad_out.float() * (own.detach().float() - out.float())).sum(-1).transpose(1, 2)  # [B, H, Sq]
    shared = (grad_out.float() * share.transpose(1, 2).unsqueeze(-1)).to(own.dtype)
    return torch.autograd.grad((own, own_lse), leaves, (shared, share * rows))
