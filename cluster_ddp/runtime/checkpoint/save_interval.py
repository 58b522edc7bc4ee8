"""How often to save: "1epoch", "500steps", "10min" or "never". Imports no torch, since options are checked with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast

from cluster_ddp.errors import SpecError

Unit = Literal["epoch", "step", "min", "never"]


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of epochs, steps or minutes."""

    count: int
    unit: Unit

    @staticmethod
    def parse(text: str, *, has_epochs: bool = True) -> Interval:
        """Read text such as "1epoch", "2 epochs", "500steps", "10min" or "never".

        Raises:
            SpecError: it has another form, or is of epochs in a training that has none.
        """
        if text == "never":
            return Interval(0, "never")
        match = re.fullmatch(r"([1-9]\d*) ?(epoch|step|min)(?:s|(?<=min)utes?)?", text, re.ASCII)
        if match is None:
            legal = "a whole number of epochs, steps or minutes, or never"
            hint = 'every="1epoch", "500steps" or "10min" (of cluster-ddp train: --checkpoint-every)'
            raise SpecError(f"Saving a checkpoint every {text!r}:", f"it must be {legal}.", hint)
        if match[2] == "epoch" and not has_epochs:
            found = "a training without a shard has no epochs."
            raise SpecError(f"Saving every {text}:", found, "save every 500steps or 10min, or give shard=")
        return Interval(int(match[1]), cast(Unit, match[2]))

    def is_due(self, steps: int, epochs: int, *, epoch_ended: bool) -> bool:
        """Return whether to save after this many steps and whole epochs of the training."""
        if self.unit == "epoch":
            return epoch_ended and epochs % self.count == 0
        return self.unit == "step" and not epoch_ended and steps % self.count == 0

    def is_over(self, seconds: float) -> bool:
        """Return whether to save if the last save was this many seconds ago."""
        return self.unit == "min" and seconds >= 60 * self.count
