"""Run by test_hot_path.py, with fakedriver's library: repeated calls, whose launches native.c makes graphs of.
Prints as JSON whether their launches are those of the same kernels by themselves, and when graphs are made."""

# ruff: noqa: E402 - the driver comes before Triton

import ctypes
import gc
import json
from typing import Any

import fakedriver
import torch

fake = fakedriver.install()
from fakechip import Chip

import portattn
from portattn.launch import cache, cudadriver, native

chip = Chip(fake)
found: dict[str, Any] = {}
STREAM = 5  # place of the stream in a launch
REPEATED = 17  # after so many calls by native.c launches are a graph's


def graphs() -> tuple[int, int, int]:
    """Graphs that were made, how often one was launched, and how many were ended."""
    numbers = (ctypes.c_int * 3)()
    fake.library.fake_graphs(numbers)
    return tuple(numbers)  # type: ignore[return-value]


def tensors(keys: int, batch: int = 2) -> dict[str, Any]:
    def some(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    return {
        "q": some(batch, 32, 1, 128), "k_cache": some(batch, 8, keys, 128), "v_cache": some(batch, 8, keys, 128),
        "seqlens_k": torch.full((batch,), keys, dtype=torch.int32),
    }  # fmt: skip


def call(arguments: dict[str, Any], **more: Any) -> list[Any]:
    chip.allocated.clear()
    fake.library.fake_clear()
    portattn.decode_attention(**arguments, num_splits=3, **more)
    return chip.normal(fake.launches(), arguments)


def expected_on(stream: int, launch: list[Any]) -> list[Any]:
    """A launch as `call` gives it, on another stream."""
    return [stream if item == 7 and place == STREAM else item for place, item in enumerate(launch)]


def module() -> Any:
    return native.load(portattn.config.current().cache_dir)[0]


def by_themselves() -> None:
    module().graph_functions(())


def as_graphs() -> int:
    return int(module().graph_functions(cudadriver.graph_functions()))


def anew(arguments: dict[str, Any]) -> None:
    """Until the call is repeated, of a class that nothing is kept of."""
    cache.forget()
    gc.collect()
    for _ in range(REPEATED + 3):
        call(arguments)


with portattn.settings(isolate="never", canary="never", backend="triton"):
    one, other = tensors(8192), tensors(8192)
    call(one)
    by_themselves()
    expected = [call(t) for t in (one, other)]
    found["launches"] = [len(launches) for launches in expected]
    found["by themselves"] = graphs()
    as_graphs()
    anew(one)
    found["made"] = graphs()[0]
    before = graphs()[1]
    found["same"] = [call(one), call(other), call(one)] == [expected[0], expected[1], expected[0]]
    found["launched"] = graphs()[1] - before
    shorter = tensors(8000)  # of the same class: other sizes, and the same graph
    call(shorter)
    chip.stream = 9
    again = call(shorter)
    made = graphs()[0]
    by_themselves()
    found["other sizes and stream"] = [again == call(shorter), again != expected[0], made == found["made"]]
    as_graphs()
    before = graphs()[1]
    for _ in range(4):  # two streams in turn: only one of them has the graph
        chip.stream = 9
        call(one)
        chip.stream = 7
        call(one)
    found["two streams"] = graphs()[1] - before
    chip.stream = 9
    before, since = graphs()[1], []
    for _ in range(REPEATED + 2):
        call(one)
        since.append(graphs()[1] - before)
    found["another stream"] = [since[0], since[-1], call(one) == [expected_on(9, launch) for launch in expected[0]]]
    chip.stream = 7
    for _ in range(REPEATED + 2):
        call(one)

    fake.library.fake_capture(1)
    before = graphs()[1]
    found["captured"] = [call(one) == expected[0], graphs()[1] - before]
    fake.library.fake_capture(0)
    call(one)
    found["after a capture"] = graphs()[1] - before

    fake.library.fake_green(7)
    before = graphs()[1]
    found["of a green context"] = [call(one) == expected[0], graphs()[1] - before]
    fake.library.fake_green(0)

    place = torch.empty_like(one["q"])
    handle = portattn.prepare("decode_attention", **one, num_splits=3)
    for _ in range(REPEATED + 3):
        fake.library.fake_clear()
        handle.run(**one, num_splits=3, out=place)
    before = graphs()[1]
    handle.run(**one, num_splits=3, out=place)
    found["prepared"] = graphs()[1] - before

    fake.library.fake_refuse(2)  # the graph, and then a kernel
    try:
        call(one)
        found["refused"] = ""
    except RuntimeError as error:
        found["refused"] = str(error)
    found["after a refusal"] = call(one) == expected[0]
    torch.cuda.current_device = lambda: 0
    fake.library.fake_lose_context()
    found["without a context"] = len(call(one))  # what was allocated before it was seen has other names

    looked: list[str] = []
    kinds, cache.kinds = cache.kinds, lambda op, values: looked.append(op) or kinds(op, values)  # type: ignore
    same = call(one) == expected[0]
    found["found in C"] = [same, len(looked)]
    with portattn.settings(validate="never"):
        call(one)  # another kind, as its settings are others
        looked.clear()
        found["found in C"] += [call(one) == expected[0], len(looked)]
    looked.clear()
    found["found in C"] += [call(one) == expected[0], len(looked)]
    try:
        call(one, scale=[1.0])
    except portattn.ArgumentError as error:
        found["unhashable"] = error.argument
    cache.kinds = kinds

    kept = as_graphs()
    anew(one)  # the refused one is no graph any more
    kept, ended = as_graphs(), graphs()[2]
    fake.library.fake_capture(1)  # somebody else's
    cache.forget()
    del handle
    gc.collect()
    found["ended"] = [kept > 0, as_graphs(), graphs()[2] - ended == kept, fake.library.fake_disturbed()]
    fake.library.fake_capture(0)

    for how, name in ((1, "none is made"), (2, "its kernels take no parameters"), (3, "it is not launched")):
        fake.library.fake_refuse_graphs(how)
        anew(one)
        before = graphs()
        found[name] = [call(one) == expected[0], graphs()[1] - before[1], as_graphs()]
    fake.library.fake_refuse_graphs(0)
    cache.forget()
    before = graphs()
    with portattn.settings(graphs="never"):
        anew(one)
        found["switched off"] = [call(one) == expected[0], graphs()[0] - before[0]]
    anew(one)
    found["switched on again"] = graphs()[0] - before[0]
print(json.dumps(found))
