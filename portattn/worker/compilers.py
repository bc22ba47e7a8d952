"""Where Triton's Python API differs between versions: building a source, its attributes, its target and options.

Covers community Triton 3.2 to 3.9 and triton-ascend 3.2.0, and Gluon's functions as of Triton 3.6. Runs in a child
process; standard library and Triton only.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import platform
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from portattn.worker import adapters, installed_packages, resources
from portattn.worker.triton_digest import digest

try:
    from triton.compiler import ASTSource
except ImportError:  # triton-ascend 3.2 exports it one level down only
    from triton.compiler.compiler import ASTSource

VERSION = tuple(int(part) for part in triton.__version__.split("+")[0].split(".")[:2])


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python, and of every distribution that claims triton/ or another of the packages, by name."""
    found = {"python": platform.python_version()}
    claims = [claim for package in ("triton", *packages) for claim in installed_packages.claiming(package)]
    for name, dist in sorted(claims, key=lambda claim: claim[0]):
        found.setdefault(name.replace("_", "-").lower(), str(dist.version))
    return found


_reading: threading.Thread | None = None  # Triton's own files
# How long Python's global lock is kept while they are read: that thread needs it for a moment after each MiB.
SWITCH_SECONDS = 0.00005


def read_own_files() -> None:
    """Have a thread compute the digest of Triton's own files, which is part of every key in its cache. It reads 0.4 GB,
    mostly without Python's global lock. A compile waits for it; Triton keeps the digest for the process."""
    global _reading
    find = digest()
    if find is not None:
        _reading = threading.Thread(target=find, name="portattn-digest", daemon=True)
        _reading.start()


def compile_signature(request: dict[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Compile one Signature (as plain data) for one target; facts about the machine code come back.

    A signature with a `file` is of a kernel that is not portattn's. The request's `facts`: basic, full (registers,
    spills, instructions), text (the assembly), or all.

    `enter(stage)` is called before each compiler stage. Whatever the compiler raises passes through.
    """
    signature, target = request["signature"], tuple(request["target"])
    if "file" in signature:  # no kernel of portattn's own: what fails before `parse` is no compiler's doing
        from portattn.worker import own_kernels

        function = own_kernels.find(*(signature[name] for name in ("module", "function", "file", "absent")))
        enter("parse")
    else:
        enter("parse")
        function = getattr(importlib.import_module(signature["module"]), signature["function"])
    wanted = request.get("facts")
    text = wanted in ("text", "all")
    if request.get("adapter"):
        enter("adapter")
        adapter = adapters.load(request["adapter"])
        facts, texts = adapter(function, signature, target, enter, request.get("passes", ""))
        return {"facts": facts | (texts if text else {}), "toolchain": triton.__version__}
    kernel = build(function, signature, target, enter)
    enter("read")
    facts = resources.read(kernel, target[1], full=wanted in ("full", "all"))
    if text:
        facts |= resources.text(kernel)
    return {"facts": facts, "toolchain": triton.__version__}


def build(function: Any, signature: dict[str, Any], target: tuple[str, Any, int], enter: Callable[[str], None]) -> Any:
    """Triton's compiled kernel of a jit function, for a GPU: (backend, arch, lanes of a warp)."""
    return _compiled(source(function, signature, target[0]), target, signature["options"], enter)


def build_file(path: str, target: tuple[str, Any, int], options: dict[str, Any], enter: Callable[[str], None]) -> Any:
    """Triton's compiled kernel of a file that holds a stage's text; its suffix is the stage's name, as in `.ttir`."""
    return _compiled(path, target, options, enter)


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
    """Have a source make its IR now, while the digest is computed. `triton.compile` looks into its cache first, for
    which it needs the digest, and then asks for the IR: it gets this one. As in Triton 3.6 to 3.9; other releases make
    it when they ask."""
    from triton._C.libtriton import ir
    from triton.compiler.compiler import make_backend

    make = what.make_ir
    if list(inspect.signature(make).parameters) != _MAKE_IR:
        return
    digest_of_source = what.hash()
    what.hash = lambda: digest_of_source  # of a source whose IR is made it is another one
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
    """An ASTSource of this Triton version for one Signature."""
    names = function.arg_names
    types = {name: signature["types"].get(name, "constexpr") for name in names}
    constants = {name: signature["constants"][name] for name in names if name in signature["constants"]}
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
    """A descriptor's type as this release writes it: before 3.6 a layout knows nothing of clusters of programs."""
    return kind.replace(", cga_layout=[]", "") if VERSION < (3, 6) else kind


def _attributes(
    function: Any, types: dict[str, str], constants: dict[str, Any], signature: dict[str, Any], backend: str
) -> Any:
    """Return the arguments' attributes: multiples of 16, and on AMD tensors that 32-bit offsets reach.

    In Triton's own form at a kernel's call, empty entries and all: they are part of its cache key, and a call is to
    find the code compiled here.
    """
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
    """Whether Triton looks at an argument's alignment, and so lists it even where there is nothing to say."""
    unaligned = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
    return not unaligned and (kind.startswith("*") or kind in ("i32", "i64", "u32", "u64"))


@contextlib.contextmanager
def _announced_stages(target: GPUTarget, enter: Callable[[str], None]) -> Iterator[None]:
    """Have the backend's stages announce themselves inside the block.

    The backend's class is restored afterwards: a later compile that does not come through here must not announce its
    stages as this request's.
    """
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
    """Keep the relocatable object if ROCm's linker, which Triton before 3.5 calls in the last AMD step, is missing:
    registers, spills and LDS are in the assembly already, and nothing is run."""
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
