"""Run by test_direct.py, with fakedriver's library: prints what reached the driver, by all ways, as JSON."""

# ruff: noqa: E402 - the driver comes before Triton

import functools
import json
import os
import sys

import fakedriver
import torch
from threads import run_threads

fake = fakedriver.install()
import triton
import triton.language as tl

from portattn.launch import native, triton_compat
from portattn.launch.driver_launch import SCRATCH, DriverLauncher
from portattn.schema.lowering import Step, launch_steps

found: dict[str, object] = {"triton": triton.__version__}
in_c = functools.partial(native.load, os.environ["PORTATTN_CACHE_DIR"])


@triton.jit(do_not_specialize=["plain"])
def copy(x, absent, y, scale, one, plain, large, WIDTH: tl.constexpr, WORD: tl.constexpr):
    places = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x + places, mask=places < plain).to(tl.float32) * scale + one + large.to(tl.float32)
    if absent is not None:
        values += tl.load(absent)
    if WORD == "negated":
        values = -values
    tl.store(y + places, values.to(y.dtype.element_ty), mask=places < plain)


@triton.jit
def described(x, y, rows, WIDTH: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, WIDTH], [WIDTH, 1], [16, WIDTH])
    tl.store(y + tl.arange(0, 16)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], source.load([0, 0]))


def seen(launches: list[fakedriver.Launch]) -> list[list[object]]:
    return [[*launch[:5], launch.stream, launch.parameters.hex()] for launch in launches]


def tell(kernels: DriverLauncher) -> None:
    for kernel in kernels._kernels:
        fake.describe(kernel.compiled.function, triton_compat.ptx_sizes(kernel.compiled.asm["ptx"]))


def compare(
    name: str, steps: list[Step], others: list[Step], names: list[str], addresses: list[int]
) -> list[DriverLauncher]:
    """`steps` are kept; `others` are the same with the tensors that `addresses` are of. Returns the cached launches by
    Python and by native.c."""
    direct, by_c = DriverLauncher(steps, names), DriverLauncher(steps, names, in_c)
    tell(direct)
    launch_steps(others)
    launches = {"triton": fake.launches()}
    direct(7, addresses)
    launches["driver"] = fake.launches()
    for kernel in direct._kernels:
        kernel.run(7, addresses, direct._constants)
    launches["launcher"] = fake.launches()
    for stream in (5, 7):
        fake.launches()
        by_c(stream, addresses)
    launches["native"] = fake.launches()
    found[name] = {
        "ways": [direct.way, by_c.way], "reasons": [direct.reason, by_c.reason], "scratch": direct.scratch,
        **{way: seen(recorded) for way, recorded in launches.items()},
    }  # fmt: skip
    return [direct, by_c]


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(256, dtype=torch.float16), torch.zeros(256)


def step(x: torch.Tensor, y: torch.Tensor, **changes: object) -> Step:
    arguments = {
        "x": x, "absent": None, "y": y, "scale": 0.3, "one": 1, "plain": 200, "large": 2**40 + 16, "WIDTH": 64,
        "WORD": "negated",
    }  # fmt: skip
    options = {"num_warps": 2, "num_stages": 3}
    return Step(copy, (4,), arguments | changes, options, {"x": "x", "y": "y", "absent": "none"})


x, y, u, v = *tensors(), *tensors()
_, direct = compare("copy", [step(x, y)], [step(u, v)], ["y", "unused", "x"], [v.data_ptr(), 0, u.data_ptr()])
swapped = {"x": "y", "y": "x"}
twice = [step(x, y), step(y, x, plain=1, scale=float("inf"))]
others = [step(u, v), step(v, u, plain=1, scale=float("inf"))]
twice[1].roles = others[1].roles = swapped
compare("two", twice, others, ["x", "y"], [u.data_ptr(), v.data_ptr()])
shifted = [t[1:] for t in tensors()]
compare("unaligned", [step(x[1:], y[1:])], [step(*shifted)], ["x", "y"], [t.data_ptr() for t in shifted])
nothing = DriverLauncher([Step(copy, (0,), step(x, y).arguments, {}, {"x": "x", "y": "y"})], ["x", "y"])
nothing(7, [0, 0])
found["nothing"] = len(fake.launches())

if hasattr(tl, "make_tensor_descriptor"):
    wide, flat = torch.zeros(64, 64, dtype=torch.float16), torch.zeros(16, 64, dtype=torch.float16)
    triton.set_allocator(lambda size, alignment, stream: flat)
    one = Step(described, (2, 3), {"x": wide, "y": flat, "rows": 64, "WIDTH": 64}, {}, {"x": "x", "y": "y"})
    compare("scratch", [one], [one], ["x", "y", SCRATCH], [wide.data_ptr(), flat.data_ptr(), flat.data_ptr()])
    found["scratch without a role"] = DriverLauncher([one], ["x", "y"]).reason
if triton_compat.version() >= (3, 4):
    pdl = Step(copy, (4,), step(x, y).arguments, {"launch_pdl": True}, {"x": "x", "y": "y"})
    compare("dependent", [pdl], [pdl], ["x", "y"], [x.data_ptr(), y.data_ptr()])
if triton_compat.version() >= (3, 5):
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def by_host(source, target, WIDTH: tl.constexpr):
        tl.store(target + tl.arange(0, 16)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], source.load([16, 0]))

    def hosted(base: torch.Tensor, target: torch.Tensor) -> Step:
        map_ = TensorDescriptor(base, [48, 64], [64, 1], [16, 64])
        arguments = {"source": map_, "target": target, "WIDTH": 64}
        return Step(by_host, (1,), arguments, {}, {"source": "source", "target": "target"})

    a, b, c = (torch.zeros(64, 64, dtype=torch.float16) for _ in range(3))
    both = compare(
        "host descriptor", [hosted(a, c)], [hosted(b, c)], ["source", "target"], [b.data_ptr(), c.data_ptr()]
    )
    for maps in both:
        for base in [a, b, a]:
            maps(7, [base.data_ptr(), c.data_ptr()])
    found["maps"] = [
        [int.from_bytes(launch.parameters[:8], "little") == base.data_ptr() for base in (a, b)]
        for launch in fake.launches()
    ]
    torch.cuda.current_device = lambda: 0
    found["maps without a context"] = []
    for number, maps in enumerate(both):
        fake.library.fake_lose_context()
        maps(7, [wide.data_ptr() + 64 * number, c.data_ptr()])
        found["maps without a context"].append(len(fake.launches()))
    by_python = DriverLauncher([hosted(a, c)], ["source", "target"])
    for place in range(200):
        both[1](7, [16 * (place + 1), c.data_ptr()])
        by_python(7, [16 * (place + 1), c.data_ptr()])
    fake.launches()
    # native.c makes its own; a mapping is asked where that one does not make what Triton makes.
    found["maps kept"] = [len(both[1]._maps[0]), len(by_python._maps[0])]
    found["maps by C"] = both[1]._maps[0].encoding(both[1].native) is not None
    both[1]._maps[0]._sample = (47, *both[1]._maps[0]._sample[1:])
    other = both[1]._maps[0]._bytes
    both[1]._maps[0]._bytes = lambda key: other((key[0], 48, *key[2:]))  # type: ignore[method-assign]
    found["maps of another make"] = both[1]._maps[0].encoding(both[1].native) is not None

# Hooks of Triton's are called, and by them alone.
called: list[str] = []
holder = triton_compat._holder()
before = holder.launch_enter_hook
if hasattr(before, "add"):
    before.add(hook := lambda metadata: called.append("enter"))
else:
    holder.launch_enter_hook = lambda metadata: called.append("enter")
direct(7, [v.data_ptr(), 0, u.data_ptr()])
hooked = fake.launches()
if "maps" in found:
    fake.library.fake_lose_context()
    both[1](7, [wide.data_ptr(), c.data_ptr()])
    called.pop()
    found["hooked without a context"] = len(fake.launches())
if hasattr(before, "add"):
    before.remove(hook)
else:
    holder.launch_enter_hook = before
direct(7, [v.data_ptr(), 0, u.data_ptr()])
found["hooks"] = [called, seen(hooked) == seen(fake.launches())]

# A thread without a context gets one; another refusal is an error.
torch.cuda.current_device = lambda: 0
fake.library.fake_lose_context()
direct(9, [v.data_ptr(), 0, u.data_ptr()])
found["context"] = [launch.stream for launch in fake.launches()]
fake.library.fake_refuse(1)
try:
    direct(7, [v.data_ptr(), 0, u.data_ptr()])
except RuntimeError as error:
    found["refused"] = str(error)
direct(7, [v.data_ptr(), 0, u.data_ptr()])
found["after"] = len(fake.launches())

# Many threads, each with its own addresses.
wrong: list[int] = []
fake.launches()


def work(number: int) -> None:
    for turn in range(50):
        direct(number, [number * 4096, 0, number * 65536 + turn * 16])


sys.setswitchinterval(1e-5)
run_threads(*(functools.partial(work, number) for number in range(1, 4)))
pairs = [
    (launch.stream, *(int.from_bytes(launch.parameters[i : i + 8], "little") for i in (0, 8)))
    for launch in fake.launches()
]
found["threads"] = [len(pairs), all(p[1] // 65536 == p[0] and p[2] == p[0] * 4096 for p in pairs)]
print(json.dumps(found))
