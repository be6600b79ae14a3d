"""The few-shot result as a picture: seconds by part, and prompt tokens computed, one bar for each arm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from radixkv.errors import ConfigError

_PARTS = (
    ("matmul", "matrix products", "#31688e"),
    ("attention", "attention", "#35b779"),
    ("sampling", "sampling", "#fde725"),
    ("forward_rest", "rest of the forward", "#b8b8b8"),
    ("scheduler", "scheduler", "#e8a33d"),
    ("ledger", "ledger", "#c8553d"),
    ("outside", "outside", "#dddddd"),
)


def check_plotting(path: Path) -> None:
    """Raise ``ConfigError`` before any work where matplotlib is missing or cannot draw such a file."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'radixkv[plot]'") from None
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ConfigError(f"a plot ends in one of {', '.join(formats)}, got {path.name!r}")


def plot_result(result: dict[str, Any], path: Path) -> None:
    """Draw ``result``, the content of the JSON file, to ``path``; the ending chooses the format."""
    from matplotlib.figure import Figure

    arms = {name: arm for name, arm in result["arms"].items() if "wall_s" in arm}
    names = list(arms)
    figure = Figure(figsize=(11, 1.9 + 0.62 * len(names)), layout="constrained")
    times, tokens = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    _draw_times(times, arms)
    _draw_tokens(tokens, arms)
    times.set_yticks(range(len(names)), names)
    times.invert_yaxis()
    for axes in (times, tokens):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    workload, about = result["workload"], result["environment"]
    figure.suptitle(
        f"{workload['num_requests']} questions behind a shared prefix of {workload['prefix_tokens']} tokens, "
        f"{workload['max_tokens']} tokens each\n{about['model']}, threads: {about['num_threads']}, "
        f"{about['cpu']}",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)


def _draw_times(axes: Any, arms: dict[str, Any]) -> None:
    longest = max(arm["wall_s_max"] for arm in arms.values())
    drawn: set[str] = set()
    for row, arm in enumerate(arms.values()):
        left = 0.0
        shares = {key: value for key, value in arm["shares"].items() if value}
        for key, label, colour in _PARTS:
            if key in shares or (key == "outside" and not shares):
                width = arm["wall_s"] * shares.get(key, 1.0)
                axes.barh(
                    row, width, left=left, color=colour, height=0.62, label=None if key in drawn else label
                )
                drawn.add(key)
                left += width
        if arm["wall_s_max"] > arm["wall_s_min"]:
            spread = [[arm["wall_s"] - arm["wall_s_min"]], [arm["wall_s_max"] - arm["wall_s"]]]
            axes.errorbar(arm["wall_s"], row, xerr=spread, color="black", capsize=3, linewidth=1)
        axes.text(arm["wall_s_max"] + 0.015 * longest, row, f"{arm['wall_s']:.1f} s", va="center", fontsize=9)
        if arm.get("floor_s"):
            axes.plot([arm["floor_s"]] * 2, [row - 0.38, row + 0.38], color="black", linestyle=":")
    axes.set_xlim(0, 1.14 * longest)
    axes.set_xlabel("seconds, median (whiskers: all runs; dotted: matrix products that must be done)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False, fontsize=8)


def _draw_tokens(axes: Any, arms: dict[str, Any]) -> None:
    most = max(arm["num_prompt_tokens"] for arm in arms.values())
    for row, arm in enumerate(arms.values()):
        computed = arm["prompt_tokens_computed"]
        if computed is None:
            axes.text(0.01 * most, row, "not reported", va="center", fontsize=9)
            continue
        axes.barh(row, computed, color="#31688e", height=0.62)
        axes.text(
            computed + 0.015 * most,
            row,
            f"{computed:,} ({arm['hit_rate']:.1%} hits)",
            va="center",
            fontsize=9,
        )
    axes.set_xlim(0, 1.5 * most)
    axes.set_xlabel("prompt tokens computed")
