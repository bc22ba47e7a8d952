"""What a cell depends on: everything that can change its result changes its key, and nothing else does."""

import datetime
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from quirk_files import plant

from portattn.planning.registry import Registry, find_backends
from portattn.schema.toolchain import installed_toolchain
from portattn.tools.matrix import provenance, select
from portattn.tools.matrix.cells import Device, Identity, cell_key, with_id
from portattn.tools.matrix.problems import dense

NAMED = dense(dtype="fp16", head_dim=64)


def specs(*targets: str) -> list[select.CellSpec]:
    registry = Registry.load()
    return select.specs([NAMED], [registry.target(target, "triton==3.6.0") for target in targets])


def changed(one: Registry, two: Registry) -> set[str]:
    was, now = provenance.digests(one), provenance.digests(two)
    return {name for name in was if was[name] != now[name]}


@pytest.fixture
def made() -> Identity:
    return provenance.this_run(specs("cuda:sm_90", "rocm:gfx942"), "quick", "portattn matrix run", []).identity


def keys(identity: Identity) -> dict[str, str]:
    wanted = specs("cuda:sm_90", "rocm:gfx942")
    found = provenance.keys(wanted, identity)
    return {spec.target.name: found[spec.id] for spec in wanted}


def test_a_quirk_an_arch_and_tuning_change_their_backends_digest_alone(tmp_path: Path) -> None:
    plant(tmp_path, "rocm-0901-one", 'note = "x"')
    before = Registry.read(find_backends(), tmp_path)
    path = plant(tmp_path, "rocm-0901-one", 'note = "y"')
    assert changed(before, Registry.read(find_backends(), tmp_path)) == {"quirks/rocm"}
    plant(tmp_path, "rocm-0901-one", 'note = "x"')
    plant(tmp_path, "any-0901-two", 'note = "x"')
    assert changed(before, Registry.read(find_backends(), tmp_path)) == {"quirks/any"}
    (tmp_path / "any" / "any-0901-two.toml").unlink()
    path.write_text("# a comment\n" + path.read_text().replace("2027-06-01", "2027-07-01"))
    assert changed(before, Registry.read(find_backends(), tmp_path)) == set(), "no plan reads a review date"
    known = Registry.load()
    arch = msgspec.structs.replace(known.arches["cuda"]["sm_90"], cores=1)
    arches = known.arches | {"cuda": known.arches["cuda"] | {"sm_90": arch}}
    assert changed(known, msgspec.structs.replace(known, arches=arches)) == {"arches/cuda"}
    tunings = known.tunings | {"rocm": {}}
    assert changed(known, msgspec.structs.replace(known, tunings=tunings)) == {"tuning/rocm"}


def test_code_is_counted_where_a_cell_depends_on_it() -> None:
    names = {str(path) for path in map(str, provenance._counted())}
    for part in (
        "planning/planner.py", "worker/serve.py", "testing/findings.py", "tools/matrix/run.py", "launch/native.c",
    ):  # fmt: skip
        assert any(name.endswith(part) for name in names), part
    assert not any("/cli/" in name or "/tools/bench/" in name or "/kernels/" in name for name in names)


@pytest.mark.parametrize(
    ("change", "cells"),
    [
        ({"digests": {"quirks/rocm": "x"}}, {"rocm:gfx942"}), ({"digests": {"tuning/cuda": "x"}}, {"cuda:sm_90"}),
        ({"digests": {"quirks/any": "x"}}, {"cuda:sm_90", "rocm:gfx942"}),
        ({"digests": {"code": "x"}}, {"cuda:sm_90", "rocm:gfx942"}), ({"digests": {"quirks/ascend": "x"}}, set()),
        ({"executors": {"rocm:gfx942 emulated": provenance.LEFT_OUT}}, {"rocm:gfx942"}),
        ({"executors": {"any interpreter": "numpy is too new"}}, {"cuda:sm_90", "rocm:gfx942"}),
        ({"versions": {"torch": "9"}}, {"cuda:sm_90", "rocm:gfx942"}),
        ({"toolchains": {"triton==3.6.0": "lab, Python 3.11, made 2026-11-23"}}, {"cuda:sm_90", "rocm:gfx942"}),
        ({"toolchains": {"triton==3.4.0": "lab"}}, set()),
        ({"variables": {"TRITON_PTXAS_PATH": "/p"}}, {"cuda:sm_90", "rocm:gfx942"}),
    ],
)  # fmt: skip
def test_a_key_counts_all_that_its_cell_depends_on(made: Identity, change: dict, cells: set[str]) -> None:
    ((field, value),) = change.items()
    other = msgspec.structs.replace(made, **{field: getattr(made, field) | value})
    was, now = keys(made), keys(other)
    assert {target for target in was if was[target] != now[target]} == cells


def test_a_device_counts_for_its_own_backend_and_components_of_a_toolchain_count(made: Identity) -> None:
    device = Device(target="cuda:sm_90", chip="NVIDIA H200", versions={"driver": "570.1"})
    other = msgspec.structs.replace(made, host=msgspec.structs.replace(made.host, devices=(device,)))
    was, now = keys(made), keys(other)
    assert was["cuda:sm_90"] != now["cuda:sm_90"]
    assert (was["rocm:gfx942"], str(other.host)) == (now["rocm:gfx942"], "NVIDIA H200 (driver 570.1)")
    one, two = (cell_key(made, "c", "cuda:sm_90", "triton==3.6.0", {"ptxas": v}) for v in ("12.8.93", "13.0.1"))
    assert one != two


def test_the_id_is_of_what_cells_depend_on(made: Identity) -> None:
    later = made.date + datetime.timedelta(days=1)
    assert with_id(msgspec.structs.replace(made, date=later, command="another")).id == made.id
    assert with_id(msgspec.structs.replace(made, commit="1" * 40)).id != made.id
    renamed = msgspec.structs.replace(made, host=msgspec.structs.replace(made.host, name="lab-7"))
    assert with_id(renamed).id != made.id


def test_variables_that_compilers_read_are_kept_and_places_are_not() -> None:
    seen = {"TRITON_CACHE_DIR": "/c", "TRITON_PTXAS_PATH": "/p", "AMDGCN_USE_BUFFER_OPS": "0", "HOME": "/h"}
    assert provenance._variables(seen) == {"AMDGCN_USE_BUFFER_OPS": "0", "TRITON_PTXAS_PATH": "/p"}


def test_a_device_is_called_what_its_driver_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Registry.load().target("cuda:sm_90", "triton==3.6.0")
    known = msgspec.structs.replace(
        target,
        toolchain=target.toolchain.with_components({"driver": "570.1", **dict(installed_toolchain().components)}),
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    seen = provenance._device(known, Registry.load())
    assert (seen.target, seen.chip, seen.versions["driver"]) == ("cuda:sm_90", "NVIDIA H200", "570.1")
    assert "torch" not in seen.versions, "that is this Python's, and said once"
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(side_effect=RuntimeError("No CUDA GPUs are available")))
    assert provenance._device(known, Registry.load()).chip == target.arch.title
    made = provenance.this_run(specs("cuda:sm_90"), "quick", "x", [known, Registry.load().target("cpu:generic")])
    assert [device.target for device in made.identity.host.devices] == ["cuda:sm_90"]
