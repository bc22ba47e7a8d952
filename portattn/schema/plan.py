"""Plan: the result of planning, with the Rejections and applied quirks that explain it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem


class AppliedQuirk(msgspec.Struct, frozen=True, kw_only=True):
    """A quirk that changed this plan or cautions about it: its sentence, the values that it set, and a doubt.

    Attributes:
        note: the toolchain is only assumed to have the bug, or a hard limit overruled a choice; empty without a doubt
    """

    id: str
    sentence: str
    sets: dict[str, Any] = {}
    note: str = ""


class CoreChoice(msgspec.Struct, frozen=True, kw_only=True):
    """How the core kernel runs, or would run if it were not rejected."""

    kernel: str
    form: str = ""  # function that runs in place of the kernel's own with this lowering; empty: its own
    lowering: Lowering
    launch: Launch
    choices: tuple[str, ...] = ()  # fields of the lowering that the kernel reads
    env: dict[str, str] = {}
    quirks: tuple[AppliedQuirk, ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""  # identifies the specialisation, target and toolchain for records


class Rejection(msgspec.Struct, frozen=True, kw_only=True):
    """A path that was not taken, with the reason and a hint how to get it.

    Attributes:
        quirk: id of the quirk that rejects it, or empty
        incident: id of the failure seen here, or empty
        choice: how a core path would have run
    """

    path: str
    reason: str
    hint: str = ""
    quirk: str = ""
    incident: str = ""
    choice: CoreChoice | None = None

    def note(self, subject: str = "") -> str:
        """Return the reason as a note of the plan that is taken instead.

        Args:
            subject: of the reason, if that is only a predicate, as variants' reasons are
        """
        if self.quirk or self.incident:
            return f"not {self.path}: {self.reason} [{self.quirk or self.incident}]"
        whole = not subject or self.reason.startswith(f"{subject} ")
        return f"not {self.path}: {self.reason}" if whole else f"not {self.path}: {subject} {self.reason}"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How one problem runs on one target.

    Attributes:
        path: `triton` or `interpreter` (core kernels), a variant's or a vendor path's name, or `reference`
        requested: `auto`, or the path that the caller named
        schedule, needs: a variant's own description of its schedule and requirements
        kernel, form, lowering, launch, choices, env: of a core path, as in CoreChoice; None and empty elsewhere
        quirks: quirks that changed the plan or caution about it, in the order of application
        rejected: every path that comes before `path`, with its reason
        key: identifies the specialisation, target and toolchain; empty without a kernel of portattn's

    `portattn.plan` makes one.

    Examples:
        >>> import portattn
        >>> problem = portattn.Problem(batch=1, heads_q=8, heads_k=8, seq_q=128, seq_k=128, head_dim=64)
        >>> plan = portattn.plan(problem, portattn.target("rocm:gfx942", "triton==3.6.0"))
        >>> plan.path, plan.fell_back, plan.launch.num_warps
        ('triton', False, 4)
    """

    problem: Problem
    target: str
    toolchain: str
    requested: str
    path: str
    kernel: str = ""
    form: str = ""
    lowering: Lowering | None = None
    launch: Launch | None = None
    choices: tuple[str, ...] = ()
    env: dict[str, str] = {}
    quirks: tuple[AppliedQuirk, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    notes: tuple[str, ...] = ()
    key: str = ""
    schedule: dict[str, Any] = {}
    needs: str = ""

    @property
    def fell_back(self) -> bool:
        """Return whether `auto` was requested and an earlier path was rejected."""
        return self.requested == "auto" and bool(self.rejected)

    @property
    def specialised(self) -> tuple[Lowering, Launch]:
        """Return lowering and launch of a core path. Raises ValueError for any other path."""
        if self.lowering is None or self.launch is None:
            raise ValueError(f"the {self.path} path has no kernel of ours, so no lowering and no launch")
        return self.lowering, self.launch

    def __str__(self) -> str:
        """Return `explain()`, for people; the repr has every field."""
        return self.explain()

    def explain(self) -> str:
        """Return the plan as text: path, kernel, quirks with their sentences, and every rejected path."""
        lines = [f"{self.problem}", f"on {self.target} with {self.toolchain}: {self.path} path"]
        if self.lowering and self.launch:
            lines += _describe(
                kernel_text(self.kernel, self.form), self.lowering, self.launch, self.choices, self.env, "  "
            )
        if self.schedule:
            lines.append(f"  schedule {' '.join(f'{name}={value}' for name, value in self.schedule.items())}")
        if self.needs:
            lines.append(f"  needs    {self.needs}")
        lines += _quirk_lines(self.quirks)
        for r in self.rejected:
            lines.append(f"  not {r.path}: {r.reason}" + (f" (hint: {r.hint})" if r.hint else ""))
            if r.choice:
                c = r.choice
                lines += _describe(
                    kernel_text(c.kernel, c.form), c.lowering, c.launch, c.choices, c.env, "    would be "
                )
                lines += [f"  {line}" for line in _quirk_lines(c.quirks)]
        lines += [f"  note     {n}" for n in self.notes]
        return "\n".join(lines)


def kernel_text(kernel: str, form: str) -> str:
    """Return a kernel's name for people, with the form that runs. Tuning, quirks and records name the kernel alone."""
    return f"{kernel}, in its form {form}" if form else kernel


def _describe(
    kernel: str, lowering: Lowering, launch: Launch, choices: tuple[str, ...], env: dict[str, str], indent: str
) -> list[str]:
    return [
        f"{indent}kernel   {kernel}",
        f"{indent}launch   {' '.join(f'{k}={v}' for k, v in launch.values().items())}",
        f"{indent}lowering {' '.join(f'{c}={getattr(lowering, c)}' for c in choices)}",
        *(f"{indent}env      {k}={v}" for k, v in env.items()),
    ]


def _quirk_lines(quirks: Sequence[AppliedQuirk]) -> list[str]:
    """Return a line for each quirk that changed the plan, and a line for each doubt with the ids of the others."""
    lines = [f"  quirk    {q.id}: {q.sentence}" + (f" [{q.note}]" if q.note else "") for q in quirks if q.sets]
    noted: dict[str, list[str]] = {}
    for quirk in quirks:
        if not quirk.sets:
            noted.setdefault(quirk.note, []).append(quirk.id)
    why = "`portattn quirks show ID` says why"
    for note, ids in noted.items():
        doubt = f" [{note}]" if note else ""
        lines.append(f"  noted    compiler bugs for which this plan is not changed ({why}): {', '.join(ids)}{doubt}")
    return lines
