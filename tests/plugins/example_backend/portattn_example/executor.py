"""What runs Example One's code where the chip is not: the parent's side."""

from typing import Any

from portattn.launch import KernelCall
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.target import Target
from portattn.testing.executor import Executor, interpreter_missing, small_problems
from portattn.worker.client import Reply


class ExampleExecutor(Executor):
    """A model of the chip. It has no instructions: it checks the code, and interprets the kernel that it is of."""

    name = "emulated"
    level = "emulated"
    task = "portattn_example.execute:compare"
    code_task = "portattn_example.execute:run_code"
    interprets = True

    def lacks(self, target: Target) -> str:
        return self.declines(target) or interpreter_missing()

    def where(self, target: Target) -> str:
        return f"a model of {target.arch.name}, code of {target.toolchain}"

    def problems(self, plan: Plan) -> list[Problem]:
        return small_problems(plan)[:1]

    def piece(self, launch: KernelCall, reply: Reply) -> dict[str, Any]:
        return {"kernel": launch.function, "code": str(reply.facts.get("code", ""))}
