"""The parser of every verb: argparse's, with errors in our form, and without abbreviated options."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
import sys
import typing
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin

from cluster_ddp.errors import SpecError, nearest, nearest_name
from cluster_ddp.option_form import flag, form_of

ASKED = "Reading the command line:"
HELP_ALL = "--help-all"


def whole_number(text: str) -> int:
    """Return an option's whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is a whole number, not {text!r}") from None


def _real_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is a number, not {text!r}") from None


class Parser(argparse.ArgumentParser):
    """Raises SpecError instead of printing the usage. Its parsing methods must be called inside `exit_on_error`.

    An abbreviated option would be one for argparse only: `--o HOST` would not send a verb to another machine.

    Args:
        prog: name of the command.
        description: text for --help, shown as it is.
        daily: the options that --help shows, in this order; --help-all shows all. Empty: --help shows all.
        others: other arguments of argparse's.
    """

    _words: Sequence[str] = ()

    def __init__(
        self, prog: str | None = None, *, description: str | None = None, daily: Sequence[str] = (), **others: Any
    ) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=form, allow_abbrev=False, **others)
        self.register("type", int, whole_number)
        self.register("type", float, _real_number)
        self._daily = daily
        if daily:
            self.add_argument(HELP_ALL, action=_HelpAll, nargs=0, help="show all options and exit")

    def format_help(self) -> str:
        """Return the text of --help."""
        return self._daily_help() if self._daily else super().format_help()

    @property
    def shows_all(self) -> str:
        """The command that shows all options."""
        return f"{self.prog} {HELP_ALL if self._daily else '--help'}"

    def _daily_help(self) -> str:
        by_name = {name: action for action in self._actions for name in action.option_strings}
        form = self._get_formatter()
        form.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        form.add_text(self.description)
        form.start_section("options for each day")
        form.add_arguments([by_name[name] for name in self._daily])
        form.end_section()
        form.add_text(f"All {len(self.option_names())} options: {self.shows_all}")
        return form.format_help()

    def print_help_all(self) -> None:
        """Print all options."""
        self._print_message(super().format_help(), sys.stdout)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse the words. Raises SpecError for an unknown word, or for a value that is missing or wrong."""
        parsed, rest = self.parse_known_args(args, namespace)
        if rest:
            words = list(self._words)  # with the value, which may have been taken as another argument
            at = words.index(rest[0]) if rest[0] in words else len(words)
            raise self._unknown(words[at:] or rest, parsed)
        return parsed

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the words that it knows; return the others, too. Raises SpecError for a missing or wrong value."""
        self._words = sys.argv[1:] if args is None else args
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise what argparse finds, as a SpecError."""
        found = re.sub(r"^argument ([^\s/]+)\S*: ", r"\1 ", message)  # of several names, the first
        raise SpecError(ASKED, found if found.endswith("?") else f"{found}.", self.shows_all)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            found = f"must be one of {', '.join(action.choices)}; it is {value!r}."
            raise argparse.ArgumentError(action, (found + nearest(value, action.choices)).removesuffix("."))

    def option_names(self) -> list[str]:
        """Return the options that --help shows, and those of its subcommands."""
        found: list[str] = []
        for action in self._actions:
            found += action.option_strings if action.help != argparse.SUPPRESS else ()
            if isinstance(action, argparse._SubParsersAction):
                found += [name for inner in action.choices.values() for name in inner.option_names()]
        return list(dict.fromkeys(found))

    def _unknown(self, rest: Sequence[str], parsed: argparse.Namespace) -> SpecError:
        """The error of words that the chosen subcommand, if there are any, does not take."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen, option = action.choices[getattr(parsed, action.dest)], rest[0].partition("=")[0]
                if owner := next((one for one in action.choices.values() if option in one.option_names()), None):
                    found = f"{option} is an option of {owner.prog}, not of {chosen.prog}."
                    meant = shlex.join([option, *filter(None, [value_of(rest)])])
                    return SpecError(ASKED, found, f"{owner.prog} {meant}; all options: {self.shows_all}")
                return unknown(rest, chosen.option_names(), self.shows_all)
        return unknown(rest, self.option_names(), self.shows_all)


class _HelpAll(argparse.Action):
    """Prints all options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        parser.print_help_all()
        parser.exit()


# A field's type -> its option.
_FORMS: Mapping[Any, Mapping[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction, "default": None},
    tuple: {"action": "extend", "nargs": "+", "metavar": "TEXT"},
    int: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    Path: {"type": Path, "metavar": "PATH"},
    str: {"metavar": "TEXT"},
}


def add_fields(
    group: Any,
    of: type,
    *,
    with_texts: bool,
    left_out: Collection[str] = (),
    forms: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """Add an option for each field of a dataclass. One that is not given is None.

    Args:
        group: a parser or a group of it.
        of: the dataclass.
        with_texts: read the fields' docstrings for --help, which takes some milliseconds.
        left_out: fields without an option.
        forms: what `add_argument` gets for a field, beside what its type and its `Form` tell.
    """
    texts, kinds = field_texts(of) if with_texts else {}, typing.get_type_hints(of)
    for one in (one for one in dataclasses.fields(of) if one.name not in left_out):
        form, kind = form_of(one), kinds[one.name]
        kind = get_args(kind)[0] if NoneType in get_args(kind) else kind
        is_choice = get_origin(kind) is Literal
        given: dict[str, Any] = {"choices": get_args(kind)} if is_choice else {**_FORMS[get_origin(kind) or kind]}
        if metavar := form.metavar or (f"{{{','.join(form.one_of)}}}" if form.one_of else ""):
            given["metavar"] = metavar
        given |= forms.get(one.name, {})
        shown = " ".join(one.default) if isinstance(one.default, tuple) else one.default
        is_shown = shown not in (None, False, "", dataclasses.MISSING)
        default = form.by_default or (str(shown) if is_shown else "")
        text = texts.get(one.name, "") + (f" (default: {default})" if default else "")
        group.add_argument(flag(one.name), *form.names, help=text.replace("%", "%%"), **given)


def add_on(group: Any) -> None:
    """Add --on to a parser or a group of it: the option of all verbs that also run on another machine (`remote`)."""
    text = "the cluster, reached by ssh; the project's copy is there in FOLDER (default: cluster_ddp/NAME)"
    group.add_argument("--on", metavar="HOST[:FOLDER]", help=text)


def jobs_parser(program: str, description: str | None) -> Parser:
    """Return the parser of a verb that reads run directories, with --runs-dir and --on."""
    made = Parser(program, description=description)
    folder = "folder of the run directories (default: runs)"
    made.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help=folder)
    add_on(made)
    return made


def field_texts(of: type) -> dict[str, str]:
    """Return the docstrings under a dataclass's fields, and under those that it inherits."""
    import ast
    import inspect

    texts = {}
    for kind in (kind for kind in reversed(of.__mro__) if dataclasses.is_dataclass(kind)):
        (definition,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(definition, ast.ClassDef)
        for before, after in zip(definition.body, definition.body[1:]):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
            ):
                assert isinstance(after.value, ast.Constant)
                texts[before.target.id] = " ".join(str(after.value.value).split())
    return texts


def unknown(rest: Sequence[str], legal: Iterable[str], shows_all: str) -> SpecError:
    """Return the error of words that no option takes. Its hint has the nearest option, with the value that was given.

    Args:
        rest: the words.
        legal: the options.
        shows_all: the command that shows all options, for the hint.
    """
    option, value, hint = rest[0].partition("=")[0], value_of(rest), shows_all
    if not option.startswith("-"):
        return SpecError(ASKED, f"{rest[0]!r} is one word too many.", hint)
    near = nearest_options(option, legal)
    if len(near) == 1 or (near and value.isdecimal()):
        hint = f"{shlex.join([near[0], *filter(None, [value])])}; all options: {hint}"
    meant = f" Did you mean {' or '.join(near)}?" if near else ""
    return SpecError(ASKED, f"there is no option {option}.{meant}", hint)


def value_of(words: Sequence[str]) -> str:
    """Return the value of the option that words begin with, behind its "=" or as the next word; "" without one."""
    _, equals, value = words[0].partition("=")
    return value if equals else next((word for word in words[1:2] if not word.startswith("-")), "")


def joined(words: Sequence[str], *options: str) -> list[str]:
    """Join options whose value begins with dashes with that value: `--sbatch-options --nice` to `…=--nice`."""
    made: list[str] = []
    for word in words:
        if made and made[-1] in options and word.startswith("-"):
            made[-1] = f"{made[-1]}={word}"
        else:
            made.append(word)
    return made


def nearest_options(option: str, names: Iterable[str]) -> list[str]:
    """Return the options that begin so, or the nearest one."""
    bare = {name.lstrip("-"): name for name in names if name.startswith("--")}
    word = option.lstrip("-")
    longer = [name for one, name in bare.items() if len(word) > 1 and one.startswith(word)]
    if not longer and (near := nearest_name(word, bare)) is not None:  # without the dashes, which are alike in all
        longer = [bare[near]]
    return longer
