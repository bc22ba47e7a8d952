"""What native.c is told of memory is checked where its objects are made, and they take memory by what is in them."""

import ctypes
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import native_module

from portattn.launch import native
from portattn.planning.kernel_specs.base import split_cheapest
from portattn.schema.symbolic_int import Trace


@pytest.fixture(scope="module")
def module() -> Any:
    return native_module()


def test_an_object_takes_no_room_for_the_largest_call(module: Any) -> None:
    """There is one for each class of sizes, and there may be 64 classes of each kind of call."""
    sizes = {name: getattr(module, name).__basicsize__ for name in ("Launches", "Sized", "Kind", "Backward")}
    assert max(sizes.values()) < 1024, sizes


FAULTS: dict[str, tuple[int, tuple[Any, ...], tuple[Any, ...]]] = {
    "a map of a role that is not there": (1, ((0, 1, (), None, None),), ()),
    "a map of a negative role": (1, ((0, -1, (), None, None),), ()),
    "a map of a negative output": (1, ((0, 0, (-1,), None, None),), ()),
    "a map of an output beyond all": (1, ((0, 0, (512,), None, None),), ()),
    "a write of a negative output": (1, (), ((0, 4, -1),)),
    "a write of more bytes than a number has": (1, (), ((0, 9, 0),)), "a write of no bytes": (1, (), ((0, 0, 0),)),
    "a negative number of roles": (-1, (), ()), "more roles than there is room for": (65, (), ()),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_places_outside_of_what_is_there(module: Any, fault: str) -> None:
    roles, maps, writes = FAULTS[fault]
    with pytest.raises(ValueError, match=r"role|output|bytes"):
        module.Launches(b"", 0, 0, roles, (), maps, writes)


def test_a_launch_brings_every_output_that_is_named(module: Any) -> None:
    by_map = module.Launches(b"", 0, 0, 1, (), ((0, 0, (2,), {}, None),), ())
    with pytest.raises(ValueError, match="outputs are missing"):
        by_map(7, (64,), (1, 2))
    with pytest.raises(KeyError):  # enough: the mapping is asked
        by_map(7, (64,), (1, 2, 3))


def sized(module: Any, launches: Any, program: Any) -> Any:
    return module.Sized(
        inputs=(0,) * program.inputs, constants=program.constants, code=program.encoded(module.OPERATIONS),
        registers=program.outputs, out=(), lse=(), memory=(), offsets=(), codes=(0, 0), dtype=None, lse_dtype=None,
        memory_dtype=None, each=(), launches=launches, plan=None, planner=None,
    )  # fmt: skip


def test_a_class_has_the_outputs_of_its_tensor_maps(module: Any) -> None:
    trace = Trace()
    program = trace.program([trace.input(3)])
    sized(module, module.Launches(b"", 0, 0, 1, (), ((0, 0, (0,), {}, None),), ()), program)
    with pytest.raises(TypeError, match="do not fit"):
        sized(module, module.Launches(b"", 0, 0, 1, (), ((0, 0, (1,), {}, None),), ()), program)


def test_costs_that_do_not_fit_a_number_go_by_python(module: Any) -> None:
    """The least cost that did not fit would be a negative one."""
    large = 2**26
    for programs, limit, known in ((1, 300, True), (large, 4096, False)):
        values = (programs, large, 1, limit, large, 0, large)
        trace = Trace()
        program = trace.program([split_cheapest(*[trace.input(value) for value in values])])
        own = sized(module, module.Launches(b"", 0, 0, 0, (), (), ()), program)
        assert own(values) == ((split_cheapest(*values),) if known else None)


def test_remainders_of_the_least_number(module: Any) -> None:
    trace = Trace()
    program = trace.program([trace.input(7) % trace.input(3)])
    own = sized(module, module.Launches(b"", 0, 0, 0, (), (), ()), program)
    for pair in ((-(2**63), 3), (-(2**63), -3), (2**63 - 1, -2), (-7, 3), (7, -3), (6, 3)):
        assert own(pair) == (pair[0] % pair[1],)


linux = pytest.mark.skipif(platform.system() != "Linux", reason="libtorch has another name")


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    native.reader.cache_clear()
    yield
    native.reader.cache_clear()


@linux
def test_this_torch_is_read_by_its_own_functions() -> None:
    found = native.reader()
    assert found is not None
    kind, offset, plain, *places = found
    assert kind is torch.Tensor
    asks = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in places]
    base = torch.zeros(3, 5, 7, dtype=torch.float16)
    for tensor in (base, base[:, 1:, ::2], base.permute(2, 0, 1), torch.zeros(0), torch.nn.Parameter(base.float())):
        assert native._word(tensor._cdata) == plain
        assert native._read(asks[:4], tensor, offset) == (tuple(tensor.shape), tensor.stride(), tensor.data_ptr())


@linux
def test_dtypes_and_devices_are_read() -> None:
    """Each dtype has a number of its own, whatever the tensor's shape."""
    found = native.reader()
    asks = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(place) for place in found[7:]]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)
    codes = native.dtype_codes(*dtypes)
    assert len(set(codes)) == len(dtypes)
    for dtype, code in zip(dtypes, codes, strict=True):
        for shape in ((), (2, 3), (0,)):
            here = native._numbers(asks, torch.empty(shape, dtype=dtype), found[1])
            assert here[0] == code
            assert here[1:] != native._numbers(asks, torch.empty(shape, device="meta"), found[1])[1:]


@linux
def test_tensors_without_sizes_are_of_another_class() -> None:
    """native.c never asks them: the functions would complain on stderr."""
    found = native.reader()
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    sparse = torch.zeros(2, 3).to_sparse()
    for tensor in (nested, sparse):
        assert type(tensor) is torch.Tensor
        assert native._word(tensor._cdata) != found[2]


def test_the_default_device_does_not_count() -> None:
    with torch.device("meta"):
        inside = native.reader()
    native.reader.cache_clear()
    assert native.reader() == inside


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_FUNCTIONS", ("dim", "sizes", "strides", "no_such_thing")),  # a torch that lacks one
        ("_offset", lambda tensor: None),  # the object holds no such pointer
        ("_offset", lambda tensor: 16 + 8 * (tensor.ndim == 0)),  # or not always in the same place
        ("_said", lambda tensor: (tuple(tensor.shape), tensor.stride(), 0)),  # the functions say something else
        ("_word", id),  # tensors of several classes
        ("_numbers", lambda *asked: (1, 0, 0)),  # dtypes that are not told apart
    ],
)
def test_what_is_not_as_it_must_be_is_not_used(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, name, value)
    assert native.reader() is None


def test_a_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.torch, "__file__", "/does/not/exist/torch/__init__.py")
    assert native.reader() is None


def test_fields_that_do_not_fit_are_refused(module: Any) -> None:
    launches = module.Launches(b"", 0, 0, 2, (), (), ((0, 4, 1),))
    for error, said, call in (
        (TypeError, "not all there", lambda: module.Kind(values=())),
        (TypeError, "not all there", lambda: module.Sized(inputs=())),
        (ValueError, "at most 64", lambda: module.Launches(b"", 0, 0, 65, (), (), ())),
        (ValueError, "2 addresses are needed, not 1", lambda: launches(7, [1], [3, 4])),
        (ValueError, "outputs are missing", lambda: launches(7, [1, 2], [3])),
        (OverflowError, None, lambda: launches(7, [1, -1], [3, 4])),
    ):
        with pytest.raises(error, match=said):
            call()
