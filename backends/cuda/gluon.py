"""Which compilers the variants, which are written in Triton's Gluon, are for."""

from __future__ import annotations

from portattn.schema.toolchain import Toolchain

# The one that their numbers and times were seen with. 3.7.1 and 3.8.0 compile them too, with the same hardware barriers
# for themselves (0 to 2), and nobody has run that; before and after these, quirks say why they do not compile
# (quirks/cuda/cuda-0016-gluon-aggregates.toml, cuda-0017-gluon-async-store.toml).
TRITON = "3.6.0"
COMPILED = ">=3.6,<3.9"


def untried(toolchain: Toolchain) -> bool:
    """Whether no quirk speaks of this compiler, and the variants were never run with it."""
    if toolchain.distribution != "triton":
        return True
    return toolchain.version != TRITON and toolchain.within("triton", COMPILED) is True
