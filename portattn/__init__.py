"""portattn: attention written once, run on every accelerator, that can always say which path ran and why."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from portattn import source_tree
from portattn.version import __version__ as __version__

source_tree.install(os.path.dirname(os.path.abspath(__file__)))

# Public name -> module. Loaded on first use: `import portattn` touches no device, no Triton and no schema library.
_PUBLIC = {
    "attention": "portattn.api.ops",
    "varlen_attention": "portattn.api.ops",
    "decode_attention": "portattn.api.ops",
    "paged_attention": "portattn.api.ops",
    "sparse_attention": "portattn.api.ops",
    "block_sparse_attention": "portattn.api.ops",
    "mla_attention": "portattn.api.ops",
    "append_kv": "portattn.api.ops",
    "write_pages": "portattn.api.ops",
    "indexer_logits": "portattn.api.ops",
    "topk_indices": "portattn.api.ops",
    "merge_states": "portattn.api.merge_states",
    "dropout_mask": "portattn.api.masks",
    "quantize": "portattn.api.quantize",
    "Quantized": "portattn.api.quantize",
    "tree_mask": "portattn.api.masks",
    "BlockMask": "portattn.api.masks",
    "PageTable": "portattn.api.page_table",
    "plan": "portattn.api.ops",
    "explain": "portattn.api.ops",
    "prepare": "portattn.api.ops",
    "warmup": "portattn.api.warmup",
    "monitor": "portattn.api.monitor",
    "Prepared": "portattn.api.prepare",
    "last_backward_plan": "portattn.api.dispatch",
    "last_plan": "portattn.api.dispatch",
    "settings": "portattn.config",
    "Problem": "portattn.schema.problem",
    "Target": "portattn.schema.target",
    "target": "portattn.planning.registry",
    "Toolchain": "portattn.schema.toolchain",
    "Plan": "portattn.schema.plan",
    "Quirk": "portattn.schema.quirk",
    "Lowering": "portattn.schema.lowering",
    "Launch": "portattn.schema.lowering",
    "CompileRecord": "portattn.schema.compile_record",
    "Incident": "portattn.schema.compile_record",
    "Registry": "portattn.planning.registry",
    "PortattnError": "portattn.errors",
    "ArgumentError": "portattn.errors",
    "SettingError": "portattn.errors",
    "DataError": "portattn.errors",
    "QuirkConflict": "portattn.errors",
    "PathUnavailable": "portattn.errors",
    "TracingError": "portattn.errors",
    "UnknownArgument": "portattn.errors",
    "FallbackWarning": "portattn.errors",
    "CompileWarning": "portattn.errors",
    "PluginWarning": "portattn.errors",
    "TracingWarning": "portattn.errors",
}

_OTHER_NAMES = {"target": "parse_target"}  # where the module has another one

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from portattn.api.dispatch import last_backward_plan as last_backward_plan
    from portattn.api.dispatch import last_plan as last_plan
    from portattn.api.masks import BlockMask as BlockMask
    from portattn.api.masks import dropout_mask as dropout_mask
    from portattn.api.masks import tree_mask as tree_mask
    from portattn.api.merge_states import merge_states as merge_states
    from portattn.api.monitor import monitor as monitor
    from portattn.api.ops import append_kv as append_kv
    from portattn.api.ops import attention as attention
    from portattn.api.ops import block_sparse_attention as block_sparse_attention
    from portattn.api.ops import decode_attention as decode_attention
    from portattn.api.ops import explain as explain
    from portattn.api.ops import indexer_logits as indexer_logits
    from portattn.api.ops import mla_attention as mla_attention
    from portattn.api.ops import paged_attention as paged_attention
    from portattn.api.ops import plan as plan
    from portattn.api.ops import prepare as prepare
    from portattn.api.ops import sparse_attention as sparse_attention
    from portattn.api.ops import topk_indices as topk_indices
    from portattn.api.ops import varlen_attention as varlen_attention
    from portattn.api.ops import write_pages as write_pages
    from portattn.api.page_table import PageTable as PageTable
    from portattn.api.prepare import Prepared as Prepared
    from portattn.api.quantize import Quantized as Quantized
    from portattn.api.quantize import quantize as quantize
    from portattn.api.warmup import warmup as warmup
    from portattn.config import settings as settings
    from portattn.errors import ArgumentError as ArgumentError
    from portattn.errors import CompileWarning as CompileWarning
    from portattn.errors import DataError as DataError
    from portattn.errors import FallbackWarning as FallbackWarning
    from portattn.errors import PathUnavailable as PathUnavailable
    from portattn.errors import PluginWarning as PluginWarning
    from portattn.errors import PortattnError as PortattnError
    from portattn.errors import QuirkConflict as QuirkConflict
    from portattn.errors import SettingError as SettingError
    from portattn.errors import TracingError as TracingError
    from portattn.errors import TracingWarning as TracingWarning
    from portattn.errors import UnknownArgument as UnknownArgument
    from portattn.planning.registry import Registry as Registry
    from portattn.planning.registry import parse_target
    from portattn.schema.compile_record import CompileRecord as CompileRecord
    from portattn.schema.compile_record import Incident as Incident
    from portattn.schema.lowering import Launch as Launch
    from portattn.schema.lowering import Lowering as Lowering
    from portattn.schema.plan import Plan as Plan
    from portattn.schema.problem import Problem as Problem
    from portattn.schema.quirk import Quirk as Quirk
    from portattn.schema.target import Target as Target
    from portattn.schema.toolchain import Toolchain as Toolchain

    target = parse_target


def __getattr__(name: str) -> object:
    if name in ("distributed", "integrations"):
        return importlib.import_module(f"portattn.{name}")
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'portattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), _OTHER_NAMES.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# Hooks run once torch and some of its modules are imported, before or after portattn: `import portattn` imports no
# torch, yet torch alone loads an exported program, which needs portattn's operators.


class _Watcher:
    """The first finder: others find the module, and `then` is called once it has been executed, not only found."""

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
        # The module is the loader's own from here on: code that asks for its source or its files finds them.
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._watcher in sys.meta_path:
            sys.meta_path.remove(self._watcher)
            self._watcher.then()


class _Waiter:
    """A finder that finds nothing: it calls `then` at the next import after one that was under way has ended."""

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


def _after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported, at once if it already is."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Watcher(name, then))
    elif _is_loading(module):
        sys.meta_path.insert(0, _Waiter(module, then))
    else:
        then()


def _hook(name: str) -> Callable[[], None]:
    def call() -> None:
        module, _, function = name.partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        except Exception as error:  # noqa: BLE001  # inside of another's import, which must go on
            warnings.warn(f"portattn: {name} failed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)

    return call


# Module -> hook to run after its import. Most programs import only torch.
_THEN = {
    "torch": "portattn.api.torch_ops:define",
    "torch._dynamo": "portattn.api.transform_checks:apply_all",
    "torch.utils.flop_counter": "portattn.integrations.flops:register",
    "torch.distributed.tensor": "portattn.integrations.dtensor:register",
}


def _install_hooks() -> None:
    for name, function in _THEN.items():
        _after_import(name, _hook(function))


_install_hooks()
