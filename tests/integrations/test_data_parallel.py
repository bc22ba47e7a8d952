"""Two processes train a padded Llama under DistributedDataParallel and FSDP2 as they do with `eager` attention."""

import json
from pathlib import Path

import pytest
from two_processes import outputs

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

CHILD = Path(__file__).with_name("ddp_child.py")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[float]]]:
    found = outputs(CHILD, tmp_path_factory.mktemp("store"))
    return [json.loads(output.splitlines()[-1]) for output in found]


@pytest.mark.parametrize("wrapper", ["replicated", "sharded"])
def test_a_model_in_two_processes(wrapper: str, reports: list[dict[str, list[float]]]) -> None:
    for report in reports:
        ours, eager = report[f"{wrapper}, portattn"], report[f"{wrapper}, eager"]
        assert ours == pytest.approx(eager, abs=0, rel=1e-5)
        assert abs(eager[0] - eager[1]) > 1e-3
    first, second = (report[f"{wrapper}, portattn"] for report in reports)
    assert first[-1] == pytest.approx(second[-1], rel=1e-6)  # the weights
    assert first[0] != pytest.approx(second[0], rel=1e-3)  # the batches
