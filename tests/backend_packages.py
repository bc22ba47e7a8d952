"""Distributions that bring a backend, written into a folder: `install(folder, name)`."""

import re
from pathlib import Path

from places import DOCS
from quirk_files import plant

ARCHES = """
[{name}1]
title = "{name} One"
cores = 16
scratchpad_bytes = 262144
scratchpad_kind = "shared memory"
max_programs = 65535
sources = ["a test"]
"""
MODULE = """
from pathlib import Path

from portattn.backends import Backend, VendorPath


class Attention(VendorPath):
    name = "{name}_attention"
    ops = ("attention",)

    def rejects(self, problem, target):
        return None


class Plugin(Backend):
    name = "{name}"
    device_type = "{name}"
    folder = Path(__file__).parent
    core_path = ""
    vendor = (Attention(),)

    def detect(self, index=None):
        return None

    def quirk_folder(self):
        return self.folder / "quirks"
"""


def describe(folder: Path, name: str, point: str) -> None:
    """Write the metadata by which an installer tells of a distribution portattn-NAME 0.1."""
    info = folder / f"portattn_{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: portattn-{name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[portattn.backends]\n{name} = {point}\n")


def install_example(folder: Path) -> Path:
    """Write the example of docs/backends.md as an installed distribution into a folder."""
    text = (DOCS / "backends.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert set(files) == {"pyproject.toml", "portattn_acme/arches.toml", "portattn_acme/__init__.py"}
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    point = re.search(r'entry-points\."portattn\.backends"\]\nacme = "(.*?)"\n', files["pyproject.toml"])
    assert point is not None
    describe(folder, "acme", point[1])
    return folder


def install(folder: Path, name: str) -> Path:
    """A distribution portattn-NAME 0.1 with a whole backend, and its package's folder."""
    package = folder / f"portattn_{name}"
    (package / "tuning").mkdir(parents=True)
    (package / "__init__.py").write_text(MODULE.format(name=name))
    (package / "arches.toml").write_text(ARCHES.format(name=name))
    plant(package, f"{name}-0001-planted", 'note = "x"').parent.rename(package / "quirks")
    describe(folder, name, f"portattn_{name}:Plugin")
    return package
