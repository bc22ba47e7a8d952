"""indexer_logits and topk_indices: the kernels and the reference against the definition in float64, and calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from opcalls import watched
from support import Device, run_core

import portattn
from portattn.reference import write
from portattn.schema.call import Call
from portattn.schema.problem import Problem
from portattn.testing.random_writing import random_writing
from portattn.testing.verdict import judge

LOGITS: dict[str, Any] = {
    "op": "indexer_logits", "batch": 1, "heads_q": 5, "heads_k": 1, "seq_q": 11, "seq_k": 150, "head_dim": 24,
    "dtype": "bf16",
}  # fmt: skip
PAGES: dict[str, Any] = LOGITS | {"batch": 3, "seq_q": 3, "seq_k": 96, "page_size": 8, "seqlens_k": True}
TOPK: dict[str, Any] = {
    "op": "topk_indices", "batch": 2, "heads_q": 1, "heads_k": 1, "seq_q": 6, "seq_k": 333, "head_dim": 1, "tokens": 40,
    "dtype": "fp32",
}  # fmt: skip
SMALL = {"block_m": 4, "block_n": 32}
E4M3 = {"kv_format": "e4m3", "kv_scales": "token"}


def runs(device: Device, lowering: dict[str, str] | None = None) -> list[Callable[[Call], Any]]:
    return [lambda call: run_core(device, call, lowering, SMALL), write.run]


def check(device: Device, seed: int = 0, spare: bool = False, lowering: Any = None, **fields: Any) -> None:
    for run in runs(device, lowering):
        call = random_writing(Problem(**fields), seed, device=device.name, spare=spare)
        run(call)
        facts = judge(call, call.new_out(), None)
        assert facts["wrong"] == 0, run
        assert facts["error"] <= facts["budget"], run


@pytest.mark.parametrize("form", [LOGITS, PAGES], ids=["ranges", "pages"])
@pytest.mark.parametrize("fields", [
    {}, {"dtype": "fp16"}, {"dtype": "fp32"}, E4M3, {"kv_format": "e4m3"}, {"heads_q": 1}, {"heads_q": 16},
    {"head_dim": 32}, {"head_dim": 3}, {"seq_q": 1}, {"seq_q": 4, "seq_k": 32},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spare", [False, True])
def test_logits(device: Device, form: dict[str, Any], fields: dict[str, Any], spare: bool) -> None:
    """Results start as NaN, and so do keys that no row sees, their scales, and pages behind a sequence's end."""
    check(device, 1, spare, **form | fields)


@pytest.mark.parametrize("fields", [
    {}, {"tokens": 1}, {"tokens": 400}, {"tokens": 333}, {"seq_k": 32, "tokens": 7}, {"seq_k": 5}, {"dtype": "bf16"},
    {"dtype": "fp16", "batch": 1}, {"seq_q": 1, "seq_k": 700},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("spare", [False, True])
def test_choice(monkeypatch: pytest.MonkeyPatch, device: Device, fields: dict[str, Any], spare: bool) -> None:
    """Equal logits, 0 and −0, NaN, infinities, rows of −inf alone, empty rows and rows shorter than k."""
    if spare:  # a program searches several long rows
        monkeypatch.setattr("portattn.launch.write.MOST_SEARCHES", 5)
    check(device, 2, spare, **TOPK | fields)


@pytest.mark.parametrize("form", [LOGITS, PAGES | E4M3, TOPK], ids=["logits", "pages", "topk"])
def test_other_lowerings_give_the_same(device: Device, form: dict[str, Any]) -> None:
    check(device, 3, lowering={"grid": "persistent", "q_operand": "reload"}, **form)


@pytest.mark.parametrize("form", [LOGITS, PAGES, TOPK], ids=["logits", "pages", "topk"])
@pytest.mark.parametrize("fields", [{"seq_q": 0}, {"seq_k": 0}], ids=str)
def test_without_rows_or_keys(device: Device, form: dict[str, Any], fields: dict[str, Any]) -> None:
    check(device, **form | fields)


def check_choice(device: Device, logits: torch.Tensor, tokens: int, block_n: int = 32) -> None:
    logits = logits.view(1, 1, -1, logits.shape[-1]).to(device.name)
    p = Problem(**TOPK | {"batch": 1, "seq_q": logits.shape[2], "seq_k": logits.shape[3], "tokens": tokens})
    for run in (lambda call: run_core(device, call, None, {"block_n": block_n}), write.run):
        result = torch.full((1, p.seq_q, tokens), 42, dtype=torch.int32, device=device.name)
        call = Call(problem=p, q=logits, k=logits, v=logits, scale=1.0, result=result)
        run(call)
        assert judge(call, call.new_out(), None)["wrong"] == 0


@pytest.mark.parametrize("bits", [0, 8, 16, 24])
def test_every_byte_of_a_number_decides(device: Device, bits: int) -> None:
    """Numbers of both signs that differ in one byte alone; as many of each sign."""
    step = torch.arange(1, 200, dtype=torch.int32) << bits
    numbers = torch.cat((step, step | -(2**31))).view(torch.float32).nan_to_num(0.0, torch.inf, -torch.inf)
    logits = numbers[torch.randperm(len(numbers), generator=torch.Generator().manual_seed(bits))]
    for tokens in (3, 150, 300):
        check_choice(device, logits, tokens)


PLACES = torch.arange(2000)
DRAWN = torch.rand(2, 2000, generator=torch.Generator().manual_seed(7))
ROWS = {
    "random": DRAWN, "equal": DRAWN * 0, "zeros of both signs": (DRAWN - 0.5) * 0, "coarse": (DRAWN * 2).round(),
    "ascending": PLACES / 7, "two clusters": (DRAWN < 0.02) + DRAWN * 1e-6, "unseen": DRAWN + (PLACES % 64 > 50),
    "hidden": DRAWN - 9 * (PLACES % 64 > 8), "few": DRAWN.where(DRAWN < 0.02, -torch.inf), "none": DRAWN * torch.nan,
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize(("tokens", "block_n"), [(40, 128), (200, 128)])
def test_a_row_longer_than_a_tile(device: Device, name: str, tokens: int, block_n: int) -> None:
    """Rows whose pivot by a sample is right, the threshold itself, or too high or low; more tokens than a tile."""
    check_choice(device, ROWS[name], tokens, block_n)


@pytest.mark.parametrize("heads", [1, 5])
def test_infinity_in_a_key_meets_no_padded_head(device: Device, heads: int) -> None:
    q, k = -torch.rand(1, heads, 16).to(device.name), torch.rand(40, 16).to(device.name)
    k[3, 2], q[0, :, 2] = torch.inf, 1.0
    weights = torch.rand(1, heads).to(device.name) + 0.1
    logits = portattn.indexer_logits(q, k, weights, backend=device.path)
    assert logits[0, 3] == torch.inf
    assert not logits.isnan().any()


def test_wild_numbers_that_nothing_validates_stay_inside(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.path != "interpreter":
        pytest.skip("addresses are watched under the interpreter")
    wild = torch.tensor([[2**31 - 1, -(2**31), 7], [-1, 2, 2**30]], dtype=torch.int32)
    q, weights, pages = torch.randn(2, 3, 4, 16), torch.rand(2, 3, 4), torch.randn(3, 7, 16)
    starts, ends = wild[0], wild[1].flip(0)
    for lengths in wild[0, :2], wild[1, 1:]:
        calls: list[Callable[[str], torch.Tensor]] = [
            lambda path, n=lengths: portattn.indexer_logits(  # type: ignore[misc]
                q, pages, weights, page_table=wild, seqlens_k=n.contiguous(), backend=path, validate=False
            ),
            lambda path: portattn.indexer_logits(
                q[0], pages.flatten(0, 1), weights[0], row_starts=starts, row_ends=ends, backend=path, validate=False
            ),
            lambda path: portattn.topk_indices(
                q[0, :, 0], 5, row_starts=starts, row_ends=ends, backend=path, validate=False
            ),
        ]
        for call in calls:
            with watched(monkeypatch) as kernels:
                found = call("interpreter")
            assert kernels
            torch.testing.assert_close(found, call("reference"), atol=1e-5, rtol=1e-5)


def seen(device: Device, first: int, end: int) -> Call:
    call = random_writing(Problem(**LOGITS), device=device.name)
    call.row_starts.fill_(first)
    call.row_ends.fill_(end)
    return call


def test_a_tile_of_which_one_key_is_seen(device: Device) -> None:
    for first, end in ((0, 33), (31, 32), (32, 33), (63, 150)):
        for run in runs(device):
            call = seen(device, first, end)
            call.k.copy_(torch.randn(call.k.shape))
            run(call)
            facts = judge(call, call.new_out(), None)
            assert facts["wrong"] == 0
            assert facts["error"] <= facts["budget"]


def test_nan_in_an_operand_stays(device: Device) -> None:
    for run in runs(device):
        call = seen(device, 0, 20)
        call.k[0, 0, 7] = float("nan")
        run(call)
        assert call.result[0, :, :20].isnan().any(0).nonzero().flatten().tolist() == [7]
        assert bool(call.result[0, :, 7].isnan().all())


# Calls.


def rows(**fields: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    q, k, weights = (torch.randn(*sizes, generator=generator) for sizes in ((6, 4, 16), (50, 16), (6, 4)))
    return {"q": q, "k": k, "weights": weights, "row_ends": torch.arange(45, 51, dtype=torch.int32)} | fields


def test_the_two_in_a_row_choose_as_the_definition() -> None:
    given = rows()
    chosen = portattn.topk_indices(portattn.indexer_logits(**given), 8, row_ends=given["row_ends"], sorted=True)
    scores = torch.einsum("thd,sd->ths", given["q"].double(), given["k"].double()).relu()
    exact = (given["weights"].double()[..., None] * scores).sum(1)
    for row, end in enumerate(given["row_ends"].tolist()):
        assert chosen[row].tolist() == exact[row, :end].topk(8).indices.tolist()


@pytest.mark.parametrize("backend", ["reference", "interpreter"])
def test_a_row_is_the_same_alone(device: Device, backend: str) -> None:
    if backend == "interpreter" and device.path != "interpreter":
        pytest.skip("kernels are compiled in this process")
    given = rows()
    logits = portattn.indexer_logits(**given, backend=backend)
    alone = portattn.indexer_logits(**given | {name: given[name][3:4] for name in ("q", "weights", "row_ends")},
                                    backend=backend)  # fmt: skip
    if backend == "interpreter":  # torch's product of one row is another's
        assert torch.equal(alone[0], logits[3])
    assert torch.equal(
        portattn.topk_indices(logits[3:4], 9, backend=backend)[0], portattn.topk_indices(logits, 9, backend=backend)[3]
    )
    assert portattn.last_plan().path == backend  # type: ignore[union-attr]


def test_e4m3_and_pages_are_the_dense_call(device: Device) -> None:
    """A sequence's pages in any order, and a PageTable of them; the last row sees all keys, the first one less."""
    given = rows(row_ends=torch.tensor([39, 40], dtype=torch.int32))
    narrow = {name: given[name].to(torch.float8_e4m3fn) for name in ("q", "k")} | {"k_scale": torch.rand(50) + 0.5}
    narrow = {name: tensor[:2] if name == "q" else tensor for name, tensor in narrow.items()}
    weights, order = given["weights"][:2], torch.tensor([3, 0, 4, 1, 2])
    dense = portattn.indexer_logits(**narrow, weights=weights, row_ends=given["row_ends"])
    pages = {name: torch.empty_like(narrow[name]).unflatten(0, (5, 10)) for name in ("k", "k_scale")}
    for name, tensor in pages.items():
        tensor[order] = narrow[name].unflatten(0, (5, 10))
    table, lengths = order[None].int(), torch.tensor([40], dtype=torch.int32)
    csr = portattn.PageTable.from_csr(
        torch.tensor([0, 4], dtype=torch.int32), order[:4].int(), torch.tensor([10]).int()
    )
    for paged in ({"page_table": table, "seqlens_k": lengths}, {"page_table": csr}):
        found = portattn.indexer_logits(narrow["q"][None], pages["k"], weights[None], k_scale=pages["k_scale"], **paged)
        torch.testing.assert_close(found[0], dense[:, : found.shape[2]], rtol=1e-5, atol=1e-5)


def test_memory_of_the_caller_s_is_filled() -> None:
    given = rows()
    out, places = torch.full((6, 60), torch.nan)[:, :50], torch.full((6, 5), 42, dtype=torch.int32)
    assert portattn.indexer_logits(**given, out=out) is out
    beside = torch.cat([out, given["weights"]], dim=1)
    assert torch.equal(portattn.indexer_logits(**given | {"weights": beside[:, 50:]}, out=beside[:, :50]), out)
    assert torch.equal(out, portattn.indexer_logits(**given))
    for ordered in (False, True):
        assert portattn.topk_indices(out, 5, sorted=ordered, out=places) is places
        assert torch.equal(places, portattn.topk_indices(out, 5, sorted=ordered))
    handle = portattn.prepare("topk_indices", out, 5, sorted=True)
    assert torch.equal(
        handle.run(out, 5, sorted=True, out=places.fill_(42)), portattn.topk_indices(out, 5, sorted=True)
    )
    report = portattn.warmup([{"op": "topk_indices", "logits": out, "k": 5, "out": places.fill_(42)}])
    assert [one.failed for one in report.specs] == [""]
    assert bool((places == 42).all())


def test_compiled_they_are_one_node_each() -> None:
    given = rows()

    def choose(q: torch.Tensor) -> torch.Tensor:
        return portattn.topk_indices(portattn.indexer_logits(**given | {"q": q * 2}), 4, sorted=True) + 1

    compiled = torch.compile(choose, fullgraph=True, backend="aot_eager")
    assert torch.equal(choose(given["q"]), compiled(given["q"]))


ENDS, BUFFER = torch.tensor([3, 4]).int(), torch.rand(6, 54)
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("indexer_logits", {"k": torch.randn(50, 8)}, "k's head_dim is 8, but must be q's, 16"),
    ("indexer_logits", {"k": torch.randn(50, 16).half()}, "k.dtype is torch.float16, but must be q's, torch.float32"),
    ("indexer_logits", {"weights": torch.randn(6, 3)}, "weights' heads is 3, but must be q's, 4"),
    ("indexer_logits", {"weights": torch.randn(6, 4).half()}, "weights.dtype is torch.float16, but must be torch.fl"),
    ("indexer_logits", {"k_scale": torch.ones(50)}, "k_scale is (50,), but goes with q and k of torch.float8_e4m3fn"),
    ("indexer_logits", {"row_ends": torch.full((6,), 51).int()}, "row_ends[0] is 51, but must be in 0..50"),
    ("indexer_logits", {"seqlens_k": torch.ones(6).int()}, "seqlens_k is (6,), but goes with page_table"),
    ("indexer_logits", {"q": torch.randn(6, 4, 16).requires_grad_()}, "writes in place and has no gradient"),
    ("indexer_logits", {"out": torch.empty(6, 49)}, "out is ((6, 49), torch.float32), but must be (6, 50) of torch.f"),
    ("topk_indices", {"k": 0}, "k is 0, but must be an integer in 1.."),
    ("topk_indices", {"k": True}, "k is True, but must be an integer in 1.."),
    ("topk_indices", {"logits": torch.randn(9)}, "logits.ndim is 1, but must be 2"),
    ("topk_indices", {"logits": torch.randn(2, 9).double()}, "logits.dtype is torch.float64"),
    ("topk_indices", {"row_starts": torch.zeros(2)}, "row_starts.dtype is torch.float32, but must be torch.int32"),
    ("topk_indices", {"row_starts": torch.tensor([0, -1]).int()}, "row_starts[1] is -1, but must be in 0..9"),
    ("topk_indices", {"sorted": 1}, "sorted is 1, but must be True or False"),
    ("topk_indices", {"out": torch.zeros(1, 3).int().expand(2, 3)}, "out.stride() is (0, 1), but must be at least 3"),
    ("topk_indices", {"k": 1, "row_ends": ENDS, "out": ENDS[:, None]}, "must share no element with row_ends, whose"),
    ("indexer_logits", {"weights": BUFFER[:, 50:], "out": BUFFER[:, 3:53]}, "must share no element with weights"),
]


@pytest.mark.parametrize("case", WRONG, ids=lambda case: str(case[2]))
def test_wrong_arguments_are_named(case: tuple[str, dict[str, Any], str]) -> None:
    op, fields, text = case
    given = rows() if op == "indexer_logits" else {"logits": torch.randn(2, 9), "k": 3}
    with pytest.raises(portattn.ArgumentError) as error:
        getattr(portattn, op)(**given | fields)
    assert text in str(error.value)


def test_autocast_casts_nothing_and_says_so() -> None:
    given, expected = rows(), portattn.indexer_logits(**rows())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(portattn.indexer_logits(**given), expected)
        with pytest.raises(portattn.ArgumentError, match=r"torch.float32: torch.autocast casts no argument of in"):
            portattn.indexer_logits(**given | {"k": given["k"].bfloat16()})
