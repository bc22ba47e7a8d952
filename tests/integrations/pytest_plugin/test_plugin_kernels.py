"""A team's own kernels, compiled per target and toolchain: the fixture `portattn_target`, and what it compiles with."""

import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from places import ROOT
from pytest_runs import Runner

from portattn.errors import ArgumentError
from portattn.integrations.pytest_plugin.targets import CompileError, compile_for
from portattn.planning.registry import parse_target
from portattn.schema.toolchain import installed_toolchain
from portattn.tools import lab
from portattn.worker.client import Worker

TEAM = Path(__file__).parent / "team"
HERE = str(installed_toolchain())
TYPES = {"x": "*fp16", "scale": "*fp32", "out": "*fp16", "columns": "i32"}
GPU = "cuda:sm_90"

pytestmark = pytest.mark.compiles


@pytest.fixture
def team(pytester: pytest.Pytester) -> None:
    for name, source in (("row_scale.py", "row_scale.py"), ("test_kernels.py", "per_target.py")):
        (pytester.path / name).write_text((TEAM / source).read_text(encoding="utf-8"), encoding="utf-8")


@pytest.mark.usefixtures("team")
def test_a_teams_kernels_on_workers_of_xdist(inner: Runner) -> None:
    """With the installed compiler, for two chips; beside them a conformance case."""
    result = inner("-n2", "-v", "--portattn-target=sm_90,gfx950", "--portattn-conformance=decode*", "-k",
        "not (decode and gfx950)", alone=True)  # fmt: skip
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines_random(
        [f"*PASSED test_kernels.py::test_it_fits_and_does_not_spill[[]cuda:sm_90-{HERE}] ",
        f"*PASSED test_kernels.py::test_it_compiles_with_kpack[[]rocm:gfx950-{HERE}] ",
        f"*PASSED portattn::cuda:sm_90::{HERE}::decode_bf16_D=128_GQA "])  # fmt: skip


@pytest.mark.usefixtures("team", "real_lab")
@pytest.mark.parametrize(("chip", "toolchain", "xfailed"), [("gfx950", "triton==3.4.0", 1),
                                                            ("910b2", "triton-ascend==3.2.0", 0)])  # fmt: skip
def test_a_teams_kernels_with_another_compiler(inner: Runner, chip: str, toolchain: str, xfailed: int) -> None:
    """Its kernel's file imports torch and its tests' file pytest, which the lab's environment lacks; on gfx950 the
    quirk's assertion fails the compile. Ascend's compiler tells neither spills nor shared memory."""
    if lab.find(toolchain) is None:
        pytest.skip(f"the lab has no {toolchain}: `portattn lab create {toolchain}` makes it")
    result = inner(f"--portattn-target={chip}", f"--portattn-toolchain={toolchain}", "-rx")
    result.assert_outcomes(passed=2 - xfailed, xfailed=xfailed)
    if xfailed:
        result.stdout.fnmatch_lines(["XFAIL *rocm:gfx950-triton==3.4.0* - rocm-0015-kpack: *"])


def test_a_test_may_name_its_own_targets(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize("portattn_target", ["h100", "gfx942"], indirect=True)
        def test_own(portattn_target):
            assert portattn_target.name in ("cuda:sm_90", "rocm:gfx942")
        """
    )
    inner("--portattn-target=sm_80").assert_outcomes(passed=2)
    inner().assert_outcomes(passed=2)


def test_the_arguments_of_parametrize_may_be_named(pytester: pytest.Pytester, inner: Runner) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.parametrize(argnames="size", argvalues=[1, 2])
        def test_own(portattn_target, size):
            assert portattn_target.name == "cuda:sm_80"
        """
    )
    inner("--portattn-target=sm_80").assert_outcomes(passed=2)


@pytest.fixture
def row_scale(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(TEAM))
    import row_scale

    return row_scale


def test_what_is_compiled_says_what_it_is(row_scale: object) -> None:
    with lab.worker() as worker:
        made = compile_for(worker, row_scale.row_scale, parse_target(GPU, HERE), TYPES, {"BLOCK": 1024})
    assert (made.kernel, made.target, made.toolchain, made.language) == ("row_scale", GPU, HERE, "ptx")
    assert made.spills == 0
    assert made.registers
    assert made.shared_memory is not None
    assert ".target sm_90" in made.assembly


def test_a_compiler_that_refuses_dies_or_hangs(row_scale: object, planted: str) -> None:
    def failed(target: str, seconds: float = 60.0) -> CompileError:
        with Worker(python=planted) as worker, pytest.raises(CompileError) as caught:
            compile_for(worker, row_scale.row_scale, parse_target(target, HERE), TYPES, {"BLOCK": 64}, seconds=seconds)
        error = caught.value
        assert str(pickle.loads(pickle.dumps(error))) == str(error)
        return error

    refused = failed("cuda:sm_89")
    assert (refused.outcome, refused.kind, refused.stage, refused.unavailable) == (
        "error", "RuntimeError", "ttgir", False,
    )  # fmt: skip
    assert str(refused).startswith("row_scale for cuda:sm_89 with ")
    assert "planted refusal" in str(refused)
    assert "trace" in refused.log
    died = failed("cuda:sm_80")
    assert (died.outcome, died.kind) == ("crash", "SIGABRT")
    assert "Assertion `planted' failed." in str(died)
    hung = failed("cuda:sm_86", seconds=2)
    assert (hung.outcome, hung.kind) == ("hang", "timeout")


def test_a_module_that_cannot_be_imported_tells_nothing_about_the_compiler(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "once_importable.py"
    path.write_text("import triton\n@triton.jit\ndef kernel(x): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import once_importable

    path.write_text("import no_such_package\nkernel = no_such_package.made()\n")
    with lab.worker() as worker, pytest.raises(CompileError, match="No module named 'no_such_package'") as caught:
        compile_for(worker, once_importable.kernel, parse_target(GPU, HERE), {"x": "*fp32"})
    assert (caught.value.stage, caught.value.unavailable) == ("import", True)


@pytest.mark.parametrize(("types", "constexprs", "divisible", "said"), [
    ({"x": "*fp16"}, {}, None, "signature is .* none has scale, out, columns, BLOCK$"),
    ({**TYPES, "y": "i32"}, {"BLOCK": 64}, None, "signature is 'y', but the arguments of row_scale are x, scale, "),
    (TYPES, {"BLOCKS": 64}, None, "constexprs is 'BLOCKS', but the arguments of row_scale are "),
    (TYPES, {"BLOCK": 64, "x": 1}, None, "constexprs is 'x', but is in signature too"),
    (TYPES, {"BLOCK": [64]}, None, r"constexprs\['BLOCK'\] is \[64\], but must be a number, a text, a bool or None"),
    (TYPES, {"BLOCK": 64}, ["rows"], "divisible is 'rows', but must be one of x, scale, out, columns"),
])  # fmt: skip
def test_arguments_that_are_not_the_kernels(row_scale: object, types, constexprs, divisible, said: str) -> None:
    with Worker(python="/nowhere") as worker, pytest.raises(ArgumentError, match=said):
        compile_for(worker, row_scale.row_scale, parse_target(GPU, HERE), types, constexprs, divisible=divisible)


@pytest.mark.usefixtures("real_lab")
def test_ascend_compiles_by_its_adapter(row_scale) -> None:
    ascend = parse_target("ascend:910b2", "triton-ascend==3.2.0")
    if lab.find("triton-ascend==3.2.0") is None:
        pytest.skip("the lab has no triton-ascend==3.2.0: `portattn lab create triton-ascend==3.2.0` makes it")
    with lab.worker("triton-ascend==3.2.0") as worker:
        made = compile_for(worker, row_scale.row_scale, ascend, TYPES, {"BLOCK": 64})
    assert "func.func @row_scale" in made.assembly
    assert made.target == ascend.name


def test_what_is_no_kernel_of_a_module() -> None:
    import triton

    def local(x):
        pass

    for kernel, said in ((local, "must be a @triton.jit function"), (triton.jit(local), "must stand at the top of")):
        with Worker(python="/nowhere") as worker, pytest.raises(ArgumentError, match=said):
            compile_for(worker, kernel, parse_target(GPU, HERE), {"x": "*fp32"})


# The child's side, in a Python that has Triton and nothing else.
BARE = """
    import sys
    sys.path[:0] = [{root!r}, {triton!r}]
    from portattn.worker import own_kernels
    kernel = own_kernels.kernel_of({folder!r}, {module!r} + ":kernel")
    print(type(kernel).__name__, kernel.arg_names, "torch" in sys.modules, "{module}" in sys.modules)
"""


def bare(folder: Path, module: str, source: str) -> subprocess.CompletedProcess[str]:
    """What a Python without torch makes of a module of a package in a folder."""
    import triton

    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    only = folder / "only-triton"
    only.mkdir(exist_ok=True)
    (only / "triton").symlink_to(Path(triton.__file__).parent)
    program = BARE.format(root=str(ROOT), triton=str(only), module=module, folder=str(folder))
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return subprocess.run([sys.executable, "-S", "-c", textwrap.dedent(program)], capture_output=True, text=True,
        env=environment)  # fmt: skip


def test_a_module_is_imported_though_what_it_imports_is_not_there(tmp_path: Path) -> None:
    """Nor are base classes, decorators and a package's own __init__ looked at, but for the names that it needs."""
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "__init__.py").write_text("import torch\nSIZE = 16\n")
    done = bare(
        tmp_path,
        "team.kernels",
        """
        import torch
        import triton
        import triton.language as tl
        from torch.autograd import Function
        from team import SIZE
        try:
            from triton.no_such_module import Thing
        except ImportError:
            Thing = None
        WIDE: tl.constexpr = torch.finfo(torch.float16).max if torch.cuda.is_available() and Thing else SIZE
        class Scale(Function):
            raise RuntimeError("no kernel needs it")
        @triton.autotune([triton.Config({"BLOCK": 64})], key=["no such argument"])
        @torch.compile
        @triton.jit
        def kernel(x, n, BLOCK: tl.constexpr):
            tl.store(x + tl.arange(0, BLOCK), WIDE)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1) == ["JITFunction", "['x', 'n', 'BLOCK'] False True\n"]


def test_what_is_no_kernel_in_the_child_is_said(tmp_path: Path) -> None:
    done = bare(tmp_path, "plain", "def kernel(): pass\n")
    assert f"plain:kernel of {tmp_path} is a function, and no @triton.jit function" in done.stderr
