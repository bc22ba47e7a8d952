"""Compile with any Triton: its Python API differs between versions. What the machine code uses is read without a GPU.

Covers community Triton 3.2 to 3.9 and triton-ascend 3.2.0, and Gluon as of Triton 3.6. Standard library and Triton
only.
"""

from __future__ import annotations

import base64
import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from portattn.worker import installed_packages, machine_code
from portattn.worker.installed_packages import digest

_AMD_NUMBERS = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "spilled_registers": r"\.vgpr_spill_count:\s+(\d+)",
    "scratch_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
    "scalar_registers": r"\.sgpr_count:\s+(\d+)",
    "occupancy": r"; Occupancy:\s*(\d+)",
}
_PTXAS_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
_PTX_MATRIX = {"wgmma": r"\bwgmma\.mma_async", "tcgen05": r"\btcgen05\.mma", "mma": r"\bmma\.sync"}
_AMD_MATRIX = {"mfma": r"^\s+v_s?mfma_", "wmma": r"^\s+v_s?wmma_"}


def read(kernel: Any, arch: int | str, full: bool) -> dict[str, int | str]:
    """Return facts of a compiled kernel; without `full` only its metadata's, which costs nothing."""
    facts: dict[str, int | str] = {
        "scratchpad_bytes": int(kernel.metadata.shared),
        "num_warps": kernel.metadata.num_warps,
    }
    if not full:
        return facts
    if "ptx" in kernel.asm:
        ptx = kernel.asm["ptx"]
        facts |= count(ptx, _PTX_MATRIX) | ptxas_report(ptx, int(arch))
    else:
        facts |= amd_report(kernel.asm["amdgcn"])
    if number := machine_code.instructions_a_megaflop(machine_text(kernel)):
        facts["instructions_a_megaflop"] = number
    return facts


def machine_text(kernel: Any) -> str:
    """Return the machine code's text: amdgcn, or SASS by the wheel's nvdisasm; empty if it cannot read the code."""
    if "amdgcn" in kernel.asm:
        return str(kernel.asm["amdgcn"])
    tool = os.path.join(_nvidia_programs(), "nvdisasm")
    if not os.path.exists(tool):
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(kernel.asm["cubin"])
        done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else ""


def _nvidia_programs() -> str:
    import triton.backends.nvidia as nvidia

    return os.path.join(next(iter(nvidia.__path__)), "bin")


def assembly_text(kernel: Any) -> dict[str, int | str]:
    """The assembly text that is run elsewhere: `amdgcn`; or `ptx`, and the bytes of `scratch` that it wants."""
    if "amdgcn" in kernel.asm:
        return {"amdgcn": kernel.asm["amdgcn"]}
    # Triton 3.2 has no scratch memory, 3.3 and 3.4 none for profiles.
    sizes = (getattr(kernel.metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile"))
    return {"ptx": kernel.asm["ptx"], "scratch": sum(int(size or 0) for size in sizes)}


def count(text: str, patterns: dict[str, str]) -> dict[str, int | str]:
    found = {name: len(re.findall(pattern, text, re.MULTILINE)) for name, pattern in patterns.items()}
    return {name: number for name, number in found.items() if number}


def amd_report(text: str) -> dict[str, int | str]:
    facts = count(text, _AMD_MATRIX)
    for name, pattern in _AMD_NUMBERS.items():
        match = re.search(pattern, text)
        if match:
            facts[name] = int(match.group(1))
    # Scalar registers spill to vector lanes, not to memory: only vector spills and scratch cost memory traffic.
    facts["spills"] = int(facts.get("spilled_registers", 0)) * 4 + int(facts.get("scratch_bytes", 0))
    return facts


def ptxas_report(ptx: str, arch: int) -> dict[str, int | str]:
    """Return registers and spilled bytes as reported by the ptxas that Triton would call."""
    target = re.search(r"^\.target\s+(sm_\w+)", ptx, re.MULTILINE)
    assert target, "PTX names its target"
    for tool in ptxas_candidates(arch):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "kernel.ptx")
            with open(path, "w") as file:
                file.write(ptx)
            done = subprocess.run(
                [tool, "-v", f"--gpu-name={target.group(1)}", path, "-o", os.path.join(folder, "kernel.o")],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
        if done.returncode == 0:
            break
    else:
        raise RuntimeError(f"no ptxas of this Triton assembles its own PTX for {target.group(1)}: {done.stderr[-500:]}")
    spills, registers = _PTXAS_SPILLS.search(done.stderr), _PTXAS_REGISTERS.search(done.stderr)
    facts: dict[str, int | str] = {"spills": sum(map(int, spills.groups())) if spills else 0}
    if registers:
        facts["registers"] = int(registers.group(1))
    if "serialized" in done.stderr:  # C7510 and its like: ptxas could not keep wgmma asynchronous
        facts["serialized_wgmma"] = len(re.findall("serialized", done.stderr))
    return facts


def ptxas_candidates(arch: int) -> list[str]:
    """Return the ptxas programs to try: the user's, then the wheel's, in Triton's order."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])
    first_new = 90 if version >= (3, 9) else 100  # the first arch that Triton sends to ptxas-blackwell
    names = ["ptxas-blackwell", "ptxas"] if arch >= first_new else ["ptxas", "ptxas-blackwell"]
    tools = [os.environ.get("TRITON_PTXAS_PATH", "")] + [os.path.join(_nvidia_programs(), name) for name in names]
    return [tool for tool in tools if tool and os.path.exists(tool)]


Adapter = Callable[..., "tuple[dict[str, Any], dict[str, str]]"]


def load(name: str) -> Adapter:
    """Return the adapter of `package.module:function` or `/path/FILE.py:function`."""
    place, _, function = name.rpartition(":")
    if not place.endswith(".py"):
        found: Adapter = pkgutil.resolve_name(name)
        return found
    # One module for a path: Triton caches functions by their modules.
    module_name = "portattn_adapter_" + hashlib.sha256(os.path.abspath(place).encode()).hexdigest()[:16]
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, place)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = getattr(module, function)
    return found


try:
    from triton.compiler import ASTSource
except ImportError:  # triton-ascend 3.2 exports it one level down only
    from triton.compiler.compiler import ASTSource

VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return versions of Python and of every distribution that provides triton/ or one of the packages, by name."""
    found = {"python": platform.python_version()}
    claims = [claim for package in ("triton", *packages) for claim in installed_packages.claiming(package)]
    for name, dist in sorted(claims, key=lambda claim: claim[0]):
        found.setdefault(name.replace("_", "-").lower(), str(dist.version))
    return found


_reading: threading.Thread | None = None  # Triton's own files
# How long Python's global lock is kept while they are read: that thread needs it for a moment after each MiB.
SWITCH_SECONDS = 0.00005


def read_own_files() -> None:
    """Compute the digest of Triton's own files (0.4 GB, part of its cache keys) in a thread; compiles wait for it."""
    global _reading
    find = digest()
    if find is not None:
        _reading = threading.Thread(target=find, name="portattn-digest", daemon=True)
        _reading.start()


def compile_signature(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Compile one Signature (as plain data) for one target and return facts about the machine code.

    A signature with a `root` is of a kernel outside portattn; with a `case` its arguments' values specialise it. The
    request's `facts`: basic, full (registers, spills, instructions), text (the assembly), all, code (full, and the
    machine code's text), or object (the assembly, and the code object in base64). `enter(stage)` is called before each
    compiler stage."""
    signature, target = request["signature"], tuple(request["target"])
    if "root" in signature:  # another package's kernel: a failure before `parse` is not the compiler's
        from portattn.worker import own_kernels

        function = own_kernels.kernel_of(signature["root"], signature["function"])
        if "case" in signature:
            signature = own_kernels.signature_of(function, signature["case"])
        if not request.get("adapter"):  # a compiler of its own, which Triton does not know
            enter("options")
            check_options(signature["options"], GPUTarget(*target))
        enter("parse")
    else:
        enter("parse")
        function = getattr(importlib.import_module(signature["module"]), signature["function"])
    # The arguments that are no constants after specialisation: the code takes these.
    own: dict[str, Any] = {"arguments": ",".join(signature["types"])} if "case" in request["signature"] else {}
    wanted = request.get("facts")
    text = wanted in ("text", "all", "object")
    if request.get("adapter"):
        enter("adapter")
        adapter = load(request["adapter"])
        facts, texts = adapter(function, signature, target, enter, request.get("passes", ""))
        return {"facts": facts | (texts if text else {}) | own, "toolchain": triton.__version__}
    kernel = build(function, signature, target, enter)
    enter("read")
    facts = own | read(kernel, target[1], full=wanted in ("full", "all", "code"))
    if text:
        facts |= assembly_text(kernel)
    if wanted == "code":
        facts["code"] = machine_text(kernel)
    if wanted == "object":
        facts["object"] = base64.b64encode(kernel.asm["hsaco"]).decode()
    return {"facts": facts, "toolchain": triton.__version__}


def check_options(options: dict[str, Any], chip: GPUTarget) -> None:
    """Raise ValueError for an option that the compiler of a chip does not know, as a launch does: compiles ignore it.

    An option of another backend or release is refused too."""
    from triton.compiler.compiler import make_backend

    known = sorted(vars(make_backend(chip).parse_options({})))
    for name, value in options.items():
        if name not in known:
            compiler = f"triton {triton.__version__} for {chip.backend}"
            near = "".join(f" (did you mean {one}?)" for one in difflib.get_close_matches(name, known, 1))
            raise ValueError(f"{name} = {value!r} is no option of {compiler}{near}, which takes {', '.join(known)}")


def build(function: Any, signature: dict[str, Any], target: tuple[str, Any, int], enter: Callable[[str], None]) -> Any:
    return _compiled(source(function, signature, target[0]), target, signature["options"], enter)


def build_file(
    path: str, target: tuple[str, Any, int], options: dict[str, Any], enter: Callable[[str], None], stage: str = ""
) -> Any:
    """Compile a file that holds a stage's text; `stage` is by default its suffix, as in `.ttir`."""
    if not stage or path.endswith(f".{stage}"):
        return _compiled(path, target, options, enter)
    with tempfile.TemporaryDirectory(prefix="portattn-stage-") as folder:  # Triton reads the stage off the suffix
        renamed = os.path.join(folder, f"{os.path.splitext(os.path.basename(path))[0]}.{stage}")
        shutil.copyfile(path, renamed)
        return _compiled(renamed, target, options, enter)


def _compiled(
    what: ASTSource | str, target: tuple[str, Any, int], options: dict[str, Any], enter: Callable[[str], None]
) -> Any:
    chip = GPUTarget(*target)
    if _reading is not None:
        if _reading.is_alive() and not isinstance(what, str):
            with contextlib.suppress(Exception):  # Triton's own compile raises it again
                _make_ir_ahead(what, chip, options)
        _reading.join()
    if chip.backend == "hip":
        _link_without_rocm()
    with _announced_stages(chip, enter):
        return triton.compile(what, target=chip, options=options)


_MAKE_IR = ["target", "options", "codegen_fns", "module_map", "context"]


def _make_ir_ahead(what: ASTSource, chip: GPUTarget, options: dict[str, Any]) -> None:
    """Make a source's IR now, while the digest is computed, and hand it out when `triton.compile` asks (3.6 to 3.9)."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    make = what.make_ir
    if list(inspect.signature(make).parameters) != _MAKE_IR:
        return
    digest_of_source = what.hash()
    what.hash = lambda: digest_of_source  # after make_ir a source's hash differs
    backend = make_backend(chip)
    chosen = backend.parse_options(dict(options, **what.parse_options()))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        made = [make(chip, chosen, backend.get_codegen_implementation(chosen), backend.get_module_map(), context)]
    finally:
        sys.setswitchinterval(before)

    def make_ir(target: Any, options: Any, *rest: Any, _keep: Any = context) -> Any:
        return made.pop() if made and (target, options) == (chip, chosen) else make(target, options, *rest)

    what.make_ir = make_ir


def source(function: Any, signature: dict[str, Any], backend: str) -> ASTSource:
    names = function.arg_names
    types = {name: signature["types"].get(name, "constexpr") for name in names}
    constants = {name: signature["constants"][name] for name in names if name in signature["constants"]}
    made = getattr(sys.modules.get(function.fn.__module__), "with_functions", None)
    if made is not None:  # constants of portattn's kernels that are programs' texts
        constants = made(constants)
    attributes = _attributes(function, types, constants, signature, backend)
    if VERSION < (3, 3):
        run_time = {name: kind for name, kind in types.items() if kind != "constexpr"}
        return ASTSource(function, signature=run_time, constants=constants, attrs=attributes)
    if getattr(function, "is_gluon", bool)():
        from triton.experimental.gluon._runtime import GluonASTSource

        types = {name: _spelled(kind) for name, kind in types.items()}
        # Where Triton is called it gives places of arguments; names are looked up in other ways between releases.
        by_place = {(names.index(name),): value for name, value in constants.items()}
        return GluonASTSource(function, types, by_place, attributes)
    return ASTSource(function, signature=types, constexprs=constants, attrs=attributes)


def _spelled(kind: str) -> str:
    """Return a descriptor's type without the cluster layout that releases before 3.6 do not know."""
    return kind.replace(", cga_layout=[]", "") if VERSION < (3, 6) else kind


def _attributes(
    function: Any, types: dict[str, str], constants: dict[str, Any], signature: dict[str, Any], backend: str
) -> Any:
    """Return the arguments' attributes: multiples of 16, and on AMD tensors that 32-bit offsets reach.

    They have the form of a kernel call, empty entries too: they are part of Triton's cache key."""
    names = function.arg_names
    small = set(signature["small"]) if backend == "hip" else set()
    if VERSION >= (3, 3):
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, name in enumerate(names):
            parameter = function.params[place]
            known = [["tt.divisibility", 16]] if name in signature["divisible"] else []
            known += [["tt.pointer_range", 32]] if name in small else []
            if types[name] == "constexpr":
                # Until 3.6 a constant's own text was looked at for the letters that stand for such knowledge.
                listed = VERSION >= (3, 7) or isinstance(constants.get(name), str)
            else:
                listed = bool(known) or _looked_at(parameter, types[name])
            if listed:
                attributes[(place,)] = known
        return attributes
    divisible = [names.index(name) for name in signature["divisible"]]
    from triton.backends.compiler import AttrsDescriptor

    properties = {"tt.divisibility": divisible, "tt.equal_to": []}
    kind = "AttrsDescriptor"
    if backend == "hip":
        importlib.import_module("triton.backends.amd.compiler")  # registers the class that the name means
        kind = "HIPAttrsDescriptor"
        properties["tt.pointer_range"] = [names.index(name) for name in signature["small"]]
    return AttrsDescriptor.from_dict({"arg_properties": properties, "cls": kind})


def _looked_at(parameter: Any, kind: str) -> bool:
    """Return whether Triton inspects an argument's alignment, and so lists it even without a result."""
    unaligned = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    return not unaligned and (kind.startswith("*") or kind in ("i32", "i64", "u32", "u64"))


@contextlib.contextmanager
def _announced_stages(target: GPUTarget, enter: Callable[[str], None]) -> Iterator[None]:
    """Make the backend's stages call `enter` inside the block; later compiles must not report as this request's."""
    from triton.compiler.compiler import make_backend

    kind = type(make_backend(target))
    original = kind.add_stages

    def add_stages(self: Any, stages: dict[str, Any], *arguments: Any) -> Any:
        result = original(self, stages, *arguments)
        for name, run in list(stages.items()):
            stages[name] = _announced(name, run, enter)
        return result

    kind.add_stages = add_stages
    try:
        yield
    finally:
        kind.add_stages = original


def _announced(name: str, run: Callable[..., Any], enter: Callable[[str], None]) -> Callable[..., Any]:
    def stage(*arguments: Any) -> Any:
        enter(name)
        return run(*arguments)

    return stage


def _link_without_rocm() -> None:
    """Keep the object file if ROCm's linker, which Triton before 3.5 calls last, is missing: nothing is run."""
    from triton.backends import backends

    compiler = backends["amd"].compiler
    if not hasattr(compiler, "path_to_rocm_lld"):
        return
    try:
        compiler.path_to_rocm_lld()
    except (Exception, SystemExit):  # noqa: BLE001 - versions differ in what they raise where no ROCm is installed
        from triton._C.libtriton import amd

        compiler.make_hsaco = staticmethod(lambda src, metadata, options: amd.assemble_amdgcn(src, options.arch, ""))
        compiler.hash = lambda self: f"unlinked-{self.target}"
