"""Registers the torch operators as soon as torch is imported, whether before or after portattn, and more with more.

`import portattn` imports no torch. A program that was exported is loaded by torch alone, which must know the operators.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Watcher:
    """The first finder: has the module found by the others, and calls back once it is loaded.

    Who only asks whether there is such a module (importlib.util.find_spec) loads none: it stays until one is loaded.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self.then = name, then
        self._asking = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or getattr(self._asking, "now", False):
            return None
        self._asking.now = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]
        return spec


class _Loader:
    """A module's own loader, which calls back once the module is executed."""

    def __init__(self, loader: Any, watcher: _Watcher) -> None:
        self._loader, self._watcher = loader, watcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        # The module is the loader's own from here on: what asks for its source or its files finds them.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._watcher in sys.meta_path:
            sys.meta_path.remove(self._watcher)
            self._watcher.then()


class _Waiter:
    """A finder that finds nothing: for a module whose import has begun before anybody watched, it calls back at the
    next import after that has ended."""

    def __init__(self, module: ModuleType, then: Callable[[], None]) -> None:
        self._module, self._then = module, then

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_loading(self._module) and self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()
        return None


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported: at once where it has."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Watcher(name, then))
    elif _is_loading(module):
        sys.meta_path.insert(0, _Waiter(module, then))
    else:
        then()


def _call(name: str) -> Callable[[], None]:
    def call() -> None:
        module, _, function = name.partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        except Exception as error:  # noqa: BLE001  # inside of another's import, which must go on
            warnings.warn(f"portattn: {name} failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)

    return call


# What is to be done once a module is there: most programs import none of them but torch.
_THEN = {
    "torch": "portattn.api.torch_ops:define",
    "torch._dynamo": "portattn.api.dynamo_disabled:apply_all",
    "torch.utils.flop_counter": "portattn.integrations.flops:register",
    "torch.distributed.tensor": "portattn.integrations.dtensor:register",
}


def install() -> None:
    """Have the operators registered, and what other modules of torch want to know of them."""
    for name, function in _THEN.items():
        after_import(name, _call(function))
