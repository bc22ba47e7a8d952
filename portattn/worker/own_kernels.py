"""Load programs by their file, and a kernel out of another package's or a user's module; note a process's launches.

The file of a kernel often holds its caller too, and so imports torch; the file of a test imports pytest, and a package
asks for a device. A lab environment has none of them. Of each module on a kernel's way only the statements run that the
kernel needs. Of a statement that fails the names are stand-ins: a kernel that reads one of them fails in the compiler,
which names it. Runs in a child process; standard library and Triton only.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

# Before the name of a user's module that would displace a module of this process.
PRIVATE, TAKEN = "portattn_kernel_", {*sys.stdlib_module_names, "triton", "torch", "numpy"}


def load(path: str) -> ModuleType:
    folder, name = os.path.dirname(os.path.abspath(path)), os.path.splitext(os.path.basename(path))[0]
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python program")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton reads a kernel's source through its module
    spec.loader.exec_module(module)
    return module


def root_of(module: str, file: str) -> str | None:
    """Return the folder from which a file imports under that module name; None if its path differs."""
    parts = module.split(".")
    folder, name = os.path.split(os.path.abspath(file))
    stem = os.path.splitext(name)[0]
    if stem != "__init__" and parts.pop() != stem:
        return None
    for part in reversed(parts):
        folder, name = os.path.split(folder)
        if name != part:
            return None
    return folder


class StandIn:
    """Stands for what a failed statement binds, and holds nothing."""

    # Triton refuses a kernel with any other object as a default value of an argument, even of one that is given.
    __triton_builtin__ = True

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if "_semantic" in named or "_builder" in named:
            raise NameError(f"the kernel calls {self!r}")
        return StandIn(f"{self._name}()")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self._name}>"


class _Source:
    """A module's statements by the names that they bind; each runs once, when one of its names is needed."""

    def __init__(self, module: ModuleType, file: str) -> None:
        with open(file, "rb") as text:  # with its mark or line of encoding
            tree = ast.parse(text.read(), file)
        self.module, self.file, self.flags = module, file, 0
        self.binders: dict[str, list[ast.stmt]] = {}
        self.stars: list[ast.ImportFrom] = []
        self._done: set[int] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                node.decorator_list = [one for one in node.decorator_list if _is_jit(one)]
        for statement in (one for whole in tree.body for one in _single(whole)):
            if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
                self.flags |= getattr(__future__, statement.names[0].name).compiler_flag
            elif isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            else:
                for name in _bound(statement):
                    self.binders.setdefault(name, []).append(statement)

    def need(self, name: str) -> None:
        if name in ("triton", "tl") and name not in vars(self.module):
            # Packages bind these to placeholders if they see no device.
            vars(self.module)[name] = importlib.import_module("triton" if name == "triton" else "triton.language")
        for statement in self.binders.get(name, ()):
            if id(statement) not in self._done and name not in ("triton", "tl"):
                self._done.add(id(statement))
                for node in ast.walk(statement):
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                        self.need(node.id)
                self.need("tl")  # the interpreter asks for it in the globals of each function
                self._run(statement)
        if name not in self.binders and name not in vars(self.module):
            for star in self.stars:
                one = ast.ImportFrom(star.module, [ast.alias(name)], star.level)
                self._run(ast.fix_missing_locations(ast.copy_location(one, star)), False)

    def get(self, name: str) -> Any:
        if not name.startswith("__"):
            self.need(name)
        if name not in vars(self.module):
            raise AttributeError(f"{self.module.__name__} has no {name}")
        return vars(self.module)[name]

    def _run(self, statement: ast.stmt, stands_in: bool = True) -> None:
        code = compile(ast.Module([statement], []), self.file, "exec", self.flags, dont_inherit=True)
        try:
            exec(code, vars(self.module))
        except Exception as error:  # noqa: BLE001 - a stand-in tells it, if a kernel reads the name after all
            for name in _bound(statement) if stands_in else ():
                place = f"{self.file}:{statement.lineno}: {type(error).__name__}: {error}"
                vars(self.module).setdefault(name, StandIn(f"{name} ({place})"))


def _is_jit(decorator: ast.expr) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    return getattr(name, "attr", getattr(name, "id", "")) == "jit"


def _single(statement: ast.stmt) -> Iterator[ast.stmt]:
    """Split an import of several names, so that a missing one does not take the others along."""
    if not isinstance(statement, (ast.Import, ast.ImportFrom)):
        yield statement
        return
    for alias in statement.names:
        one: ast.stmt = ast.Import([alias])
        if isinstance(statement, ast.ImportFrom):
            one = ast.ImportFrom(statement.module, [alias], statement.level)
        yield ast.copy_location(one, statement)


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    found = []
    for node in ast.walk(statement):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, ast.alias):
            found.append(node.asname or node.name.partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


class _Foreign(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of the packages that kernels are taken out of, in the folder of the last kernel."""

    def __init__(self) -> None:
        self.folder, self.tops = "", set[str]()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        own = name.partition(".")[0] in self.tops
        known = name if path else name.removeprefix(PRIVATE)
        spec = importlib.machinery.PathFinder.find_spec(known, path or [self.folder]) if own else None
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.name, spec.loader = name, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Leave it to Python: Triton reads names of a module only where its type is ModuleType itself."""

    def exec_module(self, module: ModuleType) -> None:
        source = _Source(module, inspect.getfile(module))
        vars(module).update(__source__=source, __getattr__=source.get)


class _Neighbours(importlib.abc.MetaPathFinder):
    """Finds the modules beside a kernel's own, unless packages are installed there; the last finder that is asked."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if path or any(one.endswith(".dist-info") for one in os.listdir(_foreign.folder)):
            return None
        _foreign.tops.add(name)
        return _foreign.find_spec(name)


_foreign, _neighbours = _Foreign(), _Neighbours()


def kernel_of(root: str, path: str) -> Any:
    """Return the jit function `package.module:function` of a folder; under the interpreter an interpreted function.

    Raises ImportError or AttributeError without it, and TypeError if it is no jit function."""
    module, _, name = path.partition(":")
    module = PRIVATE * (module.partition(".")[0] in TAKEN) + module
    top = module.partition(".")[0]
    if _foreign.folder != root or top not in _foreign.tops:
        for known in [one for one in sys.modules if one.partition(".")[0] in {*_foreign.tops, top}]:
            del sys.modules[known]
        _foreign.folder, _foreign.tops = root, {top}
    if _foreign not in sys.meta_path:
        sys.meta_path[:] = [_foreign, *sys.meta_path, _neighbours]
    kernel = getattr(importlib.import_module(module), name)
    if isinstance(kernel, StandIn):
        raise ImportError(f"no kernel: {kernel!r}")
    while hasattr(getattr(kernel, "fn", None), "arg_names"):  # an autotuner, of a call and not of a decorator
        kernel = kernel.fn
    if not hasattr(kernel, "arg_names"):
        raise TypeError(f"{path} of {root} is a {type(kernel).__name__}, and no @triton.jit function")
    return kernel


@contextlib.contextmanager
def loops_of_tensors(names: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Make `range` count in Triton's int32 for functions of these globals; the interpreter's counts in Python's int."""

    def count(*bounds: Any) -> Iterator[Any]:
        from triton.runtime import interpreter

        return map(interpreter._implicit_cvt, range(*bounds))

    changed = [one for one in names if "range" not in one]
    for one in changed:
        one["range"] = count
    try:
        yield
    finally:
        for one in changed:
            del one["range"]


def modules_of_kernels() -> list[dict[str, Any]]:
    return [vars(one) for one in sys.modules.values() if "__source__" in vars(one)]


def describe(request: Mapping[str, Any], enter: Callable[[str], None]) -> dict[str, Any]:
    """Return facts of a kernel: its arguments' names, the names with a default, and a digest of its source."""
    kernel = kernel_of(request["root"], request["function"])
    parameters = inspect.signature(kernel.fn).parameters
    optional = [name for name, one in parameters.items() if one.default is not inspect.Parameter.empty]
    texts: dict[str, str] = {}
    _read(kernel.fn, texts)
    source = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    return {"facts": {"arguments": ",".join(parameters), "optional": ",".join(optional), "source": source}}


def _read(function: Any, texts: dict[str, str]) -> None:
    """Collect the source of a function and of all jit functions that it calls, and its constants' values."""
    text = textwrap.dedent(inspect.getsource(function))
    text = text[re.search(r"^def\s", text, re.MULTILINE).start() :]  # type: ignore[union-attr]
    texts[f"{function.__module__}.{function.__qualname__}"] = text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = function.__globals__.get(node.value.id)
            value = getattr(owner, node.attr, None) if "__source__" in getattr(owner, "__dict__", ()) else None
        else:
            value = function.__globals__.get(node.id) if isinstance(node, ast.Name) else None
        called = getattr(value, "fn", None)
        if inspect.isfunction(called) and called.__module__.partition(".")[0] != "triton":
            if f"{called.__module__}.{called.__qualname__}" not in texts:
                _read(called, texts)
        elif value is not None and not callable(value) and not isinstance(value, (ModuleType, StandIn)):
            texts[f"{function.__module__}.{ast.unparse(node)}"] = repr(value)


def constant_of(value: Any) -> Any:
    """Return a constant as kernels take it: `tl.bfloat16` is Triton's type, a list a tuple."""
    if isinstance(value, list):
        return tuple(map(constant_of, value))
    if isinstance(value, str) and re.fullmatch(r"tl\.\w+", value):
        return getattr(importlib.import_module("triton.language"), value[3:])
    return value


def signature_of(kernel: Any, case: Mapping[str, Any]) -> dict[str, Any]:
    """Return a launch's signature (worker/compilers.py), specialised by the arguments' values as Triton does."""
    parameters = {one.name: one for one in kernel.params}
    defaults = {name: one.default for name, one in parameters.items() if one.has_default}
    constants = {name: getattr(value, "value", value) for name, value in defaults.items()}
    constants |= {name: constant_of(value) for name, value in case["constants"].items()}
    types, divisible = {}, []
    for name in kernel.arg_names:
        kind, value = case["types"].get(name), case["values"].get(name)
        whole, plain = isinstance(value, int) and not isinstance(value, bool), parameters[name]
        if kind == "none":
            constants[name] = None
        elif kind and whole and not kind.startswith("*") and value == 1 and not plain.do_not_specialize:
            constants[name] = 1
        elif kind:
            types[name] = kind
            aligned = name not in case["unaligned"] if kind.startswith("*") else whole and value % 16 == 0
            if aligned and not (plain.do_not_specialize or plain.do_not_specialize_on_alignment):
                divisible.append(name)
            constants.pop(name, None)
    pointers = [name for name, kind in types.items() if kind.startswith("*")]
    options = {"num_warps": 4} | case["options"]
    return {"types": types, "constants": constants, "divisible": divisible, "small": pointers, "options": options}


# Notes of a process's launches. The process is a user's: what fails here must not end it.
MOST_ELEMENTS = 1 << 24  # of one tensor, from its first to its last: a model of a chip takes minutes for far less
ALL_VALUES = 256  # elements of a tensor of whole numbers that a note keeps; of a larger one it keeps the range
LARGEST = 65504.0  # of float16: a range of larger numbers is not noted
IGNORED = ("debug", "instrumentation_mode", "stream", "grid", "warmup")  # keywords of a launch that are no options
DTYPES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5", "float8_e4m3fnuz": "fp8e4b8", "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint8": "u8", "bool": "i1",
}  # fmt: skip


class Recorder(importlib.abc.MetaPathFinder):
    """Notes each specialisation of each kernel that is launched, as a line of JSON, at most `most` of a kernel.

    A finder: it changes Triton's modules as they are imported."""

    def __init__(self, path: str, most: int) -> None:
        self.path, self.most = path, most
        self.seen: dict[str, set[str]] = {}
        self.busy = False
        self.changes = {"triton.runtime.jit": self._functions, "triton.runtime.interpreter": self._functions,
                        "triton.runtime.autotuner": self._autotuner}  # fmt: skip

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        change = self.changes.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if change else None
        if change is not None and spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                change(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _functions(self, module: ModuleType) -> None:
        for name in ("JITFunction", "InterpretedFunction"):
            kind = getattr(module, name, None)
            if kind is not None and kind.__module__ == module.__name__:
                kind.run = self._noted(kind.run)

    def _autotuner(self, module: Any) -> None:
        """Leave trials out; under the interpreter, where none can be timed, take the first configuration."""
        bench, run = module.Autotuner._bench, module.Autotuner.run

        def quiet(tuner: Any, *arguments: Any, **named: Any) -> Any:
            self.busy = True
            try:
                return bench(tuner, *arguments, **named)
            finally:
                self.busy = False

        def first(tuner: Any, *arguments: Any, **named: Any) -> Any:
            kernel = tuner.fn
            while not hasattr(kernel, "rewrite") and hasattr(kernel, "fn"):
                kernel = kernel.fn
            if hasattr(kernel, "rewrite"):
                tuner.configs = tuner.configs[:1]
            return run(tuner, *arguments, **named)

        module.Autotuner._bench, module.Autotuner.run = quiet, first

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any) -> Any:
            def launch() -> Any:
                with loops_of_tensors([kernel.fn.__globals__] if hasattr(kernel, "rewrite") else []):
                    return run(kernel, *arguments, grid=grid, warmup=warmup, **named)

            if self.busy or warmup:
                return launch()
            try:
                note, tensors = note_of(kernel, arguments, named, grid)
                whole = {k: (v == 1, v % 16 == 0) for k, v in note["values"].items() if isinstance(v, int)}
                key = json.dumps([whole, *(note[k] for k in ("types", "constants", "options", "unaligned"))])
                known = self.seen.setdefault(note["function"], set())
                if key in known or len(known) >= self.most:
                    return launch()
                before = {name: tensor.clone() for name, tensor in tensors.items()}
            except Exception as error:  # noqa: BLE001 - the launch itself goes on, and the line tells why it is left out
                self._write({"function": getattr(kernel, "__name__", "?"), "error": f"{type(error).__name__}: {error}"})
                return launch()
            known.add(key)
            done = launch()
            for name, tensor in tensors.items():
                same = (before[name] == tensor) | ((before[name] != before[name]) & (tensor != tensor))
                if not same.all():
                    note["outputs"].append(name)
                    note["ranges"].pop(name, None)
                    if isinstance(note["values"].get(name), list):
                        del note["values"][name]
                    if not before[name].any():  # memory that the kernel adds to, perhaps
                        note["values"][name] = 0
            if not note["outputs"]:  # it wrote the same again, perhaps: a later launch of its kind may be kept
                known.discard(key)
                note = {"function": note["function"], "error": "no tensor changed"}
            self._write(note)
            return done

        return noted

    def _write(self, note: dict[str, Any]) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")


def note_of(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any], grid: Any) -> tuple[dict[str, Any], Any]:
    """Return a launch as an entry of a file of kernels, without outputs, and its tensors by name. Raises TypeError."""
    function = kernel.fn
    parameters = inspect.signature(function).parameters
    defaults = {name: one.default for name, one in parameters.items() if one.default is not inspect.Parameter.empty}
    bound = defaults | dict(zip(parameters, arguments, strict=False)) | {k: named[k] for k in parameters if k in named}
    file = inspect.getsourcefile(function) or ""
    root = root_of(function.__module__, file)
    module = function.__module__ if root else os.path.splitext(os.path.basename(file))[0]
    note: dict[str, Any] = {
        "root": root or os.path.dirname(os.path.abspath(file)), "function": f"{module}:{function.__qualname__}",
        "grid": [int(size) for size in (grid(bound) if callable(grid) else grid)], "types": {}, "shapes": {},
        "strides": {}, "values": {}, "ranges": {}, "unaligned": [], "outputs": [], "constants": {},
        "options": {k: v for k, v in named.items() if k not in parameters and k not in IGNORED and v is not None},
    }  # fmt: skip
    tensors = {}
    for name, parameter in parameters.items():
        value = bound[name]
        if "constexpr" in str(parameter.annotation):
            _note_constant(note, name, getattr(value, "value", value))
        elif hasattr(value, "data_ptr") and hasattr(value, "stride"):
            tensors[name] = value
            _note_tensor(note, name, value)
        elif value is None:
            note["types"][name] = "none"
        elif isinstance(value, (bool, int, float)):
            wide = isinstance(value, int) and not -(2**31) <= value < 2**31
            whole = ("u64" if value >= 2**63 else "i64") if wide else "i32"
            note["types"][name] = {bool: "i1", float: "fp32"}.get(type(value), whole)
            note["values"][name] = value
        else:
            raise TypeError(f"{name} is a {type(value).__name__}: a file has tensors, numbers and None")
    return note, tensors


def memory_of(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return the number of elements from a tensor's first to its last."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if all(shape) else 0


def _note_constant(note: dict[str, Any], name: str, value: Any) -> None:
    if type(value).__module__.startswith("triton.language") and hasattr(value, "primitive_bitwidth"):
        value = "tl." + re.sub("^fp", "float", str(value)).replace("bf16", "bfloat16")
    if value is None:
        note["types"][name] = "none"
    elif isinstance(value, (bool, int, float, str, list, tuple)):
        note["constants"][name] = list(value) if isinstance(value, tuple) else value
    else:
        raise TypeError(f"{name} is {value!r}: a file has numbers, texts and Triton's types as constants")


def _note_tensor(note: dict[str, Any], name: str, tensor: Any) -> None:
    kind = DTYPES.get(str(tensor.dtype).rpartition(".")[2])
    if kind is None:
        raise TypeError(f"{name} is of {tensor.dtype}")
    if memory_of(tensor.shape, tensor.stride()) > MOST_ELEMENTS:
        raise TypeError(f"{name} is {list(tensor.shape)}: a file has tensors of at most {MOST_ELEMENTS} elements")
    note["types"][name], note["shapes"][name] = f"*{kind}", list(tensor.shape)
    if not tensor.is_contiguous():
        note["strides"][name] = list(tensor.stride())
    if tensor.data_ptr() % 16:
        note["unaligned"].append(name)
    whole = not tensor.dtype.is_floating_point
    if whole and tensor.numel() <= ALL_VALUES:
        note["values"][name] = tensor.tolist()
        del note["shapes"][name]
    elif tensor.numel():
        wide = tensor if whole else tensor.double()
        finite = wide if whole else wide[wide.isfinite()]
        bounds = [finite.min().item(), finite.max().item()] if finite.numel() else []
        # The interpreter's bfloat16 products are of bit patterns (quirk cpu-0002): what comes of them has no range.
        if bounds and (whole or max(map(abs, bounds)) < LARGEST):
            note["ranges"][name] = bounds
