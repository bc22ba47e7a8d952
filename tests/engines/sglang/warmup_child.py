"""Run by test_sglang_warmup.py, with fakedriver's library: SGLang's layers on CPU tensors that count as an H100's,
their warm-up, and then random batches. Prints as JSON the calls planned, and the kernels compiled, after it."""

# ruff: noqa: E402 - the driver comes before Triton

import random
import sys
from pathlib import Path
from typing import Any

from fuzz.recorded import StartedEngines

started = StartedEngines()
sys.path.append(str(Path(__file__).parent / "stubs"))
import torch
from served import Served, random_tree, verify_input
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_schedule, get_spec, publish
from sglang.srt.server_args import ServerArgs

from portattn.integrations import sglang as adapter
from portattn.integrations.sglang import capabilities

REQUESTS, TOKENS, CONTEXT, DRAFTED = 24, 512, 1024, 5
adapter.activate()
publish(ServerArgs(model_path="none", device="cpu", attention_backend="portattn"), role="scheduler")
started.watch(capabilities)


def draw(r: random.Random) -> tuple[ForwardMode, list[int], list[int]]:
    count = r.choice((1, 2, r.randint(1, REQUESTS), REQUESTS))
    mode = r.choice((ForwardMode.DECODE, ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY, ForwardMode.MIXED))
    each = {ForwardMode.DECODE: 1, ForwardMode.TARGET_VERIFY: DRAFTED}.get(mode, 0)
    most = r.choice((8, 40, TOKENS)) // count
    new = [each or r.randint(1, max(most, 1)) for _ in range(count)]
    # In decode a batch's lengths contain the new token, in verification they do not.
    return mode, [r.randint(0 if each != 1 else 1, CONTEXT - 64 - n if n < 64 else 0) for n in new], new


def attend(backend: Any, layer: Any, served: Served, r: random.Random) -> list[Any]:
    mode, before, new = draw(r)
    trees = None
    more = {}
    if mode.is_target_verify():
        trees = [random_tree(DRAFTED, torch.Generator()) for _ in before] if r.random() < 0.7 else None
        more = {"spec_info": verify_input(before, DRAFTED, trees, True)}
    batch = served.batch(mode, [1] * len(before), before, new, **more)
    total, heads, dim = sum(new), served.heads, served.dim
    with torch.no_grad():
        backend.init_forward_metadata(batch)
        row = (heads + 2 * served.heads_k) * dim
        q = torch.zeros(total, row, dtype=served.dtype)[:, : heads * dim]
        q = q.contiguous() if r.random() < 0.5 else q
        backend._attend_latent(q, None, layer, None) if served.latent else backend._attend(q, layer, None)
    return [mode.name, len(new), total, max(new), int(backend.forward_metadata.table.shape[1])]


def engine(seed: int, batches: int) -> dict[str, Any]:
    r = random.Random(seed)
    latent = r.random() < 0.3
    heads_k = r.choice((1, 2, 4))
    settings: dict[str, Any] = {
        "page": r.choice((1, 16, 64)), "heads": heads_k * r.choice((1, 4, 5)), "heads_k": heads_k,
        "dim": r.choice((64, 128)), "dtype": torch.bfloat16, "latent": latent, "context": CONTEXT, "rope": 16,
        "windowed": not latent and r.random() < 0.3,
    }  # fmt: skip
    served = Served([CONTEXT - 1] * 1, **settings)
    served.runner.req_to_token_pool.size = REQUESTS
    window = {"sliding_window_size": 8} if settings["windowed"] else {}
    layers = [served.layer(0, **window)] + ([served.layer(1)] if settings["windowed"] else [])
    served.runner.model = torch.nn.ModuleList(layers)
    backend = served.backend
    return started.found(settings, batches, lambda: attend(backend, r.choice(layers), served, r))


limits = get_schedule().override(chunked_prefill_size=TOKENS, max_prefill_tokens=TOKENS)
drafted = get_spec().override(speculative_num_draft_tokens=DRAFTED)
with limits, drafted:
    started.print_engines(engine)
