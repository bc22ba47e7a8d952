"""`portattn plan`: how a problem would run on a target; `context-parallel`: its cost; `warmup`: compile calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from portattn.cli import RED, output, require_some
from portattn.errors import ArgumentError, DataError, SettingError
from portattn.planning.registry import Registry
from portattn.schema.problem_limits import OPS
from portattn.tools import display_text, param_types
from portattn.tools.param_types import FLAG, options
from portattn.tools.problem_options import (
    TRAINING,
    CausalCommand,
    problem_from,
    problem_options,
    shape,
    target_from,
    training_problem,
    window_sides,
)

if TYPE_CHECKING:
    from portattn.distributed.cost_report import Cost
    from portattn.schema.plan import Plan
    from portattn.schema.problem import Problem
    from portattn.schema.target import Target
    from portattn.testing.bound import LowerBound

LOWERING = "docs/lowering.md explains the fields of a lowering"
BOUND_SECONDS = 240.0  # that the compiler of a bound may take


@click.command(cls=CausalCommand)
@click.argument("op", metavar="OP", type=param_types.OP)
@output.target_option(
    help="Where it would run, such as rocm:gfx942, gfx942, mi300x or a family (rdna3: a plan for each of its chips); "
    "this machine by default."
)
@output.toolchain_option("The compiler, such as triton==3.6.0; the installed one by default.")
@problem_options
@options(
    *TRAINING,
    ("--backend", {"type": param_types.PLANNED_PATH, "metavar": "PATH"},
     "A path that must be taken; `auto` takes the best one."),
    ("--quirks", {"type": param_types.OVERRIDES, "metavar": "+ID,-ID"}, "Apply (+) or switch off (-) quirks."),
    ("--start", {"multiple": True, "metavar": "NAME=VALUE,…"},
     "Launch values, compiler options and choices of lowering that replace the arch's tuning, as in a quirk's probe."),
    ("--bound bounded", FLAG, "Compile the portable core, and say the least time that its code can take on the chip."),
    ("--legend explained", FLAG, "Say what the names in a schedule mean, and where those of a lowering are explained."),
)  # fmt: skip
@output.json_option
def plan(
    op: str, target: str | None, toolchain: str | None, backend: str | None, quirks: str | None, grad: bool,
    dropout: bool, deterministic: bool, bounded: bool, explained: bool, as_json: bool, start: tuple[str, ...],
    **described: Any,
) -> None:  # fmt: skip
    """Plan OP on a target: its path, lowering and quirks, and why no other path.

    OP is attention, varlen_attention, decode_attention, paged_attention, sparse_attention, block_sparse_attention,
    mla_attention, append_kv, write_pages, indexer_logits, topk_indices, or the gradients of three of them:
    attention_backward, varlen_attention_backward, block_sparse_attention_backward. There --lse says that the LSE has a
    gradient, too. Nothing is run, --bound alone compiles, and the target need not be here. With a named target the plan
    does not depend on this machine; without one, what failed to compile here before is taken into account.

    Exit status 1: the path named by --backend cannot run this.

    \b
    portattn plan attention --target rocm:gfx942 --toolchain triton==3.6.0 \\
        --q 8,64,1024,64 --kv 8,16,1024,64 --dtype fp16 --causal
    portattn plan paged_attention --target cuda:sm_90 --toolchain triton==3.6.0 \\
        --q 16,32,1,128 --kv 16,8,8192,128 --page-size 16 --dtype bf16"""
    from portattn.compile.record_store import store
    from portattn.config import current
    from portattn.planning.planner import plan as plan_problem
    from portattn.schema.compile_record import NO_RECORDS

    param_types.check_known("plan", "OP", [op], OPS)
    problem = training_problem(problem_from(op, **described), grad, dropout, deterministic)
    members = Registry.load().family(target or "")
    places = [target_from(name, toolchain) for name in members] or [target_from(target, toolchain)]
    output.tell_unknown([places[0].toolchain] if toolchain else [])
    changes = {name: value for name, value in (("backend", backend), ("quirks", quirks)) if value is not None}
    try:
        Registry.load().overrides(quirks or "")
    except SettingError as error:
        raise ArgumentError("plan", "--quirks", quirks, f"must be +ID,-ID of known quirks ({error})") from None
    settings = msgspec.structs.replace(current(), **changes)
    named = target is not None or toolchain is not None
    records = NO_RECORDS if named else store(settings)
    made = [plan_problem(problem, where, _started(start, problem, where), records, settings) for where in places]
    bounds = [_bound(one, where) for one, where in zip(made, places, strict=True)] if bounded else []
    if as_json:
        shown = [msgspec.to_builtins(one) for one in made]
        for one, least in zip(shown, bounds, strict=False):
            one["bound"] = least
        output.emit_json(shown if len(shown) > 1 else shown[0])
    else:
        told = [f"\n{least.explain()}" for least in bounds] or [""] * len(made)
        click.echo("\n\n".join(one.explain() + more for one, more in zip(made, told, strict=True)))
        lines = display_text.of_plans(made)
        if any(one.lowering for one in made):
            lines += [LOWERING] * explained
        for line in lines if explained or not lines else ["--legend says what the names in a schedule mean"]:
            click.echo(f"  {line}")


def _started(start: tuple[str, ...], problem: Problem, where: Target) -> Registry:
    if not start:
        return Registry.load()
    from portattn.tools.quirks import probe_plans

    values = probe_plans.start_values("plan", start, problem.op, where.backend)
    stated = probe_plans.PlanProbe(problem=problem, target=where.name, start=values)
    return probe_plans.with_start_values(Registry.load(), stated, where)


def _bound(made: Plan, where: Target) -> LowerBound:
    """Return the bound on the portable core of a plan. Raises NoBound, LabError or ArgumentError."""
    from portattn.testing import bound
    from portattn.tools import lab
    from portattn.tools.matrix.run import core_of

    bound.rates_of(where)
    core = core_of(made, where, Registry.load())
    if core is None:
        raise bound.NoBound(f"plan: --bound needs a plan of the portable core, and this one's path is {made.path}")
    worker = lab.worker(str(where.toolchain))
    try:
        return bound.of_plan(core, where, worker, BOUND_SECONDS)
    finally:
        worker.close()


@click.command()
@click.argument("specs", metavar="SPECS.json", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--device", metavar="TYPE[:INDEX]", help="Where the calls' tensors would be; this machine's accelerator.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Child processes that compile side by side.")
@output.json_option
def warmup(specs: Path, device: str | None, jobs: int | None, as_json: bool) -> None:
    """Compile the kernels of the calls in SPECS.json, run their canaries, and run each call once.

    SPECS.json is a list of calls: {"op": "attention", "q": "bf16[2,32,4096,128]", "k": "bf16[2,8,4096,128]", ...,
    "causal": true}, with the operation's own arguments; a tensor is described by its type and shape, and by its
    strides if it is not contiguous: "bf16[2,8,4096,128]:8388608,128,1024,1". Types: fp16, bf16, fp32, i32, bool.

    A size that varies is a name: "k": "bf16[2,8,S,128]" with "sizes": {"S": "1..4096"}, or a list of sizes.

    Files on disk spare later processes the compiles: in the serving process, call portattn.warmup with the same specs.

    Exit status 1: a call could not be warmed up. 3: SPECS.json has no call."""
    import warnings

    import torch

    from portattn.api.warmup import warmup as warm
    from portattn.errors import CompileWarning

    given = _read(specs)
    try:
        where = None if device is None else torch.device(device)
    except RuntimeError:
        raise ArgumentError("warmup", "--device", device, "must be a device of torch, such as cuda:0") from None
    with output.status("looking at the specs") as say, warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)  # shown below
        report = warm(given, device=where, jobs=jobs, say=say)
    if as_json:
        output.emit_json(report)
    else:
        output.table(
            ("call", "path", "launched by", "s", "what was done"),
            [(one.call, one.path, one.way, f"{one.seconds:.2f}", _done(one)) for one in report.specs],
        )
        compiles = f"{report.compile_seconds:.1f} s of compiles side by side"
        click.echo(f"{output.plural(len(report.specs), 'call')} in {report.seconds:.1f} s, {compiles}")
    if report.failed:
        raise click.exceptions.Exit(RED)
    require_some(len(report.specs), "warmed up", [f"{specs} has no call"])


def _read(path: Path) -> list[Any]:
    from portattn.tools import run_log

    try:
        return msgspec.json.decode(run_log.read(path), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(path, None, f"must be a list of calls: {error}") from None


def _done(one: Any) -> str:
    if one.failed:
        return f"failed: {one.failed}"
    did = ["compiled"] if one.compiled else []
    did += [f"loaded {', '.join(one.loaded)}"] if one.loaded else []
    return "; ".join(did) or ("nothing was left to do" if one.cached else "runs no kernel of portattn's")


PARALLEL = "context-parallel"


@click.command("context-parallel")
@options(
    ("--q", {"required": True, "metavar": "B,H,S,D"}, "Shape of the whole queries."),
    ("--kv", {"required": True, "metavar": "B,H,S,D"}, "Shape of the whole keys."),
    ("--dv", {"type": int, "metavar": "N"}, "Width of the values; D by default."),
    ("--dtype", {"default": "bf16", "metavar": "DTYPE"}, "bf16, fp16 or fp32; bf16 by default."),
    ("--ranks", {"required": True, "type": int, "metavar": "N"}, "GPUs, in all."),
    ("--inner", {"type": int, "metavar": "N"},
     "Ranks of each Ulysses group: 1 (by default) for a ring alone, as many as --ranks for Ulysses alone."),
    ("--layout", {"metavar": "LAYOUT"}, "How a sequence is cut: zigzag (by default) or contiguous."),
    ("--causal", FLAG, "A row sees no later key."),
    ("--window", {"metavar": "L,R"}, "Keys seen before and after a row's own; -1 for all."),
    ("--decode", FLAG, "Decoding over a sharded cache: S of --kv is its length."),
    ("--heads", {"metavar": "HEADS"}, "With --decode, what each rank gets: all (by default) or shard."),
    ("--rate", {"multiple": True, "metavar": "NAME=NUMBER"}, "A rate of the model, such as link=450e9; repeatable."),
)  # fmt: skip
@output.json_option
def context_parallel(
    q: str, kv: str, dv: int | None, dtype: str, ranks: int, rate: tuple[str, ...], as_json: bool, **options: Any
) -> None:  # fmt: skip
    """Print the cost of attention over several GPUs for each of them.

    Operations and bytes are exactly portattn.distributed's. Times are a model of the rates that it prints, whose
    defaults were measured on an H200, except the links' rates. The command runs nothing and needs no GPU.

    \b
    portattn context-parallel --q 1,32,131072,128 --kv 1,8,131072,128 --ranks 8 --causal
    portattn context-parallel --q 1,32,8388608,128 --kv 1,8,8388608,128 --ranks 2048 --inner 8 --causal
    portattn context-parallel --decode --q 1,64,1,128 --kv 1,8,1048576,128 --ranks 2 --rate link=300e9"""
    from portattn.distributed.cost import context_parallel_cost, decode_parallel_cost

    given: dict[str, Any] = {"q": shape(PARALLEL, "--q", q), "kv": shape(PARALLEL, "--kv", kv)}
    given |= {"ranks": ranks, "dim_v": dv, "dtype": dtype, "rates": _rates(rate)}
    if options.pop("decode"):
        for name in ("inner", "layout", "causal", "window"):
            if options.pop(name):
                raise click.UsageError(f"--{name} does not go with --decode")
        if options["heads"] is None:
            del options["heads"]
        function: Callable[..., Cost] = decode_parallel_cost
        given |= options
    else:
        if options.pop("heads"):
            raise click.UsageError("--heads goes with --decode alone")
        sides = window_sides(PARALLEL, options.pop("window") or "-1,-1")
        given |= {"window": tuple(None if side < 0 else side for side in sides)}
        given |= {name: value for name, value in options.items() if value is not None}
        function = context_parallel_cost
    try:
        found = function(**given)
    except ArgumentError as error:
        limit = re.sub(r"\b(inner|heads_k)\b", lambda word: _option(word[0]), error.limit)
        raise ArgumentError(PARALLEL, _option(error.argument), error.value, limit) from None
    if as_json:
        output.emit_json(found.data())
    else:
        click.echo(found.explain())


def _option(argument: str) -> str:
    """Return the command's words for an argument of the cost functions."""
    named = {"S": "S of --q", "heads_q": "H of --q", "heads_k": "H of --kv", "dim_v": "--dv"}
    return named.get(argument, f"--{argument}")


def _rates(given: tuple[str, ...]) -> Any:
    from portattn.distributed.cost_report import Rates

    rates = msgspec.structs.asdict(Rates())
    for text in given:
        name, _, number = text.partition("=")
        if name not in rates:
            raise ArgumentError(PARALLEL, "--rate", text, f"must be one of {', '.join(rates)}, = and a number")
        try:
            rates[name] = type(rates[name])(float(number))
        except (ValueError, OverflowError):
            rates[name] = 0
        if not 0 < rates[name] < float("inf"):
            raise ArgumentError(PARALLEL, "--rate", text, "must have a positive number behind =")
    return Rates(**rates)
