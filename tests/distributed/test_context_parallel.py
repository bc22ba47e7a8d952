"""2, 4 and 8 processes with gloo against one process in float64: forward and gradients, under the error budget."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import cases
from ranks import run

pytestmark = pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="ranks are forked")


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_feature_and_layout(ranks: int, tmp_path: Path) -> None:
    found = run("rank_cases", ranks, tmp_path, "all_cases")["all_cases"]
    assert len(found) == ranks
    judged = {name: wrong for rank in found.values() for name, wrong in rank.items()}
    assert sorted(judged) == sorted(case["name"] for case in cases(ranks))
    assert {name: wrong for name, wrong in judged.items() if wrong} == {}
