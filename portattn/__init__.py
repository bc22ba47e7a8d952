"""portattn: attention written once, run on every accelerator, that can always say which path ran and why."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# An installed portattn holds backends/ and quirks/; in a source tree they lie beside it. A Python started in the
# tree's root imports this very folder, whatever is installed: let it find them.
_here = os.path.dirname(os.path.abspath(__file__))
if not os.path.isdir(os.path.join(_here, "backends")) and os.path.isdir(os.path.join(_here, os.pardir, "backends")):
    __path__.append(os.path.dirname(_here))

# Public name -> module. Loaded on first use: `import portattn` touches no device, no Triton and no schema library.
_PUBLIC = {
    "attention": "portattn.ops",
    "varlen_attention": "portattn.ops",
    "decode_attention": "portattn.ops",
    "paged_attention": "portattn.ops",
    "sparse_attention": "portattn.ops",
    "mla_attention": "portattn.ops",
    "merge_states": "portattn.merge",
    "PageTable": "portattn.pagetable",
    "plan": "portattn.ops",
    "explain": "portattn.ops",
    "prepare": "portattn.ops",
    "warmup": "portattn.warming",
    "monitor": "portattn.monitoring",
    "Prepared": "portattn.prepared",
    "last_plan": "portattn.dispatch",
    "settings": "portattn.config",
    "Problem": "portattn.problem",
    "Target": "portattn.target",
    "Toolchain": "portattn.toolchain",
    "Plan": "portattn.planner",
    "Quirk": "portattn.quirk",
    "Lowering": "portattn.lowering",
    "Launch": "portattn.lowering",
    "Verdict": "portattn.verdict",
    "Incident": "portattn.verdict",
    "Registry": "portattn.registry",
    "PortattnError": "portattn.errors",
    "ArgumentError": "portattn.errors",
    "SettingError": "portattn.errors",
    "DataError": "portattn.errors",
    "QuirkConflict": "portattn.errors",
    "PathUnavailable": "portattn.errors",
    "TracingError": "portattn.errors",
    "FallbackWarning": "portattn.errors",
    "CompileWarning": "portattn.errors",
}

__all__ = ["__version__", *sorted(_PUBLIC)]

if TYPE_CHECKING:
    from portattn.config import settings as settings
    from portattn.dispatch import last_plan as last_plan
    from portattn.errors import ArgumentError as ArgumentError
    from portattn.errors import CompileWarning as CompileWarning
    from portattn.errors import DataError as DataError
    from portattn.errors import FallbackWarning as FallbackWarning
    from portattn.errors import PathUnavailable as PathUnavailable
    from portattn.errors import PortattnError as PortattnError
    from portattn.errors import QuirkConflict as QuirkConflict
    from portattn.errors import SettingError as SettingError
    from portattn.errors import TracingError as TracingError
    from portattn.lowering import Launch as Launch
    from portattn.lowering import Lowering as Lowering
    from portattn.merge import merge_states as merge_states
    from portattn.monitoring import monitor as monitor
    from portattn.ops import attention as attention
    from portattn.ops import decode_attention as decode_attention
    from portattn.ops import explain as explain
    from portattn.ops import mla_attention as mla_attention
    from portattn.ops import paged_attention as paged_attention
    from portattn.ops import plan as plan
    from portattn.ops import prepare as prepare
    from portattn.ops import sparse_attention as sparse_attention
    from portattn.ops import varlen_attention as varlen_attention
    from portattn.pagetable import PageTable as PageTable
    from portattn.planner import Plan as Plan
    from portattn.prepared import Prepared as Prepared
    from portattn.problem import Problem as Problem
    from portattn.quirk import Quirk as Quirk
    from portattn.registry import Registry as Registry
    from portattn.target import Target as Target
    from portattn.toolchain import Toolchain as Toolchain
    from portattn.verdict import Incident as Incident
    from portattn.verdict import Verdict as Verdict
    from portattn.warming import warmup as warmup


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'portattn' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
