# SPDX-License-Identifier: Apache-2.0
"""The demo's table and plot."""

from __future__ import annotations

import pathlib
from typing import Any

Series = list[dict[str, Any]]

TABLE_ROWS = 12
# The share of training, at its end, that the summary is about.
END_SHARE = 0.5


def measured(series: Series) -> Series:
    """The points whose version could still be pulled."""
    return [point for point in series if point["accuracy"]]


def print_table(series: Series, tracks: list[str]) -> None:
    points = measured(series)
    stride = max(1, (len(points) + TABLE_ROWS - 1) // TABLE_ROWS)
    chosen = points[::-1][::stride][::-1]
    print("\nheld-out accuracy")
    print(f"{'step':>6}" + "".join(f"{track:>9}" for track in tracks))
    for point in chosen:
        cells = "".join(f"{point['accuracy'][track]:>9.2%}" for track in tracks)
        print(f"{point['step']:>6}{cells}")
    means = summary(series, tracks)
    print(f"{'mean*':>6}" + "".join(f"{means[track]:>9.2%}" for track in tracks))
    print("* of the second half of training\n")


def summary(series: Series, tracks: list[str]) -> dict[str, float]:
    """Mean accuracy over the end of training, by track."""
    points = measured(series)
    end = points[int(len(points) * END_SHARE) :]
    return {track: sum(p["accuracy"][track] for p in end) / len(end) for track in tracks}


def plot(series: Series, tracks: list[str], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    points = measured(series)
    steps = [point["step"] for point in points]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for track in tracks:
        width = 0.8 if track == tracks[0] else 1.8
        axes.plot(steps, [p["accuracy"][track] for p in points], label=track, linewidth=width)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy")
    settled = points[len(points) // 5 :]
    axes.set_ylim(min(p["accuracy"][track] for p in settled for track in tracks) - 0.02, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    axes.set_title("digits: raw weights and their averages")
    figure.savefig(path, dpi=120)
    plt.close(figure)
