"""Public calls that Triton's interpreter carries out, by each release that this machine has, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import fakedriver
import pytest
from packaging.version import Version

TRITONS = fakedriver.triton_folders()


@pytest.mark.parametrize("release", ["3.2.0", "3.8.0", "3.9.0"])
def test_calls_are_right(release: str, tmp_path: Path) -> None:
    """3.9.0 refuses masks of int32, which it makes of a scalar's condition beside a block's."""
    if release not in TRITONS:
        pytest.skip(f"the lab has no triton=={release}: `portattn lab create triton=={release}` makes it")
    if Version(release) < Version("3.7") and Version(metadata.version("numpy")) >= Version("2.4"):
        pytest.skip("Triton's interpreter before 3.7 needs numpy<2.4: quirk cpu-0001")
    # The folder that has Triton's metadata too: portattn asks it for the version.
    for entry in (TRITONS[release], *TRITONS[release].parent.glob("triton-*.dist-info")):
        (tmp_path / entry.name).symlink_to(entry)
    path = (str(tmp_path), str(fakedriver.HERE), os.environ.get("PYTHONPATH", ""))
    ran = subprocess.run(
        [sys.executable, str(fakedriver.HERE / "interpreted_child.py")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["triton"] == release
    wrong = {name: distance for name, distance in found["distances"].items() if not distance < 2e-6}
    assert not wrong
    assert len(found["distances"]) == 12
