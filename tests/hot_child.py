"""Run by test_hot_path.py, with fakedriver's library: calls on CPU tensors that count as an H100's.

Their kernels are really compiled, their launches recorded. Prints as JSON how calls by native.c compare with the same
calls by Python, and what warm-up and monitor do.
"""

# ruff: noqa: E402 - the driver comes before Triton

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import warnings
import weakref
from typing import Any

import fakedriver
import msgspec
import torch

fake = fakedriver.install()
import opcalls
import triton

import portattn
from portattn import Target, dispatch, fastpath, request
from portattn.launch import devices, native, triton_runtime
from portattn.reference.randomcalls import random_call
from portattn.request import Request

CPU = torch.device("cpu")
stream = 7
current_device: int | None = None
allocated: list[torch.Tensor] = []


def allocate(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    allocated.append(torch.empty_strided(shape, strides, dtype=dtype))
    return allocated[-1]


target = Target.parse("cuda:sm_90", f"triton=={triton.__version__}")
dispatch.detect_target = lambda device_type, index: (target, "")  # type: ignore[assignment]
Request.key = fakedriver.key  # type: ignore[method-assign]
runtime = devices.Runtime(current=lambda: current_device, stream=lambda index: stream, empty=allocate)
import portattn.kept as kept_module

devices.runtime = kept_module.runtime = lambda device_type: runtime  # type: ignore
from portattn.backends.cuda import counters

torch.cuda.is_current_stream_capturing = lambda: False  # a torch without CUDA has none
made_counters: list[torch.Tensor] = []


def zeros(count: int) -> torch.Tensor:
    made_counters.append(torch.zeros(count, dtype=torch.int32))
    return made_counters[-1]


counters._of_device[None] = counters.Counters(zeros)  # type: ignore[index]
found: dict[str, Any] = {"triton": triton.__version__, "why not": native.load(portattn.config.current().cache_dir)[1]}

SIZES: dict[str, dict[str, Any]] = {
    "attention": {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64},
    "varlen": {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64},
    "decode": {"dtype": "fp16", "num_splits": 3},
    "paged": {"dtype": "fp16", "num_splits": 2},
    "sparse": {"dtype": "fp16"},
    "mla": {"dtype": "bf16", "head_dim": 576, "head_dim_v": 512, "page_size": 64, "seq_k": 128},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "attention gluon": {
        "dtype": "bf16", "head_dim": 128, "head_dim_v": 128, "seq_q": 512, "seq_k": 512, "leftpad_q": False,
        "leftpad_k": False,
    },
    "mla gluon": SIZES["mla"],
}  # fmt: skip


def calls(name: str, path: str) -> tuple[Any, dict[str, Any]]:
    sizes = VARIANTS.get(name) or SIZES[name]
    call = random_call(opcalls.problem(name.split()[0], **sizes), seed=1, device="cpu")
    return call.problem.op, opcalls.given(call) | {"backend": path}


def entry_of(op: str) -> fastpath.Entry:
    return fastpath.recent[op][0]


def normal(launches: list[fakedriver.Launch], arguments: dict[str, Any]) -> list[list[Any]]:
    """Launches with names in place of the addresses of what was allocated, since each call allocates anew."""
    places = {one.data_ptr(): "counter" for made in made_counters for one in made.split(counters.APART)}
    places |= {t.data_ptr(): n for n, t in arguments.items() if isinstance(t, torch.Tensor)}
    # Buffers lie in one piece of memory, each from a multiple of 256 bytes on.
    places |= {
        t.data_ptr() + offset: f"allocated {i}" + (f" + {offset}" if offset else "")
        for i, t in enumerate(allocated)
        for offset in range(0, max(t.untyped_storage().nbytes(), 1), 256)
    }
    seen = []
    for launch in launches:
        words = [launch.parameters[i : i + 8] for i in range(0, len(launch.parameters), 4)]
        named = [places.get(int.from_bytes(w, "little"), "") for w in words]
        plain = bytes(launch.parameters)
        for i, n in enumerate(named):
            if n:
                plain = plain[: 4 * i] + b"\xff" * 8 + plain[4 * i + 8 :]
        seen.append([*launch[:5], launch.stream, [n for n in named if n], plain.hex()])
    return seen


def _holds(launch: fakedriver.Launch, tensor: torch.Tensor) -> bool:
    """Whether a tensor's address is among a launch's parameters."""
    return tensor.data_ptr().to_bytes(8, "little") in launch.parameters


def once(op: str, arguments: dict[str, Any]) -> tuple[list[list[Any]], list[list[int]], list[bool]]:
    """One call's launches, the shapes of its results, and whether they are what was allocated."""
    allocated.clear()
    result = opcalls.perform(op, arguments)
    results = result if isinstance(result, tuple) else (result,)
    ours = [any(r is t for t in allocated) for r in results]
    return normal(fake.launches(), arguments), [list(r.shape) for r in results], ours


def first_call(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Launches of a call that nothing is kept of: what of each must be as later, and whose addresses they have."""
    result = opcalls.perform(op, arguments)
    results = result if isinstance(result, tuple) else (result,)
    launches = fake.launches()
    given = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    return {
        "launches": [[*one[:5], one.stream, 2 * len(one.parameters)] for one in launches],
        "results": all(any(_holds(one, t) for one in launches) for t in results),
        "given": sum(any(_holds(one, t) for one in launches) for t in given),
        "kept": [list(t.shape) for t in results],
    }


def held(op: str, arguments: dict[str, Any]) -> list[str]:
    """Tensors of a call that live on although nobody but what is kept could hold them."""
    mine = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    fastpath.forget()
    result = opcalls.perform(op, mine)
    results = result if isinstance(result, tuple) else (result,)
    watched = {n: weakref.ref(t) for n, t in mine.items() if isinstance(t, torch.Tensor)}
    watched |= {f"result {i}": weakref.ref(t) for i, t in enumerate(results)}
    fake.launches()
    mine.clear()
    allocated.clear()
    del result, results
    gc.collect()
    return [n for n, one in watched.items() if one() is not None]


def compare(name: str, path: str) -> None:
    op, arguments = calls(name, path)
    with portattn.settings(isolate="never", canary="never"):
        opcalls.perform(op, arguments)  # compiles
        entry = entry_of(op)
        assert entry.kept.direct is not None, entry.kept.plan
        for kernel in entry.kept.direct._kernels:
            fake.describe(kernel.compiled.function, triton_runtime.ptx_sizes(kernel.compiled.asm["ptx"]))
        fake.library.fake_clear()
        fastpath.forget()
        first = first_call(op, arguments)
        entry = entry_of(op)
        by_c = once(op, arguments)
        hit, entry.hit = entry.hit, None
        by_python = once(op, arguments)
        entry.hit = hit
        other = opcalls.changed(arguments)
        moved, entry.hit = once(op, other), None
        moved_by_python = once(op, other)
        entry.hit = hit
        handle = portattn.prepare(op, **arguments)
        places = [torch.full_like(t, float("nan")) for t in opcalls.perform(op, arguments)]
        fake.library.fake_clear()
        allocated.clear()
        ran = handle.run(**arguments, out=places[0], lse=places[1])
        prepared = {
            "allocated": len(allocated), "given": all(a is b for a, b in zip(ran, places, strict=True)),
            "launches": len(into := fake.launches()), "path": handle.plan.path,
            "out": all(any(_holds(one, t) for one in into) for t in places),
        }  # fmt: skip
        found[name if name in VARIANTS else f"{name} {path}"] = {
            "path": entry.kept.plan.path, "hit": hit is not None, "launches": len(by_c[0]),
            "way": entry.kept.direct.way, "reason": entry.kept.direct.reason, "same": by_c == by_python,
            "first": first, "by C": [[*one[:6], len(one[7])] for one in by_c[0]], "held": held(op, arguments),
            "ours": all(by_c[2]),
            "moved": moved == moved_by_python, "named": sorted({n for one in by_c[0] for n in one[6]}),
            "last": portattn.last_plan() is entry.kept.plan, "prepared": prepared,
        }  # fmt: skip


def loop(function: Any) -> float:
    best = 1e9
    for _ in range(5):
        begun = time.perf_counter()
        for _ in range(200):
            function()
        best = min(best, (time.perf_counter() - begun) / 200)
        fake.library.fake_clear()
        allocated.clear()
    return round(best * 1e6, 2)


def differing() -> None:
    """What a kept call must not be taken for, and what has to go by Python."""
    global current_device, stream
    op, arguments = calls("attention", "triton")
    made: list[str] = []
    matched = fastpath.Entry.match
    fastpath.Entry.match = lambda self, *given: made.append("python") or matched(self, *given)  # type: ignore

    def hits(**changes: Any) -> str:
        """Which way a call finds a kept one: by C, by Python, or not at all."""
        made.clear()
        given = arguments | changes
        names = ("k", "v", "alibi_slopes", "sinks", "bias", "mask", "seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")
        values = ("scale", "causal", "window", "softcap", "dropout_p", "return_lse", "layout", "backend", "validate")
        defaults = {"causal": False, "dropout_p": 0.0, "layout": "bhsd"}
        result = request.again(
            op, (given["q"], *(given.get(n) for n in names)), tuple(given.get(n, defaults.get(n)) for n in values)
        )
        fake.launches()
        return ("nothing" if result is None else "C") if not made else f"python {result is not None}"

    with portattn.settings(isolate="never", canary="never"):
        opcalls.perform(op, arguments)
        q, k = arguments["q"], arguments["k"]
        wide = torch.cat([q, q], -1)
        misaligned = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
        seen = {
            "same": hits(), "scale": hits(scale=0.123), "type": hits(return_lse=1), "window": hits(window=(1, 2)),
            "array": hits(scale=torch.ones(2)), "shape": hits(q=q[:, :, 1:]),
            "strides": hits(q=wide[..., : q.shape[-1]]), "dtype": hits(q=q.half()), "aligned": hits(q=misaligned),
            "gradient": hits(q=q.clone().requires_grad_()),
            "twins": hits(k=arguments["v"]), "more": hits(sinks=torch.ones(4)), "less": hits(seqlens_k=None),
            "no tensor": hits(k=3), "subclass": hits(k=torch.nn.Parameter(k, requires_grad=False)),
        }  # fmt: skip
        current_device = 5
        torch.cpu.device = _Device  # type: ignore[attr-defined]
        seen["device"] = hits()
        current_device = None
        holder = triton_runtime._holder()
        before = holder.launch_enter_hook
        if hasattr(before, "add"):
            before.add(hook := lambda metadata: None)
        else:
            holder.launch_enter_hook = lambda metadata: None
        seen["hook"] = hits()
        if hasattr(before, "add"):
            before.remove(hook)
        else:
            holder.launch_enter_hook = before
        torch.cuda.current_device = lambda: 0
        fake.library.fake_lose_context()
        seen["context"] = hits()
        fake.library.fake_refuse(1)
        try:
            hits()
        except RuntimeError as error:
            seen["refused"] = str(error)
        seen["after"] = hits()
        with portattn.settings(cache_dir=portattn.config.current().cache_dir):
            seen["equal settings"] = hits()
        with portattn.settings(fallback="error"):
            seen["other settings"] = hits()
        stream = 11
        opcalls.perform(op, arguments)
        seen["stream"] = str(fake.launches()[0].stream)
        stream = 7
    fastpath.Entry.match = matched  # type: ignore[method-assign]
    found["differing"] = seen


class _Device:
    """torch.cpu has none: what a call on another current device enters."""

    def __init__(self, index: int | None) -> None:
        self.index = index

    def __enter__(self) -> None:
        global current_device
        self.before, current_device = current_device, self.index

    def __exit__(self, *error: object) -> None:
        global current_device
        current_device = self.before


def concurrent() -> None:
    """Threads that make the same kind of call: every launch has its own addresses."""
    op, arguments = calls("decode", "triton")
    wrong: list[str] = []

    def work(number: int) -> None:
        own = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        for _ in range(50):
            opcalls.perform(op, own)
        kept.append(own)

    kept: list[dict[str, Any]] = []
    with portattn.settings(isolate="never", canary="never"):
        opcalls.perform(op, arguments)
    settings = portattn.config.current()
    fake.launches()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=_with(settings, work), args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    launches = fake.launches()
    firsts = [launch for launch in launches if len(launch.parameters) == max(len(x.parameters) for x in launches)]
    for launch in firsts:
        owners = {
            i for i, own in enumerate(kept) for n in ("q", "k_cache", "v_cache")
            if own[n].data_ptr().to_bytes(8, "little") in launch.parameters
        }  # fmt: skip
        if len(owners) != 1:
            wrong.append(str(owners))
    found["threads"] = [len(launches), len(firsts), wrong]


def warming() -> None:
    """warmup, then the first call; and the monitor's warnings, each by what brought it about."""
    from portattn import monitoring, warming

    warming._synchronise = lambda device: None
    shape, caught = "bf16[1,4,{},80]", {}
    spec = {"op": "attention", **dict.fromkeys("qkv", shape.format(96)), "backend": "triton"}

    def late(name: str, **arguments: Any) -> None:
        allocated.clear()
        q, k, v = (
            torch.zeros(1, 4, arguments.pop(n, 96), arguments.get("dim", 80), dtype=torch.bfloat16) for n in "qkv"
        )
        arguments.pop("dim", None)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            portattn.attention(q, k, v, backend="triton", **arguments)
        caught[name] = [str(one.message) for one in seen if one.category is portattn.CompileWarning]

    with portattn.settings(isolate="never", canary="never"):
        report = portattn.warmup([spec], device="cpu")
        entry = entry_of("attention")
        for kernel in entry.kept.direct._kernels:
            fake.describe(kernel.compiled.function, triton_runtime.ptx_sizes(kernel.compiled.asm["ptx"]))
        fake.library.fake_clear()
        hit, ways = entry.hit, []
        entry.hit = lambda *given: ways.append("C") or hit(*given)
        late("first")
        entry.hit = hit
        first = {"ways": ways, "warnings": caught.pop("first"), "launches": len(fake.launches())}
        again = portattn.warmup([spec], device="cpu")
        found["warmed"] = {
            "report": msgspec.to_builtins(report.specs[0]), "again": again.specs[0].loaded, "first": first
        }  # fmt: skip
        late("late", dim=72)
        late("again", dim=72)
        portattn.monitor(False)
        late("off", dim=88)
        portattn.monitor()
        with portattn.settings(monitor="never"):
            late("never", dim=96)
        portattn.monitor(False)
        with portattn.settings(monitor="always"):
            late("always", causal=True)
    found["monitored"] = caught
    assert monitoring._armed is False


def _with(settings: Any, work: Any) -> Any:
    def run(number: int) -> None:
        with portattn.settings(isolate="never", canary="never"):
            work(number)

    return run


for name in SIZES:
    compare(name, "triton")
if triton.__version__ == "3.6.0":
    compare("attention gluon", "auto")
    compare("mla gluon", "auto")
differing()
concurrent()
warming()
if "--time" in sys.argv:
    with portattn.settings(isolate="never", canary="never"):
        for name, path in (("attention", "triton"), ("decode", "triton"), ("attention", "auto")):
            op, arguments = calls(name, path)
            opcalls.perform(op, arguments)
            perform = getattr(portattn, op)
            entry = entry_of(op)
            times = [loop(lambda: perform(**arguments))]  # noqa: B023
            hit, entry.hit = entry.hit, None
            times.append(loop(lambda: perform(**arguments)))  # noqa: B023
            entry.hit = hit
            found[f"µs {name} {path}"] = times
print(json.dumps(found))
