"""A package index of one wheel, which holds as much of a Triton as a worker imports."""

import base64
import hashlib
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

TRITON = {
    "triton/__init__.py": "__version__ = '{version}'\n", "triton/backends/__init__.py": "backends = {{}}\n",
    "triton/backends/compiler.py": "class GPUTarget: pass\n", "triton/compiler/__init__.py": "class ASTSource: pass\n",
    "triton/_C/libtriton.so": "code " * 100,
    # What no compile reads.
    "triton/_C/libproton.so": "profiler " * 1000, "triton/backends/nvidia/lib/cupti/libcupti.so": "profiler " * 1000,
    "triton/backends/nvidia/lib/static.a": "archive " * 1000, "triton/instrumentation/libPrint.so": "plug-in " * 1000,
}  # fmt: skip


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """publish("triton", "9.1.0", {path: text}): put a wheel on the only index that pip has in this test."""
    index = tmp_path / "index"
    index.mkdir()
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))

    def add(name: str = "triton", version: str = "9.1.0", files: dict[str, str] | None = None) -> None:
        stem = f"{name.replace('-', '_')}-{version}"
        texts = {path: text.format(version=version) for path, text in (files if files is not None else TRITON).items()}
        texts[f"{stem}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        texts[f"{stem}.dist-info/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        record = f"{stem}.dist-info/RECORD"
        rows = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in texts.items()]
        with zipfile.ZipFile(index / f"{stem}-py3-none-any.whl", "w") as wheel:
            for path, text in texts.items():
                wheel.writestr(path, text)
            wheel.writestr(record, "\n".join([*rows, f"{record},,"]) + "\n")

    return add


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
