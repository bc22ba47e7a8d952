"""A hook of MkDocs (mkdocs.yml): the site's pages that are made from committed data, and are committed nowhere."""

from pathlib import Path

import quirk_pages
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from portattn.backends import BUILTIN
from portattn.planning.planner import plan
from portattn.planning.registry import Registry, load_arches
from portattn.tools import lab
from portattn.tools.bench import report, results
from portattn.tools.display_text import table
from portattn.tools.matrix import cells, select

PERFORMANCE = Path(__file__).resolve().parents[1] / "docs" / "performance"
ARCH_COLUMNS = ("arch", "chips", "families", "cores", "scratchpad", "warp", "registers", "fp8", "fp32 products")
COMPATIBILITY = """# Compatibility

Each cell counts the problems of the [matrix's](matrix.md) quick set, {} in all, that a plan runs on kernels, and in
parentheses the [quirks](quirks.md) that change a plan or rule out a path. Other problems run on the vendor's library or
the reference. An empty cell is a compiler that does not serve the target. Plans are no evidence: `portattn matrix run`
makes it. torch, Python and the engines: [versions](../CONTRIBUTING.md#versions-and-deprecation),
[engines](engines.md).

"""


def architectures() -> str:
    rows = [
        (f"`{backend.name}:{arch.name}`", arch.title + "; refused" * bool(arch.refused), ", ".join(arch.families),
         str(arch.cores), f"{arch.scratchpad_bytes // 1024} KiB", str(arch.warp_size or ""), str(arch.registers or ""),
         ", ".join(arch.fp8), ", ".join(arch.dot_precisions))
        for backend in BUILTIN if backend.name != "cpu" for arch in load_arches(backend.folder).values()
    ]  # fmt: skip
    return "# Architectures\n\n[Backends](backends.md#architectures) explains them.\n\n" + table(ARCH_COLUMNS, rows)


def compatibility(registry: Registry) -> str:
    """Return the page of targets × compilers, counted in plans of the matrix's quick set."""
    named, compilers = select.problems("quick", []), lab.toolchains()
    rows: dict[str, list[str]] = {}
    for target in filter(lambda target: cells.has_chip(target.name), select.targets([], select.toolchains(compilers))):
        backend = registry.backends[target.backend]
        kernels = {backend.core_path, *(variant.name for variant in backend.variants)}
        plans = [plan(one.problem, target, registry) for one in named]
        quirks = {quirk.id for made in plans for quirk in made.quirks}
        quirks |= {no.quirk for made in plans for no in made.rejected if no.quirk}
        row = rows.setdefault(target.name, [f"`{target.name}`", *[""] * len(compilers)])
        row[1 + compilers.index(str(target.toolchain))] = (
            f"{sum(made.path in kernels for made in plans)} ({len(quirks)})"
        )
    return COMPATIBILITY.format(len(named)) + table(("target", *compilers), rows.values())


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for path, text in made_pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def made_pages() -> dict[str, str]:
    """Return the Markdown of each page by its path."""
    registry = Registry.load()
    made = {"docs/architectures.md": architectures()}
    made["docs/compatibility.md"] = compatibility(registry)
    made["docs/quirk-catalogue.md"] = quirk_pages.render(registry.quirks.values(), quirk_pages.load_left_out())
    made["docs/quirk-verification.md"] = quirk_pages.render_verification(registry)
    for chip in ("", "-h100"):
        text = report.as_markdown(results.read(PERFORMANCE / f"results{chip}.json"))
        made[f"docs/performance/tables{chip}.md"] = f"# Every figure of results{chip}.json\n\n{text}"
    return made
