"""`portattn plan`: how one problem would run on one target, which need not be here."""

from __future__ import annotations

from typing import Any

import click

from portattn.cli.output import emit_json, json_option, target_option, tell_unknown, toolchain_option
from portattn.tools import display_text, param_types
from portattn.tools.param_types import FLAG, options
from portattn.tools.problem_options import CausalCommand, problem_from, problem_options, target_from, training_problem


@click.command(cls=CausalCommand)
@click.argument("op", metavar="OP", type=param_types.OP)
@target_option(
    help="Where it would run, such as rocm:gfx942, gfx942, mi300x or a family (rdna3: a plan for each of its chips); "
    "this machine by default."
)
@toolchain_option("The compiler, such as triton==3.6.0; the installed one by default.")
@problem_options
@options(
    ("--grad", FLAG, "Gradients of the tensors will be asked for."),
    ("--dropout", FLAG, "Probabilities are dropped, by a seed."),
    ("--deterministic", FLAG, "Of gradients: repeatable bit by bit."),
    ("--backend", {"type": param_types.PLANNED_PATH, "metavar": "PATH"},
     "A path that must be taken; `auto` takes the best one."),
    ("--quirks", {"type": param_types.OVERRIDES, "metavar": "+ID,-ID"}, "Apply (+) or switch off (-) quirks."),
    ("--legend explained", FLAG, "Say what the names in a schedule mean."),
)  # fmt: skip
@json_option
def plan(
    op: str, target: str | None, toolchain: str | None, backend: str | None, quirks: str | None, grad: bool,
    dropout: bool, deterministic: bool, explained: bool, as_json: bool, **described: Any,
) -> None:  # fmt: skip
    """Plan OP on a target: its path, lowering and quirks, and why no other path.

    OP is attention, varlen_attention, decode_attention, paged_attention, sparse_attention, mla_attention, append_kv,
    write_pages, or the gradients of the first two: attention_backward, varlen_attention_backward. There --lse says that
    the LSE has a gradient, too. Nothing is run or compiled, and the target need not be here. With a named target the
    plan does not depend on this machine; without one, what failed to compile here before is taken into account.

    Exit status 1: the path named by --backend cannot run this.

    \b
    portattn plan attention --target rocm:gfx942 --toolchain triton==3.6.0 \\
        --q 8,64,1024,64 --kv 8,16,1024,64 --dtype fp16 --causal
    portattn plan paged_attention --target cuda:sm_90 --toolchain triton==3.6.0 \\
        --q 16,32,1,128 --kv 16,8,8192,128 --page-size 16 --dtype bf16"""
    import msgspec

    from portattn.compile.record_store import store
    from portattn.config import current
    from portattn.errors import ArgumentError, SettingError
    from portattn.planning.planner import plan as plan_problem
    from portattn.planning.registry import Registry
    from portattn.schema.compile_record import NO_RECORDS

    param_types.check_op("plan", op)
    problem = training_problem(problem_from(op, **described), grad, dropout, deterministic)
    members = Registry.load().family(target or "")
    places = [target_from(name, toolchain) for name in members] or [target_from(target, toolchain)]
    tell_unknown([places[0].toolchain] if toolchain else [])
    changes = {name: value for name, value in (("backend", backend), ("quirks", quirks)) if value is not None}
    try:
        Registry.load().overrides(quirks or "")
    except SettingError as error:
        raise ArgumentError("plan", "--quirks", quirks, f"must be +ID,-ID of known quirks ({error})") from None
    settings = msgspec.structs.replace(current(), **changes)
    named = target is not None or toolchain is not None
    records = NO_RECORDS if named else store(settings)
    made = [plan_problem(problem, where, records=records, settings=settings) for where in places]
    if as_json:
        emit_json(made if len(made) > 1 else made[0])
    else:
        click.echo("\n\n".join(one.explain() for one in made))
        lines = display_text.of_plans(made)
        if lines and not explained:
            lines = ["--legend says what the names in a schedule mean"]
        for line in lines:
            click.echo(f"  {line}")
