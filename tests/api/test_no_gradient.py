"""What has no gradient says so when it is called, not when a backward finds nothing; who asks for none is served."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from opcalls import CALLS, given, perform, problem
from support import Device, random_call

import portattn
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.ops import ROWS

# Each operation without a gradient, and what its error names in its place.
INSTEAD = {
    "decode": "attention", "paged": "varlen_attention", "ragged": "varlen_attention", "sparse": "attention",
    "sparse paged": "attention", "mla": "attention", "mla ragged": "attention",
}  # fmt: skip
EXTRA = {"sinks": True, "alibi_slopes": True}


def a_call(name: str, device: Device, **fields: Any) -> tuple[str, dict[str, Any]]:
    call = random_call(problem(name, **fields), seed=2, device=device.name)
    return call.problem.op, given(call)


def floating(arguments: dict[str, Any]) -> list[str]:
    return [n for n, t in arguments.items() if isinstance(t, torch.Tensor) and t.is_floating_point()]


def asking(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    return arguments | {n: arguments[n].detach().clone().requires_grad_() for n in names}


def same(found: Any, expected: Any) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["attention", "decode_attention"])
def test_numbers_of_float8_have_none(name: str, backend: str) -> None:
    """They are read as int8, which requires no gradient: what the caller gave decides."""
    x = torch.randn(1, 2, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    narrow = x.to(torch.float8_e4m3fn)
    call: dict[str, Callable[[], Any]] = {
        "attention": lambda: portattn.attention(narrow, narrow, narrow, backend=backend),
        "decode_attention": lambda: portattn.decode_attention(
            x.detach()[:, :, :1], narrow, narrow, torch.tensor([8], dtype=torch.int32), backend=backend
        ),
    }
    with pytest.raises(portattn.ArgumentError, match=f"{name} has no gradient with .* of e4m3"):
        call[name]()
    with torch.no_grad():
        assert not call[name]().requires_grad


def test_every_operation_has_a_gradient_or_names_one_that_has() -> None:
    """Those that are named have one; so no row can be without, and no text can lead to another refusal."""
    assert {CALLS[name]["op"] for name in INSTEAD} == {op for op, row in ROWS.items() if row.trained_by}
    for name, instead in INSTEAD.items():
        assert instead in ROWS[CALLS[name]["op"]].trained_by
        assert not ROWS[instead].trained_by


@pytest.mark.parametrize("name", INSTEAD)
def test_each_tensor_that_requires_a_gradient_is_named(name: str, device: Device) -> None:
    more = {"log_weights": True} if "sparse" in name else {} if "ragged" in name else {"bias": True}
    op, arguments = a_call(name, device, **EXTRA, **more)
    names = floating(arguments)
    assert {"sinks", "alibi_slopes", *more} < set(names)
    for tensor in names:
        for act in (lambda a: perform(op, a), lambda a: portattn.plan(op, **a)):
            with pytest.raises(portattn.ArgumentError) as error:
                act(asking(arguments, tensor))
            assert (error.value.op, error.value.argument, error.value.value) == (op, f"{tensor}.requires_grad", True)
            text = str(error.value)
            assert f"{op} has no gradient" in text
            assert "torch.no_grad()" in text
            assert f"to train, call {ROWS[op].trained_by}" in text


@pytest.mark.parametrize("op", ["decode_attention", "paged_attention"])
def test_what_trains_in_the_place_of_a_tree_mask_is_named(op: str) -> None:
    """No operation with a gradient has a tree_mask; attention has a mask, which can say the same."""
    assert "attention" in ROWS[op].trained_by
    assert "(a tree_mask written out as its mask)" in ROWS[op].trained_by
    names = ROWS["attention"].tensors
    assert "mask" in names
    assert "tree_mask" not in names


def test_what_is_computed_from_a_weight_requires_a_gradient(device: Device) -> None:
    """The query of a model's layer, where somebody forgot no_grad; the caches of past steps require none."""
    op, arguments = a_call("paged", device)
    query = arguments["q"] @ torch.nn.Parameter(torch.eye(16, device=device.name))
    with pytest.raises(portattn.ArgumentError, match=r"q.requires_grad is True.*torch.no_grad\(\)"):
        perform(op, arguments | {"q": query})
    assert same(perform(op, arguments | {"q": query.detach()}), perform(op, arguments))


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "set_grad_enabled"])
@pytest.mark.parametrize("name", INSTEAD)
def test_inference_with_weights_that_require_gradients(name: str, mode: str, device: Device) -> None:
    op, arguments = a_call(name, device)
    expected = perform(op, arguments)
    leaves = asking(arguments, *floating(arguments))
    block = torch.set_grad_enabled(False) if mode == "set_grad_enabled" else getattr(torch, mode)()
    with block:
        found = perform(op, leaves)
    assert same(found, expected)
    assert not any(result.requires_grad for result in found)


@pytest.mark.parametrize("by", ["argument", "setting"])
@pytest.mark.parametrize("name", INSTEAD)
def test_the_reference_path_is_differentiable_for_who_names_it(name: str, by: str, device: Device) -> None:
    op, arguments = a_call(name, device)
    settings = portattn.settings(backend="reference") if by == "setting" else contextlib.nullcontext()
    more = {"backend": "reference"} if by == "argument" else {}

    def value(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        out, lse = perform(op, arguments | more | tensors)
        return out[out.isfinite()].sin().sum() + lse[lse.isfinite()].sum()

    with settings:
        leaves = {n: arguments[n].nan_to_num(0.5).requires_grad_() for n in floating(arguments)}
        gradients = torch.autograd.grad(value(leaves), list(leaves.values()))
        assert portattn.last_plan().path == "reference"
        generator = torch.Generator().manual_seed(0)
        for (leaf, at), gradient in zip(leaves.items(), gradients, strict=True):
            direction = torch.randn(at.shape, generator=generator).to(at.device)
            with torch.no_grad():
                ends = [value(leaves | {leaf: at + step * direction}) for step in (1e-2, -1e-2)]
            assert gradient.abs().max() > 1e-3
            slope = (ends[0] - ends[1]) / 2e-2
            torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-2, atol=1e-2)


def test_another_path_that_is_named_refuses_too(device: Device) -> None:
    op, arguments = a_call("decode", device)
    with pytest.raises(portattn.ArgumentError, match="decode_attention has no gradient"):
        perform(op, asking(arguments, "q"), backend=device.path)


def _compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("name", INSTEAD)
def test_a_compiled_call_says_so_when_it_is_traced(name: str, device: Device) -> None:
    op, arguments = a_call(name, device)
    tensors = asking(arguments, *floating(arguments))
    compiled = _compiled(lambda given: perform(op, given))
    with pytest.raises(Exception, match=f"{op} has no gradient"):  # dynamo's own kind of error, with ours in it
        compiled(tensors)
    with torch.no_grad():
        assert same(compiled(tensors), perform(op, arguments))


def test_torch_func_asks_for_gradients_too(device: Device) -> None:
    op, arguments = a_call("decode", device)
    k = arguments.pop("k_cache")

    def loss(k: torch.Tensor, **more: Any) -> torch.Tensor:
        return perform(op, arguments | {"k_cache": k}, return_lse=False, **more).nan_to_num(0.0).sum()

    with pytest.raises(portattn.ArgumentError, match=r"k_cache\.requires_grad is True"):
        torch.func.grad(loss)(k)
    clean = k.nan_to_num(0.5)
    arguments["v_cache"] = arguments["v_cache"].nan_to_num(0.5)
    found = torch.func.grad(lambda k: loss(k, backend="reference"))(clean)
    leaf = clean.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf, backend="reference"), leaf)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected)


def test_a_handle_that_was_prepared_without_gradients_refuses_them(device: Device) -> None:
    op, arguments = a_call("paged", device)
    handle = portattn.prepare(op, **arguments)
    expected = handle.run(**arguments)
    with pytest.raises(portattn.ArgumentError, match="paged_attention"):
        handle.run(**asking(arguments, "q"))
    with torch.no_grad():
        assert same(handle.run(**asking(arguments, "q")), expected)


@pytest.mark.parametrize("name", INSTEAD)
@pytest.mark.parametrize("chip", ["cuda:sm_90", "rocm:gfx942", "ascend:ascend910b2", "cpu:generic"])
def test_the_plan_of_such_a_problem_says_so_on_every_chip(chip: str, name: str) -> None:
    with pytest.raises(portattn.PathUnavailable) as error:
        plan(problem(name, needs_grad=True), parse_target(chip))
    last = error.value.rejected[-1]
    assert (last.path, last.reason) == ("reference", f"{CALLS[name]['op']} has no gradient")
    assert INSTEAD[name] in last.hint


@pytest.mark.parametrize("name", ["attention", "varlen"])
def test_what_is_named_instead_has_a_gradient(name: str, device: Device) -> None:
    op, arguments = a_call(name, device)
    leaves = asking({n: t.nan_to_num(0.5) if n in "qkv" else t for n, t in arguments.items()}, "q", "k", "v")
    out, _ = perform(op, leaves)
    out.sum().backward()
    assert all(leaves[n].grad is not None and leaves[n].grad.abs().max() > 0 for n in "qv")


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.bool])
def test_a_bias_that_can_have_no_gradient_is_refused(kind: torch.dtype, device: Device) -> None:
    """With or without a gradient of the others: an integer that is added to scores is never cast silently."""
    op, arguments = a_call("attention", device)
    bias = torch.zeros(19, 37, dtype=kind, device=device.name)
    for q in (arguments["q"], arguments["q"].clone().requires_grad_()):
        with pytest.raises(portattn.ArgumentError, match=r"attention: bias\.dtype is torch\.\w+, but must be"):
            perform(op, arguments | {"bias": bias, "q": q})
