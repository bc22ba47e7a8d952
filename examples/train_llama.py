"""Trains a small Llama of random weights with transformers' own attention and with portattn's: the same loss curve.

    python examples/train_llama.py                               # 200 steps, plain, both attentions
    python examples/train_llama.py --mode all --json curves.json
    python examples/train_llama.py --mode packed --attention portattn --device cuda --dtype bfloat16

Every attention starts from the same weights and sees the same batches. AdamW hides a gradient's scale, so the norms of
the gradients of the query, key and value projections are recorded beside the losses. How far curves of float32 drift
apart by rounding alone is seen on "eager, one ulp": transformers' attention once more, with every weight moved to the
next float.

It needs transformers. Progress goes to stderr, results to stdout. The exit status is 1 where a loss is not finite, 2
for bad arguments, 130 after Ctrl-C; --json then has the trainings that were finished.
"""

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import portattn

VOCABULARY = 12  # bytes
LAG = 3  # a byte depends on the last one and on the one so many before it: what is between is no help
SUCCESSORS = 3  # bytes that can follow
MODES = ("plain", "checkpointing", "padded", "packed", "compiled")
ULP = "eager, one ulp"
ATTENTIONS = ("eager", "portattn", ULP)
PROJECTIONS = ("q_proj", "k_proj", "v_proj")
IGNORED = -100  # a label that counts in no loss
NEWEST = 25  # steps between two lines of progress, of which the first step has one as well


class Text:
    """A source of text: a Markov chain over a few bytes, the same for the same seed.

    entropy  of a byte, in nats, where those before it are known: no model's loss is lower in the long run
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        shape = (VOCABULARY, VOCABULARY, SUCCESSORS)
        self._successors = torch.rand(*shape[:2], VOCABULARY, generator=self._generator).argsort(-1)[..., :SUCCESSORS]
        weights = torch.rand(shape, generator=self._generator) ** 3 + 0.02
        self._chances = weights / weights.sum(-1, keepdim=True)
        self.entropy = -(self._chances * self._chances.log()).sum(-1).mean().item()

    def rows(self, batch: int, length: int) -> torch.Tensor:
        """(batch, length) int64."""
        found = torch.randint(VOCABULARY, (batch, length), generator=self._generator)
        for place in range(LAG, length):
            state = found[:, place - LAG], found[:, place - 1]
            choice = torch.multinomial(self._chances[state], 1, generator=self._generator)
            found[:, place] = self._successors[state].gather(-1, choice)[:, 0]
        return found

    def lengths(self, batch: int, length: int) -> list[int]:
        """Of each sequence, from a third of the length up."""
        return torch.randint(length // 3, length + 1, (batch,), generator=self._generator).tolist()


def batches(mode: str, seed: int, batch: int, length: int) -> Iterator[dict[str, torch.Tensor]]:
    """What a model is called with, step by step. A token that no token before it can predict has no label."""
    text = Text(seed)
    while True:
        ids = text.rows(batch, length)
        if mode == "padded":
            yield _padded(ids, text.lengths(batch, length))
        elif mode == "packed":
            yield _packed(ids, text.lengths(batch, length))
        elif mode == "compiled":  # a mask of ones: nobody looks for packed sequences, which a graph would write out
            yield {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
        else:
            yield {"input_ids": ids, "labels": ids}


def _padded(ids: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """Padding on the right in one row, on the left in the next."""
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, IGNORED)
    for row, length in enumerate(lengths):
        first = (ids.shape[1] - length) * (row % 2)
        mask[row, first : first + length] = 1
        labels[row, first + 1 : first + length] = ids[row, first + 1 : first + length]
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


def _packed(ids: torch.Tensor, lengths: list[int]) -> dict[str, torch.Tensor]:
    """The sequences one after the other in one row, as DataCollatorWithFlattening lays them: positions start again."""
    parts = [ids[row, :length] for row, length in enumerate(lengths)]
    labels = [torch.cat([part.new_tensor([IGNORED]), part[1:]]) for part in parts]
    positions = [torch.arange(length) for length in lengths]
    return {
        "input_ids": torch.cat(parts)[None], "labels": torch.cat(labels)[None],
        "position_ids": torch.cat(positions)[None],
    }  # fmt: skip


def a_model(attention: str, mode: str, options: argparse.Namespace) -> Any:
    """The model, from the same weights for every attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        initializer_range=0.1, attn_implementation="portattn" if attention == "portattn" else "eager",
    )  # fmt: skip
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(config).train()
    if attention == ULP:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.nextafter(torch.full_like(weight, math.inf)))
    model.to(options.device)
    if mode == "checkpointing":
        # The name that transformers 5.23 knows it by, or the one before.
        enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable()
    return model


class Curve(NamedTuple):
    """One training.

    losses          of each step, in nats a byte
    gradient_norms  of each step: the norm of the gradients of all layers' projections, by the projection's name
    ran             the paths that portattn's calls took, with the problem of the first; empty for other attentions
    seconds         that the steps took, compilations included
    """

    mode: str
    attention: str
    losses: list[float]
    gradient_norms: dict[str, list[float]]
    ran: list[str]
    seconds: float


def train(mode: str, attention: str, options: argparse.Namespace) -> Curve:
    """Train a new model. Raises FloatingPointError where a loss is not finite."""
    model = a_model(attention, mode, options)
    weights = {name: [p for n, p in model.named_parameters() if f".{name}." in n] for name in PROJECTIONS}
    step_of = torch.compile(model, backend=options.compile_backend) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), eps=1e-6)
    device = torch.device(options.device).type
    mixed = options.dtype != "float32"
    found = Curve(mode, attention, [], {name: [] for name in PROJECTIONS}, [], 0.0)
    begin = time.monotonic()
    source = batches(mode, options.seed, options.batch, options.length)
    for step in range(1, options.steps + 1):
        given = {name: tensor.to(options.device) for name, tensor in next(source).items()}
        block: Any = torch.autocast(device, getattr(torch, options.dtype)) if mixed else contextlib.nullcontext()
        optimizer.zero_grad()
        with block:
            loss = step_of(**given, use_cache=False).loss
        loss.backward()
        optimizer.step()
        found.losses.append(float(f"{loss.item():.9g}"))  # nine digits tell every float32 from its neighbours
        for name in PROJECTIONS:
            norms = torch.stack([weight.grad.norm() for weight in weights[name]])
            found.gradient_norms[name].append(float(f"{norms.norm().item():.9g}"))
        if attention == "portattn":
            _note(found.ran)
        if not math.isfinite(found.losses[-1]):
            raise FloatingPointError(f"{mode}, {attention}: the loss of step {step} is {found.losses[-1]}")
        if step == 1 or step % NEWEST == 0 or step == options.steps:
            took = time.monotonic() - begin
            said = f"{mode}, {attention}: step {step} of {options.steps}, loss {found.losses[-1]:.4f}, {took:.0f} s"
            print(said, file=sys.stderr, flush=True)
    return found._replace(seconds=round(time.monotonic() - begin, 1))


def _note(ran: list[str]) -> None:
    """Add the path of the last call to the list, if it is a new one."""
    plan = portattn.last_plan()
    assert plan is not None, "the model did not call portattn"
    if not any(line.startswith(f"{plan.path}: ") for line in ran):
        ran.append(f"{plan.path}: {plan.problem}")


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=(*MODES, "all"), default="plain")
    parser.add_argument("--attention", choices=(*ATTENTIONS, "both", "all"), default="both")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is by autocast")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=96, help="tokens of a sequence")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile-backend", default="inductor", help="of torch.compile, for --mode compiled")
    parser.add_argument("--json", type=Path, help="where the curves of finished trainings are written")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}, but must be at least 1")
    if options.length <= 3 * LAG:
        parser.error(f"--length is {options.length}, but must be more than {3 * LAG}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json is {options.json}, but there is no folder {options.json.absolute().parent}")
    try:
        torch.empty(1, device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device is {options.device}, on which torch has no tensors: {str(error).splitlines()[0]}")
    return options


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What the run was: arguments, versions, the chip, the text's entropy."""
    import transformers

    here = torch.device(options.device)
    chip = torch.cuda.get_device_name(here) if here.type == "cuda" else here.type
    names = ("steps", "device", "dtype", "batch", "length", "lr", "seed", "compile_backend")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "portattn": portattn.__version__}
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return {
        **{name: getattr(options, name) for name in names}, "chip": chip, "date": date, "versions": versions,
        "entropy": round(Text(options.seed).entropy, 4),
    }  # fmt: skip


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    try:
        import portattn.integrations.transformers
    except ImportError as error:  # says what is missing, and how it is installed
        print(f"train_llama: {error}", file=sys.stderr)
        return 1

    registered = portattn.integrations.transformers.register()
    modes = MODES if options.mode == "all" else (options.mode,)
    attentions = {"all": ATTENTIONS, "both": ATTENTIONS[:2]}.get(options.attention, (options.attention,))
    found: list[Curve] = []
    status = 0
    try:
        for mode in modes:
            curves = {}
            for attention in attentions:
                torch.compiler.reset()
                curves[attention] = train(mode, attention, options)
                found.append(curves[attention])
                losses = curves[attention].losses
                print(f"{mode}, {attention}: loss {losses[0]:.3f} -> {losses[-1]:.3f}", flush=True)
            for attention in attentions[1:]:
                apart = furthest(curves[attention].losses, curves["eager"].losses)
                print(f"{mode}: {attention} and eager at most {apart:.1e} apart", flush=True)
    except FloatingPointError as error:
        print(f"train_llama: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("train_llama: interrupted", file=sys.stderr)
        status = 130  # as shells report it
    finally:
        registered.remove()
    if options.json is not None and found:
        result = {"about": about(options), "curves": [curve._asdict() for curve in found]}
        options.json.write_text(json.dumps(result), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
