"""Run by test_hub_kernel.py in a process of its own, where no portattn is installed: transformers loads the kernel
repository of LOCAL_KERNELS without a network. Prints, as JSON, how far each path's logits are from eager's.

    hub_child.py kernels   by the `kernels` package
    hub_child.py direct    without it: what it would do is done here, all else is transformers' own"""

import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tiny_models import CACHES, LENGTH, build, difference, in_chunks, padding, positions, tokens, using
from transformers.integrations import hub_kernels

KERNEL = "portattn/portattn"
Run = Callable[[Any], torch.Tensor]


def main() -> None:
    # An editable install's finder stands for an installed portattn: without it there is none.
    sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in str(getattr(f, "__module__", f))]
    assert importlib.util.find_spec("portattn") is None, "an installed portattn would be tested, not the kernel's"
    torch.set_num_threads(1)
    if sys.argv[1] == "direct":
        hub_kernels.is_kernels_available = lambda *given, **named: True
        hub_kernels.get_kernel = imported
    print(json.dumps(measure()))


def imported(name: str, **options: Any) -> ModuleType:
    """The kernel's module as `kernels` imports it: from its file, under the id in its metadata."""
    known, _, folder = os.environ["LOCAL_KERNELS"].partition("=")
    assert name == known
    variant = Path(folder) / "build" / "torch-cpu"
    name = json.loads((variant / "metadata.json").read_bytes())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def measure() -> dict[str, Any]:
    paths: dict[str, list[float]] = {}
    model, double = build("Llama"), build("Llama").double()
    for name in ("none", "left", "right", "both"):
        paths[f"padded: {name}"] = errors(model, double, by_mask(padding(name)), padding(name), alone(padding(name)))
    for cache in CACHES:
        for name in ("ones", "left"):
            mask = padding(name)
            paths[f"{cache} cache: {name}"] = errors(model, double, by_cache(cache, mask), mask, alone(mask))
    where = torch.cat((torch.arange(4), torch.arange(LENGTH - 4)))[None]
    ids = tokens()[:1]
    parts: Run = lambda m: torch.cat([m(part).logits for part in (ids[:, :4], ids[:, 4:])], 1)  # noqa: E731
    paths["packed"] = errors(model, double, lambda m: m(ids, position_ids=where).logits, None, parts)
    gpt, mask = build("GptOss"), padding("left")
    with torch.no_grad():
        eager = by_mask(mask)(gpt)
        without = by_mask(mask)(sinkless(build("GptOss")))
        with using(gpt, KERNEL):
            sinks = difference(by_mask(mask)(gpt), eager, mask)
    return {
        "library": sys.modules["portattn"].__file__, "paths": paths, "sinks": [sinks, difference(without, eager, mask)],
    }  # fmt: skip


def by_mask(mask: torch.Tensor | None) -> Run:
    return lambda m: m(tokens(), attention_mask=mask, position_ids=positions(mask)).logits


def by_cache(cache: str, mask: torch.Tensor | None) -> Run:
    return lambda m: in_chunks(m, tokens(), mask, CACHES[cache](m), (5, 3, 1, 1, 1))


def alone(mask: torch.Tensor | None) -> Run:
    """Each sequence by itself, without padding: what padding must not change."""

    def run(model: Any) -> torch.Tensor:
        if mask is None:
            return model(tokens()).logits
        rows = torch.zeros(*mask.shape, model.config.vocab_size, dtype=model.dtype)
        for row, valid in enumerate(mask.bool()):
            rows[row, valid] = model(tokens()[row, valid][None]).logits[0]
        return rows

    return run


def errors(model: Any, double: Any, run: Run, mask: torch.Tensor | None, right: Run) -> list[float]:
    """Of logits against eager's in float64: the kernel's error, and eager's own in float32."""
    with torch.no_grad():
        exact, eager = right(double), right(model)
        with using(model, KERNEL):
            found = run(model)
    return [difference(found.double(), exact, mask), difference(eager.double(), exact, mask)]


def sinkless(model: Any) -> Any:
    """The model with sinks that nothing attends: what would come of leaving them out."""
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-1e4)
    return model


if __name__ == "__main__":
    main()
