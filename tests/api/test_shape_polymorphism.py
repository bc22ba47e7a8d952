"""Classes of sizes: what Triton compiles a kernel for, a kernel's constants, and the plan of other sizes."""

import functools
import itertools
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import opcalls
import pytest
import torch

import portattn
from portattn.api import dispatch, shape_polymorphism
from portattn.config import Settings
from portattn.launch import cache
from portattn.launch.symbolic_tensor import SymbolicTensor, TensorKind
from portattn.schema.lowering import Step
from portattn.schema.ops import ROWS
from portattn.schema.symbolic_int import Trace, Untraceable, plain_sizes
from portattn.validate import build_call

BEYOND = 2**31  # the first number that does not fit 32 bits


def step(arguments, options=None):
    """A launch of a kernel that takes x, y, z, the last of which is not specialised, and the constant WIDTH."""

    def kernel(x, y, z, WIDTH: "tl.constexpr"):  # type: ignore[name-defined]  # noqa: F821
        pass

    described: Any = SimpleNamespace(fn=kernel, arg_names=("x", "y", "z", "WIDTH"), do_not_specialize=("z",))
    return Step(described, (1,), {"x": 0, "y": 0, "z": 0, "WIDTH": 64} | arguments, options or {})


def class_of(value, use):
    trace = Trace()
    use(trace.input(value))
    program = trace.program([])
    return lambda other: program((other,)) is not None


def specialised(name):
    return lambda size: shape_polymorphism._specialise(step({name: size}))


@pytest.mark.parametrize(
    ("value", "same", "others"),
    [
        (32, (16, 48, 0, 2**31 - 16, -(2**31)), (33, 1, 31, BEYOND, -BEYOND - 16)),
        (33, (31, 2, 2**31 - 1, -5), (32, 1, 16, 0, BEYOND, BEYOND + 1, -BEYOND - 1)),
        (1, (), (0, 2, 16, 17)),
        (BEYOND, (BEYOND + 16, 2**40), (BEYOND + 1, BEYOND - 16, 1)),
        (-BEYOND - 16, (-(2**40),), (-BEYOND, -BEYOND - 1)),
    ],
)
def test_integers_that_triton_tells_apart(value, same, others):
    """1, multiples of 16, and what does not fit 32 bits: another kernel is compiled for each."""
    takes = class_of(value, specialised("y"))
    assert {n: takes(n) for n in (value, *same, *others)} == dict.fromkeys((value, *same), True) | dict.fromkeys(
        others, False
    )


def test_of_arguments_that_are_not_specialised_only_the_width_counts():
    takes = class_of(32, specialised("z"))
    assert [takes(n) for n in (32, 33, 1, 0)] == [True] * 4
    assert [takes(n) for n in (BEYOND, -BEYOND - 1)] == [False] * 2


def test_tensors_of_two_gib_are_another_class():
    """A kernel may use their sizes with 32-bit offsets."""
    kind = TensorKind(torch.float16, torch.device("cpu"), 2, 0, False)
    takes = class_of(
        64, lambda rows: shape_polymorphism._specialise(step({"x": SymbolicTensor.make(kind, (rows, 1024), (1024, 1))}))
    )
    assert takes(2**20 - 1)
    assert not takes(2**20)


def test_descriptors_of_more_rows_than_32_bits_hold_are_another_class():
    takes = class_of(
        64,
        lambda rows: shape_polymorphism._specialise(
            step({"x": SimpleNamespace(block_shape=(16, 64), shape=(rows, 64))})
        ),
    )
    assert takes(BEYOND - 1)
    assert not takes(BEYOND)


def test_constants_and_options_are_of_one_value():
    for use in (
        lambda n: shape_polymorphism._with_constants(step({"WIDTH": n})),
        lambda n: shape_polymorphism._with_constants(step({}, {"maxnreg": n})),
    ):  # fmt: skip
        takes = class_of(64, use)
        assert takes(64)
        assert not takes(128)
    assert class_of(64, lambda n: shape_polymorphism._with_constants(step({"y": n})))(65)
    trace = Trace()
    replaced = shape_polymorphism._with_constants(
        step({"WIDTH": trace.input(64), "y": trace.input(8)}, {"warps": trace.input(4)})
    )
    assert type(replaced.arguments["WIDTH"]) is int
    assert type(replaced.options["warps"]) is int
    assert type(replaced.arguments["y"]) is not int


@pytest.fixture
def keep(monkeypatch):
    """Keeps a call with so many keys, on CPU tensors that count as an H100's: what is cached, and its sizes."""
    opcalls.pretend_accelerator(monkeypatch)

    def kept_of(keys):
        q, k = torch.zeros(2, 4, 3, 24, dtype=torch.float16), torch.zeros(2, 2, keys, 24, dtype=torch.float16)
        v, lengths = k.clone(), torch.zeros(2, dtype=torch.int32)
        with portattn.settings(canary="never"):
            portattn.attention(q, k, v, seqlens_k=lengths, backend="triton")
        (kind,) = cache.every_kind()
        return kind.classes[0], cache.sizes_of([q, k, v, lengths])

    cache.forget()
    yield kept_of
    cache.forget()


@pytest.mark.interpreter
def test_the_plan_of_other_sizes(keep):
    """What a cached call of other sizes would have been planned as, made when it is asked for."""
    cached, inputs = keep(640)
    assert cached.inputs == tuple(inputs)
    assert cached.note(inputs) is cached.plan
    again, others = keep(656)
    assert again is cached, "one class"
    planner, given = cached.note(others)
    assert planner(given) == portattn.last_plan()
    made = planner(given)
    assert (made.problem.seq_k, made.path, made.key) == (656, cached.plan.path, cached.plan.key)
    assert planner(array("q", inputs).tobytes()) == cached.plan


@pytest.mark.interpreter
def test_sizes_of_another_class_are_planned(keep):
    cached, _ = keep(640)
    assert cached.why_fixed == ""
    other, inputs = keep(641)
    assert other is not cached
    assert cached.program(inputs) is None


def test_launches_that_sizes_change_are_noticed():
    """What was described anew must be what was planned: else the call is kept for its own sizes alone."""
    tensor = torch.zeros(4, 8)
    kind = TensorKind.of(tensor)
    given = step({"x": tensor, "y": 8}, {"num_warps": 4})
    trace = Trace()
    shaped = SymbolicTensor.make(kind, (trace.input(4), 8), (8, 1))

    def other(**changes):
        fields: dict[str, Any] = {
            "kernel": given.kernel, "grid": (trace.input(1),), "options": {"num_warps": 4}, "roles": {},
            "arguments": {**given.arguments, "x": shaped, "y": trace.input(8)},
        }  # fmt: skip
        return Step(**(fields | changes))

    arguments = other().arguments
    shape_polymorphism._compare(
        [given], [other()], {"b": ((2,), torch.float32)}, {"b": ((trace.input(2),), torch.float32)}
    )
    wrong: list[tuple[list[Step], Any, str]] = [
        ([other(kernel=step({}).kernel)], {}, "a launch is another"),
        ([other(roles={"x": "q"})], {}, "a launch is another"),
        ([other(options={"num_warps": 8})], {}, "a launch is another"),
        ([other(grid=(trace.input(2),))], {}, "a launch is another"),
        ([other(), other()], {}, "its launches are others"),
        ([other(arguments={**arguments, "y": trace.input(9)})], {}, "argument y is 9, and was 8"),
        ([other(arguments={**arguments, "x": tensor.half()})], {}, "argument x is"),
        ([other(arguments={**arguments, "x": tensor[0]})], {}, "argument x is"),
        ([other()], {"b": ((trace.input(3),), torch.float32)}, "its buffers are others"),
    ]
    for steps, between, said in wrong:
        buffers = {"b": ((2,), torch.float32)} if between else {}
        with pytest.raises(Untraceable, match=said):
            shape_polymorphism._compare([given], steps, buffers, between)


@pytest.mark.interpreter
def test_buffers_lie_one_after_the_other(monkeypatch):
    """From multiples of 256 bytes on, inside one piece of memory, for the first sizes and for others of the class."""
    opcalls.pretend_accelerator(monkeypatch)
    monkeypatch.setattr(dispatch, "launch_all", lambda launches, made, q: None)
    cache.forget()
    q, k = torch.zeros(2, 3, 1, 40, dtype=torch.float16), torch.zeros(2, 3, 640, 40, dtype=torch.float16)
    with portattn.settings(canary="never"):
        lengths = torch.zeros(2, dtype=torch.int32)
        portattn.decode_attention(q, k, k.clone(), lengths, num_splits=3, backend="triton")
    (kind,) = cache.every_kind()
    cache.forget()
    cached = kind.classes[0]
    more = cache.sizes_of([t.new_empty(18, *t.shape[1:]) for t in (q, k, k, lengths)])
    for inputs in (cached.inputs, more):
        sizes = cached.program(inputs)
        assert sizes is not None
        memory = cached.memory(sizes)
        ranges = sorted(
            (t.data_ptr() - memory.data_ptr(), t.numel() * t.itemsize) for t in cached.buffers(memory, sizes).values()
        )
        assert len(ranges) >= 2
        assert all(begin % 256 == 0 for begin, _ in ranges)
        assert all(begin + size <= after for (begin, size), (after, _) in itertools.pairwise(ranges))
        assert sum(ranges[-1]) <= memory.numel()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (Untraceable("a size is asked for"), "Untraceable: a size is asked for"),
        (AssertionError("no"), "AssertionError: no"),
        (AttributeError("no int"), "AttributeError: no int"),
    ],
)
def test_what_cannot_be_traced_is_kept_for_its_own_sizes_alone(keep, monkeypatch, raised, why):
    monkeypatch.setattr(shape_polymorphism.CallRecipe, "plan", Mock(side_effect=raised))
    cached, inputs = keep(640)
    assert cached.why_fixed == why
    assert cached.program(inputs) == cached.sizes
    for place in range(len(inputs)):
        assert cached.program([size + (i == place) for i, size in enumerate(inputs)]) is None, place


@pytest.mark.interpreter
def test_what_is_planned_otherwise_with_sizes_is_kept_for_its_own(keep, monkeypatch):
    made = shape_polymorphism.CallRecipe.plan
    monkeypatch.setattr(
        shape_polymorphism.CallRecipe, "plan",
        lambda self, call: msgspec.structs.replace(made(self, call), key="another"),
    )  # fmt: skip
    cached, _ = keep(640)
    assert "it is planned as triton another, and was as triton" in cached.why_fixed


@pytest.mark.parametrize("name", ["", "sinks", "alibi_slopes", "bias", "mask"])
def test_a_call_with_a_feature_is_traced_too(name):
    """Else each length would be planned and cached for itself: right, and a thousand times slower."""
    shaped = functools.partial(opcalls.symbolic, Trace())
    tensors: dict[str, Any] = dict.fromkeys(ROWS["attention"].tensors)
    tensors |= {one: shaped(torch.float16, 2, 4, 77, 64) for one in "qkv"}
    given = {
        "sinks": (torch.float32, 4), "alibi_slopes": (torch.float32, 4), "bias": (torch.float16, 77, 77),
        "mask": (torch.bool, 77, 77),
    }  # fmt: skip
    if name:
        tensors[name] = shaped(*given[name])
    values = {
        "scale": None, "causal": False, "window": None, "softcap": None, "dropout_p": 0.0, "return_lse": False,
        "layout": "bhsd",
    }  # fmt: skip
    call = build_call("attention", Settings(), tensors, values)
    assert plain_sizes(call.problem.seq_k) == 77
    assert not name or getattr(call.problem, name)
