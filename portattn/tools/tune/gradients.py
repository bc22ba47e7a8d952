"""The gradients' kernels in a search: a candidate's call, its check, and how two sweeps are joined.

Keys' and rows' kernels share few settings: each is swept while the other stays, and the best are joined."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

import portattn
from portattn.planning.core_path import backward_problem
from portattn.reference.dropout import keep_mask
from portattn.schema.call import Call
from portattn.schema.lowering import OF_ROWS, Launch, OptionValue
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import arguments
from portattn.tools.bench.gate import NAMES, GradientGate, as_call, sample_gradients
from portattn.tools.bench.tensors import Tensors
from portattn.tools.tune.tunable import Choice

JOINED = 3  # best choices of each sweep, which are joined with the other sweep's best
WRITTEN = ("grad_q", "grad_k", "grad_v")
DROPOUT_SEED = 7


def call_of(case: Case, t: Tensors) -> Call:
    """Return a candidate's call: the case's, or its gradients', after a forward here unless tensors have no data."""
    call = as_call(case, t)
    if not case.backward:
        return call
    call.problem = backward_problem(call.problem)
    if t.q.device.type == "meta":
        return call
    args, options = arguments(case, t)
    if case.dropout:  # both must drop the same weights
        call.dropout_seed = options["dropout_seed"] = torch.tensor([DROPOUT_SEED], device=t.q.device)
    with torch.no_grad():
        out, lse = getattr(portattn, case.op)(*args, **options, return_lse=True)
    assert t.grad_out is not None
    call.forward_out, call.grad_out = (_as_call_has_it(case, x) for x in (out, t.grad_out))
    call.forward_lse = (lse[None] if case.packed else lse).contiguous()
    for name, like in zip(WRITTEN, (call.q, call.k, call.v), strict=True):
        setattr(call, name, torch.empty_like(like))
    return call


def _as_call_has_it(case: Case, x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1)[None] if case.packed else x


class Shares:
    """Errors of a call's gradients: the largest of each segment of rows or keys, as a part of its budget."""

    def __init__(self, case: Case, t: Tensors, call: Call) -> None:
        self.case, self.call, self.gate = case, call, GradientGate(case, t)
        if case.dropout:
            self.gate.expect([self._kept(sequence * case.heads_q + head) for sequence, head in sample_gradients(case)])

    def _kept(self, number: int) -> torch.Tensor:
        seed = self.call.dropout_seed
        assert seed is not None
        rows, keys = (torch.arange(size, device=seed.device) for size in (self.case.seq_q, self.case.seq_k))
        head = torch.tensor(number, device=seed.device)
        return keep_mask(seed, self.case.dropout, head, rows[:, None], keys[None])

    def of(self) -> tuple[float, float]:
        """Return the largest and mean share of the gradients in the call's memory; infinite if one is not finite."""
        found = (self.call.forward_out, *(getattr(self.call, name) for name in WRITTEN))
        results = {name: x[0].transpose(0, 1) if self.case.packed else x for name, x in zip(NAMES, found, strict=True)}
        return self.gate.shares(results)


def swept(base: Choice) -> Choice:
    """Return the base with the rows' values written out, so that the keys' values can change without them."""
    whole = Launch().changed(dict(base.launch))
    own = whole.of_rows()
    launch = {name: getattr(whole, name) for name in OF_ROWS} | {
        rows: getattr(own, name) for name, rows in OF_ROWS.items()
    }
    rest = {name: value for name, value in base.launch.items() if name not in launch}
    return Choice(launch=launch | rest, lowering=base.lowering, flags=base.flags)


def combine_sweeps(base: Choice, ranked: Sequence[Choice]) -> Iterator[Choice]:
    of_base = _rows(swept(base))
    keys = [one for one in map(swept, ranked) if _rows(one) == of_base][:JOINED]
    rows = [one for one in map(swept, ranked) if _rest(one) == _rest(swept(base)) and _rows(one) != of_base][:JOINED]
    for i, j in sorted(itertools.product(range(len(keys)), range(len(rows))), key=sum):
        if _rest(keys[i]) == _rest(swept(base)):
            continue  # it is the second itself
        yield Choice(launch=keys[i].launch | _rows(rows[j]), lowering=keys[i].lowering, flags=keys[i].flags)


def _rows(choice: Choice) -> dict[str, OptionValue]:
    return {name: choice.launch[name] for name in OF_ROWS.values()}


def _rest(choice: Choice) -> tuple[object, object]:
    return {name: value for name, value in choice.launch.items() if name not in OF_ROWS.values()}, choice.lowering
