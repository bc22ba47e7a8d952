"""The modelled architectures: rows of backends/rocm/arches.

Sources: LLVM "User Guide for AMDGPU Backend" (processors, address spaces, kernel descriptor, initial register state);
AMD "Instinct MI200", "MI300", "CDNA4", "RDNA3" and "RDNA4" ISA references.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from portattn.planning.data_files import load_arches

EXECUTOR = "emulated"  # the table of an arch's file that is the model's

# Column of the scalar register file where a name lies. m0 and null swap encodings between gfx9 and gfx10; the model
# keeps one numbering, and null is no register here.
VCC, TTMP, M0, EXEC = 106, 108, 124, 126
SCALARS = 128
# Unified numbers for registers of every kind, in sets of the registers that an instruction touches.
SCC = 300  # a free number above the scalar file
VECTOR = 512  # vector register i is VECTOR + i
ACCUMULATION = 256  # accumulation register i is vector plane ACCUMULATION + i


@dataclass(frozen=True)
class AmdArch:
    name: str
    wave: int  # lanes that Triton compiles for
    planes: int  # vector registers of a lane, accumulation registers included
    lds_bytes: int  # of one work-group at most
    family: int  # 9, 11 or 12: encoding of waits, barriers and 16-bit registers
    fnuz: bool  # fp8 is FNUZ, else OCP
    counters: dict[str, str]  # kind of access → wait counter
    most: dict[str, int]  # most accesses of each counter
    same_as: str = ""  # an arch with the same instructions, which tests of instructions run instead


# LLVM AMDGPU guide, "Memory Model": vmcnt covers vector loads and stores before gfx10; stores have vscnt since; gfx12
# splits all of them. LDS and scalar loads share lgkmcnt before gfx12.
_GFX9 = {"load": "vmcnt", "store": "vmcnt", "atomic": "vmcnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX11 = {"load": "vmcnt", "store": "vscnt", "atomic": "vscnt", "lds": "lgkmcnt", "scalar": "lgkmcnt"}
_GFX12 = {"load": "loadcnt", "store": "storecnt", "atomic": "storecnt", "lds": "dscnt", "scalar": "kmcnt"}

_COUNTERS = {9: _GFX9, 11: _GFX11, 12: _GFX12}
# The most that each counter counts. LLVM, AMDGPUBaseInfo.cpp (bits of the fields of S_WAITCNT and S_WAIT_*).
_MOST = {"vmcnt": 63, "vscnt": 63, "lgkmcnt": 63, "loadcnt": 63, "storecnt": 63, "dscnt": 63, "kmcnt": 31}
_MOST_OF = {9: _MOST | {"lgkmcnt": 15}, 11: _MOST, 12: _MOST}


def _modelled() -> dict[str, AmdArch]:
    """Return the arches of backends/rocm/arches whose [executors.emulated] names an instruction set."""
    found = {}
    for name, arch in load_arches(Path(__file__).parents[2]).items():
        row = arch.executors[EXECUTOR]
        if "lacks" not in row:
            family = int(row["isa"])
            found[name] = AmdArch(
                name=name,
                wave=arch.warp_size,
                planes=arch.registers,
                lds_bytes=arch.scratchpad_bytes,
                family=family,
                fnuz=any(kind.endswith("fnuz") for kind in arch.fp8),
                counters=_COUNTERS[family],
                most=_MOST_OF[family],
                same_as=str(row.get("same_as", "")),
            )
    return found


ARCHES = _modelled()
