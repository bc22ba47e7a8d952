"""One random call against the float64 oracle: what no query may attend holds poison, in K and V apart."""

import contextlib
import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator

import msgspec
import opcalls
import torch

import portattn
from portattn.api import dispatch
from portattn.errors import PathUnavailable
from portattn.planning import core_path
from portattn.schema.call import Call
from portattn.schema.lowering import Launch
from portattn.schema.problem import Problem
from portattn.testing import tolerance
from portattn.testing.oracle import allowed_keys, oracle

from .drawing import Case, draw
from .reducing import reduced, snippet
from .running import Failure, Found

HUGE = 3e38  # near float32's largest number
FAR = 1e3  # |LSE| of rows whose scores are extreme: they have a budget of their own
# A float32 score is rounded by up to this share of itself, in base 2 twice where torch rounds once, and its weight by
# as much: 0.4 % at fp16's smallest number. From 2^24 on nothing is left of a score's fraction, and so of that.
ROUNDED, WHOLE = 2.0**-24, 2.0**24
# The budget is twice torch's own error, the largest of a few hundred rounding errors: in 30,000 calls some pass it,
# by up to a half. What fuzzing looks for is wrong by more.
SCATTER = 2.0
# Values are standard normal. Where they cancel, the sum is small and has the rounding of its terms.
CANCELLED = torch.finfo(torch.float32).eps / 2
# Three products of tf32 parts, accumulated by truncating, as tensor cores do: a model of that errs by 2.1e-4 in the
# largest score of D = 576, where float32 products err by 4.8e-5. On an H200 two of 323 latent calls were 1.8 and 2.0
# times past the budget without this.
TENSOR_CORES = 3.0
SHARE = 0.2  # of entries that are made extreme
REDUCED, REDUCE_S = 3, 20.0  # failures of a process that are made smaller, and how long each may take


class Outcome(msgspec.Struct, frozen=True):
    """path: the plan's, with its kernel; failure: "" where the result is right; kind: the failure's first word."""

    path: str
    failure: str = ""

    @property
    def kind(self) -> str:
        return self.failure.partition(":")[0]


def call_of(case: Case, device: str) -> Call:
    """The call: random_call's, with this case's poison and extremes."""
    call = tolerance.random_call(case.problem, case.seed, device=device, scale=case.scale, strides=case.strides,
        extremes=case.extremes)  # fmt: skip
    if case.problem.softcap:
        call.softcap = case.softcap
    generator = torch.Generator().manual_seed(case.seed + 1)
    hidden = _held(call.k).isnan().any(-1) | _held(call.v).isnan().any(-1)
    if call.problem.kv_format == "as_q":  # numbers and scales of others are wild already where nothing is attended
        _fill(call.k, hidden, case.k, generator)
        _fill(call.v, hidden, case.v, generator)  # of latent rows, v is the part of k that does not hold positions
    for queries in (call.q, call.q_rope):
        if queries is not None and call.problem.q_format == "as_q":
            _fill(queries, queries.isnan().any(-1), case.q, generator)
    if case.wild:
        _make_wild(call, case.wild, generator)
    return call


def _held(values: torch.Tensor) -> torch.Tensor:
    return values[:1] if values.stride(0) == 0 else values


def _fill(values: torch.Tensor, where: torch.Tensor, filler: str, generator: torch.Generator) -> None:
    held = _held(values)
    if filler == "normal":
        new = torch.randn(held.shape, generator=generator).to(held)
    else:
        number = torch.finfo(held.dtype).max if filler == "largest" else float(filler)
        new = torch.full_like(held, number)
    held.copy_(torch.where(where[..., None], new, held))


def _make_wild(call: Call, wild: str, generator: torch.Generator) -> None:
    def some(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) < SHARE).to(call.q.device)

    def extreme(values: torch.Tensor) -> torch.Tensor:
        signs = torch.where(some(*values.shape), -HUGE, HUGE)
        return torch.where(some(*values.shape) & ~values.isneginf(), signs, values)

    p = call.problem
    if wild in ("queries of NaN", "keys of NaN"):
        tensor = call.q if wild == "queries of NaN" else call.k
        tensor[..., 0] = torch.where(some(*tensor.shape[:3]), float("nan"), tensor[..., 0])
    elif wild == "sinks of infinity":
        infinite = torch.where(some(*call.sinks.shape), -math.inf, math.inf)
        call.sinks = torch.where(some(*call.sinks.shape), infinite, call.sinks)
    elif wild == "sinks of 3e38":
        assert call.sinks is not None
        call.sinks = extreme(call.sinks)
    elif wild == "log-weights of 3e38":
        assert call.log_weights is not None
        call.log_weights = extreme(call.log_weights)
    else:
        bias = call.bias.clone()
        if wild == "bias of 3e38":
            bias = extreme(bias.float())
        elif wild == "bias rows of finfo.min":
            rows = some(p.batch, p.heads_q, p.seq_q, 1) & ~bias.isneginf()
            bias = torch.where(rows, torch.finfo(bias.dtype).min, bias)
        else:
            seen = allowed_keys(call)[:, None]
            seen = seen if call.mask is None else seen & call.mask
            bias = bias.masked_fill(~seen, float("nan"))
        call.bias = bias
        call.problem = msgspec.structs.replace(p, bias_by_key=False)


def judge(call: Call, out: torch.Tensor, lse: torch.Tensor | None, precision: str) -> str:
    """What is wrong with a result; "" where it is right. The budget is that of portattn/testing/tolerance.py, but rows
    with extreme scores have one of their own: a large LSE would allow any error in the others."""
    facts = tolerance.judge(call, out, lse, precision)
    if facts["wrong"]:
        return (
            f"not finite: {facts['wrong']} elements are NaN, infinite or not 0 where they must not be, or the reverse"
        )
    call, out, lse = tolerance.on_cpu(call), out.cpu(), None if lse is None else lse.cpu()
    expected, expected_lse = oracle(call)
    same, same_lse = tolerance.same_dtype(call, precision)
    far = expected_lse.abs() > FAR
    scatter = SCATTER * (TENSOR_CORES if precision == "tf32x3" else 1.0)
    for name, rows in (("plain", ~far), ("extreme", far)):
        error = tolerance.largest((out.double() - expected)[rows])
        most = scatter * tolerance.budget(out.dtype, expected[rows], same[rows])
        most += rounding(expected_lse[rows], call.problem) + CANCELLED
        if error > most:
            return f"inexact: an error of {error:.3g} in {name} rows, where {most:.3g} is the most"
        if lse is not None:
            error = tolerance.largest((lse.double() - expected_lse)[rows])
            most = scatter * tolerance.budget(torch.float32, expected_lse[rows], same_lse[rows], tolerance.LSE_LEAST)
            if error > most:
                return f"inexact: an error of {error:.3g} in the LSE of {name} rows, where {most:.3g} is the most"
    return ""


def rounding(lse: torch.Tensor, problem: Problem) -> float:
    """How far rows may be off because their scores are large: values are standard normal, and keys' errors average."""
    large = lse[(lse.abs() > FAR) & (lse.abs() < WHOLE)]
    return tolerance.largest(large) * ROUNDED / math.sqrt(problem.tokens or problem.seq_k or 1)


def run(case: Case, device: str) -> Outcome:
    """Perform the case's call into memory that holds NaN, and judge it."""
    call = call_of(case, device)
    arguments = opcalls.given(call) | {"backend": case.backend}
    op = getattr(portattn, case.problem.op)
    if case.problem.op == "decode_attention":
        arguments.setdefault("seqlens_k", None)  # it has to be given
    try:
        with tolerance.nan_filled_memory(), torch.no_grad():
            result = op(**arguments)
    except PathUnavailable as refused:
        if device == "cpu" or case.backend == "auto":
            return Outcome("none", f"refused: {refused}")
        return Outcome("unavailable")
    except Exception:  # noqa: BLE001  # whatever it is: every call that is drawn is a good one
        last = traceback.format_exc(limit=-3)
        return Outcome("none", f"raised: {last}")
    made = portattn.last_plan()
    out, lse = result if case.problem.return_lse else (result, None)
    out = opcalls.as_call(call.problem, out)
    lse = lse[None] if lse is not None and call.problem.packed else lse
    precision = made.lowering.dot_precision if made.lowering is not None and made.path != "reference" else "ieee"
    return Outcome(f"{made.path} {made.kernel or ''}".strip(), judge(call, out, lse, precision))


@contextlib.contextmanager
def prepared(device: str) -> Iterator[None]:
    """What a process of cases needs: on a CPU small tiles, so that small problems have several; no children.
    TRITON_INTERPRET must be 1 before Triton is imported, where kernels are to run on a CPU."""
    before = core_path.Launch
    if device == "cpu":
        from quick_interpreter import quick_interpreter

        quick_interpreter()
        core_path.Launch = lambda: Launch(block_m=16, block_n=16)  # type: ignore[assignment, misc]
        dispatch.forget_plans()
    try:
        with portattn.settings(isolate="never", canary="never", fallback="silent"):
            yield
    finally:
        core_path.Launch = before  # type: ignore[misc]
        dispatch.forget_plans()


def work(seed: int, device: str, seconds: float, stopped: Callable[[], bool],
        most: int = 2**31) -> Iterator[Found | int]:  # fmt: skip
    """Cases of a seed until the time is over; the first failures are made smaller."""
    end, failures = time.monotonic() + seconds, 0
    with warnings.catch_warnings(), prepared(device):
        warnings.simplefilter("ignore")  # the interpreter's own, of rows that hold only NaN
        for number in range(most):
            if time.monotonic() > end or stopped():
                return
            yield number
            case = draw(seed, number, device)
            outcome = run(case, device)
            found = Found(cases=1, counts={f"{case.problem.op}: {outcome.path}": 1}, failures=[])
            if outcome.failure:
                failures += 1
                found.failures.append(_failure(seed, number, case, outcome, device, failures))
            yield found


def _failure(seed: int, number: int, case: Case, outcome: Outcome, device: str, nth: int) -> Failure:
    why = outcome.failure
    if nth <= REDUCED:
        case = reduced(case, lambda smaller: _kind(smaller, device) == outcome.kind, REDUCE_S)
        # A failure that does not come again is one too, and its first words are all that is known of it.
        why = run(case, device).failure or f"once, and not again: {why}"
    return Failure(seed=seed, case=number, why=why, snippet=snippet(case, device))


def _kind(case: Case, device: str) -> str:
    try:
        return run(case, device).kind
    except ValueError:  # a smaller case of which there is no random call
        return ""
