"""Conformance cases: cells of the matrix as tests, with a compiler that fails as it is told (tests/planted.py)."""

import datetime
from xml.etree import ElementTree

import pytest
from handmade import make_cell, make_run

from portattn.integrations.pytest_plugin.session import slug
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Cell, snapshot
from portattn.tools.matrix.problems import SETS
from portattn.tools.matrix.results import Results, write_baseline
from portattn.tools.matrix.run import Options, execute

HERE = str(installed_toolchain())
NAME = "dense causal fp16 D=64"
CASE = f"{HERE}::dense_causal_fp16_D=64"
SELECTED = f"--portattn-conformance={NAME}"
TODAY = datetime.date.today()

pytestmark = pytest.mark.skipif(HERE == "none", reason="Triton is not installed")
# What spills with a release that its tile was not chosen with is noted, and does not fail.
CHOSEN_WITH = "triton==3.6.0"
spills_fail = pytest.mark.skipif(HERE != CHOSEN_WITH, reason=f"the tiles were chosen with {CHOSEN_WITH}")


@spills_fail
@pytest.mark.usefixtures("planted_compiler")
def test_each_case_ends_as_its_cell(pytester, inner):
    result = inner(SELECTED, "--portattn-target=sm_80,sm_89", "--portattn-target", "sm_100,sm_120",
        "--junit-xml=out.xml", "-rfpP")  # fmt: skip
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines([f"portattn: cuda:sm_80 with {HERE}, *; 4 conformance cases of the quick set",
        "collected 4 items", f"_* cuda:sm_80  {HERE}  {NAME} _*", "red: CRASH: *SIGABRT*", "what ttgir printed:",
        "Assertion `planted' failed.", "*Captured portattn call*", "path: *"])  # fmt: skip
    result.stdout.fnmatch_lines_random(["red: ERROR: dense_forward: RuntimeError at ttgir: planted refusal",
        "red: FAIL: *96 bytes spilled, none allowed*", f"PASSED portattn::cuda:sm_100::{CASE}",
        f"FAILED portattn::cuda:sm_80::{CASE} *"])  # fmt: skip
    result.stdout.no_fnmatch_line("*Traceback*")
    cases = {case.get("classname"): case for case in ElementTree.parse(pytester.path / "out.xml").iter("testcase")}
    case = cases[f"portattn.cuda:sm_100.{HERE}"]
    told = {one.get("name"): one.get("value") for one in case.iter("property")}
    assert (told["portattn_target"], told["portattn_toolchain"]) == ("cuda:sm_100", HERE)
    assert (told["portattn_problem"], told["portattn_path"], told["portattn_level"]) == (NAME, "triton", "compiles")


def test_cases_are_chosen_like_tests(pytester, inner):
    """Nothing is compiled to collect them, and they stand beside other tests."""
    pytester.makepyfile(test_it="def test_dense(): pass")
    common = ["--collect-only", "-q", "--portattn-target=sm_90,gfx942"]

    def ids(*arguments):
        result = inner(*common, *arguments)
        assert result.ret == 0
        return [line for line in result.outlines if "::" in line]

    named = "--portattn-conformance=dense causal*"
    every = [f"portattn::{target}::{HERE}::{name}" for target in ("cuda:sm_90", "rocm:gfx942")
        for name in ("dense_causal_fp16_D=64", "dense_causal_bf16_D=128_GQA")]  # fmt: skip
    assert (ids(), ids(named)) == (["test_it.py::test_dense"], ["test_it.py::test_dense", *every])
    assert (ids(named, "-k", "gfx942 and bf16"), ids(named, "-m", "portattn_conformance")) == (every[-1:], every)
    assert ids(named, "--deselect", "portattn::rocm:gfx942") == ["test_it.py::test_dense", *every[:2]]
    assert ids(named, "portattn::") == every
    assert ids(named, "portattn::cuda:sm_90", every[-1]) == [*every[:2], every[-1]]
    assert ids(named, "test_it.py", every[0]) == ["test_it.py::test_dense", every[0]]


def test_ids_are_distinct():
    for problems in SETS.values():
        names = [named.name for named in problems()]
        assert len({slug(name) for name in names}) == len(names)


def test_a_toolchain_that_is_not_here_is_skipped_or_red(inner):
    common = (SELECTED, "--portattn-target=sm_90", "--portattn-toolchain=triton==3.3.0", "portattn::")
    lacks = "not compiled here: triton==3.3.0: its lab environment is not there"
    hint = f"{lacks}; `portattn lab create triton==3.3.0` makes it"
    result = inner(*common, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"SKIPPED * NOT_RUN: {hint}"])
    result = inner(*common, "--portattn-fail-on=not_run")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"not_run: {hint}"])


def test_a_chip_of_this_machine_runs_the_call(inner):
    result = inner(SELECTED, "--portattn-target=cpu", "portattn::", "-rP")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["runs (reference numbers on this CPU, not a chip's)", "path: sdpa"])


def kept(path, planted):
    """A baseline of the case on sm_100 and gfx942, as a run makes it."""
    specs = select.specs(select.problems("quick", [NAME]), select.targets(["sm_100", "gfx942"], []))
    options = Options(pythons={HERE: planted}, left_out=("emulated",))
    cells: list[Cell] = []
    execute(specs, options, cells.append)
    made = provenance.this_run(specs, "quick", "a test", (), {HERE: planted})
    text = write_baseline(snapshot(made, sorted(cells, key=lambda cell: cell.index), "a test"))
    path.write_text(text, encoding="utf-8")
    return text


def test_what_a_baseline_has_must_not_be_lost(pytester, inner, planted_compiler):
    path = pytester.path / "baseline.toml"
    text = kept(path, planted_compiler)
    common = (SELECTED, "--portattn-target=sm_100,gfx942", "--portattn-baseline=baseline.toml", "portattn::")
    inner(*common).assert_outcomes(passed=2)

    assert text.count('level = "compiles"') == 2
    path.write_text(text.replace('level = "compiles"', 'level = "measured"', 1), encoding="utf-8")
    result = inner(*common)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"_* cuda:sm_100  {HERE}  {NAME} _*", "level: measured → compiles*"])

    path.write_text(text.replace(f'"{NAME}" = {{', f'"{NAME}, sinks" = {{', 1), encoding="utf-8")
    result = inner(SELECTED + "*", *common[1:])
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["gone: the cell is gone; it was compiles, path *",
        f"cause: the new run has no problem of the name '{NAME}, sinks'"])  # fmt: skip
    inner(SELECTED + "*", "--portattn-fail-on=new", *common[1:]).assert_outcomes(passed=1, failed=2)


def test_a_column_of_an_older_compiler_is_compared_with_the_newer_one(pytester, inner, planted_compiler):
    """As `matrix run --baseline` does; with both compilers in the run, the newer one's cells are new."""
    path = pytester.path / "baseline.toml"
    text = kept(path, planted_compiler).replace(HERE, "triton==3.5.1")
    path.write_text(text.replace('level = "compiles"', 'level = "measured"'), encoding="utf-8")
    common = (SELECTED, "--portattn-target=sm_100", "--portattn-baseline=baseline.toml", "portattn::")
    result = inner(*common)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["level: measured → compiles*", f"*triton==3.5.1 → {HERE}"])
    both = (f"--portattn-toolchain={HERE}", "--portattn-toolchain=triton==3.5.1")
    inner(*common, *both).assert_outcomes(passed=1, failed=1)


EXPECTED = """
[[expected]]
target    = "cuda:sm_120"
problem   = "{problem}"
signature = "{signature}"
reason    = "the tile is too large"
owner     = "kernels"
expires   = {expires}
"""


@spills_fail
@pytest.mark.usefixtures("planted_compiler")
@pytest.mark.parametrize(
    ("changes", "target", "outcome", "said"),
    [
        ({}, "sm_120", {"xfailed": 1}, "XFAIL * expected to fail until * (kernels): the tile is too large"),
        ({"signature": "no room"}, "sm_120", {"failed": 1}, "other_reason: *fails for another reason than 'no room'*"),
        ({"expires": "2026-01-01"}, "sm_120", {"failed": 1}, "expired: *until 2026-01-01, and still fails"),
        ({"target": "cuda:sm_100"}, "sm_100", {"failed": 1}, "unexpected_pass: *and does not: PASS; remove the entry"),
    ],
    ids=["its reason", "another reason", "expired", "passes"],
)
def test_an_expected_failure_must_fail_for_its_reason(pytester, inner, changes, target, outcome, said):
    fields = {"problem": "dense*", "signature": "bytes spilled", "expires": str(TODAY + datetime.timedelta(30))}
    text = EXPECTED.format(**{**fields, **changes}).replace("cuda:sm_120", changes.get("target", "cuda:sm_120"))
    (pytester.path / "expected.toml").write_text(text, encoding="utf-8")
    result = inner(SELECTED, f"--portattn-target={target}", "--portattn-expected=expected.toml", "-rxf")
    result.assert_outcomes(**outcome)
    result.stdout.fnmatch_lines([said])
    if "xfailed" in outcome:
        inner(SELECTED, f"--portattn-target={target}", "--portattn-expected=expected.toml",
            "--runxfail").assert_outcomes(failed=1)  # fmt: skip


@pytest.mark.parametrize(
    ("target", "lacks", "said"),
    [
        ("sm_90", 0, "*has none of the requested cells, so that nothing would be compared; it has rocm:gfx942 with *"),
        ("gfx942", 1, "*--portattn-baseline is '*old', but it was interrupted, and lacks 1 cell*"),
    ],
    ids=["nothing of it is asked for", "interrupted"],
)
def test_a_baseline_that_says_nothing_is_refused(pytester, inner, target, lacks, said):
    named = select.problems("quick", ["dense*"])[:2]
    made, cells = make_run([make_cell(named=one, target="rocm:gfx942", toolchain=HERE) for one in named])
    with Results(pytester.path / "old") as file:
        file.replace(made, cells[: len(cells) - lacks])
    result = inner("--portattn-conformance=quick", f"--portattn-target={target}", "--portattn-baseline=old")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])
    result.stderr.no_fnmatch_line("*Traceback*")
