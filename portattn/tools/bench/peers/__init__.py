"""Peers: other libraries' attention, if this machine has it. `PEERS` has a row for each; none is a dependency.

torch's own is below: scaled_dot_product_attention as it chooses and each of its fused kernels, FlexAttention,
varlen_attn (FlashAttention-2, packed and paged), and tokens gathered by indexing. So are registered op libraries:
FlashMLA, and `fa3`, upstream's torch.ops.flash_attn_3 or vllm's torch.ops._vllm_fa3_C (lengths and pages only). They
align causal masks bottom-right and take (B, S, H, D) or packed (T, H, D), any strides but along D, to head_dim 256."""

import contextlib
import functools
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

from portattn.errors import ArgumentError
from portattn.tools.bench.cases import Case
from portattn.tools.bench.contenders import Build, Contender, as_is, ours, transpose_heads, with_gradients
from portattn.tools.bench.peers import packages
from portattn.tools.bench.peers.packages import has_op, missing, row_starts, used_keys, window_of, with_sequences
from portattn.tools.bench.tensors import Tensors

CHOOSES, MATH = "sdpa", "sdpa-math"
KERNELS = {
    "sdpa-cudnn": "CUDNN_ATTENTION", "sdpa-flash": "FLASH_ATTENTION", "sdpa-efficient": "EFFICIENT_ATTENTION",
    MATH: "MATH",
}  # fmt: skip
MATH_BYTES = 1 << 31  # of float32 scores, above which the unfused form is left out
PAGE = 256  # tokens, of which FlashAttention-2's pages have a multiple
# Arguments of vllm's op, which has no defaults: the values that mean "not given".
_NEUTRAL: dict[str, Any] = {
    "window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "is_rotary_interleaved": True, "num_splits": 0,
    "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip
_ABSENT = (
    "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "seqused_k",
    "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata", "pack_gqa", "s_aux",
    "cp_tot_seqused_k",
)  # fmt: skip
LATENT = (576, 512, 64)  # FlashMLA's row width, width of the values and page


@dataclass(frozen=True, slots=True)
class Peer:
    """A library's adapter: `contenders` returns its ways to compute a case by name, `library/way`."""

    contenders: Callable[[Case, Tensors], dict[str, Build]]
    absent: Callable[[], str] = str  # returns why the library cannot be used in this process, or ""
    differentiable: bool = False  # autograd records its calls: the peer takes part in backward cases
    quantised: bool = False  # it reads quantised caches: the peer takes part in such cases
    distribution: str = ""  # the distribution whose version a result records
    slow: str = ""  # why the peer takes long before anything is timed


def _unquantised(case: Case, t: Tensors) -> dict[str, Build]:
    return {"unquantised": lambda: ours(case.unquantised(), t.unquantised())} if case.quantised else {}


def sdpa(case: Case, t: Tensors) -> dict[str, Build]:
    """Return SDPA's contenders; masks for lengths, windows and chosen tokens are made before the timed call."""
    if case.op not in ("attention", "decode_attention", "sparse_attention") or case.page_size or case.magicpig:
        return {}
    builds: dict[str, Build] = {CHOOSES: functools.partial(_sdpa, "", case, t)}
    for name, kernel in KERNELS.items():
        if name == MATH and case.backward:  # it would keep the whole scores
            continue
        if name != MATH or 4 * case.batch * case.heads_q * case.seq_q * case.seq_k <= MATH_BYTES:
            builds[name] = functools.partial(_sdpa, kernel, case, t)
    return builds


def _sdpa(kernel: str, case: Case, t: Tensors) -> Contender:
    """Return SDPA by `kernel`, a member of torch.nn.attention.SDPBackend; "" for torch's own choice."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    is_causal = case.causal != "none" and not case.windowed and t.seqlens_k is None and case.seq_q == case.seq_k
    mask = None if is_causal else _sdpa_mask(case, t, kernel)
    grouped = case.group > 1

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            t.q, t.k, t.v, attn_mask=mask, dropout_p=case.dropout, is_causal=is_causal, scale=case.scale,
            enable_gqa=grouped,
        )  # fmt: skip

    if not kernel:
        return Contender(run)
    return Contender(run, around=lambda: sdpa_kernel(getattr(SDPBackend, kernel)))


def _sdpa_mask(case: Case, t: Tensors, kernel: str) -> torch.Tensor | None:
    """Return the attention mask, which broadcasts to (B, Hq, Sq, Sk), or None if all keys are attended."""
    if t.indices is not None:
        mask = torch.zeros(case.batch, case.heads_q, case.seq_k, dtype=torch.bool, device=t.q.device)
        return mask.scatter_(2, t.indices.long(), True)[:, :, None]
    causal = case.causal != "none" and case.seq_q > 1
    if kernel == "FLASH_ATTENTION" and causal and not case.windowed and t.seqlens_k is None:
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(case.seq_q, case.seq_k)  # the one mask that its flash kernel knows
    if not (causal or case.windowed or t.seqlens_k is not None):
        return None
    keys = torch.arange(case.seq_k, device=t.q.device)
    allowed = torch.ones(1, 1, 1, case.seq_k, dtype=torch.bool, device=t.q.device)
    if causal or case.windowed:
        # Where lengths are given, queries and keys of a sequence begin at 0 both: its corner is the same.
        shift = 0 if t.seqlens_q is not None or case.causal == "top_left" else case.seq_k - case.seq_q
        rows = torch.arange(case.seq_q, device=t.q.device)[:, None] + shift
        left, right = case.window
        right = 0 if causal else right
        if right is not None:
            allowed = allowed & (keys <= rows + right)
        if left is not None:
            allowed = allowed & (keys >= rows - left)
    if t.seqlens_k is not None:
        allowed = allowed & (keys < t.seqlens_k[:, None, None, None])
    return allowed


Keep = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v as it takes them


def flex(case: Case, t: Tensors) -> dict[str, Build]:
    """Return its flex. It sees packed sequences as one, with a mask between them, only in a backward."""
    if case.dropout:  # it has none
        return {}
    if case.op == "attention":
        return {"flex": functools.partial(_flex, case, t)}
    if case.op == "varlen_attention" and case.backward and case.lengths_q == case.lengths_k:
        return {"flex": functools.partial(_flex_packed, case, t)}
    return {}


def _flex(case: Case, t: Tensors) -> Contender:
    from torch.nn.attention.flex_attention import create_block_mask

    lengths = t.seqlens_k
    # Where lengths are given, queries and keys of a sequence begin at 0 both.
    shift = 0 if lengths is not None or case.causal == "top_left" else case.seq_k - case.seq_q
    near = _flex_mask(case, shift)

    def keep(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = near(b, h, row, key)
        return kept if lengths is None else kept & (key < lengths[b])

    torch._dynamo.reset()  # it gives up compiling after some shapes, and would run eagerly then
    blocks = None
    if case.causal != "none" or case.windowed or lengths is not None:
        batch = None if lengths is None else case.batch
        blocks = create_block_mask(keep, batch, None, case.seq_q, case.seq_k, device=str(t.q.device))
    return _flex_compiled(case, (t.q, t.k, t.v), blocks)


def _flex_packed(case: Case, t: Tensors) -> Contender:
    """Return FlexAttention over one sequence of all tokens, (1, H, T, D); equal rows and keys keep distances."""
    from torch.nn.attention.flex_attention import create_block_mask

    total = sum(case.queries)
    lengths = torch.tensor(case.queries, device=t.q.device)
    document = torch.repeat_interleave(torch.arange(case.batch, device=t.q.device), lengths)
    near = _flex_mask(case, 0)

    def keep(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return near(b, h, row, key) & (document[row] == document[key])

    torch._dynamo.reset()
    blocks = create_block_mask(keep, None, None, total, total, device=str(t.q.device))
    q, k, v = (x.transpose(0, 1)[None] for x in (t.q, t.k, t.v))
    return _flex_compiled(case, (q, k, v), blocks, lambda out: out[0].transpose(0, 1))


def _flex_mask(case: Case, shift: int) -> Keep:
    left, right = case.window
    if case.causal != "none":
        right = 0

    def near(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kept = key >= 0
        if right is not None:
            kept = kept & (key <= row + shift + right)
        if left is not None:
            kept = kept & (key >= row + shift - left)
        return kept

    return near


def _flex_compiled(
    case: Case, given: Given, blocks: Any, shaped: Callable[[torch.Tensor], torch.Tensor] = as_is
) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    grouped = case.group > 1
    return Contender(
        lambda: compiled(*given, block_mask=blocks, scale=case.scale, enable_gqa=grouped), shaped,
        around=_repeatable if case.backward else contextlib.nullcontext,
    )  # fmt: skip


def _repeatable() -> AbstractContextManager[Any]:
    """Forbid a compiled backward to write over its forward's saved tensors, after which it could not run again."""
    import torch._functorch.config as functorch

    change: AbstractContextManager[Any] = functorch.patch(donated_buffer=False)
    return change


def torch_others(case: Case, t: Tensors) -> dict[str, Build]:
    if case.op == "sparse_attention" and case.magicpig is None:
        return {"torch-gather": functools.partial(_gather, case, t)}
    paged = case.op == "paged_attention" and case.page_size % PAGE == 0 and (case.packed or case.seq_q == 1)
    if case.dropout:  # it has none
        return {}
    if (case.op == "varlen_attention" or paged) and case.dtype != "fp32" and _varlen_attn():
        return {"torch-varlen": functools.partial(_varlen, case, t)}
    return {}


def _varlen_attn() -> Any:
    """Return torch.nn.attention.varlen.varlen_attn, which torch has from 2.10 on; None before."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def _varlen(case: Case, t: Tensors) -> Contender:
    function = _varlen_attn()
    known = inspect.signature(function).parameters
    q = t.q if case.packed else t.q[:, :, 0]
    cu_q = row_starts(case, t) if t.cu_seqlens_q is None else t.cu_seqlens_q
    options: dict[str, Any] = {"scale": case.scale} if case.scale is not None else {}
    left, right = window_of(case)
    window = (left, right if case.causal == "none" else 0)
    if "window_size" in known:
        options["window_size"] = window
    elif case.windowed:
        raise ValueError("this torch's varlen_attn has no window_size")
    else:
        options["is_causal"] = case.causal != "none"
    if case.group > 1 and "enable_gqa" in known:
        options["enable_gqa"] = True
    if case.page_size:
        if "block_table" not in known:
            raise ValueError("this torch's varlen_attn has no block_table")
        options |= {"seqused_k": t.seqlens_k, "block_table": t.page_table}
    given = (q, t.k, t.v, cu_q, t.cu_seqlens_k, max(case.queries), max(case.keys))
    return Contender(lambda: function(*given, **options), as_is if case.packed else lambda out: out[:, :, None])


def _gather(case: Case, t: Tensors) -> Contender:
    heads = (torch.arange(case.heads_q, device=t.q.device) // case.group)[None, :, None]
    batches = torch.arange(case.batch, device=t.q.device)[:, None, None]

    def run() -> torch.Tensor:
        assert t.indices is not None
        if t.page_table is not None:
            page = t.page_table[batches, t.indices // case.page_size]
            place = t.indices % case.page_size
            k, v = t.k[page, place, heads], t.v[page, place, heads]
        else:
            k, v = t.k[batches, heads, t.indices], t.v[batches, heads, t.indices]
        return functional.scaled_dot_product_attention(t.q, k, v, scale=case.scale)

    return Contender(run)


def has_vllm() -> bool:
    return has_op("_vllm_fa3_C", "fwd")


def neutral() -> dict[str, Any]:
    return {**dict.fromkeys(_ABSENT), **_NEUTRAL}


def fa3_absent() -> str:
    if has_vllm() or has_op("flash_attn_3", "fwd"):
        return ""
    return "no library has registered torch.ops._vllm_fa3_C or torch.ops.flash_attn_3"


def fa3(case: Case, t: Tensors) -> dict[str, Build]:
    latent = case.op == "mla_attention"
    if case.dtype == "fp32" or case.op == "sparse_attention" or (case.head_dim > packages.WIDEST and not latent):
        return {}
    found: dict[str, Build] = {}
    if has_vllm():
        found["fa3/vllm"] = functools.partial(_fa3, case, t, "_vllm_fa3_C", scheduled=False)
        if case.reads_cache:
            found["fa3/vllm, schedule given"] = functools.partial(_fa3, case, t, "_vllm_fa3_C", scheduled=True)
    if has_op("flash_attn_3", "fwd"):
        found["fa3/upstream"] = functools.partial(_fa3, case, t, "flash_attn_3", scheduled=False)
    return found


def _fa3(case: Case, t: Tensors, library: str, scheduled: bool) -> Contender:
    given, shaped = _fa3_call(case, t)
    op = getattr(torch.ops, library).fwd
    if library == "flash_attn_3":
        if case.op == "attention":
            given["num_splits"] = 1
            if not case.lengths_k:
                del given["seqused_k"]
    else:
        given = neutral() | given
        if scheduled:
            given["scheduler_metadata"] = schedule(given, case.batch, case.page_size or None)
    return Contender(lambda: op(**given)[0], shaped)


def _fa3_call(case: Case, t: Tensors) -> tuple[dict[str, Any], Any]:
    """Return the arguments of `fwd` without those left at their defaults, and the map of its result to (B, H, S, D)."""
    left, right = window_of(case)
    given: dict[str, Any] = {
        "softmax_scale": case.head_dim**-0.5 if case.scale is None else case.scale,
        # For one row it says nothing, and picks better tiles over pages of width 128, as vllm does.
        "is_causal": case.causal != "none" or case.seq_q == 1,
        "window_size_left": left,
        "window_size_right": right,
    }
    if case.op == "varlen_attention":
        given |= {"q": t.q, "k": t.k, "v": t.v, "cu_seqlens_q": t.cu_seqlens_q, "cu_seqlens_k": t.cu_seqlens_k}
        given |= {"max_seqlen_q": max(case.queries), "max_seqlen_k": max(case.keys)}
        return given, as_is
    given["seqused_k"] = used_keys(case, t)
    if not case.page_size:
        given |= {"q": transpose_heads(t.q), "k": transpose_heads(t.k), "v": transpose_heads(t.v)}
        return given | ({} if t.seqlens_q is None else {"seqused_q": t.seqlens_q}), transpose_heads
    given |= {"page_table": t.page_table, "max_seqlen_k": max(case.keys)}
    rows = {"cu_seqlens_q": row_starts(case, t), "max_seqlen_q": case.seq_q}
    if case.op == "mla_attention":
        # Scores are q·k of the part with positions and q_v·v of the rest.
        if case.packed:
            raise ValueError("packed latent queries are not written for it")
        rank, q, latent = case.width_v, t.q.flatten(0, 1), t.k[:, :, None]
        given |= {"q": q[..., rank:], "q_v": q[..., :rank], "k": latent[..., rank:], "v": latent[..., :rank]}
        return given | rows, with_sequences(case)
    given |= {"k": t.k, "v": t.v}
    if case.packed:
        return given | {"q": t.q, "cu_seqlens_q": t.cu_seqlens_q, "max_seqlen_q": max(case.queries)}, as_is
    if case.seq_q == 1:
        return given | {"q": t.q[:, :, 0], **rows}, lambda out: out[:, :, None]
    return given | {"q": transpose_heads(t.q)}, transpose_heads


def schedule(given: dict[str, Any], batch: int, page_size: int | None) -> torch.Tensor:
    """Return the schedule that `fwd` computes before each call without one, for these very arguments."""
    q, k, v = given["q"], given["k"], given["v"]
    longest_q, longest_k = given["max_seqlen_q"], given["max_seqlen_k"]
    made: torch.Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        batch, q.shape[1] if longest_q is None else longest_q, k.shape[1] if longest_k is None else longest_k,
        q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], q.dtype, given["seqused_k"], given["cu_seqlens_q"],
        None,  # cu_seqlens_k
        None,  # cu_seqlens_k_new
        given["seqused_q"],
        None,  # leftpad_k
        page_size,
        0,  # max_seqlen_k_new
        given["is_causal"], given["window_size_left"], given["window_size_right"],
        False,  # softcap
        given["num_splits"],
        None,  # pack_gqa
        0,  # sm_margin
    )  # fmt: skip
    return made


def flashmla_absent() -> str:
    return "" if has_op("_flashmla_C", "dense_decode_fwd") else "no library has registered torch.ops._flashmla_C"


def flashmla(case: Case, t: Tensors) -> dict[str, Build]:
    """Return FlashMLA's dense decoding (torch.ops._flashmla_C): 16-bit latent rows of 512 + 64, pages of 64."""
    if case.op != "mla_attention" or case.packed or case.dtype == "fp32":
        return {}
    if (case.head_dim, case.width_v, case.page_size) != LATENT:
        return {}
    return {"flashmla": functools.partial(_flashmla, case, t)}


def _flashmla(case: Case, t: Tensors) -> Contender:
    op = torch.ops._flashmla_C.dense_decode_fwd
    fixed = (t.q, t.k[:, :, None], case.width_v, t.seqlens_k, t.page_table, case.scale, case.causal != "none")
    # The first call makes its schedule; later ones take it, as a model's layers do.
    _, _, made, splits = op(*fixed, None, None, None)
    return Contender(lambda: op(*fixed, made, splits, None)[0], transpose_heads)


_CUTE_COMPILES = "compiled by CuTe for each head dim and mask, which takes tens of seconds"
_FA2 = ("flash_attn",)
_FA3 = ("flash_attn_interface", "flash_attn_3.flash_attn_interface")  # a module by itself, or in a build's package
PEERS = {
    "sdpa": Peer(sdpa, differentiable=True), "torch": Peer(torch_others, differentiable=True),
    "flex": Peer(
        flex, differentiable=True, slow="compiled by torch for this case, which takes tens of seconds"
    ),
    "fa3": Peer(fa3, fa3_absent), "flashmla": Peer(flashmla, flashmla_absent),
    "flash_attn": Peer(
        functools.partial(packages.flash_attention, "flash_attn", _FA2, pages="block_table", page=256, dropout=True),
        functools.partial(packages.absent, _FA2), differentiable=True, distribution="flash-attn",
    ),
    "flash_attn_interface": Peer(
        functools.partial(packages.flash_attention, "fa3/interface", _FA3, pages="page_table"),
        functools.partial(packages.absent, _FA3), differentiable=True, distribution="flash-attn-3",
    ),
    "fa4": Peer(
        packages.fa4, functools.partial(missing, packages.CUTE), differentiable=True, distribution="flash-attn-4",
        slow=_CUTE_COMPILES,
    ),
    "cudnn-frontend": Peer(
        packages.cudnn_frontend, functools.partial(missing, packages.FRONTEND), distribution="nvidia-cudnn-frontend",
        slow=_CUTE_COMPILES,
    ),
    "flashinfer": Peer(
        packages.flashinfer, functools.partial(missing, "flashinfer"), quantised=True, distribution="flashinfer-python"
    ),
    "unquantised": Peer(_unquantised, quantised=True),
}  # fmt: skip
# Libraries that are given a quantised cache's numbers in the queries' dtype, and read so many more bytes.
UNQUANTISED = ("unquantised",)
# Contenders that are timed to be seen beside the others: never the best peer.
REFERENCES = (MATH,)


def library(name: str) -> str:
    return name.partition("/")[0]


def contenders(
    case: Case, t: Tensors, wanted: Sequence[str] = tuple(PEERS), others: Mapping[str, Peer] | None = None
) -> dict[str, Build]:
    """Return every contender of the wanted peers that are here; others: peers from files, asked for all cases."""
    chosen = [
        peer
        for peer in map(PEERS.__getitem__, wanted)
        if (peer.differentiable or not case.backward) and (peer.quantised or not case.quantised)
    ]
    given = t.leaves() if case.backward else t
    found: dict[str, Build] = {}
    for peer in (*chosen, *(others or {}).values()):
        if not peer.absent():
            found |= peer.contenders(case, given)
    return with_gradients(given, found, case.deterministic) if case.backward else found


def presence(wanted: Iterable[str], others: Mapping[str, Peer]) -> dict[str, str]:
    """Return "here" for each peer, or why it is absent. Imports the installed ones."""
    return {name: peer.absent() or "here" for name, peer in ({n: PEERS[n] for n in wanted} | dict(others)).items()}


def from_file(path: Path) -> tuple[str, Peer]:
    """Return a Python file's name and peer: its `contenders(case, t)`, and `absent()` if any. Raises ArgumentError."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ArgumentError("bench", "--peer-file", path.name, "must be a Python file")
    program: Any = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(program)
    except Exception as failure:
        raise ArgumentError("bench", "--peer-file", path.name, f"cannot be imported: {failure!r}") from failure
    if not callable(getattr(program, "contenders", None)):
        raise ArgumentError("bench", "--peer-file", path.name, "must define contenders(case, t)")
    return path.stem, Peer(program.contenders, getattr(program, "absent", str))
