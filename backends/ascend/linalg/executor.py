"""What triton-ascend makes of a plan's kernels, executed on a CPU through MLIR and read by lints: the parent's side."""

from __future__ import annotations

from portattn.backends.ascend.linalg.footprint import footprint
from portattn.backends.ascend.linalg.lints import lints
from portattn.backends.ascend.linalg.operations import read
from portattn.backends.ascend.linalg.tools import missing
from portattn.launch import KernelCall, signature
from portattn.schema.target import Target
from portattn.testing.executor import Executor
from portattn.testing.findings import Facts, Lint
from portattn.worker.client import Reply

TEXT = "linalg"  # the lowered text among a worker's facts


class LinalgExecutor(Executor):
    """Lowered launches, executed on this machine's CPU."""

    name = "lowered"
    level = "lowering-checked"
    task = "portattn.backends.ascend.linalg.execute:compare"
    code_task = "portattn.backends.ascend.linalg.execute:run_code"
    asks = "text"
    lowers_to = "linalg"

    def lacks(self, target: Target) -> str:
        return self.declines(target) or missing()

    def where(self, target: Target) -> str:
        return f"x86, as {target.toolchain} lowers it for {target.arch.name}"

    def piece(self, launch: KernelCall, reply: Reply) -> str:
        return str(reply.facts.get(TEXT, ""))

    def analyze(self, reply: Reply, launch: KernelCall, target: Target) -> tuple[Facts, list[Lint]]:
        """Facts and lints of one lowered launch; the reply's facts hold its text, the facts returned do not."""
        facts = dict(reply.facts)
        text = str(facts.pop(TEXT, ""))
        names = tuple(signature(launch).types)
        arch = target.arch
        # Double buffering, which is on unless it is switched off, takes the other half.
        room = arch.scratchpad_bytes if launch.launch.get("multibuffer") is False else arch.scratchpad_bytes // 2
        found = lints(text, launch.function, names, launch.grid, arch.max_programs, room)
        facts["tile_bytes"] = footprint(read(text))
        for lint in found:
            name = lint.name.replace("-", "_")
            facts[name] = int(facts.get(name, 0)) + lint.value
        return facts, found
