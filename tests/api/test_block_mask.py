"""block_mask of attention: portattn's lists and torch's BlockMask, against the same mask given for each score."""

import functools
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import zeros
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention

import portattn
from portattn.api import masks as module
from portattn.api import score_functions
from portattn.api.signatures import request_of
from portattn.api.torch_ops import arguments_of
from portattn.integrations.flex_attention import create_block_mask
from portattn.launch import cache
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.reference.score_functions import block_lists
from portattn.reference.tiles import Tiling
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.ops import ROWS as OPS
from portattn.schema.problem import Problem

B, H, ROWS, KEYS = 2, 4, 70, 100
SIZE = (32, 16)


def tensors(dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = (B, H, ROWS, 16), (B, 2, KEYS, 16), (B, 2, KEYS, 16)
    return tuple(torch.randn(shape, dtype=dtype, device=device) for shape in shapes)


def lists(batch: int = B, heads: int = H, seed: int = 0, full: bool = True) -> tuple[portattn.BlockMask, torch.Tensor]:
    """Random lists, partial and full, in random order with garbage behind the counts; and the scores that they show."""
    generator = torch.Generator().manual_seed(seed)
    down, across = -(-ROWS // SIZE[0]), -(-KEYS // SIZE[1])
    kinds = torch.randint(0, 3, (batch, heads, down, across), generator=generator)
    found = []
    for kind in (1, 2):
        counts = (kinds == kind).sum(-1).int()
        order = torch.rand(kinds.shape, generator=generator).masked_fill(kinds != kind, 2.0).argsort(-1).int()
        order[torch.arange(across).expand(kinds.shape) >= counts[..., None]] = 2**30
        found += [counts, order]
    listed = kinds > 0 if full else kinds == 1
    shown = listed.repeat_interleave(SIZE[0], 2).repeat_interleave(SIZE[1], 3)[:, :, :ROWS, :KEYS]
    return portattn.BlockMask(*(found if full else found[:2]), block_size=SIZE), shown


@pytest.mark.parametrize(("batch", "heads"), [(B, H), (1, H), (B, 1), (1, 1)])
@pytest.mark.parametrize("more", ["nothing", "mask", "bshd, causal"])
def test_lists_are_a_mask(batch: int, heads: int, more: str) -> None:
    q, k, v = tensors()
    blocks, shown = lists(batch, heads, full=more != "nothing")
    given: dict[str, Any] = {"return_lse": True}
    if more == "mask":
        given["mask"] = torch.rand(ROWS, KEYS) < 0.7
        shown = shown & given["mask"]
    if more == "bshd, causal":
        given |= {"causal": True, "layout": "bshd"}
        q, k, v = (t.transpose(1, 2).contiguous() for t in (q, k, v))
    out, lse = portattn.attention(q, k, v, block_mask=blocks, **given)
    assert portattn.last_plan().problem.block_mask
    expected, expected_lse = portattn.attention(q, k, v, **(given | {"mask": shown}))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def documents(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i // 30 == j // 40) & (i + h >= j // 2)


def untraceable(b: Any, h: Any, i: Any, j: Any) -> Any:
    return documents(b, h, i, j) & (torch.lgamma(i + 3.0) > 0.0)


MANY = [torch.zeros(ROWS) for _ in range(5)]


def reads_many(b: Any, h: Any, i: Any, j: Any) -> Any:
    return documents(b, h, i, j) & (sum(each[i] for each in MANY) == 0.0)


@pytest.mark.parametrize("other", [untraceable, reads_many])
def test_torchs_block_mask(other: Any) -> None:
    q, k, v = tensors()
    blocks, unknown = (
        flex_attention.create_block_mask(mod, None, H, ROWS, KEYS, device="cpu", BLOCK_SIZE=SIZE)
        for mod in (documents, other)
    )
    mask = flex_attention.create_mask(documents, 1, H, ROWS, KEYS, device="cpu")
    expected = portattn.attention(q, k, v, mask=mask)
    module._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="mask_mod cannot be traced, or reads too many tensors") as said:
        torch.testing.assert_close(portattn.attention(q, k, v, block_mask=unknown), expected)
    assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        portattn.attention(q, k, v, block_mask=unknown)  # warned of once
        torch.testing.assert_close(portattn.attention(q, k, v, block_mask=blocks), expected)
        assert portattn.last_plan().problem.mask_mod
        some = torch.rand(ROWS, KEYS) < 0.6  # a score counts where both say so
        right = portattn.attention(q, k, v, mask=mask & some)
        torch.testing.assert_close(portattn.attention(q, k, v, block_mask=blocks, mask=some), right)
        four = [getattr(blocks, name) for name in portattn.BlockMask._fields[:4]]
        for make in (flex_attention.BlockMask.from_kv_blocks, portattn.BlockMask):
            torch.testing.assert_close(portattn.attention(q, k, v, block_mask=make(*four, SIZE), mask=mask), expected)


def test_nan_in_blocks_that_no_list_names() -> None:
    q, k, v = tensors()
    one = torch.ones(1, 1, 3, dtype=torch.int32)
    blocks = portattn.BlockMask(one, torch.tensor([0, 2, 5], dtype=torch.int32).view(1, 1, 3, 1), block_size=SIZE)
    expected = portattn.attention(q, k, v, block_mask=blocks)
    unseen = torch.tensor([j // 16 not in (0, 2, 5) for j in range(KEYS)])
    for poisoned in ({"k": k.clone()}, {"v": v.clone()}):
        for tensor in poisoned.values():
            tensor[:, :, unseen] = float("nan")
        assert torch.equal(portattn.attention(**({"q": q, "k": k, "v": v} | poisoned), block_mask=blocks), expected)


def test_the_reference_visits_listed_tiles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 4096, 16)
    few = torch.ones(1, 1, 8, dtype=torch.int32)
    blocks = portattn.BlockMask(few, torch.arange(8, dtype=torch.int32).view(1, 1, 8, 1), block_size=(512, 512))
    seen, tiles = [], Tiling.tiles

    def counted(self: Tiling, rows: Any, reach: Any) -> Any:
        for tile in tiles(self, rows, reach):
            seen.append((tile.keys.stop - tile.keys.start) * (rows.stop - rows.start))
            yield tile

    monkeypatch.setattr(Tiling, "tiles", counted)
    portattn.attention(q, q, q, block_mask=blocks, backend="reference")
    assert sum(seen) == 8 * 512 * 512 < 4096 * 4096 // 4


def test_other_lists_each_step(kept: str) -> None:
    q, k, v = tensors(device=kept)
    for seed in range(3):
        blocks, shown = lists(seed=seed)
        on_device = blocks._replace(**{n: t.to(kept) for n, t in blocks._asdict().items() if n != "block_size"})
        out = portattn.attention(q, k, v, block_mask=on_device)
        expected = portattn.attention(q, k, v, mask=shown.to(kept), backend="reference")
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    kinds = [kind for kind in cache.every_kind() if "reference" not in kind.values]
    assert [[cached.plan.path for cached in kind.classes] for kind in kinds] == [["triton"]]


@pytest.mark.parametrize("recorder", ["export", "compile"])
def test_graphs(recorder: str) -> None:
    q, k, v = tensors()
    blocks, _ = lists()

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
            return portattn.attention(q, k, v, block_mask=portattn.BlockMask(counts, indices, block_size=SIZE))

    given = (q, blocks.kv_num_blocks, blocks.kv_indices)
    if recorder == "export":
        graph: Any = torch.export.export(Layer(), given, strict=False).module()
    else:
        torch._dynamo.reset()
        graph = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
    fewer = (q, blocks.kv_num_blocks // 2, blocks.kv_indices)
    assert not torch.equal(Layer()(*given), Layer()(*fewer))
    assert torch.equal(graph(*fewer), Layer()(*fewer))


def test_vmap_and_prepare() -> None:
    q, k, v = tensors()
    blocks, _ = lists()
    found = torch.func.vmap(lambda q: portattn.attention(q, k, v, block_mask=blocks))(torch.stack([q, -q]))
    torch.testing.assert_close(found[1], portattn.attention(-q, k, v, block_mask=blocks))
    handle = portattn.prepare("attention", q, k, v, block_mask=blocks)
    other, _ = lists(seed=1)
    assert torch.equal(handle.run(q, k, v, block_mask=other), portattn.attention(q, k, v, block_mask=other))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"block_mask": [1]}, "block_mask is 'list', but must be a portattn.BlockMask, or torch"),
    ({"block_mask": torch.ones(3, 7, dtype=torch.bool)}, "block_mask is 'Tensor'"),
    ({"kv_num_blocks": zeros(B, H, 3)}, "block_mask's kv_num_blocks is torch.float32"),
    ({"kv_num_blocks": zeros(B, H, 4, dtype=torch.int32)},
     "block_mask's kv_num_blocks.shape is (2, 4, 4), but must be (B, Hq, R) with R the 3 blocks of queries"),
    ({"kv_num_blocks": zeros(B, 1, 3, dtype=torch.int32)}, "block_mask's kv_indices.shape is (2, 4, 3, 7)"),
    ({"kv_num_blocks": zeros(B, H, 3, dtype=torch.int32).to_sparse()}, "block_mask's kv_num_blocks"),
    ({"full_kv_indices": None}, "block_mask's full_kv_indices is None, but goes with"),
    ({"block_size": 128}, "block_mask's block_size is 128, but must be a tuple of two integers"),
    ({"block_size": (16, 0)}, "block_mask's block_size is (16, 0)"),
    ({"kv_indices": zeros(B, H, 3, 7, dtype=torch.int32, device="meta")}, "is 'meta', but must be"),
]  # fmt: skip


@pytest.mark.parametrize("what", BAD, ids=lambda case: str(case[1]))
def test_bad_lists_are_refused_by_name(what: tuple[Any, ...]) -> None:
    changes, message = what
    blocks = changes["block_mask"] if "block_mask" in changes else lists()[0]._replace(**changes)
    with pytest.raises(portattn.ArgumentError) as caught:
        portattn.attention(*tensors(), block_mask=blocks)
    assert message in str(caught.value)


def test_what_goes_without() -> None:
    blocks, _ = lists(heads=1)
    of_two = portattn.BlockMask(*(t.expand(B, 2, *t.shape[2:]) for t in blocks[:4]), block_size=SIZE)
    theirs = flex_attention.create_block_mask(documents, 3, None, ROWS, KEYS, device="cpu", BLOCK_SIZE=SIZE)
    for wrong, text in ((of_two, "Hq is 2, but must be 1 or 4"), (theirs, "B is 3, but must be 1 or 2")):
        with pytest.raises(portattn.ArgumentError, match=f"^attention: block_mask's {text}$"):
            portattn.attention(*tensors(), block_mask=wrong)
    with pytest.raises(portattn.ArgumentError, match=r"leftpad_k is .*goes without block_mask"):
        portattn.attention(*tensors(), block_mask=blocks, leftpad_k=torch.zeros(B, dtype=torch.int32))


def test_plans() -> None:
    sizes = {"batch": 1, "heads_q": 8, "heads_k": 8, "seq_q": 1024, "seq_k": 1024, "head_dim": 64, "block_mask": True}
    target = parse_target("cuda:sm_90", "triton==3.6.0")
    made = plan(Problem(**sizes, block_q=48, block_k=160), target)
    assert (made.path, made.launch.block_m, made.launch.block_n) == ("triton", 16, 32)
    for pipeline in ("rotated", "single"):
        short = Problem(**(sizes | {"seq_k": 16}))
        limits = CORES["attention"].limits(short, Lowering(pipeline=pipeline), Launch())  # type: ignore[arg-type]
        assert [limit[:2] for limit in limits] == [("pipeline", "plain")]
    fallen = plan(Problem(**sizes, block_k=24), target)
    assert fallen.path == "reference"
    assert any("block_mask has block_k 24, no multiple of 16" in each.reason for each in fallen.rejected)
    assert plan(Problem(**sizes, kv_format="e4m3"), target).kernel == "dense_forward"
    with pytest.raises(portattn.ArgumentError, match="leftpad_k is True, but goes without block_mask"):
        Problem(**sizes, leftpad_k=True)


def test_a_call_without_lists_attends_all() -> None:
    blocks = portattn.BlockMask(zeros(1, 1, 3).int(), zeros(1, 1, 3, 0).int(), block_size=SIZE)
    out, lse = portattn.attention(*tensors(), block_mask=blocks, return_lse=True)
    assert not out.any()
    assert lse.eq(float("-inf")).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("way", ["compile", "func.grad"])
def test_gradients_in_a_graph_are_those_of_the_mask(way: str) -> None:
    blocks, shown = lists()
    q, k, v = tensors()

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return portattn.attention(q, k, v, block_mask=blocks, backend="interpreter").square().sum()

    if way == "compile":
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        found = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(*leaves), leaves)
    else:
        found = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(portattn.attention(*leaves, mask=shown).square().sum(), leaves)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("made", [(ROWS, KEYS + 32), (ROWS, KEYS - 30), (ROWS + 7, KEYS), (ROWS - 40, KEYS)])
def test_torchs_mask_of_other_lengths_is_refused(made: tuple[int, int]) -> None:
    blocks = flex_attention.create_block_mask(documents, B, H, *made, device="cpu", BLOCK_SIZE=SIZE)
    with pytest.raises(portattn.ArgumentError, match=r"seq_lengths is \(\d+, \d+\), but must be .*\(70, 100\)"):
        portattn.attention(*tensors(), block_mask=blocks)


def test_wrong_ids_and_counts_are_refused_where_values_are_read() -> None:
    blocks, across = lists()[0], -(-KEYS // SIZE[1])
    counts, ids = blocks.kv_num_blocks.clamp(min=1), blocks.kv_indices.clone()
    ids[..., 0] = across
    for broken, what, value in (
        (blocks._replace(kv_num_blocks=counts, kv_indices=ids), "kv_indices", across),
        (blocks._replace(kv_num_blocks=counts + across), "kv_num_blocks", None),
        (blocks._replace(full_kv_num_blocks=counts - across - 1), "full_kv_num_blocks", None),
    ):
        with pytest.raises(portattn.ArgumentError, match=what) as caught:
            portattn.attention(*tensors(), block_mask=broken)
        assert value is None or caught.value.value == value
        portattn.attention(*tensors(), block_mask=broken, validate=False)


def test_torchs_mask_in_a_whole_graph() -> None:
    blocks = flex_attention.create_block_mask(documents, B, H, ROWS, KEYS, device="cpu", BLOCK_SIZE=SIZE)
    q, k, v = tensors()
    compiled = torch.compile(lambda q, k, v: portattn.attention(q, k, v, block_mask=blocks), fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(compiled(q, k, v), portattn.attention(q, k, v, block_mask=blocks))


def test_a_mask_function_in_a_whole_graph() -> None:
    """Its code alone decides its program; the operator makes its lists."""
    near = lambda b, h, i, j: (i // 8 >= j // 8) | (j < 3)  # noqa: E731
    call, found = functools.partial(portattn.attention, mask_mod=near), []
    for attend in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
        q = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = attend(q, q, q)
        assert portattn.last_plan().problem.block_mask
        found.append([out, *torch.autograd.grad(out.square().sum(), q)])
    torch.testing.assert_close(*found)


@pytest.mark.interpreter
def test_the_operator_checks_its_lists() -> None:
    q, k, v = tensors()
    marks = torch.randint(0, 3, (1, 1, -(-ROWS // SIZE[0]), -(-KEYS // SIZE[1]))).to(torch.int8)
    spread = block_lists(marks, (ROWS, KEYS), SIZE).repeat_interleave(2, dim=-1)[..., ::2]
    tensors_, values, lengths = request_of("attention", q, k, v).parts
    names, given = list(OPS["attention"].tensors), list(tensors_)

    def run(blocks: torch.Tensor | None, size: Any, backend: str) -> Any:
        given[names.index("block_mask")] = blocks
        at, fixed = list(OPS["attention"].fixed), list(values)
        fixed[at.index("block_size")] = size
        fixed[len(at)] = backend
        return torch.ops.portattn.attention(*arguments_of("attention", tuple(given), tuple(fixed), lengths))[0]

    torch.testing.assert_close(run(spread, SIZE, "interpreter"), run(spread, SIZE, "reference"), atol=2e-5, rtol=1e-4)
    for blocks, size in ((spread[..., :1], SIZE), (spread, None), (None, SIZE), (spread, (0, 16))):
        with pytest.raises(portattn.ArgumentError, match=r"block_mask|block_size"):
            run(blocks, size, "reference")


def test_ids_of_no_block_are_passed_over_where_nothing_is_read_back() -> None:
    x, ids = torch.randn(1, 1, 32, 16), torch.tensor([[[[0, 7, -3]]]], dtype=torch.int32)
    blocks = portattn.BlockMask(torch.tensor([[[3]]], dtype=torch.int32), ids, block_size=(32, 16))
    out = portattn.attention(x, x, x, block_mask=blocks, validate=False)
    torch.testing.assert_close(out, portattn.attention(x, x[:, :, :16], x[:, :, :16]))


@pytest.mark.parametrize("torchs", [False, True])
def test_lists_are_made_once_until_they_are_written_to(monkeypatch: pytest.MonkeyPatch, torchs: bool) -> None:
    made, checked, check = [], [], module._block_tensors
    monkeypatch.setattr(module, "block_lists", lambda *given: made.append(1) or block_lists(*given))
    monkeypatch.setattr(module, "_block_tensors", lambda *given: checked.append(1) or check(*given))
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind(0)
    mask: Any = portattn.BlockMask(zeros(1, 1, 4).int() + 1, zeros(1, 1, 4, 4).int(), block_size=(16, 16))
    if torchs:
        mask = flex_attention.BlockMask.from_kv_blocks(*mask[:2], BLOCK_SIZE=(16, 16))
    assert torch.equal(*(portattn.attention(q, k, v, block_mask=mask) for _ in range(2)))
    assert (len(made), len(checked)) == (1, 1 if torchs else 2)
    mask.kv_indices.fill_(1)
    right = portattn.attention(q, k[:, :, 16:32], v[:, :, 16:32])
    assert torch.allclose(portattn.attention(q, k, v, block_mask=mask), right, atol=1e-5)
    assert len(made) == 2
    mask.kv_indices.data = torch.zeros_like(mask.kv_indices)  # which changes no version
    right = portattn.attention(q, k[:, :, :16], v[:, :, :16])
    assert torch.allclose(portattn.attention(q, k, v, block_mask=mask), right, atol=1e-5)
    assert len(made) == 3
    mask.kv_indices.data = mask.kv_indices.data[:, :, :3]  # of the same address
    with pytest.raises(portattn.ArgumentError, match="kv_indices"):
        portattn.attention(q, k, v, block_mask=mask)
    mask.kv_indices.data = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    for where in (score_functions, module):
        monkeypatch.setattr(where, "is_capturing", lambda device: True)
    portattn.attention(q, k, v, block_mask=mask)
    assert len(made) == 4  # a graph makes its own: the lists may be written to before a replay


def test_a_mask_that_was_seen_is_checked_anew_of_other_calls() -> None:
    blocks, (q, k, v) = flex_attention.create_block_mask(documents, 1, 1, 70, 100, device="cpu"), tensors()
    portattn.attention(q, k, v, block_mask=blocks)
    blocks.mask_mod = lambda b, h, q_idx, kv_idx: kv_idx < 9
    right = portattn.attention(q, k[:, :, :9], v[:, :, :9])
    torch.testing.assert_close(portattn.attention(q, k, v, block_mask=blocks), right)
    with pytest.raises(portattn.ArgumentError, match="seq_lengths"):
        portattn.attention(q, k[:, :, :99], v[:, :, :99], block_mask=blocks)


def test_a_window_that_was_seen_is_checked_again_once_its_values_change(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, check, width = [], module._block_tensors, 9
    monkeypatch.setattr(module, "_block_tensors", lambda *given: checked.append(1) or check(*given))
    blocks = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= width, 1, 1, 300, 300, device="cpu")
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    for width in (9, 9, 5):
        right = portattn.attention(q, k, v, mask=torch.arange(300)[:, None] - torch.arange(300) <= width)
        torch.testing.assert_close(portattn.attention(q, k, v, block_mask=blocks), right)
    assert len(checked) == 2


def test_a_graph_keeps_lists_of_a_function_without_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_functions, "_held_for_graphs", {})
    monkeypatch.setattr(score_functions, "_lists", OrderedDict())
    q = torch.randn(1, 2, 200, 16)
    for capturing in (False, True):
        monkeypatch.setattr(score_functions, "is_capturing", lambda device, found=capturing: found)
        portattn.attention(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx // 8 >= kv_idx // 8)
    assert [*score_functions._held_for_graphs] == [id(kept.lists) for kept in score_functions._lists.values()]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_lists_of_fake_tensors_are_not_kept(mode: str) -> None:
    q, at = torch.randn(1, 2, 301, 16), torch.arange(301)
    call = functools.partial(portattn.attention, mask_mod=lambda b, h, q, k: (q >= k) | (k < 5))
    make_fx(lambda q: call(q, q, q), tracing_mode=mode)(q)
    right = portattn.attention(q, q, q, mask=((at[:, None] >= at) | (at < 5))[None, None])
    torch.testing.assert_close(call(q, q, q), right)


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_exported_program_makes_lists_of_each_runs_lengths(dynamic: bool) -> None:
    document, scale = torch.arange(600) // 70, torch.tensor([0.5, 2.0])

    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            same = lambda b, h, i, j: (document[i] == document[j]) & (i >= j)  # noqa: E731
            return portattn.attention(q, q, q, score_mod=lambda s, b, h, i, j: s * scale[h], mask_mod=same)

    q = torch.randn(1, 2, 600, 16)
    shapes = ({2: torch.export.Dim("rows", max=600)},) if dynamic else None
    program = torch.export.export(Layer(), (torch.randn(1, 2, 301, 16),), dynamic_shapes=shapes)
    assert [node.op for node in program.graph.nodes].count("call_function") == 3  # the operator, and its results
    for rows in (301, 600, 20) if dynamic else (301,):
        found, listed = program.module()(q[:, :, :rows]), portattn.last_plan().problem.block_mask
        assert listed == (rows > 128)
        torch.testing.assert_close(found, Layer()(q[:, :, :rows]))


def test_lists_go_with_the_tensors_that_the_mask_reads() -> None:
    score_functions._lists.clear()
    q, bias, document = torch.randn(1, 2, 200, 16), torch.randn(2), torch.arange(200) // 70
    call = functools.partial(portattn.attention, mask_mod=lambda b, h, i, j, seen=document: seen[i] >= seen[j])
    for _ in range(2):
        call(q, q, q, score_mod=lambda score, b, h, i, j: score + bias[h])
        bias.add_(1.0)  # which the mask does not read
    assert len(score_functions._lists) == 1
    del document, call
    assert not score_functions._lists


def test_another_stream_waits_for_the_stream_that_made_the_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; the stream that made them never. The CPU's stands in for a device's, which the next test asks."""
    waited: list[Any] = []
    monkeypatch.setattr(score_functions, "_lists", OrderedDict())
    monkeypatch.setattr(score_functions, "_made_by", lambda device: ({7}, "made on 7"))
    monkeypatch.setattr(torch.cpu, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda lists, stream: waited.append("recorded"))
    for handle, count in ((7, 0), (7, 0), (8, 1), (8, 1), (9, 2)):
        own = SimpleNamespace(stream=lambda index, handle=handle: handle)
        monkeypatch.setattr(score_functions, "runtime", lambda kind, own=own: own)
        score_functions.made_once("streams", [], lambda: zeros(2))
        assert waited == ["made on 7", "recorded"] * count


@pytest.mark.gpu
def test_lists_that_another_stream_makes_are_whole() -> None:
    q = torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.float16)
    document = torch.arange(2000, device="cuda") // 70
    call = functools.partial(portattn.attention, q, q, q, mask_mod=lambda b, h, i, j: document[i] >= document[j])
    right, streams = call(), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    score_functions._lists.clear()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(10**8)  # clock cycles
        call()
    with torch.cuda.stream(streams[1]):
        found = call()
    torch.cuda.synchronize()
    assert torch.equal(found, right)


def test_the_last_lists_that_were_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_functions, "_lists", OrderedDict())
    for key in (*range(score_functions._MOST_LISTS), 0, 32):
        score_functions.made_once(key, [], lambda: zeros(2))
    assert [key for key, _ in score_functions._lists] == [*range(2, 32), 0, 32]
