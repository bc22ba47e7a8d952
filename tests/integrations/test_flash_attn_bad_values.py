"""Values that flash_attn's functions must refuse by name, with nothing written: found by trying every argument."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from flash_attn_oracle import check_one, ints

from portattn.errors import ArgumentError
from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import hub

F8 = torch.float8_e4m3fn
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)
CACHE, PAGES = torch.zeros(2, 9, 2, 16), torch.zeros(4, 4, 2, 16)
TABLE = ints(0, 1, 2, 3).view(2, 2)
SCALES = dict.fromkeys(("q_descale", "k_descale", "v_descale"), torch.ones(2, 2))
QV = {"q": Q, "k": K, "v": K, "qv": Q}
PARTS = torch.randn(3, 1, 2, 4, 16), torch.randn(3, 1, 2, 4)
fa3 = flash_attn_interface
attend_cache = partial(flash_attn.flash_attn_with_kvcache, Q, PAGES, PAGES)
attend_f8_cache = partial(fa3.flash_attn_with_kvcache, k_cache=CACHE.to(F8), v_cache=CACHE.to(F8), cache_seqlens=3)
attend_pages = partial(flash_attn.flash_attn_varlen_func, torch.ones(5, 4, 16), PAGES + 1, PAGES + 1,
    cu_seqlens_q=ints(0, 2, 5), max_seqlen_q=3, block_table=TABLE)  # fmt: skip
LENGTHS = {"cu_seqlens_k": ints(0, 3, 9), "max_seqlen_k": 6}
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    *((partial(hub.flash_attn_func, Q, K, K), {"s_aux": SINKS.to(dtype)}, r"flash_attn_func: s_aux.dtype is torch\.")
      for dtype in (torch.bool, torch.int8, torch.int32, F8, torch.complex64)),
    (partial(hub.flash_attn_func, Q, K, K), {"s_aux": SINKS[:3]}, r"flash_attn_func: s_aux\.shape is \(3,\)"),
    (partial(hub.flash_attn_with_kvcache, Q, CACHE, CACHE, K[:, :1], K[:, :1], cache_seqlens=0), {"s_aux": SINKS[:3]},
     r"flash_attn_with_kvcache: s_aux\.shape is \(3,\)"),
    (partial(hub.flash_attn_func, None, K, K), {"s_aux": SINKS}, "flash_attn_func: q is "),
    (partial(hub.flash_attn_with_kvcache, None, K, K), {"s_aux": SINKS}, "flash_attn_with_kvcache: q is "),
    (attend_cache, {"cache_batch_idx": 3, "block_table": TABLE},
     r"flash_attn_with_kvcache: cache_batch_idx is 'int', but must be an int32 torch\.Tensor \(2,\)"),
    (attend_cache, {"cache_batch_idx": ints(0, 2), "block_table": TABLE},
     r"flash_attn_with_kvcache: cache_batch_idx\[1\] is 2, but must be in 0\.\.1, the rows of block_table$"),
    (attend_cache, {"cache_batch_idx": ints(0, 1), "block_table": TABLE[:0]},
     r"flash_attn_with_kvcache: block_table\.shape is \(0, 2\), but must have a row for each sequence"),
    # Queries and keys go beside qv and values, where another dtype would be promoted without a word.
    *((fa3.flash_attn_func, QV | {name: wrong}, rf"flash_attn_func: {name}\.(dtype|device) is .*but must be q's")
      for name in ("k", "v", "qv") for wrong in (QV[name].half(), QV[name].to("meta"))),
    *((attend_f8_cache, SCALES | {"q": Q.to(F8), name: torch.ones(2, 2).to(dtype)},
       rf"flash_attn_with_kvcache: {name}\.dtype is {dtype}, but must be torch\.float32")
      for name in ("q_descale", "k_descale") for dtype in (torch.bfloat16, torch.float64, torch.int32, F8)),
    (attend_f8_cache, {"q": Q.to(torch.int8)}, r"flash_attn_with_kvcache: q\.dtype is torch\.int8"),
    *((partial(fa3.flash_attn_combine, *PARTS), {"out": out}, r"flash_attn_combine: out's \(device, requires_grad\)")
      for out in (torch.zeros(1, 2, 4, 16, device="meta"), torch.zeros(1, 2, 4, 16, requires_grad=True))),
    *((attend_pages, LENGTHS | {"max_seqlen_k": size},
       "flash_attn_varlen_func: max_seqlen_k is .*, but must be an int") for size in ("6", -3, None, 2.5, 2**40)),
    (attend_pages, LENGTHS | {"cu_seqlens_k": ints(2, 5, 9)},
     r"flash_attn_varlen_func: cu_seqlens_k\[0\] is 2, but must be 0"),
    (attend_pages, LENGTHS | {"cu_seqlens_k": ints(0, 5, 3)},
     r"flash_attn_varlen_func: cu_seqlens_k\[2\] is 3, but must be at least cu_seqlens_k\[1\], 5"),
    (attend_pages, LENGTHS | {"cu_seqlens_k": ints(0, 3, 9).long()},
     r"flash_attn_varlen_func: cu_seqlens_k is .*\(hint: cu_seqlens_k\.int\(\)\)"),
    (attend_pages, LENGTHS | {"max_seqlen_k": 5},
     r"flash_attn_varlen_func: cu_seqlens_k\[2\] - cu_seqlens_k\[1\] is 6, but must be at most max_seqlen_k, 5"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "given", "text"), REFUSED)
def test_bad_values_are_refused_by_name(call: Callable[..., Any], given: dict[str, Any], text: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{text}"):
        call(**given)
    assert not CACHE.any()


def test_a_longest_sequence_of_pages_may_be_a_tensor() -> None:
    assert attend_pages(**LENGTHS | {"max_seqlen_k": torch.tensor(6)}).shape == (5, 4, 16)


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("wrong", [(4, 6, 9), (0, 7, 5), (0, 2, 90)])
def test_beginnings_beside_used_rows(side: str, wrong: tuple[int, ...]) -> None:
    """The operation sees the rows that count alone: what begins elsewhere would be other rows' attention."""
    given: dict[str, Any] = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 2, 5)}
    given |= {f"cu_seqlens_{side}": ints(*wrong), f"seqused_{side}": ints(1, 2 if wrong[2] > wrong[1] else -2)}
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    with pytest.raises(ArgumentError, match=rf"^flash_attn_varlen_func: cu_seqlens_{side}\["):
        flash_attn_interface.flash_attn_varlen_func(q, k, k, max_seqlen_q=9, max_seqlen_k=9, **given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, F8])
def test_dtypes_are_those_of_the_function(name: str, dtype: torch.dtype) -> None:
    given = {"q": Q, "k": K, "v": K} | {name: {"q": Q, "k": K, "v": K}[name].to(dtype)}
    floats, more = (
        "torch.float16, torch.bfloat16, torch.float32", "torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz",
    )  # fmt: skip
    for module, taken in ((flash_attn, floats), (flash_attn_interface, f"{floats}, {more}")):
        if dtype is not F8 or module is flash_attn:
            hint = r" \(hint: float\(\)\)" if dtype is torch.float64 else ".*"
            with pytest.raises(ArgumentError,
                    match=rf"^flash_attn_func: {name}\.dtype is {dtype}, .* one of {taken}{hint}$"):  # fmt: skip
                module.flash_attn_func(**given)


# What errors advise must be an argument of the function that was called; and sizes that nobody else looked at.
Q_ADVICE, K_ADVICE = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)  # as (batch, heads, seq, head_dim)
MODULES = pytest.mark.parametrize("module", [flash_attn, flash_attn_interface], ids=["2", "3"])


@MODULES
def test_tensors_in_the_other_order(module: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: heads_q is 6") as raised:
        module.flash_attn_func(Q_ADVICE, K_ADVICE, K_ADVICE)
    assert str(raised.value).endswith("the shapes agree: give q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)")
    module.flash_attn_func(Q_ADVICE.transpose(1, 2), K_ADVICE.transpose(1, 2), K_ADVICE.transpose(1, 2))


def test_packed_keys_in_the_other_order() -> None:
    packed = torch.stack([K_ADVICE, K_ADVICE], 2)
    with pytest.raises(ArgumentError, match=r"give q\.transpose\(1, 2\), kv\.transpose\(1, 3\)$"):
        flash_attn.flash_attn_kvpacked_func(Q_ADVICE, packed)
    with pytest.raises(ArgumentError, match=r"give kv\.transpose\(1, 3\)$"):
        flash_attn.flash_attn_kvpacked_func(Q_ADVICE.transpose(1, 2), packed)
    flash_attn.flash_attn_kvpacked_func(Q_ADVICE.transpose(1, 2), packed.transpose(1, 3))


@pytest.mark.parametrize(("given", "same"), [
    ({"window_size": (2**70, -1)}, {}), ({"window_size": (-1, 2**70)}, {}),
    ({"softmax_scale": 2**70}, {"softmax_scale": 2.0**70}),
])  # fmt: skip
def test_probabilities_of_numbers_past_every_integer(given: dict[str, Any], same: dict[str, Any]) -> None:
    """Such windows hide nothing, with S_dmask as without."""
    x, found = torch.randn(1, 5, 4, 16), []
    for more in (given, same):
        torch.manual_seed(0)
        found.append(flash_attn.flash_attn_func(x, x, x, 0.5, return_attn_probs=True, **more))
    torch.testing.assert_close(*found, rtol=0, atol=0)


CU = ints(0, 5, 12)


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])  # a model's own
def test_sinks(tensors: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    q, k, v = tensors
    sinks = SINKS.to(dtype)
    dense, lse, _ = hub.flash_attn_func(q[None], k[None], v[None], causal=True, return_attn_probs=True, s_aux=sinks)
    check_one(dense[0], lse[0], q, k, v, math.inf, causal=True, sinks=sinks)
    packed = hub.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7, causal=True, s_aux=sinks)
    for rows in (slice(0, 5), slice(5, 12)):
        check_one(packed[rows], None, q[rows], k[rows], v[rows], math.inf, causal=True, sinks=sinks)
    k_cache, v_cache = torch.zeros(1, 16, 2, 16), torch.zeros(1, 16, 2, 16)
    cached = hub.flash_attn_with_kvcache(
        q[None], k_cache, v_cache, k[None], v[None], cache_seqlens=0, causal=True, s_aux=sinks
    )
    check_one(cached[0], None, q, k, v, math.inf, causal=True, sinks=sinks)
    assert torch.equal(k_cache[0, :12], k)


def test_without_sinks_they_are_flash_attn_s(tensors: tuple[torch.Tensor, ...]) -> None:
    q, k, v = tensors
    given = (q[None], k[None], v[None])
    assert torch.equal(hub.flash_attn_func(*given), flash_attn.flash_attn_func(*given))
    assert torch.equal(hub.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7),
        flash_attn.flash_attn_varlen_func(q, k, v, CU, CU, 7, 7))  # fmt: skip
