"""Processes of one process group: a program of the test's runs in each of them.

    python ranks.py MODULE RANKS FOLDER FUNCTION…

One process imports everything and is then forked, since importing torch costs more than most of the programs do.
FUNCTION(rank, ranks, folder) runs in each rank, with gloo and the time-out that it has as an attribute, and what it
returns is written to FOLDER/FUNCTION/rank.json. Several functions run side by side, each in processes of its own."""

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

TIMEOUT = 60  # seconds, of a process group whose program has none of its own


def run(module: str, ranks: int, folder: Path, *functions: str, timeout: float = 240) -> dict[str, dict[int, Any]]:
    """By function: what it returned in each rank; where it raised, {"error": its traceback}. A killed rank has none."""
    here = Path(__file__).parent
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(here), str(here.parent), *sys.path]))
    environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    done = subprocess.run([sys.executable, __file__, module, str(ranks), str(folder), *functions], env=environment,
        capture_output=True, text=True, timeout=timeout)  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[int, Any]] = {function: {} for function in functions}
    for function, by_rank in found.items():
        for path in sorted((folder / function).glob("*.json")):
            by_rank[int(path.stem)] = json.loads(path.read_text(encoding="utf-8"))
    errors = [rank["error"] for by_rank in found.values() for rank in by_rank.values() if "error" in rank]
    assert not errors, errors[0]
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


def main(module: str, ranks: int, folder: Path, functions: list[str]) -> None:
    importlib.import_module(module)
    children = []
    for function in functions:
        (folder / function).mkdir()
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    _in_rank(module, function, rank, ranks, folder / function)
                finally:
                    os._exit(0)
            children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
