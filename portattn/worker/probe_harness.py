"""The interface of probe programs: compiling for a target and reporting a result. Child only.

A program under quirks/probes/ defines `probe(arm, bench)`. Arms: `control`, a similar kernel that works wherever the
compiler does; `off`, the kernel without the work-around; `on`, with it. An arm passes by returning and fails by
raising: the compiler's error, or `BugFound` for a bug that no compiler reports.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portattn.worker.own_kernels import load

ARMS = ("control", "off", "on")
# Evidence levels that a program can reach, as portattn.schema.quirk spells them.
COMPILES, LOWERED, EMULATED, RUNS = "compiles", "lowering-checked", "emulated", "runs"
_NPU_ADAPTER = "portattn.worker.ascend:compile_kernel"  # for programs run by hand, without a backend


class BugFound(Exception):
    """A probe saw the quirk's bug; the text describes it."""


class Missing(Exception):
    """A probe's need is missing on this machine: it saw nothing."""


@dataclass
class Code:
    """A compiled kernel: its texts by stage (ttir, ttgir, ptx and sass or amdgcn; linalg), facts as worker/compilers.py
    has them, and the types of its run-time arguments."""

    texts: dict[str, str]
    facts: dict[str, Any] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)

    def count(self, stage: str, word: str) -> int:
        return self.texts[stage].count(word)


class Bench:
    """A probe's target, and compiling for it.

    name     the target as portattn spells it, `rocm:gfx950`
    target   the same as Triton takes it: (backend, arch, lanes of a warp)
    version  of the compiler: (3, 6) for Triton 3.6.0
    passes   list of passes that triton-adapter-opt is given instead of its own (worker/ascend.py); empty for its own
    adapter  what compiles for the target (worker/compilers.py); empty where Triton's own GPU back ends do
    executor a Python with portattn and torch (for linalg also MLIR's programs), which executes code; empty for none
    path     what that Python imports from besides its own folders, as PYTHONPATH: a checkout, other packages
    level    evidence level that the probe reaches; a program that executes anything raises it"""

    def __init__(
        self,
        name: str,
        target: tuple[str, Any, int],
        enter: Callable[[str], None] = lambda stage: None,
        passes: str = "",
        executor: str = "",
        adapter: str = "",
        path: str = "",
    ) -> None:
        from portattn.worker import compilers

        self.name, self.target, self.passes, self.executor, self.adapter = name, target, passes, executor, adapter
        self.path = path
        self.version, self.level = compilers.VERSION, COMPILES
        self._enter, self._compilers = enter, compilers

    def at(self, name: str) -> Bench:
        """Return a bench for another target, for controls that this one cannot have."""
        return Bench(name, triton_target(name), self._enter, self.passes, self.executor, self.adapter, self.path)

    def compile(
        self,
        kernel: Any,
        types: Mapping[str, str],
        constants: Mapping[str, Any] | None = None,
        divisible: Sequence[str] | None = None,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Code:
        """Compile a jit function; the compiler's errors pass through.

        Args:
            types: run-time argument -> Triton type: `*fp16`, `i32`, `fp32`
            divisible: arguments known to be multiples of 16; by default every pointer
            env: variables for this compile only
        """
        pointers = tuple(name for name, kind in types.items() if kind.startswith("*"))
        signature = {
            "types": dict(types),
            "constants": dict(constants or {}),
            "divisible": tuple(pointers if divisible is None else divisible),
            "small": pointers,
            "options": {"num_warps": 4, "num_stages": 1} | dict(options or {}),
        }
        from portattn.worker import compilers

        with _set(env or {}):
            if self.adapter:
                facts, texts = compilers.load(self.adapter)(kernel, signature, self.target, self._enter, self.passes)
                return Code(texts, facts, dict(types))
            compiled = self._compilers.build(kernel, signature, self.target, self._enter)
            facts = self._compilers.read(compiled, self.target[1], full=True)
        texts = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
        if "cubin" in compiled.asm:
            texts["sass"] = self._compilers.machine_text(compiled)
        return Code(texts, facts, dict(types))

    def compile_file(
        self, path: str | os.PathLike[str], options: Mapping[str, Any] | None = None, stage: str = ""
    ) -> Code:
        """Compile a file with a stage's text (`.ttir`) by Triton itself; on an adapter's target without facts.

        stage  whose text it is taken for, by default its suffix's; Triton runs the later stages

        Raises Missing where this Triton cannot parse the text."""
        given = (os.fspath(path), self.target, dict(options or {}), self._enter, stage)
        try:
            compiled = self._compilers.build_file(*given)
        except RuntimeError as error:
            if str(error) != "Parse MLIR file failed.":
                raise
            # A text holds for the Triton that wrote it: operations and their syntax change from release to release.
            version = self._compilers.triton.__version__
            raise Missing(f"Triton {version} cannot read {os.path.basename(path)}, which another one wrote") from error
        facts = {} if self.adapter else self._compilers.read(compiled, self.target[1], full=True)
        return Code({name: text for name, text in compiled.asm.items() if isinstance(text, str)}, facts)

    def execute(
        self,
        code: Code,
        arguments: Mapping[str, Any],
        outputs: Sequence[str],
        grid: Sequence[int] = (1,),
        unchecked: Sequence[str] = (),
    ) -> dict[str, list[float]]:
        """Run compiled code on this machine's CPU by the backend's executor and return the outputs' values.

        arguments  by name in the kernel's order: numbers, and flat tensors as (type of an element, values)
        unchecked  checks of AMD's model (rocm/emulator/amdgpu/errors.py) that are left out; the others are on

        Raises:
            BugFound: a stray access, or a finding of the model's checks.
            Missing: it cannot run here.
            RuntimeError: the executor refuses the code.
        """
        if not self.executor:
            raise Missing("needs --executor PYTHON, a Python with portattn in it")
        given = {
            name: {"type": value[0], "values": list(value[1])} if isinstance(value, tuple) else value
            for name, value in arguments.items()
        }
        request = {
            "target": self.name,
            "grid": list(grid),
            "outputs": list(outputs),
            "arguments": given,
            "texts": code.texts,
            "facts": code.facts,
            "types": code.types,
            "unchecked": list(unchecked),
            "triton": self._compilers.triton.__version__,
        }
        self._enter("execute")
        # Not this child's path: it is the other Python's own that has torch.
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        if self.path:
            environment["PYTHONPATH"] = self.path
        command = [self.executor, "-c", "from portattn.testing import executor; executor.main()"]
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, env=environment, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the code cannot be executed: {done.stderr.strip()[-2000:]}")
        answer = json.loads(done.stdout)
        if "missing" in answer:
            raise Missing(answer["missing"])
        self.level = answer["level"]
        if answer.get("strays"):
            raise BugFound("; ".join(answer["strays"]))
        found: dict[str, list[float]] = answer["outputs"]
        return found


@contextlib.contextmanager
def _set(env: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def answer(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Run one arm: {"facts": {"level": …}}, with {"ok": False} and a description if it saw the quirk."""
    program = load(request["program"])
    backend, arch, lanes = request["target"]
    executor = request.get("executor", "")
    adapter = request.get("adapter", "")
    place = (backend, arch, lanes)
    passes, path = request.get("passes", ""), request.get("path", "")
    bench = Bench(request["name"], place, enter, passes, executor, adapter, path)
    enter("probe")
    try:
        getattr(program, request.get("function") or "probe")(request["arm"], bench)
    except BugFound as seen:
        text, trace = str(seen), traceback.format_exc()
        answer = {"ok": False, "stage": "probe", "kind": BugFound.__name__, "message": text, "log": trace}
    else:
        answer = {}
    return answer | {"facts": {"level": bench.level}, "toolchain": bench._compilers.triton.__version__}


def triton_target(name: str) -> tuple[str, Any, int]:
    """Return `rocm:gfx950` as Triton takes it, for runs by hand and controls.

    It reads the line `compiler_target = [...]` of the arch's file as JSON: this Python may lack a TOML reader."""
    known: dict[str, str] = {}
    for folder in _backend_folders():
        for path in glob.glob(os.path.join(glob.escape(folder), "*", "arches", "*.toml")):
            backend, _, file = os.path.relpath(path, folder).split(os.sep)
            known[f"{backend}:{os.path.splitext(file)[0]}"] = path
    if name in known:
        with open(known[name], encoding="utf-8") as text:
            found = re.search(r"^compiler_target = (\[.*\])", text.read(), re.MULTILINE)
        if found:
            kind, arch, lanes = json.loads(found.group(1))
            return kind, arch, lanes
    raise SystemExit(f"--target is {name!r}, but must be one of {', '.join(sorted(known))}")


def _backend_folders() -> list[str]:
    """Return the folders of portattn.backends without importing it, as its dependencies may be missing."""
    there = sys.modules.get("portattn.backends")  # in a worker's child it stands for the folder alone
    if there is not None:
        return list(there.__path__)
    spec = importlib.util.find_spec("portattn.backends")
    return list(spec.submodule_search_locations or ()) if spec else []


def main(probe: Callable[[str, Bench], None], target: str, about: str | None = None) -> None:
    """Run a program by hand: `python quirks/probes/cuda_0007.py off --target cuda:sm_100`. A failed arm exits 1."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm", choices=ARMS)
    parser.add_argument("--function", default=probe.__name__, help="another probe of the file; %(default)s by default")
    parser.add_argument("--target", default=target, help=f"{target} by default")
    parser.add_argument("--passes", default="", help="`old`: the list of triton-adapter-opt's passes before 3.2.0")
    parser.add_argument("--executor", default="", help="a Python with portattn, for probes that execute lowered code")
    parser.add_argument("--adapter", default="", help="what compiles for the target; by default portattn's own")
    chosen = parser.parse_args()
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    place = triton_target(chosen.target)
    adapter = chosen.adapter or (_NPU_ADAPTER if place[0] == "npu" else "")
    bench = Bench(chosen.target, place, passes=chosen.passes, executor=chosen.executor, adapter=adapter)
    version = bench._compilers.triton.__version__
    try:
        getattr(sys.modules["__main__"], chosen.function)(chosen.arm, bench)
    except BugFound as seen:
        sys.exit(f"FAIL {chosen.arm} on {chosen.target}, Triton {version}: {seen}")
    except Missing as missing:
        sys.exit(f"NOT RUN {chosen.arm} on {chosen.target}, Triton {version}: {missing}")
    print(f"PASS {chosen.arm} on {chosen.target}, Triton {version}")
