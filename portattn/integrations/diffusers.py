"""portattn as an attention backend of diffusers: `register()`, then `transformer.set_attention_backend("portattn")`.

Served are models that call dispatch_attention_fn (Flux, QwenImage, Wan …), with context parallelism too; models that
call SDPA (UNet2DConditionModel) need `portattn.integrations.sdpa.replacement()`. Unsupported features raise
ArgumentError.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from portattn.source_tree import install_extra

try:
    import diffusers
except ModuleNotFoundError as error:
    if error.name != "diffusers":
        raise
    raise ImportError(
        f"portattn.integrations.diffusers needs diffusers, which is not installed: {install_extra('diffusers')}"
    ) from None

from diffusers.utils import constants

from portattn.api import autocast, ops, training
from portattn.api import backward as kernels
from portattn.api.call import new_seed
from portattn.api.signatures import request_of
from portattn.config import current, using
from portattn.errors import ArgumentError
from portattn.integrations import DIFFUSERS, check_release
from portattn.planning.planner import check_path
from portattn.validate.dense import without_layout

WHO = "portattn.integrations.diffusers"
_DISPATCH = "diffusers.models.attention_dispatch"
# A name that the environment chooses is hidden from diffusers until it is registered: its beginning shows whose it is.
PREFIX = "portattn"


def load() -> ModuleType:
    """Import diffusers' attention backends. A first import looks DIFFUSERS_ATTN_BACKEND up: hide a name of portattn."""
    chosen = constants.DIFFUSERS_ATTN_BACKEND
    if _DISPATCH in sys.modules or not chosen.startswith(PREFIX):
        return importlib.import_module(_DISPATCH)
    constants.DIFFUSERS_ATTN_BACKEND = "native"
    try:
        return importlib.import_module(_DISPATCH)
    finally:
        constants.DIFFUSERS_ATTN_BACKEND = chosen


def is_taken(dispatch: Any, name: str) -> bool:
    names = dispatch.AttentionBackendName
    return name in names._value2member_map_ or name.upper() in names._member_map_


def add(dispatch: Any, name: str, function: Callable[..., Any]) -> Any:
    """Register a function under a free name, context parallelism included; active if the environment asks for it."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member._sort_order_ = len(names._member_names_)
    member.__objclass__ = names
    before = registry._active_backend
    try:
        names._member_map_[member._name_] = member
        names._value2member_map_[name] = member
        names._member_names_.append(member._name_)
        if hasattr(names, "_hashable_values_"):  # later Pythons ask this list whether a value is a member's
            names._hashable_values_.append(name)
        # Past the enum's own __setattr__, which forbids it.
        type.__setattr__(names, member._name_, member)
        registry.register(member, constraints=[], supports_context_parallel=True)(function)
        if name == constants.DIFFUSERS_ATTN_BACKEND:
            registry.set_active_backend(member)
    except BaseException:
        take_out(dispatch, member, before)
        raise
    return member


def take_out(dispatch: Any, member: Any, before: Any) -> None:
    """Undo `add`, also an interrupted one; an active member is replaced by `before`, or else by diffusers' default."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    for entries in (registry._backends, registry._constraints, registry._supported_arg_names):
        entries.pop(member, None)
    registry._supports_context_parallel.discard(member.value)
    if registry._active_backend is member:
        registry.set_active_backend(before if before in registry._backends else names.NATIVE)
    names._member_map_.pop(member.name, None)
    names._value2member_map_.pop(member.value, None)
    for entries, entry in (
        (names._member_names_, member.name),
        (getattr(names, "_hashable_values_", []), member.value),
    ):
        if entry in entries:
            entries.remove(entry)
    if member.name in vars(names):
        type.__delattr__(names, member.name)


_QKV = ("q", "k", "v")
# Every other argument of portattn.attention, as a request of it wants them.


class Parallel:
    """Forward and backward for a template, under one name in the registry; `who` is the operation in errors."""

    def __init__(self, who: str, backend: str | None) -> None:
        self.who, self.backend = who, backend

    def check(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None,
        dropout_p: float, is_causal: bool, enable_gqa: bool, return_lse: bool, config: Any,
    ) -> None:  # fmt: skip
        """Raise ArgumentError for arguments that the templates cannot serve or silently misread."""
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
        """Run attention of this rank's tensors: (B, Sq, H, D) -> (B, Sq, H, Dv), and the LSE (B, Sq, H) if asked."""
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
        """Return gradients (B, S, H, D); given tensors replace forward's saved ones; out and lse are over all keys."""
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
    if attn_mask is None:
        return {}
    return {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}


def _waited(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Wait for tensors of other processes: templates pass wrappers, whose memory no kernel may read yet."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # not in every build of torch

    return [t.wait() if isinstance(t, AsyncCollectiveTensor) else t for t in tensors]


def _gradients(
    qkv: list[torch.Tensor], named: dict[str, Any], out: torch.Tensor, lse: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return gradients for a part of the keys, given out and lse of all keys, which suffice for the kernels."""
    leaves = q, k, v = [tensor.detach().requires_grad_() for tensor in qkv]
    request = request_of("attention", *leaves, layout="bshd", **named)
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


class DiffusersRegistration:
    """Handle of `register`: the name and backend, and remove()."""

    def __init__(self, name: str, backend: str | None) -> None:
        self.name, self.backend = name, backend
        self._dispatch: Any = load()
        self._before = self._dispatch._AttentionBackendRegistry._active_backend
        self._member = add(self._dispatch, name, _function(self._dispatch, backend))

    def remove(self) -> None:
        """Remove the name; its models then raise KeyError, and the backend active before becomes active again."""
        if _registered.get(self.name) is self:
            del _registered[self.name]
            take_out(self._dispatch, self._member, self._before)

    def __repr__(self) -> str:
        state = "registered" if _registered.get(self.name) is self else "removed"
        return f"Registration(name={self.name!r}, backend={self.backend!r}, {state})"


_registered: dict[str, DiffusersRegistration] = {}


def register(name: str = "portattn", backend: str | None = None) -> DiffusersRegistration:
    """Make portattn an attention backend of diffusers: `model.set_attention_backend("portattn")`.

    Calls come as diffusers makes them: query (B, Sq, Hq, D), key and value (B, Sk, Hk, D), in float16, bfloat16 or
    float32, with boolean or added masks. If DIFFUSERS_ATTN_BACKEND is the name, register() also makes it the active
    backend, if called before diffusers' models are imported.

    Args:
        name: under which diffusers finds it: portattn, or one that begins with it, in lower case
        backend: as in `portattn.attention`: a path that every call must take, or None for the setting

    Returns:
        A DiffusersRegistration, a handle with remove(). The same arguments again give the same handle.

    Raises:
        ArgumentError: The name is taken, begins otherwise or is registered with another backend, or no device has the
            backend.
        PortattnError: diffusers is older than the tested releases, or a newer one's interface differs.

    Examples:
        >>> from portattn.integrations.diffusers import register
        >>> registered = register("portattn_reference", backend="reference")
        >>> registered
        Registration(name='portattn_reference', backend='reference', registered)
        >>> registered.remove()
    """
    dispatch = load()
    check_release(DIFFUSERS, diffusers.__version__)
    if not (isinstance(name, str) and name.startswith(PREFIX) and name.isidentifier() and name.islower()):
        limit = f"must begin with {PREFIX!r} and be an identifier in lower case"
        raise ArgumentError(WHO, "name", name, limit)
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(WHO, "backend", backend, "must be None or a string")
    if backend is not None:
        check_path(WHO, "backend", backend)
    known = _registered.get(name)
    if known is not None:
        if known.backend != backend:
            limit = f"{name!r} is registered with {known.backend!r}: remove() it, or name another"
            raise ArgumentError(WHO, "backend", backend, limit)
        return known
    if is_taken(dispatch, name):
        raise ArgumentError(WHO, "name", name, "is taken in diffusers' AttentionBackendName")
    _registered[name] = registration = DiffusersRegistration(name, backend)
    return registration


def _function(dispatch: Any, backend: str | None) -> Callable[..., Any]:
    """Return the function for diffusers, which passes the arguments of its signature and silently drops others."""
    parallel = Parallel(WHO, backend)

    def portattn_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """Attend query (B, Sq, Hq, D), key and value (B, Sk, Hk, D): (B, Sq, Hq, Dv), and an LSE (B, Sq, Hq)."""
        _check_heads(query, key, value, enable_gqa)
        attn_mask = _checked_mask(attn_mask, query, key, is_causal)
        config = None if _parallel_config is None else _parallel_config.context_parallel_config
        if config is None:
            causal = "top_left" if is_causal else False
            named: dict[str, Any] = {"causal": causal, "scale": scale, "dropout_p": dropout_p, "backend": backend}
            found = _attended(query, key, value, return_lse=return_lse, **named, **mask_argument(attn_mask))
            return (found[0], found[1].transpose(1, 2)) if return_lse else found
        parallel.check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, return_lse, config)
        if autocast.is_on(query):  # before the template, whose backward runs without autocast
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
            if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32):
                attn_mask = attn_mask.to(dtype)
        return dispatch._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=parallel.forward, backward_op=parallel.backward, _parallel_config=_parallel_config,
        )  # fmt: skip

    return portattn_attention


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **named: Any) -> Any:
    """Run attention of (B, S, H, D); its errors about `layout`, an argument that diffusers lacks, name tensors."""
    if torch.compiler.is_dynamo_compiling():  # errors come out of the compiler then, in its own words
        return ops.attention(query, key, value, layout="bshd", **named)
    try:
        return ops.attention(query, key, value, layout="bshd", **named)
    except ArgumentError as error:
        limit = without_layout(error.limit, ("query", "key", "value"))
        if limit == error.limit:
            raise
        raise ArgumentError(error.op, error.argument, error.value, limit) from None


def _check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.ndim != 4:
            raise ArgumentError(WHO, f"{name}.shape", tuple(tensor.shape), "must be (B, S, H, D)")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        limit = f"must be True where key has {key.shape[2]} heads and query {query.shape[2]}"
        raise ArgumentError(WHO, "enable_gqa", enable_gqa, limit)


def _checked_mask(
    attn_mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool
) -> torch.Tensor | None:
    """Return the mask as it broadcasts to (B, Hq, Sq, Sk); two axes are (B, Sk) if the sizes fit, else (Sq, Sk)."""
    if attn_mask is None:
        return None
    if is_causal:
        raise ArgumentError(WHO, "is_causal", True, "must be False beside an attn_mask, as for torch's own")
    cast = autocast.is_on(query) and attn_mask.is_floating_point()
    if not cast and attn_mask.dtype not in (torch.bool, query.dtype, torch.float32):
        limit = f"must be bool (True attends), or query's {query.dtype} or float32 (added to the scores)"
        raise ArgumentError(WHO, "attn_mask.dtype", attn_mask.dtype, limit)
    shape = tuple(attn_mask.shape)
    batch, rows, heads = query.shape[:3]
    keys = key.shape[1]
    if attn_mask.ndim == 2 and shape == (batch, keys):
        attn_mask = attn_mask[:, None, None]
    elif attn_mask.ndim == 3 and shape[0] == 1:
        attn_mask = attn_mask[None]
    elif attn_mask.ndim == 3:
        limit = "of three axes could be of sequences or of heads: give it as (B, 1, Sq, Sk) or (1, Hq, Sq, Sk)"
        raise ArgumentError(WHO, "attn_mask.shape", shape, limit)
    elif attn_mask.ndim not in (2, 4):
        raise ArgumentError(WHO, "attn_mask.shape", shape, f"must broadcast to {(batch, heads, rows, keys)}")
    return attn_mask
