"""NaN and infinity in what is attended reach the outputs that depend on it, and no others.

Without a causal mask or window: within a tile of keys a masked probability of 0 times a NaN value is NaN in rows that
do not attend that key. What no row attends holds NaN in all random calls, and never reaches an output.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import OPS, SPLITTING, problem, run
from support import Device, assert_right, poisoned, random_call

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.testing.oracle import oracle

NAN, INF = float("nan"), float("inf")
KEY, COLUMN = 20, 3  # a key of the second tile that every sequence which is full has
FIELDS: dict[str, dict[str, Any]] = {
    "dense": {"heads_q": 4, "heads_k": 2, "seq_q": 3},
    # To the oracle, rows of padding attend every key with a weight of 0.
    "padded": {"heads_q": 4, "heads_k": 2, "seq_q": 3, "seqlens_q": False, "leftpad_q": False},
    "varlen": {"heads_q": 4, "heads_k": 2, "seq_q": 9, "total_q": 12},
    "ragged": {"heads_q": 4, "heads_k": 2, "seq_q": 9, "total_q": 12},
    "mla ragged": {"seq_q": 9, "total_q": 12},
}
WAYS = {"core": 1, "split": 3, "reference": 0}  # programs that share a row's keys
RUNS = [
    (name, way) for name in OPS for way in WAYS if way != "split" or (name in SPLITTING and "ragged" not in name)
]  # fmt: skip


def spoil(call: Call, tensor: str, value: float) -> None:
    """Put the value into one query row of the first sequence's second head, or into one of its keys or values."""
    if tensor == "q":
        row = 1 if call.problem.seq_q > 1 else 0
        call.q[0, 1, row + (0 if call.leftpad_q is None else int(call.leftpad_q[0])), COLUMN] = value
        return
    key = KEY
    if call.indices is not None and call.counts is not None:
        # A token that the second head has chosen and the first, which shares its keys, has not.
        length = call.problem.seq_k if call.seqlens_k is None else int(call.seqlens_k[0])
        chosen = [
            {t for t in call.indices[0, h, : int(call.counts[0, h])].tolist() if 0 <= t < length} for h in range(2)
        ]
        key = min(chosen[1] - chosen[0])
    page, row = 0, key
    if call.page_table is not None:
        page, row = int(call.page_table[0, key // call.problem.page_size]), key % call.problem.page_size
    elif call.leftpad_k is not None:
        row = key + int(call.leftpad_k[0])
    getattr(call, tensor)[page, 0, row, COLUMN] = value


def assert_not_finite_alike(call: Call, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """The same elements are finite. Over an infinite score, out and LSE may be infinite or NaN."""
    expected, expected_lse = oracle(call)
    assert torch.equal(torch.isfinite(out), torch.isfinite(expected))
    assert lse is not None
    assert torch.equal(torch.isfinite(lse), torch.isfinite(expected_lse))


@pytest.mark.parametrize(("tensor", "value"), [("q", NAN), ("k", NAN), ("v", NAN), ("q", INF), ("k", INF), ("v", -INF)])
@pytest.mark.parametrize(("name", "way"), RUNS)
def test_what_is_not_finite_reaches_exactly_what_depends_on_it(
    device: Device, name: str, way: str, tensor: str, value: float
) -> None:
    call = random_call(problem(name, **FIELDS.get(name, {})), 8, device=device.name, extremes=True)
    spoil(call, tensor, value)
    if way != "reference":
        out, lse = run(device, call, WAYS[way])
    else:
        with poisoned(), torch.no_grad():
            out, lse = blockwise.run(call)
    expected, _ = oracle(call)
    bad = int((~torch.isfinite(expected)).sum())
    assert 0 < bad < expected.numel()
    # A latent row is key and value at once.
    scored = tensor in ("q", "k") or call.problem.op == "mla_attention"
    (assert_not_finite_alike if scored and abs(value) == INF else assert_right)(call, out, lse)


@pytest.mark.parametrize("name", [n for n in OPS if n != "padded"])
def test_a_sink_that_is_not_finite_is_its_heads_alone(device: Device, name: str) -> None:
    call = random_call(problem(name, sinks=True, **FIELDS.get(name, {})), 9, device=device.name, extremes=True)
    call.sinks[1] = NAN
    out, lse = run(device, call, 2 if name in SPLITTING else 1)
    others = [h for h in range(call.problem.heads_q) if h != 1]
    assert torch.isfinite(out[:, others]).all()
    assert not torch.isnan(lse[:, others]).any()
    assert torch.isnan(lse[0, 1, 1 if call.problem.seq_q > 1 else 0])


@pytest.mark.parametrize("name", ["dense", "decode"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_a_bias_of_minus_infinity_masks_whatever_the_key_holds(device: Device, name: str, value: float) -> None:
    """NaN + −inf would be NaN. The outputs are those of a key that holds a number, bit for bit."""
    fields = {"bias": True, "seqlens_k": False, "leftpad_k": False, **FIELDS.get(name, {})}
    call = random_call(problem(name, **fields), 3, device=device.name)
    assert call.bias is not None
    call.bias = call.bias.clone()
    call.bias[..., KEY] = -INF
    results = []
    for held in (0.5, value):
        call.k[:, :, KEY] = call.v[:, :, KEY] = held
        results.append(run(device, call))
    assert_right(call, *results[0])
    for plain, spoilt in zip(*results, strict=True):
        assert torch.equal(spoilt, plain)
