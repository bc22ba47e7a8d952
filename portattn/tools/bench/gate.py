"""The correctness gate: a contender that is wrong is not timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import portattn
from portattn import validate
from portattn.config import Settings
from portattn.errors import PortattnError
from portattn.schema.call import Call
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import budget, same_dtype
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, OURS, Build, Contender, arguments
from portattn.tools.bench.gradgate import GradientGate, all_finite
from portattn.tools.bench.tensors import Tensors, rows_of

CHECKED_PARTS = 32  # pairs of a sequence and a key/value head that are compared with the float64 oracle
CHECKED_ROWS = 64  # query rows of each
# What a library that cannot run a case raises; torch's own errors are RuntimeErrors.
FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError, OSError, PortattnError)


Say = Callable[[str], None]


class DeviceLost(PortattnError):
    """The device takes no more work from this process, after an illegal address for example. name: who ran last."""

    def __init__(self, name: str, failure: BaseException, lost: str) -> None:
        self.name = name
        super().__init__(f"{name}: {reason(failure)}; the device is lost to this process: {lost}")


def as_call(case: Case, t: Tensors) -> Call:
    """The Call that portattn would make of the case. Values are not read back."""
    args, options = arguments(case, t)
    options["settings"] = Settings(validate="never")
    if case.op == "varlen_attention":
        return validate.varlen_call(*args, **options)
    if case.op == "paged_attention":
        return validate.paged_call(*args, **options)
    if case.op == "mla_attention":
        return validate.mla_call(*args, **options)
    if case.op == "sparse_attention":
        if case.magicpig is not None:
            options["magicpig"] = tuple(
                torch.full((case.heads_q,), number, dtype=torch.int32, device=t.q.device) for number in case.magicpig
            )
        return validate.sparse_call(*args, **options)
    if case.op == "decode_attention":
        options["seqlens_k"] = t.seqlens_k
    return validate.attention_call(case.op, *args[:3], names=("q", "k", "v"), **options)


class OracleGate:
    """Compares contenders with the float64 oracle on a sample, under the budget of reference/check.

    The sample is of sequences and key/value heads, spread evenly with the first and the last among them, each computed
    alone and for some of its query rows: a large case costs no more memory than one sequence and head of it.
    """

    def __init__(self, case: Case, t: Tensors) -> None:
        self.case, self._finite = case, True
        self._parts: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        generator = torch.Generator().manual_seed(1)
        same = []
        for sequence, head in sample(case):
            one, tensors = t.part(case, sequence, head)
            call = as_call(one, tensors)
            rows = torch.randperm(one.seq_q, generator=generator)[:CHECKED_ROWS].sort().values.to(t.q.device)
            expected, _ = oracle(call, rows)
            same.append(same_dtype(call, rows=rows)[0].flatten())
            self._parts.append((sequence, head, rows, expected))
        expected = torch.cat([part[3].flatten() for part in self._parts])
        self.budget = budget(t.q.dtype, expected, torch.cat(same))
        of_each = f"{CHECKED_ROWS} rows" if case.seq_q > CHECKED_ROWS else "every row"
        total = case.batch * case.heads_k
        self.checked = f"{len(self._parts)} of {total} sequences and key/value heads, {of_each} of each"

    def error(self, contender: Contender) -> float:
        """The contender's largest error in the sample; NaN counts as infinite."""
        with contender.around():
            out = contender.shaped(contender.run())
        worst = []
        for sequence, head, rows, expected in self._parts:
            got = rows_of(self.case, out, sequence, head, rows)
            if got.shape != expected.shape:
                raise ValueError(f"returns {tuple(out.shape)}")
            difference = (got.double() - expected).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
            worst.append(difference.max())
        self._finite = all_finite(self.case, out, rows=True)
        return float(torch.stack(worst).max()) if self._finite else math.inf

    def refusal(self, error: float) -> str:
        """Why the contender that `error` was last asked about is not timed."""
        if not self._finite:
            return "not finite somewhere: not timed"
        return f"error {error:.2e} is over the budget {self.budget:.2e}: not timed"


def sample(case: Case) -> list[tuple[int, int]]:
    """(sequence, key/value head) of the parts that are checked."""
    total = case.batch * case.heads_k
    count = min(total, CHECKED_PARTS)
    places = [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
    return [divmod(place, case.heads_k) for place in places]


@dataclass(slots=True)
class Admission:
    """Who passed, each one's error, and why the others did not. All by name.

    checked      what of each result was compared; that all of it is finite is checked besides
    reference_s  seconds that the float64 results took
    admit_s      seconds to make each contender, which compiles it, and to check it
    """

    budget: float
    checked: str = ""
    reference_s: float = 0.0
    contenders: dict[str, Contender] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    admit_s: dict[str, float] = field(default_factory=dict)


def admit(
    case: Case, t: Tensors, builds: dict[str, Build], lost: Callable[[], str] = str, say: Say = lambda what: None
) -> Admission:
    """Build and check every contender of a case. lost: tells why the device takes no more work (Clock.lost).

    say  is told which contender is next

    Raises DeviceLost.
    """
    say("float64")
    begun = time.monotonic()
    gate = GradientGate(case, t) if case.backward else OracleGate(case, t)
    found = Admission(gate.budget, gate.checked, time.monotonic() - begun)
    for name, build in builds.items():
        say(name)
        begun = time.monotonic()
        try:
            contender = build()
            error = gate.error(contender)
        except FAILURES as failure:
            gone = lost()
            if gone:
                raise DeviceLost(name, failure, gone) from None
            found.refused[name] = reason(failure)
            continue
        finally:
            found.admit_s[name] = time.monotonic() - begun
        found.errors[name] = error
        if error <= gate.budget:
            found.contenders[name] = as_it_ran(case, name, contender)
        else:
            found.refused[name] = gate.refusal(error)
    return found


def as_it_ran(case: Case, name: str, contender: Contender) -> Contender:
    """portattn's contender with the path that its last call took: of a kernel that does not compile there is a plan
    before the call, and another after it. A backward has asked after its call, and a handle has compiled before it."""
    if name not in (OURS, CORE) or case.backward:
        return contender
    made = portattn.last_plan()
    return contender if made is None else replace(contender, path=made.path)


def reason(failure: BaseException) -> str:
    """The first line of a failure."""
    lines = str(failure).strip().splitlines()
    return lines[0][:200] if lines else type(failure).__name__
