"""Witnesses of planted entries: every name of the vocabulary can be met, and nothing meets what no call can have."""

import pytest
from quirk_files import plant, registry

from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.schema.conditions import FLAGS, NUMBERS, WORDS, parse
from portattn.tools.quirks import examples

ID = "cuda-0900-planted"
NOTE = 'note = "look"'
KERNELS = {kernel.name: op for op, kernel in CORES.items()}

# Kernel patterns and conditions, and the op on which they are met.
MET = [
    ("*", '"paged"', "paged_attention"), ("*", '"packed"', "varlen_attention"),
    ("*", '"tokens>=300"', "sparse_attention"), ("*", '"page_size=48"', "paged_attention"),
    ("*", '"page_size<16"', "attention"),  # there are no pages: their size is 0
    ("*", '"window", "softcap", "alibi_slopes", "sinks"', "attention"), ("*", '"bias", "mask"', "attention"),
    ("*", '"log_weights", "magicpig"', "sparse_attention"), ("*", '"page_layout=hpd"', "paged_attention"),
    ("*", '"head_dim=576", "head_dim_v=512", "paged"', "paged_attention"), ("*", '"featured", "!softcap"', "attention"),
    ("*", '"featured", "!alibi_slopes", "window"', "attention"), ("sparse_split", '"featured"', "sparse_attention"),
    ("*", '"widest>256", "head_dim<=64"', "attention"), ("*", '"widest<=64", "head_dim_v>=32"', "attention"),
    ("mla_split", '"widest<=288"', "mla_attention"), ("varlen_forward", '"rows>=5000"', "varlen_attention"),
    ("varlen_forward", '"rows<=3", "window"', "varlen_attention"),
    ("paged_split", '"packed", "rows>64", "gqa"', "paged_attention"),
    ("paged_split", '"page_size!=64"', "paged_attention"), ("*_split", '"!paged", "layout=bshd"', "decode_attention"),
    ("sparse_split", '"paged", "page_layout=hpd", "page_size>=128"', "sparse_attention"),
    ("sparse_split", '"tokens<=64", "!seqlens_k"', "sparse_attention"),
    ("mla_split", '"group>=64", "seq_q=2", "causal"', "mla_attention"),
    ("mla_split", '"head_dim<=288", "head_dim_v=256"', "mla_attention"),
]  # fmt: skip
UNMET = [
    ("dense_forward", '"paged"'), ("dense_forward", '"packed"'), ("dense_forward", '"log_weights"'),
    ("dense_forward", '"page_layout=hpd"'), ("varlen_forward", '"!packed"'), ("varlen_forward", '"seqlens_k"'),
    ("varlen_forward", '"bias"'), ("decode_split", '"seqlens_q"'), ("decode_split", '"tokens>8"'),
    ("paged_split", '"!paged"'), ("paged_split", '"!seqlens_k"'), ("sparse_split", '"causal"'),
    ("sparse_split", '"window"'), ("sparse_split", '"mask"'), ("sparse_split", '"seq_q>1"'),
    ("mla_split", '"heads_k>1"'), ("mla_split", '"page_layout=hpd"'), ("mla_split", '"head_dim_v>512"'),
    ("*", '"head_dim>576"'), ("*", '"widest<64", "head_dim>=64"'),
    ("sparse_split", '"featured", "!softcap", "!alibi_slopes"'), ("*", '"paged", "page_size=0"'),
]  # fmt: skip


def planted(folder, kernels, features, more=""):
    plant(folder, ID, NOTE, f'kernels = ["{kernels}"]\nfeatures = [{features}]\n{more}')
    known = registry(folder)
    return known.quirks[ID], known


@pytest.mark.parametrize(("kernels", "features", "op"), MET)
def test_conditions_are_met_by_a_problem_that_is_planned_there(tmp_path, kernels, features, op):
    quirk, known = planted(tmp_path, kernels, features)
    found = examples.find(quirk, known)
    assert (KERNELS[found.kernel], found.problem.op) == (op, op)
    values = found.problem.features()
    assert all(parse(text).holds(values) for text in quirk.when.features)
    placed, target = found.place(known)
    assert [a.id for a in plan(found.problem, target, placed).quirks] == [ID]
    # Points outside break one condition.
    broken = 0
    for point in examples.outside(quirk, known):
        values = point.problem.features()
        false = [text for text in quirk.when.features if not parse(text).holds(values)]
        assert false == ([point.broken.removeprefix("feature ")] if point.broken.startswith("feature ") else [])
        placed, target = point.place(known)
        assert not plan(point.problem, target, placed).quirks
        broken += 1
    assert broken


@pytest.mark.parametrize(("kernels", "features"), UNMET)
def test_what_no_call_can_have_is_met_by_nothing(tmp_path, kernels, features):
    quirk, known = planted(tmp_path, kernels, features)
    with pytest.raises(ValueError, match="nothing known meets"):
        examples.find(quirk, known)


@pytest.mark.parametrize("name", sorted(FLAGS))
@pytest.mark.parametrize("wanted", [True, False])
def test_every_flag_can_be_met(tmp_path, name, wanted):
    quirk, known = planted(tmp_path, "*", f'"{name}"' if wanted else f'"!{name}"')
    assert bool(examples.find(quirk, known).problem.features()[name]) is wanted


@pytest.mark.parametrize(("name", "word"), [(name, word) for name in sorted(WORDS) for word in sorted(WORDS[name])])
def test_every_word_can_be_met(tmp_path, name, word):
    quirk, known = planted(tmp_path, "*", f'"{name}={word}"')
    assert examples.find(quirk, known).problem.features()[name] == word


@pytest.mark.parametrize("name", sorted(NUMBERS - {"programs"}))
@pytest.mark.parametrize("condition", ["=7", ">=7", "<7", "!=7"])
def test_every_number_can_be_met(tmp_path, name, condition):
    quirk, known = planted(tmp_path, "*", f'"{name}{condition}"')
    assert parse(f"{name}{condition}").holds(examples.find(quirk, known).problem.features())


@pytest.mark.parametrize("value", ["per_page", "flat_masked"])
def test_a_choice_is_asked_of_a_kernel_that_reads_it(tmp_path, value):
    quirk, known = planted(tmp_path, "*_split", "", f'lowering = {{ page_loop = "{value}" }}')
    found = examples.find(quirk, known)
    assert found.kernel == "paged_split"
    placed, target = found.place(known)
    made = plan(found.problem, target, placed)
    assert (made.lowering.page_loop, [a.id for a in made.quirks]) == (value, [ID])
    (outside,) = [point for point in examples.outside(quirk, known) if point.broken == "lowering page_loop"]
    assert outside.lowering["page_loop"] != value
