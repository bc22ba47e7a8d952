"""What the outcomes of several means together say."""

from __future__ import annotations

import pytest

from portattn.verify import RED, SENTENCES, conclusion


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ({"interpreter": "pass"}, "agree"),
        ({"interpreter": "pass", "device": "pass"}, "agree"),
        ({"interpreter": "not_run", "device": "pass"}, "agree"),
        ({"interpreter": "pass", "device": "fail"}, "device"),
        ({"interpreter": "pass", "device": "crash", "emulated": "pass"}, "device"),
        ({"interpreter": "fail", "device": "fail"}, "kernel"),
        ({"interpreter": "fail", "device": "fail", "emulated": "error"}, "kernel"),
        ({"interpreter": "fail", "device": "pass"}, "interpreter"),
        ({"interpreter": "fail", "device": "pass", "emulated": "fail"}, "unclear"),
        ({"interpreter": "fail"}, "unclear"),
        ({"interpreter": "not_run", "device": "error"}, "unclear"),
        ({"interpreter": "not_run"}, "unseen"),
        ({}, "unseen"),
    ],
)
def test_conclusion(outcomes: dict[str, str], said: str) -> None:
    assert conclusion(outcomes) == said
    assert said in SENTENCES
    assert (said in RED) is (said not in ("agree", "unseen", "refused"))
