"""Run by test_devices.py: public calls on the second of two devices that are not CUDA's, of the type and the package
that the command line names. Prints as JSON each case's finding ("right", or the error), path and fall-backs."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import torch

NAME, PACKAGE = sys.argv[1:3]
importlib.import_module(PACKAGE)  # before portattn: as a vendor's package is imported

import opcalls  # noqa: E402
import oracle64  # noqa: E402

import portattn  # noqa: E402
from portattn.api import dispatch  # noqa: E402
from portattn.launch.torch_compat import chip_name, current_accelerator, runtime, timed_device  # noqa: E402
from portattn.schema.problem import Problem  # noqa: E402
from portattn.testing import tolerance  # noqa: E402

DEVICE = f"{NAME}:1"
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
    """Return the finding of a case, the path of its last call, and the fall-backs that it was told of."""
    dispatch._warned.clear()  # each case is to be told
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


def random_call(problem: Problem) -> Any:
    return tolerance.random_call(problem, seed=3, device=DEVICE)


def of_op(name: str, **fields: Any) -> Case:
    """Return a case of a random call, with NaN wherever nothing may be read, against float64."""

    def run() -> str:
        call = random_call(opcalls.problem(name, **fields))
        out, lse = opcalls.perform(call.problem.op, opcalls.given(call))
        assert out.device == lse.device == torch.device(DEVICE)
        opcalls.assert_right(tolerance.on_cpu(call), out.cpu().contiguous(), lse.cpu().contiguous())
        return "right"

    return run


for name in opcalls.CALLS:
    for dtype in ("fp32", "fp16"):
        CASES[f"{name} {dtype}"] = of_op(name, dtype=dtype, head_dim_v=opcalls.CALLS[name].get("head_dim_v", 16))
PLAIN = dict.fromkeys(opcalls.LENGTHS, False) | {"head_dim_v": 16, "dtype": "fp16"}
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
    stream = torch.Stream(device=DEVICE)
    with stream:
        found = str(CASES["causal"]())
        assert torch.accelerator.current_stream(DEVICE) == stream
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
    several = [torch.randn(3, 2, heads, 6, 16).to(DEVICE) for heads in (4, 2, 2)]
    found = torch.func.vmap(lambda q, k, v: portattn.attention(q, k, v, causal=True))(*several)
    for place, one in enumerate(zip(*several, strict=True)):
        torch.testing.assert_close(found[place].cpu(), portattn.attention(*one, causal=True).cpu())
    return "right"


@case
def trained() -> str:
    """Gradients of the output, the LSE and both, of each causal alignment."""
    for causal in ("none", "top_left", "bottom_right"):
        for loss in oracle64.LOSSES:
            call = oracle64.random_call(msgspec.structs.replace(DENSE, causal=causal), device=DEVICE)
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
    found = portattn.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), dropout_p=0.5, dropout_seed=seed.to(DEVICE))
    torch.testing.assert_close(found.cpu(), portattn.attention(q, k, v, dropout_p=0.5, dropout_seed=seed))
    portattn.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), dropout_p=0.5)  # a seed drawn on the device
    return "right"


@case
def cache_writes() -> str:
    """Both operations that write a cache fill it as on the CPU."""
    new = [torch.randn(2, 2, 3, 16) for _ in "kv"]
    seqlens, slots = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([5, -1, 0])
    found = []
    for device in ("cpu", DEVICE):
        caches, pages = ([torch.zeros(2, 2, 10, 16, device=device) for _ in "kv"] for _ in range(2))
        rows = [tensor.to(device) for tensor in new]
        portattn.append_kv(*rows, *caches, seqlens.to(device))
        tokens = [tensor[0].transpose(0, 1) for tensor in rows]
        portattn.write_pages(*tokens, *pages, slots.to(device), page_layout="hpd")
        found.append([cache.cpu() for cache in (*caches, *pages)])
    for one, other in zip(*found, strict=True):
        assert one.any()
        assert torch.equal(one, other)
    return "right"


@case
def planned() -> str:
    """plan(), warmup() on the current device, prepare() and last_plan() tell of one path."""
    given = opcalls.given(random_call(DENSE))
    made = portattn.plan("attention", **given)
    assert current_accelerator() == torch.device(NAME, 0)
    portattn.warmup([{"op": "attention"} | given])
    handle = portattn.prepare("attention", **given)
    for one, other in zip(handle.run(**given), portattn.attention(**given), strict=True):
        assert torch.equal(one.cpu(), other.cpu())
    assert portattn.last_plan().path == made.path
    return made.target


@case
def timed() -> str:
    """Events of the device keep the benchmarks' and the tuner's time, and launches find its streams."""
    from portattn.tools.bench.rounds import DeviceClock
    from portattn.tools.tune.race import DeviceSampleClock

    device = timed_device()
    assert device is not None
    clock, numbers = DeviceClock(device.type), torch.zeros(1 << 12, device=device)

    def run() -> None:
        numbers.add_(1.0)

    assert min(clock.turn_ms(run, "hot", 3, 1.0), *DeviceSampleClock(NAME).samples(run, "hot", True)) > 0.0
    assert clock.peak_extra_bytes(run) is None
    assert clock.lost() == ""
    with torch.Stream(device=DEVICE) as stream:
        assert runtime(NAME).stream(1) == stream.native_handle
    return chip_name(device)


print(json.dumps({name: run_case(function) for name, function in CASES.items()}))
