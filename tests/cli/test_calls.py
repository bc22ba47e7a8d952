"""Which children doctor's real calls run in."""

from __future__ import annotations

from portattn.cli import calls
from portattn.worker.client import Reply


def test_devices_are_called_in_a_child_that_compiles_kernels(monkeypatch):
    opened = []

    class Planted(calls.Worker):
        def __init__(self, *args, **fields):
            super().__init__(*args, **fields)
            opened.append(self)

        def request(self, task, seconds, **fields):
            return Reply(outcome="crash", kind="SIGSEGV", message="planted")

    monkeypatch.setattr(calls, "Worker", Planted)
    checks = calls.device_checks(5.0)
    assert opened
    assert [(worker.runs, worker.environment) for worker in opened] == [("kernels", {"TRITON_INTERPRET": None})] * len(
        opened
    )
    assert {(check.outcome, check.detail) for check in checks} == {("FAIL", "FAIL: crash: SIGSEGV: planted")}
