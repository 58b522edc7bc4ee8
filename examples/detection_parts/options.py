"""Options from a TOML file, and from the command line over it."""

import argparse
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

MODES = ("training", "evaluation", "benchmark-training", "benchmark-inference")
BACKBONES = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "vgg16")
CHOICES = {"mode": MODES, "backbone": BACKBONES, "amp": ("off", "bfloat16", "float16")}
# The defaults are for generated boxes; detection.toml has those for COCO.
OPTIONS: dict[str, tuple[Any, str]] = {
    "mode": ("training", "what to do"),
    "data": ("", "folder of COCO, with train2017, val2017 and annotations; without it: generated boxes"),
    "samples": (64, "number of generated images to train on; a quarter as many to evaluate on"),
    "backbone": ("resnet18", "vgg16 is torchvision's ssd300_vgg16"),
    "backbone_weights": ("", "file with torchvision's weights of the ResNet; without it: random ones"),
    "weights": ("", "checkpoint or run directory to evaluate"),
    "resume": ("auto", "checkpoint to begin with; auto: the newest of the run directory"),
    "epochs": (4, "number of epochs"),
    "evaluate_at": ([1, 3], "epochs, counted from 0, after which to evaluate"),
    "batch_size": (4, "images per GPU and step"),
    "accumulate": (1, "steps of one update"),
    "lr": (0.04, "learning rate for 32 images per update; it grows with their number"),
    "momentum": (0.9, "momentum of SGD"),
    "weight_decay": (5e-4, "weight decay of all but biases"),
    "decay_at": ([3], "epochs, counted from 0, that begin with a tenth of the learning rate before"),
    "warmup_steps": (8, "updates in which the learning rate rises"),
    "amp": ("off", "mixed precision; float16 needs a GPU"),
    "workers": (0, "loader processes per GPU"),
    "seed": (42, "random seed for weights, shuffling and augmentation"),
    "report_every": (4, "updates between two reports"),
    "benchmark_steps": (20, "measured steps of a benchmark"),
}


def read(arguments: list[str]) -> argparse.Namespace:
    """Return the options of the command line, over those of the file that --config names."""
    parser = argparse.ArgumentParser(
        description="SSD300 on COCO or on generated boxes. Each option is also a key of the TOML file (a_b for --a-b).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options")
    for name, (default, words) in OPTIONS.items():
        several, kind = (None, type(default)) if not isinstance(default, list) else ("*", int)
        more = {"choices": CHOICES[name]} if name in CHOICES else {"metavar": kind.__name__.upper()}
        parser.add_argument(flag(name), type=kind, nargs=several, default=default, help=words, **more)
    path = parser.parse_args(arguments).config
    options = parser.parse_args([*from_file(path, parser), *arguments]) if path else parser.parse_args(arguments)
    if options.mode == "evaluation" and not options.weights:
        parser.error("--mode evaluation needs --weights")
    if options.backbone == "vgg16" and options.backbone_weights:
        parser.error("--backbone-weights are those of a ResNet, not of vgg16")
    return options


def flag(name: str) -> str:
    """Return the option of the command line."""
    return "--" + name.replace("_", "-")


def from_file(path: str, parser: argparse.ArgumentParser) -> list[str]:
    """Return what a TOML file says as arguments, so that both are checked alike."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{path}: {error}")
    arguments = []
    for name, value in table.items():
        if name not in OPTIONS:
            near = "".join(f" Did you mean {one}?" for one in get_close_matches(name, OPTIONS, n=1))
            parser.error(f"{path}: there is no option {name!r}.{near} The options are {', '.join(OPTIONS)}.")
        arguments += [flag(name), *map(str, value if isinstance(value, list) else [value])]
    return arguments
