"""Blocks of launch parameters, by Python and by native.c: what the driver is given, read as CUDA lays it out."""

import contextlib
import ctypes
import struct
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from support import native_module

from portattn.launch import cudadriver
from portattn.launch.cudadriver import Block, Kernel, Map
from portattn.launch.triton_compat import TENSOR_MAP, Parameter

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


class Launched(NamedTuple):
    """A launch as the driver sees it. attributes: (id, value) of each; parameters: their bytes."""

    function: int
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    attributes: list[tuple[int, int]]
    parameters: list[bytes]


class Driver:
    """cuLaunchKernelEx that notes launches, and refuses those that `errors` says, in turn."""

    def __init__(self, kernels):
        self.sizes = {k.function: [parameter.size for parameter in k.parameters] for k in kernels}
        self.launches: list[Launched] = []
        self.errors: list[int] = []
        self.function = _FUNCTION(self._launch)

    def _launch(self, config, function, parameters, extra):
        if self.errors and (error := self.errors.pop(0)):
            return error
        *head, stream, attributes, count = struct.unpack("7I4xQQI", ctypes.string_at(config, 52))
        found = [struct.unpack("I4xI", ctypes.string_at(attributes + 72 * i, 12)) for i in range(count)]
        places = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_size_t))
        values = [ctypes.string_at(places[i], size) for i, size in enumerate(self.sizes[function])]
        x, y, z, threads, rows, columns, shared = head
        self.launches.append(Launched(function, (x, y, z), (threads, rows, columns), shared, stream, found, values))
        return 0

    def taken(self):
        taken, self.launches = self.launches, []
        return taken


TYPES = ("*fp16", "*i32", "i32", "i64", "u16", "i1", "fp32", "fp64", "*i8", TENSOR_MAP, "u32")


def kernel(function=3, **changes):
    values = (("role", 1), None, ("size", 2), ("size", 1), 40000, True, 1e40, 0.1, ("role", 0), ("map", 0), ("size", 0))
    fields: dict[str, Any] = {
        "function": function, "grid": (("size", 0), 5, ("size", 1)), "threads": 96, "shared": 1234, "dependent": False,
        "cooperative": False, "parameters": tuple(Parameter(f"a{i}", kind) for i, kind in enumerate(TYPES)),
        "values": values,
    }  # fmt: skip
    return Kernel(**(fields | changes))


class Maps(dict[tuple[int, ...], bytes]):
    """Tensor maps, each made when it is asked for; `asked` for which."""

    def __init__(self):
        self.asked: list[tuple[int, ...]] = []

    def __getitem__(self, key):
        self.asked.append(key)
        return made(key)


def raising(said):
    return pytest.raises(RuntimeError, match=f"^CUDA's driver {said}$")


def made(key):
    return struct.pack(f"Q{len(key) - 1}q", *key).ljust(128, b"\7")


@pytest.fixture(params=["python", "native.c"])
def way(request):
    return None if request.param == "python" else native_module()


def block(monkeypatch, way, kernels, maps=None):
    driver = Driver(kernels)
    monkeypatch.setattr(cudadriver, "launch_function", lambda: driver.function)
    return driver, Block(kernels, 2, [Map(1, (0, 2), maps)] if maps is not None else [], way)


def expected(addresses, sizes):
    return [
        struct.pack("Q", addresses[1]), bytes(8), struct.pack("i", sizes[2]), struct.pack("q", sizes[1]),
        struct.pack("H", 40000), b"\1", struct.pack("f", float("inf")), struct.pack("d", 0.1),
        struct.pack("Q", addresses[0]), made((addresses[1], sizes[0], sizes[2])), struct.pack("I", sizes[0]),
    ]  # fmt: skip


def test_every_launch_has_its_addresses_and_sizes(monkeypatch, way):
    """One after the other by one block: nothing of the launch before is left."""
    maps = Maps()
    driver, one = block(monkeypatch, way, [kernel()], maps)
    calls: list[tuple[int, list[int], list[int]]] = [
        (7, [4096, 2**63 + 64], [3, 2, -5]), (7, [8192, 2**63 + 64], [3, 2, -5]), (9, [8192, 64], [3, 2, -5]),
        (9, [8192, 64], [2**20, 65535, 2**31 - 1]), (2**40, [0, 128], [1, 1, -(2**31)]),
    ]  # fmt: skip
    for stream, addresses, sizes in calls:
        assert one.launch(stream, addresses, sizes) is None
        (launched,) = driver.taken()
        assert launched.parameters == expected(addresses, sizes)
        assert launched[:6] == (3, (sizes[0], 5, sizes[1]), (96, 1, 1), 1234, stream, [])
    # A map is made anew where its address or sizes are others, and only there.
    assert maps.asked == [(a[1], s[0], s[2]) for i, (_, a, s) in enumerate(calls) if i != 1]


def test_launch_attributes(monkeypatch, way):
    kernels = [
        kernel(function=1, cooperative=True), kernel(function=2, dependent=True),
        kernel(function=3, dependent=True, cooperative=True), kernel(function=4),
    ]  # fmt: skip
    driver, one = block(monkeypatch, way, kernels, Maps())
    one.launch(7, [0, 0], [1, 1, 1])
    seen = {launched.function: sorted(launched.attributes) for launched in driver.taken()}
    # CU_LAUNCH_ATTRIBUTE_COOPERATIVE is 2, ..._PROGRAMMATIC_STREAM_SERIALIZATION 6
    assert seen == {1: [(2, 1)], 2: [(6, 1)], 3: [(2, 1), (6, 1)], 4: []}


def test_a_refusal_names_the_kernel_and_the_rest_can_be_launched(monkeypatch, way):
    driver, one = block(monkeypatch, way, [kernel(function=1), kernel(function=2), kernel(function=3)], Maps())
    driver.errors = [0, 201]
    assert one.launch(7, [0, 64], [1, 2, 3]) == (201, 1)
    assert [launched.function for launched in driver.taken()] == [1]
    assert one.launch(7, [0, 64], [1, 2, 3], 1) is None
    assert [launched.function for launched in driver.taken()] == [2, 3]
    assert one.launch(7, [0, 64], [1, 2, 3]) is None
    assert len(driver.taken()) == 3


class Library:
    """The rest of the driver: contexts and words."""

    def __init__(self, retain=0):
        self.retain, self.called = retain, list[str]()

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802 - CUDA's name
        self.called.append(f"retain {device}")
        return self.retain

    def cuCtxSetCurrent(self, context):  # noqa: N802 - CUDA's name
        self.called.append("set")
        return 0

    def cuGetErrorString(self, error, text):  # noqa: N802 - CUDA's name
        text._obj.value = {1: b"invalid argument", 2: b"out of memory"}.get(error)
        return 0


@pytest.mark.parametrize(("refused", "retain", "then", "said", "launched"), [
    ((201, 1), 0, [], "", [2, 3]), ((201, 0), 0, [], "", [1, 2, 3]), ((201, 1), 0, [0, 1], "invalid argument", [2]),
    ((201, 1), 2, [], "out of memory", []), ((1, 1), 0, [], "invalid argument", []),
    ((99, 0), 0, [], "unknown error", []),
])  # fmt: skip
def test_what_is_done_about_a_refusal(monkeypatch, way, refused, retain, then, said, launched):
    """A thread without a context gets one, and goes on with the kernel that was refused; all else is an error."""
    driver, one = block(monkeypatch, way, [kernel(function=n) for n in (1, 2, 3)], Maps())
    library = Library(retain)
    monkeypatch.setattr(cudadriver, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    driver.errors = list(then)
    with raising(f"refused a launch: {said}") if said else contextlib.nullcontext():
        cudadriver.launch_again(refused, one, 7, [0, 64], [1, 2, 3])
    assert [found.function for found in driver.taken()] == launched
    context = ["retain 5"] if retain else ["retain 5", "set"]
    assert library.called == (context if refused[0] == 201 else [])


def test_many_kernels_and_odd_alignments_fit(monkeypatch, way):
    """Every parameter lies aligned by its size, whatever is before it, and none on another."""
    kinds = ("i1", "i64", "i1", "i16", "fp64", "u8", "i32", "i1", "i8", "u64", "i1")
    values = (True, -3, False, -2, 0.5, 200, -7, True, -8, 2**64 - 1, True)
    one = Kernel(1, (1, 1, 1), 32, 0, False, False, tuple(Parameter(f"a{i}", k) for i, k in enumerate(kinds)), values)
    packed = [struct.pack(form, value) for form, value in zip("?q?hdBib bQ?".replace(" ", ""), values, strict=True)]
    driver, found = block(monkeypatch, way, [one] * 60)
    assert found.launch(7, [0, 0]) is None if way is None else found.launch(7, [0, 0], ()) is None
    assert [launched.parameters for launched in driver.taken()] == [packed] * 60


def test_more_kernels_than_native_has_room_for_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="at most 64"):
        block(monkeypatch, native_module(), [kernel()] * 65, Maps())


@pytest.mark.parametrize(("context", "error", "retain", "called", "said"), [
    (7, 0, 0, [], ""), (0, 0, 0, ["retain 5", "set"], ""), (0, 0, 2, ["retain 5"], "out of memory"),
    (0, 1, 0, [], "invalid argument"),
])  # fmt: skip
def test_a_thread_without_a_context_gets_one(monkeypatch, context, error, retain, called, said):
    library = Library(retain)

    def current(found):
        found._obj.value = context
        return error

    library.cuCtxGetCurrent = current  # type: ignore[attr-defined]
    monkeypatch.setattr(cudadriver, "_library", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    with raising(f"gave a thread no context: {said}") if said else contextlib.nullcontext():
        cudadriver.make_current()
    assert library.called == called


def test_a_guarded_device_has_a_context(monkeypatch):
    """Of CUDA alone: not on a CPU, and not with HIP, which torch calls CUDA too."""
    from portattn.launch import run

    made: list[str] = []
    monkeypatch.setattr(cudadriver, "make_current", lambda: made.append("current"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with run.device_guard(tensor):
        assert made == ["current"]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with run.device_guard(tensor), run.device_guard(torch.zeros(1)):
        assert made == ["current"]
