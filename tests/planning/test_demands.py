"""Features are denied by default: a path runs what it declares, and a flag that is new to it rejects it by name."""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from places import ROOT
from planted_records import record

import portattn
from portattn import config
from portattn.config import Settings
from portattn.errors import ArgumentError, PathUnavailable, PortattnError
from portattn.launch import kernel_calls, meta_call
from portattn.planning.backend import Backend, Variant, VendorPath
from portattn.planning.kernel_specs import CORES
from portattn.planning.planner import TAKES, check_path, check_settings, plan, wrong_settings
from portattn.planning.planner import plan as plan_problem
from portattn.planning.registry import Registry, parse_target
from portattn.schema.lowering import Lowering
from portattn.schema.problem import Problem
from portattn.schema.problem_limits import OPS
from portattn.schema.target import Target

PLAIN: dict[str, dict[str, Any]] = {
    "attention": {}, "varlen_attention": {"total_q": 40, "total_k": 40}, "attention_backward": {},
    "varlen_attention_backward": {"total_q": 40, "total_k": 40}, "decode_attention": {"seq_q": 1},
    "paged_attention": {"seq_q": 1, "page_size": 64},
    "mla_attention": {
        "seq_q": 1, "page_size": 64, "heads_k": 1, "head_dim": 576, "head_dim_v": 512, "pages_in_line": True,
    },
    "sparse_attention": {"seq_q": 1, "tokens": 16}, "block_sparse_attention": {"tokens": 2},
    "block_sparse_attention_backward": {"tokens": 2}, "append_kv": {}, "write_pages": {"batch": 1, "page_size": 64},
    "indexer_logits": {"heads_q": 1, "heads_k": 1},
    "topk_indices": {"heads_q": 1, "heads_k": 1, "head_dim": 1, "tokens": 16},
}  # fmt: skip
# One value other than its default for every field that a Problem has beyond sizes, types and places in memory.
VALUES: dict[str, tuple[Any, ...]] = {
    "causal": ("bottom_right", "top_left"), "window_left": (7,), "window_right": (7,), "total_q": (40,),
    "page_size": (64,), "num_splits": (2,), "head_dim_v": (32,), "kv_format": ("e4m3",),
    "rotary": ("neox", "interleaved"), "score_mod": ("out score",), "mask_mod": ("out True",),
}  # fmt: skip
NO_DEMANDS = (
    "op", "batch", "heads_q", "heads_k", "seq_q", "seq_k", "head_dim", "dtype", "layout", "page_layout",
    "pages_in_line", "bias_by_key", "mask_by_key", "aligned", "word_aligned", "large", "total_k", "tokens",
    "kv_scales", "rotary_dim", "function_note",
)  # fmt: skip
TARGETS = {
    "cuda": ("cuda:sm_90", "triton==3.6.0"), "rocm": ("rocm:gfx942", "triton==3.6.0"),
    "ascend": ("ascend:ascend910b2", "triton-ascend==3.2.0"), "cpu": ("cpu:generic", "triton==3.6.0"),
}  # fmt: skip


class Novel(Problem, frozen=True, kw_only=True):
    """A Problem of the next release: it has one flag more, of which no path has heard."""

    novel: bool = False


def problem(op: str, kind: type[Problem] = Problem, **fields: Any) -> Problem:
    sizes = {"batch": 2, "heads_q": 8, "heads_k": 8, "seq_q": 128, "seq_k": 128, "head_dim": 64}
    if "rotary" in fields:
        sizes["rotary_dim"] = 64
    return kind(**{"op": op, **sizes, **PLAIN[op], **fields})


def single_flags() -> Iterator[dict[str, Any]]:
    for field in msgspec.structs.fields(Problem):
        if field.name not in NO_DEMANDS:
            for value in VALUES.get(field.name, (True,)):
                yield {field.name: value}


def paths(backend: Backend) -> Iterator[tuple[str, Variant | VendorPath | None]]:
    yield from ((path.name, path) for path in (*backend.variants, *backend.vendor))
    if backend.core_path:
        yield backend.core_path, None
    yield "reference", None


def declared(name: str, path: Variant | VendorPath | None, op: str) -> frozenset[str]:
    if path is not None:
        return path.takes if op in path.ops else frozenset()
    return TAKES[op] if name == "reference" else CORES[op].takes


CASES = [(backend, op) for backend in TARGETS for op in OPS]


def target_of(name: str) -> Target:
    return parse_target(*TARGETS[name])


def test_no_backend_and_no_field_is_left_out() -> None:
    assert set(TARGETS) == set(Registry.load().backends)
    names = {name for flags in single_flags() for name in flags}
    assert names | set(NO_DEMANDS) == {field.name for field in msgspec.structs.fields(Problem)}


@pytest.mark.parametrize(("backend", "op"), CASES)
def test_a_path_runs_nothing_that_it_does_not_declare(backend: str, op: str) -> None:
    target, ran = target_of(backend), 0
    for flags in single_flags():
        try:
            asked = problem(op, **flags)
        except ValueError:  # the op has no such flag
            continue
        for name, path in paths(Registry.load().backends[backend]):
            with contextlib.suppress(PathUnavailable):
                made = plan(asked, target, settings=Settings(backend=name))
                ran += 1
                assert made.path == name
            if not set(asked.demands()) <= declared(name, path, op):
                with pytest.raises(PathUnavailable):
                    plan(asked, target, settings=Settings(backend=name))
    assert ran or not TAKES[op], "the reference takes them"


@pytest.mark.parametrize(("backend", "op"), CASES)
def test_a_flag_made_up_on_the_spot_rejects_every_path(backend: str, op: str) -> None:
    target = target_of(backend)
    asked = problem(op, Novel, novel=True)
    assert "novel" in asked.demands()
    for name, _ in paths(Registry.load().backends[backend]):
        with pytest.raises(PathUnavailable) as no:
            plan(asked, target, settings=Settings(backend=name))
        assert no.value.rejected[-1].path == name
    with pytest.raises(PathUnavailable, match="reference: does not declare that it takes novel"):
        plan(asked, target)
    assert plan(problem(op, Novel), target).path == plan(problem(op), target).path, "it is the flag, not the type"


def test_the_rejection_names_the_flag_where_nothing_else_is_wrong() -> None:
    for name in ("gluon_forward", "triton", "sdpa", "reference"):
        with pytest.raises(PathUnavailable) as no:
            plan(problem("attention", Novel, novel=True), target_of("cuda"), settings=Settings(backend=name))
        assert re.search("takes (no )?novel", no.value.rejected[-1].reason), name


class Silent(VendorPath):
    """A library whose author declared nothing, and rejects nothing."""

    name = "silent"

    def rejects(self, problem: Problem, target: Target) -> None:
        return None

    def run(self, call: Any) -> Any:
        raise AssertionError("it must not run")


def test_a_path_that_declares_nothing_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry.load().backends["cuda"], "vendor", (Silent(),))
    for op in OPS:
        with pytest.raises(PathUnavailable, match=f"silent: is declared for no op, and this is {op}"):
            plan(problem(op), target_of("cuda"), settings=Settings(backend="silent"))
    monkeypatch.setattr(Silent, "ops", ("attention",))
    assert plan(problem("attention"), target_of("cuda"), settings=Settings(backend="silent")).path == "silent"
    for flags in single_flags():
        try:
            asked = problem("attention", **flags)
        except ValueError:
            continue
        with pytest.raises(PathUnavailable, match=f"takes {asked.demands()[0]}"):
            plan(asked, target_of("cuda"), settings=Settings(backend="silent"))


def test_demands_are_what_is_asked_for_beyond_plain_attention() -> None:
    for op in OPS:
        assert problem(op).demands() in ((), ("head_dim_v", "gqa")), op
    asked = problem("attention", causal="top_left", window_left=3, window_right=3, heads_k=2, sinks=True)
    assert asked.demands() == ("causal_top_left", "window", "sinks", "gqa")
    assert problem("sparse_attention", page_size=16).demands() == ("paged",)
    assert problem("paged_attention", total_q=9).demands() == ("packed",)


def test_the_references_refusal_does_not_advise_the_reference() -> None:
    with pytest.raises(PathUnavailable) as caught:
        plan(problem("varlen_attention", softcap=True, mask=True), parse_target("cpu:generic", "none"))
    *_, last = caught.value.rejected
    assert (last.path, last.reason, last.hint) == ("reference", "does not declare that it takes mask", "")


# Settings that are wrong before there is a call: what adapters ask at an engine's start.
WRONG = {
    "PORTATTN_BACKEND": ("tritton", "a: PORTATTN_BACKEND is 'tritton', but must be one of auto, vendor, reference"),
    "PORTATTN_FALLBACK": ("maybe", "environment variable PORTATTN_FALLBACK is 'maybe', but must be one of warn"),
    "PORTATTN_VALIDATE": ("yes", "environment variable PORTATTN_VALIDATE is 'yes', but must be one of auto"),
    "PORTATTN_QUIRKS": ("-no-such-quirk", "no-such-quirk"),
}


@pytest.mark.parametrize("variable", WRONG)
def test_of_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert wrong_settings("a") == ""
    value, text = WRONG[variable]
    monkeypatch.setenv(variable, value)
    config.environment_settings.cache_clear()
    assert text in wrong_settings("a")
    with pytest.raises(PortattnError):
        check_settings("a", parse_target("cuda:sm_90"))


def test_an_unknown_variable_is_no_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_warned", set())
    monkeypatch.setenv("PORTATTN_SERVICE_HOST", "10.0.0.1")
    config.environment_settings.cache_clear()
    with pytest.warns(UserWarning, match="PORTATTN_SERVICE_HOST"):
        assert wrong_settings("a") == ""
    check_settings("a", parse_target("cuda:sm_90"))


def test_names_of_some_device_and_of_the_device_that_is_known() -> None:
    for path in ("auto", "vendor", "reference", "triton", "interpreter", "sdpa", "gluon_forward"):
        check_path("register", "backend", path)
    check_path("register", "backend", "gluon_forward", parse_target("cuda:sm_90"))
    with pytest.raises(ArgumentError, match=r"^register: backend is 'gluon_forward', but must be one of auto, vendor"):
        check_path("register", "backend", "gluon_forward", parse_target("rocm:gfx942"))


# What plans show of a lowering: the choices that the kernel's code of that problem reads, and no others.
H100 = parse_target("cuda:sm_90", "triton==3.6.0")
SIZES: dict[str, Any] = {
    "batch": 8, "heads_q": 32, "heads_k": 8, "seq_q": 1, "seq_k": 4096, "head_dim": 128, "dtype": "bf16",
}  # fmt: skip
UNREAD_BY_WORDS = {"k_tile", "block_order", "q_operand", "dot_precision"}


def shown(op: str = "decode_attention", **fields: Any) -> tuple[portattn.Plan, set[str]]:
    plan = portattn.plan(portattn.Problem(op=op, **SIZES | fields), H100)
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("  lowering ")]
    return plan, {word.partition("=")[0] for word in line.split()[1:]}


WORDS = {"kv_format": "e4m3", "kv_scales": "token"}
FP32 = {"batch": 2, "heads_q": 8, "heads_k": 8, "seq_q": 64, "seq_k": 64, "head_dim": 64, "dtype": "fp32"}
# The operation, its fields, the choices that its plan does not show, and the values of others.
UNREAD: list[tuple[str, dict[str, Any], set[str], dict[str, str]]] = [
    ("decode_attention", WORDS, UNREAD_BY_WORDS, {"unpack": "ptx"}),
    ("paged_attention", WORDS | {"page_size": 16}, UNREAD_BY_WORDS, {"unpack": "ptx"}),
    ("decode_attention", {}, UNREAD_BY_WORDS, {"warps": "apart"}),
    ("attention", FP32, {"k_tile", "block_order", "q_operand", "select", "operands", "drops"}, {"warps": "apart"}),
    ("decode_attention", {"softcap": True}, set(), {"unpack": "bytes"}),
    ("decode_attention", WORDS | {"seq_q": 32}, set(), {"unpack": "bytes"}),
    ("decode_attention", {"kv_format": "int8", "kv_scales": "token", "aligned": False, "word_aligned": False}, set(),
     {"unpack": "bytes"}),
    ("decode_attention", {"kv_format": "int4", "kv_scales": "token", "seq_q": 32}, {"k_tile", "block_order"}, {}),
    ("decode_attention", {"kv_format": "nvfp4", "kv_scales": "head", "seq_q": 32}, {"k_tile", "block_order"}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("op", "fields", "unread", "values"), UNREAD)
def test_a_plan_shows_the_choices_that_its_kernel_reads(op, fields, unread, values):
    plan, found = shown(op, **fields)
    assert plan.lowering is not None
    assert {name: getattr(plan.lowering, name) for name in values} == values
    assert set(CORES[op].choices) - found == unread


@pytest.mark.parametrize("part", ["attend_packed16.py", "paged_addressing.py", "unpack_int4.py"])
def test_words_have_no_tiles_of_keys(part: str) -> None:
    source = (ROOT / "portattn" / "kernels" / part).read_text(encoding="utf-8")
    assert not [name for name in UNREAD_BY_WORDS if name.upper() in source]


@pytest.mark.parametrize(
    ("op", "fields", "kernel"),
    [("decode_attention", {}, "decode_split"), ("paged_attention", {"page_size": 16}, "paged_split")],
)  # fmt: skip
def test_a_plan_names_the_form_that_runs(op: str, fields: dict[str, Any], kernel: str) -> None:
    """As the launch does; a plan of warps that share their products names the kernel alone."""
    for more, form in (({}, "warps_apart"), ({"softcap": True}, "")):
        plan, _ = shown(op, **fields, **more)
        assert (plan.kernel, plan.form) == (kernel, form)
        first, *_ = kernel_calls(plan, meta_call(plan.problem), H100.arch.cores)[0]
        assert first.function == (form or "decode_split")
        assert first.function in CORES[op].functions
        said = f"  kernel   {kernel}, in its form {form}" if form else f"  kernel   {kernel}"
        assert said in plan.explain().splitlines()


def test_a_kernel_that_is_not_taken_is_named_with_its_form() -> None:
    problem = portattn.Problem(op="decode_attention", **SIZES, leftpad_k=True)  # which the Hopper forward does not take
    key = plan_problem(problem, H100).key
    failed = record(key, kernel="decode_split", target=H100.name, toolchain=str(H100.toolchain))
    plan = plan_problem(problem, H100, records={key: failed})
    assert (plan.kernel, plan.form) == ("", "")
    assert "    would be kernel   decode_split, in its form warps_apart" in plan.explain().splitlines()


def test_latent_rows_have_no_other_form() -> None:
    kernel = CORES["mla_attention"]
    assert kernel.functions == ("decode_split",)
    assert kernel.form(Lowering(warps="apart")) == ""


@pytest.mark.parametrize(
    ("op", "fields", "expected"),
    [
        ("attention", {"seq_q": 4096, "softcap": True}, set()),
        ("attention", {"seq_q": 4096, "dropout": True}, {"drops"}),
        ("attention_backward", {"seq_q": 4096, "dropout": True}, {"drops"}),
        ("attention_backward", {"seq_q": 4096, "dtype": "fp32"}, {"parts"}),
    ],
)
def test_dropout_and_parts_are_shown_where_they_are(op: str, fields: dict[str, Any], expected: set[str]) -> None:
    plan = plan_problem(portattn.Problem(op=op, **SIZES | fields), H100, settings=Settings(backend="triton"))
    (line,) = [line for line in plan.explain().splitlines() if line.startswith("  lowering ")]
    assert {word.partition("=")[0] for word in line.split()[1:]} & {"drops", "parts"} == expected
