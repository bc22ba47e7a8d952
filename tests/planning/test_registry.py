"""The registry's own errors: targets that nobody knows, broken files of arches and quirks, backend packages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from quirk_files import plant

from portattn.backends.cpu import CpuBackend
from portattn.errors import ArgumentError, DataError
from portattn.planning import plugins
from portattn.planning.data_files import load_arches
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry, find_backends, look_around
from portattn.schema.target import Arch

KNOWN = Registry.load()
TAIL = "sm89 (cuda:sm_89), sm80 (cuda:sm_80)"
SERVED = ", ".join(name for name, arch in KNOWN.arches["cuda"].items() if not arch.refused)


@pytest.mark.parametrize(
    ("text", "toolchain", "complaint"),
    [
        ("tpu:v5", None, f"target: backend is 'tpu', but must be one of {', '.join(KNOWN.backends)}"),
        (
            "cuda:sm_9",
            None,
            f"target: arch is 'sm_9', but cuda knows {SERVED}; near are sm90 (cuda:sm_90), sm89 (cuda:sm_89)",
        ),
        (
            "cuda:sm_90:x",
            None,
            f"target: arch is 'sm_90:x', but cuda knows {SERVED}; near are sm90 (cuda:sm_90), {TAIL}",
        ),
        ("cuda:mi300x", None, f"target: arch is 'mi300x', but cuda knows {SERVED}; it is a name of rocm:gfx942"),
        ("cuda:", None, f"target: arch is '', but cuda knows {SERVED}"),
    ],
)
def test_a_target_that_nobody_knows(text: str, toolchain: str | None, complaint: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        KNOWN.target(text, toolchain)
    assert str(caught.value) == complaint


def test_a_toolchain_that_is_none() -> None:
    with pytest.raises(ArgumentError, match=r"target: toolchain is 'triton=3', but .*NAME==VERSION") as caught:
        KNOWN.target("cuda:sm_90", "triton=3")
    assert (caught.value.argument, caught.value.value) == ("toolchain", "triton=3")
    assert "toolchain" not in caught.value.limit, "the argument is named once"


def test_targets_are_those_that_kernels_are_planned_for() -> None:
    """No arch that is refused, no backend without Triton; each with the toolchain that was asked about."""
    found = KNOWN.targets("triton==3.4.0")
    names = {target.name for target in found}
    assert {"cuda:sm_90", "rocm:gfx942", "ascend:ascend910b2"} <= names
    assert not names & {"cpu:generic", "ascend:ascend310p"}
    assert {target.toolchain.version for target in found} == {"3.4.0"}
    assert KNOWN.arch("cuda:sm_90") == KNOWN.target("cuda:sm_90", "none").arch


@pytest.mark.parametrize("backend", KNOWN.backends)
def test_every_file_of_tuning_is_read(backend: str) -> None:
    folder = KNOWN.backends[backend].folder / "tuning"
    assert set(KNOWN.tunings[backend]) == {path.stem for path in folder.glob("*.toml")}
    for tuning in {arch.tuning for arch in KNOWN.arches[backend].values()} - {""}:
        assert tuning in KNOWN.tunings[backend]


def test_broken_files_of_arches(tmp_path: Path) -> None:
    path = tmp_path / "arches.toml"
    path.write_text("# one\nfirst = 3\n")
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value) == f"{path}:2: key 'first': every arch is a table"
    path.write_text("# one\n\n[first]\ncores = 'many'\n")
    with pytest.raises(DataError, match=r"key 'first\.cores'") as caught:
        load_arches(tmp_path)
    assert caught.value.line == 4


ARCH = """title = "One"
cores = 1
scratchpad_bytes = 0
scratchpad_kind = "none"
max_programs = 1
sources = ["a test"]
"""


def test_arches_of_files_and_of_tables_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "arches").mkdir()
    for name in ("x100", "x9", "x9a"):
        (tmp_path / "arches" / f"{name}.toml").write_text(ARCH)
    (tmp_path / "arches.toml").write_text(f"[x20]\n{ARCH}")
    found = load_arches(tmp_path)
    assert list(found) == ["x9", "x9a", "x20", "x100"]
    assert all(arch.name == name for name, arch in found.items())


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        (ARCH + "colour = 'red'\n", 7, "key 'colour': the table has the unknown key `colour`"),
        (ARCH + "traits = ['wings']\n", 7, "key 'traits.0': Invalid enum value 'wings'"),
        (ARCH + "families = ['x9']\n", 7, "key 'families': 'x9' is the arch itself"),
        (ARCH + "[toolchain]\ngcc = '>=9'\n", 7, "key 'toolchain': 'gcc' is no known compiler; known: triton, "),
        (ARCH + "[toolchain]\ntriton = 'new'\n", 7, "key 'toolchain': 'new' is not a PEP 440 version range"),
        (ARCH + "name = 'x8'\n", 7, "key 'name': 'x8' is not the arch's name, 'x9', which is its file's"),
        (
            ARCH + "compiler_target = ['x', 'x8', 0]\n",
            7,
            "key 'compiler_target': 'x8' is not the compiler's name of x9",
        ),
        (ARCH + "compiler_target = ['x', 90, 0]\n", 7, "key 'compiler_target': 90 is not the compiler's name of x9"),
        (ARCH + "compiler_target = ['x', 9, 32]\n", 7, "key 'compiler_target': 32 lanes of a warp, and warp_size is 0"),
        (ARCH + "families = ['']\n", 7, "key 'families': one of them is empty"),
        (ARCH + "devices = [' ']\n", 7, "key 'devices': one of them is empty"),
        (ARCH.replace("One", " "), 1, "key 'title': it is empty"),
        (ARCH.replace("cores = 1", "cores = 0"), 2, "key 'cores': 0 must be at least 1"),
        (ARCH.replace("cores = 1", "cores = true"), 2, "key 'cores': Expected `int`, got `bool`"),
        (ARCH.replace("cores = 1", "cores = 1.0"), 2, "key 'cores': Expected `int`, got `float`"),
        (ARCH.replace("cores = 1", "cores = '1'"), 2, "key 'cores': Expected `int`, got `str`"),
        (ARCH.replace("max_programs = 1", "max_programs = -1"), 5, "key 'max_programs': -1 must be at least 1"),
        (ARCH.replace("max_programs = 1", "max_programs = 0"), 5, "key 'max_programs': 0 must be at least 1"),
        (ARCH.replace("bytes = 0", "bytes = 4"), 3, "key 'scratchpad_bytes': 4 bytes of scratchpad_kind 'none'"),
        (ARCH.replace("none", "LDS"), 3, "key 'scratchpad_bytes': 0 bytes of scratchpad_kind 'LDS'"),
    ],
)
def test_a_broken_file_of_an_arch(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "arches" / "x9.toml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value).startswith(f"{path}:{line}: {said}")


SIZES = (
    "core_threads", "core_registers", "register_unit", "reserved_memory", "warp_size", "registers", "scratchpad_bytes",
    "cache_share",
)  # fmt: skip


@pytest.mark.parametrize("key", SIZES)
def test_a_negative_size(tmp_path: Path, key: str) -> None:
    """Each would be planned with: fewer programs than none, tiles that fit nowhere."""
    path = tmp_path / "arches" / "x9.toml"
    path.parent.mkdir()
    kept = "\n".join(line for line in ARCH.splitlines() if not line.startswith(key))
    path.write_text(f"{key} = -1\n{kept}")
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value) == f"{path}:1: key '{key}': -1 must be at least 0"


def test_every_size_of_an_arch_is_checked() -> None:
    numbers = {field.name for field in msgspec.structs.fields(Arch) if field.type is int}
    assert numbers == {*SIZES, "cores", "max_programs"}


@pytest.mark.parametrize("name", ["a b", "a:b", "a*", "x9.5", "-x", "ä9", "a,b"])
def test_a_name_that_no_arch_can_have(tmp_path: Path, name: str) -> None:
    """`--target BACKEND:NAME` and a quirk's globs could not say it."""
    path = tmp_path / "arches" / f"{name}.toml"
    path.parent.mkdir()
    path.write_text(ARCH)
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value) == f"{path}: {name!r} cannot be an arch's name: it has letters, digits, - and _ only"
    path.unlink()
    (tmp_path / "arches.toml").write_text(f'["{name}"]\n{ARCH}')
    with pytest.raises(DataError, match="cannot be an arch's name"):
        load_arches(tmp_path)


@pytest.mark.parametrize(
    ("name", "target"), [("sm_90", 90), ("gfx90a", "gfx90a"), ("ascend910_93", "Ascend910_9382"), ("x-9", "X9b")]
)
def test_a_name_that_is_the_compilers(tmp_path: Path, name: str, target: int | str) -> None:
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / f"{name}.toml").write_text(
        f"name = '{name}'\ncompiler_target = ['x', {target!r}, 0]\n{ARCH}"
    )
    assert load_arches(tmp_path)[name].compiler_target == ("x", target, 0)


@pytest.mark.parametrize(
    "name", ["x8.tml", "x8.TOML", "x8", "x8.toml.orig", "x8.toml~", "README.md", "x8.toml/x7.toml"]
)
def test_a_file_that_would_not_be_read(tmp_path: Path, name: str) -> None:
    """Its chip would be unknown, or planned with another file's numbers, and nobody told."""
    folder = tmp_path / "arches"
    folder.mkdir()
    (folder / "x9.toml").write_text(ARCH)
    (folder / ".x9.toml.swp").write_bytes(b"an editor's")
    assert list(load_arches(tmp_path)) == ["x9"]
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(ARCH)
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value).startswith(f"{folder / name.partition('/')[0]}: it would not be read: ")


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / "x9.toml").symlink_to(tmp_path / "gone.toml")
    with pytest.raises(DataError, match=r"arches/x9\.toml: it would not be read"):
        load_arches(tmp_path)


def test_tuning_that_is_no_archs(tmp_path: Path) -> None:
    """A misspelt one would leave the chip untuned, without a word."""
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / "x9.toml").write_text(f"tuning = 'x8'\n{ARCH}")
    with pytest.raises(DataError, match=r"arches/x9\.toml: x9 shares the tuning of 'x8', no arch here"):
        load_arches(tmp_path)
    (tmp_path / "arches.toml").write_text(f"[x8]\n{ARCH}")
    assert load_arches(tmp_path)["x9"].tuning == "x8"


def test_an_arch_that_is_there_twice(tmp_path: Path) -> None:
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / "x9.toml").write_text(ARCH)
    (tmp_path / "arches.toml").write_text(f"[x9]\n{ARCH}")
    with pytest.raises(DataError, match=r"arches/x9\.toml: arch 'x9' is already in arches\.toml"):
        load_arches(tmp_path)


def test_a_device_that_two_arches_claim(tmp_path: Path) -> None:
    """The second file would decide nothing on its own chip, and nobody would notice."""
    (tmp_path / "arches").mkdir()
    for name, devices in (("x8", '["8.6", "8.7"]'), ("x9", '["8.7"]')):
        (tmp_path / "arches" / f"{name}.toml").write_text(f"devices = {devices}\n{ARCH}")
    with pytest.raises(DataError, match=r"arches/x8\.toml: device '8\.7' of x8 is one of x9's, too"):
        load_arches(tmp_path)


def test_quirk_files_that_would_never_be_read_or_share_an_id(tmp_path: Path) -> None:
    path = plant(tmp_path, "cuda-0900-planted", 'note = "x"')
    assert list(load_quirks([tmp_path / "cuda"], ("cuda",))) == ["cuda-0900-planted"]
    again = tmp_path / "again"
    again.mkdir()
    copy = again / path.name
    copy.write_bytes(path.read_bytes())
    with pytest.raises(DataError) as caught:
        load_quirks([tmp_path / "cuda", again], ("cuda",))
    assert str(caught.value) == f"{copy}: id 'cuda-0900-planted' is already taken by {path}"
    with pytest.raises(DataError) as caught:
        load_quirks([tmp_path], ("cuda",))
    assert "this one would never be read" in str(caught.value)
    assert caught.value.path in (str(path), str(copy))


class Other(CpuBackend):
    name = "other"


def provides(monkeypatch: pytest.MonkeyPatch, *loads: Any) -> None:
    """Packages are installed that name a backend each, in the group that portattn looks in."""
    points = [SimpleNamespace(name="other", value=f"package{i}:Backend", load=load) for i, load in enumerate(loads)]
    found = {"portattn.backends": points}
    monkeypatch.setattr(plugins.installed_packages, "entry_points", lambda group: (found.get(group, []), []))


@pytest.mark.parametrize("given", [Other, Other()], ids=["class", "instance"])
def test_a_backend_of_an_installed_package(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    provides(monkeypatch, lambda: given)
    found = find_backends()
    assert isinstance(found["other"], Other)
    assert set(found) == {*KNOWN.backends, "other"}


def test_backend_packages_that_are_broken_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/planning/test_plugins.py has every kind."""

    def broken() -> Any:
        raise ImportError("no such module")

    provides(monkeypatch, broken, lambda: CpuBackend, lambda: Other)
    found, left_out = look_around()
    assert set(found) == {*KNOWN.backends, "other"}
    assert [(one.package, str(one.faults[0])) for one in left_out] == [
        ("other = package0:Backend", "ImportError: no such module"),
        ("other = package1:Backend", "it registers 'cpu', which exists already"),
    ]


def test_an_interrupt_is_no_fault_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> Any:
        raise KeyboardInterrupt

    provides(monkeypatch, interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_backends()


def test_portattns_own_files_stay_strict(tmp_path: Path) -> None:
    """A broken one is a broken installation: no plan is made without it."""
    plant(tmp_path, "cuda-0900-planted", 'note = "x')
    with pytest.raises(DataError, match="not TOML"):
        Registry.read(find_backends(), tmp_path)
