"""The result of a comparison as text: one column for each arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from radixkv.bench.arm import NO_CACHE, TRANSFORMERS

_SHARES = (
    ("matmul", "matrix products"),
    ("attention", "attention"),
    ("sampling", "sampling"),
    ("forward_rest", "rest of the forward, Python too"),
    ("scheduler", "scheduler"),
    ("ledger", "ledger"),
    ("outside", "outside"),
)


def format_result(result: dict[str, Any]) -> str:
    """The table of counts and, where the gate passed, of speeds; ``result`` is the JSON file's content."""
    arms: dict[str, dict[str, Any]] = result["arms"]
    rows = [("", *arms)]

    def row(label: str, cell: Callable[[dict[str, Any]], str]) -> None:
        rows.append((label, *(cell(arm) for arm in arms.values())))

    row("requests", lambda arm: f"{arm['num_requests']}")
    row("prompt tokens", lambda arm: f"{arm['num_prompt_tokens']:,}")
    row("prompt tokens computed", lambda arm: _or_dash(arm, "prompt_tokens_computed", "{:,}"))
    row("hit rate", lambda arm: _or_dash(arm, "hit_rate", "{:.2%}"))
    row("percent of the optimum", lambda arm: _or_dash(arm, "share_of_optimum", "{:.2%}"))
    row("steps", lambda arm: _or_dash(arm, "num_steps", "{:,}"))
    if any("wall_s" in arm for arm in arms.values()):
        _add_speeds(row)
    lines = [f"optimum hit rate {result['optimal_hit_rate']:.2%} ({result['optimal_hit_tokens']:,} tokens)"]
    lines += ["", *_aligned(rows)]
    lines += _quotients(arms)
    if "wall_s" in arms.get(TRANSFORMERS, {}):
        lines.append("peak memory of every arm holds the second copy of the model that transformers' needs")
    return "\n".join(lines)


def _add_speeds(row: Callable[[str, Callable[[dict[str, Any]], str]], None]) -> None:
    row("wall time", lambda arm: f"{arm['wall_s']:.2f} s")
    row("  fastest, slowest run", lambda arm: f"{arm['wall_s_min']:.2f} .. {arm['wall_s_max']:.2f} s")
    row("  floor: matrix products", lambda arm: _or_dash(arm, "floor_s", "{:.2f} s"))
    row("  wall / floor", lambda arm: _or_dash(arm, "wall_over_floor", "{:.2f}"))
    row("output tokens/s", lambda arm: f"{arm['output_tokens_per_s']:.1f}")
    row("first token, p50", lambda arm: f"{arm['ttft_p50_s']:.2f} s")
    row("first token, p95", lambda arm: f"{arm['ttft_p95_s']:.2f} s")
    row("CPU seconds", lambda arm: f"{arm['cpu_s']:.1f}")
    row("peak memory", lambda arm: f"{arm['peak_bytes'] / 2**20:,.0f} MiB")
    row("share of time in", lambda arm: "")
    for part, label in _SHARES:
        row(f"  {label}", lambda arm, part=part: _or_dash(arm["shares"], part, "{:.2%}"))  # type: ignore[misc]


def _quotients(arms: dict[str, dict[str, Any]]) -> list[str]:
    base = arms.get(NO_CACHE, {})
    lines = [
        f"{name}: {base['wall_s'] / arm['wall_s']:.2f} times as fast as {NO_CACHE}"
        for name, arm in arms.items()
        if name != NO_CACHE and "wall_s" in arm and "wall_s" in base
        if arm["num_requests"] == base["num_requests"]
    ]
    return ["", *lines] if lines else []


def _or_dash(values: dict[str, Any], key: str, form: str) -> str:
    value = values.get(key)
    return "-" if value is None else form.format(value)


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
