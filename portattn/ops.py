"""The public operations. Each validates its arguments into a Call and hands it to the dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import msgspec
import torch

from portattn import dispatch, fastpath
from portattn.call import Call
from portattn.config import Settings, current
from portattn.errors import ArgumentError
from portattn.planner import Plan
from portattn.planner import plan as plan_problem
from portattn.problem import OPS, Problem
from portattn.target import Target
from portattn.validate import attention_call


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    seqlens_q: torch.Tensor | None = None,
    seqlens_k: torch.Tensor | None = None,
    leftpad_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense queries over dense keys and values: softmax(q·kᵀ·scale + mask)·v.

    q           (B, Hq, Sq, D), or (B, Sq, Hq, D) with layout="bshd"; float16, bfloat16 or float32; any strides
    k, v        (B, Hk, Sk, D) and (B, Hk, Sk, Dv); Hq must be a multiple of Hk (GQA, MQA)
    scale       factor on the scores; None for 1/√D. Negative and zero are legal
    causal      True or "bottom_right": the last query sees the last key (FlashAttention's convention);
                "top_left": query i sees keys 0..i (SDPA's is_causal); False: no mask
    seqlens_q/k (B,) int32 on q's device: valid rows of each sequence; the rest is padding, which is never attended
                and, as a query, gives 0. Causal alignment is each sequence's own
    leftpad_q/k (B,) int32: padding rows before a sequence's first valid row (left-padded batches)
    dropout_p   dropout on the probabilities, in [0, 1); not in the core kernels
    return_lse  also return the natural log of each row's sum of exponentials, float32 (B, Hq, Sq)
    backend     "auto", or a path that must be taken: "triton", "vendor", "reference", a vendor path's own name, and
                on a CPU "interpreter"; None for the setting. A named path never falls back

    Returns out in q's dtype and layout, (B, Hq, Sq, Dv); with return_lse, (out, lse). A row with nothing to attend
    gives 0 and an LSE of -inf. Memory beyond the inputs: the output, and the LSE where it is asked for.

    Raises ArgumentError (argument, value, limit), PathUnavailable when a named path cannot run this or falling
    back is forbidden, QuirkConflict when the registry contradicts itself.
    """
    settings = _settings("attention", backend)
    optional = (seqlens_q, seqlens_k, leftpad_q, leftpad_k)
    key = _key("attention", q, k, v, optional, (scale, causal, dropout_p, return_lse, layout))
    if key is not None and (kept := dispatch.repeat(key, settings, q, k, v, optional)) is not None:
        return kept if return_lse else kept[0]  # type: ignore[return-value]
    call = attention_call(
        "attention", q, k, v, names=("q", "k", "v"), settings=settings, scale=scale, causal=causal,
        return_lse=return_lse, layout=layout, seqlens_q=seqlens_q, seqlens_k=seqlens_k,
        leftpad_q=leftpad_q, leftpad_k=leftpad_k, dropout_p=dropout_p,
    )  # fmt: skip
    return _finish(call, settings, key)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    seqlens_k: torch.Tensor | None,
    *,
    leftpad_k: torch.Tensor | None = None,
    scale: float | None = None,
    causal: bool | str = False,
    return_lse: bool = False,
    layout: str = "bhsd",
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of a few queries a sequence over a contiguous key/value cache.

    q           (B, Hq, Sq, D), Sq small (1 for ordinary decoding), or (B, Sq, Hq, D) with layout="bshd"
    k_cache, v_cache  (B, Hk, Smax, D) and (B, Hk, Smax, Dv), in the same layout as q
    seqlens_k   (B,) int32 on q's device: keys in each sequence's cache; None when every cache is full. It stays on
                the device: no host synchronisation, so a CUDA graph can replay the call with lengths changed in place
    leftpad_k   (B,) int32: padding rows before a sequence's first key
    causal      with Sq > 1, True lets query i see what ends Sq-1-i keys before the last (speculative decoding)

    The rest as in `attention`. Where keys are split over programs, float32 partial results of
    splits·B·Hq·Sq·(Dv + 1) elements are allocated beside the output. Raises as `attention` does.
    """
    settings = _settings("decode_attention", backend)
    optional = (None, seqlens_k, None, leftpad_k)
    key = _key("decode_attention", q, k_cache, v_cache, optional, (scale, causal, 0.0, return_lse, layout))
    if key is not None and (kept := dispatch.repeat(key, settings, q, k_cache, v_cache, optional)) is not None:
        return kept if return_lse else kept[0]  # type: ignore[return-value]
    call = attention_call(
        "decode_attention", q, k_cache, v_cache, names=("q", "k_cache", "v_cache"), settings=settings, scale=scale,
        causal=causal, return_lse=return_lse, layout=layout, seqlens_k=seqlens_k, leftpad_k=leftpad_k,
    )  # fmt: skip
    return _finish(call, settings, key)


def plan(op: str | Problem, *args: Any, **kwargs: Any) -> Plan:
    """How a call would run, without running it.

    `plan("attention", q, k, v, causal=True)` takes the op's own arguments and plans for the tensors' device.
    `plan(problem, target)` plans a Problem for any Target, also of a machine that is not here; verdicts of this
    machine's cache are not consulted then. Raises what the call would raise before launching.
    """
    if isinstance(op, Problem):
        target = args[0] if args else kwargs.pop("target", None)
        if not isinstance(target, Target) or len(args) > 1 or kwargs:
            raise ArgumentError(
                "plan", "arguments", (*args, *kwargs), "plan(problem, target) takes a Problem and a Target"
            )
        return plan_problem(op, target, settings=current())
    ops: dict[str, Callable[..., Any]] = {"attention": attention, "decode_attention": decode_attention}
    if not isinstance(op, str) or op not in ops:
        raise ArgumentError("plan", "op", op, f"must be a Problem or one of {', '.join(OPS)}")
    with dispatch.planning_only() as planned:
        ops[op](*args, **kwargs)
    return planned[0]


def explain(op: str | Problem, *args: Any, **kwargs: Any) -> str:
    """`plan(...)` as text for people: path, kernel, the quirks applied, and why each other path is not taken."""
    return plan(op, *args, **kwargs).explain()


def _settings(op: str, backend: str | None) -> Settings:
    settings = current()
    if backend is not None and not isinstance(backend, str):
        raise ArgumentError(op, "backend", backend, "must be the name of a path, or None")
    return settings if backend is None or backend == settings.backend else _with_backend(settings, backend)


@functools.lru_cache(maxsize=64)
def _with_backend(settings: Settings, backend: str) -> Settings:
    """Built once, not at every call."""
    return msgspec.structs.replace(settings, backend=backend)


def _key(op: str, q: Any, k: Any, v: Any, optional: tuple[Any, ...], values: tuple[Any, ...]) -> Hashable | None:
    """The key under which a call is kept; None for what is never kept, or not even made of tensors."""
    if not all(isinstance(t, torch.Tensor) for t in (q, k, v)) or q.device.type == "cpu":
        return None
    if not all(t is None or isinstance(t, torch.Tensor) for t in optional):
        return None
    return fastpath.key_of(op, q, k, v, optional, values)


def _finish(call: Call, settings: Settings, key: Hashable | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    out, lse = dispatch.run(call, settings, key)
    if call.problem.layout == "bshd":
        out = out.transpose(1, 2)
    return (out, lse) if lse is not None and call.problem.return_lse else out
