"""Tab completion, asked for as a shell asks: of `python -m portattn`."""

import os
import subprocess
import sys

import pytest

from portattn.planning.registry import Registry
from portattn.schema.problem_limits import OPS


def entry(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "portattn", *arguments], env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def completed(*words: str, shell: str = "bash") -> list[str]:
    asked = {"COMP_WORDS": " ".join(["portattn", *words]), "COMP_CWORD": str(len(words))}
    if shell == "fish":
        asked["COMP_CWORD"] = words[-1]
    done = entry(_PORTATTN_COMPLETE=f"{shell}_complete", **asked)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [line.partition(",")[2].partition("\t")[0] for line in done.stdout.splitlines() if line]


def test_the_module_is_the_command():
    assert entry("--version").stdout.startswith("portattn, version ")
    failed = entry("plan")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.splitlines() == [f"portattn plan: Missing argument 'OP'. It is one of {', '.join(OPS)}"]


QUIRK = next(iter(Registry.load().quirks))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("p",), ["plan"]), (("plan", ""), list(OPS)), (("plan", "de"), ["decode_attention"]),
        (("plan", "--causal", "--lse", "de"), ["decode_attention"]), (("explain", "x"), []),
        (("plan", "attention", "--dtype", "b"), ["bf16"]),
        (("plan", "attention", "--target", "cuda", ":", "sm_9"), ["sm_90"]),
        (("plan", "attention", "--target", "=", "cuda:sm_9"), ["sm_90"]),
        (("plan", "attention", "--target", "hop"), ["hopper"]),
        (("matrix", "run", "--targets", "hopper,rdna3."), ["hopper,rdna3.5"]),
        (("plan", "attention", "--toolchain", "triton", "==", "3.6"), ["3.6.0"]),
        (("matrix", "run", "--targets", "rocm", ":", "gfx90a,cuda", ":", "sm_9"), ["sm_90"]),
        (("quirks", "show", QUIRK[:-1]), [QUIRK]), (("quirks", "why", "ascend910b2"), []),
        (("plan", "attention", "--quirks", f"+{QUIRK},-{QUIRK[:-1]}"), [f"+{QUIRK},-{QUIRK}"]),
        (("verify", "attention", "ml"), ["mla_attention"]),
    ],
)  # fmt: skip
def test_values_complete(words, found):
    assert completed(*words) == found


def test_other_shells_are_given_whole_values_and_what_they_are():
    assert completed("plan", "attention", "--target", "cuda:sm_9", shell="fish") == ["cuda:sm_90"]
