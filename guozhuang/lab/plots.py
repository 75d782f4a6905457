"""Draw the plots of a report, each as a PNG file and as an SVG element that adopts the page's text colour."""

from __future__ import annotations

import functools
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from guozhuang import units
from guozhuang.lab.results import PHASES, Results, StrategyRow

NAMES = ("speed", "step", "loss")

_INK = "#1f2328"  # the SVG has "currentColor" in its place, so that text takes the page's colour, light or dark
_GRID = "#8b949e"
_COLORS = {"single": "#4477aa", "ddp": "#cc3344", "torch-ddp": "#ee8822", "dp": "#228866", "none": "#8b949e"}
_MORE_COLORS = ("#aa66aa", "#33a0b8", "#997744", "#5a5ac8", "#b0a000", "#d0609a", "#70a040", "#404a5c", "#c8a080")
# The widths of a picture, in inches: on a page that is wide enough, and on a telephone.
_WIDE, _NARROW = 7.6, 4.2
# The characters of a line of a strategy's name.
_NAME_CHARACTERS = {_WIDE: 24, _NARROW: 18}
_Drawing = Callable[[list[StrategyRow], Mapping[str, str], float, Any], None]
_PHASE_COLORS = {
    "data": "#a0a8b0",
    "forward": "#4477aa",
    "backward": "#77aadd",
    "exchange": "#cc3344",
    "optimizer": "#ddaa33",
}


class Picture(NamedTuple):
    """A plot: the bytes of a PNG file, and SVG elements for a wide and for a narrow page."""

    png: bytes
    svg: str
    narrow_svg: str


def draw(results: Results) -> Mapping[str, Picture]:
    """Draw every plot for which there are results; return them by name (``speed``, ``step``, ``loss``)."""
    rows = [row for row in results.rows if row.ok]
    if not rows:
        return {}
    chosen = colors(results)
    drawings: dict[str, _Drawing] = {"speed": _speed, "step": _step, "loss": _loss}
    found = {}
    for name, drawing in drawings.items():
        found[name] = picture(name, functools.partial(drawing, rows, chosen), functools.partial(_height, name, rows))
    return found


def picture(name: str, drawing: Callable[[float, Any], None], height: Callable[[float], float]) -> Picture:
    """Draw one plot, for a wide and for a narrow page.

    Args:
        name: of the plot, unique on its page.
        drawing: called with the width in inches and with matplotlib's axes.
        height: the height in inches of a picture of a width.
    """
    wide, narrow = (
        _render(
            f"{name}{'-narrow' * (width == _NARROW)}",
            functools.partial(drawing, width),
            (width, height(width)),
            with_png=width == _WIDE,
        )
        for width in (_WIDE, _NARROW)
    )
    return Picture(*wide, narrow[1])


def _height(name: str, rows: list[StrategyRow], width: float) -> float:
    """Return the height of a picture, in inches: a line for each strategy, or for each line of the legend."""
    if name == "loss":
        return 2.6 + 0.21 * math.ceil(len(rows) / _num_columns(width))
    lines = sum(max(2, _wrapped(row, width).count("\n") + 1) for row in rows)
    return {"speed": 0.9, "step": 1.25}[name] + 0.18 * lines + 0.25 * (width == _NARROW)


def _num_columns(width: float) -> int:
    return 4 if width == _WIDE else 2


def colors(results: Results) -> dict[str, str]:
    """Return a mapping row name -> colour for all plots of a comparison."""
    return colors_of([row.name for row in results.rows])


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a mapping row name -> colour; rows share a colour only if there are more rows than colours."""
    spare = [*_MORE_COLORS, *(color for name, color in _COLORS.items() if name not in names)]
    others = [name for name in names if name not in _COLORS]
    return {name: _COLORS[name] for name in names if name in _COLORS} | {
        name: spare[i % len(spare)] for i, name in enumerate(others)
    }


def _render(name: str, drawing: Callable[[Any], None], size: tuple[float, float], with_png: bool) -> tuple[bytes, str]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style = {
        "font.size": 10,
        "axes.edgecolor": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "svg.fonttype": "none",  # keep text as text, not as curves: it can be selected, and takes the page's font
        "svg.hashsalt": name,  # the ids of SVG elements depend on this, and several plots on one page must not share ids
        "hatch.linewidth": 0.6,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        drawing(axes)
        png, svg = io.BytesIO(), io.StringIO()
        if with_png:
            figure.savefig(png, format="png", dpi=160, facecolor="white")
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return png.getvalue(), _inline(name, svg.getvalue())


def _inline(name: str, svg: str) -> str:
    """Turn an SVG file into an element of a page: without prologue and fixed size, with unique ids and the page's font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    svg = re.sub(r"font: (\w+) ([\d.]+px)[^;\"]*", r"font-weight: \1; font-size: \2", svg)
    svg = svg.replace(_INK, "currentColor")
    return svg.replace("<svg", f'<svg class="plot" role="img" aria-label="{name.partition("-")[0]}"', 1).strip()


def _speed(rows: list[StrategyRow], chosen: Mapping[str, str], width: float, axes: Any) -> None:
    places = range(len(rows))
    medians = [row.samples_per_s for row in rows]
    axes.barh(
        places,
        medians,
        height=0.62,
        color=[chosen[row.name] for row in rows],
        alpha=0.9,
        zorder=2,
    )
    for i, row in enumerate(rows):
        axes.plot([row.slowest, row.fastest], [i, i], color=_INK, linewidth=1.2, zorder=3)
        for end in (row.slowest, row.fastest):
            axes.plot([end, end], [i - 0.14, i + 0.14], color=_INK, linewidth=1.2, zorder=3)
        axes.annotate(
            units.rate(row.samples_per_s),
            (max(row.fastest, row.samples_per_s), i),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_xlim(0, max(row.fastest for row in rows) * (1.13 if width == _WIDE else 1.25))
    _strategies_down(rows, axes, width)
    _label_below(axes, "samples/s: median, slowest and fastest round", "(more is better)", width)


def _step(rows: list[StrategyRow], chosen: Mapping[str, str], width: float, axes: Any) -> None:
    starts = [0.0] * len(rows)
    for k, phase in enumerate(PHASES):
        widths = [row.phases.parts()[k] * 1e3 for row in rows]
        label = "exposed exchange" if phase == "exchange" else phase
        axes.barh(range(len(rows)), widths, left=starts, height=0.62, color=_PHASE_COLORS[phase], label=label, zorder=2)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    _strategies_down(rows, axes, width)
    _label_below(axes, "ms per step", "(less is better)", width)
    _legend_above(axes, 5 if width == _WIDE else 3)


def _loss(rows: list[StrategyRow], chosen: Mapping[str, str], width: float, axes: Any) -> None:
    for i, row in enumerate(rows):
        losses = row.losses
        axes.plot(
            range(1, len(losses) + 1),
            _smooth(losses),
            label=_wrapped(row, width),
            color=chosen[row.name],
            linestyle=("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)))[i % 4],  # so that equal curves are all visible
            linewidth=1.7,
            marker="o" if len(losses) < 8 else None,
            markersize=3,
        )
    axes.grid(color=_GRID, alpha=0.25, linewidth=0.6)
    axes.set_xlabel("step")
    window = _window(len(rows[0].losses))
    axes.set_ylabel("loss" if window == 1 else f"loss, mean of {window} steps")
    _legend_above(axes, _num_columns(width))


def _window(num_steps: int) -> int:
    return max(1, num_steps // 40)


def _smooth(values: tuple[float, ...]) -> list[float]:
    window = _window(len(values))
    means = []
    for i in range(len(values)):
        part = values[max(0, i + 1 - window) : i + 1]
        means.append(sum(part) / len(part))
    return means


def _legend_above(axes: Any, num_columns: int) -> None:
    """Draw the legend above the axes, where it covers nothing, as wide as the whole picture."""
    axes.figure.legend(
        loc="outside upper center", ncols=num_columns, frameon=False, handlelength=1.2, columnspacing=1.2
    )


def _label_below(axes: Any, text: str, more: str, width: float) -> None:
    """Label the axis at the bottom, under the whole picture, because a long name leaves few inches under the axes."""
    axes.figure.supxlabel(f"{text} {more}" if width == _WIDE else f"{text}\n{more}", fontsize=10)


def _wrapped(row: StrategyRow, width: float) -> str:
    return units.wrapped_name(row.title, _NAME_CHARACTERS[width])


def _strategies_down(rows: list[StrategyRow], axes: Any, width: float) -> None:
    axes.set_yticks(range(len(rows)), [_wrapped(row, width) for row in rows])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.grid(axis="x", color=_GRID, alpha=0.25, linewidth=0.6, zorder=0)
    axes.spines["left"].set_visible(False)
