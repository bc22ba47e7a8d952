"""Which compilers the variants, which are written in Triton's Gluon, are for: community Triton from 3.6 on.

One source serves 3.6.0, 3.7.1, 3.8.0 and 3.9.0 (gluon_names.py), whose compilers make code of it that fits. Before 3.6
a quirk says why it does not compile (quirks/cuda/cuda-0016-gluon-aggregates.toml). Releases with which nobody has run
it on a chip (verified.toml), later ones too, are tried: where a kernel does not compile, or its canaries give wrong
numbers, the core runs, with an Incident.
"""

from __future__ import annotations

from portattn.schema.toolchain import Toolchain

NEEDS = "Triton 3.6 or newer"
# What the schedules were timed with that no entry of tuning/sm_90.toml holds; and the release whose entries a variant
# takes that nobody has asked for another's (Variant.for_toolchain).
TIMED_WITH = Toolchain.parse("triton==3.6.0")


def described_by(toolchain: Toolchain) -> bool:
    """Whether launches can be described with this compiler: what tools compile them by, for any of them."""
    return toolchain.within("triton", ">=3.6") is True


def foreign(toolchain: Toolchain) -> bool:
    """Whether this is no community Triton: of another compiler nobody knows which Gluon it has."""
    return toolchain.distribution != "triton"
