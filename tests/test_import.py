"""What importing costs, and that nothing needs what the user has not got. Each test has a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from places import ROOT

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


def test_importing_imports_nothing_heavy() -> None:
    loaded = python("""
        import sys
        import portattn
        dir(portattn)
        heavy = ("torch", "triton", "numpy", "click", "rich", "jinja2", "msgspec", "transformers")
        print([name for name in heavy if sys.modules.get(name)])
    """)
    assert loaded == "[]"


def test_the_public_functions_load_no_triton_and_no_registry_data() -> None:
    """What a first use costs is measured by `portattn bench` (first calls); here only what it must not load."""
    loaded = python("""
        import sys
        import torch
        import portattn
        portattn.attention, portattn.plan, portattn.settings
        heavy = ("triton", "numpy.testing", "click", "rich", "jinja2", "tomlkit", "portattn.backends", "portattn.tools")
        print([name for name in heavy if sys.modules.get(name)])
    """)
    assert loaded == "[]"


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


def test_old_names_of_modules_say_the_new_ones() -> None:
    said = python("""
        import importlib
        import portattn
        from portattn.moved import MOVED
        for old, new in MOVED.items():
            importlib.import_module(new)
            for name in (f"portattn.{old}", f"portattn.{old}.deeper"):
                try:
                    importlib.import_module(name)
                except ModuleNotFoundError as error:
                    assert str(error) == f"portattn.{old} is now {new}", (name, error)
                else:
                    raise SystemExit(f"{name} is still there")
        try:
            from portattn import lab
        except ImportError as error:
            print(error)
    """)
    assert said == "portattn.lab is now portattn.tools.lab"


def test_asking_for_an_old_name_raises_nothing() -> None:
    said = python("""
        import importlib.util
        import portattn
        from portattn.moved import MOVED
        for old, new in MOVED.items():
            spec = importlib.util.find_spec(f"portattn.{old}")
            assert spec.origin == new, spec
        print(importlib.util.find_spec("portattn.never_there"))
    """)
    assert said == "None"


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


def test_attention_on_a_cpu_needs_no_triton() -> None:
    out = python(
        """
        import torch
        import portattn
        q = torch.randn(1, 2, 5, 8)
        out, lse = portattn.attention(q, q, q, causal=True, return_lse=True)
        assert out.isfinite().all() and lse.isfinite().all()
        portattn.decode_attention(q, q, q, torch.tensor([3], dtype=torch.int32))
        print(portattn.last_plan().path, portattn.last_plan().toolchain)
        """,
        without=("triton",),
    )
    assert out == "sdpa none"


def test_every_op_on_a_cpu_needs_no_triton() -> None:
    out = python(
        """
        import torch
        import portattn
        ints = lambda *values: torch.tensor(values, dtype=torch.int32)
        q, cache, rows = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 16, 8), torch.randn(5, 2, 8)
        pages, table, lengths = torch.randn(3, 8, 2, 8), ints([2, 0]), ints(11)
        chosen, counts = ints(3, 1, 4).expand(1, 2, 3).contiguous(), ints([3, 2])
        results = [
            portattn.attention(q, cache, cache),
            portattn.decode_attention(q, cache, cache, lengths),
            portattn.varlen_attention(rows, rows, rows, ints(0, 2, 5), ints(0, 2, 5), 3, 3, causal=True),
            portattn.paged_attention(q, pages, pages, table, lengths),
            portattn.sparse_attention(q, cache, cache, chosen, counts, magicpig=(4, 20)),
            portattn.mla_attention(q[..., :6], q[..., 6:], pages[:, :, 0], table, lengths, scale=0.3),
        ]
        assert all(result.isfinite().all() for result in results)
        print(portattn.last_plan().path)
        """,
        without=("triton", "numpy"),
    )
    assert out == "sdpa"


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


def test_the_library_needs_neither_the_command_lines_packages_nor_numpy() -> None:
    python(
        """
        import torch
        import portattn
        q = torch.randn(1, 2, 5, 8)
        assert portattn.attention(q, q, q).shape == q.shape
        print(portattn.explain("attention", q, q, q))
        """,
        without=("click", "rich", "jinja2", "numpy", "triton", "transformers"),
    )


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


def test_the_first_interpreted_call_of_a_process_runs() -> None:
    """Triton decides for the interpreter when it is imported, parts of it at the first launch only."""
    pytest.importorskip("triton")
    said = python("""
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import torch, portattn
        q = torch.randn(1, 2, 4, 16)
        try:
            out = portattn.attention(q, q, q, backend="interpreter")
        except portattn.PathUnavailable as error:
            print("unavailable:", str(error).splitlines()[-1])
            raise SystemExit
        print((out - torch.nn.functional.scaled_dot_product_attention(q, q, q)).abs().max().item() < 1e-5)
    """)
    if said.startswith("unavailable"):
        pytest.skip(said)
    assert said.splitlines()[-1] == "True"


def test_calls_after_the_first_interpreted_one_run_with_kernels_of_other_modules() -> None:
    """Each module of kernels is imported when it is first launched, and its functions decide then."""
    pytest.importorskip("triton")
    said = python("""
        import os
        os.environ.pop("TRITON_INTERPRET", None)
        import torch, portattn
        torch.manual_seed(0)
        q = torch.randn(1, 2, 4, 16, requires_grad=True)
        attention = torch.nn.functional.scaled_dot_product_attention
        try:
            portattn.attention(q, q, q, backend="interpreter").square().sum().backward()
        except portattn.PathUnavailable as error:
            print("unavailable:", str(error).splitlines()[-1])
            raise SystemExit
        (right,) = torch.autograd.grad(attention(q, q, q).square().sum(), q)
        print(torch.allclose(q.grad, right, atol=1e-5, rtol=1e-5))
        with torch.no_grad():
            lengths = torch.tensor([4], dtype=torch.int32)
            out = portattn.decode_attention(q[:, :, -1:], q, q, lengths, backend="interpreter")
            print((out - attention(q, q, q)[:, :, -1:]).abs().max().item() < 1e-5)
        print("TRITON_INTERPRET" in os.environ)
    """)
    if said.startswith("unavailable"):
        pytest.skip(said)
    assert said.split() == ["True", "True", "False"]


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
    """Wherever they start, and with whatever environment."""
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
