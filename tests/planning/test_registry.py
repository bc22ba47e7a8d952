"""The registry's own errors: targets that nobody knows, broken files of arches and quirks, backend packages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quirk_files import plant

from portattn.backends.cpu import CpuBackend
from portattn.errors import ArgumentError, DataError
from portattn.planning import plugins
from portattn.planning.data_files import load_arches
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry, find_backends, look_around

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
        (ARCH + "[toolchain]\ngcc = '>=9'\n", 7, "key 'toolchain': 'gcc' is no compiler; known: triton, "),
        (ARCH + "[toolchain]\ntriton = 'new'\n", 7, "key 'toolchain': 'new' is not a PEP 440 version range"),
    ],
)
def test_a_broken_file_of_an_arch(tmp_path: Path, text: str, line: int, said: str) -> None:
    path = tmp_path / "arches" / "x9.toml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value).startswith(f"{path}:{line}: {said}")


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
    monkeypatch.setattr(plugins.metadata, "entry_points", lambda group: points if group == "portattn.backends" else [])


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
