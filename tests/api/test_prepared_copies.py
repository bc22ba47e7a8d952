"""Handles of prepare(), copied and saved with the module that holds them: each is prepared again by its first run."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from opcalls import CALLS, assert_right, given, pretend_accelerator, problem
from support import Device, random_call

import portattn
from portattn.api.prepare import Prepared

ROOT = Path(portattn.__file__).parent.parent


class Layer(torch.nn.Module):
    """A module that holds a handle."""

    def __init__(self, q: torch.Tensor) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones((), device=q.device), requires_grad=False)
        self.handle = portattn.prepare("attention", q, q, q, causal=True)

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return self.handle.run(q * self.scale, q, q, causal=True)


def saved_by_torch(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_by_torch,
    "twice": lambda value: copy.deepcopy(pickle.loads(pickle.dumps(value))),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_module_with_a_handle_is_copied(device: Device, how: str) -> None:
    q = torch.randn(2, 4, 5, 16, device=device.name)
    layer = Layer(q)
    right = layer(q)
    made = COPIES[how](layer)
    assert made.handle.plan == layer.handle.plan
    assert repr(made.handle) == repr(layer.handle)
    for _ in range(2):
        assert torch.equal(made(q), right)
    assert made.handle.plan == layer.handle.plan == portattn.last_plan()


@pytest.mark.parametrize("name", CALLS)
def test_a_copy_launches_as_the_original(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if device.path == "interpreter":
        pretend_accelerator(monkeypatch)
    call = random_call(problem(name), seed=1, device=device.name)
    arguments = given(call)
    handle = portattn.prepare(call.problem.op, **arguments)
    made = copy.deepcopy(handle)
    assert made._cached is None, "nothing is planned, compiled or allocated before the first run"
    assert_right(call, *made.run(**arguments))
    assert (made._cached is None) == (handle._cached is None)
    assert made.plan == handle.plan
    for found, right in zip(made.run(**arguments), handle.run(**arguments), strict=True):
        assert torch.equal(found, right)


def test_another_process_loads_it(tmp_path: Path) -> None:
    q = torch.randn(2, 4, 5, 16)
    handle = portattn.prepare("attention", q, q, q, causal=True)
    (tmp_path / "handle").write_bytes(pickle.dumps(handle))
    torch.save((q, handle.run(q, q, q, causal=True)), tmp_path / "tensors")
    program = (
        "import pickle, sys, torch\n"
        "handle = pickle.load(open(sys.argv[1], 'rb'))\n"
        "q, right = torch.load(sys.argv[2])\n"
        "torch.testing.assert_close(handle.run(q, q, q, causal=True), right)\n"
        "print(handle.plan.path)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "handle"), str(tmp_path / "tensors")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == handle.plan.path


def copied(**own: Any) -> tuple[Prepared, torch.Tensor]:
    q = torch.randn(2, 4, 5, 16)
    return COPIES["twice"](portattn.prepare("attention", q, q, q, causal=True, **own)), q


@pytest.mark.parametrize(
    ("name", "given", "was"), [("backend", "reference", "reference"), ("validate", True, "always")]
)
def test_a_copy_keeps_the_originals_backend_and_validate(name: str, given: Any, was: str) -> None:
    made, q = copied(**{name: given})
    with pytest.raises(portattn.ArgumentError, match=f"{name} is 'auto', but the call was prepared with '{was}'"):
        made.run(q, q, q, causal=True)
    made.run(q, q, q, causal=True, **{name: given})
    with portattn.settings(**{name: was}):
        assert made.run(q, q, q, causal=True).shape == q.shape
    with pytest.raises(portattn.ArgumentError, match=f"{name} is "):
        copied()[0].run(q, q, q, causal=True, **{name: given})


def test_a_copy_is_for_calls_like_the_originals() -> None:
    for changes, argument in (
        ({"causal": False}, "causal is False, but the call was prepared with True"),
        ({"q": torch.randn(2, 4, 6, 16)}, r"q is \(\(2, 4, 6, 16\)"),
        ({"k": torch.randn(2, 5, 4, 16).transpose(1, 2)}, r"k is \(\(2, 4, 5, 16\)"),
        ({"q": torch.randn(2, 4, 5, 16).half()}, "q is .*torch.float16"),
        ({"out": torch.empty(2, 4, 5, 15)}, r"out is \(\(2, 4, 5, 15\)"),
    ):
        made, q = copied()
        arguments: dict[str, Any] = {"q": q, "k": q, "v": q, "causal": True} | changes
        with pytest.raises(portattn.ArgumentError, match=rf"prepare\('attention'\)\.run: {argument}"):
            made.run(**arguments)


def test_a_copy_takes_the_device_and_the_settings_of_its_first_run() -> None:
    made, q = copied()
    with portattn.settings(backend="reference"):
        made.run(q, q, q, causal=True)
        assert made.plan.path == "reference"
    with pytest.raises(portattn.ArgumentError, match="backend is 'auto', but the call was prepared with 'reference'"):
        made.run(q, q, q, causal=True)
    made, q = copied()
    shapes = q.to("meta")
    with pytest.raises(portattn.ArgumentError, match=r"(q|k)\.device is '(meta|cpu)', but"):
        portattn.prepare("attention", q, q, q, causal=True).run(shapes, shapes, shapes, causal=True)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        assert made.run(fake, fake, fake, causal=True).shape == q.shape
    assert torch.equal(made.run(q, q, q, causal=True), portattn.attention(q, q, q, causal=True))
