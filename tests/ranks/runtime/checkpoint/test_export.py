"""`cluster-ddp export`: the weights of a checkpoint, sharded or not, bit for bit, as other tools read them."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from safetensors.torch import load_file
from torch import nn

import cluster_ddp
from cluster_ddp.cli import export
from cluster_ddp.run import job_file
from cluster_ddp.run.job_file import JobFile
from cluster_ddp.runtime.model.ddp import unwrapped

pytestmark = pytest.mark.full

JOB_ID = job_ids()
SOURCES = ("ddp", "fsdp")
WIDTH, DEPTH = 1600, 10
BIG = 4 * DEPTH * WIDTH * WIDTH


class Low(nn.Linear):
    """In bfloat16: FSDP gathers each dtype apart."""


class Net(nn.Module):
    """Tied weights, buffers, 13 rows on two ranks, a single element, and two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(13, 6), nn.BatchNorm1d(6), nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.low, self.one = Low(5, 3, dtype=torch.bfloat16), nn.Parameter(torch.randn(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(torch.ones(5, dtype=torch.bfloat16)).float().sum()
        return self.head(self.norm(self.embed(x))) * self.one + low  # type: ignore[no-any-return]


class Big(nn.Sequential):
    """About 100 MB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Make one step with Adam."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(13)).square().sum().backward()
    optimizer.step()
    return optimizer


def whole(value: Any) -> Any:
    """A copy of a state with the whole of each sharded tensor. A collective."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def save() -> None:
    """A checkpoint under each strategy; beside it, with torch.save, what it must hold."""
    with cluster_ddp.distributed(cuda=False) as world:
        for strategy in SOURCES:
            torch.manual_seed(0)
            folder = Path(os.environ["RUN"], strategy)
            how: dict[str, Any] = {"strategy": strategy, "blocks": Low}
            model = world.wrap(Net(), **how)
            optimizer = trained(model)
            cluster_ddp.Checkpointer(world, run_dir=folder, model=model, optimizer=optimizer).finish()
            state = whole({"model": unwrapped(model).state_dict(), "optimizer": optimizer.state_dict()})
            big = world.wrap(Big(), **{**how, "blocks": nn.Linear})
            cluster_ddp.Checkpointer(world, run_dir=folder / "big", model=big).finish()
            if world.is_main:
                torch.save(state, folder / "expected.pt")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    ends = run_ranks(save, [slurm_step(rank, 2, job_id=JOB_ID, RUN=str(folder)) for rank in range(2)], folder)
    assert all(end.exit_code == 0 for end in ends), "\n".join(end.output for end in ends)
    return folder


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value in a state with its place; of a tensor its bytes, dtype and shape."""
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(item, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield name, (value.dtype, value.shape, value.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        yield name, value


def same(one: Any, other: Any) -> bool:
    return dict(flat(one)) == dict(flat(other))


@pytest.mark.parametrize("source", SOURCES)
def test_all_bits_arrive(runs: Path, source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = torch.load(runs / source / "expected.pt", weights_only=True)
    assert export.main([str(runs / source), str(tmp_path / "model.pt")]) == 0
    assert "model.pt: model of" in capsys.readouterr().out
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert same(weights, expected["model"])
    torch.save({name: value.clone() for name, value in weights.items()}, tmp_path / "alone.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("model.pt", "alone.pt")]
    assert abs(sizes[0] - sizes[1]) < 500, "the model's part of the pieces alone"
    model = Net()
    model.load_state_dict(weights)
    assert model.head.weight is model.embed.weight and same(model.state_dict(), expected["model"])
    checkpoint = next((runs / source).glob("checkpoints/*.pt"))
    assert export.main([str(checkpoint), str(tmp_path / "model.safetensors"), "--part", "model"]) == 0
    assert same(load_file(tmp_path / "model.safetensors"), expected["model"])
    assert export.main([str(runs / source), str(tmp_path / "optimizer.pt"), "--part", "optimizer"]) == 0
    assert same(torch.load(tmp_path / "optimizer.pt", weights_only=True), expected["optimizer"])


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_loader_reads_model_and_optimizer(runs: Path, source: str, tmp_path: Path) -> None:
    expected = torch.load(runs / source / "expected.pt", weights_only=True)
    assert export.main([str(runs / source), str(tmp_path / "folder"), "--dcp"]) == 0
    model = Net()
    states = {"model": model.state_dict(), "optimizer": trained(model).state_dict()}
    from torch.distributed import checkpoint as dcp  # half a second, which the other processes need not wait

    dcp.load(states, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert same(states, expected)
    assert export.main([str(runs / source), str(tmp_path / "one"), "--dcp", "--part", "model"]) == 0
    names = dcp.FileSystemReader(tmp_path / "one").read_metadata().state_dict_metadata
    assert {name.split(".")[0] for name in names} == {"model"}


def peak_bytes(call: Callable[[], object]) -> int:
    """By how much a call raises this process's memory, pages of mapped files included."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is

    def peak() -> int:
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

    before = peak()
    call()
    return peak() - before


def export_big() -> None:
    """In a process that has loaded nothing yet."""
    name, source = os.environ["NAME"], Path(os.environ["SOURCE"])
    argv = [str(source / "big"), name, *(["--dcp"] if name.endswith("dcp") else [])]
    export.main([str(source), f"{name}.warm{Path(name).suffix}", *argv[2:]])  # imports
    print(json.dumps(peak_bytes(lambda: export.main(argv))))


@pytest.mark.parametrize("source", SOURCES)
def test_the_model_is_in_memory_once_at_most(runs: Path, source: str, tmp_path: Path) -> None:
    names = {"big.pt": 1.2, "big.safetensors": 1.2, "big-dcp": 0.4}
    wanted = [{"NAME": str(tmp_path / name), "SOURCE": str(runs / source)} for name in names]
    ends = run_ranks(export_big, [{**os.environ, **one} for one in wanted], tmp_path)
    for end, (name, most) in zip(ends, names.items()):
        assert end.exit_code == 0, end.output
        assert int(end.output.splitlines()[-1]) < most * BIG, name
    assert (tmp_path / "big.pt").stat().st_size < 1.01 * BIG


@pytest.mark.parametrize("word", ["12", "fit"])
def test_a_job_means_its_run_directory(word: str, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all verbs take it."""
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "runs" / "fit-12"
    shutil.copytree(runs / "ddp", folder, ignore=shutil.ignore_patterns("big"))
    job_file.write(folder, JobFile("12"), shared=False)
    monkeypatch.chdir(tmp_path)
    assert export.main([word, "model.pt"]) == 0
    expected = torch.load(runs / "ddp" / "expected.pt", weights_only=True)["model"]
    assert same(torch.load("model.pt", weights_only=True), expected)
    with pytest.raises(SystemExit, match="2"):
        export.main(["13", "other.pt"])


REFUSALS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "exists": (["ddp", "there.pt"], ("there.pt: it exists, and is not replaced.",)),
    "folder exists": (["ddp", "there", "--dcp"], ("there: it exists",)),
    "no folder": (["ddp", "no/model.pt"], ("there is no folder", "Hint: mkdir -p")),
    "suffix": (["ddp", "model.safetensor"], ("must end in .pt or .safetensors. Did you mean .safetensors?", "--dcp")),
    "part": (["ddp", "model.pt", "--part", "optimiser"], ("it holds model, optimizer.", "Hint: --part optimizer")),
    "dcp part": (["fsdp", "model", "--dcp", "--part", "x"], ("it holds model, optimizer.", "Hint: --part model")),
    "no tensors": (["ddp", "model.safetensors", "--part", "optimizer"], ("something else: state, param_groups",)),
    "missing": (["nothing", "model.pt"], ("there is no such file",)),
    "damaged": (["damaged", "model.pt"], ("it has no undamaged checkpoint",)),
    "no library": (["fsdp", "m.safetensors"], ("can't be imported", "Hint: pip install safetensors; or write m.pt")),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source, output, *options), words = REFUSALS[name]
    (tmp_path / "there.pt").write_text("kept")
    (tmp_path / "there").mkdir()
    if name == "damaged":
        shutil.copytree(runs / "fsdp", tmp_path / "damaged", ignore=shutil.ignore_patterns("big"))
        pieces = next((tmp_path / "damaged").glob("checkpoints/*.pieces/rank-1-*"))
        pieces.write_bytes(pieces.read_bytes()[:-70] + bytes(70))
    if name == "no library":
        monkeypatch.setitem(sys.modules, "safetensors", None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    folder = tmp_path if name == "damaged" else runs
    with pytest.raises(SystemExit, match="2"):
        export.main([str(folder / source), str(tmp_path / output), *options])
    error = capsys.readouterr().err
    assert all(one in " ".join(error.split()) for one in words), error
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("output", ["model.pt", "model.safetensors", "folder"])
def test_a_full_disk_leaves_nothing(
    output: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SystemExit, match="2"):
        export.main([str(runs / "fsdp"), str(tmp_path / output), *(["--dcp"] if output == "folder" else [])])
    assert f"{output}:\n  No space left on device.\n  Hint: free space there" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
