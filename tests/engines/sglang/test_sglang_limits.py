"""Widths, settings and chips that no call could take: refused when SGLang asks, not in the first forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from served import Served
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import get_kv_cache_quant_method

from portattn import config
from portattn.errors import ArgumentError, SettingError
from portattn.integrations.sglang import capabilities
from portattn.planning.detect_target import detect_target
from portattn.planning.registry import parse_target

feature = pytest.mark.engine_feature


@feature("heads wider than 576", refused=True)
@pytest.mark.parametrize(("widths", "text"), [({"dim": 640}, "head_dim"), ({"dim": 64, "dim_v": 700}, "v_head_dim")])
@pytest.mark.parametrize("part", ["pool", "layer"])
def test_wide_heads(part: str, widths: dict[str, int], text: str, refusal: Any) -> None:
    served = Served([4], **widths)
    if part == "layer":  # of a model whose pool is narrower
        layer, served = served.layer(), Served([4])
        served.runner.model = torch.nn.Sequential(layer)
        text = {"head_dim": "qk_head_dim of 0", "v_head_dim": "v_head_dim of 0"}[text]
    else:
        text = f"{text} of the pool"
    wide = max(widths.values())
    with refusal(ArgumentError, match=rf": {text} is {wide}, but must be in 1\.\.576"):
        _ = served.backend


def test_the_widest_heads_are_taken() -> None:
    served = Served([4], dim=576)
    served.runner.model = torch.nn.Sequential(served.layer())
    assert served.backend is not None


@feature("latent rows wider than 576", refused=True)
def test_wide_latent_rows(refusal: Any) -> None:
    served = Served([4], latent=True)
    served.pool.kv_lora_rank = 576
    with refusal(ArgumentError, match=r"kv_lora_rank \+ qk_rope_head_dim of the pool is 592"):
        _ = served.backend


@feature("FP4 caches: nvfp4, fp4_mx_block16", refused=True)
@pytest.mark.parametrize(
    ("name", "method"), [("nvfp4", "NVFP4KVCacheMethod"), ("fp4_mx_block16", "FP4MXBlock16KVCacheMethod")]
)
def test_fp4_caches(name: str, method: str, refusal: Any) -> None:
    """SGLang's own table of who reads such caches has no backend from outside: its pool makes no scales for one."""
    served = Served([4])
    served.pool.quant_method = get_kv_cache_quant_method(name, num_layers=1, device="cpu", page_size=1)
    for phase in ("prefill", "decode"):
        assert served.pool.quant_method.resolve_attention_access(phase, "portattn") is None
    with refusal(ArgumentError, match=f"--kv-cache-dtype is '{method}', but must be auto, bf16 or one of float8"):
        _ = served.backend


@feature("wrong settings of portattn's own (PORTATTN_BACKEND=tritton)", refused=True)
@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("PORTATTN_BACKEND", "tritton", ArgumentError), ("PORTATTN_FALLBACK", "maybe", SettingError),
        ("PORTATTN_QUIRKS", "-none", Exception),
    ],
)  # fmt: skip
def test_wrong_settings(
    variable: str, value: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch, refusal: Any
) -> None:
    served = Served([4])
    monkeypatch.setenv(variable, value)
    config.environment_settings.cache_clear()
    with refusal(kind, match=value.lstrip("-")):
        _ = served.backend


@feature("chips that kernels do not run on", refused=True)
def test_an_old_chip(monkeypatch: pytest.MonkeyPatch, refusal: Any) -> None:
    served = Served([4])
    monkeypatch.setattr(capabilities, "detect_target", lambda *device: (parse_target("cuda:sm_75"), ""))
    with refusal(ArgumentError, match="device is 'cpu', but kernels do not run on it: Triton uses no tensor cores"):
        _ = served.backend


def test_a_chip_of_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    served, (target, _) = Served([4]), detect_target("cpu", None)
    monkeypatch.setattr(capabilities, "detect_target", lambda *device: (target, "no backend knows it"))
    with pytest.raises(ArgumentError, match="no backend knows it"):
        _ = served.backend
