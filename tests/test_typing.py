"""Type checkers know the result of an operation from its flag: overloads written by scripts/typing_stubs.py."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from places import ROOT

FUNCTIONS = [
    ("portattn.api.ops", "attention", "return_lse"),
    ("portattn.api.ops", "varlen_attention", "return_lse"),
    ("portattn.api.ops", "decode_attention", "return_lse"),
    ("portattn.api.ops", "paged_attention", "return_lse"),
    ("portattn.api.ops", "sparse_attention", "return_lse"),
    ("portattn.api.ops", "mla_attention", "return_lse"),
    ("portattn.integrations.flash_attn", "flash_attn_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_kvpacked_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_qkvpacked_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_varlen_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_varlen_kvpacked_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_varlen_qkvpacked_func", "return_attn_probs"),
    ("portattn.integrations.flash_attn", "flash_attn_with_kvcache", "return_softmax_lse"),
]
TRANSFORMERS = {"train_llama.py", "train_llama_parallel.py"}  # pyright errs in transformers' and torch's own names there


def _program(folder: Path) -> tuple[Path, set[int]]:
    """Write calls of every function with each kind of flag; return the file and its lines that must be errors."""
    lines = ["from typing import Any, assert_type", "from torch import Tensor", "import portattn"]
    lines += ["from portattn.integrations import flash_attn", "", "def run(q: Tensor, wanted: bool) -> None:"]
    wrong = set()
    for module, name, flag in FUNCTIONS:
        function = f"{'portattn' if module == 'portattn.api.ops' else 'flash_attn'}.{name}"
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
        needed = [p for p in parameters if p.default is p.empty]
        words = ["1" if p.annotation == "int" else "q" for p in needed]
        given = ", ".join(w if p.kind is not p.KEYWORD_ONLY else f"{p.name}={w}" for p, w in zip(needed, words, strict=True))
        pair = "tuple[Tensor, Tensor, Tensor]" if flag == "return_attn_probs" else "tuple[Tensor, Tensor]"
        lines.append(f"    one: Tensor = {function}({given})")
        lines.append(f"    assert_type({function}({given}, {flag}=False), Tensor)")
        lines.append(f"    assert_type({function}({given}, {flag}=True), {pair})")
        lines.append(f"    assert_type({function}({given}, {flag}=wanted), Tensor | {pair})")
        for call in (f"{function}({given}, {flag}=True).shape", f"{function}({given}, no_such=1)", f"{function}()"):
            lines.append(f"    {call}")
            wrong.add(len(lines))
        del lines[-7]
        lines.insert(-6, f"    one_{name}: Tensor = {function}({given})")
    places = "0.0, None, False, (-1, -1), 0.0, None, False, True"
    lines.append(f"    assert_type(flash_attn.flash_attn_func(q, q, q, {places}), tuple[Tensor, Tensor, Tensor])")
    lines.append('    handle: Tensor = portattn.prepare("attention", q, q, q).run(q, q, q)')
    path = folder / "calls.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path, wrong
