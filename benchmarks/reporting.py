"""Output of results: a table, a JSON file, a plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = ("row", "work", "case", "h2o", "peer", "ratio", "spread", "of the roofline")


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def amount(value: float, row: dict[str, Any]) -> str:
    """Format a time, or a size in rows whose unit is bytes."""
    return f"{value / 1e6:.3g} MB" if row["facts"].get("unit") == "bytes" else seconds(value)


def rate(value: float | None, bound: str | None) -> str:
    if value is None:
        return ""
    return f"{value / 1e9:.0f} {'GFLOP/s' if bound in ('FMA', 'matmul') else 'GB/s'}"


def cells(row: dict[str, Any]) -> list[str]:
    """The cells of a row of the table."""
    ours, peer = row["ours"], row["peer"]
    ratio = spread = peak = ""
    if peer:
        low, high = row["ratio_quartiles"]
        ratio, spread = f"{row['ratio']:.3g}", f"{low:.3g} to {high:.3g}"
    if row["roofline_fraction"] is not None:
        peak = f"{row['roofline_fraction']:.0%} of {rate(row['peak_rate'], row['bound'])}"
    return [
        row["row"], row["what"], row["case"], amount(ours["median_s"], row),
        amount(peer["median_s"], row) if peer else "", ratio, spread, peak,
    ]  # fmt: skip


def facts(row: dict[str, Any]) -> str:
    """The other figures of a row, and h2o's error against the reference."""
    texts = [
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in row["facts"].items()
    ]
    if row["error"]:
        texts.append(f"checked: {row['error']}")
    return "; ".join(texts)


def markdown(result: dict[str, Any]) -> str:
    """The whole result as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in result["rows"]]
    return "\n".join(lines)


def write_json(result: dict[str, Any], path: Path) -> None:
    """Replace the file atomically, so that an interrupted run leaves a complete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_suffix(".part")
    half.write_text(json.dumps(result, indent=1) + "\n")
    half.replace(path)


def plot(result: dict[str, Any], path: Path) -> None:
    """Plot the ratio of the peer to h2o for each row, and whole-model times over prompt lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [row for row in result["rows"] if row["ratio"]]
    curves = whole_model_curves(result)
    height = max(4.0, 0.24 * len(compared))
    figure, axes = pyplot.subplots(
        1, 3, figsize=(16, height), gridspec_kw={"width_ratios": [3, 2, 2]}, layout="constrained"
    )
    labels = [f"{row['row']}  {row['what']}, {row['case'].split(', H')[0]}" for row in compared]
    axes[0].barh(range(len(compared)), [row["ratio"] for row in compared], color="tab:blue")
    axes[0].set_yticks(range(len(compared)), labels, fontsize=6)
    axes[0].invert_yaxis()
    axes[0].set_xscale("log")
    axes[0].axvline(1, color="black", linewidth=0.8)
    axes[0].set_xlabel("time (or bytes) of the peer / h2o: h2o is better above 1")
    for axis, phase, unit in zip(axes[1:], ("prefill", "decode"), ("s", "s/token"), strict=True):
        for label, points in curves.get(phase, {}).items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
        axis.set(title=f"SmolLM2-135M, {phase}", xlabel="prompt tokens", ylabel=unit)
        axis.set_ylim(0, None)
        if curves:
            axis.legend(fontsize=7)
    machine = result["machine"]
    where = machine["device"].get("name") or f"{machine['cpu']}, {machine['torch_threads']} threads"
    figure.suptitle(where, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def whole_model_curves(result: dict[str, Any]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Points (prompt length, median seconds) by phase and name of the curve."""
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in result["rows"]:
        if row["row"] != "P8":
            continue
        phase, prompt, dtype = (row["facts"][name] for name in ("phase", "prompt", "dtype"))
        for times in (row["ours"], row["peer"]):
            label = f"{times['name']}, {dtype}"
            curves.setdefault(phase, {}).setdefault(label, []).append((prompt, times["median_s"]))
    return curves
