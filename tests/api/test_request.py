"""A Request: made without being performed, found again by its key, and the settings that a call's own words make."""

import importlib
import inspect
from typing import Any

import pytest
import torch
from opcalls import CALLS, assert_right, changed, given, perform, pretend_accelerator, problem
from support import Device, random_call

import portattn
from portattn.api import dispatch
from portattn.api.argument_errors import MISSING, names_of, positional_of
from portattn.api.ops import make_request
from portattn.api.request import Request, settings_for
from portattn.api.signatures import arguments_as_parts
from portattn.config import Settings
from portattn.schema.call import TENSORS
from portattn.schema.ops import CAPTURED, PUBLIC, ROWS
from portattn.validate import sparse_call


def tensors(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def request(op: str, *arguments: Any, **others: Any) -> Request:
    return make_request("plan", op, arguments, others)


def test_a_request_is_neither_validated_nor_performed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "run", lambda *arguments: pytest.fail("something ran"))
    q, k, v = tensors(1, 2, 3, 8)
    dense = request("attention", q, k, v)
    assert (dense.op, dense.build().problem.op) == ("attention", "attention")
    assert dense.tensors["q"] is q
    assert request("decode_attention", q, k, v, None, return_lse=True).return_lse
    with pytest.raises(portattn.ArgumentError, match="k is 'list'"):
        request("attention", q, [k], v).build()


def test_arguments_that_the_operation_has_not_are_refused_as_its_call_refuses_them() -> None:
    q, k, v = tensors(1, 2, 3, 8)
    several = (
        ((q, k), {}), ((q, k, v), {"colour": 1}), ((q, k, v), {"q": q}), ((), {}), ((q, k, v, 1.0), {}),
        ((q, k), {"value": v}),
    )  # fmt: skip
    for arguments, others in several:
        with pytest.raises(TypeError) as direct:
            portattn.attention(*arguments, **others)
        with pytest.raises(TypeError) as planned:
            portattn.plan("attention", *arguments, **others)
        assert str(planned.value) == str(direct.value)


@pytest.mark.parametrize("op", PUBLIC)
def test_a_row_has_its_operations_parameters(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, parameters = ROWS[op], inspect.signature(getattr(portattn, op)).parameters
    own = {"backend", "validate", "magicpig_bits", "magicpig_tables", "block_size", *CAPTURED}
    assert {*row.tensors.values(), *row.values} - own == set(parameters) - own
    seen: list[Any] = []

    def looked_for(op: str, tensors: Any, values: Any, lengths: Any = ()) -> None:
        seen.append((op, tensors, values, lengths))

    module = importlib.import_module("portattn.api.signatures" if row.writes else "portattn.api.call")
    monkeypatch.setattr(module, "lookup", looked_for)
    monkeypatch.setattr(module, "carry_out" if row.writes else "perform", seen.append)
    given = {name: f"{name} as given" for name in parameters} | {"backend": None, "validate": None}
    if "magicpig" in parameters:
        given |= {"magicpig": (3, 4)}
    if "block_mask" in parameters:  # of lists it makes one tensor
        given |= {"block_mask": None}
    if "sorted" in parameters:  # sorts what was made
        given |= {"sorted": False}
    if "page_table" in parameters:
        given |= {"page_table": torch.zeros(1)}
    getattr(portattn, op)(**given)
    (name, among, values, lengths), made = seen
    assert name == made.op == op
    assert (among, values) == (tuple(made.tensors.values()), made.fixed_values)
    assert lengths == tuple(made.lengths.values())
    for name, parameter in row.tensors.items():
        assert made.tensors[name] == given.get(parameter), name


@pytest.mark.parametrize("op", PUBLIC)
def test_arguments_are_sorted_into_the_parts_of_a_kind(op: str) -> None:
    row, parts = ROWS[op], arguments_as_parts(op)
    signature = inspect.signature(getattr(portattn, op))
    named: dict[str, Any] = {name: torch.zeros(n) for n, name in enumerate(names_of(op))}
    named |= {name: None for name in ("block_mask", "magicpig", "score_mod", "mask_mod") if name in named}
    for arguments in (named, {name: named[name] for name in positional_of(op)}):
        bound = {name: MISSING if p.default is p.empty else p.default for name, p in signature.parameters.items()}
        bound |= arguments
        tensors, values, lengths = parts(**arguments)
        for found, names in ((tensors, row.parameters), (values, row.fixed), (lengths, row.lengths)):
            ends = ("backend", "validate") if found is values else ()
            assert all(a is bound.get(name) for a, name in zip(found, (*names, *ends), strict=True))
    with pytest.raises(portattn.UnknownArgument, match="no_such_name"):
        parts(**named, no_such_name=1)


def test_what_the_schema_lists_twice_is_the_same() -> None:
    assert set(TENSORS) == {name for row in ROWS.values() for name in row.tensors}


def test_a_builder_refuses_a_feature_that_its_operation_has_not() -> None:
    q = torch.zeros(1, 2, 1, 16)
    chosen = {"indices": torch.zeros(1, 2, 3, dtype=torch.int32), "counts": torch.zeros(1, 2, dtype=torch.int32)}
    given = {"q": q, "k_cache": q, "v_cache": q, "settings": Settings()} | chosen
    assert sparse_call(**given).problem.tokens == 3
    for name in ("mask", "bias", "window", "problem", "typo"):
        with pytest.raises(TypeError, match=f"sparse_attention has no argument '{name}'"):
            sparse_call(**given, **{name: None})


def test_calls_on_a_cpu_are_not_kept() -> None:
    q, k, v = tensors(1, 2, 3, 8)
    made = [
        request("attention", q, k, v), request("attention", *(t.to("meta") for t in (q, k, v))),
        request("attention", q.to("meta"), [k], v), request("attention", None, k, v),
    ]  # fmt: skip
    assert [r.cacheable() for r in made] == [False] * 4


SETTINGS = {
    # (backend, validate) of the call -> the settings that it runs under
    (None, None): Settings(backend="vendor", validate="auto"),
    ("vendor", None): Settings(backend="vendor", validate="auto"),
    ("reference", None): Settings(backend="reference", validate="auto"),
    (None, True): Settings(backend="vendor", validate="always"),
    (None, False): Settings(backend="vendor", validate="never"),
    ("reference", False): Settings(backend="reference", validate="never"),
}


@pytest.mark.parametrize("own", SETTINGS, ids=str)
def test_a_calls_own_words_change_the_settings(own: tuple[str | None, bool | None]) -> None:
    with portattn.settings(backend="vendor", cache_dir="") as current:
        assert settings_for("attention", *own) == SETTINGS[own]
        if own in ((None, None), ("vendor", None)):
            assert settings_for("attention", *own) is current


def kept_calls(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests that were built, which is what a cached call is spared."""
    built: list[Request] = []
    run = dispatch.run

    def noted(call: Any, settings: Settings, caching: Any = None) -> Any:
        built.append(call)
        return run(call, settings, caching)

    monkeypatch.setattr(dispatch, "run", noted)
    return built


@pytest.mark.parametrize("splits", [None, 2])
@pytest.mark.parametrize("name", CALLS)
def test_a_kept_call_gives_what_a_first_one_gives(device, monkeypatch, name, splits):
    if device.path != "interpreter" or (splits and problem(name).op in ("attention", "varlen_attention")):
        pytest.skip("kernels are interpreted here only, and some split nothing")
    pretend_accelerator(monkeypatch)
    built = kept_calls(monkeypatch)
    fields: dict[str, Any] = {} if name.startswith("sparse") else {"causal": "bottom_right"}
    call = random_call(problem(name, num_splits=splits or 0, softcap=True, sinks=True, **fields), seed=1)
    op, arguments = call.problem.op, given(call)
    first = perform(op, arguments)
    assert_right(call, *first)
    assert portattn.last_plan().path == "triton"
    made = portattn.last_plan()
    assert len(built) == 1
    again = perform(op, arguments)
    assert len(built) == 1, "a second call is not built again"
    assert portattn.last_plan() is made
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
        assert one.stride() == other.stride()
    other = changed(arguments)
    cached = perform(op, other)
    assert len(built) == 1
    dispatch.forget_plans()
    fresh = perform(op, other)
    assert len(built) == 2
    for one, two in zip(cached, fresh, strict=True):
        assert torch.equal(one, two)
        assert not torch.equal(one, first[0] if one.ndim == first[0].ndim else first[1])


def test_only_what_is_asked_for_is_returned(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    q, k, v = tensors(1, 2, 3, 16)
    for _ in range(2):
        assert isinstance(portattn.attention(q, k, v), torch.Tensor)
        assert isinstance(portattn.attention(q, k, v, return_lse=True), tuple)


def test_what_makes_another_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that decides a plan, or what is compiled, may be answered by a call that was kept for something else."""
    pretend_accelerator(monkeypatch)
    built = kept_calls(monkeypatch)
    q, k, v = tensors(1, 2, 3, 16)
    portattn.attention(q, k, v)
    shifted = torch.zeros(97)[1:].view(1, 2, 3, 16)
    others: list[Any] = [
        lambda: portattn.attention(q, k, v, causal=True), lambda: portattn.attention(q, k, v, window=(1, 0)),
        lambda: portattn.attention(q, k, v, scale=1.0), lambda: portattn.attention(q, k, v, sinks=torch.zeros(2)),
        lambda: portattn.attention(q, k, v, layout="bshd"), lambda: portattn.attention(q, shifted, v),
        lambda: portattn.attention(q, k.transpose(2, 3).contiguous().transpose(2, 3), v),
        lambda: portattn.attention(q.half(), k.half(), v.half()), lambda: portattn.decode_attention(q, k, v, None),
        lambda: portattn.attention(q, k, v, validate=False),
    ]  # fmt: skip
    for count, other in enumerate(others, 2):
        other()
        assert len(built) == count
    portattn.attention(q, k, v)
    portattn.attention(q[:, :, :2], k, v)  # other lengths are the same kind of call
    assert len(built) == len(others) + 1
    with pytest.raises(portattn.ArgumentError, match="return_lse is 1"):
        portattn.attention(q, k, v, return_lse=1)
    with pytest.raises(portattn.ArgumentError, match="window is"):  # unhashable: never cached, and never looked up
        portattn.attention(q, k, v, window=[1, 0])


def test_validated_calls_are_validated_every_time(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    q, k, v = tensors(2, 2, 3, 16)
    lengths = torch.tensor([3, 1], dtype=torch.int32)
    for _ in range(2):
        portattn.attention(q, k, v, seqlens_k=lengths, validate=True)
    lengths[1] = 4
    with pytest.raises(portattn.ArgumentError, match=r"seqlens_k\[1\] is 4"):
        portattn.attention(q, k, v, seqlens_k=lengths, validate=True)
    portattn.attention(q, k, v, seqlens_k=lengths, validate=False)


@pytest.mark.parametrize("asking", ["plan", "explain", "prepare"])
def test_a_wrong_name_of_an_operation_is_named(asking: str) -> None:
    for op in ("atention", "", 3, ["attention"], None, torch.zeros(3)):
        with pytest.raises(portattn.ArgumentError) as error:
            getattr(portattn, asking)(op)
        shown = "Tensor" if isinstance(op, torch.Tensor) else op
        assert str(error.value).startswith(f"{asking}: op is {shown!r}, but must be ")
        assert "one of attention, varlen_attention, decode_attention, paged_attention" in str(error.value)


def test_planning_raises_what_the_operation_raises() -> None:
    q, k, _ = tensors(1, 2, 3, 8)
    for asking in (portattn.plan, portattn.explain, portattn.prepare):
        with pytest.raises(portattn.ArgumentError, match="v is 'NoneType'"):
            asking("attention", q, k, None)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'v'"):
            asking("attention", q, k)
        wide = torch.zeros(1, 1, 3, 512, requires_grad=True)
        with pytest.raises(portattn.PathUnavailable, match="gradients"):
            asking("attention", wide, wide, wide, backend="interpreter")
