"""Shapes without a device: CPU tensors count as an H100's, and launches are recorded, not run. Kernels are compiled
with empty bodies (fakechip.py). For a process that was started with `environment`. What of portattn and Triton has to
be replaced for it is here alone."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fakedriver

HEAP = 2**32  # addresses lie above; numbers that are parameters lie below


def environment(folder: Path) -> dict[str, str]:
    """Variables for a process that records: the library is compiled into the folder."""
    import importlib.util

    spec = importlib.util.find_spec("triton")
    assert spec is not None, "Triton is not installed"
    assert spec.origin is not None
    fakedriver.build(folder, Path(spec.origin).parent / "backends" / "nvidia" / "include")
    inherited, variables = os.environ.get("LD_LIBRARY_PATH", ""), fakedriver.environment(folder)
    path = os.pathsep.join(filter(None, (variables["LD_LIBRARY_PATH"], inherited)))
    return variables | {"LD_LIBRARY_PATH": path, "PORTATTN_CACHE_DIR": str(folder / "portattn")}


class Recorder:
    """What calls launch, in a form that does not depend on where their memory lies."""

    def __init__(self) -> None:
        self.fake = fakedriver.install()
        self._kernels: dict[int, tuple[str, list[int]]] = {}
        self._describe_kernels()
        import fakechip  # imports Triton, which the library comes before

        fakechip.leave_bodies_out()
        fakechip.pretend()

    def _describe_kernels(self) -> None:
        from triton.compiler import CompiledKernel

        from portattn.launch import triton_compat

        load = CompiledKernel._init_handles

        def loaded(compiled: Any) -> None:
            load(compiled)
            if compiled.function not in self._kernels:
                sizes = triton_compat.ptx_sizes(compiled.asm["ptx"])
                self._kernels[compiled.function] = (f"{compiled.metadata.name} {compiled.hash}", sizes)
                self.fake.describe(compiled.function, sizes)

        CompiledKernel._init_handles = loaded

    def launches(self, given: Sequence[tuple[str, Any]], results: Sequence[Any]) -> list[list[Any]]:
        """Launches since the last time: kernel, grid, threads, shared memory, attributes, stream, parameters. Addresses
        are told by what lies there: a given tensor, by its name and the bytes from its first element on; a result; or a
        buffer, by the order in which they appear."""
        places = [(name, t.data_ptr(), t.untyped_storage().data_ptr()) for name, t in given]
        known = {first: name for name, first, _ in reversed(places)}
        known |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)}
        buffers: dict[int, str] = {}

        def said(word: bytes) -> str:
            address = int.from_bytes(word, "little")
            if address < HEAP:
                return word.hex()
            return known.get(address) or buffers.setdefault(address, f"buffer {len(buffers)}")

        found = []
        for one in self.fake.launches():
            name, sizes = self._kernels[one.function]
            parameters, at = [], 0
            for size in sizes:
                bytes_, at = one.parameters[at : at + size], at + size
                if size == 8:
                    parameters.append(said(bytes_))
                elif size == 128:  # a tensor map: the library wrote the address into its first word
                    parameters.append(said(bytes_[:8]) + bytes_[8:].hex())
                else:
                    parameters.append(bytes_.hex())
            found.append([name, *one[:4], one.stream, parameters])
        return found


class StartedEngines(Recorder):
    """Layers of engines that warmed their calls up, and what batches behind it plan and compile."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[Any] = []
        self.planned: list[str] = []

    def watch(self, adapter: Any) -> None:
        from portattn.api import dispatch, warmup
        from portattn.integrations import engine_warmup

        adapter.needs_warmup = lambda device: True
        adapter.compile_calls = lambda *given: self.reports.append(engine_warmup.compile_calls(*given))
        warmup.synchronize = lambda device: None
        run = dispatch.run
        dispatch.run = lambda *given: self.planned.append(str(given[0].problem)) or run(*given)

    def found(self, settings: Any, batches: int, run_one: Callable[[], Any]) -> dict[str, Any]:
        """Run batches through the layers of one engine, whose warm-up is over; `wrong` are those it lacked."""
        import portattn

        report, wrong = self.reports.pop(), []
        assert not self.reports
        self.planned.clear()
        for _ in range(batches):
            before = len(self.planned)
            what, compiled = run_one(), portattn.monitor()
            self.fake.library.fake_clear()  # its memory has an end
            if compiled or len(self.planned) > before:
                wrong.append([sorted(compiled), self.planned[before:], what])
        return {
            "settings": str(settings), "wrong": wrong, "loaded": len({each.key for each in report.specs}),
            "failed": [one.failed for one in report.failed],
        }  # fmt: skip

    def print_engines(self, engine: Callable[[int, int], dict[str, Any]]) -> None:
        """Print, as JSON, what `engine` finds for each seed of the program's arguments."""
        import portattn

        with portattn.settings(isolate="never", canary="never", validate="never"):
            found = [engine(int(seed), int(sys.argv[2])) for seed in sys.argv[1].split(",")]
        print(json.dumps({"engines": found}))


def assert_no_batch_compiles(child: str, folder: Path, seeds: str, batches: int) -> None:
    """Run a program that prints engines; no batch of theirs may compile a kernel."""
    triton = fakedriver.triton_folders()[importlib.metadata.version("triton")]
    for one in fakedriver.run(child, folder, triton, seeds, str(batches))["engines"]:
        assert one["failed"] == []
        assert one["loaded"] > 3
        assert [kernels for kernels, *_ in one["wrong"] if kernels] == [], one["settings"]
        assert len(one["wrong"]) <= 2, "nearly every shape class is cached too"
