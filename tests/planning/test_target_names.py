"""Targets by the names that people use: an arch alone, a chip, a family of chips."""

from __future__ import annotations

import pytest

import portattn
from portattn.errors import ArgumentError
from portattn.planning import target_names
from portattn.planning.planner import plan
from portattn.planning.registry import Registry

KNOWN = Registry.load()


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
PRINTED = {
    "cuda:sm_80": ["NVIDIA A100-SXM4-80GB", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A30",
                   "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "A100-SXM4-40GB"],
    "cuda:sm_86": ["NVIDIA A10", "NVIDIA A10G", "NVIDIA A40", "NVIDIA A2", "NVIDIA RTX A6000",
                   "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 3060 Laptop GPU", "Orin (nvgpu)"],
    "cuda:sm_89": ["NVIDIA L4", "NVIDIA L40", "NVIDIA L40S", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090 D",
                   "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA RTX 6000 Ada Generation"],
    "cuda:sm_90": ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200", "NVIDIA H200 NVL",
                   "NVIDIA H20", "NVIDIA H800", "NVIDIA GH200 480GB", "9.0", "cuda:NVIDIA H100 PCIe"],
    "cuda:sm_100": ["NVIDIA B200", "NVIDIA GB200"],
    "cuda:sm_103": ["NVIDIA B300", "NVIDIA GB300"],
    "cuda:sm_110": ["NVIDIA Thor"],
    "cuda:sm_120": ["NVIDIA GeForce RTX 5090", "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
                    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition"],
    "cuda:sm_121": ["NVIDIA GB10"],
    "rocm:gfx90a": ["AMD Instinct MI210", "AMD Instinct MI250X / MI250"],
    "rocm:gfx942": ["AMD Instinct MI300X", "AMD Instinct MI300X VF", "AMD Instinct MI325X"],
    "rocm:gfx950": ["AMD Instinct MI355X"],
    "rocm:gfx1100": ["AMD Radeon RX 7900 XTX", "AMD Radeon PRO W7900"],
    "rocm:gfx1151": ["AMD Radeon 8060S Graphics", "AMD Radeon(TM) 8060S Graphics"],
    "rocm:gfx1201": ["AMD Radeon RX 9070 XT"],
    "ascend:ascend910b2": ["Ascend 910B", "Ascend910B2"],
    "ascend:ascend910b3": ["Ascend910B3", "Ascend 910B3"],
    "ascend:ascend910_93": ["Ascend910_9391"],
}  # fmt: skip


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


def test_what_two_chips_are_called_is_refused() -> None:
    with pytest.raises(ArgumentError, match="'RTX 6000', but is a name of cuda:sm_75 and cuda:sm_89: say which"):
        portattn.target("RTX 6000")


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
    arches = KNOWN.arches["rocm"].values()
    rdna3 = [f"rocm:{arch.name}" for arch in arches if "rdna3" in arch.families]
    assert KNOWN.family("rdna3") == KNOWN.family("rocm:RDNA-3") == rdna3
    assert {"rocm:gfx1100", "rocm:gfx1101", "rocm:gfx1151"} <= set(rdna3)
    assert KNOWN.family("cuda:rdna3") == KNOWN.family("gfx1100") == KNOWN.family("") == []


def test_a_family_of_several_tunings_is_answered_with_its_members() -> None:
    with pytest.raises(ArgumentError, match=r"is a name of cuda:sm_100, .* and cuda:sm_121: say which"):
        KNOWN.target("blackwell")


def test_no_name_is_a_family_s_and_something_else_s() -> None:
    """A family that is called as a chip or an arch would hide one of them."""
    for backend, arches in KNOWN.arches.items():
        families = {family for arch in arches.values() for family in arch.families}
        for family in families - set(arches):
            assert family not in KNOWN.backends, family
            inside = {f"{backend}:{arch.name}" for arch in arches.values() if family in arch.families}
            assert set(KNOWN.family(family)) == inside
        assert not families & set(arches)


def test_every_chip_of_a_title_means_its_arch() -> None:
    for backend, arches in KNOWN.arches.items():
        for name, arch in arches.items():
            for chip in target_names.chips(arch.title):
                if any(c.isdigit() for c in chip):
                    assert KNOWN.target(chip, "none").name == f"{backend}:{name}"


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
