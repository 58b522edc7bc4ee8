"""The parts of examples/detection.py. Here: its options. data.py: images with boxes, and the mAP. model.py: SSD300."""

import importlib
import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path


def read_options(arguments: list[str]) -> Namespace:
    """Return the options of the command line, over those of the file of --config, over the defaults of options.toml."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    parser = ArgumentParser(formatter_class=ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    parser.add_argument("--config", help="TOML file with options: a_b for --a-b")
    text = Path(__file__).with_name("options.toml").read_text()
    for (name, value), words in zip(toml.loads(text).items(), re.findall("  # (.*)", text)):
        flag, first = "--" + name.replace("_", "-"), value[0] if isinstance(value, list) else value
        choices = value if first is not value and isinstance(first, str) else None
        several = "*" if first is not value and not choices else None
        default = value if several else first
        parser.add_argument(flag, choices=choices, nargs=several, type=type(first), default=default, help=words)
    if path := parser.parse_args(arguments).config:
        try:
            table = toml.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
        for name, value in table.items():  # they become arguments, too, so that both are checked alike
            words = map(str, value if isinstance(value, list) else [value])
            arguments = ["--" + name.replace("_", "-"), *words, *arguments]
    options = parser.parse_args(arguments)
    if options.mode == "evaluation" and not options.weights:
        parser.error("--mode evaluation needs --weights")
    return options
