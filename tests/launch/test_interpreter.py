"""What portattn mends of Triton's interpreter, in a process of its own: the builder is patched once a process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Triton before 3.8 negates by a difference; from 3.8 on by an operation of its own, which negates bit patterns.
NEGATES = """
import numpy as np, triton.language as tl
from triton.runtime import interpreter
from portattn.launch.run import mend_bf16

builder = interpreter.InterpreterBuilder
builder.create_fneg = lambda self, arg: interpreter.TensorHandle(np.negative(arg.data), arg.dtype.scalar)
mend_bf16()
numbers = np.array([1.5, -0.25, 0.0, np.inf, np.nan], dtype=np.float32)
halves = interpreter.TensorHandle((numbers.view(np.uint32) >> 16).astype(np.uint16), tl.bfloat16)
found = builder.create_fneg(None, halves)
wide = (found.data.astype(np.uint32) << 16).view(np.float32)
np.testing.assert_array_equal(wide, -numbers)
assert np.signbit(wide[2]) and found.dtype == tl.bfloat16
np.testing.assert_array_equal(builder.create_fneg(None, interpreter.TensorHandle(numbers, tl.float32)).data, -numbers)
print("right")
"""


@pytest.mark.interpreter
def test_bfloat16_is_negated_as_triton_3_8_asks_for_it() -> None:
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
def test_threads_interpret_one_after_the_other() -> None:
    """Triton's interpreter replaces functions of triton.language while it runs."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert (ran.returncode, ran.stdout) == (0, "right\n"), ran.stderr
