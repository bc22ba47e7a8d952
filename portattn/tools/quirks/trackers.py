"""Where compilers and libraries take reports today, and where they did before."""

from __future__ import annotations

from portattn.schema import compilers

# Compiler -> its tracker.
TRACKERS = {
    "triton": "https://github.com/triton-lang/triton/issues",
    "triton-ascend": "https://github.com/triton-lang/triton-ascend/issues",
    "flagtree": "https://github.com/flagos-ai/FlagTree/issues",
}
# Begin of a link -> where its project is now. Numbers of threads were not kept by a move from another host.
MOVED = {
    "https://gitee.com/ascend/triton-ascend": "https://github.com/triton-lang/triton-ascend",
    "https://gitcode.com/Ascend/triton-ascend": "https://github.com/triton-lang/triton-ascend",
    "https://github.com/Ascend/triton-ascend": "https://github.com/triton-lang/triton-ascend",
    "https://github.com/openai/triton": "https://github.com/triton-lang/triton",
    "https://github.com/ROCmSoftwarePlatform/triton": "https://github.com/ROCm/triton",
    "https://github.com/sustcsonglin/flash-linear-attention": "https://github.com/fla-org/flash-linear-attention",
    "https://github.com/FlagOpen/FlagTree": "https://github.com/flagos-ai/FlagTree",
    "https://github.com/FlagTree/flagtree": "https://github.com/flagos-ai/FlagTree",
}


def tracker_of(compiler: str) -> str:
    """Where reports on a compiler go: of another package's compiler what it says; empty where nobody says."""
    brought = compilers.find(compiler)
    return TRACKERS.get(compiler, "") or (brought.tracker if brought else "")


def new_location(link: str) -> str:
    """Where the project of a link is now; empty where the link is today's."""
    return next((now for before, now in MOVED.items() if link.lower().startswith(before.lower())), "")
