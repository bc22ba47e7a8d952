"""Write a kernel repository for Hugging Face `kernels`: portattn as `attn_implementation="portattn/portattn"`.

    python scripts/hub_kernel.py --out .hub/portattn [--variants torch-cpu,torch-cuda]

    LOCAL_KERNELS="portattn/portattn=.hub/portattn" python serve.py      # offline; docs/flash-attn.md

The folder has build/<variant>/ with __init__.py, metadata.json and the whole library, once for each variant, as the
layout asks for: a variant is fetched alone. Variants are noarch: Triton compiles for the chip. The folder is written
beside its place and renamed: an interrupted run leaves none, and keeps an older one.
"""

import argparse
import base64
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from portattn.files import replace_folder
from portattn.schema import toml_reader
from portattn.version import __version__

ROOT = Path(__file__).resolve().parent.parent
NAME = "portattn"
KERNEL_VERSION = 1  # transformers asks for it; it rises when what the kernel exports changes
VARIANTS = {"torch-cpu": "cpu", "torch-cuda": "cuda", "torch-rocm": "rocm", "torch-cann": "cann"}
INIT = Path(__file__).with_name("hub_kernel_init.py")
LICENSE = "apache-2.0"
CARD = f"""---
license: {LICENSE}
library_name: kernels
tags:
- kernel
---
# portattn {__version__}

Attention written once in Triton, for CUDA, ROCm and Ascend, with flash_attn's functions. It needs filelock, msgspec,
numpy, packaging and platformdirs, and on an accelerator Triton.
"""


class Failed(Exception):
    """The command failed; the text is for people."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".hub" / NAME, help="the folder, replaced as a whole")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}; default: all")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also that leaves nothing behind
    try:
        report = write(given.out, given.variants.split(","))
    except Failed as failed:
        print(f"hub_kernel: {failed}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"hub_kernel: {given.out} was not written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hub_kernel: interrupted, nothing was written", file=sys.stderr)
        return 130
    for variant in report["variants"]:
        print(f"{variant['name']}: {variant['files']} files, {variant['bytes'] / 1e6:.1f} MB, {variant['id']}")
    print(f'LOCAL_KERNELS="{NAME}/{NAME}={report["folder"]}"')
    return 0


def write(out: Path, variants: list[str]) -> dict[str, Any]:
    """Write the repository and return its description. Raises Failed, OSError."""
    for name in variants:
        if name not in VARIANTS:
            raise Failed(f"--variants has {name!r}, but must be of {', '.join(VARIANTS)}")
    _check_replaceable(out)
    library = dict(library_files())
    made, files = [], {"README.md": CARD.encode(), "LICENSE": (ROOT / "LICENSE").read_bytes()}
    for name in dict.fromkeys(variants):
        content = variant_files(VARIANTS[name], library)
        files |= {f"build/{name}/{path}": data for path, data in content.items()}
        size, kernel = sum(map(len, content.values())), json.loads(content["metadata.json"])["id"]
        made.append({"name": name, "id": kernel, "files": len(content), "bytes": size})
    replace_folder(out, files.items())
    return {"folder": str(out.resolve()), "portattn": __version__, "version": KERNEL_VERSION, "variants": made}


def variant_files(backend: str, library: dict[str, bytes]) -> dict[str, bytes]:
    unset, own = 'VERSION = "0"', f'VERSION = "{__version__}"'
    init = INIT.read_text(encoding="utf-8")
    if init.count(unset) != 1:
        raise Failed(f"{INIT} must have the line {unset} once")
    files = {"__init__.py": init.replace(unset, own).encode()}
    files |= {f"library/{path}": data for path, data in library.items()}
    digests = {path: hashlib.sha256(data).digest() for path, data in sorted(files.items())}
    whole = hashlib.sha256(b"".join(path.encode() + b"\0" + digest for path, digest in digests.items())).hexdigest()
    metadata = {
        "name": NAME,
        "id": f"_{NAME}_{backend}_{whole[:8]}",  # the module's name: two kernels of one content are one
        "version": KERNEL_VERSION, "license": LICENSE, "python-depends": [], "backend": {"type": backend},
        "digest": {
            "algorithm": "sha256",
            "files": {path: base64.b64encode(digest).decode() for path, digest in digests.items()},
        },
    }  # fmt: skip
    return files | {"metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def library_files() -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of an installed portattn: modules and data of its packages."""
    told = toml_reader.read(ROOT / "pyproject.toml")[0]["tool"]["setuptools"]
    data = told["package-data"]
    for top, root in told["package-dir"].items():
        for folder in sorted(path.parent for path in (ROOT / root).rglob("__init__.py")):
            package = ".".join((top, *folder.relative_to(ROOT / root).parts))
            patterns = ("*.py", *data["*"], *data.get(package, ()))
            for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
                yield f"{package.replace('.', '/')}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _check_replaceable(out: Path) -> None:
    """Raise Failed if the folder was not written by this script."""
    if out.exists() and not out.is_dir():
        raise Failed(f"--out is {out}, a file, but must be a folder or nothing yet")
    if not out.is_dir() or not any(out.iterdir()):
        return
    for path in out.glob("build/*/metadata.json"):
        try:
            if json.loads(path.read_bytes()).get("name") == NAME:
                return
        except (ValueError, AttributeError):
            continue
    raise Failed(f"--out is {out}, but must be a kernel repository of portattn, an empty folder or nothing yet")


if __name__ == "__main__":
    sys.exit(main())
