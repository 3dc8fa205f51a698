# SPDX-License-Identifier: Apache-2.0
"""Small files that lie beside a model's weights in its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Union

from ema_client._argument_checks import path_from

# Contents by name, or a folder.
FilesLike = Union[Mapping[str, bytes], str, "os.PathLike[str]"]

# Suffixes of the files in a Hugging Face folder that describe a model.
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}


def small_files(files: FilesLike) -> dict[str, bytes]:
    """Contents by name. From a folder, only the files that describe a model."""
    if isinstance(files, Mapping):
        return dict(files)
    return {
        path.name: path.read_bytes()
        for path in sorted(path_from("files", files).iterdir())
        if path.is_file()
        and path.suffix.lower() in _SUFFIXES
        and not path.name.lower().endswith(".index.json")
    }
