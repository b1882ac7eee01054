"""Draw the floors of the package from its imports: `python tools/architecture.py` writes docs/figures/architecture.svg.

A folder stands above all folders that it imports from, so the picture cannot say what the code does not. An arrow that
follows from others is left out. A circle between folders has no floors: the script names it and stops.
"""

from __future__ import annotations

import ast
import html
import sys
import textwrap
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "headloom"
PICTURE = ROOT / "docs" / "figures" / "architecture.svg"
BOX_WIDTH, BOX_HEIGHT, GAP, RISE = 190, 92, 22, 46


def folders() -> dict[str, str]:
    """Every folder of the package and what it holds: the first sentence of its `__init__.py`."""
    found = {}
    for path in sorted(PACKAGE.glob("*/__init__.py")):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[path.parent.name] = " ".join(text.split(".")[0].split())
    return found


def imports() -> dict[str, set[str]]:
    """Folder -> the other folders that any of its files imports from, inside functions and for type checkers too."""
    found: dict[str, set[str]] = {name: set() for name in folders()}
    for own, needed in found.items():
        for path in (PACKAGE / own).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                parts = [module.split(".") for module in modules]
                needed |= {part[1] for part in parts if part[0] == PACKAGE.name and len(part) > 1 and part[1] in found}
        needed.discard(own)
    return found


def floors(needs: dict[str, set[str]]) -> list[list[str]]:
    """The folders floor by floor, from the ground up.

    Raises: graphlib.CycleError with the folders of a circle.
    """
    height: dict[str, int] = {}
    for name in TopologicalSorter(needs).static_order():
        height[name] = 1 + max((height[other] for other in needs[name]), default=-1)
    return [sorted(name for name in height if height[name] == floor) for floor in range(max(height.values()) + 1)]


def arrows(needs: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Imports that do not follow from others: (from, to)."""
    below: dict[str, set[str]] = {}
    for name in TopologicalSorter(needs).static_order():
        below[name] = set().union(needs[name], *(below[other] for other in needs[name]))
    return [
        (name, other)
        for name in sorted(needs)
        for other in sorted(needs[name])
        if not any(other in below[between] for between in needs[name])
    ]


def picture() -> str:
    """The floors as SVG, the ground floor at the bottom."""
    holds, needs = folders(), imports()
    rows = floors(needs)
    width = max(len(row) for row in rows) * (BOX_WIDTH + GAP) + GAP
    height = len(rows) * (BOX_HEIGHT + RISE) - RISE + 2 * GAP
    corner: dict[str, tuple[float, float]] = {}
    for floor, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        for place, name in enumerate(row):
            corner[name] = (left + place * (BOX_WIDTH + GAP), height - GAP - BOX_HEIGHT - floor * (BOX_HEIGHT + RISE))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" role="img" aria-label="The folders of headloom, each above those it imports from">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#6b7a90"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for name, other in arrows(needs):
        (x, y), (u, v) = corner[name], corner[other]
        x, u = x + BOX_WIDTH / 2, u + BOX_WIDTH / 2
        lines.append(
            f'<path d="M{x:g} {y + BOX_HEIGHT:g}C{x:g} {y + BOX_HEIGHT + RISE:g} {u:g} {v - RISE:g} {u:g} {v:g}" '
            'fill="none" stroke="#6b7a90" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for name, (x, y) in corner.items():
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="8" '
            'fill="#eef3fa" stroke="#355c93"/>'
            f'<text x="{x + 12:g}" y="{y + 22:g}" font-size="15" font-weight="600" fill="#16325c">{name}/</text>'
        )
        for place, line in enumerate(textwrap.wrap(holds[name], 29)[:4]):
            lines.append(
                f'<text x="{x + 12:g}" y="{y + 40 + 14 * place:g}" font-size="11.5" fill="#333">'
                f"{html.escape(line)}</text>"
            )
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    try:
        text = picture()
    except CycleError as circle:
        sys.exit(f"folders import each other in a circle: {' -> '.join(circle.args[1])}")
    PICTURE.write_text(text)
    print(f"{PICTURE.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
