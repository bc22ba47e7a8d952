"""Targets as people write them, given to commands: chips that are not supported, and no chips."""

import pytest

SHAPES = ("--q", "8,64,1024,64", "--kv", "8,16,1024,64", "--dtype", "fp16", "--toolchain", "triton==3.6.0")


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
