"""Toolchain: reading a named one, and telling an installed one by the distribution that owns `triton/`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import support

from portattn import Toolchain
from portattn.planning.registry import Registry, parse_target
from portattn.schema import toolchain
from portattn.schema.toolchain import has_upper_bound, installed_toolchain, owners, parse_range


def test_parse() -> None:
    named = Toolchain.parse("triton==3.6.0, ptxas==13.3.33,torch==2.11")
    assert (named.distribution, named.version, named.path) == ("triton", "3.6.0", "")
    assert named.component("ptxas") == "13.3.33"
    assert named.component("triton") == "3.6.0"
    assert named.component("rocm") is None
    assert str(named) == "triton==3.6.0"
    assert bool(named)


def test_a_build_under_another_name_is_still_triton() -> None:
    assert Toolchain.parse("pytorch-triton-rocm==3.5.1").distribution == "triton"


def test_none() -> None:
    assert Toolchain.parse("none") == Toolchain.none()
    assert not Toolchain.none()
    assert str(Toolchain.none()) == "none"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("triton", "toolchain 'triton': must be NAME==VERSION"),
        ("triton=3.6", "must be NAME==VERSION"),
        ("triton==", "must be NAME==VERSION"),
        ("", "must be NAME==VERSION"),
        ("triton==three", "'three' is not a PEP 440 version"),
        ("tritan==3.6.0", "'tritan' is no known compiler"),
        ("ptxas==13.0", "'ptxas' is no known compiler"),
        ("triton==3.6.0,gcc==13", "unknown component 'gcc'"),
        ("triton==3.6.0,ptxas", "'ptxas' must be NAME==VERSION"),
    ],
)
def test_parse_errors_name_the_part(text: str, part: str) -> None:
    with pytest.raises(ValueError, match="toolchain") as error:
        Toolchain.parse(text)
    assert part in str(error.value)


def test_within_tells_no_from_unknown() -> None:
    named = Toolchain.parse("triton==3.6.0,ptxas==12.9")
    assert named.within("triton", ">=3.5,<3.7") is True
    assert named.within("triton", "<3.6") is False
    assert named.within("ptxas", ">=13") is False
    assert named.within("rocm", ">=6") is None  # not known
    assert named.within("triton-ascend", ">=0") is False  # another compiler
    assert Toolchain.parse("triton==3.7.0.dev20260101").within("triton", ">=3.6") is True  # pre-releases count


def test_components_that_were_named_are_kept() -> None:
    known = Toolchain.parse("triton==3.6.0,ptxas==12.9").with_components({"ptxas": "13.1", "torch": "2.11"})
    assert known.component("ptxas") == "12.9"
    assert known.component("torch") == "2.11"


@pytest.mark.parametrize(("text", "bounded"), [("<3.7", True), (">=3.2", False), ("==3.*", True), ("!=3.3", False)])
def test_upper_bounds(text: str, bounded: bool) -> None:
    assert has_upper_bound(text) is bounded


def test_a_malformed_range() -> None:
    with pytest.raises(ValueError, match="'>=x' is not a PEP 440 version range"):
        parse_range(">=x")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A site folder with a `triton/` of its own, and a function that installs a distribution claiming it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.2.0'\n")

    def install(name: str, version: str, written: float) -> None:
        info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"triton/__init__.py,,\n{info.name}/METADATA,,\n")
        os.utime(info, (written, written))

    # find_spec would answer with the module that is imported already.
    monkeypatch.setattr(toolchain, "_triton_folder", lambda: tmp_path / "triton")
    installed_toolchain.cache_clear()
    yield install
    installed_toolchain.cache_clear()


def test_the_owner_of_the_folder_names_the_compiler(site) -> None:
    """triton.__version__ says 3.2.0, and the compiler is triton-ascend."""
    site("triton-ascend", "3.2.1", 1000.0)
    assert (installed_toolchain().distribution, installed_toolchain().version) == ("triton-ascend", "3.2.1")


def test_the_last_install_wins_when_two_claim_the_folder(site, tmp_path: Path) -> None:
    site("triton-ascend", "3.2.1", 2000.0)
    site("triton", "3.6.0", 1000.0)
    assert owners(tmp_path / "triton") == [("triton", "3.6.0"), ("triton-ascend", "3.2.1")]
    assert installed_toolchain().distribution == "triton-ascend"


@pytest.mark.parametrize("name", ["pytorch-triton", "Triton_Windows"])
def test_an_alias_is_resolved(site, name: str) -> None:
    site(name, "3.5.0", 1000.0)
    assert str(installed_toolchain()) == "triton==3.5.0"


def test_a_source_build_is_triton_of_the_version_that_it_states(site, tmp_path: Path) -> None:
    """No distribution owns the folder: the version shows that, and ranges take it for the release."""
    found = installed_toolchain()
    assert str(found) == "triton==3.2.0+unowned"
    assert found.within("triton", "==3.2.0") is True
    assert found.within("triton", ">=3.3") is False
    assert found.within("triton-ascend", "<9") is False
    assert Toolchain.parse(str(found)).version == found.version
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.7.0+git5d3d'\n")
    installed_toolchain.cache_clear()
    assert str(installed_toolchain()) == "triton==3.7.0+git5d3d.unowned"


@pytest.mark.parametrize(
    ("text", "chip"), [("__version__ = '3.2.0'", "ascend"), ("__version__ = 'x'", "amd"), ("", "amd"), (None, "amd")]
)
def test_a_stray_folder_that_tells_nothing_is_unowned(site, tmp_path: Path, text: str | None, chip: str) -> None:
    """A fork states the number of the Triton that it started from: another chip's backend tells it."""
    folder = tmp_path / "triton"
    (folder / "backends" / chip).mkdir(parents=True)
    (folder / "backends" / chip / "compiler.py").touch()
    (folder / "__init__.py").unlink()
    if text is not None:
        (folder / "__init__.py").write_text(text)
    found = installed_toolchain()
    assert str(found) == "unowned==0"
    assert found.component("torch")
    assert found.within("triton", "<3.3") is None


@pytest.mark.parametrize("name", ["flagtree", "pytorch-triton-xpu", "triton-next", "unowned"])
def test_of_an_unknown_compiler_nothing_is_known(name: str) -> None:
    found = Toolchain(distribution=name, version="3.2.0")
    assert found.within("triton", ">=9") is None
    assert found.within("triton-ascend", ">=9") is None
    assert Toolchain.none().within("triton", ">=0") is False
    assert Toolchain.parse("triton-ascend==3.2.0").within("triton", ">=0") is False


def test_no_triton_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_triton_folder", lambda: None)
    installed_toolchain.cache_clear()
    try:
        assert installed_toolchain() == Toolchain.none()
    finally:
        installed_toolchain.cache_clear()


@pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")
def test_this_machine() -> None:
    installed_toolchain.cache_clear()
    found = installed_toolchain()
    assert found
    assert Path(found.path).name == "triton"
    assert found.component("torch")


def test_a_named_target_knows_what_its_backend_knows() -> None:
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    assert target.toolchain.version == "3.6.0"
    assert parse_target("cuda:sm_90", "triton==3.6.0,ptxas==1.0").toolchain.component("ptxas") == "1.0"
    assert str(target) == "cuda:sm_90 with triton==3.6.0"


@pytest.mark.parametrize("file", ["METADATA", "RECORD", "top_level.txt"])
def test_a_broken_distribution_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Reading every distribution's files, one that is no text was the end of every plan."""
    before = installed_toolchain()
    folder = tmp_path / "aaa-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: aaa\nVersion: 0.1\n")
    (folder / "RECORD").write_text("triton/__init__.py,,\n")
    (folder / file).write_bytes(b"\xff\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed_toolchain.cache_clear()
    assert installed_toolchain() == before
    installed_toolchain.cache_clear()


@pytest.mark.parametrize("about", [None, b"\xff", b"Name: torch\n"])
def test_a_component_whose_version_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, about: bytes | None
) -> None:
    folder = tmp_path / "torch-9.dist-info"
    folder.mkdir()
    if about is not None:
        (folder / "METADATA").write_bytes(about)
    monkeypatch.syspath_prepend(tmp_path)
    installed_toolchain.cache_clear()
    components = dict(installed_toolchain().components)
    installed_toolchain.cache_clear()
    assert "torch" not in components
    assert "numpy" in components


@pytest.mark.parametrize("version", ["3.9.0rc1", "3.9.0.dev1", "3.9.0a0+git1"])
def test_a_pre_release_lies_before_its_release_in_every_range(version: str) -> None:
    """By PEP 440 it is in neither of <3.9 and >=3.9: work-arounds for wrong results were left out for it."""
    toolchain = Toolchain.parse(f"triton=={version}")
    assert toolchain.within("triton", "<3.9")
    assert toolchain.within("triton", ">=3.8,<3.9")
    assert not toolchain.within("triton", ">=3.9")
    assert not toolchain.within("triton", "<3.8")
    assert not Toolchain.parse("triton==3.9.0").within("triton", "<3.9")


def test_a_pre_release_has_the_quirks_that_every_version_before_its_release_has() -> None:
    quirk = Registry.load().quirks["any-0008-running-sum"]
    assert quirk.in_range(Toolchain.parse("triton==3.9.0rc1")) is quirk.in_range(Toolchain.parse("triton==3.8.0"))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("triton==3.9", "triton==3.9.0"),
        ("triton==v3.9.0", "triton==3.9.0"),
        ("triton==03.9.0", "triton==3.9.0"),
        ("triton==3.9.0RC1", "triton==3.9.0rc1"),
        ("triton==3.9.0+git1", "triton==3.9.0+git1"),
        ("triton==3.99", "triton==3.99"),
    ],
)
def test_a_release_has_one_spelling(text: str, read: str) -> None:
    assert str(Toolchain.parse(text)) == read
