"""Times of a training step of transformers with portattn and with sdpa: a Llama of 1.2 B parameters, random weights.

    python scripts/training_step_times.py --seconds 240 --out training.json
    python scripts/training_step_times.py --tiny --out tiny.json     # a small model in small sizes, on a CPU as well

A step is a forward of 4 x 4096 random tokens with the loss of their successors, its backward, and one of AdamW; bf16
throughout. Steps are plain, with gradient checkpointing, compiled by inductor, and both. The two implementations train
one model in turns, each round in the other order. Before they are timed the gradients of the last layer's projections
to q, k and v are compared. Of each the median of the rounds is printed, and the median of the rounds' own ratios.
Without --tiny it needs a GPU, with 100 GB as a rough estimate for the steps that are not checkpointed.

The exit status is 1 when a workload failed, or its gradients differ. What --seconds leaves no time for is named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CONTENDERS = ("sdpa", "portattn")
ROUNDS = 9  # timed, unless the time is over before
WARM = 2  # rounds that do not count: they compile and allocate
# Of ||a - b|| / ||a||, of bf16 gradients of one step: rounding makes some percent of difference, a wrong gradient 1.
GRADIENTS_WITHIN = 0.15
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
WORKLOADS = ("plain", "checkpointed", "compiled", "checkpointed, compiled")


@dataclass(frozen=True)
class Sizes:
    """Of the model and a step's tokens."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: tuple[int, int] = (32, 8)
    vocabulary: int = 128_256
    batch: int = 4
    length: int = 4096


TINY = Sizes(hidden=64, intermediate=128, layers=2, heads=(4, 2), vocabulary=500, batch=2, length=48)


def a_model(sizes: Sizes, device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads[0], num_key_value_heads=sizes.heads[1],
        head_dim=sizes.hidden // sizes.heads[0], vocab_size=sizes.vocabulary, max_position_embeddings=131_072,
        rope_theta=500_000.0, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


class Trainer:
    """One model, its optimizer and one batch of tokens; `step` is what is timed."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.device, self.model = device, a_model(sizes, device)
        self.called: Callable[..., Any] = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device == "cuda")
        self.ids = torch.randint(5, sizes.vocabulary, (sizes.batch, sizes.length), device=device)

    def backward(self) -> float:
        """Gradients of the loss; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.called(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return float(loss.detach())

    def step(self) -> None:
        """As `backward`, and the weights' update. Nothing of it waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        self.called(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()

    def gradients(self) -> list[torch.Tensor]:
        """Copies of those of the last layer's projections."""
        attention = self.model.model.layers[-1].self_attn
        return [getattr(attention, name).weight.grad.clone() for name in PROJECTIONS]

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    @contextmanager
    def as_workload(self, name: str) -> Iterator[None]:
        """The model as a workload of that name has it, and as before afterwards."""
        # transformers 5.2x has another name for the same, and warns of the old one.
        kind = "activation" if hasattr(self.model, "activation_checkpointing_enable") else "gradient"
        if "checkpointed" in name:
            options = {f"{kind}_checkpointing_kwargs": {"use_reentrant": False}}
            getattr(self.model, f"{kind}_checkpointing_enable")(**options)
        if "compiled" in name:
            torch._dynamo.reset()
            self.called = torch.compile(self.model, dynamic=False)
        try:
            yield
        finally:
            self.called = self.model
            if "checkpointed" in name:
                getattr(self.model, f"{kind}_checkpointing_disable")()
            self.optimizer.zero_grad(set_to_none=True)


def compared(trainer: Trainer) -> dict[str, Any]:
    """Losses of both implementations on the same weights, how far apart the gradients are, and the path of portattn's
    last forward, which a compiled one does not tell."""
    import portattn

    losses, gradients, path = {}, {}, ""
    for name in CONTENDERS:
        trainer.model.set_attn_implementation(name)
        losses[name] = trainer.backward()
        gradients[name] = trainer.gradients()
        plan = portattn.last_plan()
        if name == "portattn" and plan is not None and trainer.called is trainer.model:
            path = plan.path
    pairs = zip(PROJECTIONS, gradients["sdpa"], gradients["portattn"], strict=True)
    apart = {name: float((a.float() - b.float()).norm() / a.float().norm()) for name, a, b in pairs}
    return {"losses": losses, "gradients apart": apart, "path": path}


def timed(trainer: Trainer, rounds: int, until: float) -> dict[str, Any]:
    """Seconds of a step of each, in turns: at least one round that counts."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    memory: dict[str, int] = {}
    for turn in range(WARM + rounds):
        if turn > WARM and time.monotonic() > until:
            break
        for name in CONTENDERS if turn % 2 else CONTENDERS[::-1]:
            trainer.model.set_attn_implementation(name)
            if trainer.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            trainer.wait()
            begin = time.perf_counter()
            trainer.step()
            trainer.wait()
            if turn >= WARM:
                found[name].append(time.perf_counter() - begin)
            if trainer.device == "cuda":
                memory[name] = torch.cuda.max_memory_allocated()
    ratios = [a / b for a, b in zip(found["sdpa"], found["portattn"], strict=True)]
    medians = {name: statistics.median(times) for name, times in found.items()}
    return {
        "seconds": medians, "sdpa / portattn": statistics.median(ratios), "rounds": found, "peak bytes": memory,
    }  # fmt: skip


def measured(trainer: Trainer, name: str, rounds: int, until: float) -> dict[str, Any]:
    """A workload's comparison and times. A failure is its own: the others are measured all the same."""
    try:
        with trainer.as_workload(name):
            found = compared(trainer)
            far = {part: apart for part, apart in found["gradients apart"].items() if not apart <= GRADIENTS_WITHIN}
            if far:
                return found | {"failed": f"gradients differ: {far}"}
            return found | timed(trainer, rounds, until)
    except Exception as error:  # noqa: BLE001  # whatever a workload raises: it is reported, and the exit status is 1
        return {"failed": f"{type(error).__name__}: {error}"[:400]}


def shares(names: Sequence[str], begin: float, seconds: float) -> Iterator[tuple[str, float]]:
    """Each workload with the time at which its rounds end: equal parts of what is left when it begins."""
    for place, name in enumerate(names):
        now = time.monotonic()
        left = begin + seconds - now
        if left <= 0:
            return
        yield name, now + left / (len(names) - place)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240.0, help="for all, compilation included")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--workload", action="append", choices=WORKLOADS, help="can be repeated; all without it")
    parser.add_argument("--tiny", action="store_true", help="a small model, on the CPU where there is no GPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    device = "cuda" if torch.cuda.is_available() or not options.tiny else "cpu"
    import portattn.integrations.transformers

    registered = portattn.integrations.transformers.register()
    sizes, names = TINY if options.tiny else Sizes(), options.workload or list(WORKLOADS)
    found: dict[str, Any] = {
        "chip": torch.cuda.get_device_name() if device == "cuda" else "CPU", "torch": str(torch.__version__),
        "tokens": [sizes.batch, sizes.length], "workloads": {},
    }  # fmt: skip
    try:
        trainer = Trainer(sizes, device)
        for name, until in shares(names, begin, options.seconds):
            found["workloads"][name] = measured(trainer, name, options.rounds, until)
            print(name, json.dumps(found["workloads"][name]), flush=True)
            options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    finally:
        registered.remove()
    found["left out"] = [name for name in names if name not in found["workloads"]]
    options.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return int(any("failed" in one for one in found["workloads"].values()))


if __name__ == "__main__":
    sys.exit(main())
