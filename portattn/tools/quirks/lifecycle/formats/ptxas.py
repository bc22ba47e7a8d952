"""ptxas, NVIDIA's assembler."""

from __future__ import annotations

from portattn.tools.quirks.lifecycle.formats.row import LINE, PTXAS, Recogniser

ROWS = (
    Recogniser(
        name="ptxas-code",
        family="ptxas",
        pattern=rf"{PTXAS} (?:error|fatal)\s*: (?P<cause>\(C\d{{4}}\) {LINE})",
        symptom="compile-error",
        stage="cubin",
        source="reproduced: Triton 3.6.0 and 3.9.0 with maxnreg = 24 (C7602); triton-lang/triton#8488, #2662 (C7600)",
    ),
    Recogniser(
        name="ptxas-line",
        family="ptxas",
        pattern=rf"{PTXAS} {LINE}?line \d+; (?:error|fatal)\s*: (?P<cause>{LINE})",
        symptom="compile-error",
        stage="cubin",
        source="reproduced: ptxas of Triton 3.6.0 on a version of PTX that it does not know; ray-project/ray#53825",
    ),
    Recogniser(
        name="ptxas-fatal",
        family="ptxas",
        pattern=rf"{PTXAS} (?:error|fatal)\s*: (?!Ptx assembly aborted)(?P<cause>{LINE})",
        symptom="compile-error",
        stage="cubin",
        source="ptxas of CUDA 12: triton-lang/triton#8539",
    ),
    Recogniser(
        name="ptxas-warning",
        family="ptxas",
        pattern=rf"{PTXAS} (?:info|warning)\s*: (?P<cause>\(C75\d\d\) {LINE}serialized{LINE})",
        symptom="slow",
        stage="cubin",
        signature=r"\(C75\d\d\)[^\n]*serialized",
        source="ptxas 12.8 and 12.9: C7508 to C7516, wgmma that could not stay asynchronous; sgl-project/sglang#6453",
    ),
)  # fmt: skip
