"""Targets as people write them, given to commands: drivers' names, chips that are not supported, and no chips."""

import pytest

SHAPES = ("--q", "8,64,1024,64", "--kv", "8,16,1024,64", "--dtype", "fp16", "--toolchain", "triton==3.6.0")


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda:sm_90"),
        ("NVIDIA A100-SXM4-80GB", "cuda:sm_80"),
        ("NVIDIA L40S", "cuda:sm_89"),
        ("AMD Instinct MI300X", "rocm:gfx942"),
        ("AMD Radeon RX 7900 XTX", "rocm:gfx1100"),
    ],
)
def test_a_plan_for_a_device_as_its_driver_prints_it(portattn, written, target):
    assert f"on {target} with triton==3.6.0" in portattn("plan", "attention", "--target", written, *SHAPES, exits=0).out


@pytest.mark.parametrize(("written", "reason"), [("Tesla T4", "tensor cores"), ("gfx1030", "no matrix instructions")])
def test_a_chip_that_is_not_supported_is_answered_with_the_reason(portattn, tmp_path, written, reason):
    called = portattn("plan", "attention", "--target", written, *SHAPES, exits=0)
    assert "  not triton: " in called.out
    assert reason in called.out
    for command in (
        ("matrix", "run", "--targets", written, "--out", str(tmp_path / "m")),
        ("verify", "--target", written),
        ("tune", "--target", written),
    ):
        called = portattn(*command)
        assert called.status == 2, (command, called.out)
        assert reason in called.err
        assert len(called.err.splitlines()) == 1
