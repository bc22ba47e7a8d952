"""Packages that bring compilers: what is refused, who is named, and that nobody else notices."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from portattn.backends.cpu import CpuBackend
from portattn.planning import data_files, plugins
from portattn.planning.backend import INTERFACES, Backend
from portattn.planning.registry import look_around
from portattn.schema import compilers
from portattn.schema.toolchain import Toolchain

ARCHES = """
[one]
title = "One"
cores = 1
scratchpad_bytes = 0
scratchpad_kind = "none"
max_programs = 1
sources = ["a test"]
"""
PROVENANCE = '[provenance]\nchip = "none"\ntoolchain = "triton-new==1.0"\ndate = 2026-11-24\nmeasured = false\n\n'


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = {name: one for name, one in compilers.all_compilers().items() if name not in compilers.own()}
    own = data_files.own_options()
    options = {name: one for name, one in data_files.backend_options().items() if name not in own}
    yield
    compilers.bring(before)
    data_files.bring_options(options)


def backend(folder: Path, own_name: str, compiler: str, **own: Any) -> type[Backend]:
    place = folder / own_name
    place.mkdir()
    (place / "arches.toml").write_text(ARCHES)
    (place / "compilers.toml").write_text(f"[{compiler}]\nreleased = ['1.0']\n")
    facts = {"name": own_name, "device_type": own_name, "folder": place, "compilers": (compiler,), "interface": 2}
    return type("Planted", (Backend,), facts | own)


def provides(monkeypatch: pytest.MonkeyPatch, *loads: Any) -> None:
    points = [
        SimpleNamespace(name=f"b{i}", value=f"package{i}:Backend", load=(lambda one=one: one() if callable(one) and
                        not isinstance(one, type) else one))
        for i, one in enumerate(loads)
    ]  # fmt: skip
    monkeypatch.setattr(plugins.installed_packages, "entry_points", lambda group: (points, []))


def test_two_packages_that_bring_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second is left out; both are named. The first, and a third, go on."""
    first, second = backend(tmp_path, "first", "triton-new"), backend(tmp_path, "second", "triton-new")
    provides(monkeypatch, first, second, backend(tmp_path, "third", "triton-newer"))
    found, [broken] = look_around()
    assert {"first", "third"} < set(found)
    assert broken.package == "b1 = package1:Backend"
    told = f"it brings the compiler 'triton-new', which b0 = package0:Backend brings already ({tmp_path}/first/"
    assert told in broken.told()
    assert compilers.names()[-2:] == ("triton-new", "triton-newer")
    assert compilers.all_compilers()["triton-new"].brought_by == "b0 = package0:Backend"


@pytest.mark.parametrize("name", ["triton", "triton-rocm", "flagtree"])
def test_a_package_cannot_bring_portattns_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Neither by name nor by alias: plans for other chips would be made with its facts."""
    provides(monkeypatch, backend(tmp_path, "first", name))
    found, [broken] = look_around()
    assert "first" not in found
    assert f"it brings the compiler {name!r}, which portattn brings already" in broken.told()
    assert compilers.all_compilers() == compilers.own()


def test_another_interface_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    newer = max(INTERFACES) + 1
    provides(monkeypatch, backend(tmp_path, "first", "triton-new", interface=newer), backend(tmp_path, "b", "triton-b"))
    found, [broken] = look_around()
    assert "b" in found
    assert f"it is written for interface {newer} of backends, and this portattn has 1 and 2" in broken.told()
    with pytest.raises(ValueError, match=r"no known compiler.*b0 = package0:Backend is broken: it is written for"):
        Toolchain.parse("triton-new==1.0")


def test_a_class_that_states_no_interface_is_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(CpuBackend):
        name = "old"

    assert Old.interface == INTERFACES[0] == 1
    provides(monkeypatch, Old)
    assert "old" in look_around()[0]


@pytest.mark.parametrize("adapter", ["gone.py:compile_kernel", "adapter", ":f", "adapter.py:", "a.b:not a name"])
def test_a_malformed_adapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, adapter: str) -> None:
    provides(monkeypatch, backend(tmp_path, "first", "triton-new", adapter=adapter))
    _, [broken] = look_around()
    assert f"Planted.adapter is {adapter!r}, but must be `package.module:function`" in broken.told()


def test_a_broken_file_of_compilers_leaves_its_package_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = backend(tmp_path, "first", "triton-new")
    (one.folder / "compilers.toml").write_text("[triton-new]\ncolour = 1\n")
    provides(monkeypatch, one, backend(tmp_path, "second", "triton-other"))
    found, [broken] = look_around()
    assert "second" in found
    assert f"{one.folder}/compilers.toml:2: key 'triton-new.colour'" in broken.told()


def test_one_packages_files_may_name_anothers_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whichever of the two is found first, and where the other is left out as broken."""
    first, second = backend(tmp_path, "first", "triton-first"), backend(tmp_path, "second", "triton-second")
    (first.folder / "arches.toml").write_text(ARCHES + "[one.toolchain]\ntriton-second = '>=1'\n")
    provides(monkeypatch, first, second)
    assert look_around()[1] == ()
    (second.folder / "arches.toml").write_text("[one]\ncolour = 1\n")
    found, [broken] = look_around()
    assert broken.name == "second"
    assert "first" in found
    (first.folder / "arches.toml").write_text(ARCHES + "[one.toolchain]\ntriton-third = '>=1'\n")
    _, faults = look_around()
    assert "'triton-third' is no known compiler" in next(one for one in faults if one.name == "first").told()


def test_a_package_that_asks_for_a_name_as_it_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asks() -> Any:
        Toolchain.parse("triton-new==1.0")

    provides(monkeypatch, asks, backend(tmp_path, "second", "triton-new"))
    compilers._brought.compilers = None
    found, [broken] = look_around()
    assert "second" in found
    assert "'triton-new' is no known compiler" in broken.told()


def test_options_of_launches_are_known_as_long_as_their_package_is_not_broken(monkeypatch, tmp_path):
    """They are read in the package's own tuning and quirk files, and by every command; no other backend has them."""
    first = backend(tmp_path, "first", "triton-new", options={"lanes": int})
    (tmp_path / "first" / "tuning").mkdir()
    tuning = tmp_path / "first" / "tuning" / "one.toml"
    entry = '[[entry]]\nkernel = "*"\nlaunch = {{ block_m = 16, block_n = 16, {} }}\n'
    tuning.write_text(PROVENANCE + entry.format("lanes = 4"))
    provides(monkeypatch, first)
    found, broken = look_around()
    assert ("first" in found, broken) == (True, ())
    data_files.check_launch_values({"lanes": 8}, "first")
    with pytest.raises(ValueError, match="launch lanes is an option of first, and not of cuda"):
        data_files.check_launch_values({"lanes": 8}, "cuda")
    tuning.write_text(PROVENANCE + entry.format('lanes = "4"'))
    _, [broken_now] = look_around()
    assert "launch lanes is '4', but must be of type int" in broken_now.told()
    assert "lanes" not in data_files.options(), "of a package that is left out nothing is known"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"maxnreg": str}, "has 'maxnreg' of type str, and cuda has it of type int"),
        ({"num_warps": int}, "has 'num_warps', which every launch has"),
        ({"dot_precision": str}, "has 'dot_precision', which every launch has"),
        ({"lanes": float}, "has 'lanes': <class 'float'>, but must map names to bool, int or str"),
        ({"no name": int}, "has 'no name': <class 'int'>, but must map"),
        (["lanes"], "is ['lanes'], but must map names to types"),
    ],
    ids=["another type", "launch field", "choice", "kind", "name", "list"],
)
def test_options_that_are_declared_wrongly(monkeypatch, tmp_path, options, said):
    provides(monkeypatch, backend(tmp_path, "first", "triton-new", options=options), backend(tmp_path, "b", "triton-b"))
    found, [broken] = look_around()
    assert ("first" in found, "b" in found) == (False, True)
    assert f"Planted.options {said}" in broken.told()
