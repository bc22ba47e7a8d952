"""portattn's name in diffusers' closed registry: every way to choose it, and nothing left once it is removed."""

import copy
import doctest
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import diffusers
import pytest
import test_docs
import test_docstrings
import torch
from calls import dispatch, qkv
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend
from diffusers.utils import constants
from places import DOCS, ROOT
from tiny_diffusers import flux, flux_inputs

import portattn
import portattn.integrations.diffusers as integration
from portattn.errors import ArgumentError, PortattnError
from portattn.integrations import DIFFUSERS, differences

REGISTERED = "register() and remove()"


def everything() -> list[Any]:
    """All that register() may change."""
    registry, names = _AttentionBackendRegistry, AttentionBackendName
    return [
        dict(registry._backends), dict(registry._constraints), dict(registry._supported_arg_names),
        set(registry._supports_context_parallel), registry._active_backend, dict(names._member_map_),
        dict(names._value2member_map_), list(names), len(names), sorted(vars(names)), list(names.__members__),
        list(getattr(names, "_hashable_values_", [])),
    ]  # fmt: skip


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = everything()
    yield
    assert everything() == before


@pytest.mark.engine_feature(REGISTERED)
def test_remove_restores_everything(nothing_left: None) -> None:
    handle = integration.register()
    member = AttentionBackendName("portattn")
    assert member is AttentionBackendName.PORTATTN is AttentionBackendName["PORTATTN"]
    assert isinstance(member, AttentionBackendName)
    assert member in AttentionBackendName
    assert member in list(AttentionBackendName)
    assert "portattn" in AttentionBackendName.__members__["PORTATTN"].value
    assert copy.deepcopy(member) is member is pickle.loads(pickle.dumps(member))
    assert repr(handle) == "Registration(name='portattn', backend=None, registered)"
    handle.remove()
    handle.remove()
    assert repr(handle).endswith("removed)")
    with pytest.raises(ValueError, match="portattn"):
        AttentionBackendName("portattn")
    with pytest.raises(AttributeError):
        _ = AttentionBackendName.PORTATTN


@pytest.mark.engine_feature(REGISTERED)
def test_two_names_side_by_side(nothing_left: None) -> None:
    """The second's removal leaves the first one in place, whatever is the active backend."""
    first, second = integration.register(), integration.register("portattn_reference", backend="reference")
    q, k, v = qkv()
    model = flux()
    model.set_attention_backend("portattn_reference")
    dispatch(second, q, k, v)
    plan = portattn.last_plan()
    assert plan is not None
    assert plan.path == "reference"
    first.remove()
    assert _AttentionBackendRegistry._active_backend == "portattn_reference"
    second.remove()  # portattn was not active when it was registered: native was


@pytest.mark.engine_feature(REGISTERED)
@pytest.mark.parametrize("where", ["register", "set_active_backend"])
def test_nothing_is_left_of_an_interrupted_one(
    where: str, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(constants, "DIFFUSERS_ATTN_BACKEND", "portattn")
        patched.setattr(_AttentionBackendRegistry, where, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            integration.register()
    integration.register().remove()


@pytest.mark.engine_feature(REGISTERED)
def test_the_same_arguments_give_the_same_handle(registered: integration.DiffusersRegistration) -> None:
    assert integration.register() is registered
    with pytest.raises(ArgumentError, match=r"backend is 'reference', but 'portattn' is registered with None"):
        integration.register(backend="reference")


@pytest.mark.engine_feature("set_attention_backend")
def test_a_model_that_is_set_to_it(registered: integration.DiffusersRegistration) -> None:
    model = flux()
    model.set_attention_backend("portattn")
    assert portattn.last_plan() is None
    with torch.no_grad():
        model(**flux_inputs())
    plan = portattn.last_plan()
    assert plan is not None
    assert plan.problem.layout == "bshd"
    registered.remove()
    with pytest.raises(KeyError, match="portattn"), torch.no_grad():
        model(**flux_inputs())
    model.reset_attention_backend()
    with torch.no_grad():
        model(**flux_inputs())


@pytest.mark.engine_feature("attention_backend, the context manager")
def test_a_block(registered: integration.DiffusersRegistration) -> None:
    model = flux()
    with attention_backend("portattn"), torch.no_grad():
        model(**flux_inputs())
    assert portattn.last_plan() is not None
    assert _AttentionBackendRegistry._active_backend is AttentionBackendName.NATIVE


CHILD = """
import portattn.integrations.diffusers as integration
handle = integration.register({arguments})
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as registry, dispatch_attention_fn
import portattn, torch
print(registry.get_active_backend()[0].value)
q = torch.randn(1, 5, 2, 16)
dispatch_attention_fn(q, q, q)
print(portattn.last_plan().problem.op if portattn.last_plan() else None)
handle.remove()
print(registry.get_active_backend()[0].value)
"""


def run_child(program: str, chosen: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=240, cwd=ROOT,
        env={**os.environ, "DIFFUSERS_ATTN_BACKEND": chosen},
    )  # fmt: skip


@pytest.mark.engine_feature("DIFFUSERS_ATTN_BACKEND")
@pytest.mark.parametrize(
    ("chosen", "arguments", "printed"),
    [
        ("portattn", "", ["portattn", "attention", "native"]),
        ("portattn", "'portattn_other'", ["native", "None", "native"]),
        ("_native_math", "", ["_native_math", "None", "_native_math"]),
    ],
    ids=["portattn", "another name", "diffusers' own"],
)
def test_the_environment_chooses_it(chosen: str, arguments: str, printed: list[str]) -> None:
    done = run_child(CHILD.replace("{arguments}", arguments), chosen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == printed


@pytest.mark.engine_feature("DIFFUSERS_ATTN_BACKEND with models imported before register()", refused=True)
def test_the_environment_without_portattn_is_diffusers_error(refusal: Callable[..., Any]) -> None:
    done = run_child("import diffusers.models.attention_dispatch", "portattn")
    with refusal(ValueError, match="'portattn' is not a valid AttentionBackendName"):
        raise ValueError(done.stderr.strip().splitlines()[-1])


@pytest.mark.engine_feature("diffusers with another interface, 0.39 and earlier", refused=True)
@pytest.mark.parametrize("version", ["0.39.0", "0.42.2", "1.0"])
def test_another_version(
    version: str, refusal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, nothing_left: None
) -> None:
    assert list(differences(DIFFUSERS)) == []
    monkeypatch.setattr(diffusers, "__version__", version)
    monkeypatch.delattr(attention_dispatch, "_templated_context_parallel_attention")
    flaw = " is not supported" if version == "0.39.0" else ": .*attention_dispatch has no _templated_context_parallel"
    with refusal(PortattnError, match=f"diffusers {version}{flaw}"):
        integration.register()


@pytest.mark.parametrize("name", ["flash", "Portattn", "portattn-2", "", None, "_portattn"])
def test_a_name_that_is_not_ours(name: Any, nothing_left: None) -> None:
    with pytest.raises(ArgumentError, match=r"name is .*, but must begin with 'portattn'"):
        integration.register(name)


def test_a_name_that_somebody_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AttentionBackendName._value2member_map_, "portattn", AttentionBackendName.NATIVE)
    with pytest.raises(ArgumentError, match="name is 'portattn', but is taken in diffusers' AttentionBackendName"):
        integration.register()


def test_a_backend_that_is_no_string() -> None:
    with pytest.raises(ArgumentError, match="backend is 3, but must be None or a string"):
        integration.register(backend=3)  # type: ignore[arg-type]


def test_every_argument_of_diffusers_own_backend_is_declared(registered: integration.DiffusersRegistration) -> None:
    """Those that a signature lacks are dropped without a word."""
    names = _AttentionBackendRegistry._supported_arg_names
    assert names[AttentionBackendName("portattn")] >= names[AttentionBackendName.NATIVE]
    assert names[AttentionBackendName("portattn")] >= names[AttentionBackendName._NATIVE_CUDNN]
    assert "portattn" in attention_dispatch._AttentionBackendRegistry._supports_context_parallel


# A path that no device has is refused as it is registered, not in a model's first attention.
def test_a_misspelt_backend() -> None:
    before = list(AttentionBackendName)
    with pytest.raises(ArgumentError, match="backend is 'tritton', but must be one of auto, vendor, reference"):
        integration.register("portattn_misspelt", backend="tritton")
    assert list(AttentionBackendName) == before


@pytest.mark.parametrize("backend", ["triton", "interpreter", "sdpa", "gluon_forward"])
def test_names_of_other_devices(backend: str) -> None:
    integration.register("portattn_elsewhere", backend=backend).remove()


def test_advice_names_what_the_call_has(registered: integration.DiffusersRegistration) -> None:
    """diffusers' call has no `layout`."""
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 9, 16)  # as (batch, heads, seq, head_dim)
    with pytest.raises(ArgumentError, match="heads_q is 6") as raised:
        dispatch(registered, query, key, key, enable_gqa=True)
    assert str(raised.value).endswith("give query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)")


# docs/diffusers.md shows what its examples print, and names the versions that register() takes.
def test_the_examples_of_the_page(tmp_path: Path) -> None:
    test_docs.assert_shown("diffusers", 4, tmp_path)


def test_the_versions_of_the_page_and_of_the_extra() -> None:
    page = (DOCS / "diffusers.md").read_text(encoding="utf-8")
    assert f"diffusers {DIFFUSERS.oldest} to {DIFFUSERS.newest}" in page
    extra = f'diffusers = ["diffusers>={DIFFUSERS.oldest},<={DIFFUSERS.newest}"]'
    assert extra in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_register_s_docstring() -> None:
    assert test_docstrings.lacks(integration.register) == []
    test: Any = doctest.DocTestParser().get_doctest(inspect.getdoc(integration.register) or "", {}, "it", None, 0)
    found = doctest.DocTestRunner(verbose=False).run(test)
    assert found.attempted >= 4
    assert found.failed == 0


def test_an_environment_without_diffusers() -> None:
    done = run_child("import sys; sys.modules['diffusers'] = None; import portattn.integrations.diffusers", "native")
    assert "needs diffusers, which is not installed: pip install" in done.stderr
