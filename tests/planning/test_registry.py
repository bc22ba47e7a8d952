"""The registry's own errors: targets that nobody knows, broken files of arches and quirks, backend packages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from places import tables
from quirk_files import plant

import portattn
from portattn.backends.cpu import CpuBackend
from portattn.errors import ArgumentError, DataError
from portattn.planning import plugins, target_names
from portattn.planning.data_files import load_arches
from portattn.planning.planner import plan
from portattn.planning.quirk_files import load_quirks
from portattn.planning.registry import Registry, find_backends
from portattn.schema.target import Arch

TABLES = tables(__file__)

KNOWN = Registry.load()
TAIL = "sm89 (cuda:sm_89), sm80 (cuda:sm_80)"
SERVED = ", ".join(name for name, arch in KNOWN.arches["cuda"].items() if not arch.refused)


@pytest.mark.parametrize(
    ("text", "toolchain", "complaint"),
    [
        ("tpu:v5", None, f"target: backend is 'tpu', but must be one of {', '.join(KNOWN.backends)}"),
        ("cuda:sm_9", None,
         f"target: arch is 'sm_9', but cuda knows {SERVED}; near are sm90 (cuda:sm_90), sm89 (cuda:sm_89)"),
        ("cuda:sm_90:x", None,
         f"target: arch is 'sm_90:x', but cuda knows {SERVED}; near are sm90 (cuda:sm_90), {TAIL}"),
        ("cuda:mi300x", None, f"target: arch is 'mi300x', but cuda knows {SERVED}; it is a name of rocm:gfx942"),
        ("cuda:", None, f"target: arch is '', but cuda knows {SERVED}"),
    ],
)  # fmt: skip
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
    (tmp_path / "arches" / ".x9.toml.swp").write_bytes(b"an editor's")
    (tmp_path / "arches" / "x9a.toml").write_text(f"tuning = 'x20'\n{ARCH}")
    assert load_arches(tmp_path)["x9a"].tuning == "x20"


SIZES = (
    "core_threads", "core_registers", "register_unit", "reserved_memory", "warp_size", "registers", "scratchpad_bytes",
    "cache_share",
)  # fmt: skip


def without(key: str) -> str:
    return "".join(line for line in ARCH.splitlines(keepends=True) if not line.startswith(key))


# The text of arches/x9.toml, and the line and the beginning of the complaint.
BROKEN = [
    (ARCH + "colour = 'red'\n", 7, "key 'colour': the table has the unknown key `colour`"),
    (ARCH + "traits = ['wings']\n", 7, "key 'traits.0': Invalid enum value 'wings'"),
    (ARCH + "families = ['x9']\n", 7, "key 'families': 'x9' is the arch itself"),
    (ARCH + "[toolchain]\ngcc = '>=9'\n", 7, "key 'toolchain': 'gcc' is no known compiler; known: triton, "),
    (ARCH + "[toolchain]\ntriton = 'new'\n", 7, "key 'toolchain': 'new' is not a PEP 440 version range"),
    (ARCH + "name = 'x8'\n", 7, "key 'name': 'x8' is not the arch's name, 'x9', which is its file's"),
    (ARCH + "compiler_target = ['x', 'x8', 0]\n", 7, "key 'compiler_target': 'x8' is not the compiler's name of x9"),
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
    # Each would be planned with: fewer programs than none, tiles that fit nowhere.
    *((f"{key} = -1\n{without(key)}", 1, f"key '{key}': -1 must be at least 0") for key in SIZES),
]
NAMES = (
    "a b",
    "a:b",
    "a*",
    "x9.5",
    "-x",
    "ä9",
    "a,b",
)  # `--target BACKEND:NAME` and a quirk's globs could not say them
# A chip of such a file would be unknown, or planned with another file's numbers, and nobody told.
UNREAD = ("x8.tml", "x8.TOML", "x8", "x8.toml.orig", "x8.toml~", "README.md", "x8.toml/x7.toml")
# The files of a folder, and the beginning of the complaint.
FOLDERS: list[tuple[dict[str, str], str]] = [
    *(({"arches/x9.toml": text}, f"arches/x9.toml:{line}: {said}") for text, line, said in BROKEN),
    ({"arches.toml": "# one\nfirst = 3\n"}, "arches.toml:2: key 'first': every arch is a table"),
    ({"arches.toml": "# one\n\n[first]\ncores = 'many'\n"}, "arches.toml:4: key 'first.cores'"),
    *(
        ({f"arches/{name}.toml": ARCH}, f"arches/{name}.toml: {name!r} cannot be an arch's name: it has let")
        for name in NAMES
    ),
    *(({"arches.toml": f'["{name}"]\n{ARCH}'}, f"arches.toml:1: {name!r} cannot be an arch's name") for name in NAMES),
    *(
        ({"arches/x9.toml": ARCH, f"arches/{name}": ARCH}, f"arches/{name.partition('/')[0]}: it would not be read: ")
        for name in UNREAD
    ),
    ({"arches/x9.toml": f"tuning = 'x8'\n{ARCH}"}, "arches/x9.toml: x9 shares the tuning of 'x8', no arch here"),
    ({"arches/x9.toml": ARCH, "arches.toml": f"[x9]\n{ARCH}"}, "arches/x9.toml: arch 'x9' is already in arches.toml"),
    (
        {"arches/x8.toml": f"devices = ['8.6', '8.7']\n{ARCH}", "arches/x9.toml": f"devices = ['8.7']\n{ARCH}"},
        "arches/x8.toml: device '8.7' of x8 is one of x9's, too",
    ),
]


@pytest.mark.parametrize(("files", "said"), FOLDERS, ids=[said for _, said in FOLDERS])
def test_a_broken_file_of_an_arch(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        load_arches(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/{said}")


def test_every_size_of_an_arch_is_checked() -> None:
    numbers = {field.name for field in msgspec.structs.fields(Arch) if field.type is int}
    assert numbers == {*SIZES, "cores", "max_programs"}


@pytest.mark.parametrize(
    ("name", "target"), [("sm_90", 90), ("gfx90a", "gfx90a"), ("ascend910_93", "Ascend910_9382"), ("x-9", "X9b")]
)
def test_a_name_that_is_the_compilers(tmp_path: Path, name: str, target: int | str) -> None:
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / f"{name}.toml").write_text(
        f"name = '{name}'\ncompiler_target = ['x', {target!r}, 0]\n{ARCH}"
    )
    assert load_arches(tmp_path)[name].compiler_target == ("x", target, 0)


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "arches").mkdir()
    (tmp_path / "arches" / "x9.toml").symlink_to(tmp_path / "gone.toml")
    with pytest.raises(DataError, match=r"arches/x9\.toml: it would not be read"):
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


def test_an_interrupt_is_no_fault_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    provides(monkeypatch, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        find_backends()


def test_portattns_own_files_stay_strict(tmp_path: Path) -> None:
    """A broken one is a broken installation: no plan is made without it."""
    plant(tmp_path, "cuda-0900-planted", 'note = "x')
    with pytest.raises(DataError, match="not TOML"):
        Registry.read(find_backends(), tmp_path)


# Targets by the names that people use: an arch alone, a chip, a family of chips.
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90", "cuda:sm_90"), ("SM90", "cuda:sm_90"), ("h100", "cuda:sm_90"), ("h200", "cuda:sm_90"),
        ("Jetson AGX Thor", "cuda:sm_110"), ("dgx spark", "cuda:sm_121"),
        ("H100 SXM", "cuda:sm_90"), ("a100", "cuda:sm_80"), ("rtx-4090", "cuda:sm_89"), ("cuda:h100", "cuda:sm_90"),
        ("mi300x", "rocm:gfx942"), ("mi300", "rocm:gfx942"), ("910B1", "ascend:ascend910b1"), ("cpu", "cpu:generic"),
        ("910b", "ascend:ascend910b2"),  # a family: the arch whose tuning the others share
        ("hopper", "cuda:sm_90"), ("cuda:Hopper", "cuda:sm_90"), ("rdna3", "rocm:gfx1100"), ("RDNA4", "rocm:gfx1201"),
    ],
)  # fmt: skip
def test_a_target_by_the_name_that_people_use(text: str, name: str) -> None:
    assert KNOWN.target(text, "none").name == name


# What nvidia-smi, torch.cuda.get_device_name, rocminfo, amd-smi and npu-smi print.
PRINTED = TABLES["printed"]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in PRINTED.items() for text in texts])
def test_a_target_as_its_driver_prints_it(name: str, text: str) -> None:
    """Through the public function, in any case, and with whatever a shell leaves around it."""
    for written in (text, text.lower(), f" {text} "):
        if written == text or ":" not in text:
            assert portattn.target(written, "none").name == name


REFUSED = [
    ("sm_75", "cuda:sm_75"), ("T4", "cuda:sm_75"), ("Tesla T4", "cuda:sm_75"), ("Turing", "cuda:sm_75"),
    ("NVIDIA GeForce RTX 2080 Ti", "cuda:sm_75"), ("Quadro RTX 6000", "cuda:sm_75"), ("7.5", "cuda:sm_75"),
    ("sm_70", "cuda:sm_70"), ("Tesla V100-SXM2-16GB", "cuda:sm_70"), ("volta", "cuda:sm_70"),
    ("Tesla P100-PCIE-16GB", "cuda:sm_60"), ("NVIDIA GeForce GTX 1080 Ti", "cuda:sm_61"),
    ("gfx908", "rocm:gfx908"), ("AMD Instinct MI100", "rocm:gfx908"), ("AMD Radeon VII", "rocm:gfx906"),
    ("gfx1030", "rocm:gfx1030"), ("gfx1032", "rocm:gfx1030"), ("AMD Radeon RX 6800 XT", "rocm:gfx1030"),
    ("Ascend310P3", "ascend:ascend310p"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name"), REFUSED)
def test_a_chip_that_is_known_and_not_supported_is_answered_with_the_reason(text: str, name: str) -> None:
    target = portattn.target(text, "triton==3.6.0")
    assert target.name == name
    problem = portattn.Problem(batch=1, heads_q=4, heads_k=4, seq_q=64, seq_k=64, head_dim=64, dtype="fp16")
    made = plan(problem, target)
    assert made.path != "triton"
    assert {no.path: no.reason for no in made.rejected}["triton"] == target.arch.refused


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("RTX 6000", "'RTX 6000', but is a name of cuda:sm_75 and cuda:sm_89: say which"),
        ("blackwell", r"is a name of cuda:sm_100, .* and cuda:sm_121: say which"),  # a family of several tunings
    ],
)
def test_what_several_chips_are_called_is_refused(name: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        portattn.target(name)


@pytest.mark.parametrize("text", ["H10", "H2", "A1", "A3", "L", "L40X", "MI30", "RTX 409", "RTX 40900", "H100 H200"])
def test_no_part_of_a_name_and_no_two_names_are_one(text: str) -> None:
    with pytest.raises(ArgumentError):
        portattn.target(text)
    with pytest.raises(ArgumentError):
        portattn.target(f"NVIDIA {text}")


def test_each_name_is_of_one_arch() -> None:
    """Where two arches had one, whoever gave it would be asked which of them is meant."""
    owners: dict[str, set[str]] = {}
    for backend, arches in KNOWN.arches.items():
        for arch in arches.values():
            for name in (*target_names.chips(arch.title), *arch.names):
                owners.setdefault(name, set()).add(f"{backend}:{arch.name}")
    assert [name for name, arches in owners.items() if len(arches) > 1] == []
    for name, (owner,) in owners.items():
        if any(c.isdigit() for c in name):
            assert portattn.target(name, "none").name == owner


def test_a_family_names_its_arches() -> None:
    rdna3 = [f"rocm:{arch.name}" for arch in KNOWN.arches["rocm"].values() if "rdna3" in arch.families]
    assert KNOWN.family("rdna3") == KNOWN.family("rocm:RDNA-3") == rdna3
    assert {"rocm:gfx1100", "rocm:gfx1101", "rocm:gfx1151"} <= set(rdna3)
    assert KNOWN.family("cuda:rdna3") == KNOWN.family("gfx1100") == KNOWN.family("") == []


def test_no_name_is_a_family_s_and_something_else_s() -> None:
    """A family that is called as a chip or an arch would hide one of them."""
    for backend, arches in KNOWN.arches.items():
        families = {family for arch in arches.values() for family in arch.families}
        for family in families - set(arches):
            assert family not in KNOWN.backends, family
            inside = {f"{backend}:{arch.name}" for arch in arches.values() if family in arch.families}
            assert set(KNOWN.family(family)) == inside
        assert not families & set(arches)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("h1000", "h100 (cuda:sm_90)"),
        ("sm_9", "sm90 (cuda:sm_90)"),  # no shortened number is taken for another
        ("mi3", "mi350x (rocm:gfx950)"),
        ("kepler", "cuda:sm_80, rocm:gfx90a"),
        ("NVIDIA H300", "h200 (cuda:sm_90)"),
        ("NVIDIA H2000", "h200 (cuda:sm_90)"),
        ("NVIDIA A1000000", "a100 (cuda:sm_80)"),
        ("NVIDIA L400", "l40 (cuda:sm_89)"),
        ("NVIDIA GeForce RTX 4095", "rtx4090 (cuda:sm_89)"),
        ("AMD Instinct MI400X", "mi300x (rocm:gfx942)"),
        ("NVIDIA MI300X", "mi300x (rocm:gfx942)"),  # no maker's name is left out for another's chip
        ("Ascend910Z", "ascend910b4 (ascend:ascend910b4)"),
        (
            "AMD Radeon Graphics",
            ", ".join(f"rocm:{name}" for name, arch in KNOWN.arches["rocm"].items() if not arch.refused),
        ),
        ("rdna33", "rdna3 (family of rocm:gfx1100, "),
        ("cuda", ", ".join(f"cuda:{name}" for name, arch in KNOWN.arches["cuda"].items() if not arch.refused)),
    ],
)
def test_a_name_of_nothing_is_answered_with_the_nearest(text: str, limit: str) -> None:
    with pytest.raises(ArgumentError, match=f"^target: name is '{text}', but must be BACKEND:ARCH") as caught:
        KNOWN.target(text)
    assert limit in caught.value.limit


def test_a_name_of_several_arches_is_refused() -> None:
    """Two backends with one arch's name, and a chip that two arches' titles have."""
    arch = KNOWN.arches["cuda"]["sm_90"]
    with pytest.raises(ArgumentError, match="is a name of one:sm_90 and two:sm_90: say which"):
        target_names.resolve("sm_90", {"one": {"sm_90": arch, "x": arch}, "two": {"sm_90": arch, "y": arch}})
    with pytest.raises(ArgumentError, match="is a name of one:a and one:b: say which"):
        target_names.resolve("h100", {"one": {"a": arch, "b": arch}})
