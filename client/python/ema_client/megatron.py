# SPDX-License-Identifier: Apache-2.0
"""`EmaCallback` for Megatron-Bridge.

    >>> from ema_client.megatron import EmaCallback
    >>> average = EmaCallback("ema://host:50051/gpt", half_life="200ba")
    >>> pretrain(config, forward_step, callbacks=[average])

With Megatron-core alone, `ema_client.attach` takes the list of model chunks and the optimizer.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from ema_client._callbacks import (
    CallbackArguments,
    CallbackAverage,
    check_options,
    options_of_start,
    state_in,
    warn_of_newest,
    write_state,
)
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import as_module
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

if TYPE_CHECKING:
    from typing_extensions import Unpack


class EmaCallback:
    """Keeps the average of a training by Megatron-Bridge on an EMA Server.

    Each rank pushes the parts of the tensors that it has, under the names that Megatron-core's distributed
    checkpoints use. Steps that the optimizer skips do not count. Each checkpoint gets a file ema_state.json
    that identifies the average, which the server keeps on its disk; a training that loads the checkpoint also
    resumes that average.

    It has the methods of Megatron-Bridge's `Callback`, and need not be derived from it.

    Args:
        url: "ema://host:port/model".
        evaluate_with_average: evaluations and tests use the averaged weights of the last push; before the
            average starts, the model's own weights, with a warning.
        track: which average evaluations use. None: the only one that is not a copy, else "ema".
        arguments: of `ema_client.attach`, such as half_life, tracks, source or on_error. Times are in batches
            ("200ba": steps that the optimizer has made), unless you give `time`.

    Raises:
        TypeError: an option that `attach` does not have.
        InvalidArgumentError: an argument is wrong.
        EmaError: in the training: as `attach`.
    """

    def __init__(
        self,
        url: str,
        *,
        evaluate_with_average: bool = False,
        track: str | None = None,
        **arguments: Unpack[CallbackArguments],
    ) -> None:
        check_options(type(self).__name__, arguments)
        self._average = CallbackAverage(url, arguments, track=track)
        self._evaluates = evaluate_with_average
        # The average's state in the checkpoint that the training has loaded.
        self._loaded: dict[str, Any] | None = None

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, while a training runs: its `stats`, its newest `version`."""
        return self._average.attachment

    def on_checkpoint_load(self, context: Any) -> None:
        """Reads the checkpoint's ema_state.json, on rank 0. Collective."""
        ranks = Ranks.current(self._average.options.get("process_group"))
        saved: dict[str, Any] | None = None
        if ranks.rank == 0:
            saved = state_in(pathlib.Path(context.checkpoint_name))
        saved = ranks.broadcast(saved)
        if saved is not None and saved["global_step"] == context.state.train_state.step:
            self._loaded = saved["average"]

    def on_train_start(self, context: Any) -> None:
        self._average.close()  # After a training that an exception has ended.
        step = context.state.train_state.step
        if step > 0 and self._loaded is None:
            warn_of_newest(step)
        options = options_of_start(self._average.options, step=step, resume=self._loaded)
        self._loaded = None
        self._average.attachment = attach(
            context.model, context.optimizer, self._average.url, **options
        )

    def on_train_end(self, context: Any) -> None:
        self._average.close()

    def on_eval_start(self, context: Any) -> None:
        if self._evaluates:
            self._average.swap_in(as_module(context.model))

    def on_eval_end(self, context: Any) -> None:
        self._average.swap_out()

    on_test_start = on_eval_start
    on_test_end = on_eval_end

    def on_checkpoint_save(self, context: Any) -> None:
        """Writes ema_state.json into the checkpoint, on rank 0. Waits until the server has saved the average."""
        folder = pathlib.Path(context.checkpoint_name)
        ranks = Ranks.current(self._average.options.get("process_group"))
        if ranks.rank != 0 or not folder.is_dir():
            return
        if (average := self._average.saved_state()) is not None:
            write_state(folder, context.state.train_state.step, average)
