"""The architectures that are modelled, as data.

Sources: LLVM "User Guide for AMDGPU Backend" (processors, address spaces, kernel descriptor, initial register state);
AMD "Instinct MI200", "MI300" and "CDNA4" ISA references; AMD "RDNA3" and "RDNA4" ISA references.
"""

from __future__ import annotations

from dataclasses import dataclass

# Column of the scalar register file where a name lies. m0 and null swap encodings between gfx9 and gfx10; the model
# keeps one numbering, and null is no register here.
VCC, TTMP, M0, EXEC = 106, 108, 124, 126
SCALARS = 128
# Unified numbers for registers of every kind, in sets of what an instruction touches.
SCC = 300  # a free number above the scalar file
VECTOR = 512  # vector register i is VECTOR + i
ACCUMULATION = 256  # accumulation register i is vector plane ACCUMULATION + i


@dataclass(frozen=True)
class Arch:
    """One architecture.

    wave        lanes of a wave that Triton compiles for; the text says which are in use
    planes      vector registers a lane can have, accumulation registers included
    lds_bytes   of one work-group at most
    family      9, 11 or 12: which encoding of waits, barriers and 16-bit registers
    fnuz        fp8 is the FNUZ kind (no infinities, no negative zero), else OCP
    counters    wait counter each kind of access increments
    """

    name: str
    wave: int
    planes: int
    lds_bytes: int
    family: int
    fnuz: bool
    counters: dict[str, str]


# LLVM AMDGPU guide, "Memory Model": vmcnt covers vector loads and stores before gfx10; stores have vscnt since; gfx12
# splits all of them. LDS and scalar loads share lgkmcnt before gfx12.
_GFX9 = {"load": "vmcnt", "store": "vmcnt", "atomic": "vmcnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX11 = {"load": "vmcnt", "store": "vscnt", "atomic": "vscnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX12 = {"load": "loadcnt", "store": "storecnt", "atomic": "storecnt", "lds": "dscnt", "scalar": "kmcnt"}

ARCHES = {
    "gfx90a": Arch("gfx90a", 64, 512, 65536, 9, False, _GFX9),
    "gfx942": Arch("gfx942", 64, 512, 65536, 9, True, _GFX9),
    "gfx950": Arch("gfx950", 64, 512, 163840, 9, False, _GFX9),
    "gfx1100": Arch("gfx1100", 32, 256, 65536, 11, False, _GFX11),
    "gfx1201": Arch("gfx1201", 32, 256, 65536, 12, False, _GFX12),
}
