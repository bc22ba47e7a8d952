"""One of the processes of test_vllm_sharded.py. Arguments: its rank, how many there are, a file where they meet, and
cases by name. Prints each case's result. Ranks are vLLM's own group of decode context parallelism, over gloo. Each
has its query heads and one key head, the same as the others', and the cache's slots that vLLM's rule gives it."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[2]))

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_dcp_group
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.attention.ops.dcp import CorrectAttnCPOutKernel
from vllm_batches import BLOCK, DIM, Batch, Layer, check

import portattn
from portattn.errors import ArgumentError
from portattn.integrations.vllm import register
from portattn.integrations.vllm.backend import PortattnImpl

HEADS = 2  # of a rank
MIXED = [(1, 20), (9, 40), (1, 1), (7, 7), (4, 34)]  # decode, a chunk, a prompt of one token, a prompt, verification


class Sharded(Layer):
    """A rank's layer."""

    interleave = 1

    def __init__(self, rank: int, world: int, interleave: int = 1, all_to_all: bool = False, **given: Any) -> None:
        self.rank, self.world, self.interleave, self.all_to_all = rank, world, interleave, all_to_all
        super().__init__(heads=HEADS, kv_heads=1, **given)

    def configured(self, config: VllmConfig) -> VllmConfig:
        parallel = config.parallel_config
        parallel.decode_context_parallel_size = self.world
        parallel.cp_kv_cache_interleave_size = self.interleave
        parallel.dcp_comm_backend = "a2a" if self.all_to_all else "ag_rs"
        return config

    def part(self, whole: Batch) -> Batch:
        """The batch as this rank has it: its query heads, and tables and slots of its part of the keys."""
        mine = Batch(whole.requests, whole.dtype, heads=HEADS * self.world, kv_heads=1, seed=whole.seed)
        mine.q = [q[:, self.rank * HEADS : (self.rank + 1) * HEADS] for q in whole.q]
        mine.slots_of = self.slots_of(mine)  # type: ignore[method-assign]
        return mine

    def slots_of(self, batch: Batch) -> Callable[[int, int, int], torch.Tensor]:
        """As vLLM's block tables: a virtual block has a block's tokens of each rank; -1 for other ranks' tokens."""
        n = self.interleave

        def slots(request: int, begin: int, end: int) -> torch.Tensor:
            at = torch.arange(begin, end)
            virtual, within = at // (BLOCK * self.world), at % (BLOCK * self.world)
            local = within // (self.world * n) * n + within % n
            slot = batch.table[request, virtual].long() * BLOCK + local
            return torch.where(within // n % self.world == self.rank, slot, -1)

        return slots


def run(
    layer: Sharded, requests: list[tuple[int, int]], stored: torch.dtype | None = None, **features: Any
) -> None:  # fmt: skip
    """This rank's heads of a batch, against attention over all keys. stored: what the numbers of a cache are."""
    whole = Batch(requests, layer.dtype, heads=HEADS * layer.world, kv_heads=1)
    mine = layer.part(whole)
    if stored is not None:  # numbers that the cache has, so that it adds no error of its own
        mine.k, mine.v = ([x.to(stored).to(layer.dtype) for x in each] for each in (mine.k, mine.v))
    held = get_dcp_local_seq_lens(
        torch.tensor([keys for _, keys in requests]), layer.world, layer.rank, layer.interleave
    )
    counted = [int((mine.slots_of(b, 0, keys) >= 0).sum()) for b, (_, keys) in enumerate(requests)]
    assert held.tolist() == counted, "the test's slots are not vLLM's"
    common = mine.common()
    common = common.replace(seq_lens_cpu_upper_bound=common.seq_lens.clone())
    check(layer.run(mine, metadata=layer.builder.build(0, common)), mine, **features)


def of_dtypes(rank: int, world: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        run(Sharded(rank, world, dtype=dtype), MIXED)


def decode(rank: int, world: int) -> None:
    layer = Sharded(rank, world)
    run(layer, [(1, 33), (1, 2), (1, 1), (1, 64)])
    run(Sharded(rank, world, layout="BHLNC"), [(1, 3)])


def interleaved(rank: int, world: int) -> None:
    for interleave in (4, 16):
        run(Sharded(rank, world, interleave), MIXED)


def all_to_all(rank: int, world: int) -> None:
    run(Sharded(rank, world, all_to_all=True), [(1, 20), (4, 34), (3, 3)])


def features(rank: int, world: int) -> None:
    sinks = torch.tensor([3.0, -1.0], dtype=torch.bfloat16)
    run(Sharded(rank, world, arguments={"sinks": sinks, "logits_soft_cap": 2.0}), MIXED, sinks=sinks, softcap=2.0)


def float8(rank: int, world: int) -> None:
    """The past is read from the cache, new tokens are taken as they are."""
    run(Sharded(rank, world, cache_dtype="fp8"), MIXED, torch.float8_e4m3fn)


def prompts_alone(rank: int, world: int) -> None:
    layer = Sharded(rank, world)
    layer.layer.impl.dcp_combine = None
    run(layer, [(9, 9), (1, 1)])


def replay(rank: int, world: int) -> None:
    """What was built for a graph serves the next step: lengths of the past are at the same address."""
    layer = Sharded(rank, world)
    first = layer.part(Batch([(1, 20), (1, 9)], heads=HEADS * world, kv_heads=1))
    built = layer.builder.build_for_cudagraph_capture(first.common())
    address = built.context_lens.data_ptr()
    batch = layer.part(Batch([(1, 40), (1, 1)], heads=HEADS * world, kv_heads=1))
    again = layer.builder.build(0, batch.common())
    assert again.context_lens.data_ptr() == address
    built.block_table, built.seq_lens = batch.table, batch.common().seq_lens
    check(layer.run(batch, metadata=built), batch)
    assert not layer.builder.supports_draft_decode_metadata_update


def kernels(rank: int, world: int) -> None:
    with portattn.settings(backend="interpreter"):
        run(Sharded(rank, world), [(1, 20), (5, 30)])
        assert portattn.last_plan().path == "interpreter"


def refusals(rank: int, world: int) -> None:
    for name, given in {
        "alibi_slopes": {"arguments": {"alibi_slopes": [0.5, 0.25]}},
        "sliding_window": {"window": 8},
    }.items():
        with pytest.raises(ArgumentError, match=f"{name} is .* is not supported with decode context parallelism"):
            Sharded(rank, world, **given)
    with set_current_vllm_config(Sharded(rank, world).config):
        given = [HEADS, DIM, 1.0, 1, None, None, "auto", None]
        with pytest.raises(ArgumentError, match="attn_type is 'encoder_decoder', but is not supported with decode"):
            PortattnImpl(*given, AttentionType.ENCODER_DECODER)
        PortattnImpl(*given, AttentionType.ENCODER_ONLY)  # has no cache that ranks could share
    layer = Sharded(rank, world)
    common = layer.part(Batch([(4, 9)], heads=HEADS * world, kv_heads=1)).common(torch.ones(1, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="causal is 'a tensor', but must be a bool with decode context parallelism"):
        layer.builder.build(0, common)
    bound = common.seq_lens.clone()
    common = common.replace(causal=True, mm_req_doc_ranges={0: [(6, 8)]}, seq_lens_cpu_upper_bound=bound)
    with pytest.raises(ArgumentError, match=r"mm_req_doc_ranges is .*must be None with decode context parallelism"):
        layer.builder.build(0, common)


def countable(kernel: Any) -> None:
    """vLLM's launcher counts a kernel's constants, which Triton's interpreter does not list."""
    if not hasattr(kernel, "constexprs"):
        kernel.constexprs = [index for index, name in enumerate(kernel.arg_names) if name.isupper()]


CASES = {
    one.__name__: one
    for one in (of_dtypes, decode, interleaved, all_to_all, features, float8, prompts_alone, replay, kernels, refusals)
}


def main(rank: int, world: int, meeting: str, names: list[str]) -> None:
    register()
    countable(CorrectAttnCPOutKernel.kernel)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(world, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(world, decode_context_model_parallel_size=world, backend="gloo")
    assert get_dcp_group().world_size == world
    for name in names:
        try:
            CASES[name](rank, world)
        except BaseException:
            # The other rank would wait for this one's next collective.
            print(f"wrong {name}\n{traceback.format_exc()}", flush=True)
            raise
        print(f"right {name}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
