"""diffusers' adapter beside its native backend, and masks beside FlexAttention; how vLLM calls FlashAttention-3."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

import portattn
from portattn.tools.bench import peers
from portattn.tools.bench.contenders import OURS
from portattn.tools.bench.workloads import Absent, Measure, Row, judge_attention, judge_result, worst

DIM = 128
SPLITS_IN_GRAPHS = 32  # vLLM's default of flash_attn_max_num_splits_for_cuda_graph


class Forward:
    """A call of FlashAttention-3 in vllm's build, as vLLM makes it: by position, into a given tensor."""

    def __init__(self, **given: Any) -> None:
        self.op = torch.ops._vllm_fa3_C.fwd.default
        self.given = peers.neutral() | given

    def __call__(self, **now: Any) -> Any:
        given = self.given | now if now else self.given
        return self.op(*(given[argument.name] for argument in self.op._schema.arguments))

    def schedule(self, batch: int, page_size: int | None) -> torch.Tensor:
        """Return the schedule that vLLM's builder computes once a step."""
        return peers.schedule(self.given, batch, page_size)


SIZE = 128  # of a block
DOCUMENT, WINDOW = 2048, 1024
Mod = Callable[..., torch.Tensor]


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Allow pairs of one document, of whole blocks: no block is attended in part."""
    return q // DOCUMENT == k // DOCUMENT


def sliding(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Allow blocks at most the window apart: no block is attended in part."""
    return (q // SIZE - k // SIZE).abs() <= WINDOW // SIZE


def causal_documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Allow causal pairs of one document: blocks on the diagonal are attended in part."""
    return documents(b, h, q, k) & (q >= k)


def masks(measure: Measure) -> Iterator[Row]:
    """attention with lists of blocks beside FlexAttention, and tree masks of drafted tokens over a paged cache."""
    for name, mod in (("documents", documents), ("sliding", sliding), ("causal documents", causal_documents)):
        name = f"block_mask 16k, {name}"
        if measure.wanted(name):
            yield from _blocks(measure, name, mod)
    name = "tree_mask 64 x (16 of 4k), pages of 16"
    if measure.wanted(name):
        yield from _tree(measure, name)


def _blocks(measure: Measure, name: str, mod: Mod) -> Iterator[Row]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.manual_seed(0)
    heads, length = (2, 3 * DOCUMENT // 2) if measure.tiny else (16, 16_384)
    q, k, v = (measure.normal(1, heads, length, DIM) for _ in range(3))
    lists = create_block_mask(mod, None, None, length, length, device=measure.device, BLOCK_SIZE=SIZE)
    partial = int(lists.kv_num_blocks.sum())
    ours = portattn.BlockMask(
        lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices, (SIZE, SIZE)
    )
    causal = mod is causal_documents
    compiled = flex_attention if measure.tiny else torch.compile(flex_attention, dynamic=False)
    runs: dict[str, Any] = {
        OURS: lambda: portattn.attention(q, k, v, block_mask=ours, causal=causal),
        "flex": lambda: compiled(q, k, v, block_mask=lists),
        "portattn, everything": lambda: portattn.attention(q, k, v, causal=causal),
    }
    some = torch.tensor([0, SIZE - 1, SIZE, length // 2 - 1, length // 2 + 70, length - 1], device=measure.device)
    some = torch.cat([some, torch.randint(length, (250,), device=measure.device)])
    seen = mod(0, 0, some[:, None], torch.arange(length, device=measure.device))

    def expected(dtype: torch.dtype) -> torch.Tensor:
        scores = (q[0, :, some].to(dtype) @ k[0].to(dtype).mT) * DIM**-0.5
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v[0].to(dtype)

    exact, same = expected(torch.float64), expected(torch.bfloat16)

    def judge(name: str) -> Callable[[], Row]:
        def now() -> Row:
            out = runs[name]()
            return judge_result(out[0][:, some], exact, same) | (
                {"path": portattn.last_plan().path, "note": f"{partial} blocks in part"} if name == OURS else {}
            )

        return now

    yield from measure.rows(name, runs, {name: judge(name) for name in (OURS, "flex")}, peer="flex")


def _tree(measure: Measure, name: str) -> Iterator[Row]:
    """Yield rows of requests that each verify a drafted tree of 16 tokens, with parents of its own."""
    torch.manual_seed(0)
    batch, drafted, keys, page, heads, kv_heads = 64, 16, 4096, 16, 32, 8
    if measure.tiny:
        batch, keys = 4, 128
    parents = torch.tensor([[-1] + [int(torch.randint(i, ())) for i in range(1, drafted)] for _ in range(batch)])
    words = portattn.tree_mask(parents).to(measure.device)
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=measure.device)
    lengths[:3] = torch.tensor([drafted, drafted + 1, keys - 5], dtype=torch.int32)
    table = torch.randperm(batch * keys // page, dtype=torch.int32, device=measure.device).view(batch, -1)
    q = measure.normal(batch, drafted, heads, DIM)
    k, v = (measure.normal(batch * keys // page, page, kv_heads, DIM) for _ in range(2))

    def run(**more: Any) -> Any:
        return portattn.paged_attention(q, k, v, table, lengths, layout="bshd", **more)

    runs: dict[str, Any] = {OURS: lambda: run(tree_mask=words), "chain (causal)": lambda: run(causal=True)}

    def judge() -> Row:
        out, found = runs[OURS](), []
        path = portattn.last_plan().path
        for b in range(0, batch, 3):
            length = int(lengths[b])
            rows_k, rows_v = (x[table[b].long()].flatten(0, 1)[:length] for x in (k, v))
            seen = torch.ones(drafted, length, dtype=torch.bool, device=measure.device)
            seen[:, length - drafted :] = _ancestors(parents[b]).to(measure.device)
            found.append(judge_attention(out[b], q[b], rows_k, rows_v, causal=False, seen=seen))
        return worst(found) | {"path": path}

    def chain() -> Row:
        runs["chain (causal)"]()
        return {"path": portattn.last_plan().path}

    yield from measure.rows(name, runs, {OURS: judge, "chain (causal)": chain}, peer="chain (causal)")


def _ancestors(parents: torch.Tensor) -> torch.Tensor:
    """Return the tree mask (n, n): each token sees itself and its ancestors."""
    count = parents.shape[0]
    seen = torch.eye(count, dtype=torch.bool)
    for i, parent in enumerate(parents.tolist()):
        if parent >= 0:
            seen[i] |= seen[parent]
    return seen


FLUX_HEADS, IMAGE, TEXT = 24, 4096, 512
NATIVE = "native"


def diffusers(measure: Measure) -> Iterator[Row]:
    """diffusers: a double-stream and a single-stream block of Flux with random weights, and both's attention alone."""
    try:
        from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
        from diffusers.models.transformers import transformer_flux as flux
    except ModuleNotFoundError as error:
        raise Absent(str(error)) from None
    from portattn.integrations.diffusers import register

    register()
    torch.manual_seed(0)
    normal = measure.normal
    heads, drawn, written = (2, IMAGE // 64, TEXT // 64) if measure.tiny else (FLUX_HEADS, IMAGE, TEXT)
    width = heads * DIM

    def tables() -> tuple[torch.Tensor, torch.Tensor]:
        angles = torch.rand(written + drawn, DIM // 2, device=measure.device).mul(6.28).repeat_interleave(2, 1)
        return angles.cos(), angles.sin()

    image, text, temb, rope = normal(1, drawn, width), normal(1, written, width), normal(1, width), tables()
    q, k, v = (normal(1, written + drawn, heads, DIM) for _ in range(3))

    def block(kind: Any) -> Callable[[], Any]:
        with torch.device(measure.device):
            made = kind(dim=width, num_attention_heads=heads, attention_head_dim=DIM).bfloat16().eval()
        return lambda: made(hidden_states=image, encoder_hidden_states=text, temb=temb, image_rotary_emb=rope)

    cases: dict[str, Callable[[], Callable[[], Any]]] = {
        "FluxTransformerBlock, 4096 + 512": lambda: block(flux.FluxTransformerBlock),
        "FluxSingleTransformerBlock, 4096 + 512": lambda: block(flux.FluxSingleTransformerBlock),
        "attention alone, 24 heads of 128": lambda: lambda: dispatch_attention_fn(q, k, v),
    }
    for name, make in cases.items():
        if measure.wanted(name):
            with torch.inference_mode():
                yield from _beside_native(measure, name, make(), attention_backend)


def _beside_native(measure: Measure, name: str, call: Callable[[], Any], attention_backend: Any) -> Iterator[Row]:
    def chosen(backend: str) -> Callable[[], Any]:
        def run() -> Any:
            with attention_backend(backend):
                return call()

        return run

    runs = {OURS: chosen("portattn"), NATIVE: chosen("native")}

    def flat(found: Any) -> torch.Tensor:
        return torch.cat([part.flatten() for part in (found if isinstance(found, tuple) else (found,))])

    def judge() -> Row:
        """Judge against the native backend's own error; the unfused formula in float32 stands for float64 here."""
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            exact = flat(runs[NATIVE]())
        found = judge_result(flat(runs[OURS]()), exact.double(), flat(runs[NATIVE]()))
        # Rounding to bfloat16 after each layer of the block moves single elements: the whole must be as near, too.
        ours, native = ((flat(runs[one]()).double() - exact.double()).norm() for one in (OURS, NATIVE))
        found["right"] = found["right"] and bool(ours <= 1.25 * native + 1e-3 * exact.double().norm())
        return found | {"path": portattn.last_plan().path, "norm_of_native": float(ours / native)}

    yield from measure.rows(name, runs, {OURS: judge}, peer=NATIVE)
