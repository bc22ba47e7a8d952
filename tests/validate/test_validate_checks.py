"""What a Problem records of how tensors lie in memory, and when they are copied."""

import msgspec
import pytest
import torch
from good_calls import CALLS, LAID_OUT, OPS, good, perform, ragged, sparse_paged
from opcalls import differentiable

import portattn
from portattn.api.ops import make_request
from portattn.config import Settings
from portattn.validate import attention_call
from portattn.validate.checks import reachable, wants_gradients

K = (2, 2, 7, 16)


def call(q, k, v):
    return attention_call("attention", q, k, v, names=("q", "k", "v"), settings=Settings())


def test_aligned_is_what_descriptors_need():
    def aligned(q):
        return call(q, torch.zeros(1, 1, 7, q.shape[3]), torch.zeros(1, 1, 7, q.shape[3])).problem.aligned

    assert aligned(torch.zeros(1, 1, 5, 16))
    assert aligned(torch.zeros(1, 1, 5, 20))  # 80-byte rows
    assert not aligned(torch.zeros(1, 1, 5, 17)[..., :16])  # 68-byte rows
    assert not aligned(torch.zeros(1, 1, 16, 5).transpose(2, 3))  # rows are not contiguous
    assert not aligned(torch.zeros(81)[1:].view(1, 1, 5, 16))  # the base is off by four bytes
    assert not aligned(torch.zeros(1, 1, 1, 17)[..., :16])  # one row: a descriptor is encoded with its stride too


def test_what_one_row_or_one_column_is_apart_does_not_matter():
    """An axis of one element has a stride that nothing is multiplied by, but for that of a descriptor's rows."""

    def aligned(*strides, shape=(1, 1, 5, 16)):
        q = torch.zeros(2000).as_strided(shape, strides)
        return call(q, q, q).problem.aligned

    assert aligned(81, 83, 16, 1)
    assert not aligned(81, 83, 17, 1)
    assert not aligned(82, 80, 16, 1, shape=(2, 1, 5, 16))
    assert aligned(3, 5, 4, 7, shape=(1, 1, 5, 1))
    assert not aligned(3, 5, 32, 2)


def test_pages_in_line_are_rows_of_one_matrix():
    def in_line(k, v):
        arguments = good("paged_attention") | {"k_pages": k, "v_pages": v, "validate": False}
        return portattn.plan("paged_attention", **arguments).problem.pages_in_line

    k, spread = torch.zeros(5, 4, 2, 16), torch.zeros(5, 2, 4, 2, 16)[:, 0]
    assert in_line(k, k)
    assert not in_line(spread, k)
    assert not in_line(k, spread)
    assert in_line(k[:1], spread[:1])  # one page is one matrix
    heads_first = torch.zeros(5, 2, 4, 16).transpose(1, 2)
    assert not in_line(heads_first, heads_first)
    latent = good("mla_attention")
    assert portattn.plan("mla_attention", **latent).problem.pages_in_line
    latent["kv_pages"] = torch.zeros(5, 2, 4, 24)[:, 0]
    assert not portattn.plan("mla_attention", **latent).problem.pages_in_line


def test_a_last_axis_of_one_element_is_contiguous():
    column = torch.zeros(4, 2, dtype=torch.int32).T[:, :1]
    assert column.stride(-1) == 2
    perform("paged_attention", good("paged_attention") | {"page_table": column, "seqlens_k": column[:, 0].clone()})
    one = torch.zeros(2, 4, 2, dtype=torch.int32)[..., ::2]
    perform("sparse_attention", good("sparse_attention") | {"indices": one, "counts": one[..., 0].contiguous()})


def test_every_tensor_must_be_aligned():
    odd = torch.zeros(2 * 2 * 7 * 16 + 1)[1:].view(K)
    assert call(torch.zeros(K), torch.zeros(K), torch.zeros(K)).problem.aligned
    for place in range(3):
        assert not call(*[odd if i == place else torch.zeros(K) for i in range(3)]).problem.aligned


def test_needs_grad_only_where_autograd_will_ask():
    for asking in range(3):
        tensors = [torch.zeros(K, requires_grad=i == asking) for i in range(3)]
        assert call(*tensors).problem.needs_grad
        with torch.no_grad():
            assert not call(*tensors).problem.needs_grad


def test_every_differentiable_tensor_asks_for_gradients():
    """Of every op: a kernel without a backward must not be taken for any of them."""
    extra = {
        "sinks": torch.zeros(4), "alibi_slopes": torch.zeros(4), "bias": torch.zeros(1),
        "log_weights": torch.zeros(2, 4, 3),
    }  # fmt: skip
    for op in OPS:
        names = [n for n, t in good(op).items() if isinstance(t, torch.Tensor) and t.is_floating_point()]
        names += ["sinks", "alibi_slopes"] + ["bias"] * (op not in ("varlen_attention", "sparse_attention"))
        names += ["log_weights"] * (op == "sparse_attention")
        for name in names:
            given = good(op) | ({name: extra[name]} if name in extra else {})
            assert not portattn.plan(op, **given).problem.needs_grad
            given[name] = given[name].clone().requires_grad_()
            assert portattn.plan(op, **given, **differentiable(op)).problem.needs_grad, (op, name)


def test_wants_gradients_sees_forward_mode_too():
    with torch.autograd.forward_ad.dual_level():
        assert wants_gradients(None, torch.autograd.forward_ad.make_dual(torch.zeros(2), torch.ones(2)))
        assert not wants_gradients(None, torch.zeros(2))
    assert not wants_gradients(None)


def test_rows_too_far_apart_for_32_bit_offsets_are_copied():
    near = torch.zeros(1, 1, 3, 16)
    assert reachable(near) is near
    assert reachable(torch.empty_strided((1, 1, 3, 16), (0, 0, 2**24, 1), device="meta")).stride(2) == 16
    within = torch.empty_strided((1, 1, 3, 16), (0, 0, (2**31 - 1 - 16) // 256, 1), device="meta")
    assert reachable(within) is within


def built(op, arguments):
    return make_request("plan", op, (), arguments).build()


# Sizes of the good calls' Problems: batch, heads, rows and keys, widths, packed rows, and tokens a page.
SIZES ={
    "attention": (2, 4, 2, 5, 7, 16, 16, None, None, 0), "varlen_attention": (2, 4, 2, 5, 7, 16, 16, 9, 12, 0),
    "decode_attention": (2, 4, 2, 1, 7, 16, 16, None, None, 0),
    "paged_attention": (2, 4, 2, 1, 12, 16, 16, None, None, 4),
    "sparse_attention": (2, 4, 2, 1, 7, 16, 16, None, None, 0),
    "mla_attention": (2, 4, 1, 1, 12, 24, 16, None, None, 4), "ragged": (2, 4, 2, 3, 12, 16, 16, 3, None, 4),
    "ragged mla": (2, 4, 1, 3, 12, 24, 16, 3, None, 4), "sparse over pages": (2, 4, 2, 1, 12, 16, 16, None, None, 4),
}  # fmt: skip
TENSORS = {"q": "q", "k": "k", "v": "v", "k_cache": "k", "v_cache": "v", "k_pages": "k", "v_pages": "v",
           "kv_pages": "k", "q_nope": "q", "q_rope": "q_rope"}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_call_holds_views_of_what_was_given(name):
    op, arguments = CALLS[name]
    call = built(op, arguments)
    p = call.problem
    found = (p.batch, p.heads_q, p.heads_k, p.seq_q, p.seq_k, p.head_dim, p.head_dim_v, p.total_q, p.total_k)
    assert (*found, p.page_size) == SIZES[name]
    for n, tensor in arguments.items():
        if isinstance(tensor, torch.Tensor):
            view = getattr(call, TENSORS.get(n, n))
            assert view.data_ptr() == tensor.data_ptr(), n
            assert view.numel() == tensor.numel(), n
    assert call.v.shape == (*call.k.shape[:3], 16)
    assert not call.copied


@pytest.mark.parametrize("op", LAID_OUT)
def test_tokens_before_heads_is_the_same_problem(op):
    arguments = good(op)
    names = ["q", "q_nope", "q_rope"]
    names += [] if "page_table" in arguments else ["k", "v", "k_cache", "v_cache"]
    swapped = {n: arguments[n].transpose(1, 2).contiguous() for n in names if n in arguments}
    one, other = built(op, arguments), built(op, arguments | swapped | {"layout": "bshd"})
    assert other.problem == msgspec.structs.replace(one.problem, layout="bshd")
    assert (other.q.shape, other.k.shape, other.v.shape) == (one.q.shape, one.k.shape, one.v.shape)


@pytest.mark.parametrize("name", ["paged_attention", "sparse over pages", "ragged"])
def test_heads_before_tokens_of_a_page_is_the_same_problem(name):
    op, arguments = CALLS[name]
    pages = {n: t.transpose(1, 2).contiguous() for n, t in arguments.items() if n[1:] in ("_pages", "_cache")}
    assert len(pages) == 2
    one, other = built(op, arguments), built(op, arguments | pages | {"page_layout": "hpd"})
    meant = {"page_layout": "hpd", "pages_in_line": other.problem.pages_in_line}
    assert other.problem == msgspec.structs.replace(one.problem, **meant)
    assert (other.k.shape, other.v.shape) == (one.k.shape, one.v.shape)


def test_what_is_asked_of_sparse_attention_is_recorded():
    arguments = good("sparse_attention")
    p = built("sparse_attention", arguments).problem
    assert (p.tokens, p.log_weights, p.magicpig, p.seqlens_k) == (3, False, False, False)
    p = built("sparse_attention", arguments | {"log_weights": torch.zeros(2, 4, 3)}).problem
    assert (p.log_weights, p.magicpig) == (True, False)
    call = built("sparse_attention", arguments | {"magicpig": (7, 90), "seqlens_k": torch.tensor([7, 5]).int()})
    assert (call.problem.log_weights, call.problem.magicpig, call.problem.seqlens_k) == (False, True, True)
    assert (call.magicpig, call.magicpig_bits, call.magicpig_tables) == ((7, 90), None, None)
    assert [t.tolist() for t in call.hashing()] == [[7] * 4, [90] * 4]
    mixed = built("sparse_attention", arguments | {"magicpig": (7, torch.tensor([90, 91, 92, 93]).int())})
    assert [t.tolist() for t in mixed.hashing()] == [[7] * 4, [90, 91, 92, 93]]
    assert mixed.magicpig == (0, 0)


@pytest.mark.parametrize("name", CALLS)
def test_the_scale_and_its_sign(name):
    op, arguments = CALLS[name]
    for scale in (-0.5, 0, -0.0, 1e-3, 7):
        call = built(op, arguments | {"scale": scale})
        assert call.scale == scale
        assert isinstance(call.scale, float)
        assert call.problem.negative_scale == (scale == -0.5)
    if op != "mla_attention":
        assert built(op, arguments).scale == 0.25


@pytest.mark.parametrize("name", CALLS)
def test_a_tensor_that_is_copied_is_said_to_be(name):
    """Of any op, and any of its tensors that kernels read by 32-bit offsets."""
    op, arguments = CALLS[name]
    shapes = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    assert not built(op, shapes).copied
    for n, tensor in shapes.items():
        if n not in TENSORS:
            continue
        strides = [2**26 if stride != 1 else 1 for stride in tensor.stride()]
        call = built(op, shapes | {n: torch.empty_strided(tensor.shape, strides, device="meta")})
        assert call.copied, n
        assert getattr(call, TENSORS[n]).is_contiguous(), n


def test_a_copied_tensor_is_said_to_be_one():
    """A call that is kept would be given the caller's own tensor, with the copy's strides."""
    q = torch.zeros(1, 1, 1, 16, device="meta")
    k = torch.empty_strided((1, 1, 3, 16), (0, 0, 2**24, 1), device="meta")
    made = call(q, k, torch.empty(1, 1, 3, 16, device="meta"))
    assert made.copied
    assert made.k.is_contiguous()
    assert not call(q, *[torch.empty(1, 1, 3, 16, device="meta")] * 2).copied


def test_a_bias_whose_keys_lie_too_far_apart_is_copied():
    q, k = torch.zeros(1, 1, 1, 16, device="meta"), torch.empty(1, 1, 3, 16, device="meta")
    for name, dtype in (("bias", torch.float32), ("mask", torch.bool)):
        far = torch.empty_strided((1, 1, 1, 3), (0, 0, 0, 2**30), device="meta", dtype=dtype)
        made = attention_call("attention", q, k, k, names=("q", "k", "v"), settings=Settings(), **{name: far})
        assert made.copied
        assert getattr(made, name).stride(3) == 1


def test_large_is_what_32_bit_byte_offsets_do_not_reach():
    k = torch.empty(1, 1, 2**23, 64, device="meta")
    q = torch.empty(1, 1, 1, 64, device="meta")
    assert call(q, k, k).problem.large
    assert not call(q, k[:, :, :-1], k[:, :, :-1]).problem.large


def test_shapes_without_data_are_planned_for_every_op():
    for op, given in [*((op, good(op)) for op in OPS), ("sparse_attention", sparse_paged())]:
        shapes = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in given.items()}
        out = getattr(portattn, op)(**shapes, validate=True)
        assert out.device.type == "meta"
        assert out.shape == getattr(portattn, op)(**given).shape
    for op in ("paged_attention", "mla_attention"):
        shapes = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in ragged(op).items()}
        assert getattr(portattn, op)(**shapes, validate=True).shape == (3, 4, 16)
