"""Without SGLang and vLLM: the plug-ins' modules can be imported, and say what is missing. With them: tests/engines."""

import importlib
import importlib.metadata
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portattn.errors import PortattnError
from portattn.integrations import (
    DIFFUSERS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    Interface,
    check_release,
    differences,
    sglang,
    vllm,
)

ENTRY_POINTS = {
    "vllm": ("vllm.general_plugins", "portattn.integrations.vllm:register", vllm.register),
    "sglang": ("sglang.srt.plugins", "portattn.integrations.sglang:activate", sglang.activate),
}


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_importing_it_imports_no_engine(engine: str) -> None:
    code = (
        f"import sys, portattn.integrations.{engine}; print(*(n for n in sys.modules if n.split('.')[0] == '{engine}'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_the_entry_point_is_the_function(engine: str) -> None:
    group, value, function = ENTRY_POINTS[engine]
    found = [one for one in importlib.metadata.entry_points(group=group) if one.name == "portattn"]
    if not found:
        pytest.skip("portattn was installed before it had this entry point: install it again")
    assert {one.value for one in found} == {value}
    assert found[0].load() is function


@pytest.mark.parametrize("engine", ENTRY_POINTS)
def test_without_the_engine(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(ModuleNotFoundError, match=engine):
        ENTRY_POINTS[engine][2]()
    if engine == "sglang":
        with pytest.raises(importlib.metadata.PackageNotFoundError, match="sglang"):
            sglang.create(None)


# Which releases are served, without the libraries: module trees made of the tables of members, and changed ones.
def plant(patch: pytest.MonkeyPatch, interface: Interface, changed: dict[tuple[str, str], str] | None = None) -> None:
    """Put a library's modules in place, whose members are as the table says, or as `changed` does of a member."""
    for module, members in interface.members.items():
        made = ModuleType(module)
        for name, told in members.items():
            kind, *names = (changed or {}).get((module, name), told).split()
            first, _, method = name.partition(".")
            if kind == "has" and not name:
                vars(made).update(dict.fromkeys(names))
            elif kind == "has" or method:
                owner: Any = vars(made).setdefault(first, type(first, (), {"__annotations__": {}}))
                owner.__annotations__.update(dict.fromkeys(names if kind == "has" else ()))
            if kind != "has":
                holder, last = (owner, method) if method else (made, first)
                parameters = ", ".join(["*"] * bool(names) + names).replace("=", "=None")
                setattr(holder, last, eval(f"lambda {parameters}: None"))
        patch.setitem(sys.modules, module, made)


def changes(interface: Interface) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Each member, a change of it that must be named, and how."""
    for module, members in interface.members.items():
        for name, told in members.items():
            kind, *names = told.split()
            if kind != "has":
                extra = f"{told} extra{'=' * (kind == 'takes')}"
                yield (module, name), extra, f"{name} has a parameter 'extra' that this adapter does not know"
            gone = next((one for one in names if f"{name}.{one}" not in members and one != "__init__"), "")
            flaw = f"{name or module} has no {'' if kind == 'has' else 'parameter '}{gone!r}"
            if gone:
                yield (module, name), " ".join([kind, *(one for one in names if one != gone)]), flaw


@pytest.mark.parametrize("interface", [VLLM, SGLANG, DIFFUSERS, TRANSFORMERS], ids=lambda one: one.library)
def test_each_member_that_differs_is_named(interface: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    for member, told, flaw in changes(interface):
        plant(monkeypatch, interface, {member: told})
        assert list(differences(interface)) == [flaw]
    given = {member: f"{told}=" for member, told, _ in changes(interface) if told.endswith(" extra")}
    plant(monkeypatch, interface, given)
    assert list(differences(interface)) == []  # the adapter does not give an optional argument that it does not know
    first = next(iter(interface.members))
    monkeypatch.setitem(sys.modules, first, None)
    assert [flaw.partition(" (")[0] for flaw in differences(interface)] == [f"{first} cannot be imported"]


def test_another_order_and_a_failing_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, VLLM)
    impl = sys.modules["vllm.model_executor.layers.attention.mla_attention"].MLACommonImpl
    monkeypatch.setattr(impl, "forward_mqa", lambda self, layer, q, kv_c_and_k_pe_cache, attn_metadata: None)
    monkeypatch.delattr(sys.modules["vllm.platforms"], "current_platform")
    monkeypatch.setattr(sys.modules["vllm.platforms"], "__getattr__", {}.__getitem__, raising=False)
    assert sorted(differences(VLLM)) == [
        "MLACommonImpl.forward_mqa has its parameters in another order: layer, q, kv_c_and_k_pe_cache, attn_metadata",
        "current_platform of vllm.platforms cannot be read (KeyError: 'current_platform')"]  # fmt: skip


def test_a_new_abstract_method_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, SGLANG)
    base = sys.modules["sglang.srt.layers.attention.base_attn_backend"].AttentionBackend
    base.__abstractmethods__ = frozenset({"verify_mask", "plan"})
    assert [flaw[:45] for flaw in differences(SGLANG)] == ["AttentionBackend has an abstract method 'plan"]


# The adapters ask at their entries, before they import a member of the library.
ENTRIES = {VLLM: lambda: vllm.PortattnBackend, SGLANG: lambda: sglang.create(None)}


@pytest.mark.parametrize("of", ENTRIES, ids=lambda one: one.library)
def test_releases(of: Interface, monkeypatch: pytest.MonkeyPatch) -> None:
    check_release.cache_clear()
    plant(monkeypatch, of)
    for module in ("vllm.backend", "sglang.capabilities"):  # the next import, once a release is taken
        monkeypatch.setitem(sys.modules, f"portattn.integrations.{module}", None)

    def enter(version: str, error: type[Exception], match: str) -> list[str]:
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
        monkeypatch.setattr(sglang.metadata, "version", lambda name: version)
        with warnings.catch_warnings(record=True) as told, pytest.raises(error, match=match):
            ENTRIES[of]()
        return [str(one.message) for one in told]

    tested = f"portattn was tested with {of.library} {of.oldest} to {of.newest}"
    for version in (of.oldest, of.newest, f"{of.newest}+cu130", f"{of.newest}.post1"):
        assert enter(version, ImportError, r"portattn\.integrations") == []
    for version in ("9.1.0", "dirty-main"):
        (told,) = enter(version, ImportError, r"portattn\.integrations")
        assert told.startswith(f"{tested}, and this is {version}: its interface was checked")
        assert enter(version, ImportError, r"portattn\.integrations") == []
    for version in ("0.3.0", f"{of.oldest}rc1"):
        enter(version, PortattnError, f"^{of.library} {version} is not supported: it is older than {of.oldest}")
    member, differing, flaw = next(change for change in changes(of) if change[1].endswith(" extra="))
    plant(monkeypatch, of, {member: differing})
    enter("9.2.0", PortattnError, f"^{of.library} 9.2.0: {flaw}; {tested}")
