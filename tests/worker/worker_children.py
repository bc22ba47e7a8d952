"""The child that a worker has now, for tests of workers."""

from pathlib import Path

from portattn.worker.client import Worker

SECONDS = 120.0  # for what should take a few


def process_of(worker: Worker) -> int:
    return worker._child.process.pid


def folder_of(worker: Worker) -> Path:
    return Path(worker._child.folder)


def running(worker: Worker) -> bool:
    return worker._child is not None and not worker._child.ended()


def gone(process: int) -> bool:
    return not Path(f"/proc/{process}").exists()
