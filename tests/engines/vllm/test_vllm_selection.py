"""Names and refusals: vLLM's plug-in loader, its enum of backends, and what is answered when it asks."""

import copy
import importlib
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config.attention import AttentionConfig
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins, load_plugins_by_group
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm_batches import Batch, Layer, check

from portattn import config
from portattn.errors import PortattnError
from portattn.integrations import VLLM, differences
from portattn.integrations import vllm as integration
from portattn.integrations.vllm import backend, caches, mla
from portattn.integrations.vllm.backend import PortattnBackend
from portattn.integrations.vllm.mla import PortattnMLAMetadataBuilder

feature = pytest.mark.engine_feature


def reasons(one: Any = backend.PortattnBackend, **asked: Any) -> list[str]:
    """What vLLM is answered, with the arguments that its selector gives."""
    config: dict[str, Any] = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    selector = AttentionSelectorConfig(**{**config, **asked})
    return one.validate_configuration(device_capability=DeviceCapability(9, 0), **selector._asdict())


@feature('chosen by name: AttentionConfig(backend="PORTATTN")')
def test_the_plug_in_registers_names() -> None:
    plugins = load_plugins_by_group("vllm.general_plugins")
    assert plugins["portattn"] is integration.register
    plugins["portattn"]()
    plugins["portattn"]()  # vLLM may load plug-ins more than once
    chosen = AttentionConfig(backend="PORTATTN").backend
    assert chosen is AttentionBackendEnum["PORTATTN"]
    assert chosen.get_class() is backend.PortattnBackend
    assert AttentionBackendEnum["PORTATTN_MLA"].get_class() is mla.PortattnMLABackend
    assert AttentionConfig().backend is None


def test_an_older_registry_is_no_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("no such member")

    old = SimpleNamespace(
        AttentionBackendEnum=SimpleNamespace(__members__={}, register=refuse), register_backend=refuse
    )
    monkeypatch.setattr(integration, "import_module", lambda _: old)
    monkeypatch.setattr(integration.log, "propagate", True)
    with caplog.at_level(logging.WARNING):
        integration.register()
    assert "takes no new attention backend, so PORTATTN is not there: no such member" in caplog.text
    monkeypatch.setattr(integration, "_REGISTRY", "vllm.no_such_module")
    monkeypatch.setattr(integration, "import_module", importlib.import_module)
    with caplog.at_level(logging.WARNING):
        integration.register()
    assert "PORTATTN is not there: No module named 'vllm.no_such_module'" in caplog.text


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"dtype": torch.float32}, {"head_size": 80, "has_sliding_window": True, "has_sink": True},
        {"kv_cache_dtype": "fp8_e5m2", "dtype": torch.float16}, {"kv_cache_dtype": "int4_per_token_head"},
        {"kv_cache_dtype": "nvfp4"}, {"kv_cache_dtype": "bfloat16"}, {"attn_type": "encoder_only"},
        {"attn_type": "encoder_decoder"},
        {"use_non_causal": True, "use_batch_invariant": True, "use_kv_connector": True}, {"block_size": 144},
        {"use_mm_prefix": True, "has_sliding_window": True},
        {"use_dcp": True, "has_sink": True, "kv_cache_dtype": "fp8"},
    ],
)  # fmt: skip
def test_what_it_takes(asked: dict[str, Any]) -> None:
    assert reasons(**asked) == []


DCP_WITH = "decode context parallelism with windows, ranges or both directions"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (DCP_WITH, {"use_dcp": True, "has_sliding_window": True}, "sliding windows with DCP not supported"),
    (DCP_WITH, {"use_dcp": True, "use_mm_prefix": True},
     "partial multimodal token full attention with DCP not supported"),
    (DCP_WITH, {"use_dcp": True, "use_non_causal": True}, "attention in both directions with DCP not supported"),
    ("decode context parallelism, head sizes that are no power of 2", {"use_dcp": True, "head_size": 80},
     "head size 80 with DCP not supported: no power of 2"),
    ("decode context parallelism, cross attention", {"use_dcp": True, "attn_type": "encoder_decoder"},
     "cross attention with DCP not supported"),
    ("adaptive verification", {"use_adaptive_verification": True}, "needed for adaptive verification"),
    ("prefill context parallelism", {"use_pcp": True}, "PCP not supported"),
    ("sparse attention", {"use_sparse": True}, "sparse not supported"),
    ("scales for each head from a checkpoint", {"use_per_head_quant_scales": True}, "per-head quant scales not supp"),
    ("reference sliding window", {"use_rswa": True}, "R-SWA not supported"),
    ("caches: nvfp4_4over6, turboquant", {"kv_cache_dtype": "nvfp4_4over6"}, "kv_cache_dtype not supported"),
    ("float32 queries over a quantised cache", {"dtype": torch.float32, "kv_cache_dtype": "fp8"}, "needs queries of"),
    ("a cache of another 16-bit dtype", {"kv_cache_dtype": "float16"}, "a float16 cache needs queries of float16"),
    ("head sizes above 576", {"head_size": 640}, "head_size not supported"),
    ("blocks that are no multiple of 16", {"block_size": 8}, "block_size not supported"),
    ("float64", {"dtype": torch.float64}, "dtype not supported"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "reason"),
    [pytest.param(asked, reason, marks=feature(name, refused=True)) for name, asked, reason in REFUSED],
)
def test_what_it_refuses(asked: dict[str, Any], reason: str, refusal: Callable[..., Any]) -> None:
    """As vLLM does: a backend that was named and gives reasons is an error that holds them."""
    with refusal(ValueError, match=reason):
        found = reasons(**asked)
        assert len(found) == 1, found
        raise ValueError(f"Selected backend PORTATTN is not valid for this configuration. Reason: {found}")


@feature("ALiBi with square roots", refused=True)
def test_alibi_sqrt_is_refused(refusal: Callable[..., Any]) -> None:
    with refusal(ValueError, match="use_alibi_sqrt is not supported by backend PORTATTN"):
        Layer(arguments={"use_alibi_sqrt": True})


def test_head_sizes_of_scales_in_the_cache() -> None:
    assert reasons(head_size=66, kv_cache_dtype="int8_per_token_head") == [
        "a int8_per_token_head cache needs a head size that is a multiple of 4, not 66"
    ]
    assert reasons(head_size=72, kv_cache_dtype="nvfp4") == [
        "a nvfp4 cache needs a head size that is a multiple of 16, not 72"
    ]


@feature("vLLM with another interface, 0.30 and earlier", refused=True)
def test_releases(refusal: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The members are as the adapter's table says; with another one, vLLM gets no class."""
    assert list(differences(VLLM)) == []

    def forward(self: Any, layer: Any, x: Any) -> None: ...

    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(AttentionImpl, "forward", forward)
    with refusal(
        PortattnError, match=r"vLLM 0\.34\.0: AttentionImpl\.forward .* has a parameter 'x' that this adapter"
    ):
        AttentionBackendEnum["PORTATTN"].get_class()
    monkeypatch.setattr(vllm, "__version__", "0.30.1")
    with pytest.raises(PortattnError, match=r"vLLM 0\.30\.1 is not supported: it is older than 0\.31"):
        AttentionBackendEnum["PORTATTN_MLA"].get_class()


def test_a_wrong_setting_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORTATTN_BACKEND", "tritton")
    config.environment_settings.cache_clear()
    first, other = reasons(head_size=640)
    assert "PORTATTN_BACKEND is 'tritton', but must be one of" in first
    assert other == "head_size not supported"


@pytest.mark.parametrize("one", [backend.PortattnBackend, mla.PortattnMLABackend])
def test_chips(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    assert one.supports_compute_capability(DeviceCapability(9, 0))
    assert one.supports_compute_capability(DeviceCapability(8, 0))
    assert not one.supports_compute_capability(DeviceCapability(6, 1))
    assert not one.supports_compute_capability(DeviceCapability(5, 0))


@feature("latent attention (MLA), decoding")
def test_latent_attention_is_a_backend_of_its_own() -> None:
    latent = {"one": mla.PortattnMLABackend, "head_size": 576, "use_mla": True}
    assert reasons(**latent) == []
    assert reasons(**latent, kv_cache_dtype="fp8", use_dcp=True, use_non_causal=False) == []
    assert reasons(**{**latent, "use_mla": False}) == ["non-MLA not supported"]
    assert reasons(use_mla=True, head_size=576) == ["MLA not supported"]
    assert reasons(**latent, kv_cache_dtype="fp8_ds_mla") == ["kv_cache_dtype not supported"]
    assert reasons(**latent, use_mm_prefix=True) == ["partial multimodal token full attention not supported"]
    assert reasons(**latent, use_sparse=True) == ["sparse not supported"]
    (reason,) = reasons(**latent, use_adaptive_verification=True)
    assert "needed for adaptive verification" in reason


# What builders answer and make besides a batch's metadata: graphs, and metadata that vLLM derives classes of.


@pytest.mark.parametrize(
    ("world", "level"),
    [(1, AttentionCGSupport.UNIFORM_BATCH), (2, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)],
)
def test_graphs_of_latent_attention(world: int, level: AttentionCGSupport) -> None:
    """With ranks that share keys vLLM's common builder counts requests of several rows as prefill."""
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(decode_context_parallel_size=world))
    assert PortattnMLAMetadataBuilder.get_cudagraph_support(config, None) is level


@feature("fast prefill of layers that share keys")
@pytest.mark.parametrize("fast", [True, False])
def test_fast_prefill(fast: bool) -> None:
    """The layers compute the rows that are sampled alone; their metadata are of a class that vLLM derives. It does so
    also where all rows are computed, and then there may be ranges."""
    backend = create_fast_prefill_custom_backend("FastPrefill_", PortattnBackend)
    layer, whole = Layer(backend), Batch([(5, 9), (3, 20)])
    ranges = {} if fast else {0: [(5, 7)]}
    rows = torch.tensor([3, 4, 5, 6, 7])  # the last two of the first request, and all of the second
    sampled = {"logits_indices_padded": rows, "num_logits_indices": 5, "max_logits_per_req": 3} if fast else {}
    common = whole.common()
    built = layer.builder.build(
        0, common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone(), mm_req_doc_ranges=ranges, **sampled)
    )
    assert built.num_actual_tokens == (5 if fast else 8)
    assert (built.mm_prefix_range is None) == fast
    elsewhere = Batch(whole.requests, seed=7).table  # another group's blocks
    again = layer.builder.update_block_table(built, elsewhere, common.slot_mapping)
    assert type(again) is type(built)
    assert again.logits_indices_padded is built.logits_indices_padded
    assert built.block_table is whole.table
    part = Batch([(2, 9), (3, 20)]) if fast else whole
    part.q, part.k, part.v = [whole.q[0][-part.requests[0][0] :], whole.q[1]], whole.k, whole.v
    for metadata, table in ((built, whole.table), (again, elsewhere)):
        layer.layer.kv_cache = layer.empty_cache()
        part.table = table
        check(layer.run(part, metadata=metadata), part, ranges=ranges)


# The backends' names in a process that reads a pickled configuration before it loads plug-ins, as engines do.


NAMES = [integration.NAME, integration.MLA_NAME]
CHILD = """
import pickle, sys
found = pickle.load(sys.stdin.buffer)
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
load_general_plugins()
for config in found:
    assert config.backend is AttentionBackendEnum[config.backend.name], config
    print(config.backend.name, config.backend.get_path())
"""

load_general_plugins()


@pytest.mark.engine_feature("an engine process that is spawned")
def test_a_new_process_reads_the_configuration() -> None:
    """By the pickler of multiprocessing's spawn, which vLLM starts its engine with."""
    pickled = bytes(ForkingPickler.dumps([AttentionConfig(backend=name) for name in NAMES]))
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], input=pickled, capture_output=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr.decode()[-3000:]
    printed = child.stdout.decode().splitlines()
    expected = [f"{name} {AttentionBackendEnum[name].get_path()}" for name in NAMES]
    assert [line for line in printed if line.startswith("PORTATTN")] == expected


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_the_member(name: str) -> None:
    member = AttentionBackendEnum[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member
    assert pickle.loads(pickle._dumps(member)) is member  # the pickler in Python, which others derive from
    assert copy.copy(member) is member
    assert copy.deepcopy({member: [member]}) == {member: [member]}
    config = copy.deepcopy(AttentionConfig(backend=name))
    assert config.backend is member
    integration.register()
    assert AttentionBackendEnum[name] is member
    other = AttentionBackendEnum["TRITON_ATTN"]
    assert pickle.loads(pickle.dumps(other)) is other
