"""A backend package that is broken: it is left out, once with a warning, and nobody else's plans and calls notice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from backend_packages import install
from quirk_files import plant

# What is done to the package called so: (file, text to add at its end, or None to remove it), and what is said of it.
KINDS: dict[str, tuple[str, str | bytes | None, str]] = {
    "fails_on_import": ("__init__.py", "raise OSError('no libacme.so')", "OSError: no libacme.so"),
    "lacks_attribute": ("__init__.py", "del Plugin", "AttributeError: "),
    "no_backend": ("__init__.py", "Plugin = dict(a=1)", "registers {'a': 1}, which is no portattn.planning.backend."),
    "constructor": ("__init__.py", "Plugin.__init__ = lambda self: 1 / 0", "ZeroDivisionError: division by zero"),
    "taken_name": ("__init__.py", "Plugin.name = 'cpu'", "it registers 'cpu', which exists already"),
    "impossible_name": ("__init__.py", "Plugin.name = 'a:b'", "'a:b' cannot be a backend's name"),
    "no_device_type": ("__init__.py", "del Plugin.device_type", "Plugin.device_type must be a str"),
    "exits_on_import": ("__init__.py", "raise SystemExit(3)", "SystemExit: 3"),
    "nameless_path": ("__init__.py", "del Attention.name", "Attention.name must be a str"),
    "no_path": ("__init__.py", "Plugin.vendor = (3,)", "it has 3 among its paths, which is no VendorPath"),
    "no_ops": ("__init__.py", "Attention.ops = ()", "Attention.ops is (), but must be a tuple of ops, one at least"),
    "ops_of_text": ("__init__.py", "Attention.ops = 'attention'", "Attention.ops is 'attention', but must be a tuple"),
    "unknown_op": ("__init__.py", "Attention.ops = ('attend',)", "Attention.ops is ('attend',), but must be a tuple"),
    "no_takes": ("__init__.py", "Attention.takes = None", "Attention.takes has None, but must be a set of "),
    "takes_text": ("__init__.py", "Attention.takes = 'causal'", "Attention.takes has 'causal', but must be a set of "),
    "misspelt_takes": ("__init__.py", "Attention.takes = {'casual'}", "Attention.takes has ['casual'], but must be"),
    "arches_missing": ("arches.toml", None, "arches.toml: FileNotFoundError: No such file or directory"),
    "arches_unreadable": ("arches.toml", "[", "arches.toml:9: not TOML"),
    "arches_schema": ("arches.toml", "colour = 'red'", "arches.toml:9: key 'arches_schema1.colour': "),
    "tuning_schema": ("tuning/acme1.toml", "colour = 'red'", "acme1.toml"),
    "verified_schema": ("verified.toml", "[[seen]]\narch = 'acme1'\n", "verified.toml:2: key 'seen.0.arch'"),
    "verified_unreadable": ("verified.toml", "[", "verified.toml:1: not TOML"),
    "no_quirk_folder": ("__init__.py", "Plugin.quirk_folder = lambda self: Path('gone')", "gone: the folder of its"),
    "quirk_folder_raises": ("__init__.py", "Plugin.quirk_folder = lambda self: 1 / 0", "ZeroDivisionError"),
    "quirk_unreadable": ("quirks/quirk_unreadable-0001-planted.toml", "'", "quirk_unreadable-0001-planted.toml:"),
    "quirk_schema": ("quirks/quirk_schema-0001-planted.toml", "\n[colour]\nred = 1", "unknown key `colour`"),
    "quirk_not_text": ("quirks/quirk_not_text-0001-planted.toml", b"\xff", "not UTF-8"),
    "quirk_misplaced": ("quirks/more/a-0002-x.toml", "", "this one would never be read"),
    "quirk_id_taken": ("quirks/any-0001-taken.toml", "id = 1", "id 'any-0001-taken' is already taken"),
}

SCRIPT = """
import json, warnings
import click.testing, torch
import portattn
from portattn.cli import doctor, main
from portattn.planning.registry import detect_target
from portattn.planning.planner import plan
from portattn.planning.registry import Registry

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    q, k, v = torch.randn(3, 1, 2, 5, 16).unbind()
    for _ in range(2):
        out = portattn.attention(q, k, v)
        torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v))
    Registry.load.cache_clear()
    problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)
    planned = plan(problem, portattn.target("umbra:umbra1", "none")).path
named, device = {}, {}
for name in NAMES:
    device[name] = detect_target(name, 0)[1]
    try:
        portattn.target(f"{name}:{name}1", "none")
    except portattn.ArgumentError as error:
        named[name] = str(error)
# Not of this test: real calls and compiles, and comparing all quirks with each other.
doctor.device_checks = doctor.interpreter_check = lambda seconds: []
doctor.launches = lambda: doctor.Section(title="launches")
if not FULL:
    from portattn.tools.quirks import audit
    audit.audit = lambda registry, today: []
found = {
    "warnings": [str(w.message) for w in caught if issubclass(w.category, portattn.PluginWarning)],
    "planned": planned, "named": named, "device": device, "backends": list(Registry.load().backends),
    "quirks": sorted(name for name in Registry.load().quirks if name.endswith(("-planted", "-taken"))),
}
for key, command in (("doctor", ["doctor"]), ("audit", ["quirks", "audit"])):
    for suffix in ([], ["--json"]):
        done = click.testing.CliRunner().invoke(main, [*command, *suffix], prog_name="portattn")
        found[key + "".join(suffix)] = [done.exit_code, done.stdout]
print(json.dumps(found))
"""


def seen(folder: Path, *names: str, full: bool = False) -> dict[str, Any]:
    """What a process finds where these packages are installed; `full`: with the whole audit."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PORTATTN_CACHE_DIR": str(folder / "cache")}
    script = SCRIPT.replace("FULL", str(full)).replace("NAMES", str(names))
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def install_broken(folder: Path, kind: str) -> None:
    name, text, _ = KINDS[kind]
    changed = install(folder, kind) / name
    if text is None:
        changed.unlink()
        return
    changed.parent.mkdir(exist_ok=True)
    added = text.encode() if isinstance(text, str) else text
    changed.write_bytes((changed.read_bytes() if changed.exists() else b"") + added)


def install_umbra(folder: Path) -> None:
    """The package that is whole. It has the quirk whose id another one takes: it is found first, and has the id."""
    quirks = install(folder, "umbra") / "quirks"
    plant(quirks.parent, "any-0001-taken", 'note = "x"').rename(quirks / "any-0001-taken.toml")


@pytest.fixture(scope="module")
def broken_in_every_way(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them installed in one place, beside one package that is whole."""
    umbra, folder = tmp_path_factory.mktemp("umbra"), tmp_path_factory.mktemp("broken")
    install_umbra(umbra)
    for kind in KINDS:
        install_broken(folder, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
        return seen(umbra, *KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_package_is_named_wherever_somebody_looks(broken_in_every_way: dict[str, Any], kind: str) -> None:
    found, said = broken_in_every_way, KINDS[kind][2]
    package = f"portattn-{kind} 0.1 ({kind} = portattn_{kind}:Plugin)"
    (warning,) = [text for text in found["warnings"] if package in text]
    assert said in warning
    assert "portattn plans as if it were not installed" in warning
    assert found["named"][kind].startswith(f"target: backend is {kind!r}, but backend package {package} is broken: ")
    assert said in found["named"][kind]
    assert f"no backend knows device {kind}:0" in found["device"][kind]
    assert said in found["device"][kind]
    (backends,) = [s for s in json.loads(found["doctor--json"][1])["sections"] if s["title"] == "backends"]
    assert [said in error for error in backends["errors"] if package in error] == [True]
    findings = [f for f in json.loads(found["audit--json"][1])["findings"] if package in f["message"]]
    assert {f["severity"] for f in findings} == {"error"}
    shown = "\n".join(f"{f['file']}:{f['line']}: {f['message']}" for f in findings)
    assert all(part in shown for part in said.split(": "))
    for report in ("doctor", "audit"):
        assert package in found[report][1]


def test_broken_packages_stop_nobody_else(broken_in_every_way: dict[str, Any]) -> None:
    """Calls gave SDPA's results, or there would be nothing to see here."""
    found = broken_in_every_way
    assert (found["planned"], found["backends"][-1]) == ("umbra_attention", "umbra")
    assert not set(found["backends"]) & set(KINDS)
    assert (found["quirks"], len(found["warnings"])) == (["any-0001-taken", "umbra-0001-planted"], len(KINDS))
    assert {found[key][0] for key in ("doctor", "doctor--json", "audit", "audit--json")} == {1}
    assert not [s["error"] for s in json.loads(found["doctor--json"][1])["sections"] if s["error"]]


def test_the_audit_says_everything_that_is_wrong_with_a_package(tmp_path: Path) -> None:
    package = install(tmp_path, "acme")
    install(tmp_path, "umbra")
    (package / "arches.toml").write_text("[acme1]\n")
    (package / "quirks" / "acme-0001-planted.toml").write_text("id = 3\n")
    found = seen(tmp_path, "acme", full=True)
    audited = json.loads(found["audit--json"][1])["findings"]
    errors = {Path(f["file"]).name: f["line"] for f in audited if "portattn-acme 0.1" in f["message"]}
    assert errors == {"arches.toml": 1, "acme-0001-planted.toml": 1}
    others = {f["quirk"] for f in audited if "portattn-acme 0.1" not in f["message"]}
    assert others == {"umbra-0001-planted"}, "no core kernel runs on umbra: its quirk can never apply"
    (warning,) = found["warnings"]
    assert "arches.toml:1: " in warning
    assert "acme-0001-planted.toml:1: " in warning


def test_packages_that_are_whole_are_not_warned_about(tmp_path: Path) -> None:
    install(tmp_path, "acme")
    quirks = install(tmp_path, "umbra") / "quirks"
    plant(quirks.parent, "acme-0002-planted", 'note = "x"').rename(quirks / "acme-0002-planted.toml")
    found = seen(tmp_path, "acme")
    assert (found["warnings"], found["named"], set(found["backends"][-2:])) == ([], {}, {"acme", "umbra"})
    assert found["quirks"] == ["acme-0001-planted", "acme-0002-planted", "umbra-0001-planted"]
    assert [found[key][0] for key in ("doctor", "audit")] == [0, 0]


def ran(folder: Path, script: str, **variables: str) -> list[str]:
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "PORTATTN_CACHE_DIR": str(folder / "cache"), **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# What is done to the entry points of a distribution that may have nothing to do with portattn, and what is said of it.
UNREADABLE: dict[str, tuple[str | bytes | None, str]] = {
    "not_text": (b"[portattn.backends]\n\xff = x:Y\n", "UnicodeDecodeError: "),
    "no_equals": ("[console_scripts]\nportattn\n", "TypeError: "),
    "a_folder": ("", "IsADirectoryError: Is a directory"),
    "a_link": ("", "FileNotFoundError: No such file or directory"),
    "missing": (None, "it is missing, and the distribution's RECORD lists it"),
    "metadata": (b"[portattn.backends]\n\xff = x:Y\n", "UnicodeDecodeError: "),
}


def install_unreadable(folder: Path, kind: str) -> Path:
    """A distribution KIND 0.1 whose entry points cannot be read, and where they would be."""
    text, _ = UNREADABLE[kind]
    info = folder / f"{kind}-0.1.dist-info"
    info.mkdir()
    about = f"Metadata-Version: 2.1\nName: {kind}\nVersion: 0.1\n".encode()
    (info / "METADATA").write_bytes(about + (b"Summary: \xff\n" if kind == "metadata" else b""))
    (info / "RECORD").write_bytes(f"{info.name}/entry_points.txt,,\n".encode() + b"\xff" * (kind == "metadata"))
    file = info / "entry_points.txt"
    if kind == "a_folder":
        file.mkdir()
    elif kind == "a_link":
        file.symlink_to(folder / "gone")
    elif text is not None:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_distribution_whose_entry_points_cannot_be_read(tmp_path, kind, monkeypatch):
    """It stops nobody: calls, plans and a backend of another distribution go on. torch itself must not look for its own
    entry points, of which its import would die."""
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    file = install_unreadable(tmp_path, kind)
    install(tmp_path, "umbra")
    found = seen(tmp_path)
    assert (found["planned"], found["backends"][-1]) == ("umbra_attention", "umbra")
    (warning,) = found["warnings"]
    shown = "metadata-0.1.dist-info" if kind == "metadata" else f"{kind} 0.1"
    said = f"distribution {shown} is broken: {file}: its entry points cannot be read: {UNREADABLE[kind][1]}"
    assert warning.startswith(said)
    assert "portattn plans without the backends that it may have; `portattn doctor` shows it too" in warning
    (backends,) = [s for s in json.loads(found["doctor--json"][1])["sections"] if s["title"] == "backends"]
    assert [error.startswith(said) for error in backends["errors"]] == [True]
    assert not [s["error"] for s in json.loads(found["doctor--json"][1])["sections"] if s["error"]]
    (finding,) = [f for f in json.loads(found["audit--json"][1])["findings"] if f["file"] == str(file)]
    assert finding["severity"] == "error"
    assert finding["message"].startswith(f"distribution {shown} is left out of every plan: its entry points cannot")
    assert [found[key][0] for key in ("doctor", "audit")] == [1, 1]


def test_distributions_without_entry_points_are_whole(tmp_path: Path) -> None:
    """Most have none; a file without a line has none either. Of two of one name the first counts."""
    for name, points in (("none", None), ("empty", ""), ("blank", "\n# nothing\n")):
        info = tmp_path / f"{name}-0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n")
        if points is not None:
            (info / "entry_points.txt").write_text(points)
    second = tmp_path / "second"
    second.mkdir()
    install(tmp_path, "umbra")
    (second / "Portattn.Umbra-0.0.dist-info").mkdir()
    (second / "Portattn.Umbra-0.0.dist-info" / "entry_points.txt").write_bytes(b"\xff")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(second), os.environ.get("PYTHONPATH", "")]))
        found = seen(tmp_path)
    assert (found["warnings"], found["backends"][-1]) == ([], "umbra")


RAISES = """
import json, warnings
import click.testing, torch
import portattn
from portattn.cli import doctor, main
from portattn.planning.registry import detect_target, devices
doctor.device_checks = doctor.interpreter_check = lambda seconds: []
doctor.launches = lambda: doctor.Section(title="launches")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        print([target.name for target in devices()])
    print(detect_target("acme", 0)[1])
    q = torch.randn(1, 2, 5, 16)
    portattn.attention(q, q, q)
    print(portattn.plan(portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=8, seq_k=8, head_dim=64),
                        portattn.target("acme:acme1", "none")).path)
print(json.dumps([str(w.message) for w in caught if w.category is portattn.PluginWarning]))
done = click.testing.CliRunner().invoke(main, ["doctor"], prog_name="portattn")
print(json.dumps([done.exit_code, done.output]))
"""


@pytest.mark.parametrize("question", ["detect", "describe", "machine_components"])
def test_a_backend_that_raises_is_disabled(tmp_path: Path, question: str) -> None:
    """Its package is whole, and it raises when it is asked about this machine, which it must not."""
    package = install(tmp_path, "acme")
    with (package / "__init__.py").open("a") as module:
        if question == "machine_components":
            module.write("Plugin.detect = lambda self, index=None: 'acme1'\n")
        module.write(f"def fails(*given):\n    raise OSError('no driver')\n\nPlugin.{question} = fails\n")
    first, second, unknown, path, warned, doctor = ran(tmp_path, RAISES)
    said = (
        f"backend package portattn-acme 0.1 (acme = portattn_acme:Plugin) is broken: {question}() raised "
        "OSError: no driver. Its devices are not used in this process"
    )
    assert json.loads(warned) == [f"{said}; `portattn doctor` shows it too"]
    assert "cpu:generic" in first
    if question != "machine_components":  # what was detected then is there, of unknown versions
        assert "acme" not in first
        assert said in unknown
    assert (first, path) == (second, "acme_attention")
    status, report = json.loads(doctor)
    assert status == 1
    assert report.count("no driver") == 1, report


STRICT = """
import warnings
import torch
import portattn
warnings.simplefilter("error", portattn.PluginWarning)
q = torch.randn(1, 2, 5, 16)
for ask in (lambda: portattn.attention(q, q, q), lambda: portattn.attention(q, q, q).shape):
    try:
        print("ran", ask())
    except portattn.PluginWarning as error:
        print("raised", str(error).count("is broken"), "acme" in str(error), "umbra" in str(error))
"""


def test_where_warnings_are_errors_one_call_is_stopped(tmp_path: Path) -> None:
    for name in ("acme", "umbra"):
        (install(tmp_path, name) / "arches.toml").unlink()
    assert ran(tmp_path, STRICT) == ["raised 2 True True", "ran torch.Size([1, 2, 5, 16])"]


OVERRIDES = """
import json, warnings
import portattn
problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=8, seq_k=8, head_dim=64)
target = portattn.target("cuda:sm_90", "triton==3.6.0")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for text in ("-acme-0001-planted", "-acme-0001", "-acme-0001,-cuda-0007", "-gone-0003", "+acme-0001", "-acme"):
        try:
            with portattn.settings(quirks=text):
                portattn.plan(problem, target), portattn.plan(problem, target)
            print(text, "planned")
        except portattn.SettingError as error:
            print(text, error)
print(json.dumps([str(w.message) for w in caught if "override" in str(w.message)]))
"""


def test_a_quirk_of_a_broken_package_is_switched_off_with_a_warning(tmp_path: Path) -> None:
    """Known by its file's name, or, where the package was not even loaded, by its backend's name. A misspelt id is an
    error all the same, and so is one that should be applied."""
    (install(tmp_path, "acme") / "arches.toml").unlink()
    (install(tmp_path, "gone") / "__init__.py").write_text("raise OSError('no libgone.so')")
    *planned, warned = ran(tmp_path, OVERRIDES)
    assert planned[:4] == [
        "-acme-0001-planted planned", "-acme-0001 planned", "-acme-0001,-cuda-0007 planned", "-gone-0003 planned",
    ]  # fmt: skip
    assert planned[4].startswith("+acme-0001 quirk override '+acme-0001' names no quirk")
    assert planned[5] == "-acme planned"
    texts = json.loads(warned)
    assert [text.split(":")[0] for text in texts[:3]] == [
        f"quirk override '-{name}' switches nothing off" for name in ("acme-0001-planted", "acme-0001", "gone-0003")
    ]
    assert len(texts) == 4, "each once"
    assert "backend package portattn-acme 0.1" in texts[0]
