"""Times of transformers with portattn and with sdpa, end to end: a Llama of 1.2 B parameters with random weights.

    python scripts/transformers_times.py --seconds 240 --out times.json

Both generate from one model, in turns. Of each the least time of the rounds is printed, the ratio of these, and the
median of the rounds' own ratios. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROUNDS = 3
CONTENDERS = ("sdpa", "portattn")


def a_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, vocab_size=128_256, max_position_embeddings=131_072, rope_theta=500_000.0,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def inputs(batch: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 100_000, (batch, length), device="cuda")
    mask = torch.ones_like(ids)
    if padded:  # on the left, by up to half
        for row in range(batch):
            mask[row, : (length // 2) * row // max(batch - 1, 1)] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generation(model: Any, batch: int, length: int, padded: bool = False, **more: Any) -> Callable[[], Any]:
    given = inputs(batch, length, padded)
    return lambda: model.generate(
        **given, max_new_tokens=64, min_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None, **more
    )


def prefill(model: Any, batch: int, length: int, padded: bool = False) -> Callable[[], Any]:
    given = inputs(batch, length, padded)
    return lambda: model(**given, logits_to_keep=1, use_cache=False).logits


def workloads(model: Any) -> dict[str, Callable[[], Any]]:
    return {
        "generate 8 x (1024 + 64)": generation(model, 8, 1024),
        "generate 8 x (1024 + 64), left-padded": generation(model, 8, 1024, padded=True),
        "generate 4 x (16384 + 64)": generation(model, 4, 16_384),
        "generate 8 x (1024 + 64), static cache": generation(
            model, 8, 1024, cache_implementation="static", disable_compile=True
        ),
        "prefill 1 x 32768": prefill(model, 1, 32_768),
        "prefill 16 x 2048, left-padded": prefill(model, 16, 2048, padded=True),
        "generate 8 x (1024 + 64), static cache, compiled": generation(model, 8, 1024, cache_implementation="static"),
    }


def seconds(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measured(model: Any, call: Callable[[], Any], until: float) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    try:
        with torch.inference_mode():
            for turn in range(ROUNDS + 1):
                for name in CONTENDERS:
                    model.set_attn_implementation(name)
                    took = seconds(call)
                    if turn:  # the first compiles
                        found[name].append(took)
                if turn and time.monotonic() > until:
                    break
    except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    least = {name: min(times) for name, times in found.items()}
    ratios = [a / b for a, b in zip(found["sdpa"], found["portattn"], strict=True)]
    return least | {"sdpa / portattn": least["sdpa"] / least["portattn"], "median of rounds": statistics.median(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import portattn.integrations.transformers

    portattn.integrations.transformers.register()
    end = time.monotonic() + options.seconds
    model = a_model()
    found = {}
    for name, call in workloads(model).items():
        if time.monotonic() > end:
            break
        found[name] = measured(model, call, end)
        print(name, json.dumps(found[name]), flush=True)
        options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
