"""Which cells a run has."""

import sys

import pytest
from places import ROOT

from portattn.errors import ArgumentError, DataError
from portattn.planning.registry import Registry
from portattn.schema.ops import ROWS
from portattn.schema.problem_limits import OPS
from portattn.schema.toolchain import Toolchain, installed_toolchain
from portattn.tools import lab
from portattn.tools.matrix import select
from portattn.tools.matrix.problems import SETS, full, quick, read_shapes

ASCEND = Toolchain.parse("triton-ascend==3.1.0")
SHAPES = ROOT / "examples" / "ci" / "shapes.toml"


def test_the_full_set_covers_what_it_says():
    found = [named.problem for named in full()]
    assert {(p.dtype, p.head_dim, p.causal) for p in found if p.op == "attention"} >= {
        (dtype, dim, causal) for dtype in ("fp16", "bf16", "fp32") for dim in (32, 64, 80, 96, 128, 192, 256)
        for causal in ("none", "bottom_right", "top_left")
    }  # fmt: skip
    assert {p.page_size for p in found if p.op == "paged_attention"} == {1, 16, 48, 64, 128, 256}
    latent = {(p.head_dim, p.head_dim_v) for p in found if p.op == "mla_attention"}
    assert latent == {(576, 512), (288, 256), (512, 512)}
    assert {p.seq_q for p in found if p.op == "mla_attention"} >= {1, 2}


NOTHING = (False, None, "none", "bhsd", "phd")  # and 0, which equals False
# What the full set leaves out: layouts are strides, which `attention` has; the kernel of pages reads a latent cache.
LEFT_OUT = {op: {"layout"} for op in OPS if op != "attention"}
LEFT_OUT["mla_attention"] |= {"window", "chunk", "softcap", "alibi_slopes", "sinks", "bias", "mask"}


@pytest.mark.parametrize("op", OPS)
def test_the_full_set_asks_each_op_for_everything_it_takes(op):
    found = [named.problem for named in full() if named.problem.op == op]
    asked = {name for name in ROWS[op].options for p in found if getattr(p, name) not in NOTHING}
    assert asked == set(ROWS[op].options) - LEFT_OUT.get(op, set())


@pytest.mark.parametrize("which", SETS)
def test_problems_are_of_every_op_with_names_of_their_own_and_such_as_a_call_can_have(which):
    names, problems = zip(*((named.name, named.problem) for named in SETS[which]()), strict=True)
    assert (len(set(names)), len(set(problems))) == (len(names), len(problems))
    assert list(dict.fromkeys(problem.op for problem in problems)) == list(OPS)
    for named in SETS[which]():
        p = named.problem
        assert p.seqlens_k or not ROWS[p.op].always_lengths, named.name
        assert not p.page_size or p.seq_k % p.page_size == 0, named.name
        assert p.total_q is None or p.seq_q <= p.total_q <= p.batch * p.seq_q, named.name
        assert p.window_right == -1 or p.causal == "none", named.name
        rows_follow = ROWS[p.op].always_lengths and (p.page_layout == "phd" or p.heads_k == 1)
        assert not p.pages_in_line or rows_follow, named.name


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("rocm:gfx942", {"rocm:gfx942"}), ("gfx9*", {"rocm:gfx90a", "rocm:gfx942", "rocm:gfx950"}),
        ("cpu", {"cpu:generic"}), ("hopper", {"cuda:sm_90"}), ("cuda:hopper", {"cuda:sm_90"}),
        ("rdna4", {"rocm:gfx1200", "rocm:gfx1201"}),
    ],
)  # fmt: skip
def test_globs_mean_a_name_a_backend_or_an_arch(glob, expected):
    assert {t.name for t in select.targets([glob], [], None)} == expected


def test_the_quick_set_has_one_target_of_those_that_are_tuned_alike():
    registry = Registry.load()
    every = {t.name for t in select.targets([], [], None, "full")}
    quick = {t.name for t in select.targets([], [], None, "quick")}
    assert every == {t.name for t in registry.targets("none")} | {"cpu:generic"}
    assert quick < every
    for backend, arches in registry.arches.items():
        tuned = {f"{backend}:{name}" for name, arch in arches.items() if not arch.tuning and not arch.refused}
        assert tuned <= quick, "an arch with tuning of its own"
    for name in every - quick:
        backend, arch = name.partition(":")[0], registry.arch(name)
        own = registry.arches[backend].values()
        kin = [f"{backend}:{other.name}" for other in own if arch.families[0] in other.families]
        assert arch.tuning
        assert quick & set(kin), f"{name} is left out, and nothing of {arch.families[0]} is there"
    assert {t.name for t in select.targets(["gfx1102"], [], None, "quick")} == {"rocm:gfx1102"}


def test_every_target_gets_the_compiler_that_compiles_for_it():
    for target in select.targets([], [], None):
        if target.backend == "ascend":
            assert str(target.toolchain) == "triton-ascend==3.2.0"
        else:
            assert str(target.toolchain) == str(installed_toolchain())
    assert str(select.targets(["ascend910b2"], [], ASCEND)[0].toolchain) == str(ASCEND)


def test_toolchains_go_to_their_own_targets():
    named = select.toolchains(["triton==3.4.0", "triton==3.9.0", "triton-ascend==3.1.0"])
    found = [(t.name, str(t.toolchain)) for t in select.targets(["sm_90", "ascend910b2"], named, None)]
    assert found == [
        ("cuda:sm_90", "triton==3.4.0"), ("cuda:sm_90", "triton==3.9.0"),
        ("ascend:ascend910b2", "triton-ascend==3.1.0"),
    ]  # fmt: skip


def test_toolchains_are_written_as_the_lab_writes_them_and_taken_once():
    found = select.toolchains(
        ["triton==3.4", "pytorch-triton==3.4.0", "triton==3.6.0,ptxas==13.3.33", "flagtree==0.3.0"]
    )
    assert [str(t) for t in found] == ["triton==3.4.0", "triton==3.6.0", "flagtree==0.3.0"]
    assert found[1].component("ptxas") == "13.3.33"
    assert [str(t) for t in select.toolchains([], every=True)] == list(lab.toolchains())
    assert len(select.toolchains(["triton==3.3.0", "triton==3.4"], every=True)) == len(lab.toolchains()) + 1


def test_environments_that_are_missing_are_those_that_the_cells_need():
    named = select.toolchains(["triton==3.9.0", "triton==3.4.0", str(installed_toolchain())])
    where = select.targets(["sm_90", "ascend910b2"], named, None)
    needed = ["triton==3.9.0", "triton==3.4.0", "triton-ascend==3.2.0"]
    assert select.missing(where, {}) == [name for name in needed if name != str(installed_toolchain())]
    assert select.missing(where, dict.fromkeys(needed[1:], "/a/python")) == needed[:1]
    assert select.missing(select.targets(["sm_90"], select.toolchains(["flagtree==0.3.0"]), None), {}) == []


def test_cells_are_numbered_target_by_target_and_have_ids_of_their_own():
    specs = select.specs(quick(), select.targets(["cuda"], [], None))
    assert [spec.index for spec in specs] == list(range(len(specs)))
    assert len({spec.id for spec in specs}) == len(specs)
    names = [spec.target.name for spec in specs]
    assert names == sorted(names, key=list(dict.fromkeys(names)).index)
    assert select.specs(quick(), select.targets(["cuda"], [], None)) == specs


def test_a_python_without_triton_ascend_is_refused():
    if installed_toolchain().distribution == "triton-ascend":
        pytest.skip("this Python has triton-ascend")
    with pytest.raises(ArgumentError, match="with triton-ascend installed"):
        select.toolchain_of(sys.executable)


def test_problems_are_chosen_by_op_or_by_name():
    assert {n.problem.op for n in select.problems("quick", ["decode_*"])} == {"decode_attention"}
    assert all("fp32" in n.name for n in select.problems("quick", ["*fp32*"]))


@pytest.mark.parametrize(("old", "new", "line", "said"), [
    ("causal", "causals", 10, "causals is True, but is unknown: keys are op, name, q, kv, "),
    ("causal = true", 'causal = "left"', 10, "--causal is 'left', but must be one of bottom_right, top_left, none"),
    ("[1, 32, 4096, 128]", "[1, 32, 4096]", 7, "--q is '1,32,4096', but must be four whole numbers B,H,S,D"),
    ("[1, 8, 4096, 128]", "[1, 7, 4096, 128]", 4, "heads_q is 32, but must be a multiple of the 7 key/value heads"),
    ('"attention"', '"attend"', 6, "op is 'attend', but must be one of attention, "),
    ("page_size = 16", "", 12, "--page-size must be given for paged_attention"),
    ("causal = true", "softcap = nan", 10, "softcap is nan, but must be true or false"),
    ("page_size = 16", "page_size = true", 17, "page_size is True, but must have a value"),
    ("page_size = 16", 'page_size = "x"', 17, "page_size is 'x', but Invalid value for '--page-size'"),
    ("[[problem]]\nname", "[[shape]]\nname", None, r"must have \[\[problem\]\] tables and nothing else"),
    ('"paged_attention"\nq', '"paged_attention"\nname = "prefill"\nq', 14, "name is 'prefill', but must be printable"),
])  # fmt: skip
def test_a_file_of_shapes_is_refused_with_line_and_key(tmp_path, old, new, line, said):
    text = SHAPES.read_text(encoding="utf-8")
    assert text.count(old) == 1
    (tmp_path / "shapes.toml").write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(DataError, match=said) as refused:
        read_shapes(tmp_path / "shapes.toml")
    assert refused.value.line == line


def test_shapes_are_problems_as_plan_makes_them():
    prefill, decode = read_shapes(SHAPES)
    p = prefill.problem
    assert (prefill.name, p.causal, p.heads_q, p.heads_k, p.seq_k) == ("prefill", "bottom_right", 32, 8, 4096)
    assert (decode.name, decode.problem.seqlens_k, decode.problem.pages_in_line) == (str(decode.problem), True, True)
