"""Compilers of the variants, which are written in Triton's Gluon: community Triton from 3.6 on.

One source serves 3.6.0, 3.7.1, 3.8.0 and 3.9.0 (gluon_names.py). A quirk says why it does not compile before 3.6
(quirks/cuda/cuda-0016-gluon-aggregates.toml). Releases that verified.toml lacks, later ones too, are tried: if a kernel
does not compile or its canaries give wrong numbers, the core runs, with an Incident.
"""

from __future__ import annotations

from portattn.schema.toolchain import Toolchain

NEEDS = "Triton 3.6 or newer"
# The compiler of schedules that no entry of tuning/sm_90.toml holds, and the default release of a variant's entries
# (Variant.for_toolchain).
TIMED_WITH = Toolchain.parse("triton==3.6.0")


def described_by(toolchain: Toolchain) -> bool:
    """Return whether tools can describe a variant's launches with this compiler, and so compile them."""
    return toolchain.within("triton", ">=3.6") is True


def foreign(toolchain: Toolchain) -> bool:
    """Return whether this is another compiler than community Triton; its Gluon is unknown."""
    return toolchain.distribution != "triton"
