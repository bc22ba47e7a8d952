"""Quantised caches in the benchmark: what a case's tensors hold, who takes part, and what a row says of them."""

from dataclasses import replace

import pytest
import torch
from benchfakes import LIMITS, FakeClock, figures, made, run_case
from tiny import CASES

from portattn.reference.blocks import dequantize
from portattn.schema.tensors import CACHE_DTYPE
from portattn.tools.bench import gate, peers
from portattn.tools.bench.cases import SETS
from portattn.tools.bench.contenders import OURS, PREPARED, Contender, ours, plan_of
from portattn.tools.bench.plots import panels
from portattn.tools.bench.run import BenchOptions
from portattn.tools.bench.tensors import Tensors

CPU = torch.device("cpu")
FORMATS = {"e4m3 scales=tensor", "e4m3 scales=token", "int8 scales=token", "int4 scales=token"}
INLINE = {"e4m3 scales=inline", "int8 scales=inline", "int4 scales=inline"}
KINDS = {
    name: CASES[f"paged B=8 H=64/16 S=1024 D=64 page=16 {name}"] for name in sorted(FORMATS | INLINE)
} | {f"contiguous {name}": CASES[f"decode B=8 H=64/16 S=1024 D=64 {name}"] for name in sorted(FORMATS)}  # fmt: skip


@pytest.fixture(params=KINDS)
def case(request):
    return KINDS[request.param]


def test_bytes_are_the_numbers_and_the_scales_of_tokens():
    """64 sequences of 8192 keys, 8 heads of 128: 2 · 64 · 8192 · 8 rows of 128 bytes, of int4 of 64, and 4 bytes of a
    scale each."""
    rows, name = 2 * 64 * 8192 * 8, "paged B=64 H=32/8 S=8192 D=128 page=16"
    sizes = {case.name: case.read_bytes() for case in SETS["paged-quantised"] if case.name.startswith(name)}
    assert sizes == {f"{name} e4m3 scales=tensor": rows * 128} | {
        f"{name} {ending}": rows * (68 if ending.startswith("int4") else 132)
        for ending in (FORMATS | INLINE) - {"e4m3 scales=tensor"}
    }


def test_numbers_and_scales_stand_for_the_values(case):
    """As close as the format can be: half of its last place, of the largest value of what shares a scale."""
    values = Tensors.random(case.unquantised(), CPU)
    tensors = Tensors.random(case, CPU)
    step = 2.0**-4 if case.kv_format == "e4m3" else 0.5 / 127
    for plain, numbers, scale in ((values.k, tensors.k, tensors.k_scale), (values.v, tensors.v, tensors.v_scale)):
        assert numbers.dtype is CACHE_DTYPE[case.kv_format]
        assert scale.dtype is torch.float32
        assert scale.shape == (plain.shape[:-1] if case.kv_scales == "token" else ())
        if case.kv_format == "int4":
            reach = plain.float().amax(-1).clamp_min(0) - plain.float().amin(-1).clamp_max(0)
            back = dequantize(numbers.view(torch.int8), "int4", scale, by_token=True)
            assert bool(((back - plain.float()).abs() <= 0.51 / 15 * reach[..., None]).all())
            assert len(numbers.unique()) > 128
            continue
        back = numbers.float() * scale[..., None]
        peak = plain.float().abs().amax(-1, keepdim=True) if case.kv_format == "int8" else plain.float().abs()
        least = 2.0**-10 * scale[..., None]  # half of the smallest number of e4m3
        assert bool(((back - plain.float()).abs() <= step * peak * 1.01 + least).all())
        assert float(numbers.float().abs().max()) == (127 if case.kv_format == "int8" else 448)
    assert torch.equal(tensors.q, values.q)


def test_inline_scales_lie_behind_their_numbers():
    tensors = Tensors.random(KINDS["int8 scales=inline"], CPU)
    for numbers, scale in ((tensors.k, tensors.k_scale), (tensors.v, tensors.v_scale)):
        width = numbers.shape[-1]
        assert numbers.untyped_storage().data_ptr() == scale.untyped_storage().data_ptr()
        assert scale.data_ptr() - numbers.data_ptr() == width
        assert [4 * stride for stride in scale.stride()] == list(numbers.stride()[:-1])
        assert numbers.stride(2) == width + 4


def test_shapes_without_data_are_those_of_the_tensors(case):
    real, empty = Tensors.random(case, CPU), Tensors.random(case, torch.device("meta"))
    for name in ("q", "k", "v", "k_scale", "v_scale", "page_table"):
        one, other = getattr(real, name), getattr(empty, name)
        if one is None:
            assert other is None
            continue
        assert (other.shape, other.stride(), other.dtype) == (one.shape, one.stride(), one.dtype), name


def test_a_wrong_scale_is_refused(case):
    tensors = Tensors.random(case, CPU)
    spoiled = tensors.v_scale.clone(memory_format=torch.contiguous_format)
    spoiled.view(-1)[0] *= 100  # every page is some sequence's, and its first token too
    builds = {
        "right": lambda: ours(case, tensors), "one scale": lambda: ours(case, replace(tensors, v_scale=spoiled)),
        "keys' scales for values": lambda: ours(case, replace(tensors, v_scale=2 * tensors.k_scale)),
        "the numbers themselves": lambda: ours(case, replace(tensors, v_scale=torch.ones_like(tensors.v_scale))),
    }  # fmt: skip
    assert set(gate.admit(case, tensors, builds).refused) == set(builds) - {"right"}


def test_who_takes_part(case):
    """FlashAttention, SDPA and the like read no such cache; a file's peer is asked whatever the case is."""
    tensors = Tensors.random(case, CPU)
    assert set(peers.contenders(case, tensors)) == {"unquantised"}
    assert "unquantised" not in peers.contenders(case.unquantised(), tensors.unquantised())
    assert plan_of(case, tensors).problem.kv_format == case.kv_format

    class File:
        def absent(self):
            return ""

        def contenders(self, case, t):
            return {"file": lambda: Contender(lambda: t.q)}

    assert set(peers.contenders(case, tensors, (), {"file": File()})) == {"file"}


def test_a_row_has_our_own_unquantised_and_the_share_of_the_copy_rate(case):
    row = run_case("", case, FakeClock(ms=2e-6), LIMITS, BenchOptions(rounds=1, wanted=("unquantised",)))
    assert (row.failed, row.best_peer) == (False, "unquantised")
    assert [f.name for f in row.contenders] == [OURS, PREPARED, "unquantised"]
    found = row.figures(OURS)
    assert found.tbs == pytest.approx(case.read_bytes() / 2e-6 / 1e9)
    assert row.read_bytes == case.read_bytes() < case.unquantised().read_bytes()
    assert (row.limit, found.of_floor) == ("copy", pytest.approx(found.tbs / LIMITS.copy_tbs))
    assert found.ratio == pytest.approx(1.0)
    wide, size = row.figures("unquantised"), case.unquantised().read_bytes()  # what it reads is more
    assert wide.tbs == pytest.approx(size / 2e-6 / 1e9)
    assert (wide.of_floor, row.case) == (pytest.approx(wide.tbs / LIMITS.copy_tbs), case)


def test_a_plot_has_a_panel_for_each_format():
    rows = [
        made("paged-quantised", case, figures(OURS, 1.0)) for case in SETS["paged-quantised"] if case.page_size == 16
    ]
    assert {facet for facet, _ in panels(rows)} == {
        f"bf16, pages of 16, {kind}"
        for kind in ("e4m3, scales head", "e4m3, scales token", "int8, scales token", "int4, scales token",
                     "e4m3, scales inline", "int8, scales inline", "int4, scales inline")
    }  # fmt: skip
