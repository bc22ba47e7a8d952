"""The core kernels as tunables: a candidate is planned as if its entry were the tuning file's."""

import contextlib
import datetime
import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from portattn.compile.ensure_compiled import code_key, compile_in, first_line, over_limit
from portattn.config import Settings
from portattn.errors import PathUnavailable
from portattn.launch import KernelCall, Signature, kernel_calls, launch_all, meta_call
from portattn.planning.data_files import backend_options, options
from portattn.planning.kernel_specs import CORES, CoreKernel, head_columns
from portattn.planning.planner import plan
from portattn.planning.registry import Registry
from portattn.schema import conditions, toml_reader
from portattn.schema.call import Call
from portattn.schema.lowering import CHOICES, LAUNCH_FIELDS, OF_ROWS, Launch, OptionValue
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.symbolic_int import next_power_of_two
from portattn.schema.target import TRAITS, Arch, Target
from portattn.schema.tensors import KV_STORED, TORCH_DTYPE
from portattn.schema.tuning import Entry, Provenance, Tuning
from portattn.testing import bound
from portattn.testing.executor import analyst
from portattn.tools.tune import tunable
from portattn.worker.client import Worker

AXES = Path(__file__).with_name("axes.toml")
JOINED = 3  # best choices of each sweep of the gradients' kernels, which are joined with the other sweep's best
COSTS = "step_costs"  # the fact that holds bound.Costs
WARPS = ("warps", "no_warps")  # of an axis' chip, beside the traits


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One setting and the values to try; chip: required traits of the chip; when: conditions on the problem."""

    name: str
    values: tuple[tunable.Setting, ...]
    chip: tuple[str, ...] = ()
    when: tuple[str, ...] = ()

    def applies(self, problem: Problem, target: Target) -> bool:
        arch = target.arch
        if self.name == "dot_precision" and not set(self.values) <= set(arch.dot_precisions):
            return False
        if self.name in options() and self.name not in backend_options().get(target.backend, {}):
            return False
        return set(self.chip) <= traits_of(arch) and conditions.all_hold(
            map(conditions.parse, self.when), problem.features()
        )


def traits_of(arch: Arch) -> set[str]:
    return {*arch.traits, WARPS[0 if arch.warp_size else 1]}


class _Axes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    spaces: dict[str, tuple[str, ...]]
    conditions: dict[str, tuple[str, ...]]
    axes: dict[str, tuple[Axis, ...]]


def _check(axis: Axis) -> None:
    """Raise ValueError for an unknown trait, condition, choice or name."""
    if unknown := set(axis.chip).difference(TRAITS, WARPS):
        raise ValueError(f"axis {axis.name}: chip names {min(unknown)!r}; known: {', '.join((*TRAITS, *WARPS))}")
    conditions.parse_all(axis.when)
    if axis.name in CHOICES:
        if outside := [value for value in axis.values if value not in CHOICES[axis.name]]:
            raise ValueError(f"axis {axis.name}: {outside[0]!r} is outside {CHOICES[axis.name]}")
    elif axis.name not in (*LAUNCH_FIELDS, *options(), "occupancy") or axis.name == "splits":
        raise ValueError(f"axis {axis.name!r} is no field of Launch, no compiler option and no Lowering choice")


@functools.cache
def spaces(path: Path = AXES) -> dict[str, tuple[Axis, ...]]:
    """Return the axes of each kernel. Raises DataError (file, line, key) on an unsound axis or another schema."""
    content, text = toml_reader.read(path)
    data = toml_reader.convert(content, _Axes, path, text)
    named = data.conditions
    lists = {
        name: tuple(
            Axis(axis.name, tuple(None if value == "unset" else value for value in axis.values), axis.chip,
                 tuple(text for word in axis.when for text in named.get(word, (word,))))
            for axis in axes
        )
        for name, axes in data.axes.items()
    }  # fmt: skip
    for name, axes in lists.items():
        with toml_reader.errors_at(path, text, "axes", name):
            for axis in axes:
                _check(axis)
    lists["rows"] = tuple(msgspec.structs.replace(axis, name=OF_ROWS[axis.name]) for axis in lists["held"])
    found = {}
    for kernel, names in data.spaces.items():
        with toml_reader.errors_at(path, text, "spaces", kernel):
            found[kernel] = tuple(axis for name in names for axis in lists[name])
    return found


Rule = Callable[[tunable.Choice, Problem, Target], "str | None"]


def _buffers(choice: tunable.Choice, problem: Problem, target: Target) -> str | None:
    """Reject tiles of K and V, or Q and dO, that do not fit: Triton keeps at least num_stages − 1 of them."""
    width = problem.head_dim if problem.op == "mla_attention" else problem.head_dim + problem.head_dim_v
    item = float((KV_STORED if problem.kv_format != "as_q" else TORCH_DTYPE[problem.dtype]).itemsize)
    item /= problem.cache_format.per_byte
    launches = Launch().changed(choice.launch).kernels()
    least = int(max((launch.num_stages - 1) * launch.block_n for launch in launches) * width * item)
    if problem.op == "sparse_attention" or least <= target.arch.scratchpad_bytes:
        return None
    return f"its K and V tiles alone take {least} bytes, {target.arch.name} has {target.arch.scratchpad_bytes}"


def _accumulators(choice: tunable.Choice, problem: Problem, target: Target) -> str | None:
    """Reject tiles whose float32 scores and result exceed the registers."""
    launch, arch = Launch().changed(choice.launch), target.arch
    if problem.backward:
        return _gradient_accumulators(launch, problem, arch)
    threads = launch.num_warps * arch.warp_size
    if not arch.registers or not threads or problem.op == "sparse_attention":
        return None
    columns = next_power_of_two(problem.head_dim_v) + launch.block_n
    if choice.lowering.get("warps") == "apart":  # each warp has a result of its own
        columns, threads = next_power_of_two(problem.head_dim_v) + launch.block_n // launch.num_warps, arch.warp_size
    most = min(arch.registers, int(launch.get("maxnreg") or arch.registers))
    least = launch.block_m * columns // threads
    return f"scores and result take {least} registers a thread, of {most}" if least > most else None


def _gradient_accumulators(launch: Launch, problem: Problem, arch: Arch) -> str | None:
    """Reject tiles whose float32 gradients and two tiles of scores, P and dS, exceed the registers."""
    width, width_v = (next_power_of_two(dim) for dim in (problem.head_dim, problem.head_dim_v))
    for kernel, one, columns in (("keys", launch, width + width_v), ("rows", launch.of_rows(), width)):
        threads = one.num_warps * arch.warp_size
        if not arch.registers or not threads:
            return None
        least = one.block_m * (columns + 2 * one.block_n) // threads
        if least > arch.registers:
            return f"gradients and scores of {kernel} take {least} registers a thread, of {arch.registers}"
    return None


def _rows_a_warp(choice: tunable.Choice, problem: Problem, target: Target) -> str | None:
    """Reject fewer than 16 rows a warp for narrow heads; wide heads need the registers of more warps."""
    launch = Launch().changed(choice.launch)
    if max(head_columns(problem)[0], problem.head_dim_v) > 128 or problem.op not in ("attention", "varlen_attention"):
        return None
    few = launch.block_m < 16 * launch.num_warps and launch.num_warps > 4
    return f"{launch.num_warps} warps share {launch.block_m} rows" if few else None


def _capped_registers(choice: tunable.Choice, problem: Problem, target: Target) -> str | None:
    """Reject maxnreg with other than four warps: it is for more programs of four warps a core."""
    launch = Launch().changed(choice.launch)
    if launch.get("maxnreg") and launch.num_warps != 4:
        return f"maxnreg with {launch.num_warps} warps"
    return None


RULES: tuple[Rule, ...] = (_buffers, _accumulators, _rows_a_warp, _capped_registers)


def axes_of(kernel: str, problem: Problem, target: Target) -> list[Axis]:
    found: dict[str, Axis] = {}
    for axis in spaces()[kernel]:
        if axis.applies(problem, target):
            found.setdefault(axis.name, axis)
    return list(found.values())


def candidates(
    kernel: str, reads: tuple[str, ...], problem: Problem, target: Target, base: tunable.Choice,
    without: Collection[str] = (), among: Collection[str] = (),
) -> Iterator[tunable.Choice]:  # fmt: skip
    """Return combinations of the kernel's axes, nearest to the base first; reads: Lowering choices; among: axes."""
    axes = [axis for axis in axes_of(kernel, problem, target) if axis.name not in CHOICES or axis.name in reads]
    axes = [axis for axis in axes if axis.name not in without and (not among or axis.name in among)]
    found: dict[str, tunable.Choice] = {}
    for values in itertools.product(*(axis.values for axis in axes)):
        choice = tunable.apply_settings(
            base, {axis.name: value for axis, value in zip(axes, values, strict=True)}, tuple(CHOICES)
        )
        found.setdefault(choice.key, choice)
    yield from sorted(found.values(), key=lambda choice: (choice.differs(base), str(choice)))


def left_out(choice: tunable.Choice, problem: Problem, target: Target) -> str:
    """Return why a candidate is useless whatever the compiler does, or ""."""
    return next((why for rule in RULES if (why := rule(choice, problem, target))), "")


class CoreTunable:
    """A kernel of portattn/kernels/ as one op uses it."""

    def __init__(self, kernel: CoreKernel) -> None:
        self.kernel, self.name = kernel, kernel.name
        self.ops: tuple[str, ...] = (kernel.op,)

    def space(self, problem: Problem, target: Target, base: tunable.Choice) -> Iterator[tunable.Choice]:
        found = candidates(self.name, self.kernel.choices, problem, target, base)
        return (choice for choice in found if not left_out(choice, problem, target))

    def today(self, problem: Problem, target: Target) -> tunable.Choice | None:
        return None

    def build(self, problem: Problem, choice: tunable.Choice, target: Target) -> tunable.BuiltCandidate:
        made = plan_choice(self.name, problem, choice, target)
        launches, _, _ = kernel_calls(made, meta_call(problem), target.arch.cores)
        code = code_key(made, launches)
        # The split over keys is no part of the code, and so not of its key.
        told = f"{code} {made.specialised[1].splits} {[launch.grid for launch in launches]}"

        def start(call: Call) -> tunable.RunnableCandidate:
            calls, out, _ = kernel_calls(made, call, target.arch.cores)
            return tunable.RunnableCandidate(lambda: launch_all(calls, made, call.q), out)

        def compile_it(worker: Worker, seconds: float) -> tunable.CompileResult:
            return compile_plan(made, launches, target, worker, seconds)

        def bound_of(facts: tunable.Facts) -> bound.LowerBound | None:
            said = facts.get(COSTS)
            costs = msgspec.json.decode(str(said), type=bound.Costs) if said else None
            return bound.lower_bound(problem, made.specialised[1], costs, target) if costs is not None else None

        return tunable.BuiltCandidate(hashlib.sha256(told.encode()).hexdigest()[:32], start, code, compile_it, bound_of)


class CoreBackwardTunable(CoreTunable):
    """The gradients' kernels: keys' and rows' are swept one after the other, and the best of each are joined."""

    def space(self, problem: Problem, target: Target, base: tunable.Choice) -> Iterator[tunable.Choice]:
        whole, names = swept(base), tuple(OF_ROWS.values())
        found = candidates(self.name, self.kernel.choices, problem, target, whole, without=names)
        rows = candidates(self.name, self.kernel.choices, problem, target, whole, among=names)
        for choice in itertools.chain.from_iterable(itertools.zip_longest(found, rows)):
            if choice is not None and not left_out(choice, problem, target):
                yield choice

    def joined(self, base: tunable.Choice, ranked: Sequence[tunable.Choice]) -> Iterator[tunable.Choice]:
        return combine_sweeps(base, ranked)


def core_tunable(kernel: CoreKernel) -> CoreTunable:
    return CoreBackwardTunable(kernel) if kernel.of_rows else CoreTunable(kernel)


def plan_choice(kernel: str, problem: Problem, choice: tunable.Choice, target: Target) -> Plan:
    """Return the core plan of this choice as a tuning entry, quirks and limits applied. Raises NotBuilt."""
    registry = Registry.load()
    entry = Entry(
        kernel=kernel, launch=choice.launch, lowering=choice.lowering, occupancy=choice.occupancy,
        split_threshold=choice.split_threshold,
    )  # fmt: skip
    source = Provenance(chip="", toolchain=str(target.toolchain), date=datetime.date.min, measured=False)
    only = Tuning(provenance=source, entry=(entry,))
    name = target.arch.tuning or target.arch.name
    own = msgspec.structs.replace(registry, tunings={target.backend: {name: only}})
    settings = Settings(backend=registry.backends[target.backend].core_path)
    try:
        return plan(problem, target, own, settings=settings)
    except PathUnavailable as error:
        raise tunable.NotBuilt(error.rejected[0].reason if error.rejected else first_line(str(error))) from None


def compile_plan(
    made: Plan, launches: Sequence[KernelCall | Signature], target: Target, worker: Worker, seconds: float,
    working: tuple[str, ...] = (),
) -> tunable.CompileResult:  # fmt: skip
    """Compile every launch of a plan in a child; facts are the first launch's, or maxima over kernels with products."""
    kernel = CORES[made.problem.op]
    if kernel.of_rows and made.kernel == kernel.name:
        working = kernel.functions
    found: tunable.Facts | None = None
    reader = analyst(target)
    asks = reader.asks if reader else "full" if target.arch.rates is None or made.problem.backward else "code"
    for launch in launches:
        reply = compile_in(worker, launch, made, target, seconds, asks)
        if reply.outcome != "ok":
            return tunable.CompileResult(
                f"{launch.function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}", found
            )
        facts: tunable.Facts = dict(reply.facts)
        code = str(facts.pop("code", ""))
        if code and isinstance(launch, KernelCall) and launch.function in kernel.functions:
            with contextlib.suppress(bound.NoBound):
                facts[COSTS] = msgspec.json.encode(bound.costs(code, launch, facts, target)).decode()
        if reader is not None and isinstance(launch, KernelCall):
            facts, lints = reader.analyze(reply, launch, target)
            if red := "; ".join(str(lint) for lint in lints if lint.red):
                return tunable.CompileResult(red, facts)
        if working:
            found = _most(found, facts) if launch.function in working else found
        else:
            found = facts if found is None else found
        if over := over_limit(reply, target):
            return tunable.CompileResult(over, found)
    return tunable.CompileResult("", found)


def _most(one: tunable.Facts | None, other: tunable.Facts) -> tunable.Facts:
    found: tunable.Facts = dict(other)
    for name, value in (one or {}).items():
        there = found.get(name)
        found[name] = max(value, there) if isinstance(value, int) and isinstance(there, int) else value
    return found


def swept(base: tunable.Choice) -> tunable.Choice:
    """Return the base with the rows' values written out, so that the keys' values can change without them."""
    whole = Launch().changed(dict(base.launch))
    own = whole.of_rows()
    launch = {name: getattr(whole, name) for name in OF_ROWS} | {
        rows: getattr(own, name) for name, rows in OF_ROWS.items()
    }
    rest = {name: value for name, value in base.launch.items() if name not in launch}
    return tunable.Choice(launch=launch | rest, lowering=base.lowering, flags=base.flags)


def combine_sweeps(base: tunable.Choice, ranked: Sequence[tunable.Choice]) -> Iterator[tunable.Choice]:
    of_base = _rows(swept(base))
    keys = [one for one in map(swept, ranked) if _rows(one) == of_base][:JOINED]
    rows = [one for one in map(swept, ranked) if _rest(one) == _rest(swept(base)) and _rows(one) != of_base][:JOINED]
    for i, j in sorted(itertools.product(range(len(keys)), range(len(rows))), key=sum):
        if _rest(keys[i]) == _rest(swept(base)):
            continue  # it is the second itself
        yield tunable.Choice(launch=keys[i].launch | _rows(rows[j]), lowering=keys[i].lowering, flags=keys[i].flags)


def _rows(choice: tunable.Choice) -> dict[str, OptionValue]:
    return {name: choice.launch[name] for name in OF_ROWS.values()}


def _rest(choice: tunable.Choice) -> tuple[object, object]:
    return {name: value for name, value in choice.launch.items() if name not in OF_ROWS.values()}, choice.lowering
