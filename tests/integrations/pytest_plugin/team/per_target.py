"""A team's tests of its kernel, per target and toolchain: data of test_plugin_kernels.py."""

import pytest
from row_scale import row_scale

TYPES = {"x": "*fp16", "scale": "*fp32", "out": "*fp16", "columns": "i32"}


def test_it_fits_and_does_not_spill(portattn_target):
    compiled = portattn_target.compile(row_scale, TYPES, {"BLOCK": 1024}, num_warps=4)
    assert not compiled.spills
    assert (compiled.shared_memory or 0) <= portattn_target.target.arch.scratchpad_bytes


@pytest.mark.portattn_quirk("rocm-0015")
def test_it_compiles_with_kpack(portattn_target):
    options = {"kpack": 2} if portattn_target.target.backend == "rocm" else {}
    portattn_target.compile(row_scale, TYPES, {"BLOCK": 1024}, **options)
