"""Run by test_kinds.py, with fakedriver's library: warm-ups of calls whose sizes vary, on CPU tensors that count
as an H100's, and then every call that they were for. Prints as JSON what the warm-ups reported, and how many calls had
to be planned afterwards."""

# ruff: noqa: E402 - the driver comes before Triton

import json
import warnings
from typing import Any

import fakedriver
from fuzz.recorded import Recorder

recorder = Recorder()
import msgspec
import torch
import triton

import portattn
from portattn.api import dispatch, shape_polymorphism, warmup
from portattn.api.warmup import Spec
from portattn.launch import cache

warmup.synchronize = lambda device: None  # type: ignore[assignment]
planned: list[str] = []
run = dispatch.run
dispatch.run = lambda *given: planned.append(str(given[0].problem)) or run(*given)  # type: ignore[func-returns-value]
traced: list[Any] = []
trace, compile_all = shape_polymorphism.Trace, warmup._compile
shape_polymorphism.Trace = lambda: traced.append(0) or trace()  # type: ignore[assignment, misc, func-returns-value]


def empty(shape: Any, value: float, dtype: Any, device: Any) -> torch.Tensor:
    """Launches are recorded: lengths are read, and of the rest, which takes long to fill, nothing is."""
    made = torch.empty(shape, dtype=dtype, device=device)
    return made if dtype in (torch.float16, torch.bfloat16) else made.fill_(value)


torch.full = empty  # type: ignore[assignment]
CPU = torch.device("cpu")
HALF = {"k_cache": "fp16[B,2,S,64]", "v_cache": "fp16[B,2,S,64]"}
DECODE = {"op": "decode_attention", "q": "fp16[B,8,1,64]", "seqlens_k": "i32[B]"} | HALF
SPECS: dict[str, dict[str, Any]] = {
    "decode": DECODE | {"sizes": {"B": [4, 1, 2], "S": "1..3000"}},
    "a view of a cache": DECODE | {name: text + ":524288,262144,64,1" for name, text in HALF.items()}
    | {"sizes": {"B": (1, 3), "S": range(1, 4097, 5)}},
    "attention": {
        "op": "attention", **dict.fromkeys("qkv", "bf16[1,4,S,64]"), "causal": True, "sizes": {"S": "1..700"},
    },
    "varlen": {
        "op": "varlen_attention", **dict.fromkeys("qkv", "bf16[T,4,64]"), "cu_seqlens_q": "i32[5]",
        "cu_seqlens_k": "i32[5]", "max_seqlen_q": "M", "max_seqlen_k": "M",
        "sizes": {"T": [1, 64, 1000, 4000], "M": "1..200"},
    },
}  # fmt: skip


def calls(spec: dict[str, Any]) -> Any:
    read = Spec(0, spec)
    for point in read.points.tolist():
        yield read.arguments(CPU, read.at(point))


def seen(name: str) -> dict[str, Any]:
    spec, told = SPECS[name], []
    cache.forget()
    traced.clear()
    report = portattn.warmup([spec], device="cpu", say=told.append)
    traces = len(traced)
    planned.clear()
    count = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for arguments in calls(spec):
            getattr(portattn, spec["op"])(**arguments)
            recorder.fake.library.fake_clear()  # its memory has an end
            count += 1
    return {
        "classes": [msgspec.to_builtins(one) for one in report.specs], "calls": count, "planned": planned[:5],
        "warnings": [str(one.message) for one in warned], "told": told, "traces": traces,
    }  # fmt: skip


def mixed_up(made: Any, *rest: Any) -> float:
    """Compile, and let each class that was planned have another one's trace."""
    shapes, inputs = [one.shape for one in made], [one.shape.trace.inputs for one in made]
    for one, shape, own in zip(made, reversed(shapes), inputs, strict=True):
        one.shape, shape.trace.inputs = shape, own
    return compile_all(made, *rest)


def ends() -> dict[str, Any]:
    cache.forget()
    warmup.MAX_CLASSES = 2  # type: ignore[misc]
    many = portattn.warmup([SPECS["decode"]], device="cpu").specs
    heads = {
        "op": "attention", "q": "bf16[1,4,64,64]", **dict.fromkeys("kv", "bf16[1,H,64,64]"), "sizes": {"H": [3, 4]},
    }  # fmt: skip
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        wrong = portattn.warmup([heads], device="cpu").specs
    return {
        "many": [one.sizes for one in many], "wrong": [one.failed for one in wrong],
        "warned": [str(one.message) for one in warned],
    }  # fmt: skip


# Where lengths are read back, which is on a CPU alone, sizes decide more than launches.
with portattn.settings(isolate="never", canary="never", validate="never"):
    found: dict[str, Any] = {name: seen(name) for name in SPECS}
    warmup._compile = mixed_up  # type: ignore[assignment]
    found["mixed up"] = seen("attention")
    warmup._compile = compile_all
    found["ends"] = ends()
assert isinstance(recorder.fake, fakedriver.Fake)
print(json.dumps(found | {"triton": triton.__version__}))
