"""Which checkpoint a training continues from; and a model's weights from one, without a training."""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.run.files import remove_leftovers
from cluster_ddp.runtime.checkpoint import checkpoint_file, compatibility
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError, UnusableError
from cluster_ddp.runtime.checkpoint.folder import REFUSED, CheckpointFolder, named_by
from cluster_ddp.runtime.checkpoint.sharded import pieces_file
from cluster_ddp.runtime.checkpoint.sharded.resharding import SavedPieces, filled
from cluster_ddp.runtime.checkpoint.state import TrainingState
from cluster_ddp.runtime.model.ddp import unwrapped
from cluster_ddp.runtime.run_dir import fenced_writes, start_log
from cluster_ddp.runtime.run_dir.metrics import set_aside
from cluster_ddp.runtime.run_dir.run_dir import RunDir
from cluster_ddp.runtime.world import World
from cluster_ddp.slurm.topology import Topology
from cluster_ddp.slurm.variables import node_name

log = logging.getLogger("cluster_ddp")


def load_into(state: TrainingState, folder: CheckpointFolder, run_dir: RunDir, resume: str | os.PathLike[str]) -> bool:
    """Load the checkpoint to resume from, which rank 0 chooses for all ranks, if there is one. A collective.

    The records of metrics.jsonl after it are cut off. Returns whether the checkpoint is one of this run directory.

    Raises:
        CheckpointError: it doesn't fit, can't be found or can't be loaded.
        RunDirError: the run directory can't be written.
        DataError: too few samples are left in the epoch for this number of ranks.
    """
    world = state.world
    with run_dir.written():
        found = _chosen(state, folder, resume, run_dir)
        if found is None or not found[2]:
            run_dir.begin_records(anew=world.topology.restart_count == 0)
    if found is None:
        _note_start(state, run_dir, {})
        return False
    path, digest, is_own = found
    _see(world, path, digest)
    saved = read(path)
    if complaint := state.complaint(saved):
        hint = f"give this training its own run directory (--run-dir PATH), or {compatibility.START_ANEW}"
        raise CheckpointError(f"Resuming from {path}:", f"{complaint}.", hint)
    metrics_bytes, bests, differences = saved["metrics_bytes"], saved["bests"], state.differences(saved)
    saved_by = saved["saved_by"] if is_own else {}
    is_finished = is_own and bool(saved["position"].get("finished"))  # another run's end is a beginning
    pieces = SavedPieces(path, saved)
    settings = [{name: one[name] for name in ("settings", "first_settings", "arrays")} for one in saved["ranks"]]
    del saved  # frees its memory
    state.load(functools.partial(read, path), pieces)
    if is_own:  # else those of this script hold: it may freeze what the other one has trained
        state.load_settings(settings)
    if is_finished:
        state.finish()
    if is_own:
        with run_dir.written():
            run_dir.continue_metrics(metrics_bytes)
        differences += folder.resume(bests, path, state.steps) if world.is_main else []
    _note_start(state, run_dir, saved_by)
    lines = [f"Resuming from {path}: {state.place_in_words()}", *differences]
    if any(shard.seen for shard in state.shards):
        lines.append("Code of the loop before an epoch's first batch, if any, runs again, with the weights of now.")
    world.print("\n  ".join(lines))
    return bool(is_own)


def _note_start(state: TrainingState, run_dir: RunDir, saved_by: Mapping[str, Any]) -> None:
    """Note in starts.jsonl that the run starts, which is the one that has saved the checkpoint, if that is its own."""
    if state.world.is_main:
        state.name_run(_key(saved_by) or _key(start_log.last_start(run_dir.path)) or secrets.token_hex(8))
        start_log.note_start(
            run_dir.path,
            state.world.topology,
            step=state.steps,
            saved_s=saved_by.get("time"),
            seen_s=run_dir.seen_s,
            key=state.run_key,
        )


def _chosen(
    state: TrainingState, folder: CheckpointFolder, resume: str | os.PathLike[str], run_dir: RunDir
) -> tuple[Path, str, bool] | None:
    """What `_choose` chooses on rank 0, on all ranks. A collective."""
    nothing: Any = None
    if not state.world.is_main:
        pieces_file.answer_checks(state.world, state.sharded)
        return state.world.broadcast(nothing)  # type: ignore[no-any-return]  # of the type that rank 0 gave
    found = _choose(state, folder, resume, start_log.last_start(run_dir.path))
    state.world.broadcast(nothing)  # no further checks
    return state.world.broadcast(found)


def _choose(
    state: TrainingState, folder: CheckpointFolder, resume: str | os.PathLike[str], last_start: Mapping[str, Any]
) -> tuple[Path, str, bool] | None:
    """The checkpoint to resume from, its SHA-256, and whether it is in this run directory; None if there is none.

    It is called on rank 0 only. `last_start` is the record of the start before, from starts.jsonl.
    """
    topology = state.world.topology
    check_pieces = functools.partial(pieces_file.check_on_all_ranks, state.world, state.sharded)
    remove_leftovers(folder.path)
    pieces_file.remove_orphans(folder.path)
    is_anew = resume == "never" and not topology.restart_count
    there = [] if is_anew else folder.files()
    newest = _newest(topology, folder, last_start, check_pieces) if there else None
    if there and not newest:
        words = "All %d checkpoints in %s are damaged: nothing there is left to resume from. The training begins again."
        log.error(words, len(there), folder.path)
    if resume == "never" and not (
        newest and topology.restart_count and checkpoint_file.read(newest[0])["saved_by"]["job"] == topology.job_label
    ):
        set_aside(folder.path)
        newest = None
    if newest:
        if resume not in ("auto", "never") and not topology.restart_count:
            log.warning("%s already has checkpoints: %s is not used.", folder.path, resume)
        return (*newest, True)
    if resume not in ("auto", "never"):
        return (*named_by(Path(resume), check_pieces), False)
    if topology.restart_count and not there:
        where = f"restart {topology.restart_count} of job {topology.job_label}"
        log.warning("This is %s, and there is no checkpoint in %s yet.", where, folder.path)
    return None


def _newest(
    topology: Topology, folder: CheckpointFolder, last_start: Mapping[str, Any], check_pieces: Callable[[Path], None]
) -> tuple[Path, str] | None:
    """The newest checkpoint of this run with usable content; newer ones are set aside. None if all are damaged.

    Raises:
        CheckpointError: none can be used, and a new start would lose what they hold: some are undamaged, as with
            another torch. Or all are damaged, and this job was started to resume them. A requeued job begins again.
    """
    key = _key(last_start)

    def check(path: Path) -> None:
        saved_by = _content(path)["saved_by"]
        if key and (other := _key(saved_by)) and other != key:
            raise UnusableError(f"another run has saved it (job {saved_by['job']})")
        check_pieces(path)

    found, refused = folder.newest(check)
    if refused and not found:
        for path, why in refused.items():
            if isinstance(why, UnusableError):
                raise _unusable(path, why)
        if not topology.restart_count or last_start.get("job") != (topology.job_label or ""):
            words = "; ".join(f"{path.name}: {why}" for path, why in refused.items())
            aside = f"mv {shlex.quote(str(folder.path))} {shlex.quote(f'{folder.path}.damaged')}"
            hint = f"restore them from a copy; or, to begin again at step 0, move them away and start again: {aside}"
            raise CheckpointError(f"Resuming from {folder.path}:", f"all checkpoints are damaged. {words}.", hint)
    put_aside(refused, found)
    return found


def put_aside(refused: Mapping[Path, DamagedError], instead: tuple[Path, str] | None) -> None:
    """Rename checkpoints that can't be used to *.damaged, and log them; see `CheckpointFolder.newest`."""
    for path, why in refused.items():
        aside = path.with_name(f"{path.name}.damaged")
        fenced_writes.check()
        path.replace(aside)
        pieces_file.put_aside(path)
        words = f"{REFUSED} It is renamed to %s%s."
        log.warning(words, path, why.verdict, why, aside.name, "; the one before is used" if instead else "")


def _key(record: Mapping[str, Any]) -> str | None:
    """The key of the run that has saved a checkpoint, or has started; None if nothing says it."""
    key = record.get("run")
    return key if isinstance(key, str) else None


def _see(world: World, path: Path, digest: str) -> None:
    """Raise CheckpointError if a node can't read the file that rank 0 has chosen, by its SHA-256. A collective."""
    is_reader = world.topology.local_rank == 0 and not world.is_main
    complaint = checkpoint_file.not_as_chosen(path, digest) if is_reader else None
    ranks = world.gather(complaint and f"on {node_name(os.environ)}: {complaint}")
    if found := next(filter(None, ranks), None):
        hint = "is the run directory on a file system that all nodes share?"
        raise CheckpointError(f"Resuming from {path}, as rank 0 does:", f"{found}.", hint)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint whose digest is right, mapped into memory (see `checkpoint_file.read`).

    Raises:
        CheckpointError: torch.load refuses it, or it is not a checkpoint.
        OSError: it can't be read.
    """
    try:
        return _content(path)
    except UnusableError as error:
        raise _unusable(path, error) from None


def _content(path: Path) -> dict[str, Any]:
    state = checkpoint_file.read(path)
    if words := compatibility.malformed(state):
        raise UnusableError(words)
    return state


def _unusable(path: Path, error: UnusableError) -> CheckpointError:
    hint = f"was it written by another program? Name a checkpoint of this training, or {compatibility.START_ANEW}"
    return CheckpointError(f"Resuming from {path}:", f"{error}.", hint)


def load_weights(path: str | os.PathLike[str], model: torch.nn.Module, *, part: str = "model") -> Path:
    """Load a model's parameters and buffers from a checkpoint. It needs no world; the model stays on its device.

    A sharded model (`World.wrap`) takes its own pieces, from whatever checkpoint.

    Args:
        path: a checkpoint, such as runs/fit-12/checkpoints/best-accuracy.pt; or a run directory: then its newest one.
        model: of the same architecture; wrapped, compiled or plain.
        part: the name that the model had in `Checkpointer`.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has no such part, or holds another model.
    """
    found, _ = named_by(Path(path))
    saved = read(found)
    parts = saved["parts"]
    asked = f"Loading {part!r} from {found}:"
    if part not in parts:
        raise CheckpointError(asked, f"it holds {', '.join(parts)}.", f"part={next(iter(parts), None)!r}")
    try:
        inner = unwrapped(model)
        inner.load_state_dict(filled(part, inner, parts[part], SavedPieces(found, saved)))
    except (RuntimeError, TypeError, AttributeError) as error:  # missing names, other shapes; not a module's state
        hint = "make the model with the same arguments as in the training"
        raise CheckpointError(asked, f"{str(error)[:500]}.", hint) from error
    except UnusableError as error:
        raise CheckpointError(asked, f"{error}.", "name another checkpoint, or make this one again") from None
    return found
