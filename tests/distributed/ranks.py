"""Processes of one process group: a program of the test's runs in each of them.

    python ranks.py MODULE FUNCTION RANKS FOLDER

One process imports everything and is then forked, since importing torch costs more than most of the programs do.
FUNCTION(rank, ranks, folder) runs in each rank, with gloo and a time-out of a few seconds, and what it returns is
written to FOLDER/rank.json.
"""

from __future__ import annotations

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TIMEOUT = 60  # seconds, of the process group, unless a program has it otherwise


def run(module: str, function: str, ranks: int, folder: Path, timeout: float = 240) -> dict[int, Any]:
    """What each rank's program returned; of one that raised, {"error": its traceback}. A killed rank has none."""
    here = Path(__file__).parent
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent), *sys.path]))
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run(
        [sys.executable, __file__, module, function, str(ranks), str(folder)],
        env=environment, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for rank in range(ranks):
        path = folder / f"{rank}.json"
        if path.exists():
            found[rank] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _in_rank(module: str, function: str, rank: int, ranks: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    program = getattr(importlib.import_module(module), function)
    timeout = datetime.timedelta(seconds=getattr(program, "timeout", TIMEOUT))
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        found = program(rank, ranks, folder)
    except BaseException:  # noqa: BLE001 - the test shows it
        found = {"error": traceback.format_exc()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def main(module: str, function: str, ranks: int, folder: Path) -> None:
    importlib.import_module(module)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            try:
                _in_rank(module, function, rank, ranks, folder)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
