"""portattn in torch's registry of flash attention: forwards run on portattn, backwards on torch's own kernels."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from portattn.api import ops
from portattn.errors import ArgumentError, PathUnavailable, PortattnError
from portattn.integrations.sdpa_mapping import OURS, RefusedCall, Serving, check_allowed, note, torch_ran
from portattn.schema.plan import Rejection

_DENSE = "_scaled_dot_product_flash_attention"
_ANY = "_flash_attention_forward"
_IN_PLACE = "_flash_attention_forward_no_dropout_inplace"
_CPU = "_scaled_dot_product_flash_attention_for_cpu"


class _Kernels(NamedTuple):
    device_type: str
    dtypes: tuple[torch.dtype, ...]  # of their inputs, and so of their backward's
    no_keys: float  # their LSE of a row with nothing to attend, which their backwards subtract


_KERNELS = {
    kernels.device_type: kernels
    for kernels in (
        _Kernels("cuda", (torch.float16, torch.bfloat16), math.inf),
        _Kernels("cpu", (torch.float16, torch.bfloat16, torch.float32), 0.0),
    )
}


_serving = Serving()


class _NotTakenError(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        self.refused = RefusedCall(kind, reason)


class Activation:
    """Operators that override torch's own while the implementation is active."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        key = device_type.upper()
        forwards: dict[str, Callable[..., Any]] = {_DENSE: _dense, _ANY: _any, _IN_PLACE: _in_place}
        backwards = [f"{_DENSE}_backward", "_flash_attention_backward"]
        if device_type == "cpu":  # SDPA's flash kernel has operators of its own there
            forwards[_CPU] = _cpu
            backwards.append(f"{_CPU}_backward")
        # Torch 2.11 has no `_flash_attention_forward_no_dropout_inplace`.
        forwards = {name: forward for name, forward in forwards.items() if hasattr(torch.ops.aten, name)}
        # torch's own kernels by operator; None where torch has none for the device.
        self.own = {name: _kernel(name, key) for name in (*forwards, *backwards)}
        self._library: Any = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns that its kernels are overridden, as intended
            warnings.simplefilter("ignore")
            for name, forward in forwards.items():
                self._put(name, functools.partial(self._forward, name, forward), key)
            for name in backwards:
                self._put(name, functools.partial(self._backward, name), key)

    def remove(self) -> None:
        """Restore torch's own operators; a second call does nothing."""
        library, self._library = self._library, None
        if library is not None:
            library._destroy()

    def _put(self, name: str, function: Callable[..., Any], key: str) -> None:
        self._library.impl(name, function, key, with_keyset=True, allow_override=True)

    def _forward(self, name: str, forward: Callable[..., Any], keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _serving.now:
            return self._torchs(name, keys, args, kwargs)
        _serving.now = True
        try:
            with torch.no_grad():
                result = forward(self.device_type, *args, **kwargs)
        except _NotTakenError as error:
            refused = error.refused
        except ArgumentError as error:  # raised before anything is launched
            refused = RefusedCall(error.argument, str(error))
        else:
            note(OURS)
            return result
        finally:
            _serving.now = False
        return self._fall_back(name, refused, keys, args, kwargs)

    def _backward(self, name: str, keys: Any, *args: Any, **kwargs: Any) -> Any:
        refused = RefusedCall("backward", "portattn has no backward kernels; they get its output and LSE")
        return self._fall_back(name, refused, keys, args, kwargs)

    def _fall_back(
        self, name: str, refused: RefusedCall, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # fmt: skip
        check_allowed(name, refused)
        result = self._torchs(name, keys, args, kwargs, refused.reason)
        torch_ran(name, refused)
        return result

    def _torchs(
        self, name: str, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = ""
    ) -> Any:  # fmt: skip
        kernel = self.own[name]
        if kernel is None:
            raise PathUnavailable(
                f"{name}: torch has no kernel of its own for {self.device_type}",
                [Rejection(path="portattn", reason=reason)] if reason else (),
            )
        return kernel.call_boxed(keys, *args, **kwargs)


def _kernel(name: str, key: str) -> Any:
    operator = f"aten::{name}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator, key):
        return None
    return torch.library.get_kernel(operator, key)


def _dense(
    device_type: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Run aten::_scaled_dot_product_flash_attention: (B, H, S, D), a causal mask at the bottom right."""
    _check(device_type, query, value, dropout_p, return_debug_mask)
    out, lse = _attend(query, key, value, scale=scale, causal=is_causal)
    state = _random_state(query)
    return _like(query, out), _with_torchs_empty_rows(lse, math.inf), None, None, query.shape[2], key.shape[2], *state


def _any(
    device_type: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    return_debug_mask: bool, **rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Run aten::_flash_attention_forward: dense (B, S, H, D), or packed (T, H, D) by cum_seq_q and cum_seq_k."""
    _check(device_type, query, value, dropout_p, return_debug_mask)
    out, lse = _attend_any(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, **rest)
    return _like(query, out), lse, *_random_state(query)


def _in_place(
    device_type: str, out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    cum_seq_q: torch.Tensor | None, cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, return_debug_mask: bool, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Run aten::_flash_attention_forward_no_dropout_inplace: write to `out`, return the LSE."""
    _check(device_type, query, value, dropout_p, return_debug_mask)
    found, lse = _attend_any(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, **rest)
    out.copy_(found)
    return lse


def _cpu(
    device_type: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0,
    is_causal: bool = False, *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run aten::_scaled_dot_product_flash_attention_for_cpu: (B, H, S, D), a causal mask at the top left, attn_mask."""
    _check(device_type, query, value, dropout_p, False)
    given = {} if attn_mask is None else {"mask" if attn_mask.dtype is torch.bool else "bias": attn_mask.detach()}
    out, lse = _attend(query, key, value, scale=scale, causal="top_left" if is_causal else False, **given)
    # (B, Sq, H) in memory, which torch's backward reads.
    lse = _with_torchs_empty_rows(lse, _KERNELS[device_type].no_keys).transpose(1, 2).contiguous().transpose(1, 2)
    return _like(query, out), lse


def _check(
    device_type: str, query: torch.Tensor, value: torch.Tensor, dropout_p: float, return_debug_mask: bool
) -> None:
    if query.dtype not in _KERNELS[device_type].dtypes:
        raise _NotTakenError("dtype", f"query is {query.dtype}, which torch's flash kernels refuse on {device_type}")
    if query.shape[-1] != value.shape[-1]:
        raise _NotTakenError("width", "query and value have different widths")
    if dropout_p:
        raise _NotTakenError("dropout_p", f"dropout_p is {dropout_p}, and the mask must be the one of torch's backward")
    if return_debug_mask:
        raise _NotTakenError("return_debug_mask", "return_debug_mask is True, and portattn writes no probabilities out")


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    q, k, v = query.detach(), key.detach(), value.detach()
    return ops.attention(q, k, v, return_lse=True, **options)


def _attend_any(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None, max_q: int, max_k: int, is_causal: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, block_table: torch.Tensor | None = None, num_splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Run dense or packed attention in FlashAttention's layout. num_splits is a hint there, and portattn chooses."""
    if alibi_slopes is not None:
        # FlashAttention leaves a term that all keys share out of a causal row's scores, and so out of its LSE.
        raise _NotTakenError("alibi_slopes", "alibi_slopes are given, with which FlashAttention's LSE is another")
    if block_table is not None:
        raise _NotTakenError("block_table", "block_table is given: call portattn.paged_attention for pages")
    q, k, v = query.detach(), key.detach(), value.detach()
    window = (window_size_left, window_size_right)
    options: dict[str, Any] = {"scale": scale, "causal": is_causal, "return_lse": True}
    if window != (None, None):
        options["window"] = window
    found: Any
    if cum_seq_q is None and cum_seq_k is None:
        found = ops.attention(q, k, v, layout="bshd", seqlens_k=seqused_k, **options)
    elif cum_seq_q is None or cum_seq_k is None:
        raise _NotTakenError("cum_seq", "only one of cum_seq_q and cum_seq_k is given")
    elif seqused_k is not None:
        raise _NotTakenError("seqused_k", "seqused_k is given with packed sequences")
    else:
        found = ops.varlen_attention(q, k, v, cum_seq_q, cum_seq_k, int(max_q), int(max_k), **options)
    out, lse = found
    return out, _with_torchs_empty_rows(lse, math.inf)


def _with_torchs_empty_rows(lse: torch.Tensor, value: float) -> torch.Tensor:
    return lse.masked_fill(lse == -math.inf, value)


def _like(query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return the output in the query's memory order, like torch's kernels and their shapes under torch.compile."""
    expected = torch.empty_like(query)
    return out if out.stride() == expected.stride() else expected.copy_(out)


def _random_state(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return seed and offset of a dropout that was not drawn, and an empty debug mask."""
    empty = query.new_empty(0)
    if torch.version.hip:
        zero = torch.zeros((), dtype=torch.long, device=query.device)
        return zero, zero.clone(), empty
    return (
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        torch.zeros((), dtype=torch.uint64, device=query.device),
        empty,
    )


def register_flash_impl(device_type: str | None = None, name: str | None = None) -> str:
    """Register portattn among torch's flash attention implementations, without activating it.

    While it is active, SDPA's flash kernel is portattn's forward for every caller in the process, torch.compile's
    included, until torch.nn.attention.restore_flash_attention_impl(). Gradients come from torch's own backward kernels,
    which get portattn's output and LSE.

    Args:
        device_type: "cuda" (ROCm too) or "cpu", the device of the overridden operators; None for "cuda" if torch has it
        name: its name for torch.nn.attention.activate_flash_attention_impl; None for PORTATTN_CUDA or PORTATTN_CPU

    Returns:
        The name.

    Raises:
        ArgumentError: The device type is unsupported.
        PortattnError: This torch has no such registry, or is not built for the device.

    Examples:
        >>> import torch
        >>> from portattn.integrations import sdpa
        >>> sdpa.register_flash_impl("cpu")
        'PORTATTN_CPU'
        >>> "PORTATTN_CPU" in torch.nn.attention.list_flash_attention_impls()
        True
        >>> torch.nn.attention.current_flash_attention_impl() is None
        True
    """
    built = torch.backends.cuda.is_built()  # ROCm's torch says so too
    device_type = device_type or ("cuda" if built else "cpu")
    if device_type not in _KERNELS:
        raise ArgumentError("register_flash_impl", "device_type", device_type, f"must be {' or '.join(_KERNELS)}")
    if device_type == "cuda" and not built:
        raise PortattnError("register_flash_impl: device_type is 'cuda', but this torch is not built for CUDA or ROCm")
    name = name or f"PORTATTN_{device_type.upper()}"
    _registry().register_flash_attention_impl(name, register_fn=functools.partial(Activation, device_type))
    return name


@contextlib.contextmanager
def flash_impl(device_type: str | None = None) -> Iterator[str]:
    """Make portattn torch's flash attention implementation inside a block, in all threads.

    The block's end, also by an error, activates the earlier implementation again. Blocks nest.

    Args:
        device_type: as in `register_flash_impl`

    Returns:
        The context manager; its value is the name in torch's registry.

    Examples:
        >>> import torch
        >>> from portattn.integrations import sdpa
        >>> q = torch.randn(1, 2, 5, 16)
        >>> with sdpa.flash_impl("cpu") as name:
        ...     active = torch.nn.attention.current_flash_attention_impl()
        ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        >>> active == name, torch.nn.attention.current_flash_attention_impl()
        (True, None)
        >>> sdpa.last_route().path
        'portattn'
    """
    registry = _registry()
    before = registry.current_flash_attention_impl()
    name = register_flash_impl(device_type)
    try:
        registry.activate_flash_attention_impl(name)
        yield name
    finally:
        if before is not None:
            registry.activate_flash_attention_impl(before)
        elif registry.current_flash_attention_impl() is not None:
            registry.restore_flash_attention_impl()


def _registry() -> Any:
    if not hasattr(torch.nn.attention, "register_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise PortattnError(
            f"this torch ({torch.__version__}) has no registry of flash attention implementations, or no "
            "torch.library.get_kernel; sdpa.replacement() needs neither"
        )
    return torch.nn.attention
