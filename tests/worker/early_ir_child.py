"""Run by test_worker_compiles.py in a process of its own: the beginning of a compile, with or without its IR made
early. Reads a request from its first argument, and prints in which order IR and the digest of Triton's files were made,
and under which key the kernel would be kept. The second argument is "early" or "plain"."""

# ruff: noqa: E402 - what serve.py makes importable comes after it

import contextlib
import json
import os
import sys
import threading
from typing import Any

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../portattn/worker"))
import serve  # type: ignore[import-not-found]

serve.import_without_package()
from portattn.worker import compilers

order: list[str] = []
made = threading.Event()


class Enough(Exception):
    """The first stage after the IR would begin."""


def watch(kind: Any) -> None:
    make = kind.make_ir

    def make_ir(self: Any, target: Any, options: Any, codegen_fns: Any, module_map: Any, context: Any) -> Any:
        order.append("ir")
        try:
            return make(self, target, options, codegen_fns, module_map, context)
        finally:
            made.set()

    kind.make_ir = make_ir


def digest() -> None:
    made.wait(10.0)  # no IR comes before it in a plain compile
    order.append("digest")


def enter(stage: str) -> None:
    if stage == "ttgir":
        raise Enough


with open(sys.argv[1], encoding="utf-8") as file:
    request = json.load(file)
watch(compilers.ASTSource)
if "gluon" in sys.argv[2:]:
    from triton.experimental.gluon._runtime import GluonASTSource

    watch(GluonASTSource)
if sys.argv[2] == "early":
    compilers._reading = threading.Thread(target=digest)
    compilers._reading.start()
with contextlib.suppress(Enough):
    compilers.compile_signature(request, enter)
print(json.dumps({"order": order, "kept": sorted(os.listdir(os.environ["TRITON_CACHE_DIR"]))}))
