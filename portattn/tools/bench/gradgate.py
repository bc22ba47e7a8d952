"""The correctness gate of backward cases: the result and its gradients against float64, by blocks of rows.

    P = softmax(scale·q·kᵀ), out = P·v, dv = Pᵀ·do, dp = do·vᵀ, ds = P∘(dp − rowsum(P∘dp)), dq = scale·ds·k,
    dk = scale·dsᵀ·q

(FlashAttention's paper, appendix B.4; with dropout P is multiplied by kept / (1 − p) in out, dv and dp). What is
compared are whole sequences and key/value heads, each with its group, one after the other: memory is bounded by a block
of rows. How many depends on the pairs that they have; there is one at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from portattn.testing.tolerance import budget, largest
from portattn.tools.bench.backward import GradientContender
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Contender
from portattn.tools.bench.tensors import Tensors, keys_of, slot_of

CHECKED_PARTS = 8  # sequences and key/value heads at most; heads are independent, so that each is judged exactly
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
    """One sequence and key/value head: its float64 results, and torch's own in the case's dtype.

    cut  of float32 results, what sums that are cut off may lose beside torch's own; empty for the others
    """

    sequence: int
    head: int
    values: Compared
    same: Compared
    cut: Compared


@dataclass(frozen=True, slots=True)
class ExpectedGradients:
    """All parts, and of each result the budgets of its segments, over all parts."""

    parts: list[Part]
    budgets: dict[str, list[float]]

    @classmethod
    def of(cls, parts: list[Part], dtype: torch.dtype) -> ExpectedGradients:
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
    """A result (1, heads, rows, width) in pieces of SEGMENT rows or a few more; a shorter one is one piece."""
    return list(result.tensor_split(max(1, result.shape[2] // SEGMENT), dim=2))


class GradientGate:
    """Compares backward contenders with float64 on a sample of sequences and heads.

    An error is the largest, over the result and the three gradients, of the difference over its own budget (that of the
    forward's gate: twice the error of the same mathematics in torch in the same dtype, and a few units in the last
    place). A budget is 1, therefore. Each segment of rows or keys has a budget of its own: under a causal mask the
    first rows and keys have far larger gradients than the last ones, which would be lost in the budget of the first.
    """

    budget = 1.0

    def __init__(self, case: Case, t: Tensors) -> None:
        if case.dropout and (case.group > 1 or case.packed):
            raise ValueError("dropout is checked of dense cases without groups alone")
        self.case, self.t = case, t
        self._said = ""
        self._expected: ExpectedGradients | None = None
        places = sample(case)
        if not case.dropout:
            self._expected = ExpectedGradients.of([_part(case, t, *place) for place in places], t.q.dtype)
        self.checked = f"{len(places)} of {case.batch * case.heads_k} sequences and key/value heads, every row and key"

    def error(self, contender: Contender) -> float:
        """The contender's error in the sample; NaN counts as infinite. Raises ValueError for another shape."""
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
        """Expect results under dropout's masks, (Sq, Sk) for each place of `sample`: of those whose mask is known."""
        places = sample(self.case)
        parts = [_part(self.case, self.t, *place, kept=mask) for place, mask in zip(places, masks, strict=True)]
        self._expected = ExpectedGradients.of(parts, self.t.q.dtype)

    def shares(self, results: Compared) -> tuple[float, float]:
        """Of results by NAMES, with dropout after `expect`: the largest error in parts of its budget, and the segments'
        mean.
        """
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
        """Why the contender that `error` was last asked about is not timed."""
        return f"{self._said}: not timed"

    def _off(self, name: str, result: torch.Tensor, expected: ExpectedGradients) -> list[tuple[float, float]]:
        """Largest error of each segment of one result over all parts, and its budget."""
        worst = [0.0] * len(expected.budgets[name])
        for part in expected.parts:
            got = _of_part(self.case, name, result, part.sequence, part.head).double()
            difference = (got - part.values[name]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
            largest = torch.stack([piece.max() for piece in segments(difference)]).tolist()
            worst[: len(largest)] = [max(pair) for pair in zip(worst, largest, strict=False)]
        return list(zip(worst, expected.budgets[name], strict=True))

    def _with_dropout(self, contender: GradientContender) -> ExpectedGradients:
        """What is expected under the mask that this contender has drawn."""
        places = sample(self.case)
        masks = kept_pairs(self.case, contender, places)
        allowed = attention_mask(self.case, 0, self.case.seq_q, self.t.q.device)
        pairs = int(allowed.sum()) * len(places)
        share = sum(int((mask & allowed).sum()) for mask in masks) / pairs
        p = self.case.dropout
        if abs(share - (1 - p)) > KEPT_WITHIN + KEPT_SIGMA * math.sqrt(p * (1 - p) / pairs):
            raise ValueError(f"keeps {share:.4f} of the pairs, not {1 - p:.4f}")
        parts = [_part(self.case, self.t, *place, kept=mask) for place, mask in zip(places, masks, strict=True)]
        return ExpectedGradients.of(parts, self.t.q.dtype)


def sample(case: Case) -> list[tuple[int, int]]:
    """(sequence, key/value head) of the parts that are checked: spread evenly, with the first and the last."""
    total = case.batch * case.heads_k
    pairs = max(q * k for q, k in zip(case.queries, case.keys, strict=True)) * case.group
    limit = DROPOUT_PAIRS if case.dropout else CHECKED_PAIRS
    count = max(1, min(total, CHECKED_PARTS, limit // max(pairs, 1)))
    return [divmod(round(i * (total - 1) / max(count - 1, 1)), case.heads_k) for i in range(count)]


def kept_pairs(case: Case, contender: GradientContender, places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Which pairs dropout has kept, for each sequence and head a mask (Sq, Sk), from the contender's own gradients.

    Where only row i of column c of the result has a gradient, dv's column c is row i of the probabilities that out was
    mixed with. Each backward tells as many rows as the result has columns. Pairs that are not attended are False.
    """
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
    """Return whether each sequence's own rows, or keys, of a result are finite.

    Uninitialised memory, and the memory behind a sequence's end, can hold anything.
    """
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


def _part(case: Case, t: Tensors, sequence: int, head: int, kept: torch.Tensor | None = None) -> Part:
    one, part = t.part(case, sequence, head)
    values, same = (gradients(one, part, dtype, kept) for dtype in (torch.float64, part.q.dtype))
    cut = cut_off(one, values) if part.q.dtype is torch.float32 else {}
    return Part(sequence, head, values, same, cut)


def cut_off(case: Case, values: Compared) -> Compared:
    """What float32 sums of one part may lose that are cut off every CUT_TERMS terms: for each element, by how many
    terms it adds up.
    """
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
    """One sequence and key/value head, with its group: out and the gradients, each step rounded to a dtype.

    q, grad_out (1, group, Sq, ·), k and v (1, 1, Sk, ·). Products add up in float64 for float64 and in float32 for the
    others, of which each result is rounded: what torch does in that dtype. A group's sum is one of rounded terms.
    kept: bool (Sq, Sk), the pairs that dropout has kept; None for all.
    """
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
    """Which keys the query rows from `first` to `end` of one sequence attend: bool (rows, Sk)."""
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
