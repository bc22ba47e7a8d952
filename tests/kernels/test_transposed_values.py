"""The kernel that transposes e4m3 values for the Hopper forward, in the interpreter or on a chip."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support import Device

# Where each key of 16 is read: of lane t of four the columns 2t, 2t + 1, 8 + 2t, 9 + 2t of a product's result.
ORDER = [key for t in range(4) for key in (2 * t, 2 * t + 1, 8 + 2 * t, 9 + 2 * t)]


def transposed(
    device: Device, v: torch.Tensor, keys: int, first: dict[str, list[int]] | None = None, seq_q: int = 9, **limits: Any
) -> torch.Tensor:
    """By the kernel. first: lengths of sequences, or with PACKED their first rows. What is not written is 77."""
    if device.path == "interpreter":
        pytest.importorskip("triton")
    from portattn.backends.cuda.hopper_forward.transposed import transpose_values

    given = {"q": None, "k": None} | {
        side: torch.tensor(rows, dtype=torch.int32, device=device.name) for side, rows in (first or {}).items()
    }
    constants = {"PACKED": False, "RIGHT": False, "LEFT": False, "TOP_LEFT": False} | limits
    left, right = constants.pop("left", 0), constants.pop("right", 0)
    batch, heads, rows, columns = v.shape
    batches, tiles, block = batch, -(-rows // keys), 128
    if constants["PACKED"]:
        batches = len(given["k"]) - 1
        tiles = rows // keys + batches + 1
    out = torch.full((batch, heads, columns, tiles * keys), 77, dtype=torch.int8, device=device.name)
    v = v.to(device.name)
    grid = (tiles, heads, batch * -(-columns // block))
    transpose_values[grid](
        v, out, given["q"], given["k"], *v.stride()[:3], heads, seq_q, rows, columns, tiles, batches, left, right,
        KEYS=keys, BLOCK=block, **constants,
    )  # fmt: skip
    return out.cpu()


def wanted(v: torch.Tensor, keys: int, length: int | None = None) -> torch.Tensor:
    """Of one sequence, in at least one tile."""
    rows = v.shape[2]
    padded = torch.zeros(*v.shape[:2], max(1, -(-rows // keys)) * keys, v.shape[3], dtype=v.dtype)
    padded[:, :, : rows if length is None else length] = v[:, :, :length]
    numbers = torch.arange(padded.shape[2]).view(-1, 16)[:, ORDER].flatten()
    return padded[:, :, numbers].transpose(-1, -2)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("columns", "keys"), [(16, 64), (48, 128), (128, 128), (160, 64), (256, 128)])
def test_every_key_goes_to_its_lane(device: Device, columns: int, keys: int) -> None:
    v = numbers(2, 3, 200, columns)
    assert torch.equal(transposed(device, v, keys), wanted(v, keys))


def test_any_strides_are_read(device: Device) -> None:
    v = numbers(2, 150, 3, 64).transpose(1, 2)
    assert torch.equal(transposed(device, v, 64), wanted(v, 64))


def test_what_no_query_sees_is_nothing(device: Device) -> None:
    """0x7f is NaN."""
    v = numbers(2, 1, 200, 32)
    v[0, :, 130:] = 127
    v[1] = 127
    found = transposed(device, v, 64, {"k": [130, 0]})
    assert torch.equal(found[:1], wanted(v[:1], 64, 130))
    assert not found[1].any()
    # Nine queries at the end of as many keys, seen from the top left: the last sees key 8.
    found = transposed(device, v[:1], 64, RIGHT=True, TOP_LEFT=True)
    assert torch.equal(found, wanted(v[:1], 64, 9))
    found = transposed(device, v[:1], 64, LEFT=True, left=20)
    v[:, :, : 200 - 9 - 20] = 0
    assert torch.equal(found, wanted(v[:1], 64))


@pytest.mark.parametrize("keys", [64, 128])
def test_packed_sequences_begin_at_a_tiles_edge(device: Device, keys: int) -> None:
    v = numbers(1, 2, 220, 64)
    first = [0, 70, 70, 199]
    found = transposed(device, v, keys, {"q": [0, 5, 9, 60], "k": first}, seq_q=60, PACKED=True)
    for b, (begin, end) in enumerate(itertools.pairwise(first)):
        want = wanted(v[:, :, begin:end], keys)
        at = (begin // keys + b) * keys
        assert torch.equal(found[..., at : at + want.shape[-1]], want)
    # All of it is written: what is read behind a sequence must not be what was there.
    assert not found[..., (first[-1] // keys + 3) * keys :].any()


def test_first_rows_that_are_none_are_harmless(device: Device) -> None:
    v = numbers(1, 1, 100, 16)
    transposed(device, v, 64, {"q": [5, -7, 900], "k": [50, -3, 2**31 - 1]}, seq_q=60, PACKED=True)
