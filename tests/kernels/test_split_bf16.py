"""Products of float32 from bfloat16 parts (bf16x6): gradients and results under float32's budget, whatever is asked of
them, with parts made in registers or read from memory."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import pytest
import torch
from gradient_cases import DENSE, PACKED, check, random
from support import Device, core_plan, problem, random_call, run_core

from portattn.launch import cached_launch, kernel_calls
from portattn.planning.kernel_specs import CORES
from portattn.schema.lowering import Launch, Lowering

OPERANDS = ("q", "k", "v", "grad_out")
PARTS = {"dot_precision": "bf16x6"}
FIELDS: dict[str, dict[str, Any]] = {
    "causal, groups": {"causal": "bottom_right", "heads_q": 4, "grad_lse": True},
    "odd heads": {"head_dim": 20, "head_dim_v": 36, "causal": "top_left"},
    "a window": {"window_left": 5, "window_right": 3, "seq_q": 40, "seq_k": 45},
    "padding that holds NaN": {"seqlens_q": True, "leftpad_k": True, "batch": 3, "poison": "apart"},
    "a mask that hides NaN": {"heads_q": 4, "mask": True, "causal": "bottom_right", "poison": "k"},
    "a bias that hides NaN": {"bias": True, "grad_bias": True, "poison": "v"},
    "dropout, cap, slopes": {"dropout": True, "softcap": True, "alibi_slopes": True, "grad_slopes": True},
    "other strides": {"strides": "sliced"},
}


@pytest.mark.parametrize("parts", ["registers", "memory"])
@pytest.mark.parametrize("fields", FIELDS)
def test_gradients(device: Device, fields: str, parts: str) -> None:
    check(device, random(device, 1, **FIELDS[fields]), PARTS | {"parts": parts})


@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_parts_in_memory_of_packed_rows(device: Device, load: str) -> None:
    fields = {"head_dim": 32, "head_dim_v": 32, "causal": "bottom_right", "heads_q": 4}
    call = random(device, base=PACKED, **fields)
    check(device, call, PARTS | {"parts": "memory", "load": load, "grid": "persistent"}, block_n=32)


def test_a_kernel_of_their_own_stores_them_once(device: Device) -> None:
    call = random(device, base=DENSE, head_dim=20)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, PARTS | {"parts": "memory"}), call, 3)
    made = [launch for launch in launches if launch.function == "store_parts"]
    sources = [next(x for name in OPERANDS if (x := launch.arguments[name]) is not None) for launch in made]
    assert list(map(id, sources)) == [id(getattr(call, name)) for name in OPERANDS]
    assert made[0].arguments["parts"].shape == (2, 2, 3, 19, 24)  # rows are a multiple of 16 bytes
    for others in (PARTS, {"dot_precision": "ieee", "parts": "memory"}):
        launches, _, _ = kernel_calls(core_plan(device, call.problem, others), call, 3)
        assert [launch.function for launch in launches] == ["backward_delta", "backward_keys", "backward_rows"]


def test_a_cached_call_has_the_parts_in_its_operands_places(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are read from memory, a launch's `q` is no tensor that the caller brings."""
    monkeypatch.setattr(cached_launch, "load_kernels", lambda module, interpreted: importlib.import_module(module))
    call = random(device, base=DENSE)
    launches, delta, _ = kernel_calls(core_plan(device, call.problem, PARTS | {"parts": "memory"}), call, 3)
    steps, buffers = cached_launch.core_steps(launches, delta, None)
    first, *made, keys, rows = (step.roles for step in steps)
    assert first["grad_out"] == "grad_out"
    assert [role for one in made for role in one.values() if not role.startswith("buffer")] == list(OPERANDS)
    stored = [one["parts"] for one in made]
    assert len(set(stored)) == 4
    assert list(buffers) == stored
    for one in (keys, rows):
        assert [one[name] for name in OPERANDS] == stored
        assert one["forward_lse"] == "forward_lse"


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "bf16x6"), ("fp32", "tf32x3")])
def test_other_products_have_no_parts(dtype: str, precision: str) -> None:
    kernel, p = CORES["attention_backward"], problem(**DENSE | {"dtype": dtype})
    limits = kernel.limits(p, Lowering(dot_precision=precision, parts="memory"), Launch())
    assert [(name, value) for name, value, _ in limits] == [("parts", "registers")]
    asked = Lowering(dot_precision="bf16x6", parts="memory")
    assert not kernel.limits(msgspec.structs.replace(p, dtype="fp32"), asked, Launch())


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_operands_have_one_precision(device: Device, dtype: str) -> None:
    call = random_call(problem(dtype=dtype, causal="bottom_right"), device=device.name)
    ours, _ = run_core(device, call, PARTS)
    plain, _ = run_core(device, call, {})
    assert torch.equal(ours, plain)


def test_an_infinite_number_is_what_float32_makes_of_it(device: Device) -> None:
    """Its second part is NaN. A key that is -inf has no weight where the query is positive."""
    call = random_call(problem(head_dim=16), device=device.name)
    call.q.abs_()
    call.k[:, :, 3] = float("-inf")
    call.k[:, :, 5, 2] = float("inf")
    call.q[:, :, :, 2] = 0.5
    call.q[:, :, 1:] *= -1
    for row in (slice(0, 1), slice(1, None)):
        ours, _ = run_core(device, call, PARTS)
        plain, _ = run_core(device, call, {"dot_precision": "ieee"})
        assert torch.equal(ours[:, :, row].isnan(), plain[:, :, row].isnan())


def test_parts_hold_every_bit() -> None:
    """Numbers whose first part alone, or first two, are far off: their products are those of float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=generator) * torch.exp2(
        torch.randint(-60, 60, (4096,), generator=generator).float()
    )
    upper = torch.tensor(-65536, dtype=torch.int32)
    first = (x.view(torch.int32) & upper).view(torch.float32)
    second = ((x - first).view(torch.int32) & upper).view(torch.float32)
    third = x - first - second
    for part in (first, second, third):
        assert torch.equal(part.bfloat16().float(), part)
    assert torch.equal(first.double() + second.double() + third.double(), x.double())
