"""A specialisation of our own kernels as one line: the problem as `portattn plan` takes it, and what it starts from.

The inverse of portattn.tools.quirks.probe.plans.parse. A line is handed on only when it leads back to what it was made
of.
"""

from __future__ import annotations

from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import ASKED
from portattn.schema.target import Target
from portattn.tools.quirks.lifecycle.specialised import Specialisation
from portattn.tools.quirks.probe import plans

# Flags whose option has another name, or says more than yes.
_OTHERWISE = frozenset({"alibi_slopes", "return_lse", "bias", "mask", "seqlens_k"})


def problem_options(problem: Problem) -> list[str]:
    """The options of `portattn plan` that describe a problem, its op first."""
    p, row = problem, ROWS[problem.op]
    words = [p.op, "--q", f"{p.batch},{p.heads_q},{p.seq_q},{p.head_dim}"]
    words += ["--kv", f"{p.batch},{p.heads_k},{p.seq_k},{p.head_dim}", "--dtype", p.dtype]
    if p.head_dim_v != p.head_dim or row.latent:
        words += ["--dv", str(p.head_dim_v)]
    if p.causal != "none":
        words.append("--causal" if p.causal == "bottom_right" else f"--causal={p.causal}")
    if p.window:
        right = 0 if p.causal != "none" else p.window_right
        words += ["--window", f"{p.window_left},{right}"]
    words += [f"--{name.replace('_', '-')}" for name in ASKED if getattr(p, name) and name not in _OTHERWISE]
    if p.seqlens_k and not row.always_lengths:
        words.append("--seqlens-k")
    usually = {"layout": "bhsd", "page_layout": "phd", "kv_format": "as_q", "kv_scales": "none", "rotary": "none"}
    unaligned = "unaligned" if p.word_aligned or p.kv_format == usually["kv_format"] else "unaligned-words"
    for given, name in ((p.alibi_slopes, "alibi"), (p.return_lse, "lse"), (not p.aligned, unaligned)):
        words += [f"--{name}"] if given else []
    for name in ("bias", "mask"):
        if getattr(p, name):
            words.append(f"--{name}-by-key" if getattr(p, f"{name}_by_key") else f"--{name}")
    for name in ("total_q", "total_k"):
        if getattr(p, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(p, name))]
    for name in ("chunk", "page_size", "tokens", "num_splits", "rotary_dim"):
        if getattr(p, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(p, name))]
    for name, usual in usually.items():
        if getattr(p, name) != usual:
            words += [f"--{name.replace('_', '-')}", getattr(p, name)]
    if p.page_size and not p.pages_in_line and row.always_lengths and (p.page_layout == "phd" or p.heads_k == 1):
        words.append("--pages-apart")
    return words


def plan_line(what: Specialisation, target: Target, registry: Registry, also: tuple[str, ...] = ()) -> str:
    """A "plan:" probe that states this specialisation; empty where none does.

    `--start` names what a plan would not choose by itself. `also` are quirks that are off, the probe's own among them.
    No line can say what has no option: that gradients will be asked for, gradients of a bias, slopes or LSE, dropout,
    tensors over 2 GiB, a negative scale, a compile environment.
    """
    first, *rest = problem_options(what.problem)
    bare = " ".join([plans.PREFIX, first, "--target", target.name, *rest])
    settings = Settings(backend=registry.backends[target.backend].core_path, quirks=",".join(f"-{q}" for q in also))
    try:
        if plans.parse(bare).problem != what.problem or what.env:
            return ""
        for start in _starts(what, plan(what.problem, target, registry, settings=settings)):
            line = " ".join([bare, *(["--start", ",".join(start)] if start else [])])
            made = plan(
                what.problem, target, plans.with_start_values(registry, plans.parse(line), target), settings=settings
            )
            if _same(made, what):
                return line
    except PortattnError:
        return ""
    return ""


def _starts(what: Specialisation, made: Plan) -> list[list[str]]:
    """What to start from: nothing, what the plan does otherwise, everything."""
    choices = {name: getattr(what.lowering, name) for name in CORES[what.problem.op].choices}
    launch = what.launch.values()
    launch.pop("splits")  # follows from the problem, or is its num_splits
    wanted = {**launch, **choices}
    every = [_written(name, value) for name, value in wanted.items()]
    if made.lowering is None or made.launch is None:
        return [every]
    differ = [
        _written(name, value)
        for name, value in wanted.items()
        if (getattr(made.lowering, name) if name in choices else made.launch.get(name)) != value
    ]
    return [[], differ, every]


def _written(name: str, value: object) -> str:
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def _same(made: Plan, what: Specialisation) -> bool:
    """Whether a plan takes the same kernel in the same way."""
    if made.lowering is None or made.launch is None:
        return False
    choices = CORES[what.problem.op].choices
    alike = all(getattr(made.lowering, name) == getattr(what.lowering, name) for name in choices)
    return alike and made.launch == what.launch and made.env == what.env
