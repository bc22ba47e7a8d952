"""The backends' names in a process that reads a pickled configuration before it loads plug-ins, as engines do."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
from vllm.config.attention import AttentionConfig
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from portattn.integrations import vllm as integration

NAMES = [integration.NAME, integration.MLA_NAME]
CHILD = """
import pickle, sys
found = pickle.load(sys.stdin.buffer)
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.registry import AttentionBackendEnum
load_general_plugins()
for config in found:
    assert config.backend is AttentionBackendEnum[config.backend.name], config
    print(config.backend.name, config.backend.get_path())
"""

load_general_plugins()


@pytest.mark.engine_feature("an engine process that is spawned")
def test_a_new_process_reads_the_configuration() -> None:
    """By the pickler of multiprocessing's spawn, which vLLM starts its engine with."""
    pickled = bytes(ForkingPickler.dumps([AttentionConfig(backend=name) for name in NAMES]))
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD], input=pickled, capture_output=True, timeout=300, check=False
    )
    assert child.returncode == 0, child.stderr.decode()[-3000:]
    printed = child.stdout.decode().splitlines()
    expected = [f"{name} {AttentionBackendEnum[name].get_path()}" for name in NAMES]
    assert [line for line in printed if line.startswith("PORTATTN")] == expected


@pytest.mark.parametrize("name", NAMES)
def test_copies_are_the_member(name: str) -> None:
    member = AttentionBackendEnum[name]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(member, protocol)) is member
    assert pickle.loads(pickle._dumps(member)) is member  # the pickler in Python, which others derive from
    assert copy.copy(member) is member
    assert copy.deepcopy({member: [member]}) == {member: [member]}
    config = copy.deepcopy(AttentionConfig(backend=name))
    assert config.backend is member
    integration.register()
    assert AttentionBackendEnum[name] is member
    other = AttentionBackendEnum["TRITON_ATTN"]
    assert pickle.loads(pickle.dumps(other)) is other
