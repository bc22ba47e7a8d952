"""Find portattn's worker near this folder, so that any Python with Triton runs a probe."""

import importlib.util
import sys
from pathlib import Path


def _worker() -> None:
    """Make `portattn.worker` importable without portattn itself, which needs torch."""
    if "portattn" in sys.modules:
        return  # in a worker, which has seen to it
    here = Path(__file__).resolve().parent
    # In a checkout quirks/ lies beside portattn/, in an installed package inside it.
    package = next(p for p in (here.parent.parent / "portattn", here.parent.parent) if (p / "worker").is_dir())
    spec = importlib.util.spec_from_file_location("serve", package / "worker" / "serve.py")
    assert spec is not None
    assert spec.loader is not None
    serve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    serve.import_without_package()


_worker()

from portattn.worker.probe_harness import EMULATED, LOWERED, RUNS, Bench, BugFound, Code, Missing, main  # noqa: E402

__all__ = ["EMULATED", "LOWERED", "RUNS", "Bench", "BugFound", "Code", "Missing", "main"]
