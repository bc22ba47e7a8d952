"""Cached launches against Triton's own: what reaches the driver is the same, byte for byte, with every Triton here. A
process with a libcuda that records launches (fakedriver.py) compiles small kernels and launches them by all ways."""

import importlib
import json
import os
import subprocess
import sys
from importlib import metadata

import fakedriver
import pytest
import support
import torch
from fakedriver import run, triton_folders
from opcalls import CALLS, problem
from packaging.version import Version

from portattn.launch import triton_compat
from portattn.launch.kernelcall import meta_call
from portattn.launch.run import kernel_calls
from portattn.schema.call import TENSORS
from portattn.schema.problem import Problem

WAYS = ("driver", "launcher", "native")
TRITONS = triton_folders()
KNOWN = sorted((v for v in TRITONS if tuple(map(int, v.split(".")[:2])) in triton_compat.KNOWN), key=Version)
# The installed one comes first; of the lab's the oldest and the newest, for each takes some seconds.
LOOKED_AT = list(dict.fromkeys([*[v for v in list(TRITONS)[:1] if v in KNOWN], *KNOWN[:1], *KNOWN[-1:]]))


@pytest.fixture(scope="module", params=LOOKED_AT or ["none"])
def seen(request, tmp_path_factory):
    if request.param not in TRITONS:
        pytest.skip("no Triton that is known is installed, and the lab has none for this Python")
    return run("direct_child.py", tmp_path_factory.mktemp("direct"), TRITONS[request.param])


def _kinds(seen):
    return {name: found for name, found in seen.items() if isinstance(found, dict)}


@pytest.mark.compiles
def test_all_ways_launch_the_same(seen):
    kinds, version = _kinds(seen), tuple(map(int, seen["triton"].split(".")[:2]))
    expected = {"copy", "two", "unaligned"}
    expected |= {"scratch"} if version >= (3, 3) and "scratch" in kinds else set()
    expected |= {"dependent"} if version >= (3, 4) else set()
    expected |= {"host descriptor"} if version >= (3, 5) else set()
    assert set(kinds) == expected
    for name, found in kinds.items():
        assert found["ways"] == ["driver", "native"], (name, found["reasons"])
        assert len(found["triton"]) == (2 if name == "two" else 1), name
        for way in WAYS:
            assert found[way] == found["triton"], f"{name} by {way}"


@pytest.mark.compiles
def test_a_dependent_launch_says_so(seen):
    serialization = 1 << 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert seen["copy"]["native"][0][3] & serialization == 0
    if "dependent" in seen:
        assert seen["dependent"]["native"][0][3] & serialization


@pytest.mark.compiles
def test_tensor_maps_are_made_for_each_address_and_kept(seen):
    if "maps" not in seen:
        pytest.skip("this Triton passes no tensor maps from the host")
    assert seen["maps"] == 2 * [[True, False], [False, True], [True, False]], "by Python and by C"
    assert seen["maps without a context"] == [1, 1], "a backward's thread may have none yet"
    assert (seen["hooked without a context"], seen["maps kept"]) == (1, [0, 64])
    assert seen["maps by C"]
    assert not seen["maps of another make"], "native.c's maps are used where they are Triton's, byte for byte"


@pytest.mark.compiles
def test_hooks_threads_and_refusals(seen):
    assert seen["hooks"] == [["enter"], True], "a hook is called once, and the launch is the same"
    assert seen["context"] == [9], "a thread without a context gets one"
    assert (seen["refused"], seen["after"]) == ("CUDA's driver refused a launch: invalid argument", 1)
    assert seen["nothing"] == 0, "a grid of nothing launches nothing"
    assert seen["threads"] == [150, True], "every launch has its own addresses"
    if "scratch" in seen:
        assert seen["scratch"]["scratch"] > 0
        assert "no role" in seen["scratch without a role"]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_are_the_kernels_parameters(name, splits, device):
    made = support.core_plan(support.CPU, problem(name), launch={"splits": splits} if splits > 1 else {})
    launches, _, _ = kernel_calls(made, meta_call(made.problem), 3)
    assert launches
    for launch in launches:
        kernel = getattr(importlib.import_module(launch.module), launch.function)
        # In the kernel's order: a compile passes them by position (compile/ensure_compiled.py).
        assert list(launch.arguments) == [argument for argument in kernel.arg_names
            if argument not in launch.constexprs]  # fmt: skip
        assert set(launch.constexprs) <= set(kernel.arg_names)


LISTED = {"block_mask": True, "seq_q": 256, "seq_k": 384}


@pytest.mark.parametrize("op", [*CALLS, "lists"])
def test_tensors_have_the_names_of_the_call(op, device):
    """A cached launch passes the tensor of that name of the next call, whatever the first launch passed."""
    listed = Problem(op="attention_backward", batch=1, heads_q=2, heads_k=2, head_dim=16, **LISTED)
    made = support.core_plan(support.CPU, listed if op == "lists" else problem(op))
    call = meta_call(made.problem)
    for launch in kernel_calls(made, call, 3)[0]:
        for argument, value in launch.arguments.items():
            if argument in TENSORS and isinstance(value, torch.Tensor):
                assert value is getattr(call, argument), argument


TRITONS_INTERPRETED = fakedriver.triton_folders()


@pytest.mark.parametrize("release", ["3.2.0", "3.8.0", "3.9.0"])
def test_calls_are_right(release, tmp_path):
    """3.9.0 refuses masks of int32, which it makes of a scalar's condition beside a block's."""
    if release not in TRITONS_INTERPRETED:
        pytest.skip(f"the lab has no triton=={release}: `portattn lab create triton=={release}` makes it")
    if Version(release) < Version("3.7") and Version(metadata.version("numpy")) >= Version("2.4"):
        pytest.skip("Triton's interpreter before 3.7 needs numpy<2.4: quirk cpu-0001")
    # The folder that has Triton's metadata too: portattn asks it for the version.
    for entry in (TRITONS_INTERPRETED[release], *TRITONS_INTERPRETED[release].parent.glob("triton-*.dist-info")):
        (tmp_path / entry.name).symlink_to(entry)
    path = (str(tmp_path), str(fakedriver.HERE), os.environ.get("PYTHONPATH", ""))
    ran = subprocess.run([sys.executable, str(fakedriver.HERE / "interpreted_child.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}, capture_output=True, text=True,
        timeout=300, check=False)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["triton"] == release
    assert not {name: distance for name, distance in found["distances"].items() if not distance < 2e-6}
    assert len(found["distances"]) == 12


# Triton computes with the bit patterns; from 3.8 on it also negates them, by an operation of its own.
NEGATES = """
import numpy as np, triton.language as tl
from triton.runtime import interpreter
from portattn.launch.run import mend_bf16
interpreter.InterpreterBuilder.create_fneg = lambda self, arg: self.unary_op(arg, np.negative)
mend_bf16()
builder = interpreter.interpreter_builder
numbers = np.array([1.5, -0.25, 0.0, np.inf, np.nan], dtype=np.float32)
halves = interpreter.TensorHandle((numbers.view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)
found = builder.create_fneg(halves)
wide = lambda handle: (handle.data.astype(np.uint32) << 16).view(np.float32)
np.testing.assert_array_equal(wide(found), -numbers)
assert np.signbit(wide(found)[2]) and found.dtype == tl.bfloat16
np.testing.assert_array_equal(builder.create_fneg(interpreter.TensorHandle(numbers, tl.float32)).data, -numbers)
np.testing.assert_array_equal(wide(builder.create_fadd(halves, halves)), 2 * numbers)
np.testing.assert_array_equal(wide(builder.create_fma(halves, halves, halves))[:2], [3.75, -0.1875])
assert builder.create_fcmpOLT(found, halves).data.tolist() == [True, False, False, True, False]
print("right")
"""


@pytest.mark.interpreter
def test_bfloat16_is_computed_in_float32():
    ran = subprocess.run([sys.executable, "-c", NEGATES], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr


THREADS = """
import threading, torch, portattn
torch.set_num_threads(1)
q, k = torch.randn(1, 2, 33, 16), torch.randn(1, 2, 70, 16)
expected = portattn.attention(q, k, k, causal=True, backend="interpreter")
found, together = [], threading.Barrier(6)
def call():
    together.wait()
    for _ in range(3):
        try:
            found.append(portattn.attention(q, k, k, causal=True, backend="interpreter"))
        except Exception as error:
            found.append(error)
threads = [threading.Thread(target=call) for _ in range(6)]
for thread in threads: thread.start()
for thread in threads: thread.join()
errors = [each for each in found if not isinstance(each, torch.Tensor)]
assert not errors, errors[0]
assert len(found) == 18 and all(torch.equal(each, expected) for each in found)
print("right")
"""


@pytest.mark.interpreter
def test_threads_interpret_one_after_the_other():
    """Triton's interpreter replaces functions of triton.language while it runs."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=240, check=False,
        env=environment)  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr
