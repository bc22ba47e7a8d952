"""A stand-in for torch_npu: the published signatures, every argument checked, the true answer in float64. Signatures:
Ascend/op-plugin, op_plugin/config/op_plugin_functions.yaml. Constraints: the documents that backends/ascend/__init__.py
names. What is documented as undefined comes back as NaN, so that nothing can lean on it."""

import math
import types
from typing import Any

import torch
from oracle64 import masked_attention, visible_keys

INT_MAX = 2147483647
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


class RecordedTorchNpu(types.ModuleType):
    """Install as sys.modules["torch_npu"]. `calls` holds (function, arguments) in order."""

    def __init__(self) -> None:
        super().__init__("torch_npu")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def npu_fusion_attention(
        self, query: Any, key: Any, value: Any, head_num: Any, input_layout: Any, pse: Any = None,
        padding_mask: Any = None, atten_mask: Any = None, scale: Any = 1.0, keep_prob: Any = 1.0,
        pre_tockens: Any = INT_MAX, next_tockens: Any = INT_MAX, inner_precise: Any = 0, prefix: Any = None,
        actual_seq_qlen: Any = None, actual_seq_kvlen: Any = None, sparse_mode: Any = 0, gen_mask_parallel: Any = True,
        sync: Any = False, softmax_layout: Any = "", sink: Any = None, dropout_mask: Any = None, seed: Any = 0,
        offset: Any = 0,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:  # fmt: skip
        self.calls.append(("npu_fusion_attention", {k: v for k, v in locals().items() if k != "self"}))
        _check_tensors(query, key, value, (*SIXTEEN_BIT, torch.float32), most_dim=768, sizes_up_to=1 << 20)
        _check_heads(query, key, head_num, key.shape[1])
        assert input_layout == "BNSD"
        assert type(scale) is float
        assert keep_prob == 1.0, "what it drops follows from no seed of portattn's"
        assert (pre_tockens, next_tockens) == (INT_MAX, INT_MAX)
        unused = (pse, padding_mask, prefix, actual_seq_qlen, actual_seq_kvlen, sink, dropout_mask)
        assert unused == (None,) * 7
        assert (inner_precise, gen_mask_parallel, sync, softmax_layout, seed, offset) == (0, True, False, "", 0, 0)
        seen = seen_keys(query, key, sparse_mode, atten_mask)
        out, softmax_max, softmax_sum = _Fusion.apply(query, key, value, scale, seen)
        return out, softmax_max, softmax_sum, torch.empty(0), 0, 0, 0

    def npu_fused_infer_attention_score(
        self, query: Any, key: Any, value: Any, *, pse_shift: Any = None, atten_mask: Any = None,
        actual_seq_lengths: Any = None, actual_seq_lengths_kv: Any = None, dequant_scale1: Any = None,
        quant_scale1: Any = None, dequant_scale2: Any = None, quant_scale2: Any = None, quant_offset2: Any = None,
        antiquant_scale: Any = None, antiquant_offset: Any = None, key_antiquant_scale: Any = None,
        key_antiquant_offset: Any = None, value_antiquant_scale: Any = None, value_antiquant_offset: Any = None,
        block_table: Any = None, query_padding_size: Any = None, kv_padding_size: Any = None,
        key_shared_prefix: Any = None, value_shared_prefix: Any = None, actual_shared_prefix_len: Any = None,
        query_rope: Any = None, key_rope: Any = None, key_rope_antiquant_scale: Any = None, num_heads: Any = 1,
        scale: Any = 1.0, pre_tokens: Any = INT_MAX, next_tokens: Any = INT_MAX, input_layout: Any = "BSH",
        num_key_value_heads: Any = 0, sparse_mode: Any = 0, inner_precise: Any = 0, block_size: Any = 0,
        antiquant_mode: Any = 0, key_antiquant_mode: Any = 0, value_antiquant_mode: Any = 0,
        softmax_lse_flag: Any = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        arguments = {k: v for k, v in locals().items() if k != "self"}
        self.calls.append(("npu_fused_infer_attention_score", arguments))
        _check_tensors(query, key, value, SIXTEEN_BIT, most_dim=512, sizes_up_to=20971520)
        batch, heads, seq_q, head_dim = query.shape
        seq_k = key.shape[2]
        assert query.is_contiguous()
        assert key.is_contiguous()
        assert value.is_contiguous()
        assert not any(t.requires_grad for t in (query, key, value)), "documented for inference"
        assert head_dim % 16 == 0
        assert batch <= 65536
        assert seq_q > 1 or seq_k <= 262144
        _check_heads(query, key, num_heads, num_key_value_heads)
        assert num_heads <= 64 * num_key_value_heads
        assert input_layout == "BNSD"
        assert type(scale) is float
        assert type(softmax_lse_flag) is bool
        quantisation = [n for n in arguments if "quant" in n and "mode" not in n]
        other = ["pse_shift", "block_table", "query_padding_size", "kv_padding_size", "key_shared_prefix"]
        other += ["value_shared_prefix", "actual_shared_prefix_len", "query_rope", "key_rope"]
        assert [n for n in quantisation + other if arguments[n] is not None] == []
        assert (block_size, antiquant_mode, key_antiquant_mode, value_antiquant_mode) == (0, 0, 0, 0)
        assert (pre_tokens, next_tokens) == (INT_MAX, INT_MAX)
        causal = _check_mask(sparse_mode, atten_mask, query.device)
        if seq_q == 1:  # the incremental branch
            assert causal == "none", "sparse_mode does nothing for a single row"
            assert actual_seq_lengths is None, "does nothing for a single row"
            assert inner_precise in (0, 1)
        assert inner_precise in (0, 2)
        lengths_q = _check_lengths(actual_seq_lengths, batch, seq_q)
        lengths_k = _check_lengths(actual_seq_lengths_kv, batch, seq_k)
        seen = torch.stack([visible_keys(seq_q, seq_k, causal, lengths_q[b], lengths_k[b]) for b in range(batch)])
        # Not even NaN behind the lengths may be read.
        out, lse = masked_attention(query.double(), key.double(), value.double(), scale, seen)
        undefined = ~seen.any(-1)[:, None]  # (B, 1, Sq)
        out = out.masked_fill(undefined[..., None], math.nan)
        lse = lse.masked_fill(undefined, math.nan)[..., None].to(torch.float32)
        return out.to(query.dtype), lse if softmax_lse_flag else torch.zeros(1)


class _Fusion(torch.autograd.Function):
    """(query, key, value, scale, seen) -> (out, softmax_max, softmax_sum), differentiated as torch_npu does it. Its
    autograd formula passes the gradient of `out` on as `dy`, and ignores those of softmax_max and softmax_sum."""

    @staticmethod
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, seen: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, lse = masked_attention(query.double(), key.double(), value.double(), scale, seen)
        # Any split of the LSE into a maximum and a sum will do; in this one neither is trivial.
        highest = lse - math.log(3.0)
        return out.to(query.dtype), _eight_columns(highest), _eight_columns(torch.exp(lse - highest))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        query, key, value, ctx.scale, ctx.seen = inputs
        ctx.save_for_backward(query, key, value)
        ctx.set_materialize_grads(False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, *statistics: torch.Tensor | None) -> Any:
        if dy is None:
            raise RuntimeError("npu_fusion_attention_grad: dy is an undefined tensor")
        return *fusion_gradients(*ctx.saved_tensors, dy, ctx.scale, ctx.seen), None, None


def fusion_gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, scale: float, seen: torch.Tensor
) -> list[torch.Tensor]:
    """Return the gradients of query, key and value for the gradient `dy` of npu_fusion_attention's first output.
    Written out, with P = softmax(S): dV = Pᵀ dO, dS = P ∘ (dP - rowsum(dP ∘ P)), since operators beneath autograd
    record nothing to differentiate."""
    shared = (key.shape[0], key.shape[1], -1, *key.shape[2:])  # the query heads of a key head, added up
    q, dy = query.double(), dy.double()
    k, v = (tensor.double().repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    p = torch.softmax((q @ k.mT * scale).masked_fill(~seen[:, None], -math.inf), -1)
    dp = dy @ v.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale
    found = ds @ k, (ds.mT @ q).reshape(shared).sum(2), (p.mT @ dy).reshape(shared).sum(2)
    return [gradient.to(query.dtype) for gradient in found]


def seen_keys(query: torch.Tensor, key: torch.Tensor, sparse_mode: int, atten_mask: Any) -> torch.Tensor:
    """Keys that each row sees by the sparse mode of npu_fusion_attention, (B, Sq, Sk) bool."""
    causal = _check_mask(sparse_mode, atten_mask, query.device)
    seq_q, seq_k = query.shape[2], key.shape[2]
    assert causal != "bottom_right" or seq_q <= seq_k, "rows that see no key: their result is not documented"
    return visible_keys(seq_q, seq_k, causal).expand(query.shape[0], -1, -1)


def _eight_columns(rows: torch.Tensor) -> torch.Tensor:
    return rows[..., None].expand(*rows.shape, 8).to(torch.float32)


def _check_tensors(
    query: Any, key: Any, value: Any, dtypes: tuple[torch.dtype, ...], *, most_dim: int, sizes_up_to: int
) -> None:
    for tensor in (query, key, value):
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dim() == 4
        assert tensor.dtype in dtypes
        assert tensor.dtype == query.dtype
        assert tensor.device == query.device
        assert tensor.shape[0] == query.shape[0] >= 1
        assert tensor.shape[3] == query.shape[3] <= most_dim
        assert 1 <= tensor.shape[2] <= sizes_up_to
    assert key.shape == value.shape


def _check_heads(query: torch.Tensor, key: torch.Tensor, num_heads: Any, num_key_value_heads: Any) -> None:
    assert type(num_heads) is int
    assert type(num_key_value_heads) is int
    assert num_heads == query.shape[1] <= 256
    assert num_key_value_heads == key.shape[1]
    assert num_heads % num_key_value_heads == 0


def _check_mask(sparse_mode: Any, atten_mask: Any, device: torch.device) -> str:
    """The causal alignment that a sparse mode stands for; its mask must be the compressed one, True = masked."""
    assert type(sparse_mode) is int
    if sparse_mode == 0:
        assert atten_mask is None
        return "none"
    assert isinstance(atten_mask, torch.Tensor)
    assert atten_mask.dtype == torch.bool
    assert atten_mask.device == device
    assert atten_mask.shape == (2048, 2048)
    assert atten_mask.is_contiguous()
    assert not atten_mask.is_inference(), "could not be saved for a backward pass"
    assert torch.equal(atten_mask, torch.ones(2048, 2048, dtype=torch.bool).triu(1))
    return {2: "top_left", 3: "bottom_right"}[sparse_mode]


def _check_lengths(lengths: Any, batch: int, capacity: int) -> list[int]:
    if lengths is None:
        return [capacity] * batch
    assert type(lengths) is list
    assert len(lengths) == batch
    assert all(type(n) is int and 1 <= n <= capacity for n in lengths)
    return lengths
