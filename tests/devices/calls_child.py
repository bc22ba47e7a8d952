"""Run by test_devices.py: public calls on the second of two devices that are not CUDA's, of the type and the package
that the command line names. Prints as JSON each case's finding ("right", or the error), path and fall-backs."""

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
from portattn.tools.bench.rounds import DeviceClock  # noqa: E402
from portattn.tools.tune.race import DeviceSampleClock  # noqa: E402

DEVICE = f"{NAME}:1"
DENSE = Problem(batch=2, heads_q=4, heads_k=2, seq_q=5, seq_k=7, head_dim=16, head_dim_v=16, dtype="fp32",
    causal="bottom_right", return_lse=True)  # fmt: skip
Case = Callable[[], str]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def run_case(function: Case) -> dict[str, Any]:
    dispatch._warned.clear()  # each case is to be told
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = function()
        except Exception as error:  # noqa: BLE001 - a finding
            found = "".join(traceback.format_exception(error))[-2000:]
    told = [str(one.message) for one in caught if issubclass(one.category, portattn.FallbackWarning)]
    plan = portattn.last_plan()
    return {"found": found, "path": plan.path if plan else "", "fell_back": told}


def given_of(problem: Problem, device: str = DEVICE) -> dict[str, Any]:
    return opcalls.given(tolerance.random_call(problem, seed=3, device=device))


def same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other.cpu())


def of_op(name: str, **fields: Any) -> Case:
    """Return a case of a random call, with NaN wherever nothing may be read, against float64."""

    def run() -> str:
        call = tolerance.random_call(opcalls.problem(name, **fields), seed=3, device=DEVICE)
        out, lse = opcalls.perform(call.problem.op, opcalls.given(call))
        assert out.device == lse.device == torch.device(DEVICE)
        opcalls.assert_right(tolerance.on_cpu(call), out.cpu().contiguous(), lse.cpu().contiguous())
        return "right"

    return run


PLAIN = dict.fromkeys(opcalls.LENGTHS, False) | {"head_dim_v": 16, "dtype": "fp16"}
DECODE = {"leftpad_k": False, "seq_q": 1, "head_dim_v": 16, "dtype": "fp16"}
DENSE_CASES = {
    "dense": {}, "causal": {"causal": "bottom_right"}, "top left": {"causal": "top_left"}, "bshd": {"layout": "bshd"},
    "right padding": {"seqlens_q": True, "seqlens_k": True, "causal": "bottom_right"}, "empty batch": {"batch": 0},
    "no keys": {"seq_k": 0}, "equal heads": {"heads_k": 4}, "window": {"window_left": 4}, "softcap": {"softcap": True},
    "bias": {"bias": True}, "sinks": {"sinks": True}, "alibi": {"alibi_slopes": True}, "mask": {"mask": True},
}  # fmt: skip
for name in opcalls.CALLS:
    for dtype in ("fp32", "fp16"):
        CASES[f"{name} {dtype}"] = of_op(name, dtype=dtype, head_dim_v=opcalls.CALLS[name].get("head_dim_v", 16))
CASES |= {name: of_op("attention", **PLAIN | fields) for name, fields in DENSE_CASES.items()} | {
    "decode plain": of_op("decode", **DECODE), "decode rows": of_op("decode", **DECODE | {"seq_q": 3}),
    "large pages": of_op("paged", head_dim_v=16, dtype="fp16", seq_q=1, seq_k=384, page_size=128)}  # fmt: skip


@case
def inference_mode() -> str:
    with torch.inference_mode():
        return CASES["causal"]()


@case
def side_stream() -> str:
    with torch.Stream(device=DEVICE) as stream:
        found = CASES["causal"]()
        assert (torch.accelerator.current_stream(DEVICE), runtime(NAME).stream(1)) == (stream, stream.native_handle)
    return found


@case
def autocast() -> str:
    """Halves under autocast, as scaled_dot_product_attention."""
    given = given_of(DENSE)
    halves = {n: t.half() if isinstance(t, torch.Tensor) else t for n, t in given.items()}
    with torch.autocast(NAME, dtype=torch.float16):
        found = portattn.attention(**given)
    same(found, portattn.attention(**halves))
    with torch.autocast(NAME, dtype=torch.float16, enabled=False):
        assert portattn.attention(**given)[0].dtype == torch.float32
    return "right"


@case
def compiled() -> str:
    given = given_of(DENSE)
    q, k, v = (given.pop(name) for name in "qkv")

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = portattn.attention(q, k, v, **given)
        return out * 2.0, lse

    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    for enabled in (False, True):
        with torch.autocast(NAME, dtype=torch.float16, enabled=enabled):
            same(graph(q, k, v), function(q, k, v))
    # Results have the strides of their fakes, on which a graph's gradients rely.
    packed = given_of(opcalls.problem("varlen", head_dim=16, head_dim_v=16, causal="bottom_right"))
    leaves = {name: packed[name].detach().requires_grad_() for name in "qkv"}
    trained = torch.compile(lambda **t: portattn.varlen_attention(**(packed | t)), backend="aot_eager", fullgraph=True)
    results = trained(**leaves)
    assert all(result.is_contiguous() for result in results)
    torch.autograd.grad(sum(result.nan_to_num(0.0, 0.0, 0.0).sum() for result in results), [*leaves.values()])
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
    """Gradients of the output, the LSE and both, of each causal alignment, against float64."""
    for causal in ("none", "top_left", "bottom_right"):
        for name, loss in oracle64.LOSSES.items():
            call = oracle64.random_call(msgspec.structs.replace(DENSE, causal=causal), device=DEVICE)
            leaves = [tensor.detach().requires_grad_() for tensor in (call.q, call.k, call.v)]
            call = dataclasses.replace(call, **dict(zip("qkv", leaves, strict=True)))
            found = torch.autograd.grad(loss(*portattn.attention(**opcalls.given(call))), leaves, allow_unused=True,
                materialize_grads=True)  # fmt: skip
            for grad, exact in zip(found, oracle64.gradients(call, name), strict=True):
                torch.testing.assert_close(grad.cpu().double(), exact, rtol=1e-4, atol=1e-5)
    return "right"


@case
def trained_features() -> str:
    """Gradients of packed sequences and features as on the CPU, with NaN in the padding."""
    plain = PLAIN | {"dtype": "fp32"}
    dense = [("attention", plain | fields) for fields in ({"window_left": 4}, {"sinks": True}, {"bias": True})]
    for name, fields in (*dense, ("varlen", {"head_dim_v": 16, "causal": "bottom_right"})):
        found = []
        for device in ("cpu", DEVICE):
            given = given_of(opcalls.problem(name, **fields), device)
            leaves = [given[name].requires_grad_() for name in "qkv"]
            out, lse = opcalls.perform("varlen_attention" if name == "varlen" else name, given)
            loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sin().sum()
            found.append([grad.cpu() for grad in torch.autograd.grad(loss, leaves)])
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return "right"


@case
def dropped() -> str:
    q, k, v = (torch.randn(2, heads, 9, 16) for heads in (4, 2, 2))
    seed = torch.tensor([7])
    found = portattn.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), dropout_p=0.5, dropout_seed=seed.to(DEVICE))
    torch.testing.assert_close(found.cpu(), portattn.attention(q, k, v, dropout_p=0.5, dropout_seed=seed))
    portattn.attention(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), dropout_p=0.5)  # a seed drawn on the device
    return "right"


@case
def cache_writes() -> str:
    new = [torch.randn(2, 2, 3, 16) for _ in "kv"]
    seqlens, slots = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([5, -1, 0])
    found = []
    for device in ("cpu", DEVICE):
        caches, pages = ([torch.zeros(2, 2, 10, 16, device=device) for _ in "kv"] for _ in range(2))
        rows = [tensor.to(device) for tensor in new]
        portattn.append_kv(*rows, *caches, seqlens.to(device))
        tokens = [tensor[0].transpose(0, 1) for tensor in rows]
        portattn.write_pages(*tokens, *pages, slots.to(device), page_layout="hpd")
        found.append([*caches, *pages])
    assert all(cache.any() for cache in found[0])
    same(*found)
    return "right"


@case
def planned() -> str:
    """plan(), warmup() on the current device, prepare() and last_plan() tell of one path."""
    given = given_of(DENSE)
    made = portattn.plan("attention", **given)
    assert current_accelerator() == torch.device(NAME, 0)
    portattn.warmup([{"op": "attention"} | given])
    same(portattn.prepare("attention", **given).run(**given), portattn.attention(**given))
    assert portattn.last_plan().path == made.path
    return made.target


@case
def timed() -> str:
    """Events of the device keep the benchmarks' and the tuner's time."""
    device = timed_device()
    assert device is not None
    clock, numbers = DeviceClock(device.type), torch.zeros(1 << 12, device=device)

    def run() -> None:
        numbers.add_(1.0)

    assert min(clock.turn_ms(run, "hot", 3, 1.0), *DeviceSampleClock(NAME).samples(run, "hot", True)) > 0.0
    assert (clock.peak_extra_bytes(run), clock.lost()) == (None, "")
    return chip_name(device)


print(json.dumps({name: run_case(function) for name, function in CASES.items()}))
