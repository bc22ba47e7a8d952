"""Sets of a whole model: a Llama of 1.2 B parameters with random weights, by transformers with portattn and with sdpa.

Both implementations run one model in turns, each round in the other order. `ms` is the median of the rounds that
count, `least_ms` the least of them, `of_peer` the median of sdpa's time over portattn's of the same round."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import portattn
import portattn.integrations.transformers
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.rounds import ratio
from portattn.tools.bench.workloads import Measure, Row, failure

SDPA = "sdpa"
CONTENDERS = (SDPA, OURS)
# Of ||a - b|| / ||a||, of bf16 gradients of one step: rounding makes some percent of difference, a wrong gradient 1.
GRADIENTS_WITHIN = 0.15
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
STEPS = ("plain", "checkpointed", "compiled", "checkpointed, compiled")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a training step's tokens."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: tuple[int, int] = (32, 8)
    vocabulary: int = 128_256
    batch: int = 4
    length: int = 4096


TINY = Sizes(hidden=64, intermediate=128, layers=2, heads=(4, 2), vocabulary=500, batch=2, length=48)


def llama(sizes: Sizes, device: str, **options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=sizes.hidden, intermediate_size=sizes.intermediate, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads[0], num_key_value_heads=sizes.heads[1],
        head_dim=sizes.hidden // sizes.heads[0], vocab_size=sizes.vocabulary, max_position_embeddings=131_072,
        rope_theta=500_000.0, attn_implementation=SDPA, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


@contextmanager
def registered() -> Iterator[None]:
    handle = portattn.integrations.transformers.register()
    try:
        yield
    finally:
        handle.remove()


def timed(
    measure: Measure, model: Any, call: Callable[[], Any], rounds: int, warm: int, until: float
) -> dict[str, Row]:
    """Return times of a call with each implementation, in turns: at least one round counts."""
    found: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    rows: dict[str, Row] = {name: {} for name in CONTENDERS}
    for turn in range(warm + (measure.rounds or rounds)):
        if turn > warm and time.monotonic() > until:
            break
        for name in CONTENDERS if turn % 2 else CONTENDERS[::-1]:
            model.set_attn_implementation(name)
            if measure.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            measure.synchronize()
            begin = time.perf_counter()
            call()
            measure.synchronize()
            if turn >= warm:  # earlier ones compile and allocate
                found[name].append((time.perf_counter() - begin) * 1e3)
            if measure.device == "cuda":
                rows[name]["peak_bytes"] = torch.cuda.max_memory_allocated()
    for name, times in found.items():
        rows[name] |= {"ms": statistics.median(times), "least_ms": min(times), "rounds_ms": times}
    rows[OURS]["of_peer"] = ratio(found[SDPA], found[OURS])
    return rows


def transformers(measure: Measure) -> Iterator[Row]:
    """Generation and prefill of the model, end to end."""
    sizes = TINY if measure.tiny else Sizes()
    with registered():
        model = llama(sizes, measure.device).eval()
        workloads = calls(model, measure.device, 16 if measure.tiny else 1)
        for name, until in measure.shares(list(workloads)):
            try:
                with torch.inference_mode():
                    found = {} if measure.check else timed(measure, model, workloads[name], 3, 1, until)
            except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
                yield {"case": name, **failure(error)}
                continue
            yield from ({"case": name, "contender": who, **row} for who, row in found.items())


def calls(model: Any, device: str, less: int) -> dict[str, Callable[[], Any]]:
    """Return the workloads; sizes are `less` times smaller."""
    generated = 64 // less

    def inputs(batch: int, length: int, padded: bool) -> dict[str, torch.Tensor]:
        length //= less
        ids = torch.randint(5, model.config.vocab_size, (batch, length), device=device)
        mask = torch.ones_like(ids)
        if padded:  # on the left, by up to half
            for row in range(batch):
                mask[row, : (length // 2) * row // max(batch - 1, 1)] = 0
        return {"input_ids": ids, "attention_mask": mask}

    def generation(batch: int, length: int, padded: bool = False, **more: Any) -> Callable[[], Any]:
        given = inputs(batch, length, padded)
        return lambda: model.generate(
            **given, max_new_tokens=generated, min_new_tokens=generated, do_sample=False, pad_token_id=0,
            eos_token_id=None, **more,
        )  # fmt: skip

    def prefill(batch: int, length: int, padded: bool = False) -> Callable[[], Any]:
        given = inputs(batch, length, padded)
        return lambda: model(**given, logits_to_keep=1, use_cache=False).logits

    static = {"cache_implementation": "static"}
    return {
        "generate 8 x (1024 + 64)": generation(8, 1024),
        "generate 8 x (1024 + 64), left-padded": generation(8, 1024, padded=True),
        "generate 4 x (16384 + 64)": generation(4, 16_384),
        "generate 8 x (1024 + 64), static cache": generation(8, 1024, **static, disable_compile=True),
        "prefill 1 x 32768": prefill(1, 32_768),
        "prefill 16 x 2048, left-padded": prefill(16, 2048, padded=True),
        "generate 8 x (1024 + 64), static cache, compiled": generation(8, 1024, **static),
    }


class Trainer:
    """One model, its optimizer and one batch of tokens; `step` is timed."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.device, self.model = device, llama(sizes, device, use_cache=False).train()
        self.called: Callable[..., Any] = self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=device == "cuda")
        self.ids = torch.randint(5, sizes.vocabulary, (sizes.batch, sizes.length), device=device)

    def backward(self) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.called(input_ids=self.ids, labels=self.ids).loss
        loss.backward()
        return float(loss.detach())

    def step(self) -> None:
        """Run `backward` and the weights' update, without waiting for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        self.called(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()

    @contextmanager
    def as_workload(self, name: str) -> Iterator[None]:
        """Put the model in a workload's mode inside the block."""
        if "compiled" in name:
            torch._dynamo.reset()
            self.called = torch.compile(self.model, dynamic=False)
        try:
            with checkpointed(self.model) if "checkpointed" in name else nullcontext():
                yield
        finally:
            self.called = self.model
            self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def checkpointed(model: Any) -> Iterator[None]:
    """Recompute each layer's forward in its backward."""
    # transformers 5.2x has another name for the same, and warns of the old one.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{kind}_checkpointing_enable")(**{f"{kind}_checkpointing_kwargs": {"use_reentrant": False}})
    try:
        yield
    finally:
        getattr(model, f"{kind}_checkpointing_disable")()


def projections(model: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the last layer's projections."""
    return {name: getattr(model.model.layers[-1].self_attn, name).weight.grad.clone() for name in PROJECTIONS}


def compared(trainer: Trainer) -> Row:
    """Return both implementations' losses on the same weights, the distance of gradients, and portattn's last path."""
    losses, gradients, path = {}, {}, ""
    for name in CONTENDERS:
        trainer.model.set_attn_implementation(name)
        losses[name] = trainer.backward()
        gradients[name] = projections(trainer.model)
        plan = portattn.last_plan()
        if name == OURS and plan is not None and trainer.called is trainer.model:
            path = plan.path
    apart = {
        n: float((a.float() - gradients[OURS][n].float()).norm() / a.float().norm()) for n, a in gradients[SDPA].items()
    }
    far = {name: off for name, off in apart.items() if not off <= GRADIENTS_WITHIN}
    found = {"losses": losses, "gradients_apart": apart, "path": path}
    return found | ({"failed": f"gradients differ: {far}"} if far else {})


def training_step(measure: Measure) -> Iterator[Row]:
    """A forward of 4 x 4096 random tokens with the loss of their successors, its backward, and one of AdamW; bf16.

    Steps are plain, with gradient checkpointing, compiled by inductor, and both. Before they are timed the gradients of
    the last layer's projections to q, k and v are compared. It needs 100 GB as a rough estimate for the steps that are
    not checkpointed."""
    with registered():
        trainer: Trainer | None = None
        for name, until in measure.shares(STEPS):
            trainer = trainer or Trainer(TINY if measure.tiny else Sizes(), measure.device)
            try:
                with trainer.as_workload(name):
                    checked = compared(trainer)
                    times: dict[str, Row] = {OURS: {}}
                    if "failed" not in checked and not measure.check:
                        times = timed(measure, trainer.model, trainer.step, 9, 2, until)
            except Exception as error:  # noqa: BLE001  # the others are still measured, and this one is reported
                yield {"case": name, "contender": OURS, **failure(error)}
                continue
            for who, row in times.items():
                yield {"case": name, "contender": who, **row, **(checked if who == OURS else {})}
