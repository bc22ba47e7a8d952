"""What every run of pytest gets where portattn is installed: nothing, until something of the plug-in is used."""

from __future__ import annotations

import pytest
from pytest_runs import Runner

PLAIN = """
    import pytest

    @pytest.mark.parametrize("n", [1, 2])
    def test_plain(n):
        assert n

    @pytest.mark.xfail(strict=True)
    def test_expected():
        assert False
"""
HEAVY = ("torch", "triton", "numpy", "msgspec", "portattn.schema", "portattn.planning", "portattn.tools")


def test_a_run_without_its_options_imports_nothing_heavy(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile(
        PLAIN
        + f"""
    def test_imports(request):
        import sys
        assert request.config.pluginmanager.hasplugin("portattn")
        assert [name for name in {HEAVY!r} if name in sys.modules] == []
"""
    )
    result = inner("--strict-markers", alone=True)
    result.assert_outcomes(passed=3, xfailed=1)
    result.stdout.no_fnmatch_line("*portattn:*")


def test_it_can_be_left_out(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile(PLAIN)
    inner("-p", "no:portattn").assert_outcomes(passed=2, xfailed=1)
    assert inner("-p", "no:portattn", "--portattn-target", "sm_90").ret == pytest.ExitCode.USAGE_ERROR


def test_the_fixture_without_targets_says_what_it_needs(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile("def test_it(portattn_target): pass")
    result = inner("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no --portattn-target says what to compile for"])


def test_markers_are_registered(pytester: pytest.Pytester, inner: Runner) -> None:
    inner("--markers").stdout.fnmatch_lines(
        ["@pytest.mark.portattn_quirk(id): *", "@pytest.mark.portattn_conformance*"]
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--portattn-target=sm_1"], "--portattn-target is 'sm_1', but must be BACKEND:ARCH*"),
        (["--portattn-target=,"], "--portattn-target is ',', but names no target"),
        (["--portattn-target=T4"], "--portattn-target is 'cuda:sm_75', but is not supported: *"),
        (
            ["--portattn-target=sm_90", "--portattn-toolchain=triton"],
            "--portattn-toolchain is 'triton', but must be NAME*",
        ),
        (
            ["--portattn-target=sm_90", "--portattn-toolchain=triton-ascend==3.2.0"],
            "--portattn-toolchain is 'triton-ascend==3.2.0', but compiles for none of the targets",
        ),
        (["--portattn-toolchain=triton==3.6.0"], "--portattn-toolchain needs --portattn-target: *"),
        (["--portattn-conformance=nope"], "--portattn-conformance is 'nope', but must match an op*"),
        (["--portattn-conformance=quick,full"], "--portattn-conformance is 'quick,full', but must name one of*"),
        (
            ["--portattn-conformance", "test_it.py"],
            "--portattn-conformance is 'test_it.py', which is what pytest is to*",
        ),
        (["--portattn-baseline=b.toml"], "--portattn-baseline is about conformance cases, and needs*"),
        (["--portattn-expected=e.toml"], "--portattn-expected is about conformance cases, and needs*"),
        (["--portattn-conformance", "--portattn-baseline=b.toml"], "*b.toml: cannot be read: No such file*"),
        (["--portattn-conformance", "--portattn-expected=broken.toml"], "*broken.toml:1: *"),
        (["--portattn-conformance", "--portattn-expected=deep.toml"], "*deep.toml: *nested too deeply"),
        (["--portattn-conformance", "--portattn-baseline=digits.toml"], "*digits.toml: not TOML: *"),
        (["--portattn-fail-on=rde"], "--portattn-fail-on is 'rde', but must be one of note, not_run, red*"),
        (
            ["--portattn-conformance", "--portattn-fail-on=facts"],
            "--portattn-fail-on is 'facts', but is a change, and needs --portattn-baseline to compare with",
        ),
        (["--portattn-seconds=0"], "--portattn-seconds is 0.0, but must be more than 0, *"),
        (["--portattn-seconds=nan"], "--portattn-seconds is nan, but must be more than 0, *"),
        (["--portattn-seconds=inf"], "--portattn-seconds is inf, but must be more than 0, and at most 1000000 s"),
        (["portattn::rocm:gfx942"], "portattn::rocm:gfx942 is a conformance case, and needs --portattn-conformance"),
        (
            ["--portattn-target=sm_90", "--portattn-conformance=quick", "portattn::rocm:gfx942"],
            "portattn::rocm:gfx942 names no conformance case of this run; --collect-only lists them",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(pytester: pytest.Pytester, inner: Runner, arguments: list[str], said: str) -> None:
    pytester.makepyfile(test_it="def test_it(): pass")
    deep, digits = "x = " + "[" * 3000 + "]" * 3000, f"x = {'9' * 5000}"
    pytester.makefile(".toml", broken="[[expected]", deep=deep, digits=digits)
    result = inner("-q", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_a_wrong_id_under_xdist_is_one_line_before_a_worker_starts(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile(test_it="def test_it(): pass")
    arguments = ("-n1", "--portattn-target=sm_90", "--portattn-conformance=decode*")
    result = inner(*arguments, "portattn::rocm:gfx942", alone=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: portattn::rocm:gfx942 names no conformance case of this run; --collect-only lists them"
    ]
    result.stdout.no_fnmatch_line("*created: 1/1 worker*")
