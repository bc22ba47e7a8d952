"""Two accelerators in one process: a call runs where its tensors lie, whichever device is the current one."""

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpucalls
import pytest
import torch
from gpucalls import NAMES, Pieces, data, operation, perform, prepared, same
from threads import run_threads

import portattn

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two accelerators")]

FIRST, SECOND = "cuda:0", "cuda:1"


def moved(arguments: dict[str, Any], device: str) -> dict[str, Any]:
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}


def on_the_first(found: Pieces) -> Pieces:
    return tuple(t.to(FIRST) for t in found)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("current", [0, 1])
def test_results_do_not_depend_on_the_device(name: str, current: int) -> None:
    """First calls, cached calls and calls of changed data, whichever device is the current one."""
    arguments, other = data(name, seed=0), data(name, seed=1)
    expected = perform(name, arguments), perform(name, other)
    with torch.cuda.device(current):
        for device in (SECOND, FIRST, SECOND):
            here, changed = moved(arguments, device), moved(other, device)
            for _ in range(3):
                found = perform(name, here), perform(name, changed)
                assert all(str(t.device) == device for t in (*found[0], *found[1]))
                same(on_the_first(found[0]), expected[0])
                same(on_the_first(found[1]), expected[1])
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("name", NAMES)
def test_a_prepared_run_on_the_device_that_is_not_current(name: str) -> None:
    here = moved(data(name, seed=0), SECOND)
    run = prepared(name, here)
    for seed in (0, 1, 2):
        other = data(name, seed)
        for n, tensor in other.items():
            if isinstance(tensor, torch.Tensor):
                here[n].copy_(tensor)
        for tensor in run():
            tensor.fill_(float("nan"))
        same(on_the_first(run()), perform(name, other))


def test_a_prepared_run_refuses_tensors_of_another_device() -> None:
    arguments = data("decode_attention", seed=0)
    handle = portattn.prepare(operation("decode_attention"), **arguments)
    with pytest.raises(portattn.ArgumentError, match="cuda:1"):
        handle.run(**moved(arguments, SECOND))


def test_tensors_of_two_devices_are_refused() -> None:
    arguments = data("attention", seed=0)
    with pytest.raises(portattn.ArgumentError, match="cuda:1"):
        perform("attention", arguments | {"k": arguments["k"].to(SECOND)})


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_the_second_device(name: str) -> None:
    arguments = data(name, seed=0)
    expected = perform(name, arguments)
    here = moved(arguments, SECOND)
    with torch.cuda.device(1):
        perform(name, here)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = perform(name, here)
        for tensor in found:
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    same(on_the_first(found), expected)


def test_a_thread_for_each_device() -> None:
    """Both at once, with streams of their own: counters and tensor maps belong to one device."""
    calls = {name: data(name, seed=0) for name in NAMES}
    expected = {name: perform(name, arguments) for name, arguments in calls.items()}
    torch.cuda.synchronize()
    wrong: list[str] = []

    def work(device: str) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)):
                here = {name: moved(arguments, device) for name, arguments in calls.items()}
                for _ in range(20):
                    for name, arguments in here.items():
                        found = perform(name, arguments)
                        torch.cuda.current_stream().synchronize()
                        found = on_the_first(found)
                        torch.cuda.synchronize(0)
                        same(found, expected[name])
        except BaseException as error:
            wrong.append(f"{device}: {error!r}")
            raise

    run_threads(*(functools.partial(work, device) for device in (FIRST, SECOND)))
    assert not wrong


FIRST_CALL = """
import torch
import gpucalls
gpucalls.WHERE = "cuda:1"
arguments = gpucalls.data("attention", seed=7)
found = gpucalls.perform("attention", arguments)
gpucalls.a_kernel_ran(arguments)
expected = gpucalls.perform("attention", arguments, backend="reference")
torch.testing.assert_close(found[0], expected[0], atol=4e-3, rtol=4e-3)
"""


def test_what_is_called_first_on_the_second_device() -> None:
    """In a process of its own, where nothing of the first device is there yet."""
    folder = str(Path(gpucalls.__file__).parent)
    subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, cwd=folder, timeout=300)
