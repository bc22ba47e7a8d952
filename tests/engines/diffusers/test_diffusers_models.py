"""Whole models of diffusers with random weights: by portattn as by diffusers' own backend, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import support
import torch
from calls import assert_right
from tiny_diffusers import flux, flux_inputs, qwen, qwen_inputs, unet, unet_inputs

import portattn
from portattn.integrations import sdpa

if TYPE_CHECKING:
    from portattn.integrations.diffusers import DiffusersRegistration

FLUX, QWEN, UNET = "FluxTransformer2DModel", "QwenImageTransformer2DModel", "UNet2DConditionModel"
MODELS = [
    pytest.param(flux, flux_inputs, id="flux", marks=pytest.mark.engine_feature(FLUX)),
    pytest.param(qwen, qwen_inputs, id="qwen", marks=pytest.mark.engine_feature(QWEN)),
]
Build, Inputs = Callable[[], Any], Callable[..., dict[str, Any]]


def on(device: str, given: Any) -> Any:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


@pytest.mark.parametrize(("build", "inputs"), MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_transformer(
    build: Build, inputs: Inputs, dtype: torch.dtype, kernels: DiffusersRegistration, device: support.Device
) -> None:
    """By portattn's kernels. The second prompt of QwenImage is shorter, which its mask says."""
    with torch.no_grad():
        right = build().double()(**inputs(torch.float64))[0]
        model = build().to(device.name, dtype)
        given = on(device.name, inputs(dtype))
        same = model(**given)[0]
        assert portattn.last_plan() is None  # diffusers' own backend
        model.set_attention_backend(kernels.name)
        out = model(**given)[0]
    plan = portattn.last_plan()
    assert plan is not None
    assert (plan.path, plan.problem.mask) == (device.path, build is qwen)
    assert_right(out, same, right)


@pytest.mark.parametrize(("build", "inputs"), MODELS)
def test_it_is_trained(build: Build, inputs: Inputs, kernels: DiffusersRegistration, device: support.Device) -> None:
    grads: dict[str, Any] = {}
    for name in ("right", "same", "ours"):
        dtype = torch.float64 if name == "right" else torch.float32
        model = build().to(device.name, dtype)
        if name == "ours":
            model.set_attention_backend(kernels.name)
        model(**on(device.name, inputs(dtype)))[0].square().sum().backward()
        grads[name] = {n: p.grad for n, p in model.named_parameters() if "attn" in n and p.grad is not None}
    assert len(grads["ours"]) == len(grads["right"]) >= 12
    for name, right in grads["right"].items():
        assert_right(grads["ours"][name], grads["same"][name], right)


@pytest.mark.engine_feature("torch.compile with fullgraph=True")
@pytest.mark.parametrize(("build", "inputs"), MODELS)
def test_it_is_compiled(build: Build, inputs: Inputs, registered: DiffusersRegistration) -> None:
    model = build()
    model.set_attention_backend("portattn")
    with torch.no_grad():
        expected = model(**inputs())[0]
        out = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs())[0]
    assert torch.allclose(out, expected, atol=1e-6)


@pytest.mark.engine_feature("torch.compile with fullgraph=True")
def test_it_is_compiled_once_for_all_resolutions(registered: DiffusersRegistration) -> None:
    model = flux()
    model.set_attention_backend("portattn")
    torch.compiler.reset()  # of other tests' models nothing is to be compiled again
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for side in (3, 4, 6):
            given = flux_inputs(side=side)
            assert torch.allclose(compiled(**given)[0], model(**given)[0], atol=1e-5)


@pytest.mark.engine_feature("autocast")
@pytest.mark.parametrize(("build", "inputs"), MODELS)
def test_autocast(build: Build, inputs: Inputs, registered: DiffusersRegistration) -> None:
    with torch.no_grad():
        right = build().double()(**inputs(torch.float64))[0]
    model = build()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        same = model(**inputs())[0]
        model.set_attention_backend("portattn")
        out = model(**inputs())[0]
    plan = portattn.last_plan()
    assert plan is not None
    assert plan.problem.dtype == "bf16"
    assert_right(out, same, right)


@pytest.mark.engine_feature(f"{UNET}, inside sdpa.replacement()")
def test_a_unet(device: support.Device) -> None:
    """Its processors call torch's scaled_dot_product_attention, and no backend."""
    with torch.no_grad():
        right = unet().double()(**unet_inputs(torch.float64))[0]
        model = unet().to(device.name)
        given = on(device.name, unet_inputs())
        same = model(**given)[0]
        assert portattn.last_plan() is None
        with sdpa.replacement(), portattn.settings(backend=device.path):
            out = model(**given)[0]
    plan = portattn.last_plan()
    assert plan is not None
    assert plan.path == device.path
    assert plan.problem.seq_k == 5  # the last attention of a block is to the prompt
    assert_right(out, same, right)


def test_a_unet_is_not_reached_by_a_backend(registered: DiffusersRegistration) -> None:
    """set_attention_backend succeeds and changes nothing there, for any backend: the page says so."""
    model = unet()
    model.set_attention_backend("portattn")
    with torch.no_grad():
        model(**unet_inputs())
    assert portattn.last_plan() is None


@pytest.mark.engine_feature(f"{UNET}, inside sdpa.replacement()")
def test_a_unet_is_trained_in_the_block() -> None:
    grads = []
    for replaced in (False, True):
        model = unet()
        if replaced:
            with sdpa.replacement():
                model(**unet_inputs())[0].square().sum().backward()
        else:
            model(**unet_inputs())[0].square().sum().backward()
        grads.append([p.grad for n, p in model.named_parameters() if ".attn" in n])
    assert portattn.last_plan() is not None
    for ours, right in zip(*reversed(grads), strict=True):
        assert torch.allclose(ours, right, rtol=1e-3, atol=1e-5)
