"""Load programs by their file, and a kernel from a user's module whose other imports the child may lack.

The file of a kernel often holds its caller too, and so imports torch; the file of a test imports pytest. A lab
environment has neither. Stand-ins replace modules that the parent has imported and the child lacks, while such a module
is loaded. A kernel that needs one of them to be compiled fails in the compiler, which names it.

Runs in a child process; standard library and Triton only.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any


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


def find(module: str, function: str, file: str, absent: Sequence[str]) -> Any:
    """Return a module's jit function without its decorators (autotuning, heuristics).

    `absent` lists the parent's top-level packages, stood in for if missing here. Raises the module's own errors,
    ImportError if a missing package decorates the function, and TypeError if it is no jit function."""
    from triton.runtime.jit import JITFunction

    there = sys.modules.get(module)
    if (
        there is None
        or isinstance(there, _Module)
        or os.path.realpath(getattr(there, "__file__", None) or "") != os.path.realpath(file)
    ):
        there = _loaded(module, file, absent)
    found = there
    for name in function.split("."):
        found = getattr(found, name)
    kernel: Any = found
    while not isinstance(kernel, StandIn) and not isinstance(kernel, JITFunction) and hasattr(kernel, "fn"):
        kernel = kernel.fn
    if isinstance(kernel, StandIn):
        raise ImportError(f"{function} of {file} is made by {kernel!r}")
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{function} of {file} is a {type(found).__name__}, and no @triton.jit function")
    return kernel


def _loaded(module: str, file: str, absent: Sequence[str]) -> types.ModuleType:
    """Import the module by its name if its folders are packages of that name, else as a single file."""
    stand_ins = _StandIns(frozenset(absent))
    sys.meta_path.append(stand_ins)  # the last finder: asked for modules that no other has
    try:
        folder = _root(module, file)
        if folder is None:
            return load(file)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        sys.modules.pop(module, None)  # another file of that name
        importlib.invalidate_caches()
        return importlib.import_module(module)
    finally:
        sys.meta_path.remove(stand_ins)
        for name in [name for name, one in sys.modules.items() if isinstance(one, _Module)]:
            del sys.modules[name]  # nothing else takes one for the module itself


def _root(module: str, file: str) -> str | None:
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


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of missing packages, as modules whose every name is a stand-in.

    A missing name in a present package is not found: code that tries another release's module means to fail."""

    def __init__(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in self.absent or (top in sys.modules and not isinstance(sys.modules[top], _Module)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")


class StandIn:
    """Stands for a missing module's object during imports, and holds nothing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return StandIn(f"{self._name}()")

    def __getitem__(self, key: Any) -> Any:
        return StandIn(f"{self._name}[]")

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return ()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __bool__(self) -> bool:
        return False

    def __enter__(self) -> StandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __repr__(self) -> str:
        return f"<{self._name}, which is not installed here>"
