"""examples/ run as they stand, each in a process of its own; what they print is right."""

import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from places import ROOT

import portattn
from portattn.worker.own_kernels import load

EXAMPLES = ROOT / "examples"
EXPECTED = {
    "compare_with_sdpa.py": ["causal, GQA: True", "top-left: True", "mask: True", "LSE: (2, 8, 64)"],
    "context_parallel.py": ["ring: out True, gradient True", "ulysses: out True, gradient True"],
    "generate.py": ["prompt: (2, 8, 17, 64) True", "token 0: [18, 10] True", "token 3: [21, 13] True"],
    "replace_sdpa.py": ["layer: True portattn", "because query is torch.float64", "flash kernel: True portattn"],
    "serve_pages.py": ["warmed up: ['", "prepared: True", "path: "],
    "serve_quantised.py": ["bf16          1024            0 of 512  - - - - - - - -", "e4m3           576  ", "int8 "],
    "torch_context_parallel.py": ["the same: True"],
    "train_llama.py": ["plain, eager: loss 2.692 -> 0.9", "plain, portattn: loss 2.692 -> 0.9", "and eager at most "],
    "train_llama_parallel.py": ["rank 0 of 2 has rows 0 to 63, 32 of 64", "alike: True, falling: True"],
    "which_path.py": ["attention q (1,8,128,64)", "cuda:sm_90: gluon_forward", "rocm:gfx942: triton; quirks: rocm-"],
}


def test_every_example_is_run_and_on_the_page() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name})" in page for name in EXPECTED)


@pytest.mark.on_device
@pytest.mark.parametrize("name", EXPECTED)
def test_an_example_runs(name: str) -> None:
    if name == "torch_context_parallel.py" and not torch.__version__.startswith(("2.11", "2.13")):
        pytest.skip("private names of another release of torch")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["OMP_NUM_THREADS"] = "1"  # as in this process: threads of tests side by side wait for each other
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)], env=environment, capture_output=True, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in EXPECTED[name]:
        assert line in done.stdout


def test_the_arguments_of_other_libraries_are_ours() -> None:
    page = (EXAMPLES.parent / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("|") and "---" not in line]
    given = {name for row in rows for name in re.findall(r"`(\w+)(?:=|`)", row)}
    operations = ("attention", "varlen_attention", "decode_attention", "paged_attention", "merge_states",
                  "mla_attention", "indexer_logits")  # fmt: skip
    known = {name for op in operations for name in inspect.signature(getattr(portattn, op)).parameters}
    words = {"None", "prepare", "run", "append_kv", "write_pages", *operations}  # a value, and functions
    assert given - words <= known, sorted(given - words - known)
    assert {"causal", "mask", "bias", "scale", "window", "seqlens_k", "page_table"} <= given


# examples/serve_quantised.py: what its caches hold, and that a token by itself finds what the whole prompt finds.
FILE = ROOT / "examples" / "serve_quantised.py"
example = load(str(FILE))
LENGTHS = (20, 3, 17)


def cache(name):
    torch.manual_seed(1)
    return example.Cache(example.FORMATS[name], len(LENGTHS), 24, "cpu")


def rows():
    sequences = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return sequences, torch.cat([torch.arange(length) for length in LENGTHS])


@pytest.mark.parametrize("name", example.FORMATS)
def test_a_cache_holds_what_is_written(name):
    """As close as the format can be, at the page and place of each token; no other place is touched."""
    made, (sequences, positions) = cache(name), rows()
    values = torch.randn(2, len(positions), example.KV_HEADS, example.WIDTH).bfloat16()
    made.write(2, values, sequences, positions)
    assert sorted(made.table.flatten().tolist()) == list(range(made.table.numel()))
    given = made.arguments(2, torch.tensor(LENGTHS))
    for pages, scales, expected in (
        (given["k_pages"], given.get("k_scale"), values[0]),
        (given["v_pages"], given.get("v_scale"), values[1]),
    ):
        if name == "int4":  # the lower four bits first; a scale's last hexadecimal digit is the number for 0
            word = scales.contiguous().view(torch.int32)
            codes = torch.stack((pages % 16, pages // 16), dim=-1).flatten(-2).float()
            wide = (codes - (word % 16)[..., None]) * (word - word % 16).view(torch.float32)[..., None]
        else:
            wide = pages.float() if scales is None else pages.float() * scales[..., None]
        found = torch.stack(
            [
                wide[made.table[b, p // example.PAGE], p % example.PAGE]
                for b, p in zip(sequences.tolist(), positions.tolist(), strict=True)
            ]
        )
        peak = expected.float().abs().amax(-1, keepdim=True)
        step = {"bf16": 0.0, "e4m3": 2.0**-4, "int8": 0.51 / 127, "int4": 2 * 0.51 / 15}[name]
        assert bool(((found - expected.float()).abs() <= step * peak).all())
        assert int((pages.float().abs().sum((-1, -2)) != 0).sum()) == len(positions)
    assert not made.numbers[:, [0, 1, 3]].float().any()


def test_bytes_of_a_token():
    """Four layers of two heads of 32 columns, K and V; a float32 for each head beside narrow ones."""
    assert [cache(name).bytes_per_token for name in example.FORMATS] == [
        4 * 2 * 2 * 32 * 2, 4 * 2 * 2 * 36, 4 * 2 * 2 * 36, 4 * 2 * 2 * 20,
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "most"), [("bf16", 0.06), ("e4m3", 0.2), ("int8", 0.1), ("int4", 1.0)])
def test_tokens_one_by_one_are_as_the_whole_prompt(name, most):
    """Every format's logits stay near the ones that the whole prompt has over bf16; a wrong scale or page does not."""
    torch.manual_seed(0)
    model = example.Model("cpu")
    tokens = torch.randint(example.VOCABULARY, (sum(LENGTHS),))
    sequences, positions = rows()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    packed = {"cu_seqlens_q": torch.tensor([0, 20, 23, 40], dtype=torch.int32), "max_seqlen_q": 20}
    with torch.no_grad():
        whole = model.logits(tokens, sequences, positions, cache("bf16"), lengths, packed).float()
        made = cache(name)
        for place in range(3):  # the shortest has three
            rows_ = torch.tensor([place, 20 + place, 23 + place])
            each = torch.arange(3)
            at = torch.full((3,), place)
            one = model.logits(tokens[rows_], each, at, made, (at + 1).int(), {}).float()
            assert float((one - whole[rows_]).abs().max()) < most, place
    assert float(whole.std()) > 0.8


def test_what_is_compared():
    expected = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    found = torch.tensor([[1, 2, 3], [4, 0, 6], [7, 8, 0]])
    assert example.compared(found, expected) == {"differ": 2, "first": 1, "first_of_each": [None, 1, 2]}
    assert example.compared(expected, expected) == {"differ": 0, "first": None, "first_of_each": [None] * 3}


def run(*arguments):
    return subprocess.run(
        [sys.executable, str(FILE), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_json_and_bad_arguments():
    done = run("--tokens", "2", "--json", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["cache"] for row in document["caches"]] == list(example.FORMATS)
    assert document["caches"][0]["differ"] == 0
    for row in document["caches"]:
        assert row["tokens"] == 2 * len(example.PROMPTS)
        assert row["path"]
        assert (row["differ"] == 0) == (row["first"] is None)
    wrong = run("--tokens", "0")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--tokens is 0, but must be in 1..4096" in wrong.stderr
