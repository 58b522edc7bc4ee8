"""`cluster-ddp export CHECKPOINT OUTPUT`: write a model's weights as a plain file for other tools, on one process.

12 model.pt           torch.load reads it, with weights_only=True
12 model.safetensors  so do Hugging Face's libraries (pip install safetensors)
12 FOLDER --dcp       model, optimizer and all other parts, in the format of torch.distributed.checkpoint

CHECKPOINT is a file, such as runs/fit-12/checkpoints/best-accuracy.pt; or a job or a run directory: then its newest
undamaged one. It may be a sharded one (FSDP). Nothing is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cluster_ddp.argument_parser import Parser
from cluster_ddp.errors import exit_on_error
from cluster_ddp.jobs import find_runs

PROGRAM = "cluster-ddp export"
_MB = 1e6


def parser() -> Parser:
    """The command line."""
    top = Parser(PROGRAM, description=__doc__)
    top.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, a job id, or a run directory")
    top.add_argument("output", type=Path, metavar="OUTPUT", help="….pt or ….safetensors; with --dcp a folder to make")
    part = "name in Checkpointer of the part to export (default: model; with --dcp all)"
    top.add_argument("--part", metavar="NAME", help=part)
    top.add_argument("--dcp", action="store_true", help="write a folder of torch.distributed.checkpoint")
    folder = "folder in which a job id is looked up (default: runs)"
    top.add_argument("--runs-dir", type=Path, default=Path("runs"), metavar="PATH", help=folder)
    return top


def main(argv: Sequence[str]) -> int:
    """Parse the options, write the output, say where it comes from. Returns the exit status."""
    with exit_on_error(PROGRAM):
        asked = parser().parse_args(argv)
        from cluster_ddp.runtime.checkpoint.export import export

        path = export(_checkpoint(asked.checkpoint, asked.runs_dir), asked.output, part=asked.part, as_dcp=asked.dcp)
        written = [asked.output, *asked.output.glob("*")]
        nbytes = sum(one.stat().st_size for one in written if one.is_file())
        what = asked.part or ("all parts" if asked.dcp else "model")
        print(f"{asked.output}: {what} of {path}, {nbytes / _MB:,.1f} MB")
    return 0


def _checkpoint(word: str, runs_dir: Path) -> Path:
    """The checkpoint or run directory that a word means."""
    path = Path(word)
    if path.exists() or path.name != word or path.suffix:
        return path  # what is wrong with it, `export` says
    found = find_runs.find(word, runs_dir)
    return find_runs.only(found, f"Exporting the model of job {word}:", runs_dir, PROGRAM).run_dir
