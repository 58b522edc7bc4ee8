"""The parser of every verb: argparse's, with errors in our form, and without abbreviated options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from cluster_ddp.errors import SpecError, nearest, nearest_name

ASKED = "Reading the command line:"

# A message of argparse (3.10 to 3.14) -> what we say. {0} is the option or the argument.
_SAYINGS = (
    (r"argument (\S+): invalid int value: (.*)", "{0} is a whole number, not {1}."),
    (r"argument (\S+): invalid float value: (.*)", "{0} is a number, not {1}."),
    (r"argument (\S+): expected .*argument", "{0} needs a value."),
    (r"argument (\S+): ignored explicit argument (.*)", "{0} takes no value, but got {1}."),
    (r"argument (\S+): not allowed with argument (\S+)", "{0} and {1} exclude each other."),
    (r"the following arguments are required: (.*)", "{0} must be given."),
)


class Parser(argparse.ArgumentParser):
    """Raises SpecError instead of printing the usage. Its parsing methods must be called inside `exit_on_error`.

    An abbreviated option would be one for argparse only: `--o HOST` would not send a verb to another machine.

    Args:
        prog: name of the command.
        description: text for --help, shown as it is.
        others: other arguments of argparse's.
    """

    def __init__(self, prog: str | None = None, *, description: str | None = None, **others: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=form, allow_abbrev=False, **others)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the words. Raises SpecError for an unknown word, or for a value that is missing or wrong."""
        parsed, rest = self.parse_known_args(args, namespace)
        if not rest:
            return parsed
        option = rest[0].partition("=")[0]
        found = f"there is no option {option}.{nearest_option(option, self.option_names())}"
        self._refuse(found if option.startswith("-") else f"{rest[0]!r} is one word too many.")

    def error(self, message: str) -> NoReturn:
        """Raise what argparse finds, as a SpecError."""
        if match := re.fullmatch(r"argument (\S+): invalid choice: '(.*?)'.*\(choose from (.*)\)", message):
            legal = re.findall(r"[\w.-]+", match[3])
            self._refuse(
                f"there is no {match[1]} {match[2]!r}; there are {', '.join(legal)}.{nearest(match[2], legal)}"
            )
        for pattern, saying in _SAYINGS:
            if match := re.fullmatch(pattern, message):
                self._refuse(saying.format(*match.groups()), self.hint_for(*match.groups()))
        self._refuse(f"{message}.")

    def hint_for(self, option: str, value: str = "") -> str | None:
        """Return the option in the form that was probably meant; None if that is not clear."""
        return None

    def option_names(self) -> list[str]:
        """Return the options, and those of its subcommands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                found += [name for inner in action.choices.values() for name in inner.option_names()]
        return list(dict.fromkeys(found))

    def _refuse(self, found: str, hint: str | None = None) -> NoReturn:
        raise SpecError(ASKED, found, hint or f"{self.prog} --help")


def nearest_option(option: str, names: Iterable[str]) -> str:
    """Return a suggestion such as " Did you mean --name?": options that begin so, or the nearest."""
    bare = {name.lstrip("-"): name for name in names if name.startswith("--")}
    word = option.lstrip("-")
    longer = [name for one, name in bare.items() if len(word) > 1 and one.startswith(word)]
    if not longer and (near := nearest_name(word, bare)) is not None:  # without the dashes, which are alike in all
        longer = [bare[near]]
    return f" Did you mean {' or '.join(longer)}?" if longer else ""
