"""diffusers' context parallelism by portattn, in two and four processes with gloo: parallel_child.py."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support
import torch

from portattn.errors import ArgumentError

CHILD = Path(__file__).with_name("parallel_child.py")
Outputs = Callable[[int, str], list[str]]
# By torch's kernels, which the setting takes on a CPU: gradients of attention over some of the keys, computed anew.
BY_SETTING = [
    "ring", "ring_in_half", "ring_lse", "ring_of_any_length", "ulysses", "ulysses_masked", "ulysses_lse",
    "ulysses_of_any_length", "autocast", "autocast_masked", "dropout", "refusals", "flux_by_ring", "flux_by_heads",
]  # fmt: skip
# By portattn's kernels, gradients included.
BY_KERNELS = ["ring", "ring_in_half", "ring_lse", "ulysses", "ulysses_masked", "autocast", "dropout"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """(processes, backend) -> what each process printed of all its cases. Run once."""
    known: dict[tuple[int, str], list[str]] = {}

    def run(world: int, backend: str) -> list[str]:
        if (world, backend) not in known:
            cases = ["unified"] if world == 4 else BY_SETTING if backend == "auto" else BY_KERNELS
            known[world, backend] = _outputs(world, backend, cases, tmp_path_factory.mktemp("processes"))
        return known[world, backend]

    return run


def _outputs(world: int, backend: str, cases: list[str], folder: Path) -> list[str]:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), "")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(CHILD), str(rank), str(world), str(folder / "file"), backend, *cases],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **hidden, "TRITON_INTERPRET": "1"},
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        return [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def assert_right(outputs: list[str], case: str) -> None:
    assert all(f"right {case}\n" in output for output in outputs), "\n".join(outputs)


def features(cases: dict[str, str], backend: str) -> list[Any]:
    return [
        pytest.param(case, backend, marks=pytest.mark.engine_feature(feature), id=f"{case}, {backend}")
        for case, feature in cases.items()
    ]


RING, HEADS = "context parallelism, ring: forward and backward", "context parallelism, Ulysses: forward and backward"
SHOWN = {
    "ring": RING, "ring_in_half": RING, "ulysses": HEADS,
    "ring_lse": "context parallelism: return_lse", "ulysses_lse": "context parallelism: return_lse",
    "ring_of_any_length": "context parallelism, ring_anything: forward",
    "ulysses_of_any_length": "context parallelism, ulysses_anything: forward",
    "ulysses_masked": "context parallelism, Ulysses: a mask of (B, Sk)", "autocast": "context parallelism: autocast",
    "autocast_masked": "context parallelism: autocast",
    "dropout": "context parallelism, Ulysses: dropout_p",
    "flux_by_ring": "FluxTransformer2DModel.enable_parallelism", "flux_by_heads":
    "FluxTransformer2DModel.enable_parallelism",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "backend"),
    [*features(SHOWN, "auto"), *features({case: SHOWN[case] for case in BY_KERNELS}, "interpreter")],
)
def test_two_processes(case: str, backend: str, outputs: Outputs) -> None:
    if backend == "interpreter" and support.no_interpreter():
        pytest.skip(support.no_interpreter())
    assert_right(outputs(2, backend), case)


@pytest.mark.engine_feature("context parallelism, ring and Ulysses together: forward and backward")
def test_four_processes(outputs: Outputs) -> None:
    assert_right(outputs(4, "auto"), "unified")


REFUSED = {
    "is_causal": ": is_causal", "key.shape[2]": ": GQA", "enable_gqa": ": GQA",
    "return_lse": ": gradients with an LSE", "attn_mask.shape": ", ring: masks", "dropout_p": ", ring: dropout",
    "attn_mask.requires_grad": ": gradients of a mask",
}  # fmt: skip


@pytest.mark.parametrize(
    "argument",
    [
        pytest.param(argument, marks=pytest.mark.engine_feature(f"context parallelism{feature}", refused=True))
        for argument, feature in REFUSED.items()
    ],
)
def test_what_context_parallelism_refuses(argument: str, outputs: Outputs, refusal: Callable[..., Any]) -> None:
    """Every process refuses, before any of them sends anything: none waits for another."""
    found = outputs(2, "auto")
    assert_right(found, "refusals")
    said = [
        line.partition(f"refused {rank} {argument}: ")[2] for rank, output in enumerate(found)
        for line in output.splitlines() if line.startswith(f"refused {rank} {argument}:")
    ]  # fmt: skip
    assert len(said) in (2, 4)
    with refusal(ArgumentError, match=argument.replace("[", r"\[")):
        raise ArgumentError(*_parts(said[0]))


def _parts(text: str) -> tuple[str, str, Any, str]:
    op, _, rest = text.partition(": ")
    argument, _, rest = rest.partition(" is ")
    value, _, limit = rest.partition(", but ")
    return op, argument, eval(value), limit
