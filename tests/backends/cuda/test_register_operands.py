"""No instruction writes a register that a product still reads: quirk cuda-0001, in gluon_forward's machine code."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from portattn import Problem
from portattn.backends.cuda.hopper_forward.variant import ForwardVariant, choice
from portattn.compile.compile_check import compile_in
from portattn.launch import meta_call
from portattn.launch.described import signatures
from portattn.planning.registry import parse_target
from portattn.schema.plan import Plan
from portattn.schema.target import Target
from portattn.schema.toolchain import installed_toolchain
from portattn.worker.client import Worker

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
OVER = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, 0x0|^(BRA|EXIT|BRX)\b")
READERS = ("ST", "RED", "ATOMS", "BAR", "SYNCS", "UTMA", "R2UR", "WARPSYNC", "BRA", "NANOSLEEP", "CCTL")


def instructions(sass: str) -> list[str]:
    return [found.group(1) for found in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(.*?;)", sass)]


def written(text: str) -> range:
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


def overwritten(code: list[str]) -> list[str]:
    """Instructions that write a left operand of a product before the wait for it."""
    found = []
    for place, text in enumerate(code):
        product = PRODUCT.search(text)
        if not product or not product.group(3).startswith("R"):
            continue
        operand = range(int(product.group(3)[1:]), int(product.group(3)[1:]) + 4)
        for later in code[place + 1 :]:
            if OVER.match(later):
                break
            if set(written(later)) & set(operand):
                found.append(f"{text} … {later}")
    return found


@pytest.mark.compiles
@pytest.mark.parametrize("form", FORMS)
def test_a_left_operand_stays_until_its_product_has_ended(
    gluon_compiler: Worker, gluon_target: Target, tmp_path: Path, form: str
) -> None:
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    if str(gluon_target.toolchain) != str(installed_toolchain()):
        pytest.skip("assembles with the installed Triton's ptxas, which --release does not choose")
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    if not (tools / "nvdisasm").exists():
        pytest.skip("this Triton comes without nvdisasm: scripts/pack_triton.py leaves it out")
    p = Problem(**FORMS[form])  # type: ignore[arg-type]
    chosen = choice(p)
    assert chosen is not None
    assert chosen.schedule.reg_q
    plan = Plan(problem=p, target=SM_90.name, toolchain="triton==3.6.0", requested=VARIANT.name, path=VARIANT.name)
    reply = compile_in(gluon_compiler, signatures(VARIANT, meta_call(p))[0], plan, SM_90, 120.0, "text")
    assert reply.outcome == "ok", reply.message
    (tmp_path / "k.ptx").write_text(str(reply.facts["ptx"]))
    subprocess.run([get_ptxas(90).path, "--gpu-name=sm_90a", "k.ptx", "-o", "k.cubin"], cwd=tmp_path, check=True)
    told = subprocess.run(
        [tools / "nvdisasm", "-c", "k.cubin"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    code = instructions(told.stdout)
    left = {found.group(3)[0] for line in code if (found := PRODUCT.search(line))}
    assert left == {"R"}  # queries and probabilities, all of them
    assert overwritten(code) == []


def test_what_is_written_is_seen() -> None:
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
