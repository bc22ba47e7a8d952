"""tree_mask: the helper that makes it, what calls with one compute on every way to make a call, and what is refused."""

from typing import Any

import pytest
import torch
from graphs import RECORDERS, a_model, same
from opcalls import assert_right, changed, given, perform, problem
from support import Device, poisoned, random_call
from torch import zeros

import portattn
from portattn.api.signatures import request_of
from portattn.api.torch_ops import arguments_of
from portattn.errors import ArgumentError
from portattn.launch import cache

NAMES = ("decode", "paged", "ragged")
TREES = {
    "a chain": [-1, 0, 1, 2, 3], "roots alone": [-1, -1, -1, -1, -1], "two branches": [-1, 0, 0, 1, 2],
    "two trees": [-1, 0, -1, 2, 1],
}  # fmt: skip


def a_tree(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, i, (1,), generator=generator)) if i else -1 for i in range(count)]


def path(parents: list[int], node: int) -> list[int]:
    found = [node]
    while parents[found[0]] >= 0:
        found.insert(0, parents[found[0]])
    return found


@pytest.mark.parametrize("parents", [*TREES.values(), a_tree(64, 1), a_tree(33, 2), []], ids=len)
def test_words_have_a_bit_for_each_ancestor(parents: list[int]) -> None:
    words = portattn.tree_mask(parents)
    assert words.dtype is torch.int64
    for node, word in enumerate(words.tolist()):
        assert word % 2**64 == sum(1 << other for other in path(parents, node))
    both = portattn.tree_mask(torch.tensor([parents, parents], dtype=torch.int32))
    assert torch.equal(both, words.expand(2, -1))
    seen = torch.tensor([[j in path(parents, i) for j in range(len(parents))] for i in range(len(parents))])
    assert torch.equal(portattn.tree_mask(seen.bool().reshape(len(parents), len(parents))), words)


BAD: dict[str, tuple[Any, str]] = {
    "a float": (1.5, "tree is 1.5"), "a list of floats": ([0.5], "tree is [0.5]"),
    "a list of bools": ([True], "tree is [True]"),
    "its own parent": ([-1, 1], "parent of node 1 is 1, but must be below 1"),
    "a later parent": (torch.tensor([[-1, 0, 1], [-1, 2, 0]]), "parent of node 1 is 2, but must be below 1"),
    "the first has one": ([0], "parent of node 0 is 0"), "floats": (torch.zeros(3), "tree.dtype is torch.float32"),
    "not square": (torch.zeros(3, 4, dtype=torch.bool), "tree.shape is (3, 4)"),
    "bools of one axis": (torch.zeros(3, dtype=torch.bool), "tree.shape is (3,)"),
    "65 nodes": (torch.zeros(65, 65, dtype=torch.bool), "tree.shape is (65, 65), but must have at most 64 nodes"),
    "no axis": (torch.tensor(1), "tree.shape is ()"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_tree(what: str) -> None:
    tree, message = BAD[what]
    with pytest.raises(portattn.ArgumentError) as caught:
        portattn.tree_mask(tree)
    assert message in str(caught.value)


@pytest.mark.parametrize("tree", [*TREES, "random"])
def test_a_tree_is_its_paths_one_by_one(tree: str) -> None:
    """What verification is: each node attends as if its path alone had been appended to the cache."""
    parents = TREES.get(tree) or a_tree(17, 3)
    count, before = len(parents), 21
    torch.manual_seed(0)
    q, new_k, new_v = torch.randn(1, 4, count, 16), torch.randn(1, 2, count, 16), torch.randn(1, 2, count, 16)
    k, v = torch.randn(1, 2, before, 16), torch.randn(1, 2, before, 16)
    out, lse = portattn.decode_attention(
        q, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), None, tree_mask=portattn.tree_mask(parents),
        return_lse=True,
    )  # fmt: skip
    for node in range(count):
        nodes = path(parents, node)
        alone, alone_lse = portattn.attention(
            q[:, :, nodes], torch.cat([k, new_k[:, :, nodes]], 2), torch.cat([v, new_v[:, :, nodes]], 2), causal=True,
            return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[:, :, node], alone[:, :, -1])
        torch.testing.assert_close(lse[:, :, node], alone_lse[:, :, -1])


@pytest.mark.parametrize("name", [*NAMES, "mla", "mla ragged"])
def test_public_calls_are_right(name: str) -> None:
    for seed, poison in enumerate(("apart", "k", "v")):
        fields = {"causal": "bottom_right", "window_left": 9} if seed else {}
        call = random_call(problem(name, tree_mask=True, sinks=seed > 0, **fields), seed, poison=poison)
        with poisoned():
            assert_right(call, *perform(call.problem.op, given(call)))
        made = portattn.last_plan()
        assert made.problem.tree_mask
        assert "tree_mask" in str(made.problem)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_on_the_reference_path(name: str) -> None:
    call = random_call(problem(name, tree_mask=True, return_lse=False), 1)
    arguments = given(call)
    names = ("q", *(n for n in arguments if n.startswith(("k_", "v_")) and arguments[n].is_floating_point()))
    leaves = {n: arguments[n].detach().nan_to_num(0.5).requires_grad_() for n in names}
    out = perform(call.problem.op, arguments | leaves | {"backend": "reference"})
    found = torch.autograd.grad(out.sin().sum(), list(leaves.values()))
    assert all(grad.isfinite().all() and grad.any() for grad in found)
    function = lambda *tensors: perform(  # noqa: E731
        call.problem.op, arguments | dict(zip(names, tensors, strict=True)) | {"backend": "reference"}
    ).sin().sum()  # fmt: skip
    step = [torch.randn_like(leaf) for leaf in leaves.values()]
    along = sum((grad * d).sum() for grad, d in zip(found, step, strict=True))
    values = [function(*(leaf.detach() + h * d for leaf, d in zip(leaves.values(), step, strict=True)))
              for h in (1e-3, -1e-3)]  # fmt: skip
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(float(along), rel=0.02, abs=0.05)


@pytest.mark.parametrize("name", [*NAMES, "mla"])
def test_opcheck(name: str, device: Device) -> None:
    model, _ = a_model(name, device, tree_mask=True)
    request = request_of(model.op, **model.arguments)
    operator = getattr(torch.ops.portattn, model.op).default
    assert set(torch.library.opcheck(operator, arguments_of(model.op, *request.parts)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("recorder", ["torch.export", "make_fx, symbolic", "torch.compile, dynamic"])
@pytest.mark.parametrize("name", ["decode", "ragged"])
def test_a_graph_gives_the_eager_result(recorder: str, name: str, device: Device) -> None:
    model, tensors = a_model(name, device, tree_mask=True)
    graph = RECORDERS[recorder](model, tensors)
    again = tuple(~t if n == "tree_mask" else t for n, t in zip(model.names, tensors, strict=True))
    expected = model(*again)
    assert not same(expected, model(*tensors))
    assert same(graph(*again), expected)  # nothing of the first mask is in it


@pytest.mark.parametrize("name", ["paged", "ragged"])
def test_a_new_mask_each_step(name: str, kept: str) -> None:
    """The first call is planned, the others are found: each with the mask that it has."""
    call = random_call(problem(name, tree_mask=True, dtype="fp16"), 1, device=kept)
    arguments, results = given(call), []
    for step in range(3):
        mask = arguments["tree_mask"].roll(step, -1) ^ step
        out, _ = perform(call.problem.op, arguments | {"tree_mask": mask})
        expected, _ = perform(call.problem.op, arguments | {"tree_mask": mask, "backend": "reference"})
        torch.testing.assert_close(out, expected, atol=4e-3, rtol=4e-3, equal_nan=True)
        results.append(out)
    assert not torch.equal(results[0].nan_to_num(7), results[1].nan_to_num(7))
    kinds = [kind for kind in cache.every_kind() if "reference" not in kind.values]
    assert len(kinds) == 1
    assert len(kinds[0].classes) == 1, "all steps are of one class"


@pytest.mark.parametrize("name", ["decode", "paged"])
def test_prepared(name: str, kept: str) -> None:
    call = random_call(problem(name, tree_mask=True), 1, device=kept)
    op, arguments = call.problem.op, given(call)
    handle = portattn.prepare(op, **arguments)
    for data in (arguments, changed(arguments), arguments | {"tree_mask": ~arguments["tree_mask"]}):
        assert same(handle.run(**data), perform(op, data))
    without = {n: v for n, v in arguments.items() if n != "tree_mask"}
    with pytest.raises(portattn.ArgumentError, match="tree_mask is 'NoneType'"):
        handle.run(**without)


def test_another_length_is_the_same_class(kept: str) -> None:
    """Caches that grow are not planned anew: sizes with a tree mask are traced."""
    for keys in (40, 41, 57):
        q, k = torch.randn(2, 4, 5, 16, device=kept), torch.randn(2, 2, keys, 16, device=kept)
        mask = portattn.tree_mask(TREES["two branches"]).to(kept)
        out = portattn.decode_attention(q, k, k, None, tree_mask=mask)
        expected = portattn.decode_attention(q, k, k, None, tree_mask=mask, backend="reference")
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    kinds = [kind for kind in cache.every_kind() if "reference" not in kind.values]
    assert [cached.why_fixed for kind in kinds for cached in kind.classes] == [""]


def test_vmap() -> None:
    q, k = torch.randn(3, 2, 4, 5, 16), torch.randn(3, 2, 2, 30, 16)
    masks = torch.stack([portattn.tree_mask(a_tree(5, seed)) for seed in range(3)])

    def call(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return portattn.decode_attention(q, k, k, None, tree_mask=mask)

    for in_dims, all_masks in (((0, 0, 0), masks), ((0, 0, None), masks[:1].expand(3, -1))):
        given_masks = masks if in_dims[2] == 0 else masks[0]
        expected = torch.stack([call(*one) for one in zip(q, k, all_masks, strict=True)])
        torch.testing.assert_close(torch.func.vmap(call, in_dims=in_dims)(q, k, given_masks), expected)


Q, K = torch.zeros(2, 4, 3, 16), torch.zeros(2, 2, 20, 16)
WORDS = torch.zeros(2, 3, dtype=torch.int64)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tree_mask": WORDS.int()}, "tree_mask.dtype is torch.int32, but must be torch.int64"),
    ({"tree_mask": [1, 3, 7]}, "tree_mask is 'list', but must be a torch.Tensor"),
    ({"tree_mask": WORDS[:, :2]}, "tree_mask.shape is (2, 2), but must be (seq_q,) or"),
    ({"tree_mask": WORDS[:1]}, "tree_mask.shape is (1, 3)"),
    ({"tree_mask": WORDS.to("meta")}, "tree_mask.device is 'meta', but must be q's, cpu"),
    ({"tree_mask": zeros(2, 6, dtype=torch.int64)[:, ::2]}, "tree_mask.stride(-1) is 2, but must be 1"),
    ({"q": zeros(2, 4, 65, 16), "tree_mask": zeros(65, dtype=torch.int64)},
     "seq_q is 65, but must be at most 64 with a tree mask"),
]  # fmt: skip


@pytest.mark.parametrize("what", REFUSED, ids=lambda case: str(case[1]))
def test_bad_masks_are_refused_by_name(what: tuple[Any, ...]) -> None:
    changes, message = what
    with pytest.raises(portattn.ArgumentError) as caught:
        portattn.decode_attention(**({"q": Q, "k_cache": K, "v_cache": K, "seqlens_k": None} | changes))
    assert message in str(caught.value)


def test_packed_masks_are_refused_by_name() -> None:
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([16, 16], dtype=torch.int32)
    cu, pages = torch.tensor([0, 3, 70], dtype=torch.int32), torch.zeros(4, 8, 2, 16)
    q, words = torch.zeros(70, 4, 16), torch.zeros(70, dtype=torch.int64)

    def call(**changes: Any) -> Any:
        return portattn.paged_attention(
            q, pages, pages, table, lengths, cu_seqlens_q=cu, **({"tree_mask": words} | changes)
        )

    with pytest.raises(portattn.ArgumentError, match="max_seqlen_q is 70, but must be given, and at most 64"):
        call()
    with pytest.raises(portattn.ArgumentError, match=r"tree_mask.shape is \(2, 3\), but must be \(rows of packed"):
        call(tree_mask=WORDS)


@pytest.mark.parametrize("op", ["attention", "varlen_attention", "sparse_attention"])
def test_other_operations_refuse_it_by_name(op: str) -> None:
    with pytest.raises(portattn.UnknownArgument, match=f"{op} has no argument 'tree_mask'"):
        getattr(portattn, op)(tree_mask=WORDS)


@pytest.mark.parametrize("tree", [torch.tensor([-1, 0, 0, 1]), torch.tensor([[-1, 0, 1]])])
def test_words_are_made_in_a_graph(tree: torch.Tensor) -> None:
    made = torch.compile(portattn.tree_mask, fullgraph=True, backend="eager")(tree)
    assert torch.equal(made, portattn.tree_mask(tree))


# The deepest trees: 64 tokens one after the other, as lists, and every depth below.
@pytest.mark.parametrize("count", [2, 31, 32, 33, 34, 63, 64])
def test_a_chain_of_many(count: int) -> None:
    words = portattn.tree_mask([node - 1 for node in range(count)])
    assert [word % 2**64 for word in words.tolist()] == [2 ** (node + 1) - 1 for node in range(count)]


# Block lists and trees that must be refused by name, found by trying every argument.
Q_MASK_BAD_VALUES, K_MASK_BAD_VALUES = torch.randn(2, 4, 32, 16), torch.randn(2, 2, 32, 16)


def lists(batch: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(batch, heads, 2, dtype=torch.int32), torch.zeros(batch, heads, 2, 2, dtype=torch.int32)


@pytest.mark.parametrize("full", [(3, 4), (2, 3), (0, 4)])
def test_whole_blocks_of_another_batch(full: tuple[int, int]) -> None:
    mask = portattn.BlockMask(*lists(2, 4), *lists(*full), block_size=(16, 16))
    with pytest.raises(ArgumentError, match=r"^attention: block_mask's full_kv_num_blocks\.shape is .*\(2, 4\)"):
        portattn.attention(Q_MASK_BAD_VALUES, K_MASK_BAD_VALUES, K_MASK_BAD_VALUES, block_mask=mask)


def test_one_list_for_all_beside_lists_of_each() -> None:
    mask = portattn.BlockMask(*lists(1, 4), *lists(2, 1), block_size=(16, 16))
    wide = portattn.BlockMask(*lists(2, 4), block_size=(16, 16))
    assert torch.equal(
        portattn.attention(Q_MASK_BAD_VALUES, K_MASK_BAD_VALUES, K_MASK_BAD_VALUES, block_mask=mask),
        portattn.attention(Q_MASK_BAD_VALUES, K_MASK_BAD_VALUES, K_MASK_BAD_VALUES, block_mask=wide),
    )


def test_queries_that_are_none() -> None:
    mask = portattn.BlockMask(*lists(2, 4), block_size=(16, 16))
    with pytest.raises(ArgumentError, match=r"^attention: q is "):
        portattn.attention(None, K_MASK_BAD_VALUES, K_MASK_BAD_VALUES, block_mask=mask)  # type: ignore[arg-type]


def test_a_parent_beyond_64_bits() -> None:
    with pytest.raises(ArgumentError, match=r"^tree_mask: tree is .*must be a torch\.Tensor of parents"):
        portattn.tree_mask([-1, 2**70])
