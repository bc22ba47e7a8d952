"""`gluon_forward` over pages, without a chip: when it is planned, what it refuses, and what its launches are."""

import datetime
import itertools
import re
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from test_gluon_backward import problem as backward_problem
from test_gluon_forms import plan_of
from test_gluon_forms import problem as forms_problem
from test_gluon_forms import problem as forward_problem

from portattn import Problem, Toolchain
from portattn.backends.cuda import schedules
from portattn.backends.cuda.hopper_backward import variant as backward
from portattn.backends.cuda.hopper_forward import variant
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant, heads_of
from portattn.backends.cuda.schedule_tunables import ForwardTunable, ScheduledVariant
from portattn.backends.cuda.schedules import TIMED_WITH
from portattn.compile.ensure_compiled import compile_in
from portattn.compile.variants import variant_of
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.tuning import Entry, ProblemFigures, Source, Tuning
from portattn.tools.tune.classes import parse, workload

SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
VARIANT = ForwardVariant()
CHUNKS = Problem(
    op="paged_attention", batch=4, heads_q=32, heads_k=8, seq_q=512, seq_k=8192, head_dim=128, dtype="bf16",
    page_size=64, seqlens_k=True, causal="bottom_right", return_lse=True,
)  # fmt: skip
MIXED = msgspec.structs.replace(CHUNKS, batch=68, total_q=2112)


def problem(base=CHUNKS, **fields):
    return msgspec.structs.replace(base, **fields)


E4M3 = problem(kv_format="e4m3", kv_scales="head")
E5M2 = problem(MIXED, kv_format="e5m2", page_size=16, head_dim=64, head_dim_v=64)


@pytest.mark.parametrize("p", [CHUNKS, MIXED, problem(page_size=16), problem(batch=1), E4M3, E5M2], ids=str)
def test_chunks_over_pages_run_on_it(p):
    made = plan(p, SM_90)
    assert made.path == VARIANT.name, made.explain()
    assert made.schedule["splits"] == 1


DECODING = {"batch": 64, "seq_q": 1}
DENSE = {"op": "decode_attention", "page_size": 0, "seq_k": 8190, "batch": 8, "seq_q": 4}
FEW = {"batch": 4, "seq_q": 4, "seq_k": 1024}


@pytest.mark.parametrize(("fields", "splits"), [
    ({**DECODING, "window_left": 1023}, 1), ({**FEW, "seq_k": 4096}, 4), ({**FEW, "seq_k": 4096, "total_q": 16}, 4),
    ({"batch": 1, "seq_q": 16, "seq_k": 32768, "sinks": True}, 16), ({"batch": 64, "seq_q": 4, "total_q": 256}, 1),
    ({**DENSE, "seq_q": 5}, 2), ({**DENSE, "window_left": 4095}, 2), ({**DENSE, "tree_mask": True}, 2),
    ({**DENSE, "head_dim": 256, "head_dim_v": 256}, 2), ({"batch": 8, "seq_q": 16, "total_q": 128}, 2),
    ({**FEW, "seq_k": 4096, "seq_q": 64, "tree_mask": True}, 2), ({**DENSE, "seq_q": 33, "causal": "top_left"}, 1),
], ids=str)  # fmt: skip
def test_few_rows_share_their_keys(fields, splits):
    made = plan(problem(**fields), SM_90)
    assert (made.path, made.schedule["splits"]) == (VARIANT.name, splits), made.explain()


@pytest.mark.parametrize(("fields", "rows"), [({}, (4, 32, 4)), ({"total_q": 16}, (1, 32, 16))])
def test_partial_results_have_a_place_for_each_row(fields, rows):
    made = VARIANT.described(meta_call(problem(**FEW | {"seq_k": 4096}, **fields)))
    assert {name: shape for name, (shape, _) in made.buffers.items()} == {
        "partial": (4, *rows, 128), "partial_lse": (4, *rows),
    }  # fmt: skip


@pytest.mark.parametrize(("fields", "why"), [
    (DECODING, "489 and 490 for 64"), ({**DECODING, "total_q": 64}, "489 and 490 for 64"),
    ({**DECODING, "window_left": 1023, "kv_format": "e4m3"}, "65 and 71 with a window of 1,024"),
    ({**DECODING, "window_left": 199, "batch": 256}, "from 512 keys of a sequence, and 100,000 of all"),
    (FEW, "and 100,000 of all sequences and key heads, on"),
    ({"batch": 64, "seq_q": 4, "heads_q": 24}, "a tile has few rows: of 3 heads of a key head it takes 1 together"),
    ({"batch": 1, "seq_q": 128, "seq_k": 131072, "head_dim": 96, "head_dim_v": 96}, "keys of 96 columns are not split"),
    (DENSE, "over a contiguous cache the core is as fast with up to 16 rows"),
    ({**FEW, "total_q": 16, "window_left": 99, "seq_k": 8192}, "from 512 keys of a sequence"),
])  # fmt: skip
def test_what_the_core_is_faster_at_is_left_to_it(fields, why):
    made = plan(problem(**fields), SM_90)
    assert made.path == "triton"
    assert why in " ".join(made.notes)
    assert plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name)).path == VARIANT.name


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page_size": 8}, "takes pages of a multiple of 16 tokens, not 8"),
        ({"tree_mask": True, "seq_q": 16, "window_left": 9}, "takes no tree mask with a window"),
        ({"page_size": 24, "seq_k": 240}, "takes pages of a multiple of 16 tokens, not 24"),
        ({"page_size": 1}, "takes pages of a multiple of 16 tokens, not 1"),
        ({"kv_format": "int8", "kv_scales": "head"}, "takes caches of e4m3 or e5m2 numbers, not int8"),
        ({"kv_format": "e4m3", "kv_scales": "token"}, "takes e4m3 caches with scales of a head, not of a token"),
        ({"kv_format": "e4m3", "head_dim": 256, "head_dim_v": 256}, "takes e4m3 heads of 64 or 128 columns, not 256"),
        ({"num_splits": 2}, "takes no num_splits"),
        ({"needs_grad": True}, "takes no needs_grad"), ({"bias": True}, "takes no bias"),
        ({"head_dim": 320, "head_dim_v": 320}, "takes heads of at most 256 columns, not 320"),
        ({"head_dim_v": 64}, "takes K and V of one width, not 128 and 64"),
        ({"seq_k": 0}, "seq_k is 0: there is nothing to read through a descriptor"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_do_it_refuses_by_name(fields, reason):
    with pytest.raises(PathUnavailable) as no:
        plan(problem(**fields), SM_90, settings=Settings(backend=VARIANT.name))
    assert no.value.rejected[-1].reason == reason


def seen(p):
    pytest.importorskip("triton.experimental.gluon")
    (one,) = signatures(VARIANT, meta_call(p))
    return one


@pytest.mark.parametrize(
    ("fields", "block"),
    [
        ({"page_size": 16}, [1, 1, 16, 64]),  # a load for each of eight pages
        ({"page_size": 48, "seq_k": 480}, [1, 1, 16, 64]),  # the power of two in a page never crosses its end
        ({"page_size": 64}, [1, 1, 64, 64]),
        ({"page_size": 128}, [1, 1, 128, 128]),  # a tile in one load
        ({"page_size": 256}, [1, 1, 128, 128]),
        ({"page_size": 384, "seq_k": 3840}, [1, 1, 128, 128]),
        ({"page_size": 16, "head_dim": 256, "head_dim_v": 256}, [1, 1, 16, 64]),
        ({"page_size": 64, "head_dim": 256, "head_dim_v": 256}, [1, 1, 64, 256]),  # tiles of 64 keys
        ({"page_size": 32, "head_dim": 40, "head_dim_v": 40}, [1, 1, 32, 64]),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_layout", ["phd", "hpd"])
def test_a_load_never_crosses_the_end_of_a_page(fields, block, page_layout):
    one = seen(problem(**fields, page_layout=page_layout))
    for name in ("k_desc", "v_desc"):
        assert one.types[name].startswith(f"tensordesc<bf16{block},NVMMASharedLayout(")
    assert one.constants["PAGE"] == fields["page_size"]
    assert fields["page_size"] % block[2] == 0


@pytest.mark.parametrize(
    ("heads_q", "heads_k", "together"), [(32, 8, 4), (8, 8, 1), (12, 2, 2), (10, 2, 1), (64, 1, 64), (128, 1, 64)]
)
def test_heads_of_one_key_head_share_tiles(heads_q, heads_k, together):
    p = problem(MIXED, heads_q=heads_q, heads_k=heads_k)
    assert heads_of(p) == together
    one = seen(p)
    assert one.types["q_desc"].startswith(f"tensordesc<bf16[1, {64 // together}, {together}, 128],")
    assert (one.constants["HEADS"], one.constants["VARYING"]) == (together, "packed_q")
    assert heads_of(problem(op="attention", page_size=0, heads_q=heads_q, heads_k=heads_k)) == 1


def test_lengths_of_queries_in_a_batch_are_the_batch_s():
    one = seen(CHUNKS)
    assert (one.constants["VARYING"], one.constants["lengths_q"]) == ("padded_k", None)
    assert one.types["page_table"] == one.types["lengths_k"] == "*i32"
    assert one.types["table_stride"] == "i32"


def test_without_pages_the_kernel_has_none_of_it():
    """Its arguments are constants, so that the code is what it was."""
    one = seen(problem(op="attention", page_size=0, seqlens_k=False))
    assert (one.constants["page_table"], one.constants["table_stride"]) == (None, None)
    assert (one.constants["PAGE"], one.constants["HEADS"]) == (0, 1)
    assert one.types["k_desc"].startswith("tensordesc<bf16[1, 1, 128, 128],")
    assert one.types["q_desc"].startswith("tensordesc<bf16[1, 1, 64, 128],")


GROWTHS = (0.0, 0.7, 3.0, 7.9, 8.1, 40.0)


def _attention(scores, values, reference):
    """Tiles of 16 keys, from the last to the first, with weights relative to `reference`: the results, the LSEs in
    powers of 2, how often an accumulator's row was rescaled, and the largest weight."""
    rows, keys = scores.shape
    base = np.full(rows, -np.inf)
    total, acc, rescaled, largest = np.zeros(rows), np.zeros((rows, values.shape[1])), 0, 0.0
    for n in range(keys // 16 - 1, -1, -1):
        tile = scores[:, 16 * n : 16 * n + 16]
        new = reference(base, tile.max(1))
        finite = np.where(np.isneginf(new), 0.0, new)
        factor = np.exp2(base - finite)
        weights = np.exp2(tile - finite[:, None])
        rescaled += int(((factor != 1.0) & ~np.isneginf(base)).sum())
        largest = max(largest, float(weights.max()))
        total = total * factor + weights.sum(1)
        acc = acc * factor[:, None] + weights @ values[16 * n : 16 * n + 16]
        base = new
    some = total > 0
    safe = np.where(some, total, 1.0)
    return acc / safe[:, None], np.where(some, base + np.log2(safe), -np.inf), rescaled, largest


@pytest.mark.parametrize("growth", GROWTHS)
def test_the_result_is_the_same_and_weights_stay_small(monkeypatch, growth):
    """The kernel's own choice of the reference, on plain numbers."""
    rescaling = pytest.importorskip("portattn.backends.cuda.hopper_forward.fragments")
    monkeypatch.setattr(rescaling, "gl", SimpleNamespace(where=np.where))
    monkeypatch.setattr(rescaling, "GROWTH", 8.0)
    random = np.random.default_rng(1)
    scores = random.normal(size=(24, 256)) + growth * (15 - np.arange(256)[None, :] // 16)
    scores[3, 100:] = -np.inf  # sees nothing at first
    scores[4, :200] = -np.inf  # nothing at last
    scores[5] = -np.inf  # nothing at all
    scores[6] = -scores[6]  # maxima that fall
    values = random.normal(size=(256, 8))
    found, lse, rescaled, largest = _attention(scores, values, rescaling.reference.fn)
    wanted, wanted_lse, always, _ = _attention(scores, values, np.maximum)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-13, atol=1e-12)
    assert not found[5].any()
    assert np.isneginf(lse[5])
    assert largest <= 2.0**8
    if growth <= 0.7:
        assert rescaled <= 2 * 24  # at most as often as all that it grows by has room for
        assert always > 24
    if growth >= 12:
        assert rescaled == always
        assert largest <= 1.0


FORMS = [("ragged", 64, "bottom_right", True), ("plain", 128, "none", False), ("packed", 256, "bottom_right", True)]


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal", "late"), FORMS, ids=str)
def test_a_warp_without_growth_leaves_its_accumulator_alone(gluon_compiler, gluon_target, form, head_dim, causal, late):
    p = forms_problem(form, head_dim, causal)
    schedule = msgspec.structs.replace(variant.choice(p).schedule, lazy=True, late=late)
    signature, *_ = signatures(ScheduledVariant(ForwardTunable(), schedule), meta_call(p))
    assert signature.constants["LAZY"] is True
    reply = compile_in(gluon_compiler, signature, plan_of(p, gluon_target), gluon_target, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    votes = re.findall(
        r"vote\.sync\.any\.pred .*?\n(.*?)@!some bra\.uni KEPT;\n(.*?)KEPT:", str(reply.facts["ptx"]), re.S
    )
    assert votes
    for kept, multiplied in votes:
        moves = re.findall(r"mov\.b32 (%\w+), (%\w+);", kept)
        assert len(moves) == head_dim // 2
        assert all(to == of for to, of in moves), "nothing moves from one register to another"
        products = re.findall(r"mul\.f32 (%\w+), (%\w+), (%\w+);", multiplied)
        assert [to for to, _, _ in products] == [of for _, of, _ in products] == [to for to, _ in moves]
        # Two numbers of one row, two of the other: the factors that were voted on are all that there are.
        assert [factor for _, _, factor in products[:4]] * (head_dim // 8) == [factor for _, _, factor in products]
        assert products[0][2] == products[1][2] != products[2][2] == products[3][2]


@pytest.mark.compiles
@pytest.mark.parametrize(("form", "head_dim", "causal", "late"), FORMS[1:2], ids=str)
def test_no_product_waits_for_the_branch(gluon_compiler, gluon_target, form, head_dim, causal, late):
    p = forms_problem(form, head_dim, causal)
    chosen = variant.choice(p)
    spilled = []
    for schedule in (chosen.schedule, msgspec.structs.replace(chosen.schedule, lazy=True, late=late)):
        signature, *_ = signatures(ScheduledVariant(ForwardTunable(), schedule), meta_call(p))
        reply = compile_in(gluon_compiler, signature, plan_of(p, gluon_target), gluon_target, 120.0, "full")
        assert reply.outcome == "ok", reply.message
        assert "serialized_wgmma" not in reply.facts
        spilled.append(reply.facts["spills"])
    assert spilled[1] <= spilled[0]


NEWER = "triton==3.8.0"
FORWARD = {
    "groups": 2, "keys": 64, "stages": 4, "turns": True, "late": True, "early": False, "pairs": True, "own_out": True,
}  # fmt: skip
BACKWARD = {"keys": 64, "stages": 2, "messages": 0}
FORWARD_PROBLEM = forward_problem("plain", 128, "none")
BACKWARD_PROBLEM = backward_problem(causal="bottom_right")


@pytest.fixture
def rows(monkeypatch):
    """Entries that 3.8.0 was timed with, in front of those of 3.6.0."""
    source = Source(
        chip="NVIDIA H200", toolchain=NEWER, date=datetime.date(2026, 11, 24), measured=True,
        figures=(ProblemFigures(problem="made up for this test", us=1.0),),
    )  # fmt: skip
    own = tuple(
        Entry(kernel=name, when=("widest<=128",), toolchain={"triton": ">=3.8"}, flags=flags, provenance=source)
        for name, flags in (("gluon_forward", FORWARD), ("gluon_backward", BACKWARD))
    )
    shipped = schedules.tuning()
    changed = Tuning(provenance=shipped.provenance, entry=(*own, *shipped.entry))
    for module in (schedules, variant):
        monkeypatch.setattr(module, "tuning", lambda: changed)


def planned(problem, release):
    made = plan(problem, parse_target("cuda:sm_90", release))
    assert made.path in ("gluon_forward", "gluon_backward"), made.explain()
    return made


def timed(made):
    return [note for note in made.notes if note.startswith("chosen by times with")]


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("problem", "flags"), [(FORWARD_PROBLEM, FORWARD), (BACKWARD_PROBLEM, BACKWARD)], ids=["forward", "backward"]
)
def test_a_release_has_rows_of_its_own(problem, flags):
    old, new, newest = (planned(problem, f"triton=={version}") for version in ("3.6.0", "3.8.0", "3.9.0"))
    assert {name: new.schedule[name] for name in flags} == flags
    assert {name: old.schedule[name] for name in flags} != flags
    assert newest.schedule == new.schedule
    # Each plan says what its schedule was timed with where that is another release.
    assert timed(old) == timed(new) == []
    (said,) = timed(newest)
    assert said.startswith(f"chosen by times with {NEWER}, not with triton==3.9.0")
    (before,) = timed(planned(problem, "triton==3.7.1"))
    assert before.startswith(f"chosen by times with {TIMED_WITH}, not with triton==3.7.1")


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("problem", [FORWARD_PROBLEM, BACKWARD_PROBLEM], ids=["forward", "backward"])
def test_what_is_launched_is_what_the_plan_says(problem):
    pytest.importorskip("triton.experimental.gluon")
    for release in ("3.6.0", "3.8.0"):
        made = planned(problem, f"triton=={release}")
        (main,) = (s for s in signatures(variant_of(made), meta_call(problem)) if s.function in MAIN)
        assert (main.constants["KEYS"], main.constants["STAGES"]) == (made.schedule["keys"], made.schedule["stages"])


MAIN = ("scheduled_forward", "scheduled_backward")


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.10.0"])
def test_every_backward_has_a_schedule(release):
    toolchain = Toolchain.parse(f"triton=={release}")
    for dim, causal, left, deterministic, rows in itertools.product(
        (8, 64, 72, 128, 136, 256), ("none", "bottom_right", "top_left"), (-1, 40), (False, True), (333, 8192)
    ):
        p = backward_problem(
            head_dim=dim, head_dim_v=dim, causal=causal, window_left=left, deterministic=deterministic, seq_q=rows,
            seq_k=rows, heads_q=16, heads_k=16,
        )  # fmt: skip
        chosen, timed_with = backward.choice(p, toolchain)
        turns = deterministic and dim <= 128 and backward.in_turns(p, chosen.keys)
        assert chosen.turns is turns
        assert turns or not (deterministic and dim <= 128 and rows == 8192)
        assert (chosen.messages == 0) is ((deterministic and not turns) or dim > 128)
        if deterministic:  # no release's own schedules: what was searched was not repeatable
            assert (chosen.stages == 3) is (dim <= 64 and chosen.messages > 0 and (causal != "none" or left >= 0))
        assert bool(timed_with) is (not deterministic or dim > 128)


def test_nothing_runs_without_a_schedule(monkeypatch):
    shipped = schedules.tuning()
    bare = msgspec.structs.replace(shipped, entry=tuple(e for e in shipped.entry if e.kernel != "gluon_backward"))
    monkeypatch.setattr(schedules, "tuning", lambda: bare)
    with pytest.raises(LookupError, match="gluon_backward has no schedule"):
        backward.choice(BACKWARD_PROBLEM, TIMED_WITH)


def test_a_variant_is_asked_for_a_compiler():
    made = variant.ForwardVariant()
    assert made.for_toolchain(TIMED_WITH) is made
    other = made.for_toolchain(Toolchain.parse(NEWER))
    assert (other.name, other.toolchain) == (made.name, Toolchain.parse(NEWER))


def test_what_was_timed_takes_the_entry_that_says_so():
    """An entry behind another that holds for the same problems would never be used, whatever was timed for it."""
    found = schedules.tuning()
    seen = 0
    for entry in found.entry:
        source = entry.provenance
        if not entry.kernel.startswith("gluon_") or source is None:
            continue
        toolchain = Toolchain.parse(source.toolchain)
        for figure in source.figures:
            if not figure.problem.startswith(("attention ", "attention_backward ")):
                continue  # a name of the benchmark's sets
            problem = workload(parse(figure.problem)).problem
            assert found.find(entry.kernel, problem.features(), toolchain, variant=True) is entry, figure.problem
            assert found.timed_with(entry) == source.toolchain
            seen += 1
    assert seen == 47


@pytest.mark.parametrize("release", ["3.6.0", "3.7.1", "3.8.0", "3.9.0"])
def test_gradients_of_grouped_heads_and_repeatable_ones_have_no_release_of_their_own(release):
    """Which blocks add to dQ at a time depends on both, and neither was searched by release. 3.7.1 takes no groups."""
    toolchain = Toolchain.parse(f"triton=={release}")
    for dim, causal, rows, (heads_k, repeats) in itertools.product(
        (64, 128), ("none", "bottom_right"), (512, 1024, 4096, 16384), ((2, False), (16, True), (2, True))
    ):
        p = backward_problem(
            head_dim=dim, head_dim_v=dim, causal=causal, deterministic=repeats, seq_q=rows, seq_k=rows, heads_q=16,
            heads_k=heads_k,
        )  # fmt: skip
        found, apart = backward.choice(p, toolchain).schedule, release != "3.7.1" and not repeats and rows > 512
        assert found == backward.choice(p, Toolchain.parse(f"triton=={'3.6.0' if apart else '3.7.1'}")).schedule
        assert found.apart is apart
