"""A folder of packages in which `triton` is the lab's triton-ascend, with npu_driver.py, over torch of this Python."""

import sysconfig
from pathlib import Path

DRIVER = Path(__file__).with_name("npu_driver.py")
# CANN's back half takes KERNEL.mlir [options] -o FILE and writes FILE.o; this hands the text on.
BACK_HALF = """\
#!/bin/sh
case "$1" in --help) echo limit-auto-multi-buffer-buffer; exit 0 ;; esac
text=$1
while [ "$1" != -o ]; do shift; done
cp "$text" "$2.o"
"""


def make(folder: Path, lab: Path) -> dict[str, str]:
    """Fill `folder` and return the environment variables under which `python -S` imports from it.

    Args:
        lab: the environment of triton-ascend in the lab
    """
    site, programs = folder / "site", folder / "bin"
    site.mkdir(parents=True)
    programs.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("triton", "torch_npu", "portattn", "__editable__")) and entry.suffix != ".pth":
            (site / entry.name).symlink_to(entry)
    (packages,) = lab.glob("lib/python3*/site-packages")
    for entry in (*packages.glob("triton_ascend*"), packages / "pybind11"):
        (site / entry.name).symlink_to(entry)
    _link_all_but(packages / "triton", site / "triton", ("backends", "ascend", "driver.py"))
    (site / "triton" / "backends" / "ascend" / "driver.py").symlink_to(DRIVER)
    (programs / "bishengir-compile").write_text(BACK_HALF)
    (programs / "bishengir-compile").chmod(0o755)
    vendor = site / "torch_npu-2.13.0.dist-info"  # `import torch` imports a package of this entry point
    vendor.mkdir()
    (vendor / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (vendor / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return {"PYTHONPATH": str(site), "PATH": str(programs)}


def _link_all_but(source: Path, made: Path, parts: tuple[str, ...]) -> None:
    """Make a folder of links to another's entries, without the entry at the path of `parts`."""
    made.mkdir()
    for entry in source.iterdir():
        if entry.name != parts[0]:
            (made / entry.name).symlink_to(entry)
    if len(parts) > 1:
        _link_all_but(source / parts[0], made / parts[0], parts[1:])
