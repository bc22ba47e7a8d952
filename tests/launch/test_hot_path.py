"""The whole of a cached call by native.c, against the same call by Python: every operation, launches recorded."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest
from fakedriver import run, triton_folders
from packaging.version import Version

from portattn.launch import native

TRITONS = triton_folders()
OPS = ("attention", "varlen", "decode", "paged", "sparse", "mla")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By Triton 3.6, for which there are variants, where it is here; else by the newest that is."""
    if not TRITONS:
        pytest.skip("Triton is not installed, and the lab has none for this Python")
    version = "3.6.0" if "3.6.0" in TRITONS else max(TRITONS, key=Version)
    return run("hot_child.py", tmp_path_factory.mktemp("hot"), TRITONS[version])


@pytest.mark.compiles
def test_a_call_by_c_is_the_call_by_python(seen: dict[str, Any]) -> None:
    assert seen["why not"] == ""
    assert seen["reads"], "this torch's tensors are read by torch's C functions"
    variants = ["attention gluon", "mla gluon"] if Version(seen["triton"]) >= Version("3.6") else []
    for name in [f"{op} triton" for op in OPS] + variants:
        found = seen[name]
        assert found["way"] == "native", found["reason"]
        assert found["hit"], name
        assert found["same"], f"{name}: other launches or results"
        assert found["asked"], f"{name}: other launches where tensors are asked in Python"
        assert found["moved"], f"{name}: other launches with other tensors"
        assert found["ours"], f"{name}: a result is not what was allocated"
        assert found["last"], f"{name}: last_plan"
        assert {"allocated 0", "allocated 1"} <= set(found["named"])
        assert any(arg.startswith("q") for arg in found["named"]), "the caller's own tensors are launched"
    assert seen["decode triton"]["launches"] == 2
    if variants:
        assert [seen[name]["path"] for name in variants] == ["gluon_forward", "gluon_mla"]


@pytest.mark.compiles
def test_a_first_call_launches_what_later_ones_do(seen: dict[str, Any]) -> None:
    """As many bytes of parameters to the same kernels, among them the results' and the given tensors' addresses."""
    compared = {name: found for name, found in seen.items() if isinstance(found, dict) and "by C" in found}
    assert len(compared) >= len(OPS)
    for name, found in compared.items():
        first = found["first"]
        assert first["launches"] == found["by C"], name
        assert first["results"], name
        assert first["given"] >= 3, name


@pytest.mark.compiles
def test_what_is_kept_holds_no_tensor(seen: dict[str, Any]) -> None:
    for name, found in seen.items():
        if isinstance(found, dict) and "held" in found:
            assert found["held"] == [], name


@pytest.mark.compiles
def test_a_prepared_call_launches_into_what_it_is_given(seen: dict[str, Any]) -> None:
    """The core's kernels and the variants': the same number of launches, and not a byte allocated."""
    made = {name: found for name, found in seen.items() if isinstance(found, dict) and "prepared" in found}
    assert len(made) >= len(OPS)
    for name, found in made.items():
        assert found["prepared"] == {
            "allocated": 0, "given": True, "launches": found["launches"], "path": found["path"], "out": True,
            "odd": True,
        }, name  # fmt: skip


@pytest.mark.compiles
def test_a_prepared_call_launches_into_no_wrong_place(seen: dict[str, Any]) -> None:
    """native.c sees that it is none, and Python says which."""
    made = {name: found["refused"] for name, found in seen.items() if isinstance(found, dict) and "refused" in found}
    assert len(made) >= len(OPS)
    for name, refused in made.items():
        assert len(refused) == 11, name
        assert refused == {what: [what.split()[0], 0] for what in refused}, name


@pytest.mark.compiles
def test_kernels_write_into_memory_that_the_caller_brings(seen: dict[str, Any]) -> None:
    """The first call of a kind is copied; later ones, by native.c and by Python, allocate no result."""
    made = {name: found for name, found in seen.items() if isinstance(found, dict) and "into" in found}
    assert len(made) >= len(OPS)
    for name, found in made.items():
        assert found["copied"], name
        assert found["into"] == [{"returned": True, "held": True, "allocated": []}] * 2, name
        assert found["past"] == [], name


@pytest.mark.compiles
def test_partial_results_lie_in_memory_that_is_given_back(seen: dict[str, Any]) -> None:
    """Once all is launched, and where the driver refuses; where there is no more nothing is launched."""
    taken = seen["taken"][0]
    assert taken["before"] == [], "by Python it is a tensor"
    assert taken["took"][0] > 0
    assert taken["took"][1] == 7, "the stream that is launched on"
    two, four, again = taken["sizes"]
    assert two == again < four, "as much as the call's sizes need"
    assert taken["given"] == [[2, True]], "after both launches, which have its address"
    assert taken["tensors"] == [False] * len(taken["tensors"]), "results alone are tensors"
    assert taken["refused"][0].startswith("RuntimeError: CUDA's driver refused a launch: ")
    assert taken["refused"][1] == [[0, True]]
    assert taken["full"] == ["MemoryError: no more", [], 0]
    assert taken["prepared"] == [[], 2], "a handle has memory of its own"
    assert taken["left"] == 0


@pytest.mark.compiles
def test_threads_have_their_own_addresses(seen: dict[str, Any]) -> None:
    launches, firsts, wrong = seen["threads"]
    assert (launches, firsts, wrong) == (300, 150, [])


@pytest.mark.compiles
def test_after_a_warm_up_the_first_call_compiles_nothing(seen: dict[str, Any]) -> None:
    found = seen["warmed"]
    assert found["report"]["failed"] == ""
    assert found["report"]["cached"]
    assert found["report"]["way"] == "native"
    assert "dense_forward" in found["report"]["loaded"]
    assert found["again"] == [], "a second warm-up loads nothing"
    assert found["first"] == {"ways": ["C"], "warnings": [], "launches": 1}


@pytest.mark.compiles
def test_the_monitor_names_what_differs(seen: dict[str, Any]) -> None:
    found = seen["monitored"]
    assert len(found["late"]) == 1
    (text,) = found["late"]
    differing = [f"{name}'s shape: (1, 4, 96, 72) instead of (1, 4, 96, 80)" for name in "qkv"]
    for part in ("dense_forward compiled after warm-up", "attention q (1,4,96,72)", "key ", *differing):
        assert part in text, text
    assert found["again"] == [], "a kernel is warned about once"
    assert found["never"] == []
    assert found["off"] == []
    assert len(found["always"]) == 1
    assert "scale" not in found["always"][0]
    assert "causal: True instead of False" in found["always"][0], found["always"]


needs_compiler = pytest.mark.skipif(
    not Path(sysconfig.get_config_var("INCLUDEPY"), "Python.h").exists(), reason="Python.h is not installed"
)


@needs_compiler
def test_the_library_is_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, why = native.load(str(tmp_path))
    assert why == ""
    assert module.Kind is not None
    place = native.path(str(tmp_path))
    left = sorted(path.name for path in place.parent.iterdir())
    assert left == [f".{place.name}.lock", place.name], "nothing is left half done"
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "_compile", lambda place: pytest.fail("it is compiled again"))
    assert native.load(str(tmp_path))[1] == ""


@needs_compiler
def test_a_broken_library_is_made_anew(tmp_path: Path) -> None:
    place = native.path(str(tmp_path))
    place.parent.mkdir(parents=True)
    place.write_bytes(b"half a disk's")
    module, why = native.load(str(tmp_path))
    assert why == ""
    assert module.Launches is not None


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/does/not/exist", "No such file"),
        ("false", "exit status 1"),
        ("sh -c 'echo error: no >&2; exit 1'", "error: no"),
    ],
)
def test_where_it_cannot_be_made_it_says_why(
    compiler: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    module, why = native.load(str(tmp_path))
    assert module is None
    assert said in why
    assert not list(tmp_path.glob("native/[!.]*"))


def test_fields_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    module, why = native.load(str(tmp_path))
    if module is None:
        pytest.skip(why)
    with pytest.raises(TypeError, match="not all there"):
        module.Kind(values=())
    with pytest.raises(TypeError, match="not all there"):
        module.Sized(inputs=())
    with pytest.raises(ValueError, match="at most 64"):
        module.Launches(b"", 0, 0, 65, (), (), ())
    launches = module.Launches(b"", 0, 0, 2, (), (), ((0, 4, 1),))
    with pytest.raises(ValueError, match="2 addresses are needed, not 1"):
        launches(7, [1], [3, 4])
    with pytest.raises(ValueError, match="outputs are missing"):
        launches(7, [1, 2], [3])
    with pytest.raises(OverflowError):
        launches(7, [1, -1], [3, 4])
