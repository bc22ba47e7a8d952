"""portattn inside torch's context parallelism: handlers of SDPA's operators on DTensors with torch's ring and merge.

Private names of torch are used only in releases known to work. Copy the file to use `torch_context_parallel`; run as it
is, it compares the block's result with the whole sequence's in one process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from packaging.version import Version
from torch.nn.attention import SDPBackend, sdpa_kernel

from portattn.api import ops
from portattn.distributed.execution import RankRows, ScoreOptions, differentiate
from portattn.distributed.sharding import Span
from portattn.errors import ArgumentError, PortattnError

WHO = "torch_context_parallel"
SEEN = ("2.11", "2.13")  # torch's releases whose private names were seen to be these
SEQUENCE = 2  # axis of (B, H, S, D)
_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_NEEDED = (
    "custom_ops",
    "existing_custom_ops",
    "_cp_options",
    "_templated_ring_attention",
    "_templated_ring_attention_backward",
)
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
FORWARDS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


@contextlib.contextmanager
def torch_context_parallel(backend: str | None = None) -> Iterator[None]:
    """Make torch's context_parallel attend by portattn in the block, forward and backward.

    It may enclose torch's context manager or lie inside it, and holds for the whole process; the backward must run
    inside both. Torch refuses calls without a causal mask on balanced shards; here they run, since they do not depend
    on the order of tokens.

    Args:
        backend: as in portattn.attention: a path that every local call must take, or None for the setting

    Returns:
        The context manager; its value is None.

    Raises:
        PortattnError: Torch's release is neither 2.11 nor 2.13, or its names differ.
        ArgumentError: In the block F.scaled_dot_product_attention is given attn_mask or dropout_p.
        RuntimeError: No fused kernel of torch takes the call: torch's fall-back has a mask that ignores the shards'
            order.
    """
    private = _private()
    handlers = {}
    for name in FORWARDS:
        forward, backward = (getattr(torch.ops.aten, found).default for found in (name, f"{name}_backward"))
        handlers[forward] = functools.partial(_forward, private, backend)
        handlers[backward] = functools.partial(_backward, private, backend)
    active = _dispatcher()._custom_op_handlers
    places = [private.custom_ops]
    if active is not private.existing_custom_ops:  # inside of torch's context: what it has put there serves already
        places.append(active)
    before = [{operator: place.get(operator) for operator in handlers} for place in places]
    sdpa = F.scaled_dot_product_attention
    for place in places:
        place.update(handlers)
    F.scaled_dot_product_attention = served = _fused(sdpa, everywhere=len(places) > 1)
    try:
        yield
    finally:
        if F.scaled_dot_product_attention is served:
            F.scaled_dot_product_attention = sdpa
        for place, held in zip(places, before, strict=True):
            for operator, handler in held.items():
                if handler is None:
                    place.pop(operator, None)
                else:
                    place[operator] = handler


def _private() -> Any:
    version = Version(torch.__version__)
    release = f"{version.major}.{version.minor}"
    refusal = "use portattn.distributed.context_parallel, which needs no private names of torch"
    if release not in SEEN:
        raise PortattnError(f"{WHO}: torch is {torch.__version__}, but its context_parallel is known in "
                            f"{', '.join(SEEN)} alone; {refusal}")  # fmt: skip
    module = importlib.import_module(_MODULE)
    missing = [name for name in _NEEDED if not hasattr(module, name)]
    if missing:
        raise PortattnError(f"{WHO}: torch {torch.__version__} has no {_MODULE}.{missing[0]}; {refusal}")
    return module


def _dispatcher() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor._op_dispatcher


def _named(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for place, argument in enumerate(operator._schema.arguments):
        if place < len(args):
            found[argument.name] = args[place]
        else:
            found[argument.name] = kwargs.get(argument.name, argument.default_value)
    return found


def _fused(function: Callable[..., Any], everywhere: bool) -> Callable[..., Any]:
    """Wrap F.scaled_dot_product_attention so that no call (`everywhere`) or no DTensors' call skips the handlers.

    SDPA computes calls that its fused kernels refuse by single operations, whose causal mask ignores the shards' order.
    """
    from torch.distributed.tensor import DTensor

    @functools.wraps(function)
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        if not everywhere and not isinstance(call.get("query"), DTensor):
            return function(*args, **kwargs)
        _check({"dropout_p": 0.0, "is_causal": False} | call)
        with sdpa_kernel(KERNELS):
            return function(*args, **kwargs)

    return scaled_dot_product_attention


def _check(call: dict[str, Any]) -> None:
    op = "scaled_dot_product_attention"
    mask = call.get("attn_mask") if call.get("attn_mask") is not None else call.get("attn_bias")
    if mask is not None and mask.numel():
        raise ArgumentError(op, "attn_mask", tuple(mask.shape), "is not supported in torch's context_parallel")
    if call["dropout_p"]:
        raise ArgumentError(op, "dropout_p", call["dropout_p"], "must be 0 in torch's context_parallel")
    if call.get("return_debug_mask"):
        raise ArgumentError(op, "return_debug_mask", True, "portattn writes no probabilities out")
    if call["is_causal"] and call["query"].shape[SEQUENCE] != call["key"].shape[SEQUENCE]:
        shapes = (tuple(call["query"].shape), tuple(call["key"].shape))
        raise ArgumentError(op, "is_causal", shapes, "queries and keys must be as many")


def _local(call: dict[str, Any], *names: str) -> list[torch.Tensor]:
    from torch.distributed.tensor import DTensor

    return [call[n].to_local() if isinstance(call[n], DTensor) else call[n] for n in names]


def _sharded(tensor: torch.Tensor, mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    return DTensor.from_local(tensor, mesh, [Shard(SEQUENCE)], run_check=False)


@contextlib.contextmanager
def _ordered(private: Any, is_causal: bool) -> Iterator[None]:
    """Turn load balancing off without a causal mask: every query sees every key in any order of the shards."""
    before = private._cp_options.enable_load_balance
    private._cp_options.enable_load_balance = before and is_causal
    try:
        yield
    finally:
        private._cp_options.enable_load_balance = before


def _forward(private: Any, backend: str | None, operator: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Run an operator's forward over a ring of portattn's calls, and return the operator's results."""
    call = _named(operator, args, kwargs)
    _check(call)
    mesh = call["query"].device_mesh
    q, k, v = _local(call, "query", "key", "value")

    def attend(query: Any, key: Any, value: Any, *, is_causal: bool) -> tuple[Any, ...]:
        return ops.attention(query, key, value, causal=is_causal, scale=call["scale"], return_lse=True, backend=backend)

    with _ordered(private, call["is_causal"]), torch.no_grad():
        out, lse = private._templated_ring_attention(
            mesh.get_group(), SEQUENCE, attend, query=q, key=k, value=v, is_causal=call["is_causal"]
        )[:2]
    known = {
        "output": lambda: _sharded(out, mesh),
        "logsumexp": lambda: _sharded(lse, mesh),
        "log_sumexp": lambda: _sharded(lse, mesh),
        "max_q": lambda: q.shape[SEQUENCE],
        "max_k": lambda: k.shape[SEQUENCE],
        "cum_seq_q": lambda: None,
        "cum_seq_k": lambda: None,
    }
    # What is left is the state of a dropout that was not drawn, and a mask that was not asked for.
    nothing: Callable[[], Any] = lambda: q.new_empty(0)  # noqa: E731
    return tuple(known.get(returned.name, nothing)() for returned in operator._schema.returns)


def _backward(private: Any, backend: str | None, operator: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    call = _named(operator, args, kwargs)
    _check(call)
    mesh = call["query"].device_mesh
    grad_name = "grad_out_" if "grad_out_" in call else "grad_out"
    q, k, v, out, lse, grad_out = _local(call, "query", "key", "value", "out", "logsumexp", grad_name)
    scores = ScoreOptions(scale=call["scale"], backend=backend)

    def gradients(
        *, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool, grad_out: Any
    ) -> tuple[Any, ...]:  # fmt: skip
        count_q, count_k = query.shape[SEQUENCE], key.shape[SEQUENCE]
        span = Span((0, count_q), (0, count_k), right=0 if is_causal else None)
        return differentiate(span, RankRows(query, out, logsumexp, grad_out, None), key, value, scores)

    with _ordered(private, call["is_causal"]), torch.no_grad():
        found = private._templated_ring_attention_backward(
            mesh.get_group(), SEQUENCE, gradients, grad_out=grad_out, grad_out_name="grad_out", query=q, key=k,
            value=v, out=out, logsumexp=lse, is_causal=call["is_causal"],
        )[:3]  # fmt: skip
    gradients_of = [_sharded(gradient, mesh) for gradient in found]
    return (*gradients_of, *(None for _ in operator._schema.returns[3:]))


def main() -> None:
    from torch.distributed.tensor.experimental import context_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, q = dist.init_device_mesh("cpu", (1,)), torch.randn(1, 4, 64, 32)
    whole = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    with torch_context_parallel(), context_parallel(mesh, buffers=[q], buffer_seq_dims=[SEQUENCE]):
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    print(f"the same: {torch.allclose(out, whole, atol=1e-5)}")  # of one rank; each of several has its rows
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
