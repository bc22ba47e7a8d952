"""The named problem sets that `portattn bench` times: one for every line of the goals (goals.py), and some more."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from portattn.tools.bench import sets_backward, sets_cache, sets_dense
from portattn.tools.bench.cases import Case, Timing
from portattn.tools.bench.firstcall import CASES as FIRST_CALLS
from portattn.tools.bench.firstcall import COLD_START


def _timed(timing: Timing, cases: Sequence[Case]) -> list[Case]:
    return [msgspec.structs.replace(case, timing=timing) for case in cases]


# What a loop over layers finds in the L2 is its own keys; what a decoding step finds there is not: its weights went
# through in between. The small shapes and the seed's are timed as the seed's authors did.
SETS: dict[str, list[Case]] = {
    "dense18": sets_dense.dense(),
    "dense-gqa": sets_dense.dense(group=sets_dense.GROUP),
    "dense-packed": sets_dense.ragged("packed"),
    "dense-window": sets_dense.window(),
    "dense-short-q": sets_dense.short_queries(),
    "dense-beyond": sets_dense.beyond(),
    "decode": _timed("cold", sets_cache.decode()),
    "paged": _timed("cold", sets_cache.decode(sets_cache.PAGES)),
    "decode-quantised": _timed("cold", sets_cache.quantised()),
    "paged-quantised": _timed("cold", sets_cache.quantised(sets_cache.PAGES)),
    "decode-nvfp4": _timed("cold", sets_cache.in_blocks()),
    "sparse": _timed("cold", sets_cache.sparse()),
    "mla": _timed("cold", sets_cache.latent()),
    "seed": _timed("do_bench", sets_cache.seed()),
    "small": _timed("do_bench", sets_cache.small("fp32") + sets_cache.small("fp16")),
    "host": sets_cache.host(),
    COLD_START: list(FIRST_CALLS),
    "padded": sets_dense.ragged("padded") + sets_dense.ragged("even"),
    "prefill": sets_dense.prefill(),
    "backward18": sets_backward.backward(),
    "backward_more": sets_backward.more(),
}
