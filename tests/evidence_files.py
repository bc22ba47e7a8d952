"""Evidence of runs on a chip that left something out, in the place of the backends' own."""

from pathlib import Path

import pytest

from portattn.planning import core_path
from portattn.planning.data_files import load_verified

# Of 3.6.0 all was run; 3.7.1 lacks latent attention, gradients, indexers, 3.9.0 a format of caches and two of queries.
_RUN = '[[seen]]\narch = ["sm_90"]\ndate = 2026-11-24\nwhat = "planted by a test"\n'
_LEFT_OUT = 'untested_ops = ["mla_attention", "attention_backward", "varlen_attention_backward", "indexer_logits"]'
PARTS = "".join(
    f'{_RUN}toolchain = "triton=={release}"\nlevel = "{level}"\n{lacks}\n'
    for release, level, lacks in (
        ("3.6.0", "measured", ""),
        ("3.7.1", "runs", _LEFT_OUT),
        ("3.9.0", "measured", 'untested = ["kv_format=nvfp4"]\nuntested_queries = ["e4m3", "int8"]'),
    )
)


def plant(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "verified.toml").write_text(PARTS, encoding="utf-8")
    found = load_verified(folder)
    monkeypatch.setattr(core_path, "_seen", lambda backend: found)
