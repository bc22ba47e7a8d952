"""The flash_attn-shaped modules have the names, argument orders and defaults of flash_attn 2.8 and FlashAttention-3,
and bert_padding does what its names say."""

import doctest
import importlib
import inspect
from typing import Any

import pytest
import torch

from portattn.integrations import flash_attn, flash_attn_interface
from portattn.integrations.flash_attn import bert_padding, hub

# Parameters as flash_attn's own sources have them: facts of Dao-AILab/flash-attention, flash_attn_interface.py of 2.8
# and hopper/flash_attn_interface.py. A name alone must be given.
TAIL = ("dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None "
    "deterministic=False return_attn_probs=False")  # fmt: skip
PACKED = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
TWO = {
    "flash_attn_func": f"q k v {TAIL}",
    "flash_attn_kvpacked_func": f"q kv {TAIL}",
    "flash_attn_qkvpacked_func": f"qkv {TAIL}",
    "flash_attn_varlen_func": f"q k v {PACKED} {TAIL} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {PACKED} {TAIL}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {TAIL}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None cache_batch_idx=None "
        "cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
        "rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False"
    ),
}
DESCALES = "q_descale=None k_descale=None v_descale=None"
LAST = "num_splits=1 pack_gqa=None deterministic=False sm_margin=0 return_attn_probs=False"
MIDDLE = f"softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 {LAST}"
THREE = {
    "flash_attn_qkvpacked_func": (
        f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1,-1) attention_chunk=0 softcap=0.0 "
        "deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_func": f"q k v {MIDDLE}",
    "flash_attn_varlen_func": f"q k v {PACKED} seqused_q=None seqused_k=None {MIDDLE}",
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None page_table=None cu_seqlens_q=None cu_seqlens_k_new=None "
        f"max_seqlen_q=None rotary_seqlens=None {DESCALES} softmax_scale=None causal=False window_size=(-1,-1) "
        "attention_chunk=0 softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
        "sm_margin=0 return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype=torch.bfloat16 "
        "headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None cache_leftpad=None page_size=None max_seqlen_k_new=0 "
        "causal=False window_size=(-1,-1) attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
}
PADDING = {
    "index_first_axis": "input indices", "index_put_first_axis": "values indices first_axis_dim",
    "index_first_axis_residual": "input indices", "unpad_input": "hidden_states attention_mask unused_mask=None",
    "unpad_input_for_concatenated_sequences": "hidden_states attention_mask_in_length",
    "pad_input": "hidden_states indices batch seqlen",
}  # fmt: skip
HUB = {name: f"{TWO[name]} s_aux=None" for name in hub.__all__}
ALL = [(module, name, parameters) for module, functions in ((flash_attn, TWO), (flash_attn_interface, THREE),
    (bert_padding, PADDING), (hub, HUB)) for name, parameters in functions.items()]  # fmt: skip


@pytest.mark.parametrize(("module", "name", "parameters"), ALL, ids=[f"{m.__name__}.{n}" for m, n, _ in ALL])
def test_parameters(module: Any, name: str, parameters: str) -> None:
    found = inspect.signature(getattr(module, name)).parameters.values()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found)
    told = [p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "") for p in found]
    assert told == parameters.split()
    assert inspect.getfullargspec(getattr(module, name)).args == [p.name for p in found]  # ring attention reads it


@pytest.mark.parametrize(("module", "name", "parameters"), ALL, ids=[f"{m.__name__}.{n}" for m, n, _ in ALL])
def test_docstrings_say_what_is_returned_and_their_examples_are_right(module: Any, name: str, parameters: str) -> None:
    text = inspect.getdoc(getattr(module, name)) or ""
    assert "\n\nReturns:\n" in text
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert test.examples or module is hub or name == "get_scheduler_metadata"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert said == [], "".join(said)


def test_the_functions_are_where_flash_attn_has_them_too() -> None:
    inner = importlib.import_module("portattn.integrations.flash_attn.flash_attn_interface")
    assert sorted(flash_attn.__all__) == sorted(TWO)
    for name in TWO:
        assert getattr(inner, name) is getattr(flash_attn, name)
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        assert getattr(inner, f"_wrapped_flash_attn_{name}") is getattr(inner, f"_flash_attn_{name}")
    rows = torch.arange(6.0).view(2, 3)
    assert inner.maybe_contiguous(None) is None
    assert inner.maybe_contiguous(rows) is rows
    assert inner.maybe_contiguous(rows.t()).is_contiguous()


def test_the_version_is_that_of_the_functions() -> None:
    """For code that asks for a minimum of flash_attn. FlashAttention-3's module has none."""
    assert flash_attn.__version__ == "2.8.3"
    assert not hasattr(flash_attn_interface, "__version__")


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_unpad_and_pad(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mask = torch.tensor([[0, 1, 1, 1], [1, 0, 0, 1], [0, 0, 0, 0]]).to(dtype)
    hidden = torch.randn(3, 4, 2, 5, requires_grad=True)
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask)
    assert torch.equal(packed, hidden[mask.bool()])
    assert (indices.tolist(), cu_seqlens.tolist()) == ([1, 2, 3, 4, 7], [0, 3, 5, 5])
    assert (longest, used.tolist()) == (3, [3, 2, 0])
    assert cu_seqlens.dtype is used.dtype is torch.int32
    back = bert_padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(back, hidden * mask[..., None, None])
    back.sum().backward()
    assert torch.equal(hidden.grad, mask[..., None, None].expand_as(hidden).float())


def test_places_that_are_allocated_and_unused() -> None:
    hidden, mask = torch.arange(8.0).view(2, 4, 1), torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = bert_padding.unpad_input(hidden, mask, unused)
    assert packed.flatten().tolist() == [0.0, 1.0, 2.0, 4.0]
    assert (cu_seqlens.tolist(), longest, used.tolist(), indices.tolist()) == ([0, 3, 4], 3, [2, 1], [0, 1, 2, 4])


def test_residual_gradients_add_up() -> None:
    rows = torch.randn(4, 3, requires_grad=True)
    some, whole = bert_padding.index_first_axis_residual(rows, torch.tensor([2, 0]))
    assert torch.equal(some, rows[[2, 0]])
    assert torch.equal(whole, rows)
    (some.sum() + 2 * whole.sum()).backward()
    assert rows.grad[:, 0].tolist() == [3.0, 2.0, 3.0, 2.0]


def test_an_empty_batch() -> None:
    packed, _, cu_seqlens, longest, _ = bert_padding.unpad_input(torch.zeros(0, 4, 2), torch.zeros(0, 4))
    assert (tuple(packed.shape), cu_seqlens.tolist(), longest) == ((0, 2), [0], 0)
