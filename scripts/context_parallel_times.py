"""Attention over several GPUs of one host: correctness first, then times, memory, rates and a timeline.

    python scripts/context_parallel_times.py --out cp.json --timeline cp-timeline.json --budget 400
    python scripts/context_parallel_times.py --small --device cpu --out cp.json     # gloo, small sizes, minutes
    python scripts/context_parallel_times.py --part attention --part decode --out cp.json

Each part runs in processes of its own, one a rank, over NCCL (gloo on a CPU). The cases of the part "correctness" run
side by side, beside processes that compile what is timed later. Times are of one host's GPUs against one of them, which
has the whole problem: causal bf16 attention of 64k and 128k tokens, forward and backward, as a ring, by Ulysses, and by
torch's own context_parallel; decoding of a cache of a million tokens, also from a CUDA graph; a Llama of 1.2 B
parameters at 64k tokens. Contenders take turns in one process, and only ratios of one run say anything.

What a part found is written to --out as soon as it is there. Parts that --budget leaves no time for are named. The exit
status is 1 when a case broke its error budget, or a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import context_parallel_cases
import context_parallel_more
import context_parallel_ranks
import torch
import torch.distributed as dist
from context_parallel_run import Run

PARTS: dict[str, Any] = {
    "correctness": None,  # whose processes are many
    "gone": context_parallel_more.gone, "attention": context_parallel_ranks.attention,
    "decode": context_parallel_more.decode, "timeline": context_parallel_more.timeline,
    "llama": context_parallel_more.llama,
}  # fmt: skip
WARM = ("one forward", "one backward", "ring forward", "ring backward")
# Of the seconds of --budget, how many a part may take at most.
SHARES = {"correctness": 0.35, "gone": 0.15, "attention": 0.5, "decode": 0.25, "timeline": 0.2, "llama": 0.4}
TIMEOUT = 100  # seconds, of a process group
APART = 0.01  # ||ours - one GPU's|| / ||one GPU's||, of bf16 results; gradients round more often
GRADIENTS_APART = 0.02


class Job:
    """One process a rank: `what` runs in each, and its results are JSON in a folder."""

    def __init__(self, name: str, what: Any, options: argparse.Namespace, folder: Path, until: float) -> None:
        self.name, self.until = name, until
        self._folder = folder / name.replace(" ", "_").replace(",", "")
        self._folder.mkdir()
        self._children: dict[int, int] = {}
        for rank in range(options.ranks):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    in_rank(rank, what, options, self._folder, until)
                    status = 0
                finally:
                    os._exit(status)
            self._children[rank] = child

    def wait(self) -> dict[str, Any]:
        """{"rank 0": its result, "errors": by rank}; processes that are late are ended."""
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


def in_rank(rank: int, what: Any, options: argparse.Namespace, folder: Path, until: float) -> None:
    import datetime

    try:
        cuda = options.device == "cuda"
        device = torch.device("cuda", rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), options.ranks)
        backend = ("nccl" if options.only_nccl else "cpu:gloo,cuda:nccl") if cuda else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=options.ranks, timeout=datetime.timedelta(seconds=TIMEOUT),
            device_id=device if cuda else None,
        )  # fmt: skip
        run = Run(rank, options.ranks, device, options.small, until, folder / f"{rank}.so_far")
        found = what(run)
        (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    dist.barrier()


def correctness(options: argparse.Namespace, folder: Path, until: float) -> dict[str, Any]:
    """By case, what is wrong with it, or that it failed."""
    jobs = []
    if options.device == "cuda":
        for what in WARM:
            jobs.append(Job(f"warm {what}", lambda run, what=what: context_parallel_ranks.warm(run, what), options,
                            folder, until))  # fmt: skip
    named: dict[str, list[str]] = {}
    ended: dict[str, Any] = {}
    for place, names in enumerate(context_parallel_cases.groups()):
        mine = argparse.Namespace(**vars(options) | {"only_nccl": place % 2 == 1})
        job = Job(
            f"cases {place}",
            lambda run, names=names: context_parallel_cases.run(names, run.device),
            mine,
            folder,
            until,
        )
        named[job.name] = names
        jobs.append(job)
        if options.device == "cpu":  # one after the other
            ended[job.name] = job.wait()
    cases: dict[str, Any] = {}
    failed = {}
    for job in jobs:
        found = ended.get(job.name) or job.wait()
        if found["errors"]:
            failed[job.name] = found["errors"]
        for name in named.get(job.name, ()):
            cases[name] = (found["result"] or {}).get(name, ["did not end"])
    return {"cases": cases, "failed": failed}


def wrong_in(part: str, found: dict[str, Any]) -> list[str]:
    """What makes the exit status 1."""
    wrong = [f"{name}: {text}" for name, text in found.get("failed", {}).items()]
    if part == "correctness":
        return wrong + [f"{name}: {'; '.join(text)}" for name, text in found["cases"].items() if text]
    if part == "gone" and not found.get("raised"):
        wrong.append("a rank that was gone was not noticed")
    for name, one in found.get("shapes", {}).items():
        for which, apart in one["apart"].items():
            limit = GRADIENTS_APART if "grad" in which else APART
            if not apart <= limit:
                wrong.append(f"{name}: {which} is {apart:.2g} apart")
    if part == "decode":
        wrong += [f"{name} is {apart:.2g} apart" for name, apart in found["apart"].items() if not apart <= APART]
        same = found.get("graph has the same bits", {})
        wrong += [f"{name}: the graph gives other bits" for name, is_same in same.items() if not is_same]
    if part == "llama":
        losses = found["loss"]
        if not abs(losses["one"] - losses["several"]) <= 2e-3 * abs(losses["one"]):
            wrong.append(f"losses are {losses}")
    return wrong


def table(report: dict[str, Any]) -> str:
    """The figures, in short."""
    lines = []
    parts = report["parts"]
    if "correctness" in parts:
        cases = parts["correctness"].get("cases", {})
        lines.append(f"correctness: {sum(not text for text in cases.values())} of {len(cases)} cases in their budget")
    if parts.get("gone", {}).get("raised"):
        gone = parts["gone"]
        lines.append(f"a killed rank: {gone['raised']} after {gone['seconds']:.2f} s: {gone['text'][:100]}")
    for name, one in (parts.get("attention", {}).get("shapes") or {}).items():
        for phase, contenders in one["ms"].items():
            base = contenders["one"]
            ratios = ", ".join(f"{n} {ms:.2f} ms ({base / ms:.2f} ×)" for n, ms in contenders.items() if n != "one")
            model = one["model ms"][phase]
            lines.append(f"{name}, {phase}: one {base:.2f} ms, {ratios}; model {model:.2f} ms")
        memory = {which: f"{count / 2**20:.0f}" for which, count in one["memory"].items()}
        lines.append(f"  path {one['path']}, MiB beyond inputs {memory}, model {one['model ms']['memory'] / 2**20:.0f}")
        lines.append(f"  apart {one['apart']} {one['torch failed'] or ''}")
        lines.append(f"  ms of the host {one['host ms']}")
    if "rates" in parts.get("attention", {}):
        lines.append(f"rates: {parts['attention']['rates']}")
    decode = parts.get("decode", {})
    for kind in ("eager", "graph"):
        if kind in decode:
            base = decode[kind]["one"]["ms"]
            ratios = {n: f"{one['ms']:.4f} ms {base / one['ms']:.3f} ×" for n, one in decode[kind].items()}
            lines.append(f"decode, {kind}: {ratios}; model {decode.get('model ms', 0):.4f} ms")
    llama = parts.get("llama", {})
    for kind in ("forward", "step"):
        if kind in llama:
            one, several = llama[kind]["one"]["ms"], llama[kind]["several"]["ms"]
            lines.append(f"llama, {kind}: one {one:.1f} ms, several {several:.1f} ms ({one / several:.2f} ×)")
    if "loss" in llama:
        lines.append(f"llama: loss {llama['loss']}, memory {llama['memory']}, {llama.get('gradients apart')}")
    lines += [f"WRONG {part}: {text}" for part, texts in report["wrong"].items() for text in texts]
    if report["left out"]:
        lines.append(f"left out: {report['left out']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=400.0, help="seconds for all, compilation included")
    parser.add_argument("--ranks", type=int, default=2, help="processes; as many GPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see whether it runs")
    parser.add_argument("--part", action="append", choices=PARTS, help="can be repeated; all without it")
    parser.add_argument("--only-nccl", action="store_true", help="a process group of NCCL alone, without gloo")
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    parser.add_argument("--timeline", type=Path, help="JSON of what the GPUs did: scripts/timeline_picture.py draws it")
    parser.add_argument("--json", action="store_true", help="print the JSON as well, instead of the table")
    options = parser.parse_args(arguments)
    # Asking for GPUs must not start CUDA before the fork; and all messages are of one host.
    for name, value in (
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
        ("GLOO_SOCKET_IFNAME", "lo"),
        ("NCCL_SOCKET_IFNAME", "lo"),
    ):
        os.environ.setdefault(name, value)
    begin = time.monotonic()
    end = begin + options.budget
    parts = options.part or list(PARTS)
    report: dict[str, Any] = {"torch": str(torch.__version__), "ranks": options.ranks, "parts": {}, "wrong": {}}
    report["left out"] = []
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            now = time.monotonic()
            until = min(end - 5, now + SHARES[part] * options.budget)
            if until - now < 10:
                report["left out"].append(part)
                continue
            print(f"{now - begin:6.1f} s  {part}", file=sys.stderr, flush=True)
            if part == "correctness":
                found = correctness(options, Path(folder), until)
            else:
                done = Job(part, PARTS[part], options, Path(folder), until).wait()
                found = done["result"] or {}
                if done["errors"] and not found.get("raised"):
                    found["failed"] = done["errors"]
            if part == "timeline" and options.timeline is not None:
                options.timeline.write_text(json.dumps(found), encoding="utf-8")
                found = {name: value for name, value in found.items() if name != "ranks"}
            report["parts"][part] = found
            wrong = wrong_in(part, found) if found.keys() != {"failed"} else [str(found["failed"])]
            if wrong:
                report["wrong"][part] = wrong
            report["seconds"] = time.monotonic() - begin
            options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(json.dumps(report, indent=1) if options.json else table(report), flush=True)
    return int(bool(report["wrong"]))


if __name__ == "__main__":
    sys.exit(main())
