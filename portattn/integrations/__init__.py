"""Adapters to other libraries, and the check of a library's release that four of them share.

A release within the tested range is served; an older one is refused. A newer one is served, with a warning, if the
members that the adapter uses are as the adapter knows them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from portattn.errors import PortattnError, warn_caller


@dataclass(frozen=True, eq=False)
class Interface:
    """The tested releases of a library, and the members that an adapter uses: module -> dotted name -> expectation.

    "has a b"    attributes, fields or instance attributes; and no abstract method but these
    "takes a b=" the library calls the adapter's own method or function of this signature: no parameter may be new, and
                 none but b may be absent
    "given a b"  the adapter calls it with these arguments: a new parameter must have a default
    """

    library: str
    oldest: str
    newest: str  # every patch release of it counts, if it names none
    members: Mapping[str, Mapping[str, str]]


VLLM = Interface("vLLM", "0.31", "0.33", {
    "vllm.v1.attention.backend": {
        "AttentionBackend": "has get_name get_impl_cls get_builder_cls",
        "AttentionBackend.customize_spec": "takes spec",
        "AttentionBackend.get_supported_kernel_block_sizes": "takes kv_cache_spec",
        "AttentionBackend.supports_attn_type": "takes attn_type",
        "AttentionBackend.supports_block_size": "takes block_size",
        "AttentionBackend.supports_compute_capability": "takes capability",
        "AttentionBackend.supports_head_size": "takes head_size",
        "AttentionCGSupport": "has UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE",
        "AttentionImpl": "has __init__ forward dcp_world_size",
        "AttentionImpl.__init__": "takes num_heads head_size scale num_kv_heads alibi_slopes sliding_window"
        " kv_cache_dtype logits_soft_cap attn_type kv_sharing_target_layer_name",
        "AttentionImpl.forward": "takes layer query key value kv_cache attn_metadata output output_scale"
        " output_block_scale",
        "AttentionLayer": "has _k_scale _v_scale",
        "AttentionMetadata": "has",
        "AttentionMetadataBuilder": "has __init__ build",
        "AttentionMetadataBuilder.__init__": "takes kv_cache_spec layer_names vllm_config device",
        "AttentionMetadataBuilder.build": "takes common_prefix_len common_attn_metadata fast_build",
        "AttentionMetadataBuilder.build_for_cudagraph_capture": "takes common_attn_metadata",
        "AttentionMetadataBuilder.get_cudagraph_support": "takes vllm_config kv_cache_spec",
        "AttentionMetadataBuilder.update_block_table": "takes metadata blk_table slot_mapping",
        "AttentionType": "has DECODER ENCODER ENCODER_ONLY ENCODER_DECODER",
        "CommonAttentionMetadata": "has num_actual_tokens num_reqs max_query_len query_start_loc query_start_loc_cpu"
        " seq_lens block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound mm_req_doc_ranges",
        "MultipleOf": "has",
    },
    "vllm.config": {"get_current_vllm_config_or_none": "given"},
    "vllm.distributed": {"get_dcp_group": "given"},
    "vllm.distributed.parallel_state": {"get_dcp_world_size_and_rank": "given enabled"},
    "vllm.envs": {"": "has VLLM_BATCH_INVARIANT VLLM_KV_CACHE_LAYOUT"},
    "vllm.platforms": {"current_platform": "has fp8_dtype is_cuda"},
    "vllm.utils.torch_utils": {"async_tensor_h2d": "given data device dtype"},
    "vllm.v1.attention.backends.utils": {
        "get_dcp_local_seq_lens": "given seq_lens dcp_size dcp_rank cp_kv_cache_interleave_size"
    },
    "vllm.v1.attention.ops.int4_per_token_head": {"single_rht": "given x inverse"},
    # The cache's layout: logical axes in a layout's name, and the bytes of a token and head.
    "vllm.v1.kv_cache_layout": {"KVCacheLayout": "has LBHNC LBNHC BHLNC LHBNC is_block_compact"},
    "vllm.v1.kv_cache_interface": {
        "AttentionSpec": "has num_kv_heads head_size head_size_v kv_quant_mode num_head_slots state_content_bytes"
        " dcp_sharded",
        "KVQuantMode": "has is_nvfp4 is_per_token_head INT4_PER_TOKEN_HEAD",
    },
    "vllm.model_executor.layers.attention.mla_attention": {
        "MLACommonBackend": "has get_name get_impl_cls get_builder_cls",
        "MLACommonDecodeMetadata": "has block_table seq_lens dcp_tot_seq_lens",
        "MLACommonImpl": "has __init__ forward_mqa kv_lora_rank supports_quant_query_input",
        "MLACommonImpl.do_kv_cache_update": "takes kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale"
        " skip_scale=",
        "MLACommonImpl.forward_mqa": "takes q kv_c_and_k_pe_cache attn_metadata layer",
        "MLACommonMetadata": "has causal decode",
        "MLACommonMetadataBuilder._build_decode": "takes block_table_tensor seq_lens_device max_seq_len"
        " query_start_loc_cpu query_start_loc_device num_decode_tokens max_query_len dcp_tot_seq_lens_device",
        "QueryLenSupport": "has VARLEN",
    },
})  # fmt: skip
# Sparse latent attention, whose classes vLLM shares from 0.33 on.
VLLM_SPARSE = Interface("vLLM", "0.33", "0.33", {
    "vllm.model_executor.layers.attention.sparse_mla_attention": {
        "SparseMLACommonImpl": "has __init__ forward_mqa topk_indices_buffer",
        "SparseMLACommonImpl._forward_mqa_kernel": "takes q kv_cache topk_indices valid_counts layer block_size"
        " is_decode",
        "SparseMLACommonMetadata": "has",
        "SparseMLACommonMetadataBuilder.__init__": "takes kv_cache_spec layer_names vllm_config device",
        "SparseMLACommonMetadataBuilder._init_reorder_batch_threshold": "given self reorder_batch_threshold"
        " supports_spec_as_decode",
    },
    "vllm.v1.attention.backends.mla.sparse_utils": {
        "align_blocks_to_rows": "given spec",
        "flat_kv_row_view": "given kv_cache block_size",
    },
    # The indexer, in place of vLLM's own operation.
    "vllm._custom_ops": {"indexer_k_quant_and_cache": "given k kv_cache slot_mapping quant_block_size kv_cache_dtype"},
    "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": "given fn"},
    "vllm.model_executor.layers.sparse_attn_indexer": {
        "SparseAttnIndexer": "has __init__ forward_native",
        "SparseAttnIndexer.__init__": "takes k_cache quant_block_size scale_fmt topk_tokens head_dim max_model_len"
        " max_total_seq_len topk_indices_buffer skip_k_cache_insert use_fp4_cache compress_ratio candidate_blocks"
        " candidate_block_size candidate_write",
        "SparseAttnIndexer.forward_native": "takes hidden_states q_quant k weights",
        "SparseAttnIndexer.register_oot": "given _decorated_op_cls",
    },
    "vllm.model_executor.models.deepseek_mtp": {"": "has DeepSeekMTP"},
    "vllm.model_executor.models.deepseek_v2": {"": "has DeepseekV3ForCausalLM GlmMoeDsaForCausalLM"},
    "vllm.utils.torch_utils": {
        "": "has LayerNameType _encode_layer_name _resolve_layer_name",
        "direct_register_custom_op": "given op_name op_func mutates_args fake_impl",
    },
    "vllm.v1.attention.backends.mla.indexer": {"DeepseekV32IndexerBackend": "has get_builder_cls get_impl_cls"},
    "vllm.v1.attention.backends.utils": {
        "split_decodes_and_prefills": "given common_attn_metadata decode_threshold require_uniform"
    },
})  # fmt: skip
_FORWARD = "takes q k v layer forward_batch save_kv_cache"
SGLANG = Interface("SGLang", "0.5.20", "0.5.23", {
    "sglang.srt.arg_groups.choices": {
        "": "has ATTENTION_BACKEND_CHOICES add_attention_backend_choices add_deterministic_attention_backend_choices"
        " add_radix_supported_deterministic_attention_backend_choices",
    },
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend": "has get_cuda_graph_seq_len_fill_value verify_mask",
        "AttentionBackend.forward_decode": _FORWARD,
        "AttentionBackend.forward_extend": _FORWARD,
        "AttentionBackend.init_cuda_graph_state": "takes max_bs max_num_tokens",
        "AttentionBackend.init_forward_metadata": "takes forward_batch",
        "AttentionBackend.init_forward_metadata_in_graph": "takes forward_batch",
        "AttentionBackend.init_forward_metadata_out_graph": "takes forward_batch in_capture",
        "AttentionBackend.update_verify_buffers_to_fill_after_draft": "takes spec_info cuda_graph_bs",
    },
    "sglang.srt.layers.attention.verify_mask": {
        "VerifyMask": "has buffer mode max_bs",
        "tree_mask_numel": "given mode bs num_draft_tokens max_context_len",
    },
    "sglang.srt.layers.radix_attention": {
        "AttentionType": "has DECODER ENCODER_ONLY",
        "RadixAttention": "has tp_q_head_num tp_k_head_num qk_head_dim v_head_dim scaling layer_id logit_cap k_scale"
        " v_scale sliding_window_size is_cross_attention attn_type pos_encoding_mode logit_capping_method"
        " xai_temperature_len",
    },
    # The cache's layout: slots of a pool, and the page table of slots.
    "sglang.srt.mem_cache.memory_pool": {
        "KVWriteLoc": "has loc swa_loc",
        "MHATokenToKVPool": "has dtype head_dim v_head_dim kv_cache_layout is_quantized_kv_cache page_size"
        " get_kv_buffer",
        "MHATokenToKVPool.set_kv_buffer": "given layer loc_info cache_k cache_v k_scale v_scale",
        "MLATokenToKVPool": "has dtype kv_lora_rank qk_rope_head_dim page_size get_key_buffer set_kv_buffer",
        "ReqToTokenPool": "has req_to_token",
    },
    "sglang.srt.mem_cache.swa_memory_pool": {
        "SWAKVPool": "has full_kv_pool swa_kv_pool swa_layer_nums layers_mapping translate_loc_from_full_to_swa"
    },
    "sglang.srt.model_executor.cuda_graph_config": {"": "has Backend Phase check_cuda_graph_backend"},
    "sglang.srt.model_executor.forward_batch_info": {
        "ForwardBatch": "has forward_mode spec_info req_pool_indices seq_lens seq_lens_cpu out_cache_loc encoder_lens"
        " encoder_lens_cpu encoder_out_cache_loc extend_seq_lens extend_seq_lens_cpu attn_attend_prefix_cache"
        " mha_one_shot cross_attention_custom_mask multi_item_delimiter_indices",
        "ForwardMode": "has is_decode_or_idle is_target_verify is_draft_extend_v2 is_decode is_dllm_extend",
    },
    "sglang.srt.runtime_context": {"": "has get_exec get_parallel get_schedule get_spec"},
    "sglang.srt.speculative.eagle_utils": {"": "has TreeMaskMode default_tree_mask_mode"},
})  # fmt: skip
DIFFUSERS = Interface("diffusers", "0.40.0", "0.42.1", {
    "diffusers.models.attention_dispatch": {
        "AttentionBackendName": "has NATIVE",
        "_AttentionBackendRegistry": "has _backends _constraints _supported_arg_names _supports_context_parallel"
        " _active_backend",
        "_AttentionBackendRegistry.register": "given backend constraints supports_context_parallel",
        "_AttentionBackendRegistry.set_active_backend": "given backend",
        "_templated_context_parallel_attention": "given query key value attn_mask dropout_p is_causal scale enable_gqa"
        " return_lse forward_op backward_op _parallel_config",
        # It drops arguments that a backend's function does not name.
        "dispatch_attention_fn": "takes query key value attn_mask dropout_p is_causal scale enable_gqa attention_kwargs"
        " backend parallel_config",
    },
})  # fmt: skip
TRANSFORMERS = Interface("transformers", "5.4", "5.23", {
    "transformers": {
        "AttentionInterface": "has _global_mapping register",
        "AttentionMaskInterface": "has _global_mapping register",
        "PreTrainedModel": "has get_correct_attn_implementation _can_set_attn_implementation",
    },
    "transformers.generation.continuous_batching": {"ContinuousBatchingManager": "has switch_to_cb_friendly_attn"},
    # Mask functions are known by the names of their makers and of the variables that these capture.
    "transformers.masking_utils": {
        "": "has and_masks causal_mask_function bidirectional_mask_function",
        "chunked_overlay": "given chunk_size left_padding",
        "packed_sequence_mask_function": "given packed_sequence_mask",
        "remap_positions_for_packed_sequence": "given mask_function position_ids",
        "sdpa_mask": "given batch_size q_length kv_length q_offset kv_offset mask_function attention_mask device"
        " allow_is_causal_skip allow_is_bidirectional_skip",
        "sliding_window_bidirectional_overlay": "given sliding_window",
        "sliding_window_overlay": "given sliding_window",
    },
})  # fmt: skip


@functools.cache
def check_release(interface: Interface, version: str) -> None:
    """Check that an adapter can serve a release of its library; a warning, once, tells of an untested one.

    Raises:
        PortattnError: The release is older than the tested ones, or newer with another interface.
    """
    library, newest = interface.library, Version(interface.newest).release
    try:
        found = Version(version)
        if Version(found.public) < Version(interface.oldest):  # a build's own label sorts behind its release
            first = "the first release that portattn was tested with"
            raise PortattnError(f"{library} {version} is not supported: it is older than {interface.oldest}, {first}")
        if found.release[: len(newest)] <= newest:
            return
    except InvalidVersion:  # a build from source: its interface says enough
        pass
    tested = f"portattn was tested with {library} {interface.oldest} to {interface.newest}"
    flaws = list(differences(interface))
    if flaws:
        raise PortattnError(f"{library} {version}: {'; '.join(flaws)}; {tested}")
    warn_caller(f"{tested}, and this is {version}: its interface was checked, and is the one that the adapter knows")


def differences(interface: Interface) -> Iterator[str]:
    """Yield the members that differ from what the adapter knows, and how."""
    for module, members in interface.members.items():
        try:
            holder = importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  # a module's import may raise anything
            yield f"{module} cannot be imported ({error})"
            continue
        for name, expected in members.items():
            try:
                owner = functools.reduce(getattr, filter(None, name.split(".")), holder)
                yield from (f"{name or module} {flaw}" for flaw in _flaws(owner, *expected.split()))
            except AttributeError:
                yield f"{module} has no {name}"
            except TypeError:
                yield f"{name} of {module} cannot be called"
            except Exception as error:  # noqa: BLE001  # a module's own __getattr__ may raise anything
                yield f"{name or 'a name'} of {module} cannot be read ({type(error).__name__}: {error})"


def _flaws(owner: Any, kind: str, *names: str) -> Iterator[str]:
    if kind == "has":
        yield from (f"has no {name!r}" for name in names if not _has(owner, name))
        new = sorted(getattr(owner, "__abstractmethods__", set()) - set(names))
        yield from (f"has an abstract method {name!r} that this adapter does not define" for name in new)
        return
    found, known = inspect.signature(owner).parameters, {"self", "cls", *(name.rstrip("=") for name in names)}
    yield from (f"has no parameter {name!r}" for name in names if name not in found and not name.endswith("="))
    placed = [name for name, one in found.items() if one.kind is one.POSITIONAL_OR_KEYWORD and name in names]
    if kind == "takes" and placed != [name for name in names if name in placed]:  # called by position
        yield f"has its parameters in another order: {', '.join(placed)}"
    for name, one in found.items():
        open_ended = one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if not open_ended and name not in known and (kind == "takes" or one.default is one.empty):
            yield f"has a parameter {name!r} that this adapter does not know"


def _has(owner: Any, name: str) -> bool:
    """Return whether an object has an attribute, or a class a field or an attribute that its methods name."""
    if hasattr(owner, name):
        return True
    bases = owner.__mro__ if isinstance(owner, type) else ()
    methods = (inspect.unwrap(one) for base in bases for one in vars(base).values() if inspect.isfunction(one))
    return any(name in inspect.get_annotations(base) for base in bases) or any(
        name in method.__code__.co_names for method in methods
    )
