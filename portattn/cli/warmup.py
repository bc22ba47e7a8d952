"""`portattn warmup`: compile later calls' kernels into this machine's caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from portattn.cli.errors import RED, require_some
from portattn.cli.output import emit_json, json_option, plural, status, table
from portattn.errors import DataError


@click.command()
@click.argument("specs", metavar="SPECS.json", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--device", metavar="TYPE[:INDEX]", help="Where the calls' tensors would be; this machine's accelerator.")
@click.option("--jobs", type=click.IntRange(1, 256), help="Child processes that compile side by side.")
@json_option
def warmup(specs: Path, device: str | None, jobs: int | None, as_json: bool) -> None:
    """Compile the kernels of the calls in SPECS.json, run their canaries, and run each call once.

    SPECS.json is a list of calls: {"op": "attention", "q": "bf16[2,32,4096,128]", "k": "bf16[2,8,4096,128]", ...,
    "causal": true}, with the operation's own arguments; a tensor is described by its type and shape, and by its
    strides if it is not contiguous: "bf16[2,8,4096,128]:8388608,128,1024,1". Types: fp16, bf16, fp32, i32, bool.

    A size that varies is a name: "k": "bf16[2,8,S,128]" with "sizes": {"S": "1..4096"}, or a list of sizes.

    Files on disk (Triton's cache, compile records, canaries, the launcher in C) spare later processes the compiles;
    caches in memory end with this process: in the serving process, call portattn.warmup with the same specs.

    Exit status 1: a call could not be warmed up. 3: SPECS.json has no call."""
    import warnings

    import torch

    from portattn.api.warmup import warmup as warm
    from portattn.errors import ArgumentError, CompileWarning

    given = _read(specs)
    try:
        where = None if device is None else torch.device(device)
    except RuntimeError:
        raise ArgumentError("warmup", "--device", device, "must be a device of torch, such as cuda:0") from None
    with status("looking at the specs") as say, warnings.catch_warnings():
        warnings.simplefilter("ignore", CompileWarning)  # shown below
        report = warm(given, device=where, jobs=jobs, say=say)
    if as_json:
        emit_json(report)
    else:
        table(
            ("call", "path", "launched by", "s", "what was done"),
            [(one.call, one.path, one.way, f"{one.seconds:.2f}", _done(one)) for one in report.specs],
        )
        compiles = f"{report.compile_seconds:.1f} s of compiles side by side"
        click.echo(f"{plural(len(report.specs), 'call')} in {report.seconds:.1f} s, {compiles}")
    if report.failed:
        raise click.exceptions.Exit(RED)
    require_some(len(report.specs), "warmed up", [f"{specs} has no call"])


def _read(path: Path) -> list[Any]:
    import msgspec

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
