"""portattn.quantize: its numbers and scales, by the formulas, and through the operations."""

from typing import Any

import pytest
import torch

import portattn
from portattn import ArgumentError
from portattn.schema.tensors import KV_DTYPE

FLOAT8 = ("e4m3", "e5m2", "e4m3fnuz")


def tensors(dtype=torch.bfloat16, layout="bhsd"):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 70, 32), (2, 2, 90, 32), (2, 2, 90, 24))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    made[1][1] += 3.0  # one sequence's keys have something in common
    return made if layout == "bhsd" else [t.transpose(1, 2).contiguous() for t in made]


def packed():
    """Sequences of 30, 0 and 40 queries over 50, 7 and 30 keys, and three rows of no sequence."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(rows, heads, 32, generator=generator).bfloat16() for rows, heads in ((73, 4), (90, 2), (90, 2))]
    made[1][50:] *= 5.0
    return made, torch.tensor([0, 30, 30, 70]).int(), torch.tensor([0, 50, 57, 87]).int()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("method", FLOAT8)
def test_float8_fills_the_formats_range_for_each_head(method, layout):
    given = tensors(torch.float32, layout)
    made = portattn.quantize(*given, method, layout=layout)
    largest = torch.finfo(KV_DTYPE[method]).max
    for tensor, numbers, scale in zip(
        given, (made.q, made.k, made.v), (made.q_scale, made.k_scale, made.v_scale), strict=True
    ):
        assert (numbers.dtype, numbers.shape, scale.shape) == (KV_DTYPE[method], tensor.shape, (2, 2))
        rows, stored = (t if layout == "bhsd" else t.transpose(1, 2) for t in (tensor, numbers.float()))
        torch.testing.assert_close(scale, rows.unflatten(1, (2, -1)).abs().amax((2, 3, 4)) / largest)
        assert stored.unflatten(1, (2, -1)).abs().amax((2, 3, 4)).eq(largest).all()
        each = scale.repeat_interleave(rows.shape[1] // 2, 1)[:, :, None, None]
        step = 2.0 ** -(2 if method == "e5m2" else 3)
        torch.testing.assert_close(stored * each, rows, rtol=step / 2, atol=float(scale.max()) * largest * 1e-4)


def test_one_scale_for_a_tensor():
    made = portattn.quantize(*tensors(), scales="tensor")
    assert made.q_scale.shape == made.k_scale.shape == ()
    assert made.k.float().abs().max() == 448.0


@pytest.mark.parametrize("block", [1, 64])
def test_sage_takes_the_mean_from_the_keys(block):
    q, k, v = tensors(torch.float16)
    made = portattn.quantize(q, k, v, "sage", block=block)
    assert made.v is v
    assert made.v_scale is None
    smooth = k.float() - k.float().mean(2, keepdim=True)
    blocks = torch.nn.functional.pad(smooth.abs().amax(3), (0, -90 % block)).unflatten(2, (-1, block)).amax(3)
    torch.testing.assert_close(made.k_scale, (blocks / 127.0).repeat_interleave(block, 2)[:, :, :90])
    assert made.k.abs().max() == 127
    assert ((made.k.float() * made.k_scale[..., None] - smooth).abs() <= made.k_scale[..., None] * 0.5001).all()
    mean = k.float().mean(2).repeat_interleave(2, 1)
    torch.testing.assert_close(made.lse_shift, torch.einsum("bhsd,bhd->bhs", q.float(), mean), rtol=1e-4, atol=1e-4)


def cosine(ours, exact):
    return float(torch.nn.functional.cosine_similarity(ours.double().flatten(), exact.double().flatten(), dim=0))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(("method", "least"), [("e4m3", 0.995), ("e5m2", 0.98), ("e4m3fnuz", 0.995), ("sage", 0.9995)])
def test_attention_of_it_is_near_the_original(method, least, layout):
    given = tensors(layout=layout)
    made = portattn.quantize(*given, method, layout=layout)
    out, lse = portattn.attention(**made.arguments(causal=True, return_lse=True))
    exact, exact_lse = portattn.attention(*(t.float() for t in given), causal=True, return_lse=True, layout=layout)
    assert cosine(out, exact) >= least
    torch.testing.assert_close(made.corrected(lse), exact_lse, rtol=0, atol={"e5m2": 1.0, "sage": 0.1}.get(method, 0.4))


@pytest.mark.parametrize(("method", "least"), [("e4m3", 0.995), ("sage", 0.9995)])
def test_packed_rows_are_quantised_by_sequence(method, least):
    (q, k, v), cu_q, cu_k = packed()
    made = portattn.quantize(q, k, v, method, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    rest: dict[str, Any] = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 40, "max_seqlen_k": 50}
    out, lse = portattn.varlen_attention(**made.arguments(), **rest, return_lse=True)
    exact, exact_lse = portattn.varlen_attention(q.float(), k.float(), v.float(), **rest, return_lse=True)
    assert cosine(out[:70], exact[:70]) >= least
    torch.testing.assert_close(
        made.corrected(lse)[:, :70], exact_lse[:, :70], rtol=0, atol=0.2 if method == "sage" else 0.8
    )
    if method == "e4m3":
        assert made.k_scale.shape == (3, 2)
        assert (made.k_scale[2] > 3 * made.k_scale[0]).all()
        alone = portattn.quantize(*(t[None, a:b] for t, (a, b) in zip((q, k, v), ((0, 30), (0, 50), (0, 50)),
                                                                        strict=True)), layout="bshd")  # fmt: skip
        torch.testing.assert_close(made.k[:50].float(), alone.k[0].float(), rtol=0, atol=0)
        torch.testing.assert_close(made.q_scale[:1], alone.q_scale, rtol=0, atol=0)


@pytest.mark.parametrize("scale", [0.02, 0.3])
def test_the_correction_has_the_scale_of_the_call(scale):
    given = tensors()
    made = portattn.quantize(*given, "sage")
    _, lse = portattn.attention(**made.arguments(scale=scale), return_lse=True)
    _, exact = portattn.attention(*(t.float() for t in given), scale=scale, return_lse=True)
    torch.testing.assert_close(made.corrected(lse, scale), exact, rtol=0, atol=scale)
    assert (made.corrected(lse) - exact).abs().max() > 2 * scale  # that of 1/√D, which is another one


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0, 5, 3], r"cu_seqlens_k\[2\] is 3, but must be at least cu_seqlens_k\[1\], 5"),
        ([1, 3], r"cu_seqlens_k\[0\] is 1, but must be 0"), ([0, 99], r"cu_seqlens_k\[1\] is 99, .*packed rows, 6"),
    ],
)  # fmt: skip
def test_beginnings_that_cannot_be_are_refused(ends, said):
    rows = torch.randn(6, 2, 16, dtype=torch.float16)
    whole = torch.tensor([0, *[6] * (len(ends) - 1)], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=said):
        portattn.quantize(
            rows, rows, rows, "sage", cu_seqlens_q=whole, cu_seqlens_k=torch.tensor(ends, dtype=torch.int32)
        )


def test_without_smoothing_nothing_is_to_be_corrected():
    given = tensors()
    made = portattn.quantize(*given, "sage", smooth_k=False)
    out, lse = portattn.attention(**made.arguments(), sinks=torch.zeros(4), softcap=20.0, return_lse=True)
    exact, exact_lse = portattn.attention(*given, sinks=torch.zeros(4), softcap=20.0, return_lse=True)
    assert made.corrected(lse) is lse
    assert cosine(out, exact) >= 0.999
    torch.testing.assert_close(lse, exact_lse, rtol=0, atol=0.1)


def test_zeros_and_nothing_have_scales_of_one():
    q, k, v = (torch.zeros(1, 2, rows, 16) for rows in (3, 0, 0))
    made = portattn.quantize(q, k, v)
    assert all((s == 1.0).all() for s in (made.q_scale, made.k_scale, made.v_scale))
    assert not portattn.attention(**made.arguments()).any()
    assert not portattn.attention(**portattn.quantize(q.half(), k.half(), v.half(), "sage").arguments()).any()
    tiny = torch.full((1, 2, 3, 16), 1e-44)
    assert (portattn.quantize(tiny, tiny, tiny).k_scale > 0).all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"method": "fp4"}, "method is 'fp4', but must be one of e4m3"),
    "scales": ({"scales": "row"}, "scales is 'row', but must be one of head, tensor"),
    "block": ({"block": 0}, "block is 0, but must be an integer ≥ 1"),
    "smooth_k": ({"smooth_k": 1}, "smooth_k is 1, but must be True or False"),
    "layout": ({"layout": "hbsd"}, "layout is 'hbsd'"),
    "float32": ({"method": "sage", "dtype": torch.float32}, "q.dtype is torch.float32"),
    "heads": ({"k": torch.ones(2, 3, 90, 32).bfloat16(), "v": torch.ones(2, 3, 90, 32).bfloat16()}, "q's heads is 4"),
    "batch": ({"q": torch.ones(3, 4, 70, 32).bfloat16()}, "k's batch is 2, but must be q's, 3"),
    "width": ({"q": torch.ones(2, 4, 70, 16).bfloat16()}, "k's head_dim is 32, but must be q's, 16"),
    "rank": ({"q": torch.ones(4, 70, 16)}, "q.ndim is 3"),
    "NaN": ({"v": torch.full((2, 2, 90, 24), float("nan")).bfloat16()}, "v is 'NaN or infinity'"),
    "cu alone": ({"cu_seqlens_q": torch.zeros(2).int()}, "q.ndim is 4"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_input_is_named(bad):
    changes, said = dict(bad[0]), bad[1]
    q, k, v = tensors(changes.pop("dtype", torch.bfloat16))
    with pytest.raises(ArgumentError) as raised:
        portattn.quantize(**{"q": q, "k": k, "v": v} | changes)
    assert said in str(raised.value)


@pytest.mark.parametrize("feature", [{"softcap": 5.0}, {"sinks": torch.zeros(2)}])
def test_what_sees_the_mean_of_keys_is_refused_with_smoothed_ones(feature):
    """A softcap's results are others then: the cosine to exact attention falls from 0.999 to 0.94."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 70, 32, dtype=torch.bfloat16).unbind()
    k = k + 4 * torch.randn(32, dtype=torch.bfloat16)
    (name,) = feature
    with pytest.raises(ArgumentError, match=rf"arguments: {name} is .*smooth_k=False"):
        portattn.quantize(q, k, v, "sage").arguments(**feature)
    exact = portattn.attention(q, k, v, **feature).double().flatten()
    made = portattn.quantize(q, k, v, "sage", smooth_k=False)
    out = portattn.attention(**made.arguments(causal=False, **feature)).double().flatten()
    assert torch.cosine_similarity(out, exact, 0) > 0.995
    assert made.arguments(softcap=None).keys() == made.arguments().keys() | {"softcap"}


def test_corrected_names_a_wrong_lse():
    made = portattn.quantize(*tensors(), "sage")
    with pytest.raises(ArgumentError, match=r"lse is \(2, 70\), but must be a tensor of shape \(2, 4, 70\)"):
        made.corrected(torch.zeros(2, 70))


@pytest.mark.parametrize("method", ["e4m3", "sage"])
def test_the_layout_is_an_argument(method):
    q, k, v = torch.randn(3, 2, 6, 6, 16, generator=torch.Generator().manual_seed(0)).half().unbind()
    made = portattn.quantize(q, k, v, method, layout="bshd")
    expected = portattn.attention(q, k, v, layout="bshd")
    assert (portattn.attention(**made.arguments()).to(expected.dtype) - expected).abs().max() < 0.2
    assert made.arguments(layout="bshd").keys() == made.arguments().keys()
    with pytest.raises(portattn.ArgumentError, match="layout is 'bhsd'"):
        made.arguments(layout="bhsd")
    assert "layout" not in portattn.quantize(q, k, v, method).arguments()


# NVFP4 caches through the public operations: vLLM's pages, graphs, vmap, writers, warming up, plans, bad input.
HEADS, WIDTH, PAGE, PAGES = 2, 32, 16, 6
E4M3 = torch.float8_e4m3fn
TABLE = torch.tensor([[4, 1], [5, 0]], dtype=torch.int32)
LENGTHS = torch.tensor([19, 30], dtype=torch.int32)


def vllm_pages():
    """Pages as vLLM 0.33 has them: [K | scales of K | V | scales of V] of a page, tokens before heads; all bytes 0."""
    side = PAGE * HEADS * (WIDTH // 2 + WIDTH // 16)
    memory = torch.zeros(PAGES, 2 * side, dtype=torch.uint8)
    found = {}
    for name, begin in (("k", 0), ("v", side)):
        data, scales = memory[:, begin : begin + side].split((PAGE * HEADS * WIDTH // 2, PAGE * HEADS * WIDTH // 16), 1)
        found[f"{name}_pages"] = data.unflatten(1, (PAGE, HEADS, WIDTH // 2))
        found[f"{name}_block_scale"] = scales.unflatten(1, (PAGE, HEADS, WIDTH // 16)).view(E4M3)
    return found


def tokens(seed, count=49):
    return torch.randn(count, HEADS, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def slots():
    rows = [TABLE[b, i // PAGE] * PAGE + i % PAGE for b, length in enumerate(LENGTHS.tolist()) for i in range(length)]
    return torch.stack(rows)


def filled(backend=None, scale=0.01):
    """Arguments of paged_attention over pages that write_pages has filled, and what was written, (B, Hk, S, D) each."""
    cache, keys, values = vllm_pages(), tokens(1), tokens(2)
    scales = {} if scale is None else {name: torch.tensor(scale) for name in ("k_scale", "v_scale")}
    portattn.write_pages(keys, values, slot_mapping=slots(), **cache, **scales, backend=backend)
    exact = [torch.stack([x[:19], x[19:38]]).transpose(1, 2).float() for x in (keys, values)]
    q = tokens(3, 2).repeat_interleave(2, dim=1)[:, :, None]
    return {"q": q, "page_table": TABLE, "seqlens_k": LENGTHS, **cache, **scales}, exact


@pytest.mark.parametrize("scale", [None, 0.01])
def test_attention_reads_what_was_written(device, scale):
    """Pages of vLLM's, written and read by each path; both paths write the same bytes."""
    found = []
    for backend in ("interpreter" if device.name == "cpu" else None, "reference"):
        given, (k, v) = filled(backend, scale)
        found.append([given[name].view(torch.uint8) for name in given if "pages" in name or "block" in name])
        given["seqlens_k"] = torch.tensor([19, 19], dtype=torch.int32)
        out = portattn.paged_attention(**given, backend=backend)
        exact = portattn.attention(given["q"].float(), k, v)
        assert float((out - exact).abs().max()) < 0.25
        assert float(exact.abs().max()) > 0.5
        assert torch.cosine_similarity(out.float().flatten(), exact.flatten(), 0) > 0.985
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(bool(one.any()) for one in found[0])


def contiguous():
    given: dict[str, Any] = {"seqlens_k": torch.tensor([0, 0], dtype=torch.int32)}
    for name in ("k", "v"):
        given[f"{name}_cache"] = torch.zeros(2, HEADS, 24, WIDTH // 2, dtype=torch.uint8)
        given[f"{name}_block_scale"] = torch.zeros(2, HEADS, 24, WIDTH // 16).to(E4M3)
    new = (tokens(seed, 40).view(2, 20, HEADS, WIDTH).transpose(1, 2) for seed in (1, 2))
    portattn.append_kv(*new, **given)
    q = tokens(3, 4).reshape(2, 4, 1, WIDTH)
    return given | {"q": q, "seqlens_k": torch.tensor([20, 20], dtype=torch.int32)}


def test_vmap_and_graphs_give_the_eager_result():
    given = contiguous()
    eager = portattn.decode_attention(**given)
    mapped = ("q", "k_cache", "k_block_scale")
    others = {name: value for name, value in given.items() if name not in mapped}

    def one(*tensors):
        return portattn.decode_attention(**others, **dict(zip(mapped, tensors, strict=True)))

    twice = torch.vmap(one)(*(torch.stack((given[name], given[name])) for name in mapped))
    torch.testing.assert_close(twice, torch.stack((eager, eager)), rtol=0, atol=0)
    graph = torch.export.export(Decoding(others), tuple(given[name] for name in mapped))
    torch.testing.assert_close(graph.module()(*(given[name] for name in mapped)), eager, rtol=0, atol=0)


class Decoding(torch.nn.Module):
    """decode_attention over what is not mapped."""

    def __init__(self, others):
        super().__init__()
        self.others = others

    def forward(self, q, k_cache, k_block_scale):
        return portattn.decode_attention(q=q, k_cache=k_cache, k_block_scale=k_block_scale, **self.others)


def test_the_writers_operator_says_what_it_writes():
    cache = vllm_pages()
    arguments = [tokens(1), tokens(2), cache["k_pages"], cache["v_pages"], slots()]
    schema = str(torch.ops.portattn.write_pages.default._schema)
    assert "!)? k_block_scale" in schema
    assert "!)? v_block_scale" in schema
    graph = torch.export.export(Writing(), (*arguments, cache["k_block_scale"], cache["v_block_scale"]))
    assert "portattn.write_pages" in graph.graph_module.code
    assert not bool(cache["k_pages"].any())


class Writing(torch.nn.Module):
    """write_pages alone."""

    def forward(self, k, v, k_pages, v_pages, slot_mapping, k_scale, v_scale):
        portattn.write_pages(k, v, k_pages, v_pages, slot_mapping, k_block_scale=k_scale, v_block_scale=v_scale)


def test_plans_handles_and_warming_up():
    given, _ = filled()
    text = portattn.explain("paged_attention", **given)
    assert "cache nvfp4 scales head" in text
    assert "not sdpa: it does not have kv_format" in text
    handle = portattn.prepare("paged_attention", **given)
    torch.testing.assert_close(handle.run(**given), portattn.paged_attention(**given), rtol=0, atol=0)
    portattn.warmup([{
        "op": "decode_attention", "q": "bf16[B,8,1,64]", "k_cache": "nvfp4[B,2,128,32]", "v_cache": "nvfp4[B,2,128,32]",
        "seqlens_k": None, "k_block_scale": "e4m3[B,2,128,4]", "v_block_scale": "e4m3[B,2,128,4]",
        "sizes": {"B": [1, 4]},
    }])  # fmt: skip


def spoilt(scale, at, value):
    """Scales with one that is wrong, in row `at` of the page 4: that of the first sequence's first 16 tokens."""
    found = scale.clone()
    found[4, at, 1, 1] = value
    return found


BAD_NVFP4: dict[str, tuple[dict[str, Any], str]] = {
    "one alone": ({"v_block_scale": None}, "v_block_scale is None, but must be a torch.float8_e4m3fn torch.Tensor"),
    "float32": ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 2)}, "k_block_scale.dtype is torch.float32"),
    "mx scales": ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 2, dtype=torch.uint8)},
        "k_block_scale.dtype is torch.uint8, but must be torch.float8_e4m3fn"),
    "a number": ({"k_block_scale": 1.0}, "k_block_scale is 'float'"),
    "of 32 numbers": ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 1).to(E4M3)},
        "k_block_scale.shape is (6, 16, 2, 1), but must be (6, 16, 2, 2): the cache's, with a scale for each 16"),
    "apart": ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 4).to(E4M3)[..., ::2]},
        "k_block_scale.stride() is (128, 8, 4, 2), but must be 1 in the last axis"),
    "elsewhere": ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 2, device="meta", dtype=E4M3)},
        "k_block_scale.device is 'meta'"),
    "a head of 24": ({"q": tokens(3, 2).repeat_interleave(2, dim=1)[:, :, None, :24]},
        "q's head_dim is 24, but must be a multiple of 16 with nvfp4"),
    "values of 24": ({"v_pages": torch.zeros(PAGES, PAGE, HEADS, 12, dtype=torch.uint8)},
        "head_dim_v is 24, but must be a multiple of 16 with nvfp4"),
    "mixed": ({"v_pages": torch.zeros(PAGES, PAGE, HEADS, WIDTH).to(E4M3)}, "v_pages.dtype is torch.float8_e4m3fn"),
    "a scale for each token": ({"k_scale": torch.ones(PAGES, PAGE, HEADS)},
        "k_scale.shape is (6, 16, 2), but must be (), (1,), (heads_k,) or (batch, heads_k) with nvfp4"),
    "another format": ({name: torch.zeros(PAGES, PAGE, HEADS, WIDTH).to(E4M3) for name in ("k_pages", "v_pages")},
        "k_block_scale is (6, 16, 2, 2), but goes with a cache of torch.uint8"),
    "negative": ({"k_block_scale": spoilt(torch.ones(PAGES, PAGE, HEADS, 2).to(E4M3), 3, -1.0)},
        "k_block_scale of sequence 0, head 1, token 3 is -1.0, but must be finite and not negative"),
    "NaN": ({"k_block_scale": spoilt(torch.ones(PAGES, PAGE, HEADS, 2).to(E4M3), 0, float("nan"))},
        "k_block_scale of sequence 0, head 1, token 0 is nan, but must be finite and not negative"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_NVFP4)
def test_bad_input_is_named_nvfp4(case):
    changes, text = BAD_NVFP4[case]
    given, _ = filled()
    with pytest.raises(portattn.ArgumentError) as found:
        portattn.paged_attention(**given | changes)
    assert text in str(found.value)


def test_scales_that_no_sequence_has_may_be_anything():
    given, _ = filled()
    expected = portattn.paged_attention(**given)
    for name in ("k_block_scale", "v_block_scale"):
        given[name].view(torch.uint8)[1, 3:] = 0x7F  # behind the first sequence's end
        given[name].view(torch.uint8)[2:4] = 0xFF
    torch.testing.assert_close(portattn.paged_attention(**given), expected, rtol=0, atol=0)


def test_what_cannot_be_written_is_refused_before_anything_is():
    for change, text in (
        ({"k_block_scale": torch.ones(PAGES, PAGE, HEADS, 1).to(E4M3)}, "k_block_scale.shape"),
        ({"v_block_scale": torch.ones(1, 1, 1, 2).to(E4M3).expand(PAGES, PAGE, HEADS, 2)}, "v_block_scale.stride()"),
        ({"k_scale": torch.tensor(0.0), "v_scale": torch.tensor(1.0)}, "k_scale of sequence 0, head 0 is 0.0"),
    ):
        cache = vllm_pages()
        with pytest.raises(portattn.ArgumentError, match="write_pages") as found:
            portattn.write_pages(tokens(1), tokens(2), slot_mapping=slots(), **cache | change)
        assert text in str(found.value)
        assert not any(bool(tensor.view(torch.uint8).any()) for tensor in cache.values())


@pytest.mark.parametrize("op", ["sparse_attention", "mla_attention"])
def test_what_reads_no_nvfp4_says_so(op):
    latent = {"page_size": 16, "heads_q": 4, "heads_k": 1} if op == "mla_attention" else {"tokens": 4}
    sizes: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_k": 2, "seq_q": 1, "seq_k": 32, "head_dim": 32}
    with pytest.raises(portattn.ArgumentError, match=f"{op} takes no nvfp4"):
        portattn.Problem(op=op, **sizes | latent, dtype="bf16", kv_format="nvfp4")
