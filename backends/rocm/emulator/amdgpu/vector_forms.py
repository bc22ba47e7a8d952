"""What vector instructions have in common: names without an encoding, and what DPP and SDWA add."""

from __future__ import annotations

import re
from collections.abc import Callable

from portattn.backends.rocm.emulator.amdgpu.assembly import Instruction
from portattn.backends.rocm.emulator.amdgpu.binder import Binder, BoundInstruction
from portattn.backends.rocm.emulator.amdgpu.state import WorkGroupState

Bind = Callable[[WorkGroupState, Instruction], BoundInstruction]
_SUFFIX = re.compile(r"_(e32|e64|dpp|dpp8|sdwa|e64_dpp|e32_dpp|e64_dpp8)$")
DPP = ("quad_perm", "row_shl", "row_shr", "row_ror", "row_mirror", "row_half_mirror", "row_bcast", "row_newbcast",
        "row_share", "row_xmask", "wave_shr", "wave_shl", "wave_ror", "wave_rol", "row_mask", "bank_mask", "bound_ctrl",
        "fi", "dpp8")  # fmt: skip
SDWA = ("src0_sel", "src1_sel", "dst_sel", "dst_unused")


def base_name(mnemonic: str) -> str:
    """The name without "v_", "dual_" and the encoding."""
    return _SUFFIX.sub("", _SUFFIX.sub("", mnemonic[2:])).removeprefix("dual_")


def dpp_flow(binder: Binder) -> Callable[..., None] | None:
    """With DPP, undefinedness moves along with source 0."""
    dpp = binder.dpp
    if dpp is None:
        return None

    def flow(defined: object) -> None:
        defined.moved(binder, dpp)  # type: ignore[attr-defined]

    return flow
