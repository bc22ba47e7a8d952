"""Shapes, masks, lengths of zero, autocast and errors of the SDPA drop-in: what torch's own does."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from packaging.version import Version
from places import tables
from sdpa_cases import Around, check, kept_by, path, samples
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import portattn
from portattn.integrations import sdpa, sdpa_mapping

TABLES = tables(__file__)

theirs = torch._C._nn.scaled_dot_product_attention
ours = sdpa.scaled_dot_product_attention
# Without gradients an accelerator runs portattn's own kernels; with them, a path that has a backward.
GRAD = pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
ON = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def tensors(*shapes, device="cpu", dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(len(shapes[0]))
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_(grad) for s in shapes]


# name: query, key, value; enable_gqa
SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = TABLES["shapes"]


@GRAD
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, is_causal, device, grad):
    *shapes, enable_gqa = SHAPES[name]
    check(ours, *tensors(*shapes, device=device, grad=grad), is_causal=is_causal, enable_gqa=enable_gqa)
    assert path() == "portattn"


@pytest.mark.interpreter
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["4-D", "more queries", "5-D, broadcast", "one head of keys", "GQA", "no keys"])
def test_shapes_by_the_core_kernel(name, is_causal):
    *shapes, enable_gqa = SHAPES[name]
    with portattn.settings(backend="interpreter"):
        check(ours, *tensors(*shapes, grad=False), is_causal=is_causal, enable_gqa=enable_gqa)
    assert portattn.last_plan().path == "interpreter"


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (4, 3, 5), (2, 1, 1, 5)], ids=str)
def test_masks_by_the_core_kernel(shape, kind):
    mask = torch.randn(shape)
    mask = mask > -0.5 if kind == "bool" else mask
    with portattn.settings(backend="interpreter"):
        check(ours, *tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), grad=False), attn_mask=mask)


# Sizes that portattn does not take.
ELSEWHERE: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    "no width": ((2, 4, 3, 0), (2, 4, 5, 0), (2, 4, 5, 8), False),
    "no width of value": ((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 0), False),
    "too wide": ((1, 1, 3, 640), (1, 1, 5, 640), (1, 1, 5, 640), False),
    "no heads": ((2, 0, 3, 8), (2, 0, 5, 8), (2, 0, 5, 8), False),
    "no heads, GQA": ((2, 0, 3, 8), (2, 0, 5, 8), (2, 0, 5, 8), True),
    "other heads of value": ((2, 4, 3, 8), (2, 2, 5, 8), (2, 1, 5, 8), True),
}


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("name", ELSEWHERE)
def test_sizes_that_torch_runs(name):
    *shapes, enable_gqa = ELSEWHERE[name]
    given = [tensor.detach() for tensor in tensors(*shapes)]
    torch.testing.assert_close(ours(*given, enable_gqa=enable_gqa), theirs(*given, enable_gqa=enable_gqa))
    assert path() == "torch"


MASKS = [(1, 5), (3, 1), (1, 1), (3, 5), (1, 3, 5), (4, 3, 5), (4, 1, 5), (2, 4, 3, 5), (2, 1, 1, 5), (1, 4, 3, 5)]


@GRAD
@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("kind", ["bool", "float", "float with gradient"])
@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(shape, kind, device, grad):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    mask = mask > -0.5 if kind == "bool" else mask.requires_grad_(kind == "float with gradient")
    check(ours, *tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), device=device, grad=grad), attn_mask=mask)
    assert path() == "portattn"


@pytest.mark.parametrize(("query", "key", "shape", "gqa"), [
    ((3, 8), (5, 8), (3, 5), False), ((2, 3, 8), (2, 5, 8), (2, 1, 5), False),
    ((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), (3, 5), False), ((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), (2, 1, 4, 3, 5), False),
    ((2, 3, 4, 3, 8), (2, 3, 4, 5, 8), (3, 1, 3, 5), False), ((2, 3, 4, 3, 8), (3, 1, 5, 8), (2, 3, 1, 1, 5), False),
    ((2, 3, 4, 3, 8), (2, 3, 2, 5, 8), (2, 1, 4, 3, 5), True), ((2, 4, 3, 8), (2, 2, 5, 8), (2, 4, 3, 5), True),
    ((3, 8), (2, 4, 5, 8), (2, 1, 3, 5), False),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_other_dimensions(query, key, shape, gqa, kind):
    mask = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask = mask > -0.5 if kind == "bool" else mask.requires_grad_()
    check(ours, *tensors(query, key, key), attn_mask=mask, enable_gqa=gqa)
    assert path() == "portattn"


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["bool", "-inf", "float32"])
def test_rows_that_may_attend_nothing(kind, dtype, device):
    """torch 2.13 gives 0, and gradients of 0, by its definition as by its kernels; so do we, and no NaN."""
    seen = torch.ones(3, 5, dtype=torch.bool, device=device)
    seen[1] = False
    mask = seen if kind == "bool" else torch.zeros(3, 5, device=device).masked_fill(~seen, -torch.inf)
    mask = mask.to(dtype) if kind == "-inf" else mask
    given = tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), device=device, dtype=dtype)
    check(ours, *(tensor.detach() for tensor in given), attn_mask=mask)
    check(ours, *given, attn_mask=mask)
    out = ours(*given, attn_mask=mask)
    assert (out[:, :, 1] == 0).all()
    out.sum().backward()
    assert (given[0].grad[:, :, 1] == 0).all()
    with sdpa_kernel(SDPBackend.MATH):
        assert (theirs(*given, attn_mask=mask)[:, :, 1] == 0).all()


def test_no_nan_where_torch_has_none():
    """Extremes that torch bears: the least numbers as a mask, in one row for all keys."""
    least = torch.zeros(3, 5)
    least[0, 2:], least[1] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
    check(ours, *tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)), attn_mask=least)
    large = [tensor.detach() * 1e4 for tensor in tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))]
    assert torch.isfinite(theirs(*large)).all()
    assert torch.isfinite(ours(*large)).all()


@pytest.mark.parametrize("scale", [0.0, 1, 0.3, -0.5])
def test_scales(scale):
    check(ours, *tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8)), scale=scale, is_causal=True)
    assert path() == "portattn"


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("options", [{"scale": torch.nan}, {"scale": torch.inf}, {"dropout_p": 1.0}, {"dropout_p": 1}],
    ids=str)  # fmt: skip
def test_numbers_that_torch_runs(options):
    given = [tensor.detach() for tensor in tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))]
    torch.testing.assert_close(ours(*given, **options), theirs(*given, **options), equal_nan=True)
    assert path() == "torch"


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
def test_a_mask_beside_is_causal_is_torchs():
    """Its fused kernels apply both before torch 2.14, its definition raises: a call gets what torch does with it."""
    given = [tensor.detach() for tensor in tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))]
    mask = torch.randn(3, 5)
    raising = [[tensor[0] for tensor in given]]
    if Version(torch.__version__).release >= (2, 14):
        raising.append(given)
    else:
        torch.testing.assert_close(ours(*given, attn_mask=mask, is_causal=True),
            theirs(*given, attn_mask=mask, is_causal=True))  # fmt: skip
        assert path() == "torch"
    for tensors_ in raising:
        for function in (theirs, ours):
            with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
                function(*tensors_, attn_mask=mask, is_causal=True)


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_markers_of_causal_masks():
    """CausalBias at the lower right is portattn's bottom_right; its rows without a key give 0, as the mask does."""
    for rows in (3, 5, 7):
        given = tensors((2, 4, rows, 8), (2, 4, 5, 8), (2, 4, 5, 8))
        written = torch.ones(rows, 5, dtype=torch.bool).tril(5 - rows)
        lower = ours(*given, attn_mask=bias.causal_lower_right(rows, 5))
        assert path() == "portattn"
        torch.testing.assert_close(lower, ours(*given, attn_mask=written))
        upper = ours(*given, attn_mask=bias.causal_upper_left(rows, 5))
        torch.testing.assert_close(upper, ours(*given, is_causal=True))
    with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
        ours(*given, attn_mask=bias.causal_upper_left(7, 5), is_causal=True)


@pytest.mark.parametrize("device", ON)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    given = tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8), device=device)
    mask = torch.randn(3, 5, device=device)
    lower = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    with torch.autocast(device, dtype=dtype):
        out, right = ours(*given, attn_mask=mask), theirs(*given, attn_mask=mask)
        mixed = ours(given[0].to(dtype), *given[1:])
    assert out.dtype is right.dtype is mixed.dtype is dtype
    torch.testing.assert_close(out, ours(*lower, attn_mask=mask.to(dtype)), rtol=0, atol=0)
    out.sum().backward()
    ours(*lower, attn_mask=mask.to(dtype)).sum().backward()
    for cast, plain in zip(given, lower, strict=True):
        torch.testing.assert_close(cast.grad, plain.grad.float(), rtol=0, atol=0)
    with torch.autocast(device, dtype=dtype, enabled=False):
        assert ours(*given).dtype is torch.float32


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
def test_autocast_leaves_float64():
    given = [tensor.detach().double() for tensor in tensors((2, 4, 3, 8), (2, 4, 5, 8), (2, 4, 5, 8))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(*given).dtype is torch.float64
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            ours(given[0], given[1].float(), given[2].float())


@pytest.mark.parametrize("autocast", [False, True])
def test_meta_tensors_give_the_shape(autocast):
    q, k = torch.empty(2, 4, 3, 8, device="meta"), torch.empty(2, 4, 5, 8, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = ours(q, k, k, is_causal=True)
    assert (out.shape, out.device.type, out.dtype) == ((2, 4, 3, 8), "meta", torch.float32)


def test_the_memory_order_of_the_result_is_the_querys():
    """Models view (B, L, Hq, E) as (B, L, Hq · E) afterwards."""
    bshd = [tensor.detach().transpose(1, 2) for tensor in tensors((2, 3, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8))]
    assert ours(*bshd).stride() == theirs(*bshd).stride() == bshd[0].stride()
    bhsd = [tensor.contiguous() for tensor in bshd]
    assert ours(*bhsd).stride() == theirs(*bhsd).stride() == bhsd[0].stride()
    torch.testing.assert_close(ours(*bshd), ours(*bhsd))


def test_tensors_that_are_not_contiguous():
    q, k, v = (tensor.detach() for tensor in tensors((2, 4, 6, 16), (2, 4, 10, 16), (2, 4, 10, 16)))
    odd = (q[:, :, ::2, ::2], k[:, :, ::2, ::2], v[:, ::1, ::2, 1::2])
    check(ours, *odd, attn_mask=torch.randn(10, 3).t()[:, ::2])
    assert path() == "portattn"


def message(function, *args, **kwargs):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        function(*args, **kwargs)
    return type(caught.value), str(caught.value).splitlines()[0]


SEED = torch.Generator().manual_seed(0)
Q, K = torch.randn(2, 4, 3, 8, generator=SEED), torch.randn(2, 4, 5, 8, generator=SEED)
BAD: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "one axis": ((K[0, 0, 0],) * 3, {}),
    "no axis of heads for GQA": ((Q[0, 0], K[0, 0], K[0, 0]), {"enable_gqa": True}),
    "heads that do not divide": ((Q, K[:, :3], K[:, :3]), {"enable_gqa": True}),
    "more heads of keys": ((Q[:, :2], K, K), {"enable_gqa": True}), "heads without GQA": ((Q, K[:, :2], K[:, :2]), {}),
    "batches": ((torch.cat([Q, Q[:1]]), K, K), {}), "widths": ((Q, torch.cat([K, K], -1), K), {}),
    "dtypes": ((Q.half(), K, K), {}), "integers": ((Q.int(), K.int(), K.int()), {}),
    "complex numbers": ((Q + 0j, K + 0j, K + 0j), {}), "devices": ((Q, K.to("meta"), K.to("meta")), {}),
    "a list": (([1.0], K, K), {}), "None": ((None, K, K), {}),
    "a mask of another dtype": ((Q, K, K), {"attn_mask": torch.ones(3, 5, dtype=torch.float64)}),
    "a half mask of float32": ((Q, K, K), {"attn_mask": torch.ones(3, 5).half()}),
    "a mask of integers": ((Q, K, K), {"attn_mask": torch.ones(3, 5, dtype=torch.int32)}),
    "a mask of other keys": ((Q, K, K), {"attn_mask": torch.ones(3, 4)}),
    "a mask of other heads": ((Q, K, K), {"attn_mask": torch.ones(2, 3, 5)}),
    "a mask of more axes": ((Q, K, K), {"attn_mask": torch.ones(1, 2, 4, 3, 5)}),
    "a mask that is none": ((Q, K, K), {"attn_mask": True}),
    "a mask of one axis": ((Q, K, K), {"attn_mask": torch.ones(5)}), "dropout": ((Q, K, K), {"dropout_p": 1.5}),
    "negative dropout": ((Q, K, K), {"dropout_p": -0.5}), "a scale of text": ((Q, K, K), {"scale": "1"}),
    "causal of 1": ((Q, K, K), {"is_causal": 1}), "causal of None": ((Q, K, K), {"is_causal": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gives_torchs_error(name):
    args, kwargs = BAD[name]
    right = message(theirs, *args, **kwargs)
    assert message(ours, *args, **kwargs) == right
    with sdpa.replacement():
        assert message(torch.nn.functional.scaled_dot_product_attention, *args, **kwargs) == right


def test_bad_arguments_are_type_errors():
    for function in (theirs, ours):
        for args, kwargs in (((Q, K), {}), ((Q, K, K), {"causal": True}), ((Q, K, K, None, 0.0, False, 1.0), {})):
            with pytest.raises(TypeError, match="scaled_dot_product_attention"):
                function(*args, **kwargs)


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_values_of_other_rows_than_the_keys(rows):
    """torch's definition raises. Its fused CPU kernel does not compare them, and returns something."""
    value = torch.randn(2, 4, rows, 8)
    with sdpa_kernel(SDPBackend.MATH):
        right = message(theirs, Q, K, value)
    assert message(ours, Q, K, value) == right
    assert right[0] is RuntimeError


# torch's own samples of SDPA (OpInfo) through every way in, forward and backward, in every dtype.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WAYS = ("function", "replacement", "flash_impl")


def way_in(way, device):
    """SDPA as a program would call it, and the block around that."""
    if way == "function":
        return sdpa.scaled_dot_product_attention, contextlib.nullcontext
    block: Around = sdpa.replacement if way == "replacement" else functools.partial(sdpa.flash_impl, device)
    return lambda *args, **kwargs: torch.nn.functional.scaled_dot_product_attention(*args, **kwargs), block


@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")  # float64, and backwards of the flash kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_samples(way, dtype):
    ours, around = way_in(way, "cpu")
    torch.manual_seed(0)
    paths = []
    for sample in samples("cpu", dtype):
        args = (sample.input, *sample.args)
        kept = None
        if sample.kwargs.get("dropout_p", 0.0):
            if way == "flash_impl":
                continue  # torch's flash kernel on the CPU has no dropout, and SDPA does not call it
            with around():
                kept = kept_by(seeded(ours), args[0], args[1], **sample.kwargs)
        sdpa_mapping.note(None)
        check(seeded(ours), *args, around=around, kept=kept, **sample.kwargs)
        route = sdpa.last_route()
        paths.append("" if route is None else "backward" if "backward" in route.reason else route.path)
    if way != "flash_impl":
        assert paths == ["torch" if dtype is torch.float64 else "portattn"] * 25
    elif dtype is torch.float64:
        assert set(paths) == {"", "backward"}
    else:  # torch calls its flash kernel for four axes and no mask that requires grad; 2.14 for three axes too
        three = Version(torch.__version__).release >= (2, 14)
        assert [paths.count(path) for path in ("backward", "")] == ([8, 5] if three else [4, 9])


def seeded(function):
    def again(*args, **kwargs):
        torch.manual_seed(1)
        return function(*args, **kwargs)

    return again


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_dropout_leaves_what_it_should(device):
    """A share of 1 - p is left, scaled by 1 / (1 - p), and the seed decides which."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 64, 32, device=device, dtype=torch.float32)
    eye = torch.eye(64, device=device).expand(2, 4, 64, 64)
    whole = sdpa.scaled_dot_product_attention(q, k, eye)
    torch.manual_seed(1)
    left = sdpa.scaled_dot_product_attention(q, k, eye, dropout_p=0.25)
    share = (left != 0).float().mean().item()
    assert abs(share - 0.75) < 0.02  # 32,768 draws: 8 standard deviations
    torch.testing.assert_close(left[left != 0], (whole / 0.75)[left != 0], rtol=1e-4, atol=1e-6)
    torch.manual_seed(1)
    first = sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(1)
    assert torch.equal(first, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25))
    assert not torch.equal(first, sdpa.scaled_dot_product_attention(q, k, v, dropout_p=0.25))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::portattn.FallbackWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad", [True, False], ids=["gradients", "no gradients"])
def test_samples_on_the_accelerator(grad, way, dtype):
    """Those without dropout: which elements it leaves depends on the kernel, and so on the width of value."""
    ours, around = way_in(way, "cuda")
    count = 0
    for sample in samples("cuda", dtype, requires_grad=grad):
        if not sample.kwargs.get("dropout_p", 0.0):
            check(ours, sample.input, *sample.args, around=around, **sample.kwargs)
            count += 1
    assert count == 13


def test_gradients_of_gradients():
    """The reference is made of torch's operators: what it gives can be differentiated twice, as torch's definition."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 4, requires_grad=True) for _ in range(3))
    found = []
    for function in (sdpa.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention):
        with portattn.settings(backend="reference"), sdpa_kernel(SDPBackend.MATH):
            out = function(q, k, v, is_causal=True)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), (q, k, v)))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
