"""The correctness gate: a contender that is wrong is not timed. Gradients as in FlashAttention's paper, appendix B.4.

A sample of sequences and key/value heads, smaller the more pairs they have, is compared with float64."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

import portattn
from portattn.api.ops import make_request
from portattn.errors import PortattnError
from portattn.schema.call import Call
from portattn.testing.oracle import oracle
from portattn.testing.tolerance import budget, largest, same_dtype
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import CORE, OURS, Build, Contender, GradientContender, arguments
from portattn.tools.bench.tensors import Tensors, keys_of, rows_of, slot_of

CHECKED_PARTS = 32  # pairs of a sequence and a key/value head that are compared with the float64 oracle
CHECKED_ROWS = 64  # query rows of each
# Errors of a library that cannot run a case: some compilers raise classes of their own, and some limits are assertions.
FAILURES = Exception
Say = Callable[[str], None]


class DeviceLost(PortattnError):
    """The device takes no more work from this process, e.g. after an illegal address; `name` ran last."""

    def __init__(self, name: str, failure: BaseException, lost: str) -> None:
        self.name = name
        super().__init__(f"{name}: {reason(failure)}; the device is lost to this process: {lost}")


def as_call(case: Case, t: Tensors) -> Call:
    """Return the Call that portattn would make of the case; values are not read back."""
    args, options = arguments(case, t)
    return make_request("bench", case.op, args, options | {"validate": False}).build()


class OracleGate:
    """Compare contenders with float64 on query rows of evenly spread (sequence, head) pairs, each computed alone."""

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
        """Return the contender's largest error in the sample; NaN counts as infinite."""
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
        if not self._finite:
            return "not finite somewhere: not timed"
        return f"error {error:.2e} is over the budget {self.budget:.2e}: not timed"


def sample(case: Case) -> list[tuple[int, int]]:
    total = case.batch * case.heads_k
    count = min(total, CHECKED_PARTS)
    places = [round(i * (total - 1) / max(count - 1, 1)) for i in range(count)]
    return [divmod(place, case.heads_k) for place in places]


@dataclass(slots=True)
class Admission:
    """Admitted contenders, errors and refusals, all by name."""

    budget: float
    checked: str = ""  # the part of each result that was compared; all of it is checked to be finite besides
    reference_s: float = 0.0  # seconds that the float64 results took
    contenders: dict[str, Contender] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    # seconds to make each contender, which compiles it, and to check it
    admit_s: dict[str, float] = field(default_factory=dict)


def admit(
    case: Case, t: Tensors, builds: dict[str, Build], lost: Callable[[], str] = str, say: Say = lambda what: None
) -> Admission:
    """Build and check every contender of a case, telling `say` each name. Raises DeviceLost if `lost` says so."""
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
            if gone := lost():
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
    """Return portattn's contender with the path of its last call: a kernel that fails to compile is planned again."""
    if name not in (OURS, CORE) or case.backward:
        return contender
    made = portattn.last_plan()
    return contender if made is None else replace(contender, path=made.path)


def same_path(admitted: Admission) -> bool:
    """Drop the core contender if the plan chose the core anyway, and return whether; a backward may hide its path."""
    ours, core = (admitted.contenders.get(name) for name in (OURS, CORE))
    if ours is None or core is None or not ours.path or ours.path != core.path:
        return False
    del admitted.contenders[CORE]
    return True


def reason(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return lines[0][:200] if lines else type(failure).__name__


GRADIENT_PARTS = 8  # sequences and key/value heads at most; heads are independent, so that each is judged exactly
CHECKED_PAIRS = 1 << 29  # of a query and a key, in all of them: two of 16k by 16k
DROPOUT_PAIRS = 1 << 26  # the same where masks have to be found and each contender has its own
BLOCK_PAIRS = 1 << 24  # of a block of rows: 128 MiB in float64, of which some are alive at a time
SEGMENT = 128  # rows or keys, at least, that share a budget
NAMES = ("out", "dq", "dk", "dv")
# Tensor cores, which TF32x3 products use, add up this many terms at a time, and cut off what their float32 accumulator
# has no place for: half a unit in its last place on average, always towards 0, where the additions of torch's own
# products are rounded to either side. So many sums may be as far off (Fasi, Higham, Mikaitis, Pranesh, "Numerical
# behavior of NVIDIA tensor cores", 2021, section 4.1).
CUT_TERMS = 8
KEPT_WITHIN = 1 / 256  # FlashAttention-2 draws a byte for each pair: the share that it keeps is this close to 1 − p
KEPT_SIGMA = 6.0  # standard deviations of a share that is counted

Compared = dict[str, torch.Tensor]  # by NAMES; out and dq (1, group, rows, ·), dk and dv (1, 1, keys, ·)


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence and key/value head: float64 results, torch's own, and `cut_off`'s bounds if results are float32."""

    sequence: int
    head: int
    values: Compared
    same: Compared
    cut: Compared


@dataclass(frozen=True, slots=True)
class ExpectedGradients:
    """All parts, and for each result the budgets of its segments, over all parts."""

    parts: list[Part]
    budgets: dict[str, list[float]]

    @classmethod
    def of(cls, parts: list[Part], dtype: torch.dtype) -> "ExpectedGradients":
        budgets: dict[str, list[float]] = {}
        for name in NAMES:
            pairs = [(segments(part.values[name]), segments(part.same[name])) for part in parts]
            cut = [segments(part.cut[name]) for part in parts if part.cut]
            budgets[name] = []
            for place in range(max(len(values) for values, _ in pairs)):
                there = [(values[place], same[place]) for values, same in pairs if place < len(values)]
                values, same = (torch.cat([x.flatten() for x in side]) for side in zip(*there, strict=True))
                lost = max((largest(one[place]) for one in cut if place < len(one)), default=0.0)
                budgets[name].append(budget(dtype, values, same) + lost)
        return cls(parts, budgets)


def segments(result: torch.Tensor) -> list[torch.Tensor]:
    """Split a result (1, heads, rows, width) into pieces of SEGMENT rows or a few more."""
    return list(result.tensor_split(max(1, result.shape[2] // SEGMENT), dim=2))


class GradientGate:
    """Compare backward contenders with float64, each segment of rows or keys with its own budget, scaled to 1."""

    budget = 1.0

    def __init__(self, case: Case, t: Tensors) -> None:
        if case.dropout and (case.group > 1 or case.packed):
            raise ValueError("dropout is checked of dense cases without groups alone")
        self.case, self.t = case, t
        self._said = ""
        self._expected: ExpectedGradients | None = None
        places = sample_gradients(case)
        if not case.dropout:
            self._expected = ExpectedGradients.of([_gradient_part(case, t, *place) for place in places], t.q.dtype)
        self.checked = f"{len(places)} of {case.batch * case.heads_k} sequences and key/value heads, every row and key"

    def error(self, contender: Contender) -> float:
        """Return the contender's error in the sample; NaN counts as infinite. Raises ValueError for another shape."""
        assert isinstance(contender, GradientContender)
        with contender.around():
            made = contender.run()
            again = contender.run() if contender.ordered else ()
            expected = self._expected or self._with_dropout(contender)
        results = dict(zip(NAMES, (contender.out, *made), strict=True))
        for name, like in zip(NAMES, (contender.out, self.t.q, self.t.k, self.t.v), strict=True):
            if results[name].shape != like.shape:
                raise ValueError(f"returns {name} of shape {tuple(results[name].shape)}")
        worst, _ = self._shares(results, expected)
        if worst <= self.budget and not all(torch.equal(one, other) for one, other in zip(made, again, strict=False)):
            self._said = "two deterministic runs differ"
            return math.inf
        return worst

    def expect(self, masks: list[torch.Tensor]) -> None:
        """Set the results expected under known dropout masks, (Sq, Sk) for each place of `sample_gradients`."""
        self._expected = self._under(masks, sample_gradients(self.case))

    def shares(self, results: Compared) -> tuple[float, float]:
        """Return the largest error as a part of its budget, and the segments' mean; with dropout, after `expect`."""
        assert self._expected is not None
        return self._shares(results, self._expected)

    def _shares(self, results: Compared, expected: ExpectedGradients) -> tuple[float, float]:
        worst, total, count = 0.0, 0.0, 0
        self._said = ""
        for name in NAMES:
            if not all_finite(self.case, results[name], rows=name in ("out", "dq")):
                self._said = f"{name}: not finite somewhere"
                return math.inf, math.inf
            for off, allowed in self._off(name, results[name], expected):
                of_budget = off / allowed if allowed else (math.inf if off else 0.0)
                total, count = total + of_budget, count + 1
                if of_budget > worst:
                    worst, self._said = of_budget, f"{name}: error {off:.2e} is over the budget {allowed:.2e}"
        return worst, total / max(count, 1)

    def refusal(self, error: float) -> str:
        return f"{self._said}: not timed"

    def _off(self, name: str, result: torch.Tensor, expected: ExpectedGradients) -> list[tuple[float, float]]:
        worst = [0.0] * len(expected.budgets[name])
        for part in expected.parts:
            got = _of_part(self.case, name, result, part.sequence, part.head).double()
            difference = (got - part.values[name]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            largest = torch.stack([piece.max() for piece in segments(difference)]).tolist()
            worst[: len(largest)] = [max(pair) for pair in zip(worst, largest, strict=False)]
        return list(zip(worst, expected.budgets[name], strict=True))

    def _with_dropout(self, contender: GradientContender) -> ExpectedGradients:
        places = sample_gradients(self.case)
        masks = kept_pairs(self.case, contender, places)
        allowed = attention_mask(self.case, 0, self.case.seq_q, self.t.q.device)
        pairs = int(allowed.sum()) * len(places)
        share = sum(int((mask & allowed).sum()) for mask in masks) / pairs
        p = self.case.dropout
        if abs(share - (1 - p)) > KEPT_WITHIN + KEPT_SIGMA * math.sqrt(p * (1 - p) / pairs):
            raise ValueError(f"keeps {share:.4f} of the pairs, not {1 - p:.4f}")
        return self._under(masks, places)

    def _under(self, masks: list[torch.Tensor], places: list[tuple[int, int]]) -> ExpectedGradients:
        kept = zip(places, masks, strict=True)
        parts = [_gradient_part(self.case, self.t, *place, kept=mask) for place, mask in kept]
        return ExpectedGradients.of(parts, self.t.q.dtype)


def sample_gradients(case: Case) -> list[tuple[int, int]]:
    """Return (sequence, key/value head) of the checked parts, spread evenly from first to last."""
    total = case.batch * case.heads_k
    pairs = max(q * k for q, k in zip(case.queries, case.keys, strict=True)) * case.group
    limit = DROPOUT_PAIRS if case.dropout else CHECKED_PAIRS
    count = max(1, min(total, GRADIENT_PARTS, limit // max(pairs, 1)))
    return [divmod(round(i * (total - 1) / max(count - 1, 1)), case.heads_k) for i in range(count)]


def kept_pairs(case: Case, contender: GradientContender, places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Recover dropout's masks (Sq, Sk), one a sequence and head, from the contender's own gradients.

    If only row i of column c of the result has a gradient, column c of dv is row i of the probabilities, so that each
    backward recovers as many rows as the result has columns. Masked pairs are False."""
    masks = [torch.zeros(case.seq_q, case.seq_k, dtype=torch.bool, device=contender.out.device) for _ in places]
    for first in range(0, case.seq_q, case.width_v):
        columns = torch.arange(min(case.width_v, case.seq_q - first), device=contender.out.device)
        grad = torch.zeros_like(contender.out)
        grad[:, :, first + columns, columns] = 1.0
        dv = contender.pull(grad)[2]
        for mask, (sequence, head) in zip(masks, places, strict=True):
            mask[first + columns] = dv[sequence, head].T[: len(columns)] != 0
    return masks


def all_finite(case: Case, result: torch.Tensor, rows: bool) -> bool:
    """Return whether each sequence's own rows or keys are finite; memory behind a sequence's end can hold anything."""
    if rows and not case.packed and case.lengths_q:
        whole = slice(None)
        return all(bool(slot_of(case, result, i, whole).isfinite().all()) for i in range(case.batch))
    if not rows and case.op != "varlen_attention" and case.lengths_k:
        return all(bool(result[i, :, :keys].isfinite().all()) for i, keys in enumerate(case.keys))
    return bool(result.isfinite().all())


def _of_part(case: Case, name: str, result: torch.Tensor, sequence: int, head: int) -> torch.Tensor:
    if name in ("out", "dq"):
        return slot_of(case, result, sequence, slice(head * case.group, (head + 1) * case.group))
    return keys_of(case, result, sequence, head)


def _gradient_part(case: Case, t: Tensors, sequence: int, head: int, kept: torch.Tensor | None = None) -> Part:
    one, part = t.part(case, sequence, head)
    values, same = (gradients(one, part, dtype, kept) for dtype in (torch.float64, part.q.dtype))
    cut = cut_off(one, values) if part.q.dtype is torch.float32 else {}
    return Part(sequence, head, values, same, cut)


def cut_off(case: Case, values: Compared) -> Compared:
    """Return how much truncation every CUT_TERMS terms may cost each float32 sum of a part, by its number of terms."""
    device = values["out"].device
    step = max(1, BLOCK_PAIRS // max(case.seq_k, 1))
    seen = (attention_mask(case, i, min(i + step, case.seq_q), device) for i in range(0, case.seq_q, step))
    counts = [(rows.sum(1), rows.sum(0)) for rows in seen]
    of_rows = torch.cat([rows for rows, _ in counts])[:, None]
    of_keys = torch.stack([keys for _, keys in counts]).sum(0)[:, None] * case.group
    half = torch.finfo(torch.float32).eps / 2
    terms = {"out": of_rows, "dq": of_rows, "dk": of_keys, "dv": of_keys}
    return {name: values[name].abs() * (half / CUT_TERMS * terms[name]) for name in NAMES}


def gradients(case: Case, t: Tensors, dtype: torch.dtype, kept: torch.Tensor | None = None) -> Compared:
    """Return out and the gradients of one sequence and key/value head with its group, each step rounded to a dtype.

    q, grad_out (1, group, Sq, ·), k and v (1, 1, Sk, ·); kept: dropout's mask, bool (Sq, Sk), None for all. Products
    add up in float64 for float64, else in float32 before rounding, as in torch. A group's sum adds rounded terms."""
    assert t.grad_out is not None
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    q, k, v, grad_out = (x.to(wide) for x in (t.q, t.k, t.v, t.grad_out))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    def low(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype).to(wide)

    dk, dv = (torch.zeros(*q.shape[:2], *x.shape[2:], dtype=wide, device=q.device) for x in (k, v))
    out, dq = [], []
    step = max(1, BLOCK_PAIRS // max(case.seq_k * case.group, 1))
    for first in range(0, case.seq_q, step):
        rows = slice(first, min(first + step, case.seq_q))
        seen = attention_mask(case, rows.start, rows.stop, q.device)
        some = seen.any(dim=-1, keepdim=True)
        scores = low(low(q[:, :, rows] @ k.mT) * scale).masked_fill(~seen, float("-inf"))
        p = low(torch.softmax(scores, dim=-1).masked_fill(~some, 0.0))
        dp = low(grad_out[:, :, rows] @ v.mT)
        mixed = p
        if kept is not None:
            factor = kept[rows].to(wide) / (1 - case.dropout)
            mixed, dp = low(p * factor), low(dp * factor)
        ds = low(p * (dp - (p * dp).sum(-1, keepdim=True)))
        out.append(mixed @ v)
        dq.append(ds @ k * scale)
        dk += ds.mT @ q[:, :, rows] * scale
        dv += mixed.mT @ grad_out[:, :, rows]
    made = (torch.cat(out, 2), torch.cat(dq, 2), low(dk).sum(1, keepdim=True), low(dv).sum(1, keepdim=True))
    return {name: x.to(dtype) for name, x in zip(NAMES, made, strict=True)}


def attention_mask(case: Case, first: int, end: int, device: torch.device) -> torch.Tensor:
    """Return the attention mask of one sequence's query rows `first` to `end`, bool (rows, Sk)."""
    shift = 0 if case.causal == "top_left" else case.seq_k - case.seq_q
    rows = torch.arange(first, end, device=device)[:, None] + shift
    keys = torch.arange(case.seq_k, device=device)[None]
    left, right = case.window
    if case.causal != "none":
        right = 0 if right is None else min(right, 0)
    seen = torch.ones(end - first, case.seq_k, dtype=torch.bool, device=device)
    if left is not None:
        seen &= keys >= rows - left
    if right is not None:
        seen &= keys <= rows + right
    return seen
