"""plan(): pure, defined for every target and toolchain, and always able to say why not."""

import builtins
import functools
import itertools
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from planted_records import record
from quirk_files import plant, registry
from support import problem

import portattn
from portattn import PathUnavailable, Registry, Target
from portattn.backends.cuda import CudaBackend
from portattn.config import Settings
from portattn.launch import kernel_calls, meta_call
from portattn.planning import core_path, planner
from portattn.planning.core_path import specialisation_key
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import plan
from portattn.planning.registry import parse_target
from portattn.schema.lowering import Launch, Lowering
from portattn.schema.problem import Problem

TOOLCHAINS = ("triton==3.2.0", "triton==3.4.0", "triton==3.6.0", "triton==3.9.0", "triton-ascend==3.2.1", "none")
TARGETS = [f"{backend}:{arch}" for backend, arches in Registry.load().arches.items() for arch in arches]
BIG = {"batch": 4, "heads_q": 16, "heads_k": 4, "seq_q": 2048, "seq_k": 2048, "head_dim": 128, "dtype": "bf16"}
# What a problem of each op has to have.
PAGES = {"page_size": 64, "seqlens_k": True}
NEEDS = {
    "attention_backward": {"return_lse": False},
    "varlen_attention_backward": {"total_q": 8192, "total_k": 8192, "return_lse": False},
    "attention": {"seq_q": 2}, "varlen_attention": {"total_q": 8192, "total_k": 8192}, "decode_attention": {"seq_q": 2},
    "paged_attention": {"seq_q": 2} | PAGES, "sparse_attention": {"seq_q": 1, "tokens": 512},
    "mla_attention": {"seq_q": 2, "heads_k": 1, "head_dim": 576, "head_dim_v": 512} | PAGES,
    "block_sparse_attention": {"tokens": 16}, "block_sparse_attention_backward": {"tokens": 16, "return_lse": False},
    "append_kv": {"heads_k": 16, "seqlens_k": True, "return_lse": False},
    "write_pages": {"heads_k": 16, "page_size": 64, "batch": 1, "return_lse": False, "kv_format": "e4m3"},
    "indexer_logits": {"heads_k": 1, "return_lse": False, "kv_format": "e4m3"},
    "topk_indices": {"heads_q": 1, "heads_k": 1, "head_dim": 1, "tokens": 512, "return_lse": False},
}  # fmt: skip
PROBLEMS = [
    *(problem(**BIG | {"op": op} | NEEDS[op]) for op in CORES),
    problem(**BIG, window_left=127, softcap=True, alibi_slopes=True, sinks=True, bias=True, mask=True),
    problem(**BIG, needs_grad=True, mask=True, return_lse=False),
    problem(**BIG | {"op": "paged_attention", "total_q": 4096, "num_splits": 1, "page_layout": "hpd"} | PAGES),
    problem(**BIG, return_lse=False), problem(**BIG, causal="bottom_right", seqlens_k=True, leftpad_k=True),
    problem(**BIG | {"dtype": "fp32", "head_dim": 80, "aligned": False}),
    problem(**BIG | {"head_dim": 576, "head_dim_v": 512}), problem(**BIG, needs_grad=True),
    problem(**BIG, dropout=True, return_lse=False),
    problem(**BIG | {"op": "decode_attention", "seq_q": 1, "seq_k": 65536, "batch": 1}, seqlens_k=True),
    problem(batch=0),
]  # fmt: skip


def sm_80(toolchain: str = "triton==3.6.0") -> Target:
    return parse_target("cuda:sm_80", toolchain)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("toolchain", TOOLCHAINS)
def test_there_is_an_answer_everywhere(target: str, toolchain: str) -> None:
    where = parse_target(target, toolchain)
    for p in PROBLEMS:
        made = plan(p, where)
        assert made == plan(p, where)
        assert made.target == target
        assert made.path
        for rejected in made.rejected:
            assert rejected.reason, rejected
            assert rejected.path != made.path
        text = made.explain()
        assert str(made) == text
        assert f"{made.path} path" in text
        for quirk in made.quirks:
            assert quirk.id in text
        for rejected in made.rejected:
            assert f"not {rejected.path}: {rejected.reason}" in text


def test_planning_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    where = [parse_target(t, c) for t, c in itertools.product(TARGETS, TOOLCHAINS[:3])]
    before = [plan(p, t) for t in where for p in PROBLEMS]  # reads the registry's files and the kernels' digest, once

    def forbidden(*arguments: Any, **rest: Any) -> Any:
        raise AssertionError(f"planning did I/O: {arguments}")

    for module, name in ((builtins, "open"), (subprocess, "Popen"), (socket, "socket"), (torch, "empty")):
        monkeypatch.setattr(module, name, forbidden)
    monkeypatch.setattr("pathlib.Path.open", forbidden)
    monkeypatch.setattr("pathlib.Path.read_bytes", forbidden)
    assert [plan(p, t) for t in where for p in PROBLEMS] == before


@pytest.mark.parametrize(
    ("changes", "toolchain", "reason", "hint"),
    [
        ({"head_dim_v": 513}, "triton==3.6.0", "head_dim_v is 513, and the kernel's tiles take up to 512", "reference"),
        ({"needs_grad": True, "head_dim": 257}, "triton==3.6.0",
         "gradients are asked for: head_dim is 257, and the kernel's tiles take up to 256", "reference"),
        ({}, "none", "Triton is not installed", "pip install -e '.[triton]' in the checkout, or triton-ascend"),
    ],
)  # fmt: skip
def test_rejections_carry_value_limit_and_hint(changes: dict, toolchain: str, reason: str, hint: str) -> None:
    made = plan(problem(**BIG | changes), sm_80(toolchain))
    assert made.rejected[0].path == "triton"
    assert reason in made.rejected[0].reason
    assert hint in made.rejected[0].hint
    assert made.fell_back


def test_a_vendor_path_comes_before_the_reference() -> None:
    made = plan(problem(**BIG, needs_grad=True, return_lse=False), sm_80("none"))
    assert (made.path, made.notes[-1]) == ("sdpa", "gradients by sdpa")
    made = plan(problem(**BIG, needs_grad=True), sm_80("none"))
    assert [r.path for r in made.rejected] == ["triton", "sdpa"]
    assert "return_lse" in made.rejected[1].reason
    assert (made.path, made.notes[-1]) == ("reference", "gradients by reference")
    made = plan(problem(**BIG), sm_80("none"))
    assert not any("gradients" in note for note in made.notes)


def test_a_call_is_trained_by_kernels_where_one_computes_the_gradients() -> None:
    made = plan(problem(**BIG, needs_grad=True), sm_80())
    assert (made.path, made.rejected, made.notes[-1]) == ("triton", (), "gradients by triton")
    made = plan(problem(**BIG, needs_grad=True), parse_target("cuda:sm_90", "triton==3.6.0"))
    assert made.notes[-1].startswith("gradients by")
    made = plan(problem(**BIG, needs_grad=True, block_mask=True), sm_80())
    assert (made.path, made.rejected, made.notes[-1]) == ("triton", (), "gradients by triton")
    learned = problem(**BIG, needs_grad=True, score_mod="c0 f 1 0\nt0 f load c0 h\nout t0", grad_captured=1)
    assert plan(learned, sm_80()).notes[-1] == "gradients by triton"
    made = plan(learned, sm_80(), settings=Settings(deterministic=True))
    assert (made.path, made.notes[-1]) == ("reference", "gradients by reference")
    assert "tensors that score_mod reads are added in any order" in made.rejected[0].reason


def test_a_quirk_of_the_gradients_kernels_leads_a_training_call_elsewhere(tmp_path: Path) -> None:
    plant(tmp_path, "cuda-9001-planted", 'path = "vendor"', when='kernels = ["*_backward"]')
    known = registry(tmp_path)
    made = plan(problem(**BIG, needs_grad=True, return_lse=False), sm_80(), known)
    assert (made.path, made.rejected[0].quirk) == ("sdpa", "cuda-9001-planted")
    assert "gradients are asked for" in made.rejected[0].reason
    assert plan(problem(**BIG), sm_80(), known).path == "triton", "the forward alone is none of its"


def test_on_a_cpu_sdpa_and_the_reference_are_no_fall_back() -> None:
    """The reference serves all that SDPA does: passing SDPA over is a note."""
    made = plan(problem(), parse_target("cpu:generic"))
    assert (made.path, made.rejected, made.fell_back) == ("sdpa", (), False)
    made = plan(problem(softcap=True), parse_target("cpu:generic"))
    assert (made.path, made.rejected, made.fell_back) == ("reference", (), False)
    assert [note for note in made.notes if note.startswith("not sdpa: it does not have softcap")]


def test_a_refused_arch_is_planned_with_its_reason() -> None:
    made = plan(problem(), parse_target("ascend:ascend310p", "triton-ascend==3.2.1"))
    assert made.path != "triton"
    assert "ascend310p" in made.rejected[0].reason
    assert made.rejected[0].hint == "", "nothing helps"


def test_a_negative_record_leads_to_the_next_path() -> None:
    p = problem(**BIG, return_lse=False)
    first = plan(p, sm_80())
    assert first.path == "triton"
    assert plan(p, sm_80(), records={first.key: record(first.key, passed=True)}).path == "triton"
    why = {"reason": "RuntimeError at ttgir: boom", "incident": "20261121-x-1"}
    failed = {first.key: record(first.key, **why)}
    second = plan(p, sm_80(), records=failed)
    assert (second.path, second.rejected[0].incident) == ("sdpa", "20261121-x-1")
    assert "RuntimeError at ttgir: boom" in second.rejected[0].reason
    assert "2026-11-21" in second.rejected[0].reason
    assert "20261121-x-1" in second.rejected[0].hint
    with pytest.raises(PathUnavailable, match="20261121-x-1"):
        plan(p, sm_80(), records=failed, settings=Settings(backend="triton"))


def test_the_grid_turns_persistent_over_the_launch_limit() -> None:
    """Ascend launches up to 65,535 programs."""
    target = parse_target("ascend:ascend910b2", "triton-ascend==3.2.1")
    kernel = CORES["attention"]
    for batch in (1, 4096):
        p = problem(**BIG | {"batch": batch, "head_dim": 64})
        made = plan(p, target)
        choice = made if made.lowering else made.rejected[0].choice
        over = kernel.tiles(p, choice.launch) > target.arch.max_programs
        assert over == (batch == 4096)
        if over:
            assert choice.lowering.grid == "persistent"
    with_limit = msgspec.structs.replace(sm_80(), arch=msgspec.structs.replace(sm_80().arch, max_programs=100))
    made = plan(problem(**BIG), with_limit)
    assert made.lowering.grid == "persistent"
    assert any("100 programs" in note for note in made.notes)
    launches, _, _ = kernel_calls(made, meta_call(made.problem), with_limit.arch.cores)
    assert launches[0].grid[0] <= with_limit.arch.cores


@pytest.mark.parametrize(("fewer", "grid"), [(0, "tiles"), (1, "persistent")])
def test_as_many_programs_as_the_chip_launches_are_not_too_many(fewer: int, grid: str) -> None:
    p = problem(**BIG)
    tiles = CORES["attention"].tiles(p, plan(p, sm_80()).launch)
    where = msgspec.structs.replace(sm_80(), arch=msgspec.structs.replace(sm_80().arch, max_programs=tiles - fewer))
    assert plan(p, where).lowering.grid == grid


def test_descriptors_only_when_aligned() -> None:
    """No tuning entry leads to descriptors for rows that they cannot read."""
    seen = set()
    for target in Registry.load().targets("triton==3.6.0"):
        for causal, head_dim, aligned in itertools.product(("none", "bottom_right"), (64, 128), (True, False)):
            made = plan(problem(**BIG | {"head_dim": head_dim, "causal": causal, "aligned": aligned}), target)
            if made.lowering is None:
                continue
            seen.add((made.lowering.load, aligned))
            assert aligned or made.lowering.load != "descriptor", target
    assert ("pointer", False) in seen


@pytest.mark.parametrize("backend", ["triton", "sdpa", "vendor", "reference"])
def test_a_named_path_is_taken(backend: str) -> None:
    made = plan(problem(**BIG, return_lse=False), sm_80(), settings=Settings(backend=backend))
    assert (made.path, made.requested) == ({"vendor": "sdpa"}.get(backend, backend), backend)
    assert not made.fell_back
    assert made.rejected == ()


@pytest.mark.parametrize(
    ("backend", "changes", "part"),
    [
        ("triton", {"head_dim_v": 576}, "head_dim_v is 576"), ("sdpa", {"return_lse": True}, "return_lse"),
        ("vendor", {"seqlens_k": True}, "seqlens_k"), ("interpreter", {}, "no such path"),
    ],
)  # fmt: skip
def test_a_named_path_that_cannot_run_is_an_error(backend: str, changes: dict, part: str) -> None:
    with pytest.raises(PathUnavailable) as error:
        plan(problem(**BIG | {"return_lse": False} | changes), sm_80(), settings=Settings(backend=backend))
    assert f"backend='{backend}'" in str(error.value)
    assert part in str(error.value)
    assert error.value.rejected


@pytest.mark.parametrize("backend", ["flash", "npu_fusion_attention"])
def test_an_unknown_path_is_an_error_that_lists_the_known(backend: str) -> None:
    with pytest.raises(portattn.ArgumentError, match=f"backend is '{backend}'.*sdpa"):
        plan(problem(), sm_80(), settings=Settings(backend=backend))


def test_the_key_tells_specialisations_apart() -> None:
    base = problem(**BIG)
    keys = {plan(base, sm_80()).key}
    for changes in ({"causal": "top_left"}, {"dtype": "fp16"}, {"seqlens_k": True}, {"head_dim": 64},
                    {"return_lse": False}, {"aligned": False}, {"large": True}, {"negative_scale": True}):  # fmt: skip
        keys.add(plan(problem(**BIG | changes), sm_80()).key)
    keys.add(plan(base, sm_80("triton==3.4.0")).key)
    keys.add(plan(base, parse_target("cuda:sm_86", "triton==3.6.0")).key)
    assert len(keys) == 11
    assert plan(problem(**BIG | {"batch": 5}), sm_80()).key in keys  # sizes are run-time arguments


def test_the_key_tells_each_part_apart_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan changes several parts at once, one of them could be missing from the key."""
    kernel, target = CORES["paged_attention"], sm_80()
    p = problem(**BIG | {"op": "paged_attention"} | NEEDS["paged_attention"])
    made = plan(p, target)
    given: dict[str, Any] = {"kernel": kernel, "problem": p, "target": target}
    given |= {"lowering": made.lowering, "launch": made.launch, "env": {}}
    replace = msgspec.structs.replace
    for one in (CORES["decode_attention"], CORES["paged_attention"]):
        monkeypatch.setattr(type(one), "constexprs", lambda *_: {})
    parts = [
        {"kernel": CORES["decode_attention"]}, {"problem": replace(p, aligned=False)},
        {"problem": replace(p, large=True)}, {"problem": replace(p, dtype="fp16")}, {"problem": replace(p, total_q=7)},
        {"problem": replace(p, alibi_slopes=True)}, {"target": parse_target("cuda:sm_86", "triton==3.6.0")},
        {"target": sm_80("triton==3.4.0")},
        {"target": replace(target, toolchain=replace(target.toolchain, components=(("ptxas", "13.9"),)))},
        {"target": replace(target, toolchain=replace(target.toolchain, distribution="triton-ascend"))},
        {"launch": made.launch.changed({"num_warps": 2 * made.launch.num_warps})},
        {"launch": made.launch.changed({"num_stages": made.launch.num_stages + 1})},
        {"launch": made.launch.changed({"splits": 2})}, {"launch": made.launch.changed({"maxnreg": 128})},
        {"env": {"A": "1"}}, {"adapter": "digest"},
    ]  # fmt: skip
    keys = {specialisation_key(**given | part) for part in ({}, *parts)}
    assert len(keys) == 1 + len(parts)
    monkeypatch.setattr(core_path, "kernel_source_digest", lambda: "another")
    assert specialisation_key(**given) not in keys


def test_a_variants_key_tells_each_part_apart_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant's name, its schedule, the types, the chip, the compiler and the source, each with the others kept."""
    one, other = CudaBackend.variants[:2]
    target, p = parse_target("cuda:sm_90", "triton==3.6.0"), problem(**BIG)
    replace = msgspec.structs.replace
    monkeypatch.setattr(planner, "source_digest", lambda variant: "source")
    parts = [
        (other, p, {}, target), (one, p, {"tile": 64}, target), (one, replace(p, dtype="fp16"), {}, target),
        (one, replace(p, sinks=True), {}, target),
        (one, p, {}, replace(parse_target("cuda:sm_100", "triton==3.6.0"), toolchain=target.toolchain)),
        (one, p, {}, replace(target, toolchain=replace(target.toolchain, components=(("ptxas", "13.9"),)))),
    ]  # fmt: skip
    keys = {planner.variant_key(*part) for part in [(one, p, {}, target), *parts]}
    assert len(keys) == 1 + len(parts)
    monkeypatch.setattr(planner, "source_digest", lambda variant: "another")
    assert planner.variant_key(one, p, {}, target) not in keys


@pytest.mark.parametrize("op", CORES)
def test_the_key_holds_every_constexpr_of_the_launch(op: str) -> None:
    p = problem(**BIG | {"op": op} | NEEDS[op])
    made = plan(p, sm_80())
    launches, _, _ = kernel_calls(made, meta_call(p), 132)
    in_key = CORES[op].constexprs(p, made.lowering, made.launch)
    # MagicPIG's numbers are a call's, not a problem's; how row numbers are read follows from a call's lengths.
    numbers = {"PIG_BITS": 0, "PIG_TABLES": 0} if op == "sparse_attention" else {}
    numbers |= {"NUMBERS": "pointer"} if op in ("attention_backward", "varlen_attention_backward") else {}
    main = next(launch for launch in launches if launch.function == CORES[op].function)
    assert main.constexprs == in_key | numbers


def test_the_number_of_queries_is_a_run_time_argument_of_decode() -> None:
    """Planned alike, more queries need no other code: they are rows of the same tile."""
    one, *more = (plan(problem(**BIG | {"op": "decode_attention", "seq_q": n}), sm_80()) for n in (1, 2, 4, 8))
    for made in more:
        assert (made.key == one.key) is (made.specialised == one.specialised)


def test_splits_fill_the_chip_only_where_it_is_empty() -> None:
    def splits(**changes: int) -> int:
        return plan(problem(**BIG | {"op": "decode_attention", "seq_q": 1} | changes), sm_80()).launch.splits

    assert splits(batch=1, seq_k=65536) > 1
    assert splits(batch=64, seq_k=65536) == 1
    assert splits(batch=1, seq_k=64) == 1
    assert splits(batch=0) == 1


def test_cautions_are_about_what_comes_out() -> None:
    """Masked reads make one quirk hold, and a caution too; what the quirk sets ends both."""
    target = parse_target("ascend:ascend910b2", "triton-ascend==3.2.0")
    call = problem(op="decode_attention", seq_q=3, seq_k=512, dtype="bf16", bias=True, mask=True)
    made = plan(call, target)
    assert made.lowering.reads == "inside"
    assert "ascend-0109-adapter-dies" not in {q.id for q in made.quirks}
    made = plan(call, target, settings=Settings(quirks="-ascend-0108-reads-before-mask"))
    assert made.lowering.reads == "masked"
    assert "ascend-0109-adapter-dies" in {q.id for q in made.quirks}


def test_plan_of_a_problem_takes_a_target() -> None:
    assert portattn.plan(problem(**BIG), sm_80()).path == "triton"
    assert portattn.plan(problem(**BIG), target=sm_80()).path == "triton"
    assert "triton path" in portattn.explain(problem(**BIG), sm_80())
    named = portattn.plan(problem(**BIG), "a100", toolchain="triton==3.6.0")
    assert named == portattn.plan(problem(**BIG), portattn.target("cuda:sm_80", "triton==3.6.0"))
    for bad in ((), (sm_80(), None, 1)):
        with pytest.raises(portattn.ArgumentError, match=r"plan: arguments is .* must be a target and a toolchain"):
            portattn.plan(problem(), *bad)
    for given, twice in ((("a100", "triton==3.6.0"), "target"), (("a100", None), "toolchain")):
        with pytest.raises(portattn.ArgumentError, match=rf"explain: {twice} is 'x', but must be given once"):
            portattn.explain(problem(), *given, **{twice: "x"})
    with pytest.raises(portattn.ArgumentError) as error:
        portattn.explain(problem(), sm_80(), sm_80(), causal=True)
    assert (error.value.argument, error.value.value) == ("arguments", (str(sm_80()), str(sm_80()), "causal"))
    assert len(str(error.value)) < 300, "a Target has a page of fields"
    for op in ("flash", ["attention"]):
        with pytest.raises(portattn.ArgumentError, match="op is"):
            portattn.plan(op)


@pytest.mark.parametrize("given", ["h100", "cuda:sm_90", portattn.target("h100", "triton==3.6.0")], ids=str)
def test_a_call_is_planned_for_another_target(given: str | Target) -> None:
    q = torch.zeros(2, 8, 128, 64, dtype=torch.float16)
    arguments: dict[str, Any] = {"causal": True, "target": given}
    if isinstance(given, str):
        arguments["toolchain"] = "triton==3.6.0"
    made = portattn.plan("attention", q, q, q, **arguments)
    asked = portattn.plan("attention", q, q, q, causal=True).problem
    assert made == portattn.plan(asked, portattn.target("cuda:sm_90", "triton==3.6.0"))
    assert portattn.explain("attention", q, q, q, **arguments) == made.explain()
    with pytest.raises(portattn.UnknownArgument, match="target"):
        portattn.attention(q, q, q, target=given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target": "cuda:sm_99"}, "target is 'cuda:sm_99', but cuda knows sm_80, .*near are"),
        ({"target": "hopper9"}, "target is 'hopper9', but must be BACKEND:ARCH.*hopper"),
        ({"target": None}, "target is None, but must be a target's name"),
        ({"target": torch.zeros(4000)}, "target is 'Tensor', but must be a target's name"),
        ({"target": "h100", "toolchain": 3}, "toolchain is 3, but must be a text"),
        ({"target": "h100", "toolchain": "triton="}, "toolchain is 'triton=', but "),
        ({"target": sm_80(), "toolchain": "triton==3.6.0"}, "toolchain is .*cuda:sm_80 with triton==.* has its own"),
        ({"toolchain": "triton==3.6.0"}, "target is None, but must be a target's name"),
    ],
    ids=str,
)
@pytest.mark.parametrize("ask", [portattn.plan, portattn.explain])
def test_a_wrong_target_is_named_shortly(ask: Callable[..., object], given: dict[str, Any], said: str) -> None:
    """A Target has a page of fields, of which an error shows its name; a text that names none gets the nearest."""
    q = torch.zeros(1, 2, 4, 16)
    for call in (functools.partial(ask, "attention", q, q, q), functools.partial(ask, problem())):
        if list(given) == ["toolchain"] and call.args[0] != "attention":
            said = "arguments is "
        with pytest.raises(portattn.ArgumentError, match=f"{ask.__name__}: {said}") as error:
            call(**given)
        assert len(str(error.value)) < 500


def test_keys_that_do_not_fit_one_tile_have_a_loop() -> None:
    """Whatever a tuning entry asks for; packed keys and those of a cache are not known to fit."""
    kernel, launch = CORES["attention"], Launch(block_m=16, block_n=64)
    single = Lowering(pipeline="single")
    few = Problem(batch=2, heads_q=8, heads_k=8, seq_q=64, seq_k=64, head_dim=64, dtype="fp16")
    assert kernel.limits(few, single, launch) == ()
    more = msgspec.structs.replace(few, seq_k=65)
    assert kernel.limits(more, single, launch) == (("pipeline", "plain", "keys are not known to fit one tile of 64"),)
    assert kernel.limits(more, Lowering(), launch) == ()
    packed = Problem(
        op="varlen_attention", batch=2, heads_q=8, heads_k=8, seq_q=9, seq_k=9, total_q=18, total_k=18, head_dim=64,
        dtype="fp16",
    )  # fmt: skip
    assert [name for name, _, _ in CORES["varlen_attention"].limits(packed, single, launch)] == ["pipeline"]
    decode = msgspec.structs.replace(few, op="decode_attention", seq_q=1)
    assert [name for name, _, _ in CORES["decode_attention"].limits(decode, single, launch)] == ["pipeline"]


def test_a_release_that_does_not_compile_for_the_chip_says_so() -> None:
    problem = Problem(batch=1, heads_q=2, heads_k=2, seq_q=64, seq_k=64, head_dim=64)
    known = Registry.load()
    bound = [(b, a) for b, arches in known.arches.items() for a in arches.values() if a.toolchain]
    assert bound
    for backend, arch in bound:
        for compiler, text in arch.toolchain.items():
            made = plan(problem, known.target(f"{backend}:{arch.name}", f"{compiler}==3.2.0"), known)
            (refused,) = [no for no in made.rejected if no.path == "triton"]
            assert refused.reason == f"{compiler}==3.2.0 compiles nothing for {arch.name}"
            assert refused.hint == f"needs {compiler} {text}"
            assert plan(problem, known.target(f"{backend}:{arch.name}", f"{compiler}==3.9.0"), known).path == "triton"
            made = plan(problem, known.target(f"{backend}:{arch.name}", "flagtree==0.3.0"), known)
            assert not [no for no in made.rejected if "compiles nothing" in no.reason]
