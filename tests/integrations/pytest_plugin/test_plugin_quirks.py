"""The marker `portattn_quirk`: a test must fail where a quirk applies, for the quirk's reason, and nowhere else."""

import os

import pytest
import quirk_files
from backend_packages import install
from places import tables

from portattn.planning.registry import Registry

TABLES = tables(__file__)

MARKED = """
    import pytest
    @pytest.mark.portattn_quirk("cuda-9000")
    def test_it(portattn_target):
        {body}
"""
TARGETS = ("--portattn-target=sm_90,gfx942",)


@pytest.fixture
def planted_quirk(tmp_path, monkeypatch):
    """cuda-9000 applies to sm_90 with every Triton: `boom`."""
    folder = tmp_path / "quirks"
    path = quirk_files.plant(folder, "cuda-9000-planted", 'note = "x"', 'arch = ["sm_90"]', title="goes boom")
    known = quirk_files.registry(folder)
    monkeypatch.setattr(Registry, "load", staticmethod(lambda: known))
    return path


# Of a test on sm_90, where the quirk applies, and on gfx942, where it does not.
@pytest.mark.usefixtures("planted_quirk")
@pytest.mark.parametrize(
    ("body", "outcomes", "said"),
    TABLES["a_marked_test"],
    ids=["its reason", "everywhere", "another reason", "passes", "skips", "xfails", "a cause"],
)
def test_a_marked_test(pytester, inner, body, outcomes, said):
    pytester.makepyfile(MARKED.format(body=body))
    result = inner(*TARGETS, "-rfxs")
    result.assert_outcomes(**outcomes)
    result.stdout.fnmatch_lines([said])


@pytest.mark.usefixtures("planted_quirk")
def test_a_pass_names_the_command_that_looks(pytester, inner):
    pytester.makepyfile(MARKED.format(body="pass"))
    result = inner("--portattn-target=sm_90", "--portattn-toolchain=triton==3.6.0", "--junit-xml=out.xml", "-rs")
    if result.parseoutcomes().get("skipped"):
        pytest.skip("Triton 3.6.0 is not installed")
    result.stdout.fnmatch_lines(
        ["*`portattn quirks probe cuda-9000-planted --target cuda:sm_90 --toolchain triton==3.6.0` looks."]
    )
    written = (pytester.path / "out.xml").read_text(encoding="utf-8")
    assert '<property name="portattn_target" value="cuda:sm_90" />' in written
    assert '<property name="portattn_quirks" value="cuda-9000-planted" />' in written


@pytest.mark.usefixtures("planted_quirk")
def test_a_failing_fixture_counts_and_a_failing_teardown_does_not(pytester, inner):
    pytester.makepyfile(
        """
        import pytest
        @pytest.fixture
        def compiled(portattn_target):
            raise RuntimeError("boom")
        @pytest.fixture
        def closing(portattn_target):
            yield
            raise RuntimeError("boom")
        @pytest.mark.portattn_quirk("cuda-9000")
        def test_setup(portattn_target, compiled): pass
        @pytest.mark.portattn_quirk("cuda-9000")
        def test_teardown(portattn_target, closing):
            raise RuntimeError("boom")
        """
    )
    inner("--portattn-target=sm_90").assert_outcomes(xfailed=2, errors=1)


@pytest.mark.usefixtures("planted_quirk")
def test_quirks_that_are_switched_off_or_ignored(pytester, inner, monkeypatch):
    from portattn import config

    pytester.makepyfile(MARKED.format(body="pass"))
    inner("--portattn-target=sm_90", "--runxfail").assert_outcomes(passed=1)
    monkeypatch.setenv("PORTATTN_QUIRKS", "-cuda-9000")
    config.environment_settings.cache_clear()
    inner("--portattn-target=sm_90").assert_outcomes(passed=1)


def test_without_a_signature_a_failed_assertion_is_the_wrong_result(pytester, inner, planted_quirk, monkeypatch):
    text = planted_quirk.read_text(encoding="utf-8")
    planted_quirk.write_text(text.replace('signature = "boom"\nquotes    = ["boom"]\n', ""), encoding="utf-8")
    known = quirk_files.registry(planted_quirk.parent.parent)
    monkeypatch.setattr(Registry, "load", staticmethod(lambda: known))
    pytester.makepyfile(MARKED.format(body="assert 1 == 2"))
    inner("--portattn-target=sm_90").assert_outcomes(xfailed=1)
    pytester.makepyfile(MARKED.format(body="raise RuntimeError('boom')"))
    inner("--portattn-target=sm_90").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("mark", "fixture", "said"),
    [
        ("'cuda-9999'", "portattn_target", "portattn_quirk is 'cuda-9999', but no quirk has this id*"),
        ("'cuda-0017'", "portattn_target", "portattn_quirk is 'cuda-0017', but it was retired on *"),
        ("", "portattn_target", "the marker portattn_quirk takes ids of quirks, as in portattn_quirk('rocm-0015')"),
        ("'cuda-0012'", "tmp_path", "the marker portattn_quirk needs the fixture portattn_target, which it lacks"),
    ],
    ids=["unknown", "retired", "none", "no fixture"],
)
def test_a_wrong_marker_is_one_line(pytester, inner, mark, fixture, said):
    pytester.makepyfile(
        test_it=f"import pytest\n@pytest.mark.portattn_quirk({mark})\ndef test_marked({fixture}): pass\n")  # fmt: skip
    if "retired" in said and not any(name.startswith("cuda-0017") for name in Registry.load().retired):
        pytest.skip("cuda-0017 is no tombstone in this tree")
    result = inner("-q")
    assert (result.ret, len([line for line in result.errlines if line])) == (pytest.ExitCode.USAGE_ERROR, 1)
    result.stderr.fnmatch_lines([f"ERROR: test_it.py::test_marked: {said}"])


def test_a_wrong_marker_under_xdist_is_told(pytester, inner):
    pytester.makepyfile("import pytest\n@pytest.mark.portattn_quirk('x')\ndef test_it(portattn_target): pass\n")
    result = inner("-n2", alone=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(["*portattn_quirk is 'x', but no quirk has this id*"])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")


def test_a_packages_own_quirks_are_known(pytester, inner, tmp_path, monkeypatch):
    """A team's package brings entries about its own kernels: the folder that its backend names."""
    packages = tmp_path / "packages"
    packages.mkdir()
    quirks = install(packages, "umbra") / "quirks"
    quirk_files.plant(tmp_path, "cuda-9000-team", 'note = "x"').rename(quirks / "cuda-9000-team.toml")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(packages), os.environ["PYTHONPATH"]]))
    pytester.makepyfile(MARKED.format(body="raise RuntimeError('boom')"))
    result = inner("--portattn-target=sm_90", "-rx", alone=True)
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL *cuda-9000-team: planted"])


# What every run of pytest gets where portattn is installed: nothing, until something of the plug-in is used.
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


def test_a_run_without_its_options_imports_nothing_heavy(pytester, inner):
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


def test_it_can_be_left_out(pytester, inner):
    pytester.makepyfile(PLAIN)
    inner("-p", "no:portattn").assert_outcomes(passed=2, xfailed=1)
    assert inner("-p", "no:portattn", "--portattn-target", "sm_90").ret == pytest.ExitCode.USAGE_ERROR


def test_the_fixture_without_targets_says_what_it_needs(pytester, inner):
    pytester.makepyfile("def test_it(portattn_target): pass")
    result = inner("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no --portattn-target says what to compile for"])


def test_markers_are_registered(pytester, inner):
    inner("--markers").stdout.fnmatch_lines(["@pytest.mark.portattn_quirk(id): *",
        "@pytest.mark.portattn_conformance*"])  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    TABLES["a_wrong_option_is_one_line"],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(pytester, inner, arguments, said):
    pytester.makepyfile(test_it="def test_it(): pass")
    deep, digits = "x = " + "[" * 3000 + "]" * 3000, f"x = {'9' * 5000}"
    pytester.makefile(".toml", broken="[[expected]", deep=deep, digits=digits)
    result = inner("-q", *arguments)
    assert (result.ret, len([line for line in result.errlines if line])) == (pytest.ExitCode.USAGE_ERROR, 1)
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_a_wrong_id_under_xdist_is_one_line_before_a_worker_starts(pytester, inner):
    pytester.makepyfile(test_it="def test_it(): pass")
    arguments = ("-n1", "--portattn-target=sm_90", "--portattn-conformance=decode*")
    result = inner(*arguments, "portattn::rocm:gfx942", alone=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: portattn::rocm:gfx942 names no conformance case of this run; --collect-only lists them"]  # fmt: skip
    result.stdout.no_fnmatch_line("*created: 1/1 worker*")
