"""The page: complete, footnoted, self-contained, and safe whatever a compiler printed."""

import re
from collections import Counter

import msgspec
import pytest
from handmade import make_run
from markupsafe import escape

from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.problem_limits import OPS
from portattn.testing.findings import Gate, KernelFacts, Numerics
from portattn.tools.matrix.cell_text import brief, steps, witness, word
from portattn.tools.matrix.cells import Footnote, PlanSummary
from portattn.tools.matrix.problems import RAGGED, NamedProblem, decode, dense, mla, paged, quick, sparse, varlen
from portattn.tools.matrix.results import merge
from portattn.tools.matrix.run import summary
from portattn.tools.matrix.site import BAND, link, markdown, render, sizes

SLOW = Footnote(
    id="rocm-0001-slow", role="applied", sentence="tiles spill (slow); sets block_n = 32", upstream="unreported",
    sets={"block_n": 32},
)  # fmt: skip
WRONG = Footnote(
    id="cuda-0002-wrong", role="rejected", sentence="wrong sums",
    upstream="https://github.com/triton-lang/triton/issues/1, open",
)  # fmt: skip


@pytest.fixture
def cells(cell):
    fits = KernelFacts(function="dense_forward", facts={"registers": 168, "scratchpad_bytes": 40960, "spills": 0})
    spilled = Gate(name="bytes spilled", function="dense_forward", value=96, limit="none allowed", passed=False)
    right = Numerics(outcome="pass", where="interpreter", error=1e-4, budget=1e-3, lse_error=1e-6, lse_budget=1e-5)
    second = decode("GQA", dtype="bf16", head_dim=128)
    return [
        cell(index=0, footnotes=(WRONG,), kernels=(fits,), interpreter=right),
        cell(index=1, target="rocm:gfx942", footnotes=(SLOW, WRONG), status="FAIL", gates=(spilled,), kernels=(fits,)),
        cell(index=2, named=second, status="CRASH", stage="ttgir", level="declared", reason="died",
             log="<script>alert(1)</script>"),
        cell(index=3, named=second, target="ascend:ascend910b2", toolchain="triton-ascend==3.2.0", status="NOT_RUN",
             level="declared", reason="not run here: needs a triton-ascend environment"),
    ]  # fmt: skip


def test_every_cell_has_a_tile_and_a_card(cells, run):
    page = render(run(cells), cells)
    cards = Counter(re.findall(r'<article popover id="(\w+)"', page))
    assert (set(cards), set(cards.values())) == ({f"c{cell.id}" for cell in cells}, {1})
    assert set(re.findall(r'popovertarget="(\w+)"', page)) == set(cards)
    assert page.count('class="tile k-') == len(cells)
    assert page.count('class="tile empty"') == 2  # 2 problems × 3 targets, 4 cells
    for told in ("k-compiles", "k-FAIL", "k-CRASH", "k-NOT_RUN", "not run here: needs a triton-ascend environment"):
        assert told in page


def test_compilers_of_one_chip_are_told_apart(cell, run):
    cells = [cell(index=i, toolchain=f"triton=={v}", status=status)
             for i, (v, status) in enumerate([("3.4.0", "PASS"), ("3.6.0", "FAIL")])]  # fmt: skip
    made = msgspec.structs.replace(run(cells), environments={"triton==3.4.0": "Python 3.11.7, made 2026-11-21"})
    page = render(made, cells)
    assert "1 problem × 1 target × 2 compilers" in page
    assert page.index("<small>3.4.0</small>") < page.index("<small>3.6.0</small>")
    assert "<b>cuda:sm_90</b> with triton==3.6.0" in page
    assert "triton==3.4.0 (Python 3.11.7, made 2026-11-21)" in page
    assert "<small>3.4.0</small>" not in render(run(cells[:1]), cells[:1])


def test_footnotes_are_numbered_as_they_are_met_and_lead_somewhere(cells, run):
    page = render(run(cells), cells)
    assert set(re.findall(r'href="#(fn\d+)"', page)) == set(re.findall(r'<li id="(fn\d+)"', page)) == {"fn1", "fn2"}
    quirks = page[page.index('id="quirks"') :]
    assert quirks.index("wrong sums") < quirks.index("tiles spill")
    for part in ('href="https://github.com/triton-lang/triton/issues/1"', "upstream: unreported", "2 cells"):
        assert part in quirks


def test_what_a_compiler_printed_is_text_and_the_page_loads_nothing(cells, run):
    page = render(run(cells), cells)
    assert page.count("<script") == 1, "the filters"
    assert "&lt;script&gt;alert(1)" in page
    assert not re.search(r"<link|<img|<iframe|@import|url\(|\bsrc=", page)
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_red_cells_are_listed_with_their_reasons_and_an_interrupted_run_says_so(cells, run):
    page = render(run(cells), cells)
    red = page[page.index('id="red"') : page.index('id="quirks"')]
    assert (red.count("<li>"), "died" in red) == (2, True)
    assert ("interrupted: 2 of 4" in render(run(cells), cells[:2]), "interrupted" in page) == (True, False)
    assert "0 problems × 0 targets" in render(run([]), [])


def test_a_merged_run_says_which_machine_a_cell_is_from(run_of, cell):
    one = run_of([cell(key="a", level="runs")], host="chip")
    made = merge([one, run_of([cell(key="a")], host="laptop")], ["one", "two"], "portattn matrix merge")
    page = render(made.run, made.cells)
    assert "<dt>made on</dt><dd>chip (Linux x86_64), 1111111111</dd>" in page
    assert "<dt>beside it</dt><dd>compiles on laptop (Linux x86_64), 1111111111</dd>" in page
    assert "<dt>conflict</dt><dd>runs, path triton on chip (Linux x86_64), but compiles" in page
    assert "made on" not in render(*one)


def test_a_tile_says_its_main_figures(cells):
    assert [brief(cell) for cell in cells] == ["168 regs · 40 K", "96 B spilled", "ttgir", ""]
    [kernel] = cells[0].kernels
    again = msgspec.structs.replace(kernel, facts={**kernel.facts, "deaths": 1})
    cell = msgspec.structs.replace(cells[0], kernels=(again,))
    assert brief(cell) == "168 regs · 40 K · compiler died once"
    small = msgspec.structs.replace(kernel, facts={"registers": 32, "scratchpad_bytes": 0})
    assert brief(msgspec.structs.replace(cells[0], kernels=(small, kernel))) == "168 regs · 40 K"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unreported", ""), ("https://a.b/c, open", "https://a.b/c"),
        ("see https://a.b/c) and https://d.e", "https://a.b/c"),
    ],
)  # fmt: skip
def test_the_first_link_is_found(text, expected):
    assert link(text) == expected


def test_rows_are_grouped_by_op(cell, run):
    named = [*quick(), dense(dtype="bf16", head_dim=64)]  # one more dense problem after the others
    cells = [cell(index=index, named=one) for index, one in enumerate(named)]
    page = render(run(cells), cells)
    assert re.findall(r'<tr class="op".*?<code>(\w+)</code>', page, re.DOTALL) == list(OPS)
    assert page.count('<th scope="row"') == len(named)
    body = page[page.index("<tbody") :]
    assert body.index("dense full bf16 D=64<") < body.index("varlen_attention")
    assert f"{len(named)} problems × 1 target," in page


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (dense(dtype="fp16", head_dim=192, head_dim_v=128), ["q 4×16×2048×192", "kv 4×16×2048×128"]),
        (varlen(dtype="fp16", head_dim=64), ["q 8192×16×64", "kv 8192×16×64", "8 sequences"]),
        (paged("GQA", dtype="fp16", head_dim=64, page_size=48), ["q 16×32×1×64", "kv 16×8×8208×64", "pages of 48"]),
        (
            paged("ragged", dtype="fp16", head_dim=64, page_size=16, **RAGGED),
            ["q 1024×32×64", "kv 16×8×8192×64", "16 sequences", "pages of 16"],
        ),
        (sparse(dtype="fp16", head_dim=64), ["q 16×32×1×64", "kv 16×8×32768×64", "1024 tokens a head"]),
        (mla(dtype="fp16", head_dim=576, head_dim_v=512), ["q 16×128×1×576", "kv 16×1×4096×576", "pages of 64"]),
    ],
)
def test_sizes_say_what_a_problem_is(named, expected):
    assert sizes(named.problem) == expected


def test_numbers_of_a_cpu_are_no_level_of_a_chip(cell, run):
    seen = Numerics(outcome="pass", where="cpu:generic with triton==3.6.0", error=1e-4, budget=1e-3)
    one = cell(target="cpu:generic", level="runs", native=seen, plan=PlanSummary(path="sdpa", core_taken=False))
    page = render(run([one]), [one])
    [tile] = re.findall(r'<button class="tile.*?</button>', page, re.DOTALL)
    assert "k-reference" in tile
    assert '<span class="word">CPU reference</span>' in tile
    assert "sdpa, no chip" in tile
    assert "reference numbers on this CPU, not a chip&#39;s" in tile  # what a screen reader says
    assert re.search(r'k-runs"></i><b>runs</b>\s*<span class="count">0</span>', page)
    outcomes = {step.name: step.outcome for step in steps(one)}
    assert (outcomes["on a CPU"], outcomes["on the chip"]) == ("seen", "not seen")
    chip = msgspec.structs.replace(one, target="cuda:sm_90")
    assert (word(chip), {s.name: s.outcome for s in steps(chip)}["on the chip"]) == ("runs", "seen")


def test_the_interpreters_dot_is_that_of_the_path_that_is_taken(cell, run):
    right = Numerics(outcome="pass", where="interpreter, triton==3.6.0", error=1e-4, budget=1e-3)
    core = cell(interpreter=right)
    plan = PlanSummary(path="gluon_forward", core_taken=False, kernel="dense_forward")
    variant = cell(interpreter=right, emulated=right, plan=plan)
    assert 'class="dot pass"' in re.findall(r"<button class=.tile.*?</button>", render(run([core]), [core]), re.S)[0]
    [tile] = re.findall(r"<button class=.tile.*?</button>", render(run([variant]), [variant]), re.S)
    assert "dot" not in tile
    assert "interpreted" not in tile
    assert {s.name: s.outcome for s in steps(core)}["interpreter"] == "seen"
    found = {step.name: step for step in steps(variant)}
    assert found["interpreter"].outcome == found["emulated"].outcome == "not seen"
    assert found["interpreter"].said.startswith("not of the path gluon_forward; the core kernel beside it: max error")


def test_a_card_names_the_form_of_the_kernel(cell, run):
    long = {"batch": 8, "heads_q": 32, "heads_k": 8, "seq_k": 4096}
    problem = msgspec.structs.replace(decode("GQA", dtype="bf16", head_dim=128).problem, **long)
    made = plan(problem, parse_target("cuda:sm_90", "triton==3.6.0"))
    for one, said in (
        (summary(made, made), "decode_split, in its form warps_apart"),
        (msgspec.structs.replace(summary(made, made), form=""), "decode_split"),
    ):
        filled = cell(plan=one)
        [told] = re.findall(r"<dt>kernel</dt><dd>(.*?)</dd>", render(run([filled]), [filled]))
        assert told == said


def test_an_empty_cell_says_why_and_what_fills_it(cells, cell, run):
    made = run(cells)
    page = render(made, cells)
    tiles = re.findall(r'<button class="tile k-NOT_RUN.*?</button>', page, re.DOTALL)
    assert len(tiles) == 1
    assert '<span class="brief">not run here</span>' in tiles[0]
    legend = page[page.index('id="legend"') :]
    command = "portattn matrix run --targets ascend:ascend910b2 --toolchain triton-ascend==3.2.0 --create"
    assert f'<code class="command">{command}</code>' in legend
    gaps = re.findall(r'<span class="tile empty">.*?<span class="brief">(.*?)</span>', page, re.DOTALL)
    assert gaps == ["not in this run"] * 2
    assert "--targets rocm:gfx942 --toolchain triton==3.6.0 --create --ops decode_attention" in legend
    missing = render(made, [c for c in cells if c.index != 2])  # cells of this run, and not made
    assert "run interrupted" in missing
    assert f"{made.command} --resume</code>" in missing


def test_wide_tables_are_broken_so_that_no_column_is_out_of_sight(cell, run):
    targets = [f"cuda:sm_{n}" for n in range(80, 92)] + ["rocm:gfx942", "rocm:gfx90a"]
    cells = [cell(index=index, target=target) for index, target in enumerate(targets)]
    page = render(run(cells), cells)
    assert [table.count('<th scope="col"') for table in page.split("<table")[1:]] == [BAND, 5]
    assert page.count('class="tile k-') == len(cells)


def test_a_quirk_with_two_roles_in_a_cell_is_one_number_and_one_that_changes_nothing_none(cell, run):
    one = cell(footnotes=(SLOW, msgspec.structs.replace(SLOW, role="explains")))
    page = render(run([one]), [one])
    assert page.count('<a href="#fn1" title') == 1
    assert "<code>rocm-0001-slow</code> · 1 cell\n" in page
    notes = msgspec.structs.replace(SLOW, id="rocm-0002-notes", sets={})
    page = render(run([one := cell(footnotes=(notes, WRONG))]), [one])
    assert notes.id not in page
    assert page.count('<a href="#fn1" title') == 1


def test_what_is_recorded_on_hardware_is_a_second_mark(cell, run):
    """verified.toml has runs on sm_90; this run compiled alone."""
    sdpa = PlanSummary(path="sdpa", core_taken=False)
    cells = [cell(), cell(target="rocm:gfx942", level="emulated"), cell(status="FAIL", index=2), cell(plan=sdpa)]
    cells += [cell(toolchain="triton==of another"), cell(target="cuda:sm_9999"), cell(target="other:one")]
    for one, marked in zip(cells, (True, *[False] * 6), strict=True):
        page = render(run([one]), [one])
        assert ("◆ measured" in page, "recorded on hardware" in page) == (marked, marked)
    assert [(step.outcome, step.where) for step in steps(cells[0])][-1] == ("seen", "triton==3.6.0")


def test_problems_keep_their_order_the_table_comes_first_and_in_a_card_the_evidence(cells, run):
    page = render(run(cells), cells)
    body = page[page.index("<tbody") :]
    assert body.index(dense(dtype="fp16", head_dim=64).name) < body.index("decode bf16")
    assert render(run(cells), cells[::-1]) == page, "whatever was finished first"
    assert page.index("<table") < page.index('id="legend"') < page.index('id="empty"') < page.index('id="quirks"')
    card = page[page.index("<article") :]
    assert card.index("<dt>evidence") < card.index("<dt>problem") < card.index("<dt>path")


NPU = {"target": "ascend:ascend910b2", "toolchain": "triton-ascend==3.2.0"}
SEEN = Numerics(outcome="pass", where="a chip, a compiler", error=0.0, budget=1.0)
FUSION = PlanSummary(path="npu_fusion_attention", core_taken=False)
TRAINS = NamedProblem("trained", msgspec.structs.replace(dense(dtype="fp16", head_dim=64).problem, needs_grad=True))
RUNS = {"level": "runs", "native": SEEN}
WITNESSES = [
    ({"target": "rocm:gfx942", "level": "emulated", "emulated": SEEN}, {}, "AMD model"),
    ({"target": "rocm:gfx942", "level": "emulated"}, {}, ""),
    (NPU | {"status": "NOTE", "level": "declared"}, {}, "lowered code on the device stand-in"),
    (
        NPU | {"level": "lowering-checked", "lowered": SEEN},
        {},
        "lowered code on the CPU, lowered code on the device stand-in",
    ),
    (NPU | {"level": "declared", "plan": FUSION}, {}, "vendor's schema"),
    (NPU | {"level": "declared", "plan": FUSION, "named": TRAINS}, {}, "vendor's autograd"),
    (NPU | {"status": "FAIL", "plan": FUSION}, {}, ""),
    (NPU | {"status": "NOT_RUN"}, {}, ""),
    (RUNS, {}, "a chip, a compiler"),
    (RUNS | {"label": "sm_80 code on sm_90"}, {}, "sm_80 code on sm_90"),
    (RUNS, {"author": "Ada Example <ada@example.org>"}, "Ada Example, 2026-11-21"),
    ({"status": "FAIL"}, {"author": "Ada Example <ada@example.org>"}, "Ada Example, 2026-11-21"),
    ({"target": "cpu:generic", "level": "runs", "native": SEEN}, {}, ""),
]


@pytest.mark.parametrize(("fields", "identity", "source"), WITNESSES)
def test_the_source_of_a_cells_evidence(fields, identity, source, cell):
    made, (one,) = make_run([cell(**fields)], **identity)
    assert witness(one, made) == source
    assert (f'class="brief witness">{escape(source)}<' in render(made, [one])) is bool(source)
    (row,) = markdown(made, [one]).splitlines()[2:]
    assert row == f"| {one.target} | {one.toolchain} | {one.name} | {word(one)} | {source} |"


def test_many_chips_of_empty_cells_are_counted(cell, run):
    targets = [f"rocm:gfx{n}" for n in ("90a", "942", "950", "1100")]
    cells = [cell(target=name, status="NOT_RUN", level="declared", reason="not here", index=i)
             for i, name in enumerate(targets)]  # fmt: skip
    assert "(4 chips)" in render(run(cells), cells)
    assert "(rocm:gfx90a, rocm:gfx942)" in render(run(cells[:2]), cells[:2])
