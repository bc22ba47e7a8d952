"""The set `engines`: portattn's adapters on one GPU, each beside what its engine runs there."""

from collections.abc import Callable, Iterator

import engine_calls
import engine_vllm

from portattn.tools.bench.workloads import Absent, Measure, Row

PARTS: dict[str, Callable[[Measure], Iterator[Row]]] = {
    "vllm": engine_vllm.vllm,
    "diffusers": engine_calls.diffusers,
    "masks": engine_calls.masks,
}


def engines(measure: Measure) -> Iterator[Row]:
    """Times of the adapters of engines, after their results were checked; a case is named `part: case`.

    vllm: Impl.forward of the real adapter over a paged cache (decode, mixed prefill, a float8 cache), beside
    FlashAttention-3 as vLLM builds it, and the kernel of vLLM's own Triton backend. diffusers: a block of Flux with
    random weights, 4096 + 512 tokens, beside diffusers' native backend (SDPA). masks: attention with lists of blocks
    beside FlexAttention, and tree masks over a paged cache.

    What can be captured is replayed from a CUDA graph, with other lengths and pages than at the capture; on a CPU it
    is called again with them. A part needs its engine, or its Python files alone (vLLM); an absent one is named."""
    for name, part in PARTS.items():
        measure.part = f"{name}: "
        try:
            yield from part(measure)
        except (Absent, ImportError) as reason:
            measure.absent[name] = f"{type(reason).__name__}: {reason}"
