"""The gradients' kernels against float64, under the same budget as the forward's: dQ, dK, dV, dBias, and each row's
part of the slopes' gradient. Padding of queries, keys, values and of the results' gradients holds NaN."""

from typing import Any

import msgspec
import pytest
import torch
from gradient_cases import DENSE, GRADIENTS, PACKED, check, random
from kernel_cases import CAUSAL
from support import TILE, Device, core_plan, run_core

from portattn import launch
from portattn.launch import kernel_calls
from portattn.planning.kernel_specs import CORES
from portattn.planning.kernel_specs.backward import DenseBackward
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES, FUSED, OF_ROWS, Launch, Lowering
from portattn.schema.problem import Problem


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize(
    "fields", [{}, {"heads_q": 4}, {"heads_q": 3, "heads_k": 1, "grad_lse": True}, {"window_left": 5},
               {"softcap": True}, {"head_dim_v": 24, "head_dim": 20}], ids=str,
)  # fmt: skip
def test_masks_and_features(device: Device, base: dict, causal: str, fields: dict) -> None:
    check(device, random(device, base=base, causal=causal, **fields))


ROWS = ((19, 37), (37, 19), (1, 40), (40, 1), (16, 16), (17, 33))
# Fields of the problem, and of its tensors.
ALONE: dict[str, dict[str, Any]] = {
    **{f"rows {rows} {causal}": {"seq_q": rows[0], "seq_k": rows[1], "causal": causal}
       for rows in ROWS for causal in CAUSAL},
    **{f"strides {one}": {"strides": one, "causal": "bottom_right"}
       for one in ("spare", "transposed", "sliced", "expanded")},
    **{f"scale {one}": {"scale": one} for one in (0.0, -0.4, 1.0)},
    **{f"{dtype} {dim} {dim_v}": {"dtype": dtype, "head_dim": dim, "head_dim_v": dim_v, "causal": "bottom_right"}
       for dtype in ("fp16", "bf16") for dim, dim_v in ((64, 64), (80, 48), (128, 128))},
    "one row and one key": {"seq_q": 1, "seq_k": 1}, "one head of keys": {"batch": 1, "heads_q": 5, "heads_k": 1},
    # NaN in a key is NaN in what dS is multiplied by, and dS is 0 there.
    "a cap of what is hidden": {"seed": 1, "heads_q": 4, "mask": True, "softcap": True, "poison": "k"},
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_each_problem(device: Device, name: str) -> None:
    check(device, random(device, **ALONE[name]))


@pytest.mark.parametrize("window", [(3, 4), (0, 0), (40, 2), (-1, 3), (7, -1), (17, 17)], ids=str)
def test_windows(device: Device, window: tuple[int, int]) -> None:
    check(device, random(device, window_left=window[0], window_right=window[1], seq_q=40, seq_k=45))


# A chunk smaller than a tile of 16, larger than one, than two, than all keys; of one key.
@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("causal", CAUSAL)
@pytest.mark.parametrize("chunk", [1, 5, 16, 21, 40, 500])
def test_chunks(device: Device, base: dict, causal: str, chunk: int) -> None:
    sizes = {} if base is PACKED else {"seq_q": 45, "seq_k": 52, "batch": 1}
    check(device, random(device, base=base, causal=causal, chunk=chunk, **sizes))


CHUNKED = {
    "more queries than keys": {"seq_q": 60, "seq_k": 20, "chunk": 18},
    "both sides of a window": {"causal": "none", "window_left": 4, "window_right": 30, "chunk": 22},
    "in a window": {"causal": "bottom_right", "window_left": 25, "chunk": 18, "seq_q": 50, "seq_k": 50},
    "padding": {"seqlens_q": True, "seqlens_k": True, "leftpad_q": True, "leftpad_k": True, "chunk": 7, "batch": 3},
    "everything": {
        "chunk": 12, "softcap": True, "alibi_slopes": True, "grad_slopes": True, "sinks": True, "mask": True,
        "bias": True, "grad_bias": True, "heads_q": 4, "grad_lse": True,
    },
    "dropout": {"chunk": 12, "dropout": True, "seq_q": 37, "seq_k": 18},
}  # fmt: skip


@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("case", CHUNKED)
def test_chunks_beside_other_features(device: Device, case: str, poison: str) -> None:
    for seed in range(3):
        call = random(device, seed, **({"causal": CAUSAL[seed]} | CHUNKED[case]), poison=poison)
        check(device, call, {"grid": "persistent"} if seed else None)


@pytest.mark.parametrize("poison", ["apart", "k", "v"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "lengths", [("seqlens_k",), ("seqlens_q", "seqlens_k"), ("leftpad_q", "leftpad_k"),
                ("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k")], ids="+".join,
)  # fmt: skip
def test_padding_holds_nan(device: Device, lengths: tuple[str, ...], seed: int, poison: str) -> None:
    fields = dict.fromkeys(lengths, True)
    causal = CAUSAL[seed % 3]
    check(device, random(device, seed, causal=causal, poison=poison, extremes=seed > 1, batch=3, **fields))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("poison", ["k", "v"])
@pytest.mark.parametrize("feature", ["mask", "bias"])
def test_what_a_mask_or_a_bias_hides_holds_nan(device: Device, feature: str, poison: str, seed: int) -> None:
    """A bias's gradient is summed up over what it was broadcast over: each seed has another shape."""
    grad = {"grad_bias": True} if feature == "bias" else {}
    check(device, random(device, seed, heads_q=4, causal=CAUSAL[seed % 3], poison=poison, **{feature: True}, **grad))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("feature", ["mask", "bias"])
def test_a_row_that_is_hidden_from_all_keys_holds_nan(device: Device, feature: str, sinks: bool) -> None:
    """With a sink its LSE is finite. Its query and the gradient of its result change no other gradient's bits."""
    call = random(device, heads_q=4, batch=1, seq_q=40, sinks=sinks, **{feature: True})
    given = getattr(call, feature).clone()
    given[:, :, 7::9] = False if feature == "mask" else float("-inf")
    setattr(call, feature, given)
    call.forward_out[:, :, 7::9] = 0.0
    hidden = torch.arange(call.q.shape[1])[None, :, None] * 0.1 if sinks else float("-inf")
    call.forward_lse[:, :, 7::9] = hidden
    found = []
    for value in (0.0, float("nan")):
        call.q[:, :, 7::9] = value
        if not sinks:  # with one, the result depends on its own gradient: that of the sink does
            call.grad_out[:, :, 7::9] = value
        run_core(device, call)
        assert (call.grad_q[:, :, 7::9] == 0).all()
        found.append([getattr(call, f"grad_{name}").clone() for name in "kv"])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("causal", CAUSAL)
def test_slopes(device: Device, base: dict, causal: str, seed: int) -> None:
    check(device, random(device, seed, base, causal=causal, alibi_slopes=True, grad_slopes=True, softcap=bool(seed)))


@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("fields", [{}, {"causal": "bottom_right", "heads_q": 4}, {"window_left": 9}], ids=str)
def test_dropout(device: Device, base: dict, fields: dict) -> None:
    check(device, random(device, base=base, dropout=True, **fields))


# Tiles of rows begin at the first row that sees a key: 19, 32, and what lengths on the device say.
@pytest.mark.parametrize(
    ("fields", "drops"),
    [
        ({"causal": "bottom_right", "seq_q": 37, "seq_k": 18}, ("tiles", "scores")),
        ({"causal": "bottom_right", "seq_q": 48, "seq_k": 16}, ("tiles", "tiles")),
        ({"causal": "bottom_right", "seqlens_q": True}, ("tiles", "scores")),
        ({"causal": "top_left", "seqlens_k": True}, ("tiles", "tiles")),
        ({"window_right": 3, "seq_q": 37, "seq_k": 18}, ("tiles", "tiles")), ({"leftpad_q": True}, ("tiles", "scores")),
        ({"leftpad_k": True}, ("scores", "scores")),
    ],
    ids=str,
)  # fmt: skip
def test_dropout_where_tiles_begin_anywhere(device: Device, fields: dict, drops: tuple[str, str]) -> None:
    call = random(device, dropout=True, heads_q=4, **fields)
    kernel = CORES["attention_backward"]
    assert isinstance(kernel, DenseBackward)
    found = kernel.constexprs(call.problem, Lowering(), Launch())["DROPS"]
    assert (found, kernel.drops_by_keys(call.problem, Lowering())) == drops
    check(device, call)


@pytest.mark.parametrize("drops", ["tiles", "scores", "halves"])
def test_the_gradient_of_a_bias_under_dropout(device: Device, drops: str) -> None:
    fields = {"dropout": True, "bias": True, "grad_bias": True, "mask": True, "alibi_slopes": True, "softcap": True}
    check(device, random(device, **fields), {"drops": drops, "grid": "persistent"})


LOWERINGS = [
    {name: value}
    for name in CORES["attention_backward"].choices
    for value in CHOICES[name]
    if value not in (getattr(Lowering(), name), "hf32")  # hf32 is Ascend's alone
]


@pytest.mark.parametrize("lowering", LOWERINGS, ids=str)
@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
def test_lowerings(device: Device, base: dict, lowering: dict[str, str]) -> None:
    fields = {"causal": "bottom_right", "window_left": 20, "heads_q": 4, "dropout": "drops" in lowering}
    check(device, random(device, base=base, **fields), lowering)


@pytest.mark.parametrize("tile", [(16, 32), (32, 16), (64, 64)], ids=str)
@pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
def test_tiles(device: Device, base: dict, tile: tuple[int, int]) -> None:
    check(device, random(device, base=base, causal="bottom_right"), block_m=tile[0], block_n=tile[1])


def test_a_sequence_gives_the_same_bits_in_any_batch(device: Device) -> None:
    whole = random(device, batch=3, causal="bottom_right", dtype="bf16")
    run_core(device, whole)
    alone = random(device, batch=3, causal="bottom_right", dtype="bf16")
    for name in ("q", "k", "v", "forward_out", "forward_lse", "grad_out", "grad_q", "grad_k", "grad_v"):
        setattr(alone, name, getattr(alone, name)[1:2].clone())
    alone.problem = msgspec.structs.replace(alone.problem, batch=1)
    run_core(device, alone)
    for name in ("grad_q", "grad_k", "grad_v"):
        assert torch.equal(getattr(whole, name)[1:2], getattr(alone, name)), name


def test_nothing_is_allocated_but_delta(device: Device) -> None:
    call = random(device, causal="bottom_right")
    launches, delta, lse = kernel_calls(core_plan(device, call.problem), call, 3)
    assert lse is None
    own = {id(getattr(call, name)) for name in ("q", "k", "v", "forward_out", "forward_lse", "grad_out", *GRADIENTS)}
    for one in launches:
        tensors = [value for value in one.arguments.values() if isinstance(value, torch.Tensor)]
        assert all(id(tensor) in own or tensor is delta for tensor in tensors), one.function
    assert [one.function for one in launches] == ["backward_delta", "backward_keys", "backward_rows"]
    assert launches[1].launch.block_m == TILE


def test_dropout_without_a_seed_is_an_error(device: Device) -> None:
    call = random(device, dropout=True)
    call.dropout_seed = None
    with pytest.raises(ValueError, match="dropout"):
        launch.run_core(core_plan(device, call.problem), call, 3)


# Keys' tile larger and smaller than that of rows, and only one of the rows' values given.
TILES: list[dict[str, int]] = [
    {"block_m": 32, "block_n": 16, "rows_m": 16, "rows_n": 32},
    {"block_m": 16, "block_n": 32, "rows_m": 64, "rows_n": 16, "rows_warps": 8, "rows_stages": 2}, {"rows_m": 32},
    {"rows_n": 64},
]  # fmt: skip
BOTH = pytest.mark.parametrize("base", [DENSE, PACKED], ids=["dense", "packed"])
EACH = pytest.mark.parametrize("tile", TILES, ids=str)


@BOTH
@EACH
@pytest.mark.parametrize("causal", CAUSAL)
def test_masks(device: Device, base: dict[str, Any], tile: dict[str, int], causal: str) -> None:
    check(device, random(device, base=base, causal=causal, heads_q=4), **tile)


@BOTH
@EACH
def test_windows_softcap_and_dropout(device: Device, base: dict[str, Any], tile: dict[str, int]) -> None:
    check(device, random(device, base=base, window_left=9, softcap=True, dropout=True, grad_lse=True), **tile)


@EACH
@pytest.mark.parametrize("rows", [(1, 40), (40, 1), (70, 33)], ids=str)
def test_short_rows_and_keys(device: Device, tile: dict[str, int], rows: tuple[int, int]) -> None:
    check(device, random(device, causal="bottom_right", seq_q=rows[0], seq_k=rows[1]), **tile)


@EACH
def test_padding_holds_nan_of_two_tiles(device: Device, tile: dict[str, int]) -> None:
    lengths = dict.fromkeys(("seqlens_q", "seqlens_k", "leftpad_q", "leftpad_k"), True)
    check(device, random(device, 1, batch=3, causal="bottom_right", poison="apart", **lengths), **tile)


@BOTH
@EACH
def test_the_gradient_of_slopes(device: Device, base: dict[str, Any], tile: dict[str, int]) -> None:
    check(device, random(device, base=base, causal="bottom_right", alibi_slopes=True, grad_slopes=True), **tile)


@EACH
@pytest.mark.parametrize("seed", range(2))
def test_the_gradient_of_a_bias(device: Device, tile: dict[str, int], seed: int) -> None:
    check(device, random(device, seed, causal="bottom_right", bias=True, grad_bias=True, mask=True), **tile)


@BOTH
@pytest.mark.parametrize("tile", [{}, *TILES[:2]], ids=str)
@pytest.mark.parametrize("cores", [1, 5, 1000])
def test_a_persistent_grid(device: Device, base: dict[str, Any], tile: dict[str, int], cores: int) -> None:
    """One program for all tiles, a number that divides nothing evenly, and more programs than tiles."""
    call = random(device, base=base, causal="bottom_right", heads_q=3, heads_k=3)
    check(device, call, {"grid": "persistent"}, cores, **tile)


@pytest.mark.parametrize("load", ["descriptor", "block_ptr"])
@BOTH
def test_loads_by_the_sizes_of_each_tile(device: Device, base: dict[str, Any], load: str) -> None:
    check(device, random(device, base=base, causal="bottom_right"), {"load": load}, **TILES[0])


def gradients(device: Device, call: Call, tile: dict[str, int]) -> dict[str, torch.Tensor]:
    names = ("grad_q", "grad_k", "grad_v", "grad_slopes", "grad_bias")
    for name in names:
        getattr(call, name).fill_(float("nan"))
    run_core(device, call, launch=tile)
    return {name: getattr(call, name).clone() for name in names}


@EACH
def test_each_kernel_computes_with_its_own_tile_bit_for_bit(device: Device, tile: dict[str, int]) -> None:
    """The bits of a sum follow from the tile: dK, dV and dBias are those of the keys' tile, the others of the rows'.
    Twice the same bits as well."""
    call = random(device, causal="bottom_right", bias=True, grad_bias=True, alibi_slopes=True,
                  grad_slopes=True, dtype="bf16")  # fmt: skip
    found, again = gradients(device, call, tile), gradients(device, call, tile)
    of_keys = {name: tile.get(name, TILE) for name in ("block_m", "block_n")}
    of_rows = of_keys | {name: tile[OF_ROWS[name]] for name in of_keys if OF_ROWS[name] in tile}
    keys_alone, rows_alone = gradients(device, call, of_keys), gradients(device, call, of_rows)
    for name in found:
        expected = rows_alone if name in ("grad_q", "grad_slopes") else keys_alone
        assert torch.equal(found[name], again[name]), name
        assert torch.equal(found[name], expected[name]), name


@BOTH
def test_launches_have_the_values_of_each_kernel(device: Device, base: dict[str, Any]) -> None:
    tile = {"block_m": 64, "block_n": 16, "num_warps": 4, "num_stages": 2} | {
        "rows_m": 16, "rows_n": 32, "rows_warps": 8, "rows_stages": 1, "maxnreg": 128,
    }  # fmt: skip
    call = random(device, base=base, bias=base is DENSE, grad_bias=base is DENSE)
    launches, _, _ = kernel_calls(core_plan(device, call.problem, launch=tile), call, 3)
    found = {one.function: one for one in launches}
    own = {"num_warps": 4, "num_stages": 2, "maxnreg": 128} | (FUSED if device.name == "cuda" else {})
    keys, rows = found["backward_keys"], found["backward_rows"]
    assert (keys.constexprs["BLOCK_M"], keys.constexprs["BLOCK_N"], keys.options()) == (64, 16, own)
    of_rows = own | {"num_warps": 8, "num_stages": 1}
    assert (rows.constexprs["BLOCK_M"], rows.constexprs["BLOCK_N"], rows.options()) == (16, 32, of_rows)
    p: Problem = call.problem
    sizes = (p.total_k, p.total_q) if p.packed else (p.seq_k, p.seq_q)
    per_head = [
        size // block + p.batch + 1 if p.packed else -(-size // block)
        for size, block in zip(sizes, (64, 16), strict=True)
    ]
    assert (keys.arguments["key_tiles"], rows.arguments["row_tiles"]) == tuple(per_head)
    slots = p.heads_q * (1 if p.packed else p.batch)
    assert (keys.grid, rows.grid) == ((per_head[0] * slots,), (per_head[1] * slots,))
    if "backward_bias" in found:
        bias = found["backward_bias"]
        assert (bias.constexprs["BLOCK_M"], bias.constexprs["BLOCK_N"], bias.options()) == (64, 16, own)
