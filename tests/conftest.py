"""What every test gets: a device to run kernels on, settings of its own, and no state left over from another test.
Triton decides once a process whether kernels are compiled or interpreted, so the choice is made here, before anything
imports it: compiled on an accelerator, interpreted (numpy on the CPU) without one."""

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
# Tests judge the tree that they lie in, whatever else is installed: this process by sys.path, children by PYTHONPATH.
sys.path.insert(0, str(ROOT))
_own = [
    str(ROOT), *(str(Path(place).resolve()) for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place),
]  # fmt: skip
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_own))
_portattn = importlib.util.find_spec("portattn")  # the imported one, where it is imported already
if _portattn is None or _portattn.origin is None or Path(_portattn.origin).resolve().parent.parent != ROOT:
    raise pytest.UsageError(
        f"the tests in {ROOT} would judge another portattn, {_portattn and _portattn.origin}, which pytest has "
        f"imported as a plug-in: start them in {ROOT} as `python -m pytest`, or with PYTHONPATH={ROOT}"
    )

_start, _caches = subprocess.Popen.__init__, itertools.count()


@functools.wraps(_start)
def _start_beside_the_tree(self: subprocess.Popen[Any], args: Any, *rest: Any, **named: Any) -> None:
    """Start a program; a Python with an environment of its own finds the tree behind all that its PYTHONPATH names. An
    installed portattn would come next: mutants were judged by tests of it."""
    command = [args] if isinstance(args, (str, os.PathLike)) else list(args)
    own = named.get("env")
    if own is not None and os.fspath(command[0]) == sys.executable and WITHOUT_PORTATTN not in own:
        path = os.pathsep.join(filter(None, [own.get("PYTHONPATH"), str(ROOT)]))
        named["env"] = {**own, "PYTHONPATH": path}
    _start(self, args, *rest, **named)


subprocess.Popen.__init__ = _start_beside_the_tree  # type: ignore[method-assign]

_home = Path(os.path.expanduser("~"))
if not os.access(next(folder for folder in (_home, *_home.parents) if folder.exists()), os.W_OK):
    _cache = tempfile.TemporaryDirectory(prefix="portattn-tests-")  # Triton keeps kernels there, and fails without it
    os.environ.setdefault("TRITON_HOME", _cache.name)
    os.environ.setdefault("TRITON_CACHE_DIR", os.path.join(_cache.name, "cache"))

ACCELERATOR = torch.cuda.is_available()
if ACCELERATOR:
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))  # tests share helpers by `import support`

import support  # noqa: E402
import tiers  # noqa: E402
from places import WITHOUT_PORTATTN  # noqa: E402
from quick_interpreter import quick_interpreter  # noqa: E402

from portattn import Target, config  # noqa: E402
from portattn.planning.registry import Registry, parse_target  # noqa: E402
from portattn.tools.lab import folders  # noqa: E402

pytest_plugins = ["pytester"]  # runs of pytest inside a test: of portattn's own plug-in

torch.set_num_threads(1)  # problems are tiny, and test processes run side by side


def pytest_configure(config: pytest.Config) -> None:
    # Triton's interpreter turns one-element arrays into scalars, and reduces over rows that hold only NaN (padding).
    for ignored in ("DeprecationWarning:triton.runtime.interpreter", "RuntimeWarning:triton.runtime.interpreter"):
        config.addinivalue_line("filterwarnings", f"ignore::{ignored}")
    times = config.getoption("--durations-to")
    if times is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(tiers.Recorder(Path(times)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = config.getoption("--tier")
    if tier != "all":
        listed = tiers.slow_tests()
        parts: dict[bool, list[pytest.Item]] = {True: [], False: []}
        for item in items:
            parts[tiers.is_slow(item.nodeid, listed)].append(item)
        config.hook.pytest_deselected(items=parts[tier != "slow"])
        items[:] = parts[tier == "slow"]
    no_interpreter = support.no_interpreter()
    for item in items:
        if config.getoption("--durations-to"):
            tiers.note_shared_fixtures(item)
        if item.get_closest_marker("gpu") and not ACCELERATOR:
            item.add_marker(pytest.mark.skip(reason="torch sees no accelerator"))
        if item.get_closest_marker("interpreter") and ACCELERATOR:
            item.add_marker(pytest.mark.skip(reason="Triton compiles for the accelerator in this process"))
        if item.get_closest_marker("interpreter") and no_interpreter:
            item.add_marker(pytest.mark.skip(reason=no_interpreter))
        if item.get_closest_marker("compiles") and support.TRITON is None:
            item.add_marker(pytest.mark.skip(reason="Triton is not installed"))


@pytest.fixture(scope="session")
def device() -> support.Device:
    """Where kernels run: the accelerator where there is one, else the CPU under Triton's interpreter."""
    if ACCELERATOR:
        if support.TRITON is None:
            pytest.skip("Triton is not installed")
        return support.Device("cuda", "triton")
    reason = support.no_interpreter()
    if reason:
        pytest.skip(reason)
    return support.Device("cpu", "interpreter")


@pytest.fixture(scope="session", autouse=True)
def _interpreter_without_waste() -> None:
    if not ACCELERATOR and not support.no_interpreter():
        quick_interpreter()


@pytest.fixture(autouse=True)
def _own_settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No PORTATTN_* of the developer's, and records in a folder of the test's own. For most tests it is only a name:
    pytest makes a folder by looking at all that it has made."""
    for name in [n for n in os.environ if n.startswith("PORTATTN_")]:
        monkeypatch.delenv(name)
    factory: pytest.TempPathFactory = request.getfixturevalue("tmp_path_factory")
    own = "tmp_path" in request.fixturenames
    cache = request.getfixturevalue("tmp_path") / "cache" if own else factory.getbasetemp() / f"cache-{next(_caches)}"
    monkeypatch.setenv("PORTATTN_CACHE_DIR", str(cache))
    config.environment_settings.cache_clear()
    yield
    config.environment_settings.cache_clear()  # fixtures of the session are made between tests: the developer's hold


@pytest.fixture(scope="session")
def _users_lab() -> Path:
    """Return the lab's folder by the developer's settings, read before a test has its own settings. Reading them at
    import would let a mutant in `folders.root` end pytest before any test."""
    return folders.root()


@pytest.fixture
def real_lab(_users_lab: Path, _own_settings: None, tmp_path: Path) -> None:
    """The lab of this machine's user, in the test's own cache folder. Child processes find it there, too."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "lab").symlink_to(_users_lab)


@pytest.fixture(autouse=True)
def _nothing_left_over() -> Iterator[None]:
    """Plans, warnings given and the last plan are the process's: each test starts without any."""
    from portattn.api import dispatch
    from portattn.compile import ensure_compiled

    detect = dispatch.detect_target  # tests may put another in its place
    dispatch.forget_plans()
    detect.cache_clear()
    dispatch._warned.clear()
    dispatch._last.set(None)
    ensure_compiled._ready.clear()
    yield
    dispatch.forget_plans()
    detect.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier", choices=["fast", "slow", "all"], default="all", help="the tests that tests/slow.txt lists, or others"
    )
    parser.addoption("--durations-to", metavar="FILE", help="write each test's seconds as JSON, a line each")
    parser.addoption("--forms", action="store_true", help="compile every form of the variants' kernels, not a handful")
    parser.addoption(
        "--release", default="", metavar="triton==VERSION",
        help="compile the variants' kernels with this release, of the lab if it is not the installed one",
    )  # fmt: skip
    parser.addoption(
        "--soak", type=int, default=200, metavar="N", help="calls of each form in the soak tests; 200 unless told"
    )


@pytest.fixture
def core_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variant comes before the core's kernels: what a test says of these holds on every chip."""
    monkeypatch.setattr(Registry.load().backends["cuda"], "variants", ())


@pytest.fixture
def sm_90(monkeypatch: pytest.MonkeyPatch) -> Target:
    """CPU tensors are planned as if they lay on an H100 with Triton 3.6.0."""
    from portattn.api import dispatch

    target = parse_target("cuda:sm_90", "triton==3.6.0")
    monkeypatch.setattr(dispatch, "detect_target", lambda device_type, index: (target, ""))
    return target


@pytest.fixture
def kept(device: support.Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device where calls are launched by the core's kernels, and cached."""
    import opcalls

    from portattn.launch import cache

    if device.path == "interpreter":
        opcalls.pretend_accelerator(monkeypatch)
    cache.forget()
    yield device.name
    cache.forget()


@pytest.fixture(scope="module")
def gluon_target(request: pytest.FixtureRequest) -> Target:
    """sm_90 with the release of Triton that compiles the scheduled kernels: the installed one, or that of --release."""
    from portattn.schema.toolchain import installed_toolchain

    release = request.config.getoption("--release") or str(installed_toolchain())
    target = parse_target("cuda:sm_90", release)
    if not target.toolchain.within("triton", ">=3.6"):
        pytest.skip(f"the kernels need Triton 3.6 or newer, and this is {release}")
    return target


@pytest.fixture(scope="module")
def gluon_compiler(gluon_target: Target) -> Iterator[Any]:
    with support.compiler_of(str(gluon_target.toolchain)) as worker:
        yield worker


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Path]]:
    """Puts a program in the place of the child's Python: what it does after announcing the stage `ttgir`. Returns the
    file to which it adds a line for each request."""
    from portattn.compile import ensure_compiled
    from portattn.worker.client import Worker

    workers: list[Worker] = []

    def plant(behaviour: str) -> Path:
        script, requests = support.fake_python(tmp_path, behaviour)
        workers.append(Worker(python=str(script)))
        monkeypatch.setattr(ensure_compiled, "_worker", workers[-1])
        return requests

    yield plant
    for worker in workers:
        worker.close()
