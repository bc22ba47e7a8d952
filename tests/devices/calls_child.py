"""Run by test_npu.py and test_other_device.py: public calls on devices that are not CUDA's, with the package that the
process finds for `sys.argv[1]`. Prints as JSON the finding of each case: "right", or the error."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch

NAME, PACKAGE = sys.argv[1:3]
importlib.import_module(PACKAGE)  # before portattn: as a vendor's package is imported

import opcalls  # noqa: E402
import oracle64  # noqa: E402

import portattn  # noqa: E402
from portattn.schema.ops import ROWS  # noqa: E402
from portattn.schema.problem import Problem  # noqa: E402
from portattn.testing import tolerance  # noqa: E402

ONE = f"{NAME}:1"
DENSE = Problem(
    batch=2, heads_q=4, heads_k=2, seq_q=5, seq_k=7, head_dim=16, head_dim_v=16, dtype="fp32", causal="bottom_right",
    return_lse=True,
)  # fmt: skip
Case = Callable[[], object]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_case(function: Case) -> dict[str, Any]:
    """Return what a case gave, with the path of its last call and the reasons of its fall-backs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function()
        except Exception as error:  # noqa: BLE001 - a finding, with the place
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    told = [str(one.message) for one in caught if issubclass(one.category, portattn.FallbackWarning)]
    plan = portattn.last_plan()
    return {"found": found, "path": plan.path if plan else "", "fell_back": told}


def check(call: Any, given: dict[str, Any], device: str) -> None:
    """Raise unless a public call is right, with results on the device of its tensors."""
    out, lse = getattr(portattn, call.problem.op)(**given)
    assert out.device == lse.device == torch.device(device), (out.device, lse.device)
    opcalls.assert_right(tolerance.on_cpu(call), out.cpu().contiguous(), lse.cpu().contiguous())


def random_call(problem: Problem, device: str = ONE) -> Any:
    return tolerance.random_call(problem, seed=3, device=device)


def of_op(name: str, **fields: Any) -> Case:
    def run() -> str:
        call = random_call(opcalls.problem(name, **fields))
        check(call, opcalls.given(call), ONE)
        return "right"

    return run


for name in opcalls.CALLS:
    for dtype in ("fp32", "fp16"):
        CASES[f"{name} {dtype}"] = of_op(name, dtype=dtype, head_dim_v=opcalls.CALLS[name].get("head_dim_v", 16))
PLAIN = {name: False for name in opcalls.LENGTHS} | {"head_dim_v": 16, "dtype": "fp16"}
DECODE = {"leftpad_k": False, "seq_q": 1, "head_dim_v": 16, "dtype": "fp16"}
CASES |= {
    "dense": of_op("attention", **PLAIN), "causal": of_op("attention", **PLAIN, causal="bottom_right"),
    "top left": of_op("attention", **PLAIN, causal="top_left"),
    "right padding": of_op("attention", **PLAIN | {"seqlens_q": True, "seqlens_k": True}, causal="bottom_right"),
    "decode plain": of_op("decode", **DECODE), "decode rows": of_op("decode", **DECODE | {"seq_q": 3}),
    "bshd": of_op("attention", **PLAIN, layout="bshd"), "empty batch": of_op("attention", **PLAIN | {"batch": 0}),
    "equal heads": of_op("attention", **PLAIN, heads_k=4), "no keys": of_op("attention", **PLAIN | {"seq_k": 0}),
}  # fmt: skip
for name, fields in {
    "window": {"window_left": 4}, "softcap": {"softcap": True}, "bias": {"bias": True}, "sinks": {"sinks": True},
    "alibi": {"alibi_slopes": True}, "mask": {"mask": True},
}.items():  # fmt: skip
    CASES[name] = of_op("attention", **PLAIN, **fields)


@case
def inference_mode() -> str:
    with torch.inference_mode():
        return str(CASES["causal"]())


@case
def side_stream() -> str:
    stream = torch.Stream(device=ONE)
    with stream:
        found = str(CASES["causal"]())
        assert torch.accelerator.current_stream(ONE) == stream
    return found


@case
def autocast() -> str:
    """Halves under autocast, as scaled_dot_product_attention."""
    call = random_call(DENSE)
    given = opcalls.given(call)
    halves = {n: t.half() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with torch.autocast(NAME, dtype=torch.float16):
        out, lse = portattn.attention(**given)
    assert out.dtype == torch.float16, out.dtype
    for one, other in zip((out, lse), portattn.attention(**halves), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    with torch.autocast(NAME, dtype=torch.float16, enabled=False):
        assert portattn.attention(**given)[0].dtype == torch.float32
    return "right"


@case
def compiled() -> str:
    """In one graph, under autocast too."""
    call = random_call(DENSE)
    given = opcalls.given(call)
    q, k, v = (given.pop(name) for name in "qkv")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = portattn.attention(q, k, v, **given)
        return out * 2.0, lse

    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    for enabled in (False, True):
        with torch.autocast(NAME, dtype=torch.float16, enabled=enabled):
            for one, other in zip(graph(q, k, v), function(q, k, v), strict=True):
                assert one.dtype == other.dtype, (one.dtype, other.dtype)
                assert torch.equal(one.cpu(), other.cpu())
    return "right"


@case
def vmapped() -> str:
    several = [torch.randn(3, 2, heads, 6, 16).to(ONE) for heads in (4, 2, 2)]
    found = torch.func.vmap(lambda q, k, v: portattn.attention(q, k, v, causal=True))(*several)
    for place, one in enumerate(zip(*several, strict=True)):
        torch.testing.assert_close(found[place].cpu(), portattn.attention(*one, causal=True).cpu())
    return "right"


@case
def trained() -> str:
    """Gradients of the output, the LSE and both, of each causal alignment."""
    for causal in ("none", "top_left", "bottom_right"):
        for loss in oracle64.LOSSES:
            call = oracle64.random_call(msgspec.structs.replace(DENSE, causal=causal), device=ONE)
            leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
            call = dataclasses.replace(call, **dict(zip("qkv", leaves, strict=True)))
            out, lse = portattn.attention(**opcalls.given(call))
            grads = torch.autograd.grad(oracle64.LOSSES[loss](out, lse), leaves, allow_unused=True)
            for grad, exact in zip(grads, oracle64.gradients(call, loss), strict=True):
                if grad is None:
                    assert not exact.any()
                else:
                    assert grad.device == call.q.device
                    torch.testing.assert_close(grad.cpu().double(), exact, rtol=1e-4, atol=1e-5)
    return "right"


@case
def dropped() -> str:
    """Dropped probabilities follow from the seed as on the CPU."""
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    seed = torch.tensor([7])
    found = portattn.attention(q.to(ONE), k.to(ONE), v.to(ONE), dropout_p=0.5, dropout_seed=seed.to(ONE))
    torch.testing.assert_close(found.cpu(), portattn.attention(q, k, v, dropout_p=0.5, dropout_seed=seed))
    portattn.attention(q.to(ONE), k.to(ONE), v.to(ONE), dropout_p=0.5)  # a seed drawn on the device
    return "right"


@case
def cache_writes() -> str:
    """Both operations that write a cache fill it as on the CPU."""
    new = [torch.randn(2, 2, 3, 16) for _ in "kv"]
    seqlens, slots = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([5, -1, 0])
    found = []
    for device in ("cpu", ONE):
        caches, pages = ([torch.zeros(2, 2, 10, 16, device=device) for _ in "kv"] for _ in range(2))
        rows = [tensor.to(device) for tensor in new]
        portattn.append_kv(*rows, *caches, seqlens.to(device))
        portattn.write_pages(*(t[0].transpose(0, 1) for t in rows), *pages, slots.to(device), page_layout="hpd")
        found.append([cache.cpu() for cache in (*caches, *pages)])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)
    return "right"


@case
def planned() -> str:
    """plan(), warmup() and last_plan() tell of one path."""
    given = opcalls.given(random_call(DENSE))
    made = portattn.plan("attention", **given)
    portattn.warmup([{"op": "attention"} | given])
    portattn.attention(**given)
    last = portattn.last_plan()
    assert made.path == last.path, (made.path, last.path)
    handle = portattn.prepare("attention", **given)
    for one, other in zip(handle.run(**given), portattn.attention(**given), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    return str(made.target) if hasattr(made, "target") else made.explain().splitlines()[1]


def findings() -> Iterator[tuple[str, Any]]:
    for name, function in CASES.items():
        yield name, run_case(function)


print(json.dumps(dict(findings())))
