"""Something is not installed: no entry of the registry can work around that."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import Recogniser

ROWS = (
    Recogniser(
        name="no-cann",
        family="triton-ascend",
        pattern=r"(?P<cause>ASCEND_HOME_PATH is not set[^\n]*|Failed to load the backend extension: torch_npu[^\n]*)",
        symptom="compile-error",
        not_a_bug="install CANN and source its set_env.sh, or compile the front half only (portattn.worker.ascend)",
        source="reproduced: triton-ascend 3.2.0 without CANN",
    ),
    Recogniser(
        name="no-rocm-linker",
        family="triton",
        pattern=r"(?P<cause>ROCm linker \S+ not found[^\n]*)",
        symptom="compile-error",
        not_a_bug="install ROCm's LLVM, or set TRITON_HIP_LLD_PATH; Triton 3.5 and newer bring their own linker",
        source="reproduced: Triton 3.4.0 for gfx942",
    ),
    Recogniser(
        name="no-driver",
        family="triton",
        pattern=r"(?P<cause>\d+ active drivers \(\[[^\n]*\]\)[^\n]*)",
        symptom="compile-error",
        not_a_bug="no device is visible, or two backends claim one: compile for a named target (portattn matrix run)",
        source="triton.runtime.driver of Triton 3.2 to 3.9",
    ),
)  # fmt: skip
