# SPDX-License-Identifier: Apache-2.0
"""The figures of the documentation, drawn from Tessera's own data.

``python docs/_ext/figures.py`` writes the one that the README shows,
``docs/images/mesh-and-array.svg``; the others are made while the site is built.
"""

import json
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from tessera import dist
from tessera.graph.pass_runner import PASSES
from tessera.graph.pipelining import schedule

README_FIGURE = Path(__file__).parents[1] / "images/mesh-and-array.svg"

# A hue for each device; blocks of an array take the hue of the devices that hold them.
INK, FAINT = "#24292f", "#656d76"


def hue(index: int, count: int) -> str:
    """A color of its own for each of ``count`` things."""
    return f"hsl({360 * index // count},65%,78%)"


def text(
    x: float, y: float, words: str, *, anchor: str = "middle", **style: str
) -> str:
    """A line of text, its baseline at (x, y)."""
    more = "".join(
        f' {key.replace("_", "-")}="{value}"' for key, value in style.items()
    )
    fill = "" if "fill" in style else f' fill="{INK}"'
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f"<text {where}{fill}{more}>{escape(words)}</text>"


def box(x: float, y: float, w: float, h: float, fill: str = "#fff") -> str:
    """A rectangle with a thin outline."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3" '
        f'fill="{fill}" stroke="{INK}" stroke-width="1"/>'
    )


def picture(width: float, height: float, title: str, parts: Iterator[str]) -> str:
    """A complete SVG document on a white ground, so that a dark page can show it."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{width:g}" height="{height:g}" rx="8" fill="#fff"/>\n'
        '<g font-family="system-ui,sans-serif" font-size="13">\n'
        + "\n".join(parts)
        + "\n</g>\n</svg>\n"
    )


def mesh_and_array() -> str:
    """A mesh of eight devices, an array split over both axes, one split over one."""
    mesh = dist.Mesh(axes=["dp", "tp"], devices=range(8), shape=(2, 4))
    by_both = dist.ShardSpec(partition=("row", "col"), mesh_axes=("dp", "tp"))
    by_columns = dist.ShardSpec(partition=("col",), mesh_axes=("tp",))
    both = dist.tensor((8, 16), by_both, mesh, name="x")
    columns = dist.tensor((16, 8), by_columns, mesh, name="w")

    def parts() -> Iterator[str]:
        yield text(150, 28, "a mesh of 2 × 4 devices", font_weight="bold")
        yield text(172, 52, "tp →", fill=FAINT)
        yield text(24, 122, "dp ↓", fill=FAINT)
        for position in range(mesh.size):
            at = mesh.coordinates(position)
            x, y = 52 + 60 * at["tp"], 62 + 60 * at["dp"]
            yield box(x, y, 52, 52, hue(position, mesh.size))
            yield text(x + 26, y + 31, str(mesh.device_ids[position]))
        yield from array_parts(both, "x: rows over dp, columns over tp", 310)
        yield from array_parts(columns, "w: columns over tp, a copy for each dp", 590)

    return picture(880, 196, "A mesh with two sharded arrays", parts())


def array_parts(array: object, title: str, left: float) -> Iterator[str]:
    """The blocks of a two-dim array, each with the devices that hold it."""
    (leaf,) = dist.inspect(array).leaves
    rows, columns = leaf.shape
    scale, down = 240 / columns, 112 / rows
    holders: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for position in range(leaf.num_devices):
        holders.setdefault(leaf.block_at(position), []).append(position)
    yield text(left + columns * scale / 2, 28, title, font_weight="bold")
    spec = f"{leaf.spec}".replace("PartitionSpec", "P")
    shape = f"{list(leaf.shape)} as {spec}: {list(leaf.local_shape)} on each device"
    yield text(left + columns * scale / 2, 50, shape, fill=FAINT, font_size="12")
    for ((top, bottom), (start, stop)), devices in holders.items():
        x, y = left + start * scale, 62 + top * down
        width, height = (stop - start) * scale, (bottom - top) * down
        for number, device in enumerate(devices):
            part = height / len(devices)
            fill = hue(device, leaf.num_devices)
            yield (
                f'<rect x="{x:g}" y="{y + number * part:g}" width="{width:g}" '
                f'height="{part:g}" fill="{fill}"/>'
            )
        yield (
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'fill="none" stroke="{INK}"/>'
        )
        words = ", ".join(map(str, devices))
        yield text(x + width / 2, y + height / 2 + 5, words)


# A phase, what it hands on, and what the user can print of it.
PHASES = (
    ("trace", "your function", "Graph", ".traced"),
    ("passes", "Graph", "Graph", ".traced.diff(…)"),
    ("lower", "Graph", "Lowered", ".layouts()"),
    ("compile", "Lowered", "Compiled", ".compiled"),
)


def phases() -> str:
    """The phases of compilation, the passes among them, and what each hands on."""
    passes = [apply.__name__ for apply in PASSES]
    width, gap, top = 150.0, 62.0, 56.0

    def parts() -> Iterator[str]:
        yield (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
            'markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/>'
            "</marker></defs>"
        )
        yield text(20, 24, "Python function", anchor="start", font_weight="bold")
        for number, (name, _, result, shown) in enumerate(PHASES):
            x = 20 + number * (width + gap)
            yield box(x, top, width, 44, hue(number, len(PHASES) + 1))
            yield text(x + width / 2, top + 27, name, font_weight="bold")
            yield text(x + width / 2, top + 64, shown, fill=FAINT, font_size="12")
            end = x + width
            yield (
                f'<line x1="{end:g}" y1="{top + 22:g}" x2="{end + gap - 2:g}" '
                f'y2="{top + 22:g}" stroke="{INK}" marker-end="url(#tip)"/>'
            )
            yield text(end + gap / 2, top + 15, result, font_size="11")
        yield (
            f'<line x1="60" y1="30" x2="60" y2="{top - 2:g}" stroke="{INK}" '
            'marker-end="url(#tip)"/>'
        )
        x = 20 + len(PHASES) * (width + gap)
        yield box(x, top, 70, 44, hue(len(PHASES), len(PHASES) + 1))
        yield text(x + 35, top + 27, "run", font_weight="bold")
        left = 20 + width + gap
        for number, name in enumerate(passes):
            line = f"{number + 1}. {name}"
            yield text(
                left, top + 96 + 18 * number, line, anchor="start", font_size="12"
            )

    height = top + 96 + 18 * len(passes)
    return picture(960, height, "The phases of compilation", parts())


# Blue, green and orange that people with any kind of color vision can tell apart.
COLORS = {"F": "#56b4e9", "B": "#009e73", "W": "#e69f00"}
MEANINGS = {"F": "forward", "B": "backward", "W": "gradient of weights"}
UNIT, ROW, LEFT, TOP = 22.0, 24.0, 74.0, 34.0


def timetable(name: str, microbatches: int = 8) -> Callable[[], str]:
    """A pipeline schedule of four stages over time: a row per device, a box per op.

    A tick is as wide as its longest device, so white space is idle time. Later chunks
    are paler.
    """

    def draw() -> str:
        table = schedule(name, stages=4, microbatches=microbatches)
        lasts = table.costs().max(axis=1) * table.chunks * UNIT
        starts = LEFT + np.concatenate([[0.0], np.cumsum(lasts)])
        height = TOP + ROW * table.stages + 30
        prices = {"F": 1.0, "B": 1.0 if table.splits_backward else 2.0, "W": 1.0}

        def parts() -> Iterator[str]:
            yield text(8, 20, table.summary(), anchor="start", font_weight="bold")
            for device in range(table.stages):
                y = TOP + ROW * device + 16
                yield text(8, y, f"device {device}", anchor="start", font_size="11")
            for tick, row in enumerate(table.cells):
                for device, cell in enumerate(row):
                    left, top = float(starts[tick]), TOP + ROW * device
                    for op in cell:
                        wide, opacity = prices[op.kind] * UNIT, 1.0 - 0.15 * op.chunk
                        yield (
                            f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" '
                            f'height="{ROW - 2:g}" fill="{COLORS[op.kind]}" '
                            f'fill-opacity="{opacity:g}" stroke="#fff"/>'
                        )
                        label = str(op.microbatch)
                        if table.chunks > 1:
                            label += ascii_lowercase[op.chunk]
                        yield text(left + wide / 2, top + 15, label, font_size="11")
                        left += wide
            for number, kind in enumerate("FBW" if table.splits_backward else "FB"):
                left = LEFT + 90 * number
                yield (
                    f'<rect x="{left:g}" y="{height - 20:g}" width="12" height="12" '
                    f'fill="{COLORS[kind]}"/>'
                )
                where = left + 17, height - 10
                yield text(*where, MEANINGS[kind], anchor="start", font_size="11")

        return picture(max(float(starts[-1]) + 10, 420.0), height, name, parts())

    return draw


MEASURED = (
    Path(__file__).parents[2]
    / "benchmarks/results/pipeline-residuals-h100-2026-11-29.json"
)


def pipeline_residuals() -> str:
    """Temporaries against the predicted step of one pipeline, a dot for each policy."""
    rows = json.loads(MEASURED.read_text())["rows"]
    rows = [row for row in rows if row["model"] == "llama3.1_70b"]
    width, height, left, bottom = 560.0, 250.0, 70.0, 200.0
    most = 35.0, 7.0  # GiB, seconds

    def parts() -> Iterator[str]:
        title = "Llama 3.1 70B, pp 8 × tp 8, 1f1b, 32 microbatches"
        yield text(8, 20, title, anchor="start", font_weight="bold")
        right = width - 20
        for x1, y1, x2, y2 in (
            (left, 36, left, bottom),
            (left, bottom, right, bottom),
        ):
            yield f'<path d="M{x1:g},{y1:g} L{x2:g},{y2:g}" stroke="{INK}"/>'
        for gib in range(0, 31, 10):
            x = left + gib / most[0] * (right - left)
            yield text(x, bottom + 18, str(gib), fill=FAINT, font_size="11")
        for seconds in range(0, 7, 2):
            y = bottom - seconds / most[1] * (bottom - 36)
            label = f"{seconds} s"
            yield text(left - 8, y + 4, label, anchor="end", fill=FAINT, font_size="11")
        words = "temporaries of a device, GiB"
        yield text(right, bottom + 38, words, anchor="end", fill=FAINT, font_size="11")
        yield text(left + 8, 46, "a step", anchor="start", fill=FAINT, font_size="11")
        for row in rows:
            x = left + row["temporaries GiB"] / most[0] * (right - left)
            y = bottom - row["step ms"] / 1e3 / most[1] * (bottom - 36)
            yield f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{COLORS["F"]}"/>'
            down = 20 if row["remat"] == "dots" else -10
            yield text(x, y + down, row["remat"], font_size="12")

    return picture(width, height, "Memory against time for each policy", parts())


FIGURES: dict[str, Callable[[], str]] = {
    "mesh-and-array.svg": mesh_and_array,
    "phases.svg": phases,
    "pipeline-residuals.svg": pipeline_residuals,
    **{
        f"schedule-{name}.svg": timetable(name)
        for name in ("gpipe", "1f1b", "interleaved", "zero_bubble", "dualpipev")
    },
}


if __name__ == "__main__":
    README_FIGURE.write_text(mesh_and_array(), encoding="utf-8")
