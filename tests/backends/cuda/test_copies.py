"""What a variant's launcher is given where its kernel cannot read the caller's tensors, or the scale is 0."""

import re
from typing import Any

import msgspec
import pytest
import torch
from gluon_ptx import disassemble, nvdisasm
from threads import run_threads

from portattn import Problem
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant, choice
from portattn.backends.cuda.launch_parts import APART, CAPTURED, TURNS, Counters, with_copies
from portattn.compile.ensure_compiled import compile_in
from portattn.launch import meta_call
from portattn.launch.kernelcall import signatures
from portattn.planning.registry import parse_target
from portattn.schema.call import Call
from portattn.schema.plan import Plan

PROBLEM = Problem(batch=2, heads_q=3, heads_k=3, seq_q=4, seq_k=4, head_dim=8)


def launched(scale, broadcast=""):
    """Whether the launch is kept as it is, what the caller brings, and what reaches the kernel."""
    given = {name: torch.randn(2, 3, 4, 8) for name in ("q", "k", "v")}
    if broadcast:
        given[broadcast] = given[broadcast][:1].expand(2, 3, 4, 8)
    seen: dict[str, Any] = {}
    launch = with_copies(seen.update, Call(problem=PROBLEM, scale=scale, **given), ("q", "k", "v"), ("q",))
    launch(given)
    return launch == seen.update, given, seen


def test_tensors_that_can_be_read_reach_the_kernel_themselves():
    kept, given, seen = launched(0.5)
    assert kept
    assert all(seen[name] is given[name] for name in given)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_broadcast_tensor_is_copied_for_each_launch(name):
    kept, given, seen = launched(0.5, name)
    assert not kept
    assert 0 not in seen[name].stride()
    assert torch.equal(seen[name], given[name])
    assert all(seen[other] is given[other] for other in given if other != name)


def test_a_scale_of_nothing_is_applied_to_the_queries():
    kept, given, seen = launched(0.0, "q")
    assert not kept
    assert torch.equal(seen["q"], torch.zeros(2, 3, 4, 8))
    assert seen["k"] is given["k"]


@pytest.mark.parametrize(
    ("kind", "scales", "expected"), [("e4m3", "head", [0, 0, 127, -1, 0]), ("int8", "token", [0, 0, 0, 0, 0])]
)
def test_of_bytes_a_scale_of_nothing_leaves_what_is_no_number(kind, scales, expected):
    """In e4m3 0x7f and 0xff are NaN: 0 times that is NaN. Whole numbers times nothing are nothing."""
    seen: dict[str, Any] = {}
    given = {name: torch.tensor([5, -3, 127, -1, 0], dtype=torch.int8) for name in ("q", "k", "v")}
    call = Call(problem=msgspec.structs.replace(PROBLEM, kv_format=kind, kv_scales=scales), scale=0.0, **given)
    with_copies(seen.update, call, ("q", "k"), ("q",))(given)
    assert seen["q"].tolist() == expected
    assert seen["k"] is given["k"]


class Memory:
    """Zeros on the CPU, which remember what was made."""

    def __init__(self):
        self.sizes: list[int] = []

    def __call__(self, count):
        made = torch.zeros(count, dtype=torch.int32)
        self.sizes.append(count)
        return made


def test_a_stream_has_counters_of_its_own_in_turns():
    memory = Memory()
    counters = Counters(memory)
    first = [counters.take(7).data_ptr() for _ in range(TURNS)]
    assert len(set(first)) == TURNS
    for stream in range(100, 100 + 3 * TURNS):  # however many launches other streams make meanwhile
        assert counters.take(stream).data_ptr() not in first
    assert [counters.take(7).data_ptr() for _ in range(TURNS)] == first
    assert all(address % 16 == 0 for address in first)
    assert memory.sizes == [CAPTURED * APART] + [TURNS * APART] * (1 + 3 * TURNS)


def test_the_default_stream_is_a_stream():
    memory = Memory()
    counters = Counters(memory)
    assert counters.take(0).data_ptr() != counters.take(None).data_ptr()
    assert memory.sizes == [CAPTURED * APART, TURNS * APART]


def test_captured_launches_share_with_nobody_and_their_memory_stays():
    memory = Memory()
    counters = Counters(memory)
    lowest = counters.take(None).data_ptr() - 16 * (CAPTURED - 1)
    taken = {counters.take(None).data_ptr() for _ in range(CAPTURED - 1)} | {lowest + 16 * (CAPTURED - 1)}
    assert taken == {lowest + 16 * i for i in range(CAPTURED)}
    # Nobody holds what was taken, and all are taken: graphs still have their addresses.
    others = [torch.ones(CAPTURED * APART, dtype=torch.int32) for _ in range(50)]
    assert all(t.data_ptr() != lowest for t in others)
    assert memory.sizes == [CAPTURED * APART]
    counters.take(None)
    assert memory.sizes == [CAPTURED * APART, 1]  # of the graph's own memory


@pytest.mark.parametrize("stream", [3, None])
def test_threads_never_get_one_counter_twice_at_a_time(stream):
    counters, seen = Counters(Memory()), []
    share = TURNS // 4

    def work():
        seen.extend([counters.take(stream).data_ptr() for _ in range(share)])

    run_threads(*[work] * 4)
    assert len(set(seen)) == len(seen) == 4 * share


VARIANT = ForwardVariant()
SM_90 = parse_target("cuda:sm_90", "triton==3.6.0")
CALL = {"batch": 2, "heads_q": 40, "heads_k": 8, "seq_q": 333, "seq_k": 333, "dtype": "bf16", "return_lse": True}
FEW_TILES = {"batch": 1, "heads_q": 2, "heads_k": 1, "seq_q": 100, "seq_k": 3000}
FORMS = {
    "D=128 causal": CALL | {"head_dim": 128, "causal": "bottom_right"},
    "D=128 full": CALL | {"head_dim": 128, "seq_k": 4096, "causal": "none"},
    "D=128 padded, softcap, sinks": CALL
    | {"head_dim": 128, "causal": "top_left", "seqlens_q": True, "seqlens_k": True, "softcap": True, "sinks": True},
    "D=128 split": CALL | FEW_TILES | {"head_dim": 128, "causal": "none"},
    "D=64 causal": CALL | {"head_dim": 64, "causal": "bottom_right"},
}
PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), (R\d+|gdesc\[\w+\])")
WRITES = re.compile(r"^(?:@!?U?P\w+ )?([A-Z][\w.]*) (?:U?P\w+, )?R(\d+)(?:\.reuse)?(?=,| ;)")
READERS = ("ST", "RED", "ATOMS", "BAR", "SYNCS", "UTMA", "R2UR", "WARPSYNC", "BRA", "NANOSLEEP", "CCTL")


def instructions(sass):
    return [found.group(1) for found in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", sass)]


def written(text):
    """Registers that an instruction writes."""
    product = PRODUCT.search(text)
    if product:
        return range(int(product.group(2)), int(product.group(2)) + int(product.group(1)) // 2)
    found = WRITES.match(text)
    if not found or found.group(1).startswith(READERS):
        return range(0)
    name = found.group(1)
    count = 4 if ".128" in name or name.startswith("LDSM") else 2 if ".64" in name or "WIDE" in name else 1
    return range(int(found.group(2)), int(found.group(2)) + count)


WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")


def overwritten(code):
    """Instructions that write a left operand of a product that may still run. Products run in groups: the last one of a
    group names gsb0, and a wait leaves so many groups running."""
    running: list[list[tuple[str, range]]] = []
    group: list[tuple[str, range]] = []
    found = []
    for text in code:
        wait = WAIT.match(text)
        if wait:
            left = int(wait.group(1), 16)
            running = running[-left:] if left else []
        found += [
            f"{product} … {text}"
            for product, operand in [*(one for each in running for one in each), *group]
            if set(written(text)) & set(operand)
        ]
        product = PRODUCT.search(text)
        if product and product.group(3).startswith("R"):
            first = int(product.group(3)[1:])
            group.append((text, range(first, first + 4)))
        if product and "gsb0" in text:
            running.append(group)
            group = []
    return found


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_a_left_operand_stays_until_its_product_has_ended(gluon_compiler, gluon_target, tmp_path, form):
    disassembler = nvdisasm(gluon_target)
    p = Problem(**FORMS[form])  # type: ignore[arg-type]
    assert choice(p).schedule.reg_q
    plan = Plan(problem=p, target=SM_90.name, toolchain="triton==3.6.0", requested=VARIANT.name, path=VARIANT.name)
    reply = compile_in(gluon_compiler, signatures(VARIANT, meta_call(p))[0], plan, SM_90, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    code = instructions(disassemble(disassembler, str(reply.facts["ptx"]), tmp_path))
    left = {found.group(3)[0] for line in code if (found := PRODUCT.search(line))}
    assert left == {"R"}  # queries and probabilities, all of them
    assert overwritten(code) == []


def test_what_is_written_is_seen():
    product, wait = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR8], R24, gsb0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
    for text, seen in (
        ("MOV R91, RZ ;", True),
        ("F2FP.BF16.F32.PACK_AB R88, R5, R4 ;", True),
        ("@P0 FMUL R90, R1, R2 ;", True),
        ("LDSM.16.M88.4 R85, [R4] ;", True),
        ("LDS.64 R87, [R4] ;", True),
        ("HGMMA.64x64x16.F32.BF16 R60, R4, gdesc[UR8], R60 ;", True),
        ("MOV R92, RZ ;", False),
        ("STS.128 [R88], R4 ;", False),
        ("MOV R5, R88 ;", False),
        ("ISETP.GE.AND P0, PT, R88, RZ, PT ;", False),
    ):
        assert bool(overwritten([product, text, wait])) is seen, text
    assert overwritten([product, wait, "MOV R88, RZ ;"]) == []
    assert overwritten(["HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;", "MOV R88, RZ ;"]) == []
