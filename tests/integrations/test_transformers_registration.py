"""Registering, removing, importing, and the guide."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from places import DOCS

import portattn

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

import transformers  # noqa: E402
from tiny_models import LENGTH, padding, tokens, using  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from portattn.integrations.transformers import Registration, register  # noqa: E402

# ---------------------------------------------------------------- registering


def test_register_twice_is_once(registration: Registration) -> None:
    assert register() is registration
    assert register("portattn", backend=None) is registration
    with pytest.raises(portattn.ArgumentError, match="'portattn' is registered with None: remove"):
        register(backend="reference")
    with pytest.raises(
        portattn.ArgumentError, match="backend is 'tritton', but must be one of auto, vendor, reference"
    ):
        register("portattn_misspelt", backend="tritton")


def test_remove(models: dict[str, Any], registration: Registration) -> None:
    with using(models["Llama"], "portattn") as model:
        registration.remove()
        for interface in (AttentionInterface, AttentionMaskInterface):
            assert "portattn" not in interface._global_mapping
        with pytest.raises(KeyError, match="portattn"):
            model(tokens())
        assert repr(registration) == "Registration(name='portattn', backend=None, removed)"
        fresh = register()
        registration.remove()  # an old handle does not take away a new registration
        assert AttentionInterface()["portattn"] is not None
        fresh.remove()


def test_remove_leaves_what_somebody_else_has_put_there(registration: Registration) -> None:
    AttentionInterface.register("portattn", print)
    registration.remove()
    try:
        assert AttentionInterface._global_mapping["portattn"] is print
        assert "portattn" not in AttentionMaskInterface._global_mapping
        with pytest.raises(portattn.ArgumentError, match="'portattn', but is taken"):
            register()
    finally:
        del AttentionInterface._global_mapping["portattn"]


@pytest.mark.parametrize("name", ["my_flash", "sdpa", "flex_attention", "eager", "a/b", "paged|portattn", "", None])
def test_names_that_transformers_reads_otherwise_are_refused(name: Any) -> None:
    with pytest.raises(portattn.ArgumentError, match="name is "):
        register(name)


@torch.no_grad()
def test_a_backend_is_handed_to_every_call(models: dict[str, Any]) -> None:
    handle = register("portattn_reference", backend="reference")
    taken = []
    try:
        with using(models["Llama"], "portattn_reference") as model:
            for length in (LENGTH, 1):
                model(tokens(length))
                taken.append((portattn.last_plan().problem.op, portattn.last_plan().requested))
    finally:
        handle.remove()
    assert taken == [("attention", "reference"), ("decode_attention", "reference")]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def test_importing_registers_nothing_and_refuses_an_old_transformers() -> None:
    out = run_python(
        "import importlib, transformers\n"
        "import portattn.integrations.transformers as integration\n"
        "interfaces = transformers.AttentionInterface(), transformers.AttentionMaskInterface()\n"
        "print([name for interface in interfaces for name in interface if 'portattn' in name])\n"
        "transformers.masking_utils.sdpa_mask = lambda batch_size, cache_position, kv_length: None\n"
        "importlib.reload(integration)"
    )
    assert "[]" in out.splitlines()
    assert f"needs transformers 5.4 or later, found {transformers.__version__}" in out.splitlines()[-1]


def test_importing_without_transformers_says_so() -> None:
    out = run_python(
        "import sys; sys.modules['transformers'] = None\n"
        "import portattn.integrations\n"
        "import portattn.integrations.transformers"
    )
    assert "ImportError: portattn.integrations.transformers needs transformers, which is not installed" in out
    assert "pip install -e '.[transformers]' in the checkout" in out


def test_the_guide_runs(registration: Registration, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example of docs/integrations.md, in one namespace and in order, prints what the guide says it prints."""
    registration.remove()
    text = (DOCS / "integrations.md").read_text()
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= 4
    namespace: dict[str, Any] = {}
    printed = ""
    for kind, block in blocks:
        if kind == "python":
            capsys.readouterr()
            exec(block, namespace)
            printed = capsys.readouterr().out
        else:
            assert " ".join(printed.split()) == " ".join(block.split())


def test_nothing_warns_on_a_plain_forward(models: dict[str, Any]) -> None:
    with using(models["Llama"], "portattn") as model, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", portattn.FallbackWarning)
        model(tokens(), attention_mask=padding("left"))
