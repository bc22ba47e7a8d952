"""A lower bound on a core kernel's time from its machine code: no chip is needed, and none can be faster.

Per step (one tile of keys of one program) the code's instructions take cycles of a core's units (Arch.rates); the steps
follow from the problem. A launch takes at least as long as its busiest unit, as one warp alone needs for its steps at
this occupancy, and as the memory needs for the problem's own bytes. Clocks are the highest of the chip that `[rates]`
names: a card that is sold with a higher one is faster by that ratio. Caches begin cold, and latencies, bank conflicts
and the epilogue count as nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from portattn.compile.ensure_compiled import compile_in, first_line
from portattn.errors import PortattnError
from portattn.launch import KernelCall, kernel_calls, meta_call
from portattn.planning.kernel_specs import CORES, CoreKernel, DecodeSplit, ceil_div
from portattn.schema.lowering import Launch
from portattn.schema.ops import ROWS
from portattn.schema.plan import Plan
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import UNLIMITED
from portattn.schema.target import Target, UnitRates
from portattn.schema.tensors import KV_STORED, TORCH_DTYPE
from portattn.testing.findings import programs_a_core
from portattn.worker.client import Worker
from portattn.worker.machine_code import KeyLoop, WarpInstruction, key_loops, parse, pass_through

WHOLE = 0.75  # of a step's operations: a loop with fewer has a part of the products, and another loop the rest
TERMS = {"tf32x3": 3, "bf16x6": 6}  # products for one, by dot_precision


class NoBound(PortattnError):
    """There is no bound: the chip has no rates, or its code cannot be read; the text says why."""


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one step of one program, from its code alone.

    counts   instructions of a warp, by unit
    cycles   of a core, by unit
    alone    cycles of a program with the core to itself
    programs that a core has room for"""

    counts: dict[str, float]
    cycles: dict[str, float]
    alone: float
    programs: int
    scratchpad_bytes: int  # moved by the program


class LowerBound(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds that a launch takes at least, by resource; `us` is the largest, of `binding`."""

    us: float
    binding: str
    times: dict[str, float]
    steps: int  # of all programs
    programs: int
    bytes: int  # that the problem must move
    clock_mhz: int
    costs: Costs

    def __str__(self) -> str:
        return f"at least {self.us:.1f} µs, by {self.binding}"

    def explain(self) -> str:
        """Return the bound as text: microseconds by resource, then one step of one program."""
        costs = self.costs
        return "\n".join((
            f"  bound: the portable core takes {self}",
            f"    µs: {_listed(self.times, 1)}",
            f"    at {self.clock_mhz} MHz: a card of a higher clock is faster by that ratio, but for memory",
            f"    {self.programs} programs, {costs.programs} a core at a time; {self.steps} steps; {self.bytes} bytes",
            f"    a step, a core's cycles: {_listed(costs.cycles, 0)}; of a program alone: {costs.alone:.0f}",
            f"    a step, a warp's instructions: {_listed(costs.counts, 0)}",
            f"    a step, bytes of the scratchpad: {costs.scratchpad_bytes}",
        ))  # fmt: skip


def _listed(numbers: Mapping[str, float], digits: int) -> str:
    return ", ".join(f"{name} {number:.{digits}f}" for name, number in numbers.items() if number)


def rates_of(target: Target) -> UnitRates:
    if target.arch.rates is None:
        raise NoBound(f"{target.arch.name} has no rates: backends/{target.backend}/arches/{target.arch.name}.toml")
    return target.arch.rates


def costs(text: str, call: KernelCall, facts: Mapping[str, Any], target: Target) -> Costs:
    """Return what a step costs by a kernel's text and its facts (registers, warps, memory). Raises NoBound."""
    rates, warps = rates_of(target), int(facts["num_warps"])
    constants = call.constexprs
    if "BLOCK_M" not in constants:
        raise NoBound(f"{call.function}: it has no tiles of rows and products, which a bound counts steps by")
    columns = sum(int(constants.get(name, 0)) for name in ("BLOCK_D", "BLOCK_TAIL", "BLOCK_DV"))
    whole = 2 * int(constants["BLOCK_M"]) * int(constants["BLOCK_N"]) * columns
    whole *= TERMS.get(str(constants.get("DOT_PRECISION")), 1)
    found = [(loop, loop.operations() * warps / whole) for loop in key_loops(text)]
    found = [pair for pair in found if pair[1] >= WHOLE] or [(loop, max(share, 1.0)) for loop, share in found]
    if not any(loop.operations() for loop, _ in found):
        raise NoBound(f"{call.function}: its code has no matrix instructions, which a bound counts steps by")
    each = [_cycles(loop, warps, rates) for loop, _ in found]
    # Unrolled, a round has more steps; a part of a step more is work that several warps repeat.
    steps = [max(int(share + 1e-6), 1) for _, share in found]
    # A step runs in one of the loops, such as with a mask and without: it costs at least the least of them.
    cycles = {unit: min(one[unit] / n for one, n in zip(each, steps, strict=True)) for unit in each[0]}
    alone = min(
        pass_through(loop, rates.cycles, lambda one: _product(one, rates)) / n
        for (loop, _), n in zip(found, steps, strict=True)
    )
    first, n = found[0][0], steps[0]
    counts = {unit: first.count(unit) / n for unit in ("matrix", "vector", "half_rate", "transcendental", "scratchpad")}
    moved = min(loop.amount("scratchpad") * warps // n for (loop, _), n in zip(found, steps, strict=True))
    return Costs(
        counts=counts, cycles=cycles, alone=alone, programs=_room(facts, target, rates), scratchpad_bytes=moved
    )


def _cycles(loop: KeyLoop, warps: int, rates: UnitRates) -> dict[str, float]:
    cycles, a_simd = rates.cycles, warps / rates.simds
    found = {"matrix": sum(_product(one, rates) for one in loop.instructions if one.unit == "matrix")}
    if "vector" in cycles:
        found["vector"] = loop.count("vector") * cycles["vector"]
    else:
        found["issue"] = len(loop.instructions) * cycles["issue"]
    if "half_rate" in cycles:
        found["half_rate"] = loop.count("half_rate") * cycles["half_rate"]
    transcendental = loop.count("transcendental") * cycles["transcendental"]
    if rates.one_pipe:
        found["vector"] += transcendental
    else:
        found["transcendental"] = transcendental
    found = {unit: number * a_simd for unit, number in found.items()}
    return found | {"scratchpad": loop.amount("scratchpad") * warps / rates.scratchpad}


def _product(one: WarpInstruction, rates: UnitRates) -> float:
    """Return the cycles of a SIMD's matrix unit for one instruction of a warp. Raises NoBound."""
    if one.kind not in rates.products:
        raise NoBound(f"{one.name}: the chip's rates have no products of {one.kind}")
    return max(one.amount * rates.simds / rates.products[one.kind], rates.least.get(one.shape, 0))


def _room(facts: Mapping[str, Any], target: Target, rates: UnitRates) -> int:
    """Return the programs that a core has room for; AMD's compiler says how many waves a SIMD has."""
    if "occupancy" in facts:
        return max(int(facts["occupancy"]) * rates.simds // int(facts["num_warps"]), 1)
    return max(programs_a_core(dict(facts), target.arch) or 1, 1)


def executed_cycles(executed: Mapping[str, int], target: Target) -> int:
    """Return the cycles of SIMDs for instructions that waves ran, without latencies or overlap; 0 without rates."""
    rates = target.arch.rates
    if rates is None:
        return 0
    cycles = {
        one.name: _product(one, rates)
        if one.kind in rates.products
        else rates.cycles.get(one.unit, rates.cycles["issue"])
        for one in parse("\n".join(f"\t{name}" for name in sorted(executed, key="s_endpgm".__eq__)))[0]
    }
    return round(sum(count * cycles.get(name, 0) for name, count in executed.items()))


def lower_bound(problem: Problem, launch: Launch, of: Costs, target: Target) -> LowerBound:
    """Return the bound on a launch with these sizes; lengths that the host does not know count as full and equal."""
    rates, cores = rates_of(target), target.arch.cores
    kernel = CORES[problem.op]
    each = list(_steps(problem, launch, kernel))
    total, programs = sum(n * many for n, many in each), sum(many for _, many in each)
    longest = max((n for n, _ in each), default=0)
    # Programs of one length are shared out whole; of several, the shares may be even.
    whole = len({n for n, _ in each}) == 1
    share = ceil_div(programs, cores) * longest if whole else max(total / cores, longest)
    turns = ceil_div(ceil_div(programs, cores), of.programs) * longest if whole else total / cores / of.programs
    times = {unit: share * cycles / rates.clock_mhz for unit, cycles in of.cycles.items()}
    times["occupancy"] = max(turns, longest) * of.alone / rates.clock_mhz
    moved = compulsory_bytes(problem)
    times["memory"] = moved / rates.memory_gbs / 1e3
    binding = max(times, key=lambda name: times[name])
    return LowerBound(
        us=times[binding], binding=binding, times=times, steps=total, programs=programs, bytes=moved,
        clock_mhz=rates.clock_mhz, costs=of,
    )  # fmt: skip


def _steps(problem: Problem, launch: Launch, kernel: CoreKernel) -> Iterator[tuple[int, int]]:
    """Yield (tiles of keys of a program, programs of so many), of a head's row tiles."""
    p = problem
    packs = problem.group if ROWS[p.op].packs_heads else 1
    heads = p.heads_q // packs
    splits = launch.splits if isinstance(kernel, DecodeSplit) else 1
    if p.backward or not (p.tokens or p.op in ("attention", "varlen_attention") or isinstance(kernel, DecodeSplit)):
        raise NoBound(f"{p.op}: no bound counts its steps")
    if p.chunk or p.block_mask:
        raise NoBound(f"{p.op}: no bound counts its steps with {'chunks' if p.chunk else 'lists of blocks'}")
    rows, keys = _sequence(p)
    for begin in range(0, rows * packs, launch.block_m):
        first, last = begin // packs, (min(begin + launch.block_m, rows * packs) - 1) // packs
        low, high = _attended(p, rows, keys, first, last)
        tiles = max(ceil_div(high, launch.block_n) - low // launch.block_n, 0)
        for part in range(splits):
            yield (tiles + part) // splits, p.batch * heads


def _sequence(p: Problem) -> tuple[int, int]:
    """Return the rows and keys of a sequence; packed sequences count as equal, which have the fewest pairs."""
    each = [longest if total is None else total // max(p.batch, 1)
            for longest, total in ((p.seq_q, p.total_q), (p.seq_k, p.total_k))]  # fmt: skip
    return each[0], each[1]


def _attended(p: Problem, rows: int, keys: int, first: int, last: int) -> tuple[int, int]:
    """Return the first key that the rows from `first` to `last` attend, and the end; without keys it is not behind."""
    shift = 0 if p.causal == "top_left" else keys - rows
    right = p.window_right if p.causal == "none" else 0
    high = keys if right == UNLIMITED else min(keys, max(last + shift + right + 1, 0))
    low = 0 if p.window_left == UNLIMITED else max(first + shift - p.window_left, 0)
    return low, min(high, p.tokens or high)  # lists have no windows


def compulsory_bytes(problem: Problem) -> int:
    """Return the bytes of the queries, the attended keys and values, and the result, each once."""
    p, item = problem, TORCH_DTYPE[problem.dtype].itemsize
    rows, keys = _sequence(p)
    low, high = _attended(p, rows, keys, 0, rows - 1)
    keys = p.total_k if p.total_k is not None and high - low == keys else max(high - low, 0) * p.batch
    rows = p.total_q or rows * p.batch
    stored = item if p.kv_format == "as_q" else KV_STORED.itemsize / p.cache_format.per_byte
    width = p.head_dim if p.op == "mla_attention" else p.head_dim + p.head_dim_v
    return int(rows * p.heads_q * (p.head_dim + p.head_dim_v) * item + keys * p.heads_k * width * stored)


def of_plan(made: Plan, target: Target, worker: Worker, seconds: float) -> LowerBound:
    """Compile a core plan's launches in a child, and return the bound on the longest. Raises NoBound."""
    rates_of(target)
    found: list[LowerBound] = []
    for call in kernel_calls(made, meta_call(made.problem), target.arch.cores)[0]:
        if call.function not in CORES[made.problem.op].functions:
            continue
        reply = compile_in(worker, call, made, target, seconds, "code")
        if reply.outcome != "ok":
            raise NoBound(f"{call.function}: {reply.kind} at {reply.stage}: {first_line(reply.message)}")
        if not reply.facts.get("code"):
            raise NoBound(f"{call.function}: {target.toolchain} has no program that lists its machine code")
        found.append(
            lower_bound(made.problem, call.launch, costs(str(reply.facts["code"]), call, reply.facts, target), target)
        )
    if not found:
        raise NoBound(f"{made.path}: no kernel of portattn's core runs")
    return max(found, key=lambda one: one.us)
