"""Every op with every feature against the float64 oracle, one at a time and all together."""

from typing import Any

import pytest
import reference_cases
import torch
from kernel_cases import OPS, PAGED, SPLITTING, check, problem, run
from support import Device, assert_right, poisoned, random_call

from portattn.reference import blockwise
from portattn.schema.call import Call
from portattn.testing.oracle import oracle

PLACED: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"}, "top_left": {"causal": "top_left"},
    "window_before": {"window_left": 3}, "window_after": {"window_right": 1},
    "window": {"window_left": 9, "window_right": 5},
    "window_wider_than_a_tile": {"window_left": 17, "window_right": 18},
    "window_of_itself": {"window_left": 0, "window_right": 0},
    "causal_window": {"causal": "bottom_right", "window_left": 5},
    "top_left_window": {"causal": "top_left", "window_left": 5}, "chunk": {"chunk": 5},
    "chunk_of_one": {"chunk": 1}, "chunk_wider_than_a_tile": {"chunk": 19},
    "causal_chunk": {"causal": "bottom_right", "chunk": 7}, "top_left_chunk": {"causal": "top_left", "chunk": 7},
    "chunk_and_window": {"window_left": 4, "window_right": 2, "chunk": 6},
    "chunk_and_more": {
        "causal": "bottom_right", "window_left": 9, "chunk": 11, "softcap": True, "alibi_slopes": True, "sinks": True,
    },
    "window_and_more": {
        "causal": "bottom_right", "window_left": 9, "softcap": True, "alibi_slopes": True, "sinks": True,
    },
}  # fmt: skip
GIVEN: dict[str, dict[str, Any]] = {
    "bias": {"bias": True}, "mask": {"mask": True},
    "all": reference_cases.PLACED["all"],
}  # fmt: skip
CHOSEN: dict[str, dict[str, Any]] = {
    "log_weights": {"log_weights": True}, "magicpig": {"magicpig": True},
    "all": {"log_weights": True, "softcap": True, "alibi_slopes": True, "sinks": True},
    "all_magicpig": {"magicpig": True, "softcap": True, "alibi_slopes": True, "sinks": True},
}  # fmt: skip
# Bias and mask have another broadcast shape for each of four seeds, slopes are per head and per sequence in turn.
SEEDS = {"alibi": (0, 1), "bias": (0, 1, 2, 3), "mask": (0, 1, 2, 3)}
ONCE = ("padded", "whole pages", "mla")  # their kernels' other ops go through all of those


def features(name: str) -> dict[str, dict[str, Any]]:
    """Those that the op has: bias and mask are given for every pair of a query and a key."""
    if name.startswith("sparse"):
        return reference_cases.TERMS | CHOSEN
    return reference_cases.TERMS | PLACED | ({} if "total_q" in OPS[name] else GIVEN)


CASES = [
    (name, feature, seed) for name in OPS for feature in features(name)
    for seed in (SEEDS.get(feature, (1,)) if name not in ONCE else (1,))
]  # fmt: skip


def splits(name: str, seed: int) -> int:
    """One for most packed queries: merging takes the interpreter a program a row."""
    return 1 + seed % 3 if name in SPLITTING and ("ragged" not in name or seed > 1) else 1


@pytest.mark.parametrize(("name", "feature", "seed"), CASES)
def test_features_are_right(device: Device, name: str, feature: str, seed: int) -> None:
    call = random_call(problem(name, **features(name)[feature]), seed, device=device.name)
    check(device, call, splits(name, seed))


def everything(name: str) -> dict[str, Any]:
    known = features(name)
    return known.get("all_magicpig", known.get("all", known.get("window_and_more", {})))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_16_bit_dtypes_are_right(device: Device, name: str, dtype: str) -> None:
    causal = {} if name.startswith("sparse") else {"causal": "bottom_right"}
    fields, seed = (causal, 2) if dtype == "fp16" else (everything(name), 3)
    call = random_call(problem(name, batch=3, dtype=dtype, **fields), seed, device=device.name, extremes=True)
    check(device, call, splits(name, seed))


@pytest.mark.parametrize("name", OPS)
def test_a_negative_scale(device: Device, name: str) -> None:
    """The product's sign is carried by the query: a cap, slopes and MagicPIG's angle know nothing of that."""
    call = random_call(problem(name, **everything(name)), 6, device=device.name, scale=-0.7)
    check(device, call, splits(name, 7))


@pytest.mark.parametrize("name", OPS)
def test_without_an_lse(device: Device, name: str) -> None:
    call = random_call(problem(name, return_lse=False, sinks=True), 2, device=device.name)
    for parts in (1, 2) if name in SPLITTING else (1,):
        check(device, call, parts)


@pytest.mark.parametrize("name", [n for n in OPS if not n.startswith("sparse")])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_attend_nothing(device: Device, name: str, sinks: bool) -> None:
    """A window that ends before the first key, more queries than keys, and a sequence whose mask is False."""
    seq_k = 16 if "page_size" in OPS[name] else 9
    fields: dict[str, Any] = {"causal": "bottom_right", "window_left": 2, "seq_k": seq_k, "sinks": sinks}
    if name == "varlen":
        fields["total_k"] = 17
    if "total_q" not in OPS[name]:
        fields["mask"] = True
    call = random_call(problem(name, **fields), 4, device=device.name, extremes=True)
    if call.mask is not None:
        call.mask = call.mask.clone()
        call.mask[0] = False
    check(device, call, splits(name, 2))


# (D, Dv). Wider than 512, a head is two products.
WIDTHS = [(1, 1), (17, 17), (24, 40), (64, 1), (16, 80), (80, 80), (192, 128), (512, 512), (544, 64), (576, 512)]
NAMES = ["dense", "varlen", "decode", "paged", "sparse"]
FEW: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 3, "seq_k": 21}
FIELDS: dict[str, dict[str, Any]] = {
    "varlen": {"total_q": 3, "total_k": 21}, "decode": {"leftpad_k": False, "seqlens_k": False},
    "paged": PAGED | {"seq_k": 24}, "sparse": {"seq_q": 1, "tokens": 18, "magicpig": True},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), WIDTHS)
def test_heads_of_any_width(device: Device, name: str, head_dim: int, head_dim_v: int) -> None:
    fields = FEW | FIELDS.get(name, {}) | {"head_dim": head_dim, "head_dim_v": head_dim_v}
    causal = {} if name == "sparse" else {"causal": "bottom_right"}
    for dtype in ("fp32", "bf16") if head_dim in (17, 544) else ("fp32",):
        call = random_call(problem(name, dtype=dtype, **fields, **causal), 2, device=device.name, extremes=True)
        check(device, call, extra=summed_in_order(head_dim))


def summed_in_order(head_dim: int) -> float:
    """What an fp32 score of a wide head may lose beyond the budget, which is taken from torch on a CPU and its order of
    adding. An accelerator adds the columns one by one, and NumPy, which the interpreter multiplies with, in blocks
    whose width depends on the processor. The error of n terms grows with √n."""
    return head_dim**0.5 * 2.0**-24 if head_dim > 256 else 0.0


def test_columns_that_sparse_values_alone_can_have(device: Device) -> None:
    fields = FEW | FIELDS["sparse"] | {"head_dim": 576, "head_dim_v": 576}
    for parts in (1, 2):
        check(device, random_call(problem("sparse", **fields), 3, device=device.name), parts)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (64, 16), (40, 24), (32, 1), (1, 1), (24, 0), (16, 80)])
@pytest.mark.parametrize("parts", [1, 2])
def test_latent_rows_of_any_width(device: Device, rank: int, rope: int, parts: int) -> None:
    fields = {"batch": 1, "heads_q": 3, "seq_q": 2, "head_dim": rank + rope, "head_dim_v": rank}
    for dtype in ("fp32", "bf16") if rank == 40 else ("fp32",):
        p = problem("mla", causal="bottom_right", dtype=dtype, **fields)
        check(device, random_call(p, 2, device=device.name, extremes=True), parts)


NAN, INF = float("nan"), float("inf")
KEY, COLUMN = 20, 3  # a key of the second tile that every sequence which is full has
FIELDS_SPOILT: dict[str, dict[str, Any]] = {
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
    assert torch.equal(torch.isfinite(lse), torch.isfinite(expected_lse))


@pytest.mark.parametrize(("tensor", "value"), [("q", NAN), ("k", NAN), ("v", NAN), ("q", INF), ("k", INF), ("v", -INF)])
@pytest.mark.parametrize(("name", "way"), RUNS)
def test_what_is_not_finite_reaches_exactly_what_depends_on_it(device, name, way, tensor, value):
    call = random_call(problem(name, **FIELDS_SPOILT.get(name, {})), 8, device=device.name, extremes=True)
    spoil(call, tensor, value)
    if way != "reference":
        out, lse = run(device, call, WAYS[way])
    else:
        with poisoned(), torch.no_grad():
            out, lse = blockwise.run(call)
    expected, _ = oracle(call)
    assert 0 < int((~torch.isfinite(expected)).sum()) < expected.numel()
    # A latent row is key and value at once.
    scored = tensor in ("q", "k") or call.problem.op == "mla_attention"
    (assert_not_finite_alike if scored and abs(value) == INF else assert_right)(call, out, lse)


@pytest.mark.parametrize("name", [n for n in OPS if n != "padded"])
def test_a_sink_that_is_not_finite_is_its_heads_alone(device: Device, name: str) -> None:
    call = random_call(problem(name, sinks=True, **FIELDS_SPOILT.get(name, {})), 9, device=device.name, extremes=True)
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
    fields = {"bias": True, "seqlens_k": False, "leftpad_k": False, **FIELDS_SPOILT.get(name, {})}
    call = random_call(problem(name, **fields), 3, device=device.name)
    call.bias = call.bias.clone()
    call.bias[..., KEY] = -INF
    results = []
    for held in (0.5, value):
        call.k[:, :, KEY] = call.v[:, :, KEY] = held
        results.append(run(device, call))
    assert_right(call, *results[0])
    torch.testing.assert_close(*results, rtol=0, atol=0)
