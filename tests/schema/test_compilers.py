"""Compilers as data: what a backend's compilers.toml may say, and who is asked for a name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from portattn.errors import DataError
from portattn.schema import compilers, toolchain
from portattn.schema.compilers import Compiler
from portattn.schema.toolchain import Toolchain, installed_beside, installed_for, is_installed
from portattn.tools.quirks.lifecycle.environment_from_log import _version
from portattn.tools.quirks.trackers import tracker_of

WHOLE = """
[triton-musa]
aliases = ["mtt-triton"]
package = "triton_musa"
spelling = '^v?(\\d+\\.\\d+)-r\\d+'
tried = ">=3.1,<3.2"
released = ["3.1.0", "3.2.0"]
stages = ["mubin"]
variables = ["MUSA_OPT"]
tracker = "https://example.com/issues"

[triton-musa.lab]
releases = ["3.1.0"]
python = ">=3.10,<3.11"
also = { numpy = ">=3" }
index = "https://example.com/simple"
"""


@pytest.fixture
def brought(tmp_path: Path) -> Iterator[dict[str, Compiler]]:
    """The compilers of WHOLE, as a package brings them."""
    (tmp_path / "compilers.toml").write_text(WHOLE)
    found = compilers.read(tmp_path, "portattn-musa 0.1")
    compilers.all_compilers()
    before = compilers._brought.compilers
    assert before is not None
    compilers.bring(before | found)
    yield found
    compilers.bring(before)


def test_portattns_own_come_through_the_same_door() -> None:
    found = compilers.own()
    assert list(found) == ["triton", "triton-ascend", "flagtree"]
    assert {Path(one.file).parent.name for one in found.values()} == {"cuda", "ascend"}
    assert {one.brought_by for one in found.values()} == {"portattn"}
    assert compilers.canonical("PyTorch_Triton.ROCm") == "triton"
    assert compilers.tried_range("triton-ascend") == "==3.2.*"
    assert compilers.released_versions("flagtree") == ()


def test_a_file_that_is_whole(brought: dict[str, Compiler]) -> None:
    one = brought["triton-musa"]
    assert (one.name, one.brought_by, Path(one.file).name) == ("triton-musa", "portattn-musa 0.1", "compilers.toml")
    assert str(Toolchain.parse("mtt_triton==3.1.0")) == "triton-musa==3.1.0"
    assert (one.version("v3.1-r7"), one.version("3.1.0")) == ("3.1", "3.1.0")
    assert compilers.names()[-1] == "triton-musa"
    assert "mubin" in compilers.stages()
    assert "MUSA_OPT" in compilers.variables()
    assert tracker_of("triton-musa") == "https://example.com/issues"
    told = _version("Successfully installed triton_musa-3.1.0", "triton-musa")
    assert told is not None
    assert told.value == "3.1.0"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[triton-musa]\n", "x = 3\n[triton-musa]\n", "2: key 'x': every compiler is a table"),
        ("package", "colour = 1\npackage", "4: key 'triton-musa.colour': the table has the unknown key `colour`"),
        ("package", "name = 'x'\npackage", "4: key 'triton-musa.name': is not stated: it follows from the file"),
        ('"mtt-triton"', '"MTT"', "3: key 'triton-musa.aliases': 'MTT' is no distribution's name"),
        ('"triton_musa"', '"triton-musa"', "4: key 'triton-musa.package': 'triton-musa' is not the name of a folder"),
        ("'^v?(", "'(^v?(", "5: key 'triton-musa.spelling': not a regular expression"),
        ("'^v?(\\d+\\.\\d+)-", "'^v?\\d+-", "5: key 'triton-musa.spelling': '^v?\\\\d+-r\\\\d+' has no group"),
        ('">=3.1,<3.2"', '"new"', "6: key 'triton-musa.tried': 'new' is not a PEP 440 version range"),
        ('["3.1.0", "3', '["old", "3', "7: key 'triton-musa.released': 'old' is not a PEP 440 version"),
        ('releases = ["3.1.0"]', 'releases = ["x"]', "13: key 'triton-musa.lab.releases': 'x' is not a PEP 440"),
        ('">=3.10,<3.11"', '"3.10"', "14: key 'triton-musa.lab.python': '3.10' is not a PEP 440 version range"),
        ('">=3" }', '"x" }', "15: key 'triton-musa.lab.also': 'x' is not a PEP 440 version range"),
        ("index", "indices", "16: key 'triton-musa.lab.indices': the table has the unknown key `indices`"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "compilers.toml"
    assert old in WHOLE
    path.write_text(WHOLE.replace(old, new, 1))
    with pytest.raises(DataError) as caught:
        compilers.read(tmp_path, "somebody")
    assert str(caught.value).startswith(f"{path}:{said}")


def test_a_folder_without_the_file_brings_nothing(tmp_path: Path) -> None:
    assert compilers.read(tmp_path, "somebody") == {}


def test_a_name_that_nobody_brings() -> None:
    with pytest.raises(ValueError, match="'triton-new' is no known compiler; known: triton, triton-ascend") as caught:
        Toolchain.parse("triton-new==1.0")
    assert "a backend package may bring others" in str(caught.value)


def test_what_is_wrong_with_packages_is_said_of_an_unknown_name() -> None:
    compilers.all_compilers()
    before = compilers._brought.compilers
    try:
        compilers.bring({}, ["triton-lost"], ["backend package lost 0.1 is broken: it is"])
        assert compilers.is_compiler("triton-lost"), "others' files may name it"
        with pytest.raises(ValueError, match=r"no known compiler.*backend package lost 0\.1 is broken: it is"):
            Toolchain.parse("triton-lost==1.0")
    finally:
        compilers.bring(before or {})


def test_ranges_of_a_compiler_that_is_added_to_triton(brought: dict[str, Compiler]) -> None:
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
def test_a_rebuild_of_a_release_is_known(brought: dict[str, Compiler], version: str, known: bool) -> None:
    assert brought
    said = Toolchain.parse(f"triton-musa=={version}").unknown_release()
    assert (said == "") is known


def test_the_installed_one_is_told_by_the_owner_of_its_folder(
    brought: dict[str, Compiler], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
