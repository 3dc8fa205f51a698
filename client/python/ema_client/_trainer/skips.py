# SPDX-License-Identifier: Apache-2.0
"""Which of many skipped steps a warning is given of."""

from __future__ import annotations

from ema_client._errors import EmaError
from ema_client._trainer.away import is_final, is_outage


def outlook(error: EmaError) -> str:
    """What becomes of the average after a step that was skipped for this reason."""
    if error.reason == "BAD_LAYOUT":
        return (
            "and no step can be pushed until the model is as it was at attach() (to go on with another, "
            "attach anew, to a model of another name)"
        )
    # One reason for both: only the advice goes by the text.
    if error.reason == "PLAN_MISMATCH" and str(error).startswith("frozen: "):
        return (
            "the average goes on with the next (a step is lost when frozen tensors change on some ranks "
            "only; after two they are pushed with each step, until attach() opens another run)"
        )
    if error.reason == "PLAN_MISMATCH":
        return "the average goes on when attach(time=) gives the same on all ranks"
    return "the average goes on with the next"


class Skips:
    """Counts steps that were skipped for one reason, so that their warnings become seldom.

    An outage is always worth one: while it lasts nothing is tried.
    """

    def __init__(self, *, says_all: bool) -> None:
        """`says_all`: but those that this rank itself is the reason of."""
        self._says_all = says_all
        self._counts: dict[tuple[type[EmaError], str], int] = {}
        # Those that are as likely after a push that succeeds: weights that are not finite.
        self._lasting: set[tuple[type[EmaError], str]] = set()

    def count(self, error: EmaError) -> int:
        """How many there have been with this one: the 1st, 2nd, 4th, 8th, ... are to be said. 0: this
        one is not."""
        if is_outage(error) or (self._says_all and not is_final(error)):
            return 1
        key = type(error), error.reason
        if is_final(error):
            self._lasting.add(key)
        count = self._counts[key] = self._counts.get(key, 0) + 1
        return count if count & (count - 1) == 0 else 0

    def end(self) -> None:
        """A push has succeeded."""
        self._counts = {key: count for key, count in self._counts.items() if key in self._lasting}
