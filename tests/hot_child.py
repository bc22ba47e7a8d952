"""Run by test_hot_path.py, with fakedriver's library: calls on CPU tensors that count as an H100's. Their
launches are recorded. Prints as JSON how calls by native.c compare with the same calls by Python,
and what warm-up and monitor do."""

# ruff: noqa: E402 - the driver comes before Triton

import contextlib
import dataclasses
import functools
import gc
import json
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import fakedriver
import msgspec
import torch
from threads import run_threads
from torch.utils.flop_counter import FlopCounterMode

fake = fakedriver.install()
import opcalls
import triton
from fakechip import Chip, leave_bodies_out

import portattn
from portattn.api.out_argument import into
from portattn.launch import cache, cached_launch, native, triton_compat
from portattn.testing.random_calls import random_call

chip = Chip(fake)
leave_bodies_out()
found: dict[str, Any] = {
    "triton": triton.__version__, "reads": cache.reader() is not None,
    "why not": native.load(portattn.config.current().cache_dir)[1],
}  # fmt: skip

SIZES: dict[str, dict[str, Any]] = {
    "attention": {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64},
    "varlen": {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64}, "decode": {"dtype": "fp16", "num_splits": 3},
    "paged": {"dtype": "fp16", "num_splits": 2}, "sparse": {"dtype": "fp16"},
    "mla": {"dtype": "bf16", "head_dim": 576, "head_dim_v": 512, "page_size": 64, "seq_k": 128},
}  # fmt: skip
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


def kind_of(op: str) -> cache.CallKey:
    return [kind for kind in cache.every_kind() if kind.op == op][-1]


def _asking_in_python(kind: cache.CallKey) -> Any:
    """The kind by native.c on a torch whose tensors it cannot read by themselves."""
    reader, cache.reader = cache.reader, lambda: None
    try:
        return kind._native(kind.classes[0])
    finally:
        cache.reader = reader


def _holds(launch: fakedriver.Launch, tensor: torch.Tensor) -> bool:
    return tensor.data_ptr().to_bytes(8, "little") in launch.parameters


def first_call(op: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Launches of a call that nothing is kept of: what of each must be as later, and whose addresses they have."""
    result = opcalls.perform(op, arguments)
    results = result if isinstance(result, tuple) else (result,)
    launches = fake.launches()
    given = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    return {
        "launches": [[*one[:5], one.stream, 2 * len(one.parameters)] for one in launches],
        "results": all(any(_holds(one, t) for one in launches) for t in results),
        "given": sum(any(_holds(one, t) for one in launches) for t in given), "kept": [list(t.shape) for t in results],
    }  # fmt: skip


def held(op: str, arguments: dict[str, Any]) -> list[str]:
    """Tensors of a call that live on although nobody but what is kept could hold them."""
    mine = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    cache.forget()
    result = opcalls.perform(op, mine)
    results = result if isinstance(result, tuple) else (result,)
    watched = {n: weakref.ref(t) for n, t in mine.items() if isinstance(t, torch.Tensor)}
    watched |= {f"result {i}": weakref.ref(t) for i, t in enumerate(results)}
    fake.launches()
    mine.clear()
    chip.allocated.clear()
    del result, results
    gc.collect()
    return [n for n, one in watched.items() if one() is not None]


def wrong_places(out: torch.Tensor, lse: torch.Tensor) -> dict[str, tuple[Any, Any]]:
    """Pairs of places of which one is not as the call would allocate it, with the name of that one."""
    twice = out.new_zeros(*out.shape, 2)
    shifted = out.new_zeros(out.numel() + 1)[1:].view(out.shape)
    longer = out.new_zeros(2, *out.shape)[0:, ...].flatten(0, 1)
    return {
        "out of another dtype": (out.double(), lse), "out of another shape": (out.flatten(), lse),
        "out of another size": (longer, lse), "out not contiguous": (twice[..., 0], lse),
        "out off by an element": (shifted, lse), "out elsewhere": (out.to("meta"), lse), "out no tensor": ([1.0], lse),
        "lse of another dtype": (out, lse.half()), "lse of another shape": (out, lse.flatten()),
        "out with a history": (out.detach().clone().requires_grad_(), lse),
        "lse with a history": (out, lse.detach().clone().requires_grad_()),
    }  # fmt: skip


def wrongly_placed(handle: portattn.Prepared, arguments: dict[str, Any], out: Any, lse: Any) -> Any:
    """What a handle says of such places, and how many launches it made."""
    fake.library.fake_clear()
    try:
        handle.run(**arguments, out=out, lse=lse)
    except portattn.ArgumentError as error:
        return [error.argument, len(fake.launches())]
    return ["", len(fake.launches())]


def written_past(op: str, arguments: dict[str, Any], places: list[torch.Tensor]) -> list[str]:
    """Places that a kernel of into() was given, though they are not as the call would allocate its result."""
    name = "q_nope" if "q_nope" in arguments else "q"
    over = arguments[name].clone()  # over its own queries: of the result's shape, but not apart
    wrong = {what: (out, arguments) for what, (out, _) in wrong_places(*places).items() if what.startswith("out ")}
    wrong |= {
        "out over q": (over, {**arguments, name: over}),
        "out to be negated": (torch._neg_view(places[0]), arguments),
    }
    found = []
    for what, (out, given) in wrong.items():
        fake.library.fake_clear()
        chip.allocated.clear()
        with contextlib.suppress(portattn.ArgumentError):
            into(out, op, **{**given, "return_lse": False})
        if out is over:  # whose address is among the launch's in any case
            taken = not any(t.dtype == over.dtype for t in chip.allocated)
        else:
            taken = isinstance(out, torch.Tensor) and out.device.type == "cpu" and any(
                _holds(one, out) for one in fake.launches()
            )  # fmt: skip
        found += [what] * taken
    return found


def compare(name: str, path: str) -> None:
    op, arguments = calls(name, path)
    with portattn.settings(isolate="never", canary="never"):
        opcalls.perform(op, arguments)  # compiles
        entry = kind_of(op)
        assert entry.classes[0].direct is not None, entry.classes[0].plan
        fake.library.fake_clear()
        cache.forget()
        first = first_call(op, arguments)
        entry = kind_of(op)
        by_c = chip.once(op, arguments)
        hit, entry.hit = entry.hit, None
        by_python = chip.once(op, arguments)
        entry.hit = _asking_in_python(entry)
        by_asking = chip.once(op, arguments)
        entry.hit = hit
        other = opcalls.changed(arguments)
        moved, entry.hit = chip.once(op, other), None
        moved_by_python = chip.once(op, other)
        entry.hit = hit
        handle = portattn.prepare(op, **arguments)
        places = [torch.full_like(t, float("nan")) for t in opcalls.perform(op, arguments)]
        fake.library.fake_clear()
        chip.allocated.clear()
        ran = handle.run(**arguments, out=places[0], lse=places[1])
        prepared = {
            "allocated": len(chip.allocated), "given": all(a is b for a, b in zip(ran, places, strict=True)),
            "launches": len(ran_with := fake.launches()), "path": handle.plan.path,
            "out": all(any(_holds(one, t) for one in ran_with) for t in places),
        }  # fmt: skip
        refused = {n: wrongly_placed(handle, arguments, o, e) for n, (o, e) in wrong_places(*places).items()}
        chip.allocated.clear()
        kept = torch.nn.Parameter(places[0], requires_grad=False)  # no plain tensor: checked, and launched, by Python
        prepared["odd"] = handle.run(**arguments, out=kept, lse=places[1])[0] is kept
        prepared["odd"] &= any(_holds(one, kept) for one in fake.launches())
        fake.library.fake_clear()
        chip.allocated.clear()
        placed = into(places[0], op, **{**arguments, "return_lse": False})  # of no known kind: copied
        copied, lone = placed is places[0] and not any(_holds(one, places[0]) for one in fake.launches()), []
        for entered in (kind_of(op).hit, None):  # by native.c, and by Python
            kind_of(op).hit, kept = entered, kind_of(op).hit
            fake.library.fake_clear()
            chip.allocated.clear()
            placed = into(places[0], op, **{**arguments, "return_lse": False})
            lone.append({
                "returned": placed is places[0], "held": any(_holds(one, placed) for one in fake.launches()),
                "allocated": [list(t.shape) for t in chip.allocated if t.dtype == placed.dtype],
            })  # fmt: skip
            kind_of(op).hit = kept
        past = written_past(op, arguments, places)
        found[name if name in VARIANTS else f"{name} {path}"] = {
            "copied": copied, "into": lone, "past": past,
            "path": entry.classes[0].plan.path, "hit": hit is not None, "launches": len(by_c[0]),
            "way": entry.classes[0].direct.way, "reason": entry.classes[0].direct.reason, "same": by_c == by_python,
            "first": first, "by C": [[*one[:6], len(one[7])] for one in by_c[0]], "held": held(op, arguments),
            "ours": all(by_c[2]), "asked": by_c == by_asking,
            "moved": moved == moved_by_python, "named": sorted({n for one in by_c[0] for n in one[6]}),
            "last": portattn.last_plan() is entry.classes[0].plan, "prepared": prepared, "refused": refused,
        }  # fmt: skip


def concurrent() -> None:
    """Threads that make the same kind of call: every launch has its own addresses."""
    op, arguments = calls("decode", "triton")
    wrong: list[str] = []

    def work(number: int) -> None:
        own = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
        for _ in range(50):
            opcalls.perform(op, own)
        cached.append(own)

    cached: list[dict[str, Any]] = []
    with portattn.settings(isolate="never", canary="never"):
        opcalls.perform(op, arguments)
    settings = portattn.config.current()
    fake.launches()
    sys.setswitchinterval(1e-5)
    run_threads(*(functools.partial(_with(settings, work), n) for n in range(3)))
    launches = fake.launches()
    firsts = [launch for launch in launches if len(launch.parameters) == max(len(x.parameters) for x in launches)]
    for launch in firsts:
        owners = {
            i for i, own in enumerate(cached) for n in ("q", "k_cache", "v_cache")
            if own[n].data_ptr().to_bytes(8, "little") in launch.parameters
        }  # fmt: skip
        if len(owners) != 1:
            wrong.append(str(owners))
    found["threads"] = [len(launches), len(firsts), wrong]


def _of_sizes(took: Callable[[], int]) -> list[int]:
    """Bytes for partial results of batches of 2, 4 and 2, whose sizes are of one class."""
    found = []
    with portattn.settings(validate="never"):  # a CPU's lengths would be read, and are kept for their own sizes alone
        for batch in (2, 4, 2):
            q = torch.zeros(batch, 8, 1, 64, dtype=torch.float16)
            keys = torch.zeros(batch, 2, 640, 64, dtype=torch.float16)
            given = {"seqlens_k": torch.zeros(batch, dtype=torch.int32), "num_splits": 3, "backend": "triton"}
            for _ in range(2):  # the first one of all by Python
                portattn.decode_attention(q, keys, keys.clone(), **given)
            found.append(took())
    assert len(kind_of("decode_attention").classes) == 1
    return found


def taken() -> None:
    """Partial results in memory that an allocator gives by its address: what is taken is given back, after launches and
    after errors."""
    plain, held, seen = cached_launch.runtime, dict[int, torch.Tensor](), dict[str, Any]()
    given, full = list[list[Any]](), [False]

    def take(count: int, stream: int) -> int:
        if full[0]:
            raise MemoryError("no more")
        memory = torch.zeros(count + 256, dtype=torch.uint8)
        address = -(-memory.data_ptr() // 256) * 256
        held[address] = memory
        seen["took"] = [count, stream]
        return address

    def give(address: int) -> None:
        del held[address]
        launches = fake.launches()
        given.append([len(launches), all(address.to_bytes(8, "little") in one.parameters for one in launches)])

    def error(work: Any) -> str:
        try:
            work()
        except (RuntimeError, MemoryError) as raised:
            return f"{type(raised).__name__}: {raised}"
        return ""

    cached_launch.runtime = lambda device: dataclasses.replace(plain(device), take=take, give=give)
    op, arguments = calls("decode", "triton")
    try:
        with portattn.settings(isolate="never", canary="never"):
            cache.forget()
            opcalls.perform(op, arguments)  # by Python, which allocates a tensor
            fake.launches()
            chip.allocated.clear()
            seen["before"] = list(given)
            opcalls.perform(op, arguments)
            seen |= {"given": list(given), "tensors": [t.dtype == torch.uint8 for t in chip.allocated]}
            seen["sizes"] = _of_sizes(lambda: seen["took"][0])
            given.clear()
            fake.launches()
            fake.library.fake_refuse(1)
            seen["refused"] = [error(lambda: opcalls.perform(op, arguments)), list(given)]
            given.clear()
            full[0] = True
            seen["full"] = [error(lambda: opcalls.perform(op, arguments)), list(given), len(fake.launches())]
            portattn.prepare(op, **arguments).run(**arguments)
            seen["prepared"] = [list(given), len(fake.launches())]
    finally:
        cached_launch.runtime = plain
        cache.forget()
    found["taken"] = [seen | {"left": len(held)}]


def warm() -> None:
    """warmup, then the first call; and the monitor's warnings, each by what brought it about."""
    from portattn.api import monitor, warmup

    warmup.synchronize = lambda device: None
    shape, caught = "bf16[1,4,{},80]", {}
    spec = {"op": "attention", **dict.fromkeys("qkv", shape.format(96)), "backend": "triton"}

    def late(name: str, **arguments: Any) -> None:
        chip.allocated.clear()
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
        entry = kind_of("attention")
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
    assert monitor._armed is False


def passed(arguments: Any, towards: Any, around: Any = contextlib.nullcontext, **options: Any) -> tuple[Any, Any]:
    """Launches of a training call and of its backward pass, which runs inside `around`, and the call's result."""
    fake.library.fake_clear()
    chip.allocated.clear()
    out = portattn.attention(**arguments)
    with around():
        gradients = torch.autograd.grad(out, [arguments[name] for name in "qkv"], towards, **options)
    named = arguments | {"do": towards} | {f"d{name}": one for name, one in zip("qkv", gradients, strict=True)}
    launches = fake.launches()
    own = [t for t in chip.allocated if any(_holds(one, t) for one in launches)]
    chip.allocated[:] = [t for t in own if all(t is not one for one in gradients)]
    return chip.normal(launches, named), out


def passes() -> None:
    """Backward passes by native.c and by Python: which of the two computes each, and that it launches the same."""

    def given(heads: int, rows: int, axis: int = 1, batch: int = 1) -> dict[str, Any]:
        leaves = (torch.zeros(batch, heads, rows, 64, dtype=torch.bfloat16).transpose(1, axis) for _ in "qkv")
        return {n: next(leaves).requires_grad_() for n in "qkv"} | {"causal": True, "backend": "triton"}

    ways, make, seen = list[str](), cache.native_backward, dict[str, Any]()

    def counted(*about: Any, **parts: Any) -> Any:
        function = make(*about, **parts)
        return lambda *tensors: (made := function(*tensors), ways.append("C" if type(made) is tuple else "Python"))[0]

    cache.native_backward = counted
    plain, (towards, short) = given(4, 32), (torch.zeros(n, 4, 32, 64, dtype=torch.bfloat16) for n in (2, 1))
    cases: dict[str, tuple[Any, ...]] = {
        "the same": (plain, short), "like it": (given(4, 32), short), "other sizes": (given(4, 32, batch=2), towards),
        "like the first": (plain, short), "other strides": (given(32, 4, 2), short), "deterministic": (plain, short),
        "a gradient of strides 0": (plain, short[:, :, :1].expand(short.shape)),
        "a mode": (plain, short, lambda: FlopCounterMode(display=False)),
        "forgotten": (plain, short, lambda: contextlib.nullcontext(cache.forget())),
    }  # fmt: skip
    with portattn.settings(isolate="never", canary="never"):
        for name in [*list(cases)[:-1], *cases]:
            torch.use_deterministic_algorithms(name == "deterministic")
            ways.clear()
            launches, out = passed(*cases[name])
            plans = portattn.last_plan(), portattn.last_backward_plan()
            natives, out.grad_fn.about[0].natives = out.grad_fn.about[0].natives, [None] * 2  # Python's turn
            same = launches == passed(*cases[name])[0]  # its own pass copies to anywhere, and is not compared
            out.grad_fn.about[0].natives = natives
            seen[name] = [*ways, *(plan.problem.op for plan in plans), *[same] * (ways == ["C"])]
        ways.clear()
        passed(plain, short, create_graph=True)
        out = portattn.attention(**plain)
    run_threads(lambda: (out.backward(short), ways.append(str(portattn.last_plan()))))  # no settings, no calls
    found["passes"] = seen | {"elsewhere": ways}


def trained() -> None:
    """A training call by native.c and by Python: its launches, those of its gradients, and its graph."""
    q, k, v = (torch.zeros(1, 4, 32, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    arguments, (place, towards) = {"q": q, "k": k, "v": v, "causal": True}, torch.zeros(2, *q.shape, dtype=q.dtype)
    of_sinks = {n: one.detach() for n, one in zip("qkv", (q, k, v), strict=True)} | {"sinks": torch.zeros(4)}
    of_sinks["sinks"].requires_grad_()
    seen = list[Any]()
    with portattn.settings(isolate="never", canary="never"):
        with torch.no_grad():
            portattn.attention(**arguments)
        portattn.attention(**of_sinks)
        entries = [kind_of("attention")]
        torch.autograd.grad(portattn.attention(**arguments).sum(), (q, k, v))
        entries += [kind_of("attention"), kind_of("attention_backward")]
        planned = len(chip.compiled_calls)
        native = all(entry.hit for entry in entries)
        for _ in ("by C", "by Python"):
            with torch.no_grad():
                alone = portattn.attention(**arguments).grad_fn
            for given in (arguments, of_sinks):
                with contextlib.suppress(portattn.ArgumentError):
                    into(place, "attention", **given)
            written = place.requires_grad or any(_holds(one, place) for one in fake.launches())
            launches, out = passed(arguments, towards)
            seen.append([launches, alone, out.grad_fn.name(), written])
            for entry in entries:
                entry.hit = None
        found["training"] = {
            "native": native, "same": seen[0] == seen[1], "launches": [sorted(x[6]) for x in seen[0][0]],
            "graph": [one[1:] for one in seen], "planned": chip.compiled_calls[planned:],
        }  # fmt: skip


def _with(settings: Any, work: Any) -> Any:
    def run(number: int) -> None:
        with portattn.settings(isolate="never", canary="never"):
            work(number)

    return run


for name in SIZES:
    compare(name, "triton")
if triton_compat.version() >= (3, 6):
    compare("attention gluon", "auto")
    compare("mla gluon", "auto")
concurrent()
taken()
trained()
passes()
warm()
print(json.dumps(found))
