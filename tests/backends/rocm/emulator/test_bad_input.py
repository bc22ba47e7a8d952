"""Bad text and bad launches: one clear error each, with the line where there is one."""

import subprocess
import sys
from typing import Any

import asmkit
import numpy as np
import pytest

from portattn.backends.rocm.emulator.amdgpu import (
    BadLaunch,
    BadProgram,
    Memory,
    OutOfBounds,
    Program,
    TruncatedText,
    UnknownInstruction,
    UnknownOperand,
    WrongArch,
)

GOOD = asmkit.text("gfx942", "v_lshlrev_b32_e32 v1, 2, v0\ns_nop 0", arguments=[8, 4, 4])


def test_good_text_parses() -> None:
    program = Program.parse(GOOD)
    assert program.name == "kernel"
    assert [(a.offset, a.size) for a in program.arguments] == [(0, 8), (8, 4), (12, 4)]


@pytest.mark.parametrize("arch", ["gfx906", "gfx1030", "gfx1250", "gfx940"])
def test_arch_that_is_not_modelled(arch: str) -> None:
    with pytest.raises(WrongArch, match=f"{arch}.*gfx942"):
        Program.parse(GOOD.replace("gfx942", arch))


def test_waves_of_32_on_a_chip_without_them() -> None:
    with pytest.raises(WrongArch, match="64 lanes only"):
        Program.parse(GOOD.replace("\t.end_amdhsa_kernel", "\t\t.amdhsa_wavefront_size32 1\n\t.end_amdhsa_kernel"))


NO_TEXT = [(text, "no amdgcn assembly") for text in ("", "hello", ".version 8.0\n.target sm_90\n")]


@pytest.mark.parametrize(("text", "match"), [*NO_TEXT, (None, "the text is of type NoneType")])
def test_no_amdgcn_text(text: Any, match: str) -> None:
    with pytest.raises(BadProgram, match=match):
        Program.parse(text)


def test_text_cut_anywhere() -> None:
    """Every prefix of the text is refused, and never with anything but BadProgram."""
    end = GOOD.index(".end_amdgpu_metadata")
    for cut in range(0, end, 7):
        with pytest.raises(BadProgram):
            Program.parse(GOOD[:cut])
    with pytest.raises(TruncatedText, match="s_endpgm"):
        Program.parse(GOOD.replace("\ts_endpgm\n", ""))


UNKNOWN = [
    ("v_frobnicate_b32 v0, v1", UnknownInstruction, "v_frobnicate_b32 is not modelled"),
    ("v_mfma_f32_4x4x4f16 a[0:3], v[0:1], v[2:3], 0", UnknownInstruction, "not modelled"),
    ("s_getpc_b64 s[4:5]", UnknownInstruction, "s_getpc_b64"),
    ("image_load v0, v1, s[0:7]", UnknownInstruction, "image_load"),
    ("v_mov_b32_e32 v0, v1 frob:3", UnknownOperand, "frob:3"), ("v_mov_b32_e32 v0, v999", UnknownOperand, "v999"),
    ("v_mov_b32_e32 v0, q7", UnknownOperand, "q7"), ("v_mov_b32_e32 v0, v1 offset:4", UnknownOperand, "offset"),
    ("v_mfma_f32_32x32x8_f16 a[0:15], v0, v[2:3], 0", UnknownOperand, "reads 2 registers"),
    ("s_waitcnt 0x70", UnknownOperand, "symbolic"),
    ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 3", UnknownOperand, "HW_REG_MODE"),
    ("v_add_u32_e32 v0, v1", UnknownInstruction, "2 operands"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "error", "match"), UNKNOWN)
def test_unknown_things_are_errors_with_their_line(line: str, error: type[BadProgram], match: str) -> None:
    text = asmkit.text("gfx942", ["s_nop 0", line], arguments=[])
    with pytest.raises(error, match=match) as caught:
        Program.parse(text).launch((1,), [], Memory())
    assert text.splitlines()[caught.value.place.line - 1].strip() == line


def launch(grid: Any = (1,), arguments: Any = (0, 0, 0), **options: Any) -> None:
    memory = Memory()
    memory.add(np.zeros(4, np.uint8))
    Program.parse(GOOD).launch(grid, arguments, memory, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"grid": (0,)}, "grid"), ({"grid": (4, 0, 1)}, "grid"), ({"grid": (-1,)}, "grid"), ({"grid": ()},
        "one to three"),
        ({"grid": (1, 1, 1, 1)}, "one to three"), ({"grid": (2**31,)}, "grid"),
        ({"arguments": (0, 0, 0, 0)}, "4 arguments given; kernel takes 3"), ({"arguments": (1.5, 0, 0)}, "argument 0"),
        ({"arguments": (0,)}, "1 arguments given; kernel takes 3"), ({"arguments": ()}, "0 arguments given"),
        ({"arguments": (0, 2**32, 0)}, "argument 1.*4 bytes do not hold"), ({"arguments": (0, "x", 0)}, "argument 1"),
        ({"arguments": (0, None, 0)}, "argument 1"), ({"arguments": bytes(999)}, "999 bytes of arguments"),
        ({"lds_bytes": 70000}, "70000 bytes of LDS.*65536"), ({"waves": 17}, "1,024 work-items"),
        ({"lds_bytes": -1}, "-1 bytes of LDS"), ({"waves": 0}, "0 waves"), ({"step_limit": 0}, "step_limit 0"),
        ({"grid": 4}, r"^grid 4: one to three whole numbers"), ({"grid": (1.5, 1, 1)}, r"grid \(1.5, 1, 1\)"),
        ({"grid": "4"}, "grid '4'"), ({"arguments": (np.zeros(999), 0, 0)}, r"^argument 0 is ndarray; a number or"),
    ],
)  # fmt: skip
def test_bad_launches(options: dict[str, Any], match: str) -> None:
    with pytest.raises(BadLaunch, match=match):
        launch(**options)


def test_hidden_arguments_are_not_the_callers() -> None:
    hidden = "      - .offset: 24\n        .size: 4\n        .value_kind: hidden_block_count_x\n"
    plain = asmkit.text("gfx942", ["s_nop 0"], arguments=(8, 8, 8))
    listed = plain.replace("    .max_flat_workgroup_size", hidden + "    .max_flat_workgroup_size", 1)
    listed = listed.replace("kernarg_size 24", "kernarg_size 32")
    memory = Memory()
    address = memory.add(np.zeros(4, np.float32))
    program = Program.parse(listed)
    assert len(program.arguments) == 3
    program.launch((1, 1, 1), [address], memory)  # two pointers that Triton adds may be left out
    with pytest.raises(BadLaunch, match="4 arguments given; kernel takes 3"):
        program.launch((1, 1, 1), [address] * 4, memory)


@pytest.mark.parametrize(
    ("given", "match"),
    [(np.zeros((4, 4)).T[:, :2], "not C-contiguous"), ([0.0], "array out is a list; a numpy array is needed")],
)
def test_arrays_must_be_contiguous_and_numpys(given: Any, match: str) -> None:
    with pytest.raises(BadLaunch, match=match):
        Memory().add(given, "out")


def test_a_buffer_that_is_too_small_says_by_how_much() -> None:
    body = """
        s_load_dwordx2 s[10:11], s[0:1], 0x0
        v_lshlrev_b32_e32 v1, 2, v0
        s_waitcnt lgkmcnt(0)
        global_store_dword v1, v0, s[10:11]
    """
    memory = Memory()
    address = memory.add(np.zeros(60, np.uint32), "out")
    with pytest.raises(OutOfBounds, match=r"4 bytes beyond the end of out \(240 bytes\); 4 lanes"):
        Program.parse(asmkit.text("gfx942", body, arguments=[8])).launch((1,), [address], memory)


def test_needs_numpy_only() -> None:
    """Importing the model and running a program loads neither torch nor Triton."""
    code = "import sys; import portattn.backends.rocm.emulator.amdgpu\n"
    code += "print('torch' in sys.modules, 'triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
