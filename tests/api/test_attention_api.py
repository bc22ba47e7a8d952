"""The public functions as a user calls them: return values and defaults."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import portattn

pytestmark = pytest.mark.on_device


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    """A GPU where there is one, else the CPU; without Triton too."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def test_it_is_sdpa_where_sdpa_is_defined(where: str) -> None:
    q, k, v = (torch.randn(2, 4, 33, 24, device=where) for _ in range(3))
    torch.testing.assert_close(portattn.attention(q, k, v), scaled_dot_product_attention(q, k, v), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(
        portattn.attention(q, k, v, causal="top_left", scale=0.5),
        scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5), atol=2e-6, rtol=1e-5,
    )  # fmt: skip


def test_out_has_qs_dtype_and_layout_and_the_values_width(where: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        q, k = (torch.randn(2, 5, 4, 16, device=where, dtype=dtype) for _ in range(2))
        v = torch.randn(2, 5, 4, 24, device=where, dtype=dtype)
        out, lse = portattn.attention(q, k, v, layout="bshd", return_lse=True)
        assert (out.shape, out.dtype) == ((2, 5, 4, 24), dtype)
        assert out.is_contiguous()
        assert (lse.shape, lse.dtype) == ((2, 4, 5), torch.float32)


def test_lse_only_when_asked(where: str) -> None:
    q = torch.randn(1, 1, 2, 16, device=where)
    assert isinstance(portattn.attention(q, q, q), torch.Tensor)
    assert isinstance(portattn.decode_attention(q, q, q, None), torch.Tensor)
    assert isinstance(portattn.attention(q, q, q, return_lse=True), tuple)
    assert isinstance(portattn.decode_attention(q, q, q, None, return_lse=True), tuple)


def test_a_backend_for_one_call_and_for_a_block(where: str) -> None:
    q = torch.randn(1, 1, 2, 16, device=where)
    portattn.attention(q, q, q, backend="reference")
    assert portattn.last_plan().requested == "reference"
    with portattn.settings(backend="reference"):
        portattn.attention(q, q, q)
        assert portattn.last_plan().requested == "reference"
        portattn.attention(q, q, q, backend="auto")
        assert portattn.last_plan().requested == "auto"
