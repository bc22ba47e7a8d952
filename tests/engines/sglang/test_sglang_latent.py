"""Multi-head latent attention over SGLang's MLATokenToKVPool, against float64."""

import pytest
import torch
from served import RANK, ROPE, Served, forward, random_tree
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

EXTEND, DECODE, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY


@pytest.mark.engine_feature("latent attention (MLA), absorbed: extend, decode, mixed")
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent(page: int, dtype: torch.dtype) -> None:
    served = Served([37, 65, 20], page=page, dtype=dtype, latent=True)
    served.run(EXTEND, [17, 64, 0], [20, 1, 20])
    served.run(DECODE, [36, 64, 19], [1, 1, 1])
    served.run(ForwardMode.MIXED, [17, 64, 0], [20, 1, 20])


@pytest.mark.engine_feature("latent attention (MLA), absorbed: extend, decode, mixed")
def test_rotary_parts_apart() -> None:
    """Some of SGLang's models hand over the rotary columns of queries and rows by themselves."""
    served = Served([37, 20], page=16, latent=True)
    out, batch, (q, k, _), layer = served.run(DECODE, [36, 19], [1, 1])
    served._poison("kv")
    for row, length in ((1, 36), (2, 19)):
        served.store(layer, row, 0, length)
    q, k = q.view(2, served.heads, -1), k.view(2, 1, -1)
    parts = (q[..., :RANK].flatten(1), k[..., :RANK], k[..., :RANK])
    backend = served.backend
    backend.init_forward_metadata(batch)
    again = forward(backend, layer, parts, batch, q_rope=q[..., RANK:], k_rope=k[..., RANK:])
    assert torch.equal(out, again)


@pytest.mark.engine_feature("latent attention (MLA), absorbed: extend, decode, mixed")
def test_rows_without_rotary_columns() -> None:
    served = Served([37, 65, 20], page=16, latent=True, rope=0)
    served.run(EXTEND, [17, 64, 0], [20, 1, 20])
    made = [random_tree(6, torch.Generator().manual_seed(1)) for _ in range(3)]
    served.run(VERIFY, [31, 59, 14], [6, 6, 6], tree=made)
    out, batch, (q, k, v), layer = served.run(DECODE, [36, 64, 19], [1, 1, 1])
    served._poison("kv")
    for row, length in ((1, 36), (2, 64), (3, 19)):
        served.store(layer, row, 0, length)
    backend, none = served.backend, {"q_rope": q.new_empty(3, 0), "k_rope": k.new_empty(3, 1, 0)}
    backend.init_forward_metadata(batch)
    assert torch.equal(out, forward(backend, layer, (q, k, v), batch, **none))


@pytest.mark.engine_feature("latent attention (MLA): verification of drafted trees")
@pytest.mark.parametrize("page", [1, 16])
def test_trees(page: int) -> None:
    generator = torch.Generator().manual_seed(1)
    made = [random_tree(6, generator) for _ in range(3)]
    served = Served([23, 70, 7], page=page, latent=True)
    served.run(VERIFY, [17, 64, 1], [6, 6, 6], tree=made)


@pytest.mark.engine_feature("latent attention (MLA): float8 pools")
@pytest.mark.parametrize(("scale", "rope"), [(None, ROPE), (0.5, ROPE), (0.5, 0)])
def test_float8(scale: float | None, rope: int) -> None:
    served = Served([37, 20], page=16, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, latent=True, rope=rope)
    layer = served.layer()
    if scale is not None:
        layer.k_scale = torch.tensor(scale)
    _, _, (_, k, _), _ = served.run(EXTEND, [0, 0], [37, 20], layer=layer)
    assert torch.equal(k, torch.cat([served.keys[0], served.keys[1]]).flatten(1))


@pytest.mark.engine_feature("latent attention (MLA): prompts with keys of each head")
def test_expanded_keys_of_a_prompt() -> None:
    """SGLang expands keys and values of a prompt without a prefix, and stores the latent rows itself."""
    served = Served([37, 20], latent=True)
    plain = Served([37, 20], heads=4, heads_k=4, dim=RANK + ROPE, dim_v=24)
    layer = RadixAttention(4, RANK + ROPE, 0.2, 4, 0, v_head_dim=24)
    batch = served.batch(EXTEND, [1, 2], [0, 0], [37, 20])
    qkv = plain.new_tokens(batch, [0, 0], [37, 20])
    backend = served.backend
    backend.init_forward_metadata(batch)
    out = forward(backend, layer, qkv, batch, save_kv_cache=False)
    plain.check(out, qkv[0], batch, [0, 0], [37, 20], layer)
    assert torch.isnan(served.pool.get_key_buffer(0)).all()


@pytest.mark.engine_feature("latent attention (MLA): a prefix with keys of each head", refused=True)
def test_expanded_keys_of_a_prefix_are_refused(refusal) -> None:  # type: ignore[no-untyped-def]
    served = Served([37], latent=True)
    layer = RadixAttention(4, RANK + ROPE, 0.2, 4, 0, v_head_dim=24)
    batch = served.batch(EXTEND, [1], [0], [37])
    batch.attn_attend_prefix_cache = True
    backend = served.backend
    backend.init_forward_metadata(batch)
    numbers = served.numbers(37, 4 * (RANK + ROPE))
    with refusal(ValueError, match="prefix"):
        forward(backend, layer, (numbers, numbers, served.numbers(37, 96)), batch, save_kv_cache=False)
