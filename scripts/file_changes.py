"""Count how often a first `attention` call on an H100 goes from one file of the library into another.

    python scripts/file_changes.py

The launches are recorded by tests/fakedriver.py, so no device is needed; kernels are compiled in a child process, which
is not counted. Prints JSON: `changes`, calls from a function in one file to one in another; `calls`, all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OWN = tuple(str(ROOT / folder) + os.sep for folder in ("portattn", "backends"))


def _counted() -> dict[str, int]:
    """In a process that has the recording driver."""
    import fakechip
    import torch

    import portattn

    fakechip.pretend()
    changes = calls = 0

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal changes, calls
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(OWN):
            return
        calls += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(OWN):
            caller = caller.f_back
        changes += caller is not None and caller.f_code.co_filename != file

    q, k = torch.zeros(2, 8, 512, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 512, 128, dtype=torch.bfloat16)
    with portattn.settings(canary="never"):
        sys.setprofile(seen)
        portattn.attention(q, k, k.clone(), causal=True)
        sys.setprofile(None)
    return {"changes": changes, "calls": calls}


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import fakedriver

    if "inside" in sys.argv:
        fakedriver.install()
        print(json.dumps(_counted()))
        return
    [triton] = [folder for version, folder in fakedriver.triton_folders().items() if version == "3.6.0"]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        fakedriver.build(folder, triton / "backends" / "nvidia" / "include")
        (folder / "site").mkdir()
        (folder / "site" / "triton").symlink_to(triton)
        path = os.pathsep.join(map(str, (folder / "site", ROOT / "tests", ROOT)))
        own = {"PYTHONPATH": path, "PORTATTN_CACHE_DIR": str(folder / "portattn")} | fakedriver.environment(folder)
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        subprocess.run([sys.executable, __file__, "inside"], env=inherited | own, check=True)


if __name__ == "__main__":
    main()
