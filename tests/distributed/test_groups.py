"""Process groups: what is kept of them, what is sent before the first message, which kinds of calls are remembered."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from portattn.distributed import context_parallel, groups, parallel

FILES = Path("/proc/self/fd")
ROWS, PACKED = torch.ones(1, 2, 8, 8), torch.ones(8, 2, 8)


def begin() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[groups.Ranks]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    begin()
    yield groups.Ranks.of_group(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.skipif(not FILES.exists(), reason="/proc/self/fd is Linux's")
def test_a_destroyed_group_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    counts = []
    for _ in range(6):  # the first one loads what stays
        begin()
        context_parallel().attention(ROWS, ROWS, ROWS)
        dist.destroy_process_group()
        counts.append(len(os.listdir(FILES)))
    assert counts[1] == counts[-1], counts


def test_a_made_group_is_kept_as_long_as_its_own(group: groups.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of NCCL, which has no messages from host to host."""
    monkeypatch.setattr(groups, "_has_host_messages", lambda group: False)
    made = groups.control_group(group)
    assert made is not group.group
    assert groups.control_group(group) is made
    other = groups.Ranks.of_group(dist.new_group([0]), "other")
    groups.control_group(other)
    before = len(groups._made)
    dist.destroy_process_group(other.group)
    del other
    assert len(groups._made) == before - 1


def test_one_collective_before_the_first_message(group: groups.Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: sent.append((tensor.device.type, group)))
    groups.connect(group, torch.device("cpu"))
    assert sent == []
    for _ in range(2):
        groups.connect(group, torch.device("meta"))
    assert sent == [("meta", group.group)]


@pytest.mark.parametrize("check", ["always", "first"])
def test_kinds_of_calls_do_not_add_up(group: groups.Ranks, monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    monkeypatch.setattr(parallel, "_KINDS", 3)
    shared = context_parallel(check=check)
    for last in range(1, 9):
        shared.varlen_attention(PACKED, PACKED, PACKED, (0, last))
        assert len(shared._seen) <= (3 if check == "first" else 0)
