"""portattn as an attention backend of Hugging Face diffusers: `register()`, then
`transformer.set_attention_backend("portattn")`.

Models that call diffusers' dispatch_attention_fn are served (Flux, QwenImage, Wan and so on), in one process and with
context parallelism. UNet2DConditionModel and others whose processors call torch's scaled_dot_product_attention are
not: `portattn.integrations.sdpa.replaced()` is for them. What is not supported raises ArgumentError with its name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from packaging.version import Version

from portattn.source_tree import install_extra

try:
    import diffusers
except ModuleNotFoundError as error:
    if error.name != "diffusers":
        raise
    raise ImportError(
        f"portattn.integrations.diffusers needs diffusers, which is not installed: {install_extra('diffusers')}"
    ) from None

from portattn.api import autocast, ops
from portattn.errors import ArgumentError
from portattn.integrations import diffusers_registry as registry
from portattn.integrations.diffusers_parallel import Parallel, mask_argument
from portattn.planning.requested_backend import check_path
from portattn.validate.layouts import without_layout

# Versions that tests/engines/diffusers/ ran with: the first and the last of them.
OLDEST, NEWEST = "0.40.0", "0.42.1"
WHO = "portattn.integrations.diffusers"


class DiffusersRegistration:
    """What register() returns: the name and backend, and remove()."""

    def __init__(self, name: str, backend: str | None) -> None:
        self.name, self.backend = name, backend
        self._dispatch: Any = registry.load()
        self._before = self._dispatch._AttentionBackendRegistry._active_backend
        self._member = registry.add(self._dispatch, name, _function(self._dispatch, backend))

    def remove(self) -> None:
        """Take the name out of diffusers again. Models set to it raise KeyError from then on. Twice is once.

        Where it is the active backend, the one that was active when it was registered becomes that again.
        """
        if _registered.get(self.name) is self:
            del _registered[self.name]
            registry.take_out(self._dispatch, self._member, self._before)

    def __repr__(self) -> str:
        state = "registered" if _registered.get(self.name) is self else "removed"
        return f"Registration(name={self.name!r}, backend={self.backend!r}, {state})"


_registered: dict[str, DiffusersRegistration] = {}


def register(name: str = "portattn", backend: str | None = None) -> DiffusersRegistration:
    """Make portattn an attention backend of diffusers: `model.set_attention_backend("portattn")`.

    name     under which diffusers finds it: portattn, or one that begins with it, in lower case
    backend  as in `portattn.attention`: a path that every call must take, or None for the setting

    Calls come as diffusers makes them: query (B, Sq, Hq, D), key and value (B, Sk, Hk, D), in float16, bfloat16 or
    float32, with boolean or added masks. With DIFFUSERS_ATTN_BACKEND set to the name, register() also makes it the
    active backend, if it is called before diffusers' models are imported.

    Returns a Registration, a handle with remove(). The same arguments again give the same handle.

    Raises ArgumentError for a diffusers version outside the tested range (OLDEST to NEWEST), for a name that is taken
    or begins otherwise, for a name registered with another backend, and for a backend that no device has.

    >>> from portattn.integrations.diffusers import register
    >>> registered = register("portattn_reference", backend="reference")
    >>> registered
    Registration(name='portattn_reference', backend='reference', registered)
    >>> registered.remove()
    """
    # A build's own label ("+local") sorts behind its release, and is no other release.
    if not Version(OLDEST) <= Version(Version(diffusers.__version__).public) <= Version(NEWEST):
        raise ArgumentError(WHO, "diffusers.__version__", diffusers.__version__, f"must be {OLDEST} to {NEWEST}")
    if not (isinstance(name, str) and name.startswith(registry.PREFIX) and name.isidentifier() and name.islower()):
        limit = f"must begin with {registry.PREFIX!r} and be an identifier in lower case"
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
    if registry.is_taken(registry.load(), name):
        raise ArgumentError(WHO, "name", name, "is taken in diffusers' AttentionBackendName")
    _registered[name] = registration = DiffusersRegistration(name, backend)
    return registration


def _function(dispatch: Any, backend: str | None) -> Callable[..., Any]:
    """What diffusers calls. It passes on the arguments that the signature names, and drops others without a word."""
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
        """query (B, Sq, Hq, D), key and value (B, Sk, Hk, D) -> (B, Sq, Hq, Dv), and the LSE (B, Sq, Hq) if asked."""
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
    """Run attention of (B, S, H, D). Its errors about `layout`, which diffusers' call does not have, name tensors."""
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
    """The mask as it broadcasts to (B, Hq, Sq, Sk). Raises ArgumentError where it is not clear what it means.

    One of two axes is (B, Sk) where these are its sizes, as for diffusers' own backend, and (Sq, Sk) elsewhere.
    """
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
