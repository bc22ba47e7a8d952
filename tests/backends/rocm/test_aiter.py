"""AITER as a vendor path: its recorded signatures, semantics and refusals, against a stand-in that checks arguments."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import recorded_aiter
import torch

from portattn.backends.rocm import aiter
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.problem import Problem
from portattn.testing.oracle import oracle
from portattn.testing.random_calls import random_call

AITER = aiter.AiterPath()
MI300, MI350, RDNA4 = (parse_target(f"rocm:{arch}", "triton==3.6.0") for arch in ("gfx942", "gfx950", "gfx1201"))
NEWEST = "0.1.20.post1"
DENSE = {"batch": 2, "heads_q": 4, "heads_k": 2, "seq_q": 5, "seq_k": 9, "head_dim": 40, "dtype": "bf16"}
PACKED = DENSE | {"op": "varlen_attention", "batch": 3, "seq_q": 9, "seq_k": 11, "total_q": 20, "total_k": 29}
PAGED = DENSE | {
    "op": "paged_attention", "batch": 3, "seq_k": 256, "page_size": 128, "seqlens_k": True, "causal": "bottom_right",
}  # fmt: skip
LATENT = {
    "op": "mla_attention", "batch": 3, "heads_q": 16, "heads_k": 1, "seq_q": 1, "seq_k": 20, "head_dim": 576,
    "head_dim_v": 512, "page_size": 1, "seqlens_k": True, "dtype": "bf16",
}  # fmt: skip
CAUSAL, ALIBI = {"causal": "bottom_right"}, {"alibi_slopes": True}
PLAIN = {
    "flash_attn_func": DENSE, "flash_attn_varlen_func": PACKED, "unified_attention": PAGED, "mla_decode_fwd": LATENT,
}  # fmt: skip


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(release: str = NEWEST, **change: Any) -> None:
        recorded_aiter.install(tmp_path, release, **change)
        monkeypatch.syspath_prepend(str(tmp_path))
        aiter.find_installation.cache_clear()

    yield make
    aiter.find_installation.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def check(p: Problem, seed: int = 0) -> None:
    assert AITER.rejects(p, MI300) is None
    call = random_call(p, seed)
    out, lse = AITER.run(call)
    expected, expected_lse = oracle(call)
    assert out.dtype is call.q.dtype
    rounding = 2 * torch.finfo(out.dtype).eps * float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=rounding)
    assert (lse is not None) == p.return_lse
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


CASES = [
    DENSE, DENSE | CAUSAL, DENSE | {"return_lse": True, "dtype": "fp16"}, DENSE | {"layout": "bshd"},
    DENSE | CAUSAL | {"seq_q": 9, "seq_k": 5}, DENSE | {"causal": "top_left", "seq_q": 9, "return_lse": True},
    DENSE | CAUSAL | {"window_left": 2}, DENSE | {"window_left": 0, "window_right": 2, "return_lse": True},
    DENSE | ALIBI, DENSE | {"head_dim": 192, "head_dim_v": 128}, PACKED | {"return_lse": True},
    PACKED | CAUSAL | {"return_lse": True}, PACKED | CAUSAL | {"softcap": True}, PACKED | ALIBI, PAGED,
    PAGED | {"page_layout": "hpd", "layout": "bshd"}, PAGED | {"sinks": True}, PAGED | {"total_q": 12},
    PAGED | {"seq_q": 1, "causal": "none"},
    LATENT, LATENT | {"return_lse": True}, LATENT | {"return_lse": True, "total_q": 3, "layout": "bshd"},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_results(install: Any, case: dict[str, Any], seed: int) -> None:
    install()
    check(Problem(**case), seed)


@pytest.mark.parametrize("row", aiter.load_signatures(), ids=lambda row: f"{row.function}-{row.releases[0]}")
def test_each_recorded_signature_is_called(install: Any, row: aiter.RecordedSignature) -> None:
    install(row.releases[-1])
    p = Problem(**PLAIN[row.function])
    if row.function == "unified_attention" and aiter.find_installation().release < aiter.TILES_OF_64_SINCE:  # type: ignore[union-attr]
        assert "masks no tiles before 0.1.12" in refusal(p)
        return
    check(p)
    assert [name for name, _ in recorded_aiter.CALLS] == [row.function]


def test_the_records_are_of_distinct_releases() -> None:
    for function in PLAIN:
        rows = [row for row in aiter.load_signatures() if row.function == function]
        releases = [release for row in rows for release in row.releases]
        assert len(releases) == len(set(releases))
        assert releases[-1] == NEWEST
        assert all({"q", "k", "v"} <= {*row.names} or {"q", "kv_buffer"} <= {*row.names} for row in rows)


def refusal(p: Problem, target: Any = MI300) -> str:
    no = AITER.rejects(p, target)
    assert no is not None
    return no.reason


REFUSED = [
    (DENSE | {"dtype": "fp32"}, "dtype is fp32"), (DENSE | {"head_dim": 264}, "head_dim is 264"),
    (DENSE | {"head_dim": 64, "head_dim_v": 128}, "head_dim_v is 128 with head_dim 64"),
    (DENSE | {"causal": "top_left"}, "aligns at the bottom right"), (DENSE | {"bias": True}, "bias asked for"),
    (DENSE | CAUSAL | {"window_left": 0}, "window is (0, -1)"), (DENSE | {"seqlens_k": True}, "takes none"),
    (DENSE | CAUSAL | {"seq_q": 9, "seq_k": 5, "return_lse": True}, "rows without a key"),
    (DENSE | {"softcap": True}, "softcap asked for"), (DENSE | {"dropout": True}, "dropout_p"),
    (DENSE | {"needs_grad": True, "return_lse": True}, "backward pass passes over it"),
    (PACKED | {"needs_grad": True, "softcap": True}, "backward pass passes over it"),
    (PACKED | CAUSAL | {"window_left": 3}, "window (3, -1) asked for"), (DENSE | {"large": True}, "2 GiB"),
    (PAGED | {"causal": "none"}, "causal is none with seq_q 5"), (PAGED | {"return_lse": True}, "returns no LSE"),
    (PAGED | {"page_size": 64}, "NaN in unused places"), (PAGED | {"num_splits": 2}, "num_splits is 2"),
    (PAGED | {"window_left": 7}, "window (7, -1) asked for"), (LATENT | {"heads_q": 32}, "heads_q is 32"),
    (LATENT | {"page_size": 16, "seq_k": 32}, "page_size is 16"), (LATENT | {"seq_q": 2} | CAUSAL, "seq_q is 2"),
    (LATENT | {"dtype": "fp16"}, "dtype is fp16"), (DENSE | {"op": "decode_attention"}, "op is decode_attention"),
    (DENSE | {"seq_q": 0}, "a size is 0"), (PAGED | {"softcap": True}, "overflows to NaN"),
    (DENSE | {"sinks": True}, "drops them"), (PACKED | {"sinks": True}, "drops them"),
    (PACKED | CAUSAL | ALIBI, "with causal bottom_right"), (DENSE | ALIBI | {"return_lse": True}, "out of its LSE"),
    (DENSE | ALIBI | {"seq_k": 65537}, "takes up to 65536"), (PAGED | ALIBI, "alibi_slopes asked for"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "reason"), REFUSED)
def test_refusals(install: Any, case: dict[str, Any], reason: str) -> None:
    install()
    assert reason in refusal(Problem(**case))


def test_features_are_refused_by_the_version_that_drops_them(install: Any) -> None:
    install("0.1.7.post2")
    assert "flash_attn_varlen_func may drop softcap before 0.1.8" in refusal(Problem(**PACKED, softcap=True))
    assert "aiter 0.1.7.post2: mla_decode_fwd writes no LSE" in refusal(Problem(**LATENT, return_lse=True))
    assert AITER.rejects(Problem(**DENSE), MI350) is None
    assert "arch is gfx1201" in refusal(Problem(**DENSE), RDNA4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("softmax_scale=None, ", ""), "has no parameter softmax_scale"),
        (("bias=", "extra=None, bias="), "has a parameter extra that no recorded release has there"),
        (("causal=False", "causal=True"), "has its parameters in another order, or with other defaults"),
    ],
)
def test_another_signature_is_refused_by_name(install: Any, change: tuple[str, str], words: str) -> None:
    install("0.1.19", change=change)
    assert refusal(Problem(**DENSE)) == f"aiter 0.1.19: flash_attn_func {words} (recorded: {NEWEST})"


def test_without_aiter_or_with_another_project_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aiter.find_installation.cache_clear()
    assert refusal(Problem(**DENSE)) == "amd-aiter is not installed"
    for path, text in (("aiter/__init__.py", "raise RuntimeError"), ("aiter-0.13.dist-info/METADATA", "Version: 0.13")):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    aiter.find_installation.cache_clear()
    assert refusal(Problem(**DENSE)) == "amd-aiter is not installed"
    aiter.find_installation.cache_clear()


def test_plans_take_it_after_the_core_and_sdpa_without_importing_it(install: Any) -> None:
    install()

    def path(backend: str, **changes: Any) -> str:
        return plan(Problem(**DENSE | changes), MI300, settings=Settings(backend=backend)).path

    assert [path("auto"), path("vendor"), path("aiter")] == ["triton", "sdpa", "aiter"]
    assert path("vendor", return_lse=True) == "aiter"
    assert path("auto", return_lse=True) == "triton"
    with pytest.raises(PathUnavailable, match="softcap asked for"):
        path("aiter", softcap=True)
    assert "aiter" not in sys.modules


@pytest.mark.parametrize("case", [DENSE, DENSE | CAUSAL | {"window_left": 3}, PACKED | CAUSAL])
def test_gradients(install: Any, case: dict[str, Any]) -> None:
    install()
    p = Problem(**case, needs_grad=True, deterministic=True)
    assert AITER.rejects(p, MI300) is None
    call = random_call(msgspec.structs.replace(p, needs_grad=False))
    call.problem = p
    exact = [tensor.detach().double().nan_to_num().requires_grad_() for tensor in (call.q, call.k, call.v)]
    call.q, call.k, call.v = (tensor.detach().nan_to_num().requires_grad_() for tensor in (call.q, call.k, call.v))
    out, lse = AITER.run(call)
    assert lse is None
    out.double().square().sum().backward()
    found = [tensor.grad for tensor in (call.q, call.k, call.v)]
    call.q, call.k, call.v = exact
    oracle(call)[0].square().sum().backward()
    for ours, theirs in zip(found, exact, strict=True):
        assert ours is not None
        assert theirs.grad is not None
        assert float((ours.double() - theirs.grad).abs().max()) <= 0.02 * float(theirs.grad.abs().max())
    assert recorded_aiter.CALLS[0][1]["deterministic"] is True
