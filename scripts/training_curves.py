"""The picture of docs/training.md: losses of examples/train_llama.py with both attentions, in every mode.

    python scripts/training_curves.py                                         # trains, then writes picture and data
    python scripts/training_curves.py --name loss-curves-h200 -- --device cuda
    python scripts/training_curves.py --draw docs/training/loss-curves.json   # draws again what was trained before

What stands after `--` goes to the example. Writes NAME.json and NAME.svg into docs/training/, and prints how far the
curves are apart. It needs transformers and matplotlib; the data is written even where the latter is missing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "train_llama.py"
EAGER, OURS, ULP = "eager", "portattn", "eager, one ulp"
# Colours of Okabe and Ito, which colour-blind readers tell apart; a line's own dashes, for print.
STYLES = {EAGER: ("#56B4E9", "-", 3.5), OURS: ("#000000", "--", 1.2), ULP: ("#E69F00", ":", 1.4)}
PANEL = (3.0, 2.4)  # inches
LEAST = 1e-7  # a difference of nothing is drawn here: about the last place of a float32 loss of one


def trained(given: list[str]) -> dict[str, Any]:
    """What the example wrote of all modes and attentions. Its progress passes through."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "curves.json"
        command = [sys.executable, str(EXAMPLE), "--mode", "all", "--attention", "all", *given, "--json", str(path)]
        done = subprocess.run(command, check=False)
        if done.returncode:
            raise SystemExit(f"training_curves: {' '.join(command)} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def by_mode(result: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for curve in result["curves"]:
        found.setdefault(curve["mode"], {})[curve["attention"]] = curve
    return found


def differences(curve: dict[str, Any], eager: dict[str, Any]) -> list[float]:
    """How far the losses are apart, step by step."""
    return [abs(a - b) for a, b in zip(curve["losses"], eager["losses"], strict=True)]


def apart(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By mode: where portattn's losses and gradient norms are furthest from eager's, and the same of one ulp."""
    found: dict[str, dict[str, Any]] = {}
    for mode, curves in by_mode(result).items():
        found[mode] = {}
        for attention in (OURS, ULP):
            of = differences(curves[attention], curves[EAGER])
            norms = curves[attention]["gradient_norms"], curves[EAGER]["gradient_norms"]
            relative = {
                name: max(abs(a - b) / b for a, b in zip(norms[0][name], norms[1][name], strict=True))
                for name in norms[1]
            }
            found[mode][attention] = {
                "largest difference of losses": float(f"{max(of):.3g}"),
                "at step": of.index(max(of)) + 1,
                "largest relative difference of gradient norms": {n: float(f"{r:.3g}") for n, r in relative.items()},
            }
    return found


def written(result: dict[str, Any], path: Path) -> None:
    """JSON of a line a curve."""
    lines = [json.dumps(curve) for curve in result["curves"]]
    head = {"about": result["about"], "apart": result["apart"]}
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "curves": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def drawn(result: dict[str, Any], path: Path) -> None:
    """An upper panel of losses and a lower one of differences for each mode. Raises ImportError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "portattn"  # the same file from the same data
    modes = by_mode(result)
    shown: Any = Figure(figsize=(PANEL[0] * len(modes), PANEL[1] * 2 + 0.8), layout="constrained")
    axes = shown.subplots(2, len(modes), squeeze=False, sharex=True, sharey="row")
    handles: dict[str, Any] = {}
    for column, (mode, curves) in enumerate(modes.items()):
        losses, gaps = axes[0][column], axes[1][column]
        losses.set_title(mode, fontsize=10)
        handles["entropy of the text"] = losses.axhline(
            result["about"]["entropy"], color="#999999", linewidth=0.8, linestyle=(0, (1, 2))
        )
        for attention in (EAGER, OURS):
            _line(losses, attention, curves[attention]["losses"], handles, attention)
        for attention in (ULP, OURS):
            values = [max(value, LEAST) for value in differences(curves[attention], curves[EAGER])]
            _line(gaps, attention, values, handles, attention)
        gaps.set_yscale("log")
        gaps.set_xlabel("step", fontsize=8)
        for panel in (losses, gaps):
            panel.tick_params(labelsize=7)
            panel.grid(True, linewidth=0.4, color="#DDDDDD")
    axes[1][0].set_ylim(bottom=LEAST / 2)  # of all, now that each has said how far up it goes
    axes[0][0].set_ylabel("loss, nats a byte", fontsize=8)
    axes[1][0].set_ylabel("difference from eager", fontsize=8)
    about = result["about"]
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if name != "portattn")
    shown.suptitle(f"A small Llama, {about['dtype']} on {about['chip']}: {versions}, {about['date']}", fontsize=11)
    shown.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    shown.savefig(path, metadata={"Date": None})


def _line(panel: Any, attention: str, values: list[float], handles: dict[str, Any], label: str) -> None:
    """Into a panel, and into the legend under its label."""
    colour, dash, width = STYLES[attention]
    (handles[label],) = panel.plot(
        range(1, len(values) + 1), values, color=colour, linestyle=dash, linewidth=width, label=label
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="loss-curves", help="of the picture and its data")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "training", help="the folder for both")
    parser.add_argument("--draw", type=Path, help="data to draw, instead of training")
    parser.add_argument("given", nargs="*", help="arguments of examples/train_llama.py")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.draw is None:
        result = trained(options.given)
        result["apart"] = apart(result)
        written(result, options.out / f"{options.name}.json")
    else:
        result = json.loads(options.draw.read_text(encoding="utf-8"))
    for mode, found in apart(result).items():
        for attention, facts in found.items():
            print(f"{mode}, {attention}: {json.dumps(facts)}")
    try:
        drawn(result, options.out / f"{options.name}.svg")
    except ImportError as error:
        raise SystemExit(f"training_curves: no picture without matplotlib ({error}): pip install '.[bench]'") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
