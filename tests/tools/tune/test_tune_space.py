"""The table of axes, and what the rules leave out."""

from pathlib import Path

import pytest
from places import tables

from portattn.errors import DataError
from portattn.planning.data_files import check_launch_values
from portattn.planning.kernel_specs import CORES
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import CHOICES, OF_ROWS
from portattn.tools.tune import core as tune_core
from portattn.tools.tune.classes import UNTUNED, parse, workload
from portattn.tools.tune.core import Axis, candidates, left_out, spaces
from portattn.tools.tune.run import tunables
from portattn.tools.tune.tunable import Choice

TABLES = tables(__file__)

DENSE = "attention q=4,16,4096,{dim} kv=4,16,4096,{dim} dtype={dtype} causal"
TUNED = [kernel for kernel in CORES.values() if kernel.op not in UNTUNED]
SEARCHED = [kernel.name for kernel in TUNED]
ROWS = tuple(OF_ROWS.values())
# Of gradients the two kernels are swept one after the other.
SWEEPS = [
    (kernel.name, sweep)
    for kernel in TUNED
    for sweep in (({"without": ROWS}, {"among": ROWS}) if kernel.of_rows else ({},))
]
PROBLEMS = {
    "dense_forward": DENSE.format(dim=128, dtype="bf16"),
    "dense_backward": "attention_backward q=4,16,4096,128 kv=4,16,4096,128 causal",
    "varlen_backward": "varlen_attention_backward q=4,16,1024,64 kv=4,16,1024,64",
    "varlen_forward": "varlen_attention q=4,16,1024,64 kv=4,16,1024,64",
    "decode_split": "decode_attention q=8,32,1,128 kv=8,8,4096,128",
    "paged_split": "paged_attention q=8,32,1,128 kv=8,8,4096,128 page_size=64",
    "mla_split": "mla_attention q=8,128,1,576 kv=8,1,4096,576 head_dim_v=512 page_size=64",
    "sparse_split": "sparse_attention q=1,32,1,128 kv=1,8,32000,128 tokens=640",
}
TARGETS = [
    parse_target(name, "triton-ascend==3.2.0" if name.startswith("ascend") else "triton==3.6.0")
    for name in ("cuda:sm_90", "cuda:sm_80", "rocm:gfx942", "rocm:gfx1201", "ascend:ascend910b2")
]


def problem(text: str):
    return workload(parse(text)).problem


def test_every_kernel_of_a_function_has_a_space():
    assert set(spaces()) == set(SEARCHED)
    assert {one.name for target in TARGETS for one in tunables(target)} >= set(SEARCHED)


@pytest.mark.parametrize(("axis", "message"), TABLES["an_unsound_axis_is_named"])
def test_an_unsound_axis_is_named(axis: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "axes.toml"
    file.write_text(tune_core.AXES.read_text().replace("sparse = [\n", f"sparse = [\n  {{ {axis} }},\n"))
    line = file.read_text().splitlines().index("sparse = [") + 1
    with pytest.raises(DataError, match=rf"axes\.toml:{line}: key 'axes\.sparse': .*{message}"):
        spaces(file)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.arch.name)
@pytest.mark.parametrize(("kernel", "sweep"), SWEEPS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_candidate_is_an_entry_that_a_reader_takes(kernel, sweep, target):
    p = problem(PROBLEMS[kernel])
    core = CORES[p.op]
    entry = Registry.load().tuning(target).find(kernel, p.features(), target.toolchain)
    base = Choice(launch=dict(entry.launch), lowering=dict(entry.lowering), occupancy=entry.occupancy)
    found = list(candidates(kernel, core.choices, p, target, base, **sweep))
    assert len(found) > 1
    assert len({choice.key for choice in found}) == len(found)
    for choice in found:
        check_launch_values(dict(choice.launch), target.backend, rows=bool(core.of_rows))
        assert all(value in CHOICES[name] for name, value in choice.lowering.items())
        # What no axis names stays as it is today.
        free = {axis.name for axis in spaces()[kernel]}
        assert {n: v for n, v in choice.settings.items() if n not in free} == {
            n: v for n, v in base.settings.items() if n not in free
        }
    distances = [choice.differs(base) for choice in found]
    assert distances == sorted(distances)
    assert not all(left_out(choice, p, target) for choice in found), "the rules leave nothing"


def test_of_axes_with_one_name_the_first_that_applies_counts():
    target = TARGETS[0]

    def tiles(dim, dtype):
        p = problem(DENSE.format(dim=dim, dtype=dtype))
        return next(axis.values for axis in tune_core.axes_of("dense_forward", p, target) if axis.name == "block_m")

    found = [tiles(*one) for one in ((128, "bf16"), (512, "bf16"), (64, "fp32"))]
    assert found == [(64, 128), (16, 32, 64), (16, 32, 64, 128)]


def test_a_quantised_cache_has_small_tiles_and_buffers_of_bytes():
    plain, narrow = (problem(PROBLEMS["paged_split"] + text) for text in ("", " kv_format=e4m3 kv_scales=token"))

    def values(name, p):
        return next(axis.values for axis in tune_core.axes_of("paged_split", p, TARGETS[0]) if axis.name == name)

    assert (values("block_n", plain), values("block_n", narrow)) == ((32, 64, 128), (16, 32, 64, 128))
    assert (values("num_stages", plain), values("num_stages", narrow)) == ((2, 3, 4, 6), (1, 2, 3, 4, 6))
    deep = Choice(launch={"block_m": 16, "block_n": 128, "num_stages": 6})
    assert "K and V tiles alone take 327680 bytes" in left_out(deep, plain, TARGETS[0])
    assert left_out(deep, narrow, TARGETS[0]) == ""


def test_an_axis_that_is_added_is_searched(monkeypatch):
    target, p = TARGETS[0], problem(PROBLEMS["decode_split"])
    before = len(list(candidates("decode_split", CORES[p.op].choices, p, target, Choice())))
    monkeypatch.setitem(spaces(), "decode_split", (*spaces()["decode_split"], Axis("grid", ("tiles", "persistent"))))
    assert len(list(candidates("decode_split", CORES[p.op].choices, p, target, Choice()))) == 2 * before


@pytest.mark.parametrize(("launch", "why"), TABLES["rules"])
def test_rules(launch, why):
    said = left_out(Choice(launch=launch), problem(PROBLEMS["dense_forward"]), TARGETS[0])
    assert (why in said, bool(said)) == (True, bool(why))
