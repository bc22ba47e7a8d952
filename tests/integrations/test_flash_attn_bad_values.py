"""Values that flash_attn's functions must refuse by name, with nothing written: found by trying every argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flash_attn_oracle import ints

from portattn.errors import ArgumentError
from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import hub

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 2, 16)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.int32, torch.float8_e4m3fn, torch.complex64], ids=lambda dtype: str(dtype)
)
def test_sinks_that_are_no_numbers_of_a_model(dtype: torch.dtype) -> None:
    sinks = torch.tensor([1.0, 0.0, 2.0, 3.0]).to(dtype)
    with pytest.raises(ArgumentError, match=r"^flash_attn_func: s_aux.dtype is torch\."):
        hub.flash_attn_func(Q, K, K, s_aux=sinks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sinks_in_a_model_s_own_dtype(dtype: torch.dtype) -> None:
    sinks = torch.tensor([1.0, 0.0, 2.0, 3.0])
    found = hub.flash_attn_func(Q, K, K, s_aux=sinks.to(dtype))
    assert torch.equal(found, hub.flash_attn_func(Q, K, K, s_aux=sinks))


@pytest.mark.parametrize("function", [hub.flash_attn_func, hub.flash_attn_with_kvcache])
def test_queries_that_are_none_beside_sinks(function: Any) -> None:
    with pytest.raises(ArgumentError, match=r": q is "):
        function(None, K, K, s_aux=torch.zeros(4))


@pytest.mark.parametrize(
    ("index", "rows", "text"),
    [
        (3, 2, r"cache_batch_idx is 'int', but must be an int32 torch\.Tensor \(2,\)"),
        (ints(0, 2), 2, r"cache_batch_idx\[1\] is 2, but must be in 0\.\.1, the rows of block_table$"),
        (ints(0, 1), 0, r"block_table\.shape is \(0, 2\), but must have a row for each sequence"),
    ],
)
def test_indices_beside_a_table(index: Any, rows: int, text: str) -> None:
    table = torch.arange(4, dtype=torch.int32).view(2, 2)[:rows]
    pages = torch.zeros(4, 4, 2, 16)
    with pytest.raises(ArgumentError, match=f"^flash_attn_with_kvcache: {text}"):
        flash_attn.flash_attn_with_kvcache(Q, pages, pages, cache_batch_idx=index, block_table=table)


@pytest.mark.parametrize("name", ["k", "v", "qv"])
def test_one_dtype_beside_qv(name: str) -> None:
    """Queries and keys go beside qv and values, where another dtype would be promoted without a word."""
    given = {"q": Q, "k": K, "v": K, "qv": Q}
    for wrong in (given[name].half(), given[name].to("meta")):
        with pytest.raises(ArgumentError, match=rf"^flash_attn_func: {name}\.(dtype|device) is .*but must be q's"):
            flash_attn_interface.flash_attn_func(**given | {name: wrong})


@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("wrong", [(4, 6, 9), (0, 7, 5), (0, 2, 90)])
def test_beginnings_beside_used_rows(side: str, wrong: tuple[int, ...]) -> None:
    """The operation sees the rows that count alone: what begins elsewhere would be other rows' attention."""
    given: dict[str, Any] = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 2, 5)}
    given |= {f"cu_seqlens_{side}": ints(*wrong), f"seqused_{side}": ints(1, 2 if wrong[2] > wrong[1] else -2)}
    q, k = torch.randn(5, 4, 16), torch.randn(5, 2, 16)
    with pytest.raises(ArgumentError, match=rf"^flash_attn_varlen_func: cu_seqlens_{side}\["):
        flash_attn_interface.flash_attn_varlen_func(q, k, k, max_seqlen_q=9, max_seqlen_k=9, **given)


F8 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["q_descale", "k_descale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int32, F8])
def test_scales_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    scale = torch.ones(2, 2)
    given = {"q_descale": scale, "k_descale": scale, "v_descale": scale} | {name: scale.to(dtype)}
    cache = torch.zeros(2, 9, 2, 16).to(F8)
    with pytest.raises(ArgumentError, match=rf": {name}\.dtype is {dtype}, but must be torch\.float32"):
        flash_attn_interface.flash_attn_with_kvcache(Q.to(F8), cache, cache, cache_seqlens=3, **given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, F8])
def test_dtypes_are_those_of_the_function(name: str, dtype: torch.dtype) -> None:
    given = {"q": Q, "k": K, "v": K} | {name: {"q": Q, "k": K, "v": K}[name].to(dtype)}
    floats, more = (
        "torch.float16, torch.bfloat16, torch.float32",
        "torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz",
    )
    for module, taken in ((flash_attn, floats), (flash_attn_interface, f"{floats}, {more}")):
        if dtype is not F8 or module is flash_attn:
            hint = r" \(hint: float\(\)\)" if dtype is torch.float64 else ".*"
            with pytest.raises(
                ArgumentError, match=rf"^flash_attn_func: {name}\.dtype is {dtype}, .* one of {taken}{hint}$"
            ):
                module.flash_attn_func(**given)


def test_whole_numbers_are_no_float8_queries() -> None:
    cache = torch.zeros(2, 9, 2, 16).to(F8)
    with pytest.raises(ArgumentError, match=r": q\.dtype is torch\.int8"):
        flash_attn_interface.flash_attn_with_kvcache(Q.to(torch.int8), cache, cache, cache_seqlens=3)


def test_a_result_that_cannot_be_written_to() -> None:
    parts = torch.randn(3, 1, 2, 4, 16), torch.randn(3, 1, 2, 4)
    for out in (torch.zeros(1, 2, 4, 16, device="meta"), torch.zeros(1, 2, 4, 16, requires_grad=True)):
        with pytest.raises(ArgumentError, match=r"^flash_attn_combine: out's \(device, requires_grad\) is "):
            flash_attn_interface.flash_attn_combine(*parts, out=out)
