# SPDX-License-Identifier: Apache-2.0
"""What the pages and runbooks say to type at `emactl` is what it takes."""

from __future__ import annotations

import functools
import re
import subprocess

import pytest
from server_process import ROOT
from testing import EMACTL

PAGES = (
    "README.md",
    "client/docs/checkpoints.md",
    "client/docs/post-hoc.md",
    "client/docs/schedules.md",
    "client/docs/training-loop.md",
    "deploy/README.md",
    "deploy/docs/backup.md",
    "deploy/docs/checkpoints.md",
    "deploy/docs/configuration.md",
    "deploy/docs/disk-problems.md",
    "deploy/docs/emactl.md",
    "deploy/docs/install.md",
    "deploy/docs/limits.md",
    "deploy/docs/metrics.md",
    "deploy/docs/security.md",
    "deploy/docs/stopping.md",
    "deploy/prometheus/runbooks.md",
    "deploy/prometheus/alerts.yml",
)


@functools.cache
def help_of(command: str) -> str:
    asked = [EMACTL, *command.split(), "--help"]
    shown = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    return shown.stdout if shown.returncode == 0 else ""


@functools.cache
def commands_of(family: str) -> frozenset[str]:
    """The commands below `family`; none: it is one that does something."""
    listed = help_of(family).partition("\nSubcommands:\n")[2].partition("\n\n")[0]
    return frozenset(re.findall(r"^  ([\w-]+)", listed, re.MULTILINE))


def spans(text: str) -> list[str]:
    """Code that begins with `emactl`, or, in the same paragraph, with one of its commands; without that."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n#+ ", text):
        lines = re.findall(
            r"^(?:\S*/| *docker exec \S+ )*?emactl (.*?)(?:  +#.*)?$", paragraph, re.M
        )
        codes = re.findall(r"`([^`]+)`", paragraph)
        ours = [code.removeprefix("emactl ") for code in codes if code.startswith("emactl ")]
        if ours:
            ours += [code for code in codes if code.split()[0] in commands_of("")]
        found += lines + ours
    return found


def problem_of(line: str) -> str:
    """What `emactl LINE` has that it does not take; empty: nothing."""
    # Brackets are around what may be left out, bars between what there is to choose from.
    words = re.sub(r"[\[\]|]", " ", re.sub(r"'[^']*'", "X", line)).split()
    options = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", " ".join(words)))
    words = [word for word in words if word not in options]
    words = [word for word in words if word not in ("S", "...")]  # Of --server, and of anything.
    if not words:
        return ""
    if words[0] not in commands_of(""):
        return f"no command {words[0]}"
    families = commands_of(words[0])
    chosen = [f"{words[0]} {word}" for word in words[1:] if word in families] or [words[0]]
    if families and len(words) > 1 and words[1] not in families:
        return f"{words[0]} has no {words[1]}"
    known = " ".join(help_of(command) for command in (*chosen, ""))
    missing = [
        option for option in options if not re.search(rf"(?<!\S|,){option}\b|,{option}\b", known)
    ]
    return f"{chosen} have no {missing}" if missing else ""


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_options_exist(page):
    lines = spans((ROOT / page).read_text())
    assert lines, "the page has no command"
    assert not [f"emactl {line}: {why}" for line in lines if (why := problem_of(line))]


def test_a_wrong_line_is_found():
    assert problem_of("delete MODEL --yes")
    assert problem_of("delte MODEL")
    assert problem_of("checkpoint crate MODEL")
    assert not problem_of("delete MODEL --confirm MODEL [--purge]")
    assert not problem_of("--server S checkpoint create|list MODEL")
