"""`portattn verify`: run the kernels by every means of this machine, and find the differing one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import click

from portattn.cli import RED, require_some
from portattn.cli.output import emit_json, json_option, plural, table, target_option, toolchain_option
from portattn.schema.plan import kernel_text
from portattn.schema.problem_limits import OPS
from portattn.tools import param_types
from portattn.tools.param_types import FLAG, LONGEST, FiniteRange, options
from portattn.tools.problem_options import target_from

if TYPE_CHECKING:
    from portattn.tools.verify import VerificationRow

COLOURS = {"agree": "green", "compiled": "green", "unseen": "yellow", "refused": "yellow"}


@click.command()
@click.argument("ops", metavar="[OP]...", nargs=-1, type=param_types.OP)
@target_option("The chip whose plans are verified; this machine's by default.")
@toolchain_option("The compiler; the installed one by default.")
@options(
    ("--emulate", FLAG, "Also run the machine code in a model of the (AMD) chip."),
    ("--run-older/--no-run-older run_ptx_compat", {"default": None},
     "Run the target's code on a newer NVIDIA GPU that is here; the default where there is one."),
    ("--seconds", {"type": FiniteRange(min=1.0, max=LONGEST), "default": 120.0}, "Time limit of each run."),
)  # fmt: skip
@json_option
def verify(
    ops: tuple[str, ...], target: str | None, toolchain: str | None, emulate: bool, run_ptx_compat: bool | None,
    seconds: float, as_json: bool,
) -> None:  # fmt: skip
    """Run small adversarial problems of each OP (all by default) as they are planned for a target.

    The same kernel, lowering and tile run under Triton's interpreter and, if the target is here, on the device; code
    for an older NVIDIA GPU runs on a newer one ("sm_80 code on sm_90"); with --emulate the compiled code also runs in a
    functional model of the chip. Each result is compared with a float64 oracle. If they disagree, the row says what is
    to blame.

    Exit status 1: something differs. 3: nothing could be run or compiled here, so nothing was verified."""
    from rich.console import Console

    from portattn.config import current
    from portattn.tools.verify import RED as DIFFERS
    from portattn.tools.verify import UNVERIFIED
    from portattn.tools.verify import verify as rows_of

    param_types.check_known("verify", "OP", ops, OPS)
    where = target_from(target, toolchain)
    with Console(stderr=True).status("verifying") as status:
        rows = list(rows_of(ops, where, current(), seconds, lambda what: status.update(what), emulate, run_ptx_compat))
    red = [row for row in rows if row.verdict in DIFFERS]
    verified = sum(row.verdict not in UNVERIFIED for row in rows)
    if as_json:
        said = {"target": where.name, "toolchain": str(where.toolchain), "verified": verified, "red": len(red)}
        counts = {"levels": Counter(row.level for row in rows), "labels": Counter(r.label for r in rows if r.label)}
        emit_json(said | counts | {"rows": rows})
    else:
        means = sorted({name for row in rows for name in row.seen})
        shown = ((_shown(row.seen.get(name)) for name in means) for row in rows)
        lines = [
            [row.verdict, kernel_text(row.kernel, row.form), *cells, row.problem]
            for row, cells in zip(rows, shown, strict=True)
        ]
        table(["verdict", "kernel", *means, "problem"], lines)
        for row in rows:
            if row.verdict != "agree":
                reasons = "; ".join(f"{name}: {seen.reason}" for name, seen in row.seen.items() if seen.reason)
                colour = COLOURS.get(row.verdict, "red")
                click.secho(f"{row.problem}: {row.sentence}" + (f" ({reasons})" if reasons else ""), fg=colour)
        for reason in dict.fromkeys(r.seen["older"].reason for r in rows if "older" in r.seen and not r.label):
            click.secho(f"not run as {where.arch.name} code: {reason}", fg="yellow")
        reached = Counter(f"{r.level} ({r.label})" if r.label else r.level for r in rows if r.level != "declared")
        levels = "".join(f", {number} {words}" for words, number in reached.most_common())
        counted = f"{plural(len(rows), 'problem')}, {verified} verified, {len(red)} red{levels}"
        click.echo(f"{where.name} with {where.toolchain}: {counted}")
    if red:
        raise click.exceptions.Exit(RED)
    require_some(verified, "verified", (reason for row in rows for reason in _reasons(row)))


def _reasons(row: VerificationRow) -> list[str]:
    return [seen.reason for seen in row.seen.values() if seen.reason] or [row.sentence]


def _shown(seen: object) -> str:
    from portattn.testing.findings import Numerics

    if not isinstance(seen, Numerics):
        return "-"
    if seen.error is None or not seen.budget:
        return seen.outcome
    return f"{seen.outcome} {seen.error / seen.budget:.2f}"
