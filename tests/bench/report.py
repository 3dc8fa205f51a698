# SPDX-License-Identifier: Apache-2.0
"""Makes report.json and report.md of the rows that data_bench has printed, and prints the table.

python tests/bench/report.py ROWS.jsonl FOLDER
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import sys
from typing import Any

Row = dict[str, Any]

# What limits a row that falls short of its goal, by its key. From profiles; a row that has not been
# profiled is not here.
LIMITS: dict[str, str] = {}

HEADER = (
    "| what | unit | ours | peer | ratio (range) | goal | met "
    "| CPU s/GB client + server | of the peer |\n"
    "|---|---|---:|---:|---:|---:|---|---:|---:|\n"
)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def ratio(row: Row) -> str:
    if row["ratio"] is None:
        return "-"
    return f"{row['ratio']:.2f} ({row['ratio_min']:.2f} - {row['ratio_max']:.2f})"


def goal(row: Row) -> str:
    return "-" if row["goal"] is None else f"{row['goal_kind']} {row['goal']:g}"


def verdict(row: Row) -> str:
    return {None: "-", True: "yes", False: "no"}[row["met"]]


def cpu(row: Row, prefix: str) -> str:
    sides = [row.get(f"{prefix}cpu_{side}_s_per_gb") for side in ("client", "server")]
    if sides == [None, None]:
        return "-"
    return " + ".join("-" if value is None else f"{value:.2f}" for value in sides)


def line(row: Row) -> str:
    cells = [
        row["name"],
        row["unit"] if row["statistic"] == "median" else f"{row['unit']}, {row['statistic']}",
        number(row["ours"]),
        f"{row['peer_name']}: {number(row['peer'])}",
        ratio(row),
        goal(row),
        verdict(row),
        cpu(row, ""),
        cpu(row, "peer_"),
    ]
    return "| " + " | ".join(cells) + " |\n"


def notes(rows: list[Row]) -> str:
    text = ""
    for row in rows:
        if row["limit"]:
            text += f"- {row['name']}: {row['limit']}\n"
        if row["missing"]:
            text += f"- {row['name']}: missing. {row['missing']}.\n"
        if row.get("error", 0) > 0.05:
            text += f"- {row['name']}: known to {row['error']:.0%} only ({row['rounds']} rounds).\n"
    return text


def main() -> None:
    source, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    rows: list[Row] = [json.loads(text) for text in source.read_text().splitlines()]
    for row in rows:
        row["limit"] = LIMITS.get(row["key"], "") if row["met"] is False else ""
    (folder / "report.json").write_text(json.dumps(rows, indent=1) + "\n")
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}. "
    report = (
        f"{machine}Medians, and the ratios' range over rounds, ours and the peer's in turns; where "
        "the unit says p99, that of all rounds, and the range is of one round's.\n\n"
        f"{HEADER}{''.join(line(row) for row in rows)}\n{notes(rows)}"
    )
    (folder / "report.md").write_text(report)
    print(report, end="")


if __name__ == "__main__":
    main()
