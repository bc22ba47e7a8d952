"""What of a baseline counts in `portattn ci`, which red cells a change of compiler has lost, the summary in Markdown,
and what GitHub's runners read."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from handmade import make_cell, make_run

from portattn.errors import DataError
from portattn.planning.registry import Registry
from portattn.schema.toolchain import Toolchain
from portattn.testing.findings import Numerics
from portattn.tools.compare import changes
from portattn.tools.compare import report as ci_report
from portattn.tools.compare.changes import Change, Diff
from portattn.tools.compare.registry_changes import compare
from portattn.tools.compare.report import CiReport, Loss, _lost, alike, together
from portattn.tools.compare.sides import CiRequest, Pair, Side, as_planned
from portattn.tools.compare.verdict import RunFinding
from portattn.tools.matrix.cells import snapshot
from portattn.tools.matrix.problems import quick


def loss(**changes) -> Loss:
    fields = {
        "kinds": ("core",), "what": "path triton → reference", "targets": ("rocm:gfx942",), "problems": ("dense",),
        "cause": "quirk rocm-0901-x rules out the path triton", "quirk": "rocm-0901-x",
        "todo": "`portattn quirks show x`",
    }  # fmt: skip
    return Loss(**fields | changes)


@pytest.fixture
def report():
    """A factory of reports on sm_90: report(losses=[…], notes=(…))."""
    known = Registry.load()
    made = compare(
        [Pair(*(Side(known.target("cuda:sm_90", f"triton=={v}"), known) for v in ("3.6.0", "3.9.0")))], quick()
    )

    # As where the tests' run with the new compiler left something out.
    unseen = tuple(msgspec.structs.replace(one, unseen=one.takes[:1]) for one in made.variants)
    made = msgspec.structs.replace(made, variants=unseen)

    def make(losses=(), changes=(), notes=()) -> CiReport:
        findings = [
            RunFinding(kind=one.kinds[0], text=one.what, target="t", name=n) for one in losses for n in one.problems
        ]
        return CiReport(
            before="triton==3.6.0", after="triton==3.9.0", compiled=False, against="", targets=("cuda:sm_90",),
            problems=("dense",), compared=11, red=("core",), findings=tuple(findings), losses=tuple(losses),
            changes=tuple(changes), upgrade=made, expected=(), notes=tuple(notes),
        )  # fmt: skip

    return make


def change(target: str, name: str, **told: str) -> Change:
    return Change(target=target, toolchain="triton==3.9.0", name=name, op="attention", kinds=tuple(told), told=told)


def test_losses_come_first_and_all_else_is_folded(report):
    won = change("cuda:sm_90", "decode", won="path sdpa → triton")
    text = ci_report.render(report([loss()], [won], ["a note"]))
    head, folded = text.split("<details>", 1)
    assert head.startswith("## portattn ci: triton==3.6.0 → triton==3.9.0\n\n**1 loss in 1 cell: 11 cells of 1 target")
    row = (
        "| **core**: path triton → reference | rocm:gfx942 | dense | quirk rocm-0901-x rules out the path triton | "
        "`portattn quirks show x` |"
    )
    assert row in head
    assert "- a note" in head
    assert "<summary>Won: 1</summary>" in folded
    assert "won: path sdpa → triton" in folded
    for title in (
        "Quirks that fall away", "Plans that take the same path in another way", "Variants that do not",
        "Schedules that were not timed",
    ):  # fmt: skip
        assert f"<details><summary>{title}" in text
    assert text.count("<details>") == text.count("</details>") == 5
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") - line.count("\\|") for line in tables} <= {4, 5, 6}


def test_cells_that_changed_alike_are_one_row():
    changes = [change(target, name, quirks="-a") for target in ("x", "y", "z") for name in ("dense", "decode")]
    changes.append(change("z", "paged", quirks="-a"))
    rows = [(one.targets, one.problems, one.what) for one in alike(changes)]
    assert rows == [
        (("x", "y"), ("dense", "decode"), "quirks: -a"), (("z",), ("dense", "decode", "paged"), "quirks: -a"),
    ]  # fmt: skip


def test_text_of_quirks_and_compilers_is_text(report):
    """Nothing in it is taken for a table's end, for HTML, a link, or code."""
    text = ci_report.render(report([loss(what="a|b <script>x</script>\n[l](http://e) `c` *d*", cause="tile<64>|")]))
    (row,) = [line for line in text.splitlines() if line.startswith("| **core**")]
    assert "a\\|b &lt;script&gt;x&lt;/script&gt; \\[l\\](http://e) \\`c\\` \\*d\\*" in row
    assert "tile&lt;64&gt;\\|" in row
    assert len(re.findall(r"(?<!\\)\|", row)) == 6


@pytest.mark.parametrize("limit", [2000, 3333, 5001])
def test_a_summary_over_the_limit_is_cut_between_lines_and_says_so(report, limit):
    made = report([loss(what=f"path → {number}" + "ä" * 90) for number in range(40)])
    whole, text = ci_report.render(made), ci_report.render(made, limit)
    assert len(whole.encode()) > 2 * limit
    assert limit - 600 < len(text.encode()) <= limit
    assert text.endswith("`portattn ci --json` has all of it.**\n")
    kept = text.partition("\n\n**The summary is cut here")[0]
    assert whole.startswith(kept + "\n") or whole.startswith(kept)
    assert kept.splitlines()[-1].endswith("|"), "no half row"


def test_what_is_folded_is_closed_where_it_is_cut(report):
    made = report()
    whole = ci_report.render(made)
    for limit in range(700, len(whole.encode()), 97):
        text = ci_report.render(made, limit)
        assert len(text.encode()) <= limit
        assert text.count("<details>") == text.count("</details>")
    assert ci_report.render(made, len(whole.encode())) == whole
    assert "cut here" in ci_report.render(made, len(whole.encode()) - 1)


def test_what_a_runner_reads_is_escaped():
    line = ci_report.command("error", "a: b, c", "100%\r\n::error::x")
    assert line == "::error title=a%3A b%2C c::100%25%0D%0A::error::x"


def test_more_annotations_than_a_step_shows_end_with_their_number(report):
    made = report([loss(what=f"number {n}") for n in range(ci_report.SHOWN + 5)], notes=["one"])
    lines = list(ci_report.annotation_lines(made))
    errors = [line for line in lines if line.startswith("::error ")]
    assert len(errors) == ci_report.SHOWN
    assert errors[-1].endswith("::6 more: the job's summary has them")
    assert [line for line in lines if line.startswith("::warning ")] == [lines[-1]]
    ten = report([loss(what=f"number {n}") for n in range(ci_report.SHOWN)])
    assert "more:" not in "".join(ci_report.annotation_lines(ten))


def test_a_summary_is_appended_within_the_steps_limit(report, tmp_path):
    step, made = tmp_path / "step.md", report()
    assert ci_report.append(step, made), "the runner makes the file, but need not"
    assert ci_report.append(step, made)
    assert step.read_text(encoding="utf-8") == 2 * ci_report.render(made)
    step.write_bytes(b"x" * (ci_report.LIMIT - 1000))
    assert ci_report.append(step, made)
    assert ci_report.LIMIT - 1000 < step.stat().st_size <= ci_report.LIMIT
    assert step.read_text(encoding="utf-8").endswith("has all of it.**\n")
    step.write_bytes(b"x" * ci_report.LIMIT)
    assert not ci_report.append(step, made)
    assert step.stat().st_size == ci_report.LIMIT
    with pytest.raises(DataError, match="cannot be written"):
        ci_report.append(tmp_path / "no" / "step.md", made)


def test_the_summary_is_utf8_whatever_the_locale(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from portattn.cli import main\n"
        "main(['ci', '--from', 'triton==3.6.0', '--to', 'triton==3.9.0', '--targets', 'sm_80', '--json'],"
        " standalone_mode=False)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True,
        env={"LC_ALL": "C", "PYTHONUTF8": "0", "GITHUB_STEP_SUMMARY": str(tmp_path / "s.md"), "PATH": "/usr/bin",
             "PYTHONPATH": ":".join(sys.path), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert msgspec.json.decode(done.stdout)["lost"] == 0
    assert "3.6.0 → triton==3.9.0" in (tmp_path / "s.md").read_text(encoding="utf-8")


def seen(*cells):
    return snapshot(*make_run(cells), "x")


def test_as_planned_a_cell_without_a_plan_is_red_and_another_red_one_is_not():
    none = make_cell(status="ERROR", level="declared", reason="no plan: x", plan=None)
    refused = make_cell(status="ERROR", level="declared", reason="refused", target="cuda:sm_80")
    found = as_planned(seen(none, refused, make_cell(target="rocm:gfx942", level="measured")))
    assert [(e.status, e.level, e.reason) for e in found.entries] == [
        ("ERROR", "declared", ""), ("NOT_RUN", "declared", ""), ("NOT_RUN", "declared", ""),
    ]  # fmt: skip
    # A cell that a plan alone would not run is no loss against the planned one.
    ran = make_cell(level="runs", label="sm_80 code on sm_90", interpreter=Numerics(outcome="pass", where="i"))
    planned = make_cell(status="NOT_RUN", level="declared")
    assert changes.compare(as_planned(seen(ran)), seen(planned)).changes == ()
    assert changes.compare(seen(ran), seen(planned)).changes[0].lost


def test_of_a_baseline_the_cells_of_the_compiler_that_is_left_count():
    registry = Registry.load()
    pair = Pair(*(Side(registry.target("cuda:sm_90", f"triton=={v}"), registry) for v in ("3.6.0", "3.9.0")))
    kept = seen(make_cell(), make_cell(toolchain="triton==3.5.1"))
    what = CiRequest(pair.old.target.toolchain, pair.new.target.toolchain, (pair,), tuple(quick()), "quick", kept)
    assert [entry.toolchain for entry in filter(what.counts(), kept.entries)] == ["triton==3.6.0"]


@pytest.mark.parametrize(("kind", "text", "which", "todo"), [
    ("speed", "f instructions_a_megaflop 40 → 90", "quick", "`portattn plan OP --bound --target rocm:gfx942 "),
    ("speed", "f instructions_a_megaflop 40 → 90", "kernels", "`portattn matrix run --kernels 'my file.toml' --targets "
     "rocm:gfx942 --toolchain triton==3.9.0` shows the cells; other `options` (`on` for a target), or "),
    ("level", "emulated → FAIL: f: 8 bytes spilled, 0 allowed", "quick", "`portattn tune --set all --target "),
    ("level", "emulated → FAIL: f: 8 bytes spilled, 0 allowed", "kernels", "`portattn matrix run --kernels 'my "),
    ("level", "emulated → ERROR: f: E at parse: no", "kernels", "`portattn quirks new --from-log FILE` drafts"),
    ("won", "x", "shapes", "`portattn matrix run --shapes 'my file.toml' --targets rocm:gfx942 "),
])  # fmt: skip
def test_what_to_do_is_a_command_that_knows_the_cell(kind, text, which, todo):
    new, file = Toolchain.parse("triton==3.9.0"), None if which == "quick" else Path("my file.toml")
    finding = RunFinding(kind=kind, text=text, target="rocm:gfx942", toolchain=str(new), name="a")
    (found,) = together([finding], (), CiRequest(new, new, (), (), which, file=file), None)
    assert found.todo.startswith(todo)


@pytest.mark.parametrize(
    ("kinds", "every", "told"),
    [
        ((), False, False),  # as red as before
        ((), True, True), (("new",), False, True),
        (("level",), False, False), (("level",), True, False),  # the lost level says it
    ],
)  # fmt: skip
def test_a_red_cell_is_told_once_and_where_the_compiler_has_lost_it(kinds, every, told):
    place = {"target": "cuda:sm_90", "toolchain": "triton==3.9.0", "name": "dense"}
    change = Change(**place, op="attention", kinds=kinds, told=dict.fromkeys(kinds, "x"))
    diff = Diff(old="a", new="b", compared=1, changes=(change,) if kinds else ())
    finding = RunFinding(kind="red", text="ERROR: refused", **place)
    assert list(_lost([finding], diff, every)) == ([finding] if told else [])
