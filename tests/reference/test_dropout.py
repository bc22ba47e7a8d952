"""Philox and the dropout mask: known answers, Triton's own generator, blocks of one mask, the public function."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import no_interpreter

from portattn.api.masks import dropout_mask
from portattn.errors import ArgumentError
from portattn.reference import dropout
from portattn.reference.dropout import block_mask, keep_mask, philox, philox_of_two, threshold

# Counter, key and words: the known answers for philox4x32-10 of Random123 (kat_vectors), the authors' own library.
# curand's Philox4_32_10 is the same generator. The last one's input is the digits of π.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
# The same for philox2x32-10.
KNOWN_OF_TWO = [
    ("00000000 00000000", "00000000", "ff1dae59 6cd10df2"), ("ffffffff ffffffff", "ffffffff", "2c3f628b ab4fd7ad"),
    ("243f6a88 85a308d3", "13198a2e", "dd7ce038 f62a4c12"),
]  # fmt: skip


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def signed(number: int, bits: int) -> int:
    return number - (1 << bits) if number >> (bits - 1) else number


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    low, high = words(key)
    seed = torch.tensor([signed(low | high << 32, 64)])
    found = philox(seed, *(torch.tensor([word]) for word in words(counter)))
    assert [int(word) for word in found] == words(expected)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_OF_TWO)
def test_known_answers_of_two_words(counter: str, key: str, expected: str) -> None:
    found = philox_of_two(torch.tensor(words(key)), *(torch.tensor([word]) for word in words(counter)))
    assert [int(word) for word in found] == words(expected)


def in_python(seed: int, head: int, row: int, key: int) -> int:
    """The 16 bits that decide about a score, in Python's integers."""
    of_head, turn, _, _ = philox_in_python(seed, [head, 0, 0, 0])
    c, k = [key // 16 * 8 + key % 8, (row // 16 * 8 + row % 8) ^ turn], of_head
    for _ in range(10):
        product = c[0] * 0xD256D193
        c, k = [product >> 32 ^ k ^ c[1], product & dropout.WORD], (k + 0x9E3779B9) & dropout.WORD
    return c[row // 8 % 2] >> 16 * (key // 8 % 2) & 0xFFFF


def philox_in_python(seed: int, counter: list[int]) -> list[int]:
    c, k = list(counter), [seed & dropout.WORD, seed >> 32 & dropout.WORD]
    for _ in range(10):
        first, third = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [third >> 32 ^ c[1] ^ k[0], third & dropout.WORD, first >> 32 ^ c[3] ^ k[1], first & dropout.WORD]
        k = [(k[0] + 0x9E3779B9) & dropout.WORD, (k[1] + 0xBB67AE85) & dropout.WORD]
    return c


@pytest.mark.interpreter
@pytest.mark.skipif(bool(no_interpreter()), reason=no_interpreter())
def test_words_are_tritons(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for seed in (0, 7, -1, 2**63 - 1, -(2**63), 0x0123456789ABCDEF):
        counters = torch.randint(-(2**31), 2**31, (4, 100), generator=generator).int()
        counters[:, :8] = torch.arange(32).view(4, 8)
        key = torch.tensor([seed])
        torch.save((key, counters), tmp_path / "in.pt")
        child = Path(__file__).with_name("philox_child.py")
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, str(child), str(tmp_path / "in.pt"), str(tmp_path / "out.pt")]
        subprocess.run(command, env=environment, check=True, timeout=120)
        theirs = torch.load(tmp_path / "out.pt") & dropout.WORD
        assert torch.equal(torch.stack(philox(key, *(counters.long() & dropout.WORD))), theirs), seed


@pytest.mark.parametrize("elements", [1, 7, 50, 10**6])
def test_a_mask_is_the_same_in_any_parts(monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Element by element as Python's integers say, whatever is made at a time, and in a block of its own."""
    seed, p, batch, heads, rows, keys = torch.tensor([-12345678901234567]), 0.3, 2, 3, 18, 27
    monkeypatch.setattr(dropout, "CPU_ELEMENTS", elements)
    mask = block_mask(seed, p, batch, heads, range(rows), range(keys))
    expected = [
        in_python(int(seed), bh, i, j) >= round(p * 2**16)
        for bh in range(batch * heads) for i in range(rows) for j in range(keys)
    ]  # fmt: skip
    assert mask.flatten().tolist() == expected
    assert torch.equal(mask[:, :, 2:17, 3:], block_mask(seed, p, batch, heads, range(2, 17), range(3, keys)))
    scattered = keep_mask(seed, p, torch.tensor(5), torch.tensor([17, 0])[:, None], torch.tensor([26, 1]))
    assert torch.equal(scattered, mask[1, 2][[17, 0]][:, [26, 1]])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for(p: float) -> None:
    """Within five standard deviations of a binomial distribution, and rows, keys and heads apart from each other."""
    mask = block_mask(torch.tensor([3]), p, 2, 4, range(128), range(130))
    dropped, count = int((~mask).sum()), mask.numel()
    assert abs(dropped - p * count) <= 5 * math.sqrt(count * p * (1 - p))
    if p:
        for axis in range(4):
            if p == 0.5:  # neighbours agree as often as not
                assert 0.4 < float((mask.narrow(axis, 0, 1) == mask.narrow(axis, 1, 1)).double().mean()) < 0.6
        assert not torch.equal(mask, block_mask(torch.tensor([4]), p, 2, 4, range(128), range(130)))


def test_thresholds() -> None:
    assert threshold(0.0) == 0
    assert threshold(0.5) == 2**15
    assert threshold(2.0**-16) == 1
    assert threshold(2.0**-18) == 0
    assert threshold(1.0 - 2.0**-53) == 2**16
    assert not block_mask(torch.tensor([1]), 1.0 - 2.0**-53, 1, 1, range(9), range(9)).any()


def test_the_public_function() -> None:
    expected = block_mask(torch.tensor([-5]), 0.25, 2, 3, range(4), range(6))
    found = dropout_mask(-5, 0.25, 2, 3, 4, 6)
    assert found.dtype is torch.bool
    assert found.shape == (2, 3, 4, 6)
    assert torch.equal(found, expected)
    assert torch.equal(dropout_mask(torch.tensor([-5]), 0.25, 2, 3, 4, 6, device="cpu"), expected)
    assert torch.equal(dropout_mask(-5, 0.25, 3, 3, 9, 9)[:2, :, :4, :6], expected)
    assert dropout_mask(1, 0.5, 2, 0, 4, 6).shape == (2, 0, 4, 6)
    assert dropout_mask(1, 0.5, 2, 3, 4, 6, device="meta").device.type == "meta"


@pytest.mark.parametrize(
    ("changed", "argument"),
    [
        ({"seed": 2**63}, "seed"), ({"seed": -(2**63) - 1}, "seed"), ({"seed": True}, "seed"), ({"seed": 1.0}, "seed"),
        ({"seed": torch.tensor(5)}, "seed"), ({"seed": torch.tensor([5], dtype=torch.int32)}, "seed"),
        ({"dropout_p": 1.0}, "dropout_p"), ({"dropout_p": -0.1}, "dropout_p"),
        ({"dropout_p": float("nan")}, "dropout_p"), ({"batch": -1}, "batch"), ({"heads": 2.0}, "heads"),
        ({"seq_q": True}, "seq_q"), ({"seq_k": 2**31}, "seq_k"), ({"device": "no such device"}, "device"),
        ({"device": 1.5}, "device"),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_public_function_refuses(changed: dict, argument: str) -> None:
    good = {"seed": 1, "dropout_p": 0.5, "batch": 1, "heads": 1, "seq_q": 2, "seq_k": 2}
    with pytest.raises(ArgumentError) as caught:
        dropout_mask(**good | changed)
    assert (caught.value.op, caught.value.argument) == ("dropout_mask", argument)
