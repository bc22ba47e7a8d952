"""Run by rank_processes.py: imports once what ranks need, and forks them.

    python rank_server.py ADDRESS

It connects to ADDRESS and gets (world size, path of a file store). Each fork connects as well, says its rank, and
serves: it gets (function, arguments) and answers (whether it returned, its value or a traceback)."""

import importlib.util
import os
import sys
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import decode_ranks  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch_ranks  # noqa: E402, F401
from rank_processes import COLLECTIVE  # noqa: E402

import portattn  # noqa: E402
import portattn.distributed.decode  # noqa: E402


def main(address: str) -> None:
    if importlib.util.find_spec("transformers"):
        importlib.import_module("llama_ranks")
    torch.set_num_threads(1)  # a thread would not be there after the fork
    q = torch.zeros(1, 1, 1, 8)
    portattn.decode_attention(q, q, q, torch.ones(1, dtype=torch.int32), return_lse=True)
    with Client(address) as tests:
        while True:
            try:
                world_size, place = tests.recv()
            except EOFError:  # the tests are over
                return
            for rank in range(world_size):
                if os.fork() == 0:
                    tests.close()
                    with Client(address) as pipe:
                        pipe.send(rank)
                        serve(rank, world_size, place, pipe)
                    os._exit(0)


def serve(rank: int, world_size: int, place: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world_size, timeout=COLLECTIVE)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*arguments))
        except BaseException:  # noqa: BLE001 - told to the test, which raises
            answer = (False, traceback.format_exc())
        pipe.send(answer)


if __name__ == "__main__":
    main(sys.argv[1])
