"""What importing costs, and that nothing needs what the user has not got. Each test has a Python of its own."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch
from places import ROOT

import portattn
from portattn.source_tree import PARTS, install_extra

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A finder that hides packages, as if they were not installed.
HIDE = """
import sys
class Hidden:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}} (hidden)", name=name)
sys.meta_path.insert(0, Hidden())
"""
MISSING = """
import importlib.util

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else find(name, package)
"""


def python(program: str, *, without: tuple[str, ...] = (), path: Path | None = None) -> str:
    """What a program prints. without: packages that it cannot import; path: where it finds portattn first."""
    hide = (HIDE + MISSING).format(names=set(without)) if without else ""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), environment.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", hide + textwrap.dedent(program)],
        capture_output=True, text=True, timeout=300, env=environment, cwd=path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("dir(portattn)", "torch triton numpy click rich jinja2 msgspec transformers"),
        ("import torch; portattn.attention, portattn.plan, portattn.settings",
         "triton numpy.testing click rich jinja2 tomlkit portattn.backends portattn.tools"),
        ("import contextlib, io, portattn.cli\nfor words in (['bench'], ['bench', 'report'], ['bench', 'compare']):\n"
         " with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
         "  portattn.cli.main([*words, '--help'])", "torch numpy triton"),
    ], ids=["import", "public functions", "bench --help"],
)  # fmt: skip
def test_heavy_modules_are_not_imported(program: str, heavy: str) -> None:
    """What a first use costs is measured by `portattn bench` (first calls); here only what it must not load."""
    loaded = f"print([name for name in {heavy.split()} if sys.modules.get(name)])"
    assert python(f"import sys, portattn\n{program}\n{loaded}") == "[]"


SERVING = """
    import os
    os.environ["PORTATTN_CANARY"] = "{canary}"
    os.environ["PORTATTN_VALIDATE"] = "never"
    import sys
    import torch
    import portattn
    ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    q, cache, rows = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 16, 16), torch.randn(5, 2, 16)
    pages, table, lengths = torch.randn(3, 16, 2, 16), ints([2, 0]), ints(11)
    with portattn.settings(backend="{path}"):
        portattn.attention(q, cache, cache)
        portattn.decode_attention(q, cache, cache, lengths)
        portattn.varlen_attention(rows, rows, rows, ints(0, 2, 5), ints(0, 2, 5), 3, 3, causal=True)
        portattn.paged_attention(q, pages, pages, table, lengths)
        portattn.prepare("attention", q, cache, cache).run(q, cache, cache)
        portattn.warmup([dict(op="attention", q=q, k=cache, v=cache)])
        portattn.explain("attention", q, cache, cache)
    tools = ("portattn.tools", "portattn.cli", "click", "rich", "jinja2", "tomlkit", "matplotlib", "pytest")
    chips = ("portattn.backends.rocm.emulator", "portattn.backends.ascend.linalg", "portattn.backends.cuda.ptx_compat")
    print([name for name in (*tools, *chips) if sys.modules.get(name)])
"""


@pytest.mark.parametrize(("path", "canary"), [("auto", "always"), ("interpreter", "never"), ("interpreter", "always")])
def test_a_serving_process_imports_no_tool(path: str, canary: str) -> None:
    if path == "interpreter":
        pytest.importorskip("triton")
    assert python(SERVING.format(path=path, canary=canary)).splitlines()[-1] == "[]"


ONE_COPY = """
    import importlib
    import os
    import portattn, portattn.backends.cuda, portattn.quirks
    from portattn.errors import PortattnError
    for second in ("portattn.portattn", "portattn.portattn.errors", "portattn.tests", "portattn.docs"):
        try:
            importlib.import_module(second)
        except ModuleNotFoundError as error:
            assert "is now" not in str(error), error
        else:
            raise SystemExit(f"{second} is there")
    for part in (portattn, portattn.backends.cuda, portattn.quirks):
        print(os.path.dirname(part.__file__))
    assert len(portattn.__path__) == 1
    assert portattn.target("cuda:sm_90", "none").arch.cores
    assert len(portattn.Registry.load().quirks) > 10
"""


def test_the_source_tree_has_one_copy_of_everything() -> None:
    root = Path(__file__).parents[1]
    folders = python(ONE_COPY).splitlines()
    assert folders == [str(root / part) for part in ("portattn", "backends/cuda", "quirks")]


def test_another_tree_than_the_installed_one_is_itself(tmp_path: Path) -> None:
    """A Python that is started in a tree imports its backends too, not those of an editable install elsewhere."""
    root = Path(__file__).parents[1]
    for part in ("portattn", "backends", "quirks"):
        (tmp_path / part).symlink_to(root / part)
    (tmp_path / "tests").mkdir()
    folders = python(ONE_COPY, path=tmp_path).splitlines()
    assert folders == [str(tmp_path / part) for part in ("portattn", "backends/cuda", "quirks")]


def test_an_installed_copy_holds_its_parts(tmp_path: Path) -> None:
    root, package = Path(__file__).parents[1], tmp_path / "portattn"
    package.mkdir()
    for part in [*(root / "portattn").iterdir(), root / "backends", root / "quirks"]:
        (package / part.name).symlink_to(part)
    folders = python(ONE_COPY, path=tmp_path).splitlines()
    assert folders == [str(package / part) for part in (".", "backends/cuda", "quirks")]


def test_every_public_name_is_there() -> None:
    python("""
        import portattn
        for name in portattn.__all__:
            assert getattr(portattn, name) is not None, name
        assert set(portattn.__all__) <= set(dir(portattn))
        try:
            portattn.flash_attention
        except AttributeError as error:
            assert "flash_attention" in str(error)
        else:
            raise SystemExit("an unknown name was found")
    """)


def test_no_device_is_touched() -> None:
    """Neither by importing nor by planning for chips that are not here."""
    python("""
        import torch
        import portattn
        portattn.attention, portattn.Registry
        p = portattn.Problem(batch=1, heads_q=1, heads_k=1, seq_q=8, seq_k=8, head_dim=64)
        portattn.plan(p, portattn.target("cuda:sm_90", "triton==3.6.0"))
        portattn.plan(p, portattn.target("ascend:ascend910b2", "triton-ascend==3.2.1"))
        import sys
        assert not torch.cuda.is_initialized()
        assert "torch_npu" not in sys.modules
        assert not sys.modules.get("triton")
    """)


def test_every_op_on_a_cpu_needs_neither_triton_nor_numpy_nor_the_command_lines_packages() -> None:
    out = python(
        """
        import torch
        import portattn
        ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        q, cache, rows = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(5, 2, 8)
        pages, table, lengths = torch.randn(3, 8, 2, 8), ints([2, 0]), ints(11)
        chosen, counts = ints(3, 1, 4).expand(1, 2, 3).contiguous(), ints([3, 2])
        results = [
            *portattn.attention(q, cache, cache, causal=True, return_lse=True),
            portattn.decode_attention(q, cache, cache, lengths),
            portattn.varlen_attention(rows, rows, rows, ints(0, 2, 5), ints(0, 2, 5), 3, 3, causal=True),
            portattn.paged_attention(q, pages, pages, table, lengths),
            portattn.sparse_attention(q, cache, cache, chosen, counts, magicpig=(4, 20)),
            portattn.mla_attention(q[..., :6], q[..., 6:], pages[:, :, 0], table, lengths, scale=0.3),
        ]
        assert all(result.isfinite().all() for result in results)
        assert "sdpa path" in portattn.explain("attention", q, q, q)
        print(portattn.last_plan().path, portattn.last_plan().toolchain)
        """,
        without=("triton", "numpy", "click", "rich", "jinja2", "transformers"),
    )
    assert out == "sdpa none"


def test_without_triton_the_interpreter_says_how_to_get_it() -> None:
    out = python(
        """
        import torch
        import portattn
        q = torch.randn(1, 2, 5, 8)
        try:
            portattn.attention(q, q, q, backend="interpreter")
        except portattn.PathUnavailable as error:
            print(error)
        """,
        without=("triton",),
    )
    assert "Triton is not installed" in out
    assert "pip install -e '.[triton]' in the checkout" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is an accelerator")
def test_triton_is_interpreted_only_when_asked_for() -> None:
    """A process that compiles must not find its kernels interpreted."""
    python("""
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import torch
        import portattn
        q = torch.randn(1, 1, 2, 4)
        portattn.attention(q, q, q)
        assert "TRITON_INTERPRET" not in os.environ
    """)


def test_calls_after_the_first_interpreted_one_run_with_kernels_of_other_modules() -> None:
    """Triton decides for the interpreter when it is imported, parts of it at the first launch only: each module of
    kernels is imported when it is first launched, and its functions decide then."""
    pytest.importorskip("triton")
    said = python("""
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import torch, portattn
        torch.manual_seed(0)
        q = torch.randn(1, 2, 4, 16, requires_grad=True)
        attention = torch.nn.functional.scaled_dot_product_attention
        try:
            first = portattn.attention(q, q, q, backend="interpreter")
            first.square().sum().backward()
        except portattn.PathUnavailable as error:
            print("unavailable:", str(error).splitlines()[-1])
            raise SystemExit
        (right,) = torch.autograd.grad(attention(q, q, q).square().sum(), q)
        print(torch.allclose(first, attention(q, q, q), atol=1e-5))
        print(torch.allclose(q.grad, right, atol=1e-5, rtol=1e-5))
        with torch.no_grad():
            lengths = torch.tensor([4], dtype=torch.int32)
            out = portattn.decode_attention(q[:, :, -1:], q, q, lengths, backend="interpreter")
            print((out - attention(q, q, q)[:, :, -1:]).abs().max().item() < 1e-5)
        print("TRITON_INTERPRET" in os.environ)
    """)
    if said.startswith("unavailable"):
        pytest.skip(said)
    assert said.split() == ["True", "True", "True", "False"]


@pytest.mark.parametrize("package", ["click", "rich", "tomlkit"])
def test_the_command_line_names_the_extra_that_it_needs(package: str) -> None:
    """A call needs none of these packages; the command says which extra brings them."""
    arguments = {"click": ["plan", "attention"], "rich": ["quirks", "list"], "tomlkit": ["quirks", "list"]}[package]
    hide = HIDE.format(names={package})
    program = f"{hide}\nimport sys\nsys.argv = ['portattn', *{arguments!r}]\nfrom portattn.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    if package == "tomlkit":  # only what edits entries needs it
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 2, done.stderr
    assert done.stderr == f"portattn: the command line needs {package}: pip install -e '.[tools]' in the checkout\n"


@pytest.mark.parametrize("module", ["sdpa", "dtensor", "flops"])
def test_an_integration_imports_no_dynamo(module: str) -> None:
    """Which takes a second. Functions that it must leave alone are told it once somebody else imports it."""
    loaded = python(f"""
        import sys
        import portattn.integrations.{module}
        print("torch._dynamo" in sys.modules)
    """)
    assert loaded == "False"


def test_packages_of_its_own_are_attributes() -> None:
    code = "import portattn; portattn.integrations.__name__; portattn.distributed.__name__"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_in_an_archive_it_says_that_it_must_be_unpacked(tmp_path: Path) -> None:
    import zipfile

    import portattn

    archive = tmp_path / "portattn.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for module in Path(portattn.__file__).parent.glob("*.py"):
            made.write(module, f"portattn/{module.name}")
    done = subprocess.run(
        [sys.executable, "-c", "import portattn"],
        capture_output=True, text=True, timeout=60, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(archive)},
    )  # fmt: skip
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: portattn cannot be imported from an archive ({archive}/portattn)")
    assert "unpack it" in said


@pytest.mark.parametrize("own", [None, {}, {"PYTHONPATH": "/nowhere"}], ids=["inherited", "empty", "replaced"])
def test_children_of_tests_import_the_tree_of_the_tests(tmp_path: Path, own: dict[str, str] | None) -> None:
    code = (
        "import portattn as p, portattn.backends as b, portattn.quirks as q\n"
        "print(p.__file__, b.__file__, q.__file__, sep='\\n')"
    )
    files = [str(ROOT / part / "__init__.py") for part in ("portattn", "backends", "quirks")]
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=own, check=True
    )
    assert told.stdout.splitlines() == files


def test_the_tests_refuse_to_judge_another_portattn(tmp_path: Path) -> None:
    """As where pytest has imported an installed one, as a plug-in, before it came to the tests' conftest.py."""
    (tmp_path / "portattn").mkdir()
    (tmp_path / "portattn" / "__init__.py").write_text("")
    (tmp_path / "importing.py").write_text("import portattn")
    line = ["-m", "pytest", "-p", "importing", "-p", "no:cacheprovider", str(ROOT / "tests" / "test_errors.py")]
    own = {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, *line], cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout
    assert f"the tests in {ROOT} would judge another portattn, {tmp_path}/portattn/__init__.py" in done.stderr
    assert f"PYTHONPATH={ROOT}" in done.stderr


# The distribution: its files, its extras and the hints that name them.


def test_the_wheel_has_the_files_of_the_tree(tmp_path: Path) -> None:
    """An editable install would work without a file that the distribution lacks."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    tree = tmp_path / "tree"
    for name in ("portattn", *PARTS):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, tree]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"portattn-{portattn.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    found = [path.relative_to(ROOT) for name in ("portattn", *PARTS) for path in (ROOT / name).rglob("*.*")]
    files = {path.as_posix() for path in found if (ROOT / path).is_file() and path.suffix != ".pyc"}
    assert packed == {f"portattn/{path}" if path.startswith(PARTS) else path for path in files}


def test_an_extra_is_installed_from_where_portattn_is(tmp_path: Path) -> None:
    """No index has what is in a checkout; an installed portattn has backends/ inside its own folder."""
    package = tmp_path / "portattn"
    (tmp_path / "backends").mkdir()
    package.mkdir()
    assert install_extra("triton", str(package)) == "pip install -e '.[triton]' in the checkout"
    assert install_extra("triton") == "pip install -e '.[triton]' in the checkout"
    (package / "backends").mkdir()
    assert install_extra("triton", str(package)) == "pip install 'triton<3.10,>=3.2' 'numpy<2.4'"
    tools = install_extra("tools", str(package))
    assert re.fullmatch(r"pip install 'click>=8.2' 'rich>=13.0' 'jinja2>=3.1' 'tomlkit>=0.13'", tools)
    assert install_extra("bench", str(package)) == f"{tools} 'matplotlib>=3.8'"


def test_every_hint_names_an_extra_that_there_is() -> None:
    """In code through install_extra alone, so that nobody is told to ask an index for a checkout's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = set()
    for path in [*(ROOT / "portattn").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        named |= set(re.findall(r"install_extra\([\"'](\w+)[\"']", text))
        assert "pip install " not in text or path.name == "source_tree.py", path
    assert {"triton", "tools", "transformers", "diffusers", "bench"} == named & extras == named
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        text = page.read_text(encoding="utf-8")
        assert "pip install 'portattn[" not in text, page
        for several in re.findall(r"pip install (?:-e )?'\.\[([\w,]+)\]'", text):
            assert set(several.split(",")) <= extras, page
