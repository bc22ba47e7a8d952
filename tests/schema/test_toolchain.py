"""Toolchain: reading a named one, and telling an installed one by the distribution that owns `triton/`."""

import os
from pathlib import Path

import msgspec
import pytest
import support
from places import tables

from portattn.errors import DataError
from portattn.planning.registry import Registry, parse_target
from portattn.schema import compilers, toolchain
from portattn.schema.toolchain import (
    Toolchain,
    has_upper_bound,
    installed_beside,
    installed_for,
    installed_toolchain,
    is_installed,
    owners,
    parse_range,
)
from portattn.tools.quirks.draft_texts import tracker_of
from portattn.tools.quirks.recognise import _version, _versions

TABLES = tables(__file__)


def test_parse():
    named = Toolchain.parse("triton==3.6.0, ptxas==13.3.33,torch==2.11")
    assert (named.distribution, named.version, named.path) == ("triton", "3.6.0", "")
    assert named.component("ptxas") == "13.3.33"
    assert named.component("triton") == "3.6.0"
    assert named.component("rocm") is None
    assert str(named) == "triton==3.6.0"
    assert bool(named)
    assert Toolchain.parse("pytorch-triton-rocm==3.5.1").distribution == "triton"
    assert Toolchain.parse("none") == Toolchain.none()
    assert not Toolchain.none()
    assert str(Toolchain.none()) == "none"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("triton", "toolchain 'triton': must be NAME==VERSION"), ("triton=3.6", "must be NAME==VERSION"),
        ("triton==", "must be NAME==VERSION"), ("", "must be NAME==VERSION"),
        ("triton==three", "'three' is not a PEP 440 version"), ("tritan==3.6.0", "'tritan' is no known compiler"),
        ("ptxas==13.0", "'ptxas' is no known compiler"), ("triton==3.6.0,gcc==13", "unknown component 'gcc'"),
        ("triton==3.6.0,ptxas", "'ptxas' must be NAME==VERSION"),
    ],
)  # fmt: skip
def test_parse_errors_name_the_part(text, part):
    with pytest.raises(ValueError, match="toolchain") as error:
        Toolchain.parse(text)
    assert part in str(error.value)


def test_within_tells_no_from_unknown():
    named = Toolchain.parse("triton==3.6.0,ptxas==12.9")
    assert named.within("triton", ">=3.5,<3.7") is True
    assert named.within("triton", "<3.6") is False
    assert named.within("ptxas", ">=13") is False
    assert named.within("rocm", ">=6") is None  # not known
    assert named.within("triton-ascend", ">=0") is False  # another compiler
    assert Toolchain.parse("triton==3.7.0.dev20260101").within("triton", ">=3.6") is True  # pre-releases count


def test_components_that_were_named_are_kept():
    known = Toolchain.parse("triton==3.6.0,ptxas==12.9").with_components({"ptxas": "13.1", "torch": "2.11"})
    assert known.component("ptxas") == "12.9"
    assert known.component("torch") == "2.11"


@pytest.mark.parametrize(("text", "bounded"), [("<3.7", True), (">=3.2", False), ("==3.*", True), ("!=3.3", False)])
def test_upper_bounds(text, bounded):
    assert has_upper_bound(text) is bounded
    with pytest.raises(ValueError, match="'>=x' is not a PEP 440 version range"):
        parse_range(">=x")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site folder with a `triton/` of its own, and a function that installs a distribution claiming it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.2.0'\n")

    def install(name, version, written):
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


def test_the_owner_of_the_folder_names_the_compiler(site):
    """triton.__version__ says 3.2.0, and the compiler is triton-ascend."""
    site("triton-ascend", "3.2.1", 1000.0)
    assert (installed_toolchain().distribution, installed_toolchain().version) == ("triton-ascend", "3.2.1")


def test_the_last_install_wins_when_two_claim_the_folder(site, tmp_path):
    site("triton-ascend", "3.2.1", 2000.0)
    site("triton", "3.6.0", 1000.0)
    assert owners(tmp_path / "triton") == [("triton", "3.6.0"), ("triton-ascend", "3.2.1")]
    assert installed_toolchain().distribution == "triton-ascend"


@pytest.mark.parametrize("name", ["pytorch-triton", "Triton_Windows"])
def test_an_alias_is_resolved(site, name):
    site(name, "3.5.0", 1000.0)
    assert str(installed_toolchain()) == "triton==3.5.0"


def test_a_source_build_is_triton_of_the_version_that_it_states(site, tmp_path):
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
def test_a_stray_folder_that_tells_nothing_is_unowned(site, tmp_path, text, chip):
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
def test_of_an_unknown_compiler_nothing_is_known(name):
    found = Toolchain(distribution=name, version="3.2.0")
    assert found.within("triton", ">=9") is None
    assert found.within("triton-ascend", ">=9") is None
    assert Toolchain.none().within("triton", ">=0") is False
    assert Toolchain.parse("triton-ascend==3.2.0").within("triton", ">=0") is False


def test_no_triton_is_none(monkeypatch):
    monkeypatch.setattr(toolchain, "_triton_folder", lambda: None)
    installed_toolchain.cache_clear()
    try:
        assert installed_toolchain() == Toolchain.none()
    finally:
        installed_toolchain.cache_clear()


@pytest.mark.skipif(support.TRITON is None, reason="Triton is not installed")
def test_this_machine():
    installed_toolchain.cache_clear()
    found = installed_toolchain()
    assert found
    assert Path(found.path).name == "triton"
    assert found.component("torch")


def test_a_named_target_knows_what_its_backend_knows():
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    assert target.toolchain.version == "3.6.0"
    assert parse_target("cuda:sm_90", "triton==3.6.0,ptxas==1.0").toolchain.component("ptxas") == "1.0"
    assert str(target) == "cuda:sm_90 with triton==3.6.0"


@pytest.mark.parametrize("file", ["METADATA", "RECORD", "top_level.txt"])
def test_a_broken_distribution_hides_no_other(tmp_path, monkeypatch, file):
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
def test_a_component_whose_version_cannot_be_read_is_none(tmp_path, monkeypatch, about):
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
def test_a_pre_release_lies_before_its_release_in_every_range(version):
    """By PEP 440 it is in neither of <3.9 and >=3.9: work-arounds for wrong results were left out for it."""
    toolchain = Toolchain.parse(f"triton=={version}")
    assert toolchain.within("triton", "<3.9")
    assert toolchain.within("triton", ">=3.8,<3.9")
    assert not toolchain.within("triton", ">=3.9")
    assert not toolchain.within("triton", "<3.8")
    assert not Toolchain.parse("triton==3.9.0").within("triton", "<3.9")


def test_a_pre_release_has_the_quirks_that_every_version_before_its_release_has():
    quirk = Registry.load().quirks["any-0008-running-sum"]
    assert quirk.in_range(Toolchain.parse("triton==3.9.0rc1")) is quirk.in_range(Toolchain.parse("triton==3.8.0"))


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("triton==3.9", "triton==3.9.0"), ("triton==v3.9.0", "triton==3.9.0"), ("triton==03.9.0", "triton==3.9.0"),
        ("triton==3.9.0RC1", "triton==3.9.0rc1"), ("triton==3.9.0+git1", "triton==3.9.0+git1"),
        ("triton==3.99", "triton==3.99"),
    ],
)  # fmt: skip
def test_a_release_has_one_spelling(text, read):
    assert str(Toolchain.parse(text)) == read


# Compilers as data: what a backend's compilers.toml may say, and who is asked for a name.
WHOLE = TABLES["whole"]


@pytest.fixture
def brought(tmp_path):
    (tmp_path / "compilers.toml").write_text(WHOLE)
    found = compilers.read(tmp_path, "portattn-musa 0.1")
    compilers.all_compilers()
    before = compilers._brought.compilers
    compilers.bring(before | found)
    yield found
    compilers.bring(before)


def test_portattns_own_come_through_the_same_door():
    found = compilers.own()
    assert list(found) == ["triton", "triton-ascend", "flagtree"]
    assert {Path(one.file).parent.name for one in found.values()} == {"cuda", "ascend"}
    assert {one.brought_by for one in found.values()} == {"portattn"}
    assert compilers.canonical("PyTorch_Triton.ROCm") == "triton"
    assert compilers.tried_range("triton-ascend") == "==3.2.*"
    assert compilers.released_versions("flagtree") == ()


def test_a_file_that_is_whole(brought):
    one = brought["triton-musa"]
    assert (one.name, one.brought_by, Path(one.file).name) == ("triton-musa", "portattn-musa 0.1", "compilers.toml")
    assert str(Toolchain.parse("mtt_triton==3.1.0")) == "triton-musa==3.1.0"
    assert (one.version("v3.1-r7"), one.version("3.1.0")) == ("3.1", "3.1.0")
    assert compilers.names()[-1] == "triton-musa"
    assert "mubin" in compilers.stages()
    assert "MUSA_OPT" in compilers.variables()
    assert tracker_of("triton-musa") == "https://example.com/issues"
    assert _version("Successfully installed triton_musa-3.1.0", _versions()["triton-musa"]).value == "3.1.0"


@pytest.mark.parametrize(("old", "new", "said"), TABLES["a_broken_file_is_named_with_its_line"])
def test_a_broken_file_is_named_with_its_line(tmp_path, old, new, said):
    path = tmp_path / "compilers.toml"
    assert old in WHOLE
    path.write_text(WHOLE.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        compilers.read(tmp_path, "somebody")
    assert str(caught.value).startswith(f"{path}:{said}")


def test_what_is_wrong_with_packages_is_said_of_an_unknown_name(tmp_path):
    assert compilers.read(tmp_path, "somebody") == {}
    with pytest.raises(ValueError, match=r"'triton-new' is no known compiler; known: triton, .*may bring others"):
        Toolchain.parse("triton-new==1.0")
    compilers.all_compilers()
    before = compilers._brought.compilers
    try:
        compilers.bring({}, ["triton-lost"], ["backend package lost 0.1 is broken: it is"])
        assert compilers.is_compiler("triton-lost"), "others' files may name it"
        with pytest.raises(ValueError, match=r"no known compiler.*backend package lost 0\.1 is broken: it is"):
            Toolchain.parse("triton-lost==1.0")
    finally:
        compilers.bring(before or {})


def test_ranges_of_a_compiler_that_is_added_to_triton(brought):
    """They hold for the Triton beneath where it is known; and for none where the compiler stands apart."""
    named = Toolchain.parse("triton-musa==3.1.0")
    assert named.within("triton", ">=3.3") is None
    assert Toolchain.parse("triton-musa==3.1.0,triton==3.6.0").within("triton", ">=3.3") is True
    assert named.within("triton-musa", "<3.2") is True
    assert Toolchain.parse("triton==3.6.0").within("triton-musa", ">=0") is False
    compilers.bring({"triton-musa": msgspec.structs.replace(brought["triton-musa"], apart=True)})
    assert named.within("triton", ">=3.3") is False
    with pytest.raises(ValueError, match="unknown component 'triton'"):
        Toolchain.parse("flagtree==0.3.0,triton==3.6.0")  # in Triton's place


@pytest.mark.parametrize(
    ("version", "known"), [("3.1.0", True), ("3.1.0.post2", True), ("3.2.0+git1234", True), ("3.3.0", False)]
)
def test_a_rebuild_of_a_release_is_known(brought, version, known):
    assert brought
    assert (Toolchain.parse(f"triton-musa=={version}").unknown_release() == "") is known


def test_the_installed_one_is_told_by_the_owner_of_its_folder(brought, tmp_path, monkeypatch):
    """Under an alias, and with a version in the distribution's own spelling."""
    assert brought
    assert installed_beside() == []
    assert installed_for(("triton-musa",)) == toolchain.installed_toolchain()
    info = tmp_path / "mtt_triton-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mtt-triton\nVersion: v3.1-r7\n")
    (info / "RECORD").write_text("triton_musa/__init__.py,,\n")
    (tmp_path / "triton_musa").mkdir()
    (tmp_path / "triton_musa" / "__init__.py").write_text("raise ImportError('it is not imported to be asked')\n")
    monkeypatch.syspath_prepend(tmp_path)
    [found] = installed_beside()
    assert (str(found), found.path) == ("triton-musa==3.1", str(tmp_path / "triton_musa"))
    assert found.component("triton") == toolchain.installed_toolchain().version
    assert installed_for(("triton-musa",)) == installed_for(("triton-ascend", "triton-musa")) == found
    assert installed_for(()) == installed_for(("triton-ascend",)) == toolchain.installed_toolchain()
    assert is_installed("triton-musa==3.1")
    assert not is_installed("triton-musa==3.2")
