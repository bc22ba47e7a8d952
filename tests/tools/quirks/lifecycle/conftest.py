"""What the tests of this folder share: the command line, a store of incidents, and a compiler with a planted bug."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # `import lifecycle_logs`

from planted import portattn as portattn

from portattn.compile.record_store import CompileStore, store
from portattn.config import current
from portattn.planning.registry import Registry
from portattn.worker.client import Worker

# Refuses dense_forward with three stages or more on sm_86 and sm_89, in the words of MLIR; dies of it on sm_80; takes
# everything else. It compiles what a request or a probe's program hands it, as far as that rule is concerned.
BUGGY = """\
#!{python}
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("serve", next(a for a in sys.argv if a.endswith("serve.py")))
serve = importlib.util.module_from_spec(spec)
spec.loader.exec_module(serve)
real = serve.answer

def wrong(arch, function, options):
    if function != "dense_forward" or options["num_stages"] < 3:
        return
    if arch == "80":
        print("python: /lib/Pipeline.cpp:77: void pipe(): Assertion `s < 3' failed.", file=sys.stderr, flush=True)
        os.abort()
    if arch in ("86", "89"):
        text = "kernel.py:34:25: error: 'ttg.async_copy' op has %d uses of %%41 in stage 2" % options["num_stages"]
        print(text, file=sys.stderr, flush=True)
        raise RuntimeError("PassManager::run failed")

FACTS = {{"scratchpad_bytes": 1024, "registers": 64, "spills": 0, "mma": 4, "wgmma": 8}}

def answer(request, say):
    with open({requests!r}, "a") as file:
        file.write(json.dumps(request) + "\\n")
    say({{"stage": "ttgir"}})
    arch = str(request["target"][1])
    if request["task"] == "compile":
        try:
            wrong(arch, request["signature"]["function"], request["signature"]["options"])
        except RuntimeError as error:
            return {{"ok": False, "stage": "ttgir", "kind": "RuntimeError", "message": str(error), "log": "trace"}}
        return {{"ok": True, "facts": FACTS}}
    from portattn.worker import probe_harness

    def compile(self, kernel, types, constants=None, divisible=None, options=None, env=None):
        wrong(arch, kernel.__name__, {{"num_stages": 1}} | dict(options or {{}}))
        return probe_harness.Code({{}}, dict(FACTS))

    probe_harness.Bench.compile = compile
    return real(request, say)

serve.answer = answer
serve.import_without_package()
serve.main()
"""


class Buggy:
    """The planted compiler: a program for Worker(python=…), and the requests that it got."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "requests.jsonl"
        self.path = folder / "buggy-compiler"
        self.path.write_text(BUGGY.format(python=sys.executable, requests=str(self.file)))
        self.path.chmod(0o755)

    def worker(self) -> Worker:
        return Worker(python=str(self.path))

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []


@pytest.fixture
def buggy(tmp_path: Path) -> Buggy:
    return Buggy(tmp_path)


@pytest.fixture
def worker(buggy: Buggy) -> Iterator[Worker]:
    with buggy.worker() as started:
        yield started


@pytest.fixture
def registry() -> Registry:
    return Registry.load()


@pytest.fixture
def incidents() -> CompileStore:
    """The store of this test's own settings, which the command line reads too."""
    return store(current())


@pytest.fixture
def triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed: the probe's program imports it")
