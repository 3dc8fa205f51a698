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
LIMITS: dict[str, str] = {
    "push": "gRPC's work beside the kernel's copy: 15 to 25 % more CPU time on each side than the "
    "plain socket's; the checksum is 17 % of the server's",
    "pull": "gRPC cannot receive in place: one more copy in the client (15 % of its time), and the "
    "checksum behind it (10 %)",
    "lane_push": "the client's one pass that copies and checksums (13 GB/s) is slower than the fold, "
    "for which the server waits a quarter of its time",
    "commit_size": "references to a block for each large tensor are put into the new snapshot: 0.04 ms",
    "tensors": "tensors below 4 KiB are copied in the client, and folded one by one in the server",
    "gpu_tracks": "9 reads and writes for 12 are 0.75 if all bytes take as long; one track, of whose bytes a "
    "third are writes, moves them 3 to 4 % faster than a copy does, half writes, and four tracks as fast",
    "gpu_second_reader": "of a track larger than 1 GiB a reader who comes later finds the first blocks "
    "no longer on the host",
    "evaluators": "32 threads that read and the server's share two cores",
    "readers": "the readers' threads and the server's share two cores; what is still in the sockets "
    "when the trainer's last byte leaves is folded between the readers' chunks",
}

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
    return f"{row['ratio']:.3f} ({row['ratio_min']:.3f} - {row['ratio_max']:.3f})"


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
