"""A file of kernels of other packages: what is refused with its place, the arguments it stands for, the comparison."""

import math
import re

import msgspec
import pytest
import torch
from places import ROOT

from portattn.errors import DataError
from portattn.planning.registry import Registry, parse_target
from portattn.schema.toolchain import installed_toolchain
from portattn.testing import kernel_cases
from portattn.testing.kernel_cases import KernelCase
from portattn.worker.client import Worker

EXAMPLE = ROOT / "examples" / "kernels" / "kernels.toml"
CASE = KernelCase(
    function="m:f", outputs=("o", "n"), types={"x": "*bf16", "o": "*fp16", "n": "*i32", "s": "fp32", "none": "none"},
    shapes={"x": (2, 3), "o": (2, 3), "n": (2,)}, strides={"x": (4, 1)}, values={"s": 0.5}, ranges={"x": (2.0, 3.0)},
)  # fmt: skip
TRITON = b"import triton\nimport triton.language as tl\n"


@pytest.fixture
def changed(tmp_path):
    """Return the example's path after one text of it was replaced."""

    def change(old: str, new: str):
        text = EXAMPLE.read_text(encoding="utf-8")
        assert text.count(old) == 1
        (tmp_path / "row_softmax.py").write_text((EXAMPLE.parent / "row_softmax.py").read_text(encoding="utf-8"))
        (tmp_path / "kernels.toml").write_text(text.replace(old, new), encoding="utf-8")
        return tmp_path / "kernels.toml"

    return change


@pytest.mark.parametrize(("old", "new", "line", "said"), [
    ('grid = [4]', 'grid = [4, 0]', 7, r"key 'grid': \[4, 0\] must be one to three numbers of at least 1"),
    ('grid = [4]', 'grids = [4]', 7, "the table has the unknown key `grids`"),
    ('grid = [4]', 'source = "0"', 7, "key 'source': unknown key"),
    ('x = "*fp16",', 'x = "*half",', 8, r"key 'types.x': '\*half' must be one of \*fp64, "),
    ('columns = "i32", ', '', 11, "key 'values.columns': must be one of the arguments in types: x, out, stride"),
    ('shapes = { x = [4, 50], ', 'shapes = { ', 9, "key 'shapes': lacks x, and values does not list its elements"),
    ('x = [4, 50]', 'x = [9999, 9999]', 9, r"'shapes.x': \[9999, 9999\] must be sizes of at most 16777216 elements"),
    ('x = [80, 1]', 'x = [80]', 10, r"key 'strides.x': \[80\] must be a number of at least 0 for each of \[4, 50\]"),
    ('stride = 80', 'stride = [80]', 11, "key 'values.stride': must be a number: stride is i32"),
    ('stride = 80', 'y = 80', 11, "key 'values.y': must be one of the arguments in types"),
    ('columns = 50, ', '', 11, "key 'values': lacks columns, which is i32"),
    ('columns = 50', 'columns = 50, x = [[1.0]]', 11, r"key 'values.x': has 1 elements, and x is \[4, 50\]"),
    ('[-4.0, 4.0]', '[4.0, -4.0]', 12, r"key 'ranges.x': \[4.0, -4.0\] must be two numbers in order"),
    ('outputs = ["out"]', 'outputs = []', 13, "key 'outputs': names no pointer: nothing would be compared"),
    ('outputs = ["out"]', 'outputs = ["columns"]', 13, "'outputs.columns': must be one of the pointers in types"),
    ('BLOCK = 64', 'BLOCK = 64, x = 1', 14, "key 'constants.x': is in types too"),
    ('BLOCK = 64', 'WIDTH = 64', 14, "the arguments of row_softmax are x, out, columns, stride, BLOCK"),
    ('constants = { BLOCK = 64 }', '', 8, "key 'types': lacks BLOCK, and so does constants"),
    ('grid = [4]', 'grid = [4, 65536]', 7, r"key 'grid': \[4, 65536\] must be .* at most \(2147483647, 65535, 65535\)"),
    ('x = [80, 1]', 'x = [99999999, 1]', 10, r"'strides.x': \[99999999, 1\] must have the last within 16777216"),
    ('columns = 50', 'columns = 4294967296', 11, "4294967296 must be a whole number from -2147483648 to 2147483647"),
    ('columns = 50', 'columns = true', 11, "'values.columns': True must be a whole number from .*: the type is i32"),
    ('softmax of 50', 'softmax\\nof 50', 5, "key 'name': .* must be printable characters in one line"),
    ('spills = 0', 'spills = -1', 17, "key 'spills': -1 must be at least 0"),
    ('num_warps = 2', 'num_warps = 3', 15, "'options.num_warps': 3 must be one of 1, 2, 4, 8, 16, 32"),
    ('spills = 0', 'registers = -1', 17, "key 'registers': -1 must be at least 0"),
    ('spills = 0', 'on = { h100 = {} }', 17, "key 'on.h100': must match a target, a backend, an arch or a family"),
    ('spills = 0', 'on.rocm = { grid = [0] }', 17, r"key 'on.rocm.grid': \[0\] must be one to three numbers"),
    ('spills = 0', '[kernel.on.rocm]\nconstants = { B = 1 }', 18, "key 'on.rocm.constants.B': the arguments of row_so"),
    ('folder = "."', 'folder = "~nobody-here"', 2, "'~nobody-here' is not here: install it, or name another folder"),
    ('"row_softmax:row_softmax"', '"row_softmax.kernel"', 6, "'row_softmax.kernel' must be package.module:function"),
    ('"row_softmax:row_softmax"', '"row_softmax:softmax"', 6, "TypeError: .* is a function, and no @triton.jit"),
    ('"row_softmax:row_softmax"', '"nowhere:kernel"', 6, "ModuleNotFoundError: No module named 'nowhere'"),
    ('reference = "row_softmax:reference"', 'reference = "x"', 16, "'x' must be package.module:function"),
    ('spills = 0', 'tolerance = -1.0', 17, "key 'tolerance': -1.0 must be a number above 0"),
    ('folder = "."', 'package = "no_such_package"', 2, "'no_such_package' is not here: install it, or name another"),
])  # fmt: skip
def test_an_entry_that_is_refused_names_its_line_key_value_and_limit(changed, old, new, line, said) -> None:
    with pytest.raises(DataError, match=said) as caught:
        kernel_cases.read(changed(old, new))
    assert caught.value.line == line


def test_a_range_of_whole_numbers_has_whole_bounds(changed) -> None:
    path = changed('x = "*fp16",', 'x = "*i32",')
    path.write_text(path.read_text(encoding="utf-8").replace("-4.0", "-4.5"), encoding="utf-8")
    with pytest.raises(DataError, match=r":12: key 'ranges.x': each of \[-4.5, 4.0\] must be a whole number from"):
        kernel_cases.read(path)


@pytest.mark.compiles
@pytest.mark.parametrize(("option", "refused"), [
    ("num_warp", r"^num_warp = 2 is no option of triton .* for {} \(did you mean num_warps\?\), which takes ."),
    ("waves_per_eu", r"^waves_per_eu = 2 is no option of triton .* for cuda, which takes .*maxnreg"),
])  # fmt: skip
def test_an_option_that_a_compiler_does_not_know_is_an_error_of_its_cell(changed, option, refused) -> None:
    (named,) = kernel_cases.read(changed("num_warps = 2", f"{option} = 2"))
    with Worker() as worker:
        for name, backend in (("cuda:sm_90", "cuda"), ("rocm:gfx942", "hip")):
            reply = kernel_cases.compile_case(named, parse_target(name, str(installed_toolchain())), worker, 60.0, ())
            if option == "waves_per_eu" and backend == "hip":
                assert reply.outcome == "ok", reply
            else:
                assert (reply.outcome, reply.stage) == ("error", "options")
                assert re.search(refused.format(backend), reply.message), reply.message


def test_a_kernels_digest_is_of_its_source_and_of_what_it_calls(changed) -> None:
    path = changed("spills = 0", "spills = 1")
    (here,), (same,) = kernel_cases.read(EXAMPLE), kernel_cases.read(path)
    assert here.problem.source == same.problem.source
    program = path.with_name("row_softmax.py")
    text = program.read_text()
    program.write_text(text.replace("torch.empty(", "torch.zeros("))
    assert kernel_cases.read(path)[0].problem.source == here.problem.source
    program.write_text(text.replace("tl.exp(values - tl.max(values, 0))", "tl.exp(values)"))
    assert kernel_cases.read(path)[0].problem.source != here.problem.source


@pytest.mark.compiles
@pytest.mark.parametrize(("module", "name"), [
    ("row_softmax", "reference"), ("row_softmax", "no_such_function"), ("triton", "reference"), ("random", "reference"),
])  # fmt: skip
def test_modules_beside_a_kernels_are_found_and_a_reference_that_is_missing_is_red(changed, module, name) -> None:
    path = changed("row_softmax:reference", f"row_softmax:{name}")
    path.write_text(path.read_text(encoding="utf-8").replace("row_softmax:", f"{module}:"), encoding="utf-8")
    program = path.with_name("row_softmax.py").rename(path.with_name(f"{module}.py"))
    text = program.read_text(encoding="utf-8").replace("= exponentials(", "= b.exponentials(")
    head, helper, rest = text.partition("@triton.jit\ndef exponentials(")
    helper, rest = (helper + rest).split("\n\n\n", 1)
    program.write_text(f"import beside as b\nfrom beside import *\n{head}{rest}", encoding="utf-8")
    path.with_name("beside.py").write_bytes(b"# coding: latin-1\n# \xf6\n" + TRITON + helper.encode())
    with Worker(runs="interpreter") as worker:
        found = kernel_cases.numbers_of(kernel_cases.read(path)[0], None, worker, 60.0, "here")
    assert found.outcome == ("pass" if name == "reference" else "error"), found
    assert name == "reference" or found.reason.startswith("reference 'row_softmax:no_such_function': error: Attr")


def test_arguments_lie_in_memory_as_the_entry_says() -> None:
    found = kernel_cases.arguments_of(CASE)
    assert (found["s"], found["none"]) == (0.5, None)
    assert found["x"].stride() == (4, 1)
    assert found["x"].untyped_storage().nbytes() == 7 * 2, "from the first element to the last"
    assert ((found["x"] >= 2) & (found["x"] <= 3)).all()
    assert found["o"].isnan().all()
    assert (found["n"] == torch.iinfo(torch.int32).max).all()
    again = kernel_cases.arguments_of(CASE)
    assert torch.equal(found["x"], again["x"])
    given = msgspec.structs.replace(CASE, values={"s": 0.5, "n": [3, 4], "o": 0})
    found = kernel_cases.arguments_of(given)
    assert (found["n"].tolist(), found["o"].abs().max().item()) == ([3, 4], 0.0)


@pytest.mark.parametrize(("change", "wrong", "output", "over"), [
    ({}, 0, "o", False),
    ({"o": 1.0}, 0, "o", False),  # two units in the last place of bfloat16, of the largest value
    ({"o": 1.1}, 0, "o", True),
    ({"o": math.nan}, 1, "o", False),
    ({"n": 1}, 0, "n", True),  # whole numbers are exact
    ({"m": 1}, 0, "n", True),  # past 2**53, too
])  # fmt: skip
def test_outputs_are_compared_by_the_coarsest_type_and_the_largest_value(change, wrong, output, over) -> None:
    right = {"o": torch.tensor([[64.0, math.nan, -math.inf]]), "n": torch.tensor([5, 2**60])}
    given = {name: tensor.clone() for name, tensor in right.items()}
    given["m"] = given["n"][1:]
    for name, amount in change.items():
        given[name].view(-1)[0] += amount
    found = kernel_cases.compare(CASE, right, given)
    assert (found["wrong"], found["output"], float(found["error"]) > float(found["budget"])) == (wrong, output, over)
    assert CASE.budget() == 2**-6


@pytest.mark.parametrize(("when", "effect", "named"), [
    ({"kernels": ("chunk_*",)}, {"note": "wrong"}, True),
    ({"kernels": ("dense_forward",)}, {"note": "wrong"}, False),
    ({"kernels": ("chunk_*",), "toolchain": {"triton": "<3.5"}}, {"note": "wrong"}, False),
    ({"kernels": ("chunk_*",), "launch": {"num_warps": 8}}, {"note": "wrong"}, True),
    ({"kernels": ("chunk_*",), "launch": {"num_warps": 4}}, {"note": "wrong"}, False),
    ({"kernels": ("chunk_*",), "features": ("causal",)}, {"note": "wrong"}, False),
    ({"launch": {"num_warps": 8}}, {"launch": {"num_warps": 4}}, True),
    ({}, {"env": {"TRITON_X": "1"}}, True),
    ({}, {"lowering": {"load": "pointer"}}, False),
    ({}, {"launch": {"block_m": 64}}, False),
    ({}, {"path": "reference"}, False),
])  # fmt: skip
def test_quirks_name_another_packages_kernel_by_its_function(when, effect, named) -> None:
    registry = Registry.load()
    quirk = registry.quirks["rocm-0015-kpack"]
    quirk = msgspec.structs.replace(
        quirk, when=type(quirk.when)(backend="rocm", **when), effect=type(quirk.effect)(**effect)
    )
    target = registry.target("rocm:gfx942", "triton==3.6.0")
    assert quirk.names_foreign("chunk_fwd_kernel_o", target, {"num_warps": 8}) is named
