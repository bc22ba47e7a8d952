"""examples/train_llama.py, short: with transformers' attention and with portattn's a model is trained alike, step by
step, in every mode; and a gradient that is wrong by a thousandth is seen. A loss is seen to a few units in its last
place. AdamW takes no notice of a gradient's scale, so the norms of the projections' gradients are compared as well.
Both are held to float32's rounding: transformers' attention with weights that are one unit in the last place apart
differs by up to 5e-7 in losses and 2e-6 in norms over these steps."""

import json
import re
from typing import Any

import pytest
import torch
from places import ROOT

from portattn.worker.own_kernels import load

pytestmark = pytest.mark.transformers
pytest.importorskip("transformers", reason="the transformers package is not installed")

from portattn.integrations import transformers as integration  # noqa: E402

PAGE = ROOT / "docs" / "training.md"
STEPS = 10
LOSS, NORM = 5e-6, 2e-5  # absolute, of losses of 2 to 3; relative
PATHS = {"plain": "sdpa", "checkpointing": "sdpa", "padded": "reference", "packed": "reference", "compiled": "sdpa"}
OPERATIONS = {"packed": "varlen_attention"}  # of modes; elsewhere attention
PLANTED = 1.001


example: Any = load(str(ROOT / "examples" / "train_llama.py"))


def trained(tmp_path, mode, *more):
    path = tmp_path / "curves.json"
    common = ["--device", "cpu", "--compile-backend", "aot_eager", "--json", str(path)]
    assert example.main(["--mode", mode, "--steps", str(STEPS), *common, *more]) == 0
    return {curve["attention"]: curve for curve in json.loads(path.read_text(encoding="utf-8"))["curves"]}


def largest_difference(ours, eager):
    return max(abs(a - b) for a, b in zip(ours["losses"], eager["losses"], strict=True))


def off(ours, eager):
    """What is further apart than rounding: "losses", names of projections."""
    found = []
    if largest_difference(ours, eager) > LOSS:
        found.append("losses")
    for name, norms in eager["gradient_norms"].items():
        pairs = zip(ours["gradient_norms"][name], norms, strict=True)
        if max(abs(a - b) / b for a, b in pairs) > NORM:
            found.append(name)
    return found


@pytest.mark.parametrize("mode", example.MODES)
def test_the_same_curve_with_both_attentions(mode, tmp_path):
    found = trained(tmp_path, mode)
    ours, eager = found["portattn"], found["eager"]
    assert (off(ours, eager), len(ours["losses"])) == ([], STEPS)
    assert set(ours["gradient_norms"]) == {"q_proj", "k_proj", "v_proj"}
    assert min(min(norms) for norms in eager["gradient_norms"].values()) > 1e-4  # a gradient of zero proves nothing
    assert eager["losses"][-1] < eager["losses"][0] - 0.1  # it learns
    assert not eager["ran"]
    assert [line.partition(" q ")[0] for line in ours["ran"]] == [f"{PATHS[mode]}: {OPERATIONS.get(mode, 'attention')}"]


@pytest.mark.parametrize("place", [0, 1, 2], ids=["dQ", "dK", "dV"])
@pytest.mark.parametrize("mode", ["plain", "checkpointing", "padded", "packed"])
def test_a_gradient_that_is_a_thousandth_too_large_is_seen(mode, place, tmp_path, monkeypatch):
    name = OPERATIONS.get(mode, "attention")
    right = getattr(integration.ops, name)

    def wrong(*tensors, **options):
        given = list(tensors)
        given[place] = given[place].view_as(given[place])
        given[place].register_hook(lambda gradient: gradient * PLANTED)
        return right(*given, **options)

    monkeypatch.setattr(integration.ops, name, wrong)
    found = trained(tmp_path, mode)
    assert "qkv"[place] + "_proj" in off(found["portattn"], found["eager"])


def test_labels_of_padded_and_packed_batches_are_predictable():
    """Each label is predicted by a row of its own sequence, and no token but the first of a sequence lacks one."""
    padded = next(example.batches("padded", 0, 6, 30))
    mask, labels = padded["attention_mask"].bool(), padded["labels"]
    assert {tuple(row[[0, -1]].tolist()) for row in mask} == {(True, False), (False, True)}
    assert torch.equal(labels[:, 1:] != example.IGNORED, mask[:, 1:] & mask[:, :-1])
    packed = next(example.batches("packed", 0, 6, 30))
    assert packed["input_ids"].shape == packed["position_ids"].shape == packed["labels"].shape
    assert torch.equal(packed["labels"] == example.IGNORED, packed["position_ids"] == 0)
    assert int((packed["position_ids"] == 0).sum()) == 6


@pytest.mark.parametrize(("arguments", "said"), [
    (["--steps", "0"], "--steps is 0, but must be at least 1"),
    (["--length", "9"], "--length is 9, but must be more than 9"),
    (["--device", "cuda:97"], "--device is cuda:97, on which torch has no tensors"),
    (["--json", "/nowhere/at/all.json"], "but there is no folder /nowhere/at"),
    (["--mode", "backwards"], "invalid choice: 'backwards'"),
])  # fmt: skip
def test_bad_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit) as end:
        example.main(arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, capsys):
    path = tmp_path / "curves.json"
    assert example.main(["--steps", "40", "--lr", "1e30", "--device", "cpu", "--json", str(path)]) == 1
    assert "train_llama: plain, eager: the loss of step " in capsys.readouterr().err
    assert not path.exists()


def test_an_interrupt_keeps_what_was_finished(tmp_path, monkeypatch, capsys):
    right = example.train

    def train(mode, attention, options):
        if attention == "portattn":
            raise KeyboardInterrupt
        return right(mode, attention, options)

    monkeypatch.setattr(example, "train", train)
    path = tmp_path / "curves.json"
    assert example.main(["--steps", "2", "--device", "cpu", "--json", str(path)]) == 130
    said = capsys.readouterr()
    assert said.err.splitlines()[-1] == "train_llama: interrupted"
    assert "plain, eager: step 1 of 2, loss " in said.err
    assert [curve["attention"] for curve in json.loads(path.read_text(encoding="utf-8"))["curves"]] == ["eager"]
    assert not integration._registered


def test_the_data_of_the_page_is_of_every_mode_and_holds_what_the_page_says():
    """docs/training/loss-curves.json: a run of the example, whole, in which the curves are the same to rounding."""
    result = json.loads((ROOT / "docs" / "training" / "loss-curves.json").read_text(encoding="utf-8"))
    modes: dict[str, dict[str, Any]] = {}
    for curve in result["curves"]:
        modes.setdefault(curve["mode"], {})[curve["attention"]] = curve
    assert tuple(modes) == example.MODES
    for mode, found in modes.items():
        assert tuple(found) == example.ATTENTIONS
        assert all(len(curve["losses"]) == result["about"]["steps"] == 200 for curve in found.values())
        assert found["eager"]["losses"][-1] < 0.5 * found["eager"]["losses"][0], mode
        facts = {name: largest_difference(found[name], found["eager"]) for name in ("portattn", "eager, one ulp")}
        for name, told in result["apart"][mode].items():
            assert told["largest difference of losses"] == float(f"{facts[name]:.3g}")
        assert facts["portattn"] <= 10 * max(facts["eager, one ulp"], 1e-6), mode
        shown = [f"{facts[name]:.1e}" for name in ("portattn", "eager, one ulp")]
        assert re.search(rf"^\| {mode} \|.*\| {shown[0]} \| {shown[1]} \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert (ROOT / "docs" / "training" / "loss-curves.svg").read_text(encoding="utf-8").startswith("<?xml")
