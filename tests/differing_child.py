"""Run by test_differing.py, with fakedriver's library: what a cached call must not be taken for, and what must go by
Python, on CPU tensors that count as an H100's.

Every call is made twice, where native.c has the kind and where only Python does. Prints as JSON how each was answered.

    differing_child.py [names of PARTS]"""

# ruff: noqa: E402 - the driver comes before Triton

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import fakedriver
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

fake = fakedriver.install()
import opcalls
import triton
from fakechip import Chip, leave_bodies_out

import portattn
from portattn.api.call import perform
from portattn.launch import cache, native, triton_compat

SECONDS = 60.0  # limit against a launch that never comes
chip = Chip(fake)
leave_bodies_out()
found: dict[str, Any] = {"triton": triton.__version__, "why not": native.load(portattn.config.current().cache_dir)[1]}
ways: dict[str, list[str]] = {}
found["ways"] = ways
NOTHING = object()
match = cache.CallKey.match
matched: list[bool] = []


def counted(self: cache.CallKey, *given: Any) -> Any:
    result = match(self, *given)
    matched.append(result is not None)
    return result


def keep(op: str, arguments: dict[str, Any]) -> cache.CallKey:
    opcalls.carry_out_by(perform)
    opcalls.perform(op, arguments)
    opcalls.carry_out_by(lambda request: NOTHING)
    fake.launches()
    return [kind for kind in cache.every_kind() if kind.op == op][-1]


def way(op: str, arguments: dict[str, Any]) -> str:
    """How a call is answered: by "C" or "python"; "no class": of a kind that is known, with sizes that are not; or by
    "nothing": it would be validated and planned."""
    matched.clear()
    try:
        result = opcalls.perform(op, arguments)
    except portattn.ArgumentError:  # a Request says so, before it would be planned
        result = NOTHING
    launches = fake.launches()
    if result is NOTHING:
        assert not launches
        return "no class" if any(matched) else "nothing"
    assert launches
    return "python" if any(matched) else "C"


@contextlib.contextmanager
def only_python() -> Iterator[None]:
    hits = [(kind, kind.hit) for kind in cache.every_kind()]
    for kind, _ in hits:
        kind.hit = None
    yield
    for kind, hit in hits:
        kind.hit = hit


def tell(name: str, op: str, arguments: dict[str, Any]) -> None:
    """Note how a call is answered where native.c is used, and where it is not."""
    by_c = way(op, arguments)
    with only_python():
        ways[name] = [by_c, way(op, arguments)]


def attention(sq: int = 48, sk: int = 64, d: int = 64, **more: Any) -> dict[str, Any]:
    def tensor(heads: int, rows: int) -> torch.Tensor:
        return torch.zeros(2, heads, rows, d, dtype=torch.bfloat16)

    return {"q": tensor(4, sq), "k": tensor(2, sk), "v": tensor(2, sk), "backend": "triton"} | more


def decode(b: int, sk: int, **more: Any) -> dict[str, Any]:
    k = torch.zeros(b, 2, sk, 64, dtype=torch.float16)
    given = {"q": torch.zeros(b, 8, 1, 64, dtype=torch.float16), "k_cache": k, "v_cache": k.clone()}
    lengths = torch.zeros(b, dtype=torch.int32)
    return given | {"seqlens_k": lengths, "num_splits": 3, "return_lse": True, "backend": "triton"} | more


def varlen(rows: int, count: int, most: Any) -> dict[str, Any]:
    q, k = torch.zeros(rows, 4, 64, dtype=torch.bfloat16), torch.zeros(rows, 2, 64, dtype=torch.bfloat16)
    cu = torch.arange(count + 1, dtype=torch.int32)
    given = {"q": q, "k": k, "v": k.clone(), "cu_seqlens_q": cu, "cu_seqlens_k": cu.clone(), "backend": "triton"}
    return given | {"max_seqlen_q": most, "max_seqlen_k": 3}


class Counting(TorchDispatchMode):
    """A mode that sees every operator, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Device:
    """torch.cpu has none: what a call on another current device enters."""

    def __init__(self, index: int | None) -> None:
        self.index = index

    def __enter__(self) -> None:
        self.before, chip.current = chip.current, self.index

    def __exit__(self, *error: object) -> None:
        chip.current = self.before


def arguments() -> None:
    """Arguments that differ from those of the only call that is cached."""
    given = attention(window=(5, 1), seqlens_k=torch.zeros(2, dtype=torch.int32))
    keep("attention", given)
    q, k = given["q"], given["k"]
    wide = torch.cat([q, q], -1)
    misaligned = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    freed = q.clone()
    freed.untyped_storage().resize_(0)  # as sharded training does with what it has gathered
    changes: dict[str, dict[str, Any]] = {
        "freed": {"q": freed}, "same": {}, "shorter": {"q": q[:, :, 1:]}, "strides": {"q": wide[..., : q.shape[-1]]},
        "scale": {"scale": 0.123}, "type": {"return_lse": 0}, "type in a tuple": {"window": (5, True)},
        "float in a tuple": {"window": (5.0, 1)}, "list": {"window": [5, 1]}, "window": {"window": (1, 2)},
        "array": {"scale": torch.ones(2)}, "dtype": {"q": q.half()}, "aligned": {"q": misaligned},
        "axes": {"q": q[0]}, "gradient": {"q": q.clone().requires_grad_()}, "k is v": {"k": given["v"]},
        "more": {"sinks": torch.ones(4)}, "less": {"seqlens_k": None}, "no tensor": {"k": 3},
        "subclass": {"k": torch.nn.Parameter(k, requires_grad=False)}, "negated": {"k": torch._neg_view(k)},
        # Of k's type and axes. Torch's guards would end the process at the nested one, which has no sizes.
        "nested": {"k": torch.nested.nested_tensor(list(k))}, "sparse": {"k": k.to_sparse()},
        "oneDNN's": {"k": k.to_mkldnn()}, "64 axes": {name: torch.zeros([1] * 64) for name in "qkv"},
    }  # fmt: skip
    for name, change in changes.items():
        tell(name, "attention", given | change)
    with portattn.settings(cache_dir=portattn.config.current().cache_dir):
        tell("equal settings", "attention", given)
    with portattn.settings(fallback="error"):
        tell("other settings", "attention", given)
    driver(given)
    tell("after all", "attention", given)


def driver(given: dict[str, Any]) -> None:
    """Another device and stream, a hook of Triton's, a thread without a context, a refusal."""
    chip.current, torch.cpu.device = 5, _Device  # type: ignore[attr-defined]
    tell("device", "attention", given)
    chip.current = None
    holder = triton_compat._holder()
    before = holder.launch_enter_hook
    if hasattr(before, "add"):
        before.add(hook := lambda metadata: None)
    else:
        holder.launch_enter_hook = lambda metadata: None
    tell("hook", "attention", given)
    if hasattr(before, "add"):
        before.remove(hook)
    else:
        holder.launch_enter_hook = before
    torch.cuda.current_device = lambda: 0
    fake.library.fake_lose_context()
    ways["context"] = [way("attention", given)]
    fake.library.fake_refuse(1)
    try:
        way("attention", given)
    except RuntimeError as error:
        found["refused"] = str(error)
    chip.stream = 11
    opcalls.perform("attention", given)
    found["stream"] = fake.launches()[0].stream
    chip.stream = 7


def modes() -> None:
    """What torch is doing around a call of tensors that are as they were."""
    given = attention()
    keep("attention", given)
    q = given["q"]

    def inside(name: str, block: Any) -> None:
        with block:
            tell(name, "attention", given)

    def traced(name: str, transform: Callable[..., Any], **changes: Any) -> None:
        """By a transform that has a tensor of its own, which the call is not given."""

        def body(x: torch.Tensor) -> torch.Tensor:
            tell(name, "attention", given | changes)
            return x.sum()

        transform(body)(torch.ones(3))

    with forward_ad.dual_level():
        tell("dual level", "attention", given)
        tell("tangent", "attention", given | {"q": forward_ad.make_dual(q, torch.ones_like(q))})
    inside("fake tensors' mode", FakeTensorMode())
    inside("a mode that counts", Counting())
    inside("inference", torch.inference_mode())
    inside("autocast", torch.autocast("cpu", dtype=torch.bfloat16))
    traced("jit.trace", lambda body: lambda x: torch.jit.trace(body, (x,), check_trace=False))
    traced("vmap", torch.func.vmap)
    traced("grad", torch.func.grad)
    traced("functionalize", torch.func.functionalize)
    traced("jvp", lambda body: lambda x: torch.func.jvp(body, (x,), (x,)))
    with torch.no_grad():
        tell("no_grad, none asked for", "attention", given)
    tell("after modes", "attention", given)
    for name, mode in (("inference", torch.inference_mode), ("autocast", lambda: torch.autocast("cpu"))):
        cache.forget()
        with mode():
            own = attention()
            keep("attention", own)
            tell(f"kept in {name}, inside", "attention", own)
        tell(f"kept in {name}, outside", "attention", given)
    cache.forget()
    count = len(cache.every_kind())
    with forward_ad.dual_level():
        for _ in range(3):
            opcalls.carry_out_by(perform)
            opcalls.perform("attention", given)
    found["kinds in a dual level"] = len(cache.every_kind()) - count
    fake.launches()


def gradients() -> None:
    """A tensor that requires gradients, where they are recorded and where not."""
    given = attention()
    leaf = given | {"q": given["q"].clone().requires_grad_()}
    with torch.no_grad():
        keep("attention", leaf)
        tell("not recorded", "attention", leaf)
        tell("not required", "attention", given)
    tell("recorded", "attention", leaf)
    with torch.no_grad():
        tell("not recorded again", "attention", leaf)


def twins() -> None:
    given, other = attention(), attention()
    same = given | {"v": given["k"]}
    keep("attention", same)
    tell("twins, twins kept", "attention", same)
    tell("other twins, twins kept", "attention", other | {"v": other["k"]})
    tell("two, twins kept", "attention", other)
    tell("equal, twins kept", "attention", given)
    keep("attention", given)
    tell("twins, both kept", "attention", same)
    tell("two, both kept", "attention", other)
    found["twins' launches"] = same_launches([("attention", same), ("attention", other)])
    cache.forget()
    keep("attention", given)
    tell("twins, two kept", "attention", same)


def lengths() -> None:
    """Lengths that are no integers, or are not given, after one that is; and after none."""
    given = varlen(20, 4, 3)
    keep("varlen_attention", given)
    for length in (3, 4, True, 3.0, None, 2**70):
        tell(f"{length} after 3", "varlen_attention", given | {"max_seqlen_q": length})
    tell("1 after 3, k None", "varlen_attention", given | {"max_seqlen_q": 1, "max_seqlen_k": None})


def lengths_not_given() -> None:
    given = varlen(20, 4, 1)
    del given["max_seqlen_q"], given["cu_seqlens_q"], given["cu_seqlens_k"], given["max_seqlen_k"]
    table = torch.zeros(4, 3, dtype=torch.int32)
    pages = torch.zeros(12, 16, 2, 64, dtype=torch.bfloat16)
    given = {"q": given["q"], "k_pages": pages, "v_pages": pages.clone(), "page_table": table, "backend": "triton"}
    given |= {"seqlens_k": torch.zeros(4, dtype=torch.int32), "cu_seqlens_q": torch.arange(5, dtype=torch.int32)}
    keep("paged_attention", given)
    tell("none after none", "paged_attention", given)
    tell("3 after none", "paged_attention", given | {"max_seqlen_q": 3})


def prepared() -> None:
    """A handle's kind is of its own sizes alone, whatever class those are of."""
    given, longer = decode(2, 640), decode(2, 656)
    handle = portattn.prepare("decode_attention", **given)
    fake.launches()
    kind = handle._kind
    hit, found["handle"] = kind.hit, {"hit": kind.hit is not None}
    assert kind.classes[0].program(cache.sizes_of([longer[n] for n in ("q", "k_cache", "v_cache", "seqlens_k")]))

    def runs(arguments: dict[str, Any]) -> str:
        matched.clear()
        try:
            handle.run(**arguments)
        except portattn.ArgumentError as error:
            return str(error)
        return f"{len(fake.launches())} launches by {'python' if any(matched) else 'C'}"

    for name, this in (("C", hit), ("python", None)):
        kind.hit = this
        found["handle"][name] = [runs(given), runs(longer), runs(given)]


def same_launches(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, bool]:
    """Whether calls, one after the other, launch by C and by Python what each launches where nothing else is cached."""
    by_c = [chip.once(*call) for call in calls]
    with only_python():
        by_python = [chip.once(*call) for call in calls]
    alone = []
    known = dict(cache._kinds), dict(cache._order)
    for op, given in calls:
        cache.forget()
        keep(op, given)
        alone.append(chip.once(op, given))
    cache.forget()
    cache._kinds.update(known[0])
    cache._order.update(known[1])
    return {"C": by_c == alone, "python": by_python == alone}


def sizes() -> None:
    """Calls of a class with other sizes, in turn: launches, results, and the plan that is told."""
    one, other, third = decode(2, 640), decode(3, 656), decode(3, 672)
    kind = keep("decode_attention", one)
    calls = [("decode_attention", given) for given in (one, other, third, one, other)]
    found["classes"] = len(kind.classes)
    found["sizes"] = same_launches(calls)
    plans = []
    for block in (contextlib.nullcontext, only_python):
        with block():
            for op, given in calls:
                way(op, given)
                problem = portattn.last_plan().problem
                plans.append((problem.batch, problem.seq_k))
    found["plans"] = plans


def maps() -> None:
    """Tensor maps: other tensors; the same addresses with other sizes, and with other strides."""
    room = [torch.zeros(2, heads, 1024, 128, dtype=torch.bfloat16) for heads in (4, 2, 2)]

    def call(rows: int, keys: int, first: int = 0, stride: int = 128) -> tuple[str, dict[str, Any]]:
        def view(whole: torch.Tensor, count: int) -> torch.Tensor:
            heads = whole.shape[1]
            strides = (heads * 512 * stride, 512 * stride, stride, 1)
            return whole.as_strided((2, heads, count, 128), strides, first * 128)

        q, k, v = (view(whole, rows if place == 0 else keys) for place, whole in enumerate(room))
        return "attention", {"q": q, "k": k, "v": v}

    calls = [call(300, 300), call(300, 310), call(310, 310), call(310, 310, 8), call(310, 310, 0, 256), call(300, 300)]
    kind = keep(*calls[0])
    for one in calls[1:]:
        if way(*one) == "no class":
            keep(*one)
    direct = kind.classes[0].direct
    found["maps"] = same_launches(calls) | {
        "path": kind.classes[0].plan.path, "descriptors": len(direct._maps),
        "made by native.c": [one.encoding(direct.native) is not None for one in direct._maps],
    }  # fmt: skip


def together() -> None:
    """A second thread makes a call of the same kind, with other sizes: while the first is between its allocation and
    its launch, and while the driver has the first one's launch. Both launch what they launch one after the other."""
    first, second = decode(2, 640), decode(3, 656)
    keep("decode_attention", first)
    merged = first | {f"second {n}": t for n, t in second.items()}

    def both(make: Callable[[], None]) -> list[Any]:
        chip.allocated.clear()
        fake.launches()
        make()
        return sorted(chip.normal(fake.launches(), merged))

    def in_turn(*calls: dict[str, Any]) -> Callable[[], None]:
        return lambda: [opcalls.perform("decode_attention", given) for given in calls] and None

    def threaded(given: dict[str, Any], told: list[str]) -> threading.Thread:
        def work() -> None:
            with portattn.settings(**SETTINGS):
                matched.clear()
                opcalls.perform("decode_attention", given)
                told.append("python" if any(matched) else "C")

        return threading.Thread(target=work, daemon=True)

    def while_allocating(told: list[str]) -> None:
        def other() -> None:
            chip.allocating = None
            thread = threaded(second, told)
            thread.start()
            thread.join(SECONDS)

        chip.allocating = other
        opcalls.perform("decode_attention", first)

    def while_launching(told: list[str]) -> None:
        fake.library.fake_hold()
        thread, told_first = threaded(first, []), []
        thread.start()
        begun = time.monotonic()
        while not fake.library.fake_held() and time.monotonic() - begun < SECONDS:
            time.sleep(0.001)
        told_first.append(fake.library.fake_held())
        other = threaded(second, told)
        other.start()
        other.join(SECONDS)
        fake.library.fake_release()
        thread.join(SECONDS)
        told.append("held" if told_first == [1] else "not held")

    for name, block in (("C", contextlib.nullcontext), ("python", only_python)):
        with block():
            ahead, told_one, told_two = both(in_turn(second, first)), [], []
            behind = both(in_turn(first, second))
            found[f"together by {name}"] = {
                "allocating": both(lambda: while_allocating(told_one)) == ahead, "way": told_one,  # noqa: B023
                "launching": both(lambda: while_launching(told_two)) == behind, "way then": told_two,  # noqa: B023
                "launches": len(ahead),
            }  # fmt: skip


SETTINGS: Any = {"isolate": "never", "canary": "never", "validate": "never"}
cache.CallKey.match = counted  # type: ignore[method-assign]
PARTS = [arguments, modes, gradients, twins, lengths, lengths_not_given, prepared, sizes, together]
PARTS += [maps] if triton_compat.version() >= (3, 6) else []
wanted = sys.argv[1:] or [part.__name__ for part in PARTS]
with portattn.settings(**SETTINGS):
    for part in PARTS:
        if part.__name__ in wanted:
            cache.forget()
            opcalls.carry_out_by(perform)
            part()
print(json.dumps(found))
