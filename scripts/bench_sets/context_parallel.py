"""The set `context-parallel`: attention over several GPUs of one host, in processes of their own, one a rank."""

import datetime
import functools
import json
import math
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import context_parallel_cases
import context_parallel_ranks
import torch
import torch.distributed as dist

from portattn.tools.bench.workloads import Measure, Row

# correctness: whose processes are many
PARTS = {"correctness": None, "attention": context_parallel_ranks.attention, "decode": context_parallel_ranks.decode}
WARM = ("one forward", "one backward", "ring forward", "ring backward")
# Of the seconds of --budget, how many a part may take at most.
SHARES = {"correctness": 0.35, "attention": 0.6, "decode": 0.4}
TIMEOUT = 100  # seconds, of a process group
APART = 0.01  # ||ours - one GPU's|| / ||one GPU's||, of bf16 results; gradients round more often
GRADIENTS_APART = 0.02
BUDGET = 400.0  # seconds for all parts, compilation included, without --budget


@dataclass(frozen=True)
class Host:
    ranks: int
    device: str
    small: bool
    only_nccl: bool = False  # a process group of NCCL alone, without gloo


def context_parallel(measure: Measure) -> Iterator[Row]:
    """Attention over several GPUs of one host: correctness first, then times, memory and rates.

    Each part runs in processes of its own, one a rank, over NCCL (gloo on a CPU). The cases of the part "correctness"
    run side by side, beside processes that compile what is timed later. Times are of one host's GPUs against one of
    them, which has the whole problem: causal bf16 attention of 64k and 128k tokens, forward and backward, as a ring, by
    Ulysses, and by torch's own context_parallel; decoding of a cache of a million tokens, also from a CUDA graph.
    Contenders take turns in one process, and only ratios of one run compare."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # all messages are of one host
    host = Host(measure.ranks, measure.device, measure.tiny)
    begin = time.monotonic()
    budget = BUDGET if math.isinf(measure.end) else measure.end - begin
    with tempfile.TemporaryDirectory() as folder:
        for part in (part for part in PARTS if measure.only in part):
            now = time.monotonic()
            until = min(begin + budget - 5, now + SHARES[part] * budget)
            if until - now < 10:
                measure.left.append(part)
                continue
            if part == "correctness":
                found = correctness(host, Path(folder), until)
            else:
                done = Job(part, PARTS[part], host, Path(folder), until).wait()
                found = done["result"] or {}
                if done["errors"]:
                    found["failed ranks"] = done["errors"]
            wrong = wrong_in(part, found) if found.keys() != {"failed ranks"} else [str(found["failed ranks"])]
            note = "; ".join(wrong or summary(found))
            yield {"case": part, "right": not wrong, "note": note, **found}


class Job:
    """One process a rank: `what` runs in each, and its results are JSON in a folder."""

    def __init__(self, name: str, what: Any, host: Host, folder: Path, until: float) -> None:
        self.name, self.until = name, until
        self._folder = folder / name.replace(" ", "_").replace(",", "")
        self._folder.mkdir()
        self._children: dict[int, int] = {}
        for rank in range(host.ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    in_rank(rank, what, host, self._folder, until)
                    status = 0
                finally:
                    os._exit(status)
            self._children[rank] = child

    def wait(self) -> dict[str, Any]:
        """Return {"rank 0": its result, "errors": by rank}; late processes are killed."""
        errors: dict[int, str] = {}
        waiting, ended = dict(self._children), 0.0
        while waiting:
            for rank, child in list(waiting.items()):
                if os.waitpid(child, os.WNOHANG)[0]:
                    del waiting[rank]
                    error = self._folder / f"{rank}.error"
                    if error.exists() or not (self._folder / f"{rank}.json").exists():
                        text = error.read_text(encoding="utf-8") if error.exists() else "ended without a result"
                        errors[rank] = text[-1500:]
                        ended = ended or time.monotonic() + 5  # the others cannot go on without it
            if waiting and (time.monotonic() > self.until + 10 or (ended and time.monotonic() > ended)):
                for rank, child in waiting.items():
                    os.kill(child, signal.SIGKILL)
                    errors.setdefault(rank, "was ended: too late, or another rank had failed")
                ended = self.until = time.monotonic() + 1e9
            time.sleep(0.05)
        first = self._folder / "0.json"
        if not first.exists():
            first = self._folder / "0.so_far"
        found = json.loads(first.read_text(encoding="utf-8")) if first.exists() else None
        return {"result": found, "errors": errors}


def in_rank(rank: int, what: Any, host: Host, folder: Path, until: float) -> None:
    try:
        cuda = host.device == "cuda"
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), host.ranks)
        backend = ("nccl" if host.only_nccl else "cpu:gloo,cuda:nccl") if cuda else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=host.ranks, timeout=datetime.timedelta(seconds=TIMEOUT),
            device_id=device if cuda else None,
        )  # fmt: skip
        run = context_parallel_ranks.Run(rank, host.ranks, device, host.small, until, folder / f"{rank}.so_far")
        found = what(run)
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    dist.barrier()


def correctness(host: Host, folder: Path, until: float) -> dict[str, Any]:
    jobs = []
    if host.device == "cuda":
        for what in WARM:
            warming = functools.partial(context_parallel_ranks.warm, what=what)
            jobs.append(Job(f"warm {what}", warming, host, folder, until))
    named: dict[str, list[str]] = {}
    ended: dict[str, Any] = {}
    for place, names in enumerate(context_parallel_cases.groups()):
        mine = replace(host, only_nccl=place % 2 == 1)
        cases_of = functools.partial(context_parallel_cases.run, names)
        job = Job(f"cases {place}", cases_of, mine, folder, until)
        named[job.name] = names
        jobs.append(job)
        if host.device == "cpu":  # one after the other
            ended[job.name] = job.wait()
    cases: dict[str, Any] = {}
    failed = {}
    for job in jobs:
        found = ended.get(job.name) or job.wait()
        if found["errors"]:
            failed[job.name] = found["errors"]
        for name in named.get(job.name, ()):
            cases[name] = (found["result"] or {}).get(name, ["did not end"])
    return {"cases": cases, "failed ranks": failed}


def wrong_in(part: str, found: dict[str, Any]) -> list[str]:
    """Return the reasons for exit status 1."""
    wrong = [f"{name}: {text}" for name, text in found.get("failed ranks", {}).items()]
    if part == "correctness":
        return wrong + [f"{name}: {'; '.join(text)}" for name, text in found["cases"].items() if text]
    for name, one in found.get("shapes", {}).items():
        for which, apart in one["apart"].items():
            limit = GRADIENTS_APART if "grad" in which else APART
            if not apart <= limit:
                wrong.append(f"{name}: {which} is {apart:.2g} apart")
    if part == "decode":
        wrong += [f"{name} is {apart:.2g} apart" for name, apart in found["apart"].items() if not apart <= APART]
        same = found.get("graph has the same bits", {})
        wrong += [f"{name}: the graph gives other bits" for name, is_same in same.items() if not is_same]
    return wrong


def summary(found: dict[str, Any]) -> list[str]:
    """Return a part's findings, in lines: how many cases are right, or times beside one GPU's."""
    if "cases" in found:
        cases = found["cases"].values()
        return [f"{sum(not wrong for wrong in cases)} of {len(cases)} cases in their budget"]
    lines = []
    for name, times in found.get("shapes", {"decode": {"times": found}}).items():
        for phase in ("forward", "backward", "eager", "graph"):
            contenders = times["times"].get(phase, {})
            told = [f"{who} {one['ms']:.4g} ms" for who, one in contenders.items()]
            lines += [f"{name}, {phase}: {', '.join(told)}"] if contenders else []
    return lines
