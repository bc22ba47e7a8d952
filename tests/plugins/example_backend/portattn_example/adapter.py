"""The compile adapter: compiles for Example One, in portattn's child, with the standard library and the compiler."""

from collections.abc import Callable
from typing import Any

SERVED_AS = ("cuda", 80, 32)  # the chip whose layouts Example One has


def compile_kernel(function: Any, signature: dict[str, Any], target: tuple[str, Any, int], enter: Callable[[str], None],
        passes: str = "") -> tuple[dict[str, Any], dict[str, str]]:  # fmt: skip
    """Facts and texts of a kernel; what Triton or triton-example raises is the compiler's failure."""
    import triton_example

    from portattn.worker import compilers

    options = dict(signature["options"])
    fuse = options.pop("fuse", False)  # this compiler's own: Triton does not know it
    built = compilers.build(function, signature | {"options": options}, SERVED_AS, enter)
    enter("emit")
    ttir, ttgir = built.asm["ttir"], built.asm["ttgir"]
    scratchpad = built.metadata.shared
    code = triton_example.emit(ttir, ttgir, options.get("num_stages", 1), scratchpad, fuse)
    facts = {
        "scratchpad_bytes": scratchpad, "num_warps": built.metadata.num_warps, "instructions": code.count("\n") - 1,
        "mma": code.count("\ntt_dot"),
    }  # fmt: skip
    return facts, {"ttgir": ttgir, "code": code}
