# SPDX-License-Identifier: Apache-2.0
"""What a `Client` asks about a model, its versions on the server's disk, and the files beside them."""

from __future__ import annotations

from collections.abc import Collection

from ema_client import _ema
from ema_client._client.files import FilesLike, small_files
from ema_client._client.timeouts import check_timeout
from ema_client._client.types import (
    Checkpoint,
    CheckpointInfo,
    Label,
    MetricResult,
    ModelInfo,
    Version,
    model_from,
    version_from,
    version_id,
)
from ema_client._errors import InvalidArgumentError
from ema_client._given import names_from


class CheckpointCalls:
    """A part of `Client`, which has the connection."""

    _client: _ema.Client
    _timeout_s: float
    _transfer_timeout_s: float

    def _timeout(self, timeout_s: float | None, *, is_transfer: bool = False) -> float:
        """A call's, or the client's if it has none. InvalidArgumentError: it is none."""
        if timeout_s is None:
            return self._transfer_timeout_s if is_transfer else self._timeout_s
        check_timeout("timeout_s", timeout_s)
        return timeout_s

    def model(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        """What the server has of a model. NotFoundError: nothing."""
        return model_from(self._client.get_model(name, self._timeout(timeout_s)))

    def attach_files(
        self, name: str, files: FilesLike, *, timeout_s: float | None = None
    ) -> tuple[str, ...]:
        """Puts small files, such as config.json, beside a model's weights.

        Checkpoints have them from the next one on, in each track's folder, so that
        `transformers`' `from_pretrained` reads such a folder as it is. They take the place of those
        of the same names. At most 64 files of 64 MiB.

        Args:
            name: the model.
            files: contents by name; or a folder such as `save_pretrained` makes, of which everything
                that describes a model is taken: .json (but no index of weights), .txt, .model, .jinja.
            timeout_s: seconds for each file.

        Returns:
            The names.

        Raises:
            InvalidArgumentError: a name like those of weights' files, or a file that is too large.
            NotFoundError: no such model.
            ResourceExhaustedError: no memory on the server, or too many files.

        Example:
            >>> model.config.save_pretrained("described")
            >>> tokenizer.save_pretrained("described")
            >>> client.attach_files("m", "described")
            ('config.json', 'tokenizer.json', 'tokenizer_config.json')
        """
        contents = small_files(files)
        for file, data in contents.items():
            self._client.attach_file(name, file, data, self._timeout(timeout_s))
        return tuple(contents)

    def attached_files(self, name: str, *, timeout_s: float | None = None) -> dict[str, bytes]:
        """What `attach_files` has put there, by name. NotFoundError: no such model.

        AbortedError: somebody keeps putting other contents there.
        """
        timeout = self._timeout(timeout_s)
        names: dict[str, int] = self._client.get_model(name, timeout)["attached_files"]
        return {file: self._client.get_attached_file(name, file, timeout) for file in names}

    def remove_file(self, name: str, file: str, *, timeout_s: float | None = None) -> None:
        """Takes away what `attach_files` has put there; one that is not there is OK."""
        self._client.remove_file(name, file, self._timeout(timeout_s))

    def create_checkpoint(
        self,
        name: str,
        *,
        version: int | Version | None = None,
        tracks: str | Collection[str] | None = None,
        label: str | None = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Checkpoint:
        """Saves a version. When it returns, that is on the server's disk, unless `wait` is False.

        What is saved already is not written again, but for the newest version, if the model's tracks or
        attached files have changed since. Training and pulls do not wait for it.

        Args:
            name: the model.
            version: a number or a record; None: the newest.
            tracks: only these: for serving, not for the server to start from. None: all.
            label: a name for it, which keeps it whatever retention says. Not with `tracks`.
            wait: False: returns when the version is pinned; `checkpoint` tells the rest.
            timeout_s: seconds.

        Raises:
            FailedPreconditionError: nothing committed yet, or the server has no disk.
            NotFoundError: no such model or track.
            OutOfRangeError: the version is not kept any more, or not committed yet.
            ResourceExhaustedError: the disk is full, or readers hold too many other versions, or, with
                `wait` False, too many wait to be saved.
            UnavailableError: the server's disk has failed.
            DataLossError: what was read back is not what was written.

        Example:
            >>> saving = client.create_checkpoint("m", wait=False)
            >>> client.checkpoint("m", saving.name).state
            'saving'
        """
        number, incarnation = version_id(version)
        record, checkpoint, total_bytes, state = self._client.create_checkpoint(
            name,
            number,
            incarnation,
            names_from("tracks", tracks),
            label or "",
            wait,
            self._timeout(timeout_s, is_transfer=True),
        )
        return Checkpoint(
            version_from(record),
            checkpoint,
            total_bytes,
            "saving" if state == "saving" else "complete",
        )

    def checkpoint(
        self, name: str, checkpoint: str, *, timeout_s: float | None = None
    ) -> CheckpointInfo:
        """One checkpoint, also one that is being written or could not be. NotFoundError."""
        return CheckpointInfo(
            **self._client.get_checkpoint(name, checkpoint, self._timeout(timeout_s))
        )

    def checkpoints(
        self, name: str, *, timeout_s: float | None = None
    ) -> tuple[CheckpointInfo, ...]:
        """What is on the disk, is being written, or could not be; newest first."""
        checkpoints, _ = self._client.list_checkpoints(name, self._timeout(timeout_s))
        return tuple(CheckpointInfo(**checkpoint) for checkpoint in checkpoints)

    def delete_checkpoint(
        self, name: str, checkpoint: str, *, timeout_s: float | None = None
    ) -> None:
        """Removes a checkpoint; one that is not there is OK. Pulls that read it finish.

        Raises:
            FailedPreconditionError: it has labels, or is the newest.
            UnavailableError: the server's disk has failed.
        """
        self._client.delete_checkpoint(name, checkpoint, self._timeout(timeout_s))

    def labels(self, name: str, *, timeout_s: float | None = None) -> dict[str, Label]:
        """The labels of a model's versions, by name."""
        _, labels = self._client.list_checkpoints(name, self._timeout(timeout_s))
        return {label["name"]: Label(**label) for label in labels}

    def set_label(
        self,
        name: str,
        label: str,
        *,
        version: int | Version | None = None,
        timeout_s: float | None = None,
    ) -> Label:
        """Gives a version a name, which it takes from any other, and saves it if need be.

        Retention keeps what has a label, and `pull(..., version=label)` reads it.

        Args:
            name: the model.
            label: such as "stable": letters, digits, `.`, `_`, `-`; not digits only.
            version: a number or a record; None: the newest.
            timeout_s: seconds.

        Raises:
            EmaError: as `create_checkpoint`.
        """
        number, incarnation = version_id(version)
        timeout = self._timeout(timeout_s, is_transfer=True)
        return Label(**self._client.set_label(name, label, number, incarnation, timeout))

    def remove_label(self, name: str, label: str, *, timeout_s: float | None = None) -> None:
        """Takes a name away; one that is not there is OK. Its checkpoint falls to retention."""
        self._client.remove_label(name, label, self._timeout(timeout_s))

    def report_metric(
        self,
        name: str,
        version: int | Version,
        value: float,
        *,
        lower_is_better: bool = False,
        label: str = "best",
        timeout_s: float | None = None,
    ) -> MetricResult:
        """An evaluator's score for a version: the first and each better one moves `label` to it.

        Of equal scores the first that was reported keeps the label.

        Args:
            name: the model.
            version: that was evaluated, such as a pull's `weights.version`.
            value: the score.
            lower_is_better: as for a loss; the same for all scores of a label.
            label: what moves.
            timeout_s: seconds.

        Raises:
            InvalidArgumentError: the score is no number, the direction is another than before, or
                `set_label` has set the label, which stays until it is removed.
            OutOfRangeError: the version has gone while it was measured, so the score counts for nothing.
                It stays with a larger `max_pinned_versions` of the model, or a `set_label` before.
            EmaError: as `set_label`.

        Example:
            >>> weights = client.pull("m", track="ema")
            >>> client.report_metric("m", weights.version, accuracy(weights))
            >>> best = client.pull("m", track="ema", version="best")
        """
        if isinstance(value, bool):  # Of a comparison, say; it would count as 1.
            raise InvalidArgumentError(f"value {value!r}: must be a number")
        number, incarnation = version_id(version)
        timeout = self._timeout(timeout_s, is_transfer=True)
        fields, moved = self._client.report_metric(
            name, number, incarnation, value, lower_is_better, label, timeout
        )
        return MetricResult(Label(**fields), moved)

    def restore(
        self,
        name: str,
        *,
        version: int | Version | None = None,
        label: str | None = None,
        timeout_s: float | None = None,
    ) -> Version:
        """Rolls a model back: makes a new version that is what an earlier one was.

        The run ends, so whoever pushed is fenced; the next run goes on from there. Versions between
        stay what they were. Not tried again by itself when the connection breaks: then look at the
        newest version's `restored_from`.

        Args:
            name: the model.
            version: a number or a record, in memory or on the disk.
            label: instead: the version that has it.
            timeout_s: seconds.

        Returns:
            The new version; its `restored_from` is the earlier one.

        Raises:
            InvalidArgumentError: not one of version and label.
            NotFoundError: no such model or label.
            OutOfRangeError: the version is not kept; the message lists what is.
            FailedPreconditionError: the checkpoint has not all tracks.
            DataLossError: the checkpoint is damaged.
        """
        if (version is None) == (label is None):
            raise InvalidArgumentError(
                f"restore takes a version or a label, given are {version} and {label}"
            )
        number, incarnation = version_id(version)
        timeout = self._timeout(timeout_s, is_transfer=True)
        return version_from(
            self._client.restore_checkpoint(name, number, incarnation, label or "", timeout)
        )
