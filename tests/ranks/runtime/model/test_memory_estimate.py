"""What a training is said to need is what its tensors take."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import cluster_ddp
from cluster_ddp.cli import memory
from cluster_ddp.errors import SpecError
from cluster_ddp.runtime.model.memory_estimate import estimate, grouped
from cluster_ddp.runtime.model.model_wrapping import repeated_class

pytestmark = pytest.mark.full

JOB_ID = job_ids()
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "sgd-momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Layer(nn.Module):
    """A layer with rows that two ranks can't share equally, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 6))
        self.frozen = nn.Parameter(torch.ones(3, 2), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(inputs)
        return out + self.frozen.sum()


class Net(nn.Module):
    """Tied weights, layers, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def held(tensors: Iterable[torch.Tensor | None]) -> int:
    """The bytes of the memory in which tensors are, each once; of shards, this rank's."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors if one is not None]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}
    return sum(storages.values())


def taken(model: nn.Module, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> dict[str, int]:
    """The bytes after a step."""
    optimizer = make(model.parameters())
    model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return {
        "weights": held(parameters) + held(model.buffers()),
        "gradients": held(one.grad for one in parameters),
        "optimizer": held(one for one in states if one.dim()),  # without the counts of steps
    }


def measure() -> None:
    """In each rank, with each optimizer: under DDP, and in FSDP2."""
    with cluster_ddp.distributed() as world:
        for name, make in OPTIMIZERS.items():
            found = {"ddp": taken(world.wrap(Net()), make)}
            policy, model = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), Net()
            for module in (*model.layers, model):
                fully_shard(module, mp_policy=policy)
            found["fsdp"] = taken(model, make)
            world.print(json.dumps({"optimizer": name, **found}))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_takes_the_bytes_that_the_shapes_tell(tmp_path: Path, ranks: int) -> None:
    ends = run_ranks(measure, [slurm_step(rank, ranks, job_id=JOB_ID + ranks) for rank in range(ranks)], tmp_path)
    assert [end.exit_code for end in ends] == [0] * ranks, ends
    lines = [json.loads(line) for line in ends[0].output.splitlines() if line.startswith("{")]
    assert [line["optimizer"] for line in lines] == list(OPTIMIZERS)
    with torch.device("meta"):
        model = Net()
        for line in lines:
            needs = estimate(model, gpus=ranks, gpus_per_node=ranks, optimizer=line["optimizer"], mixed=torch.bfloat16)
            for need in needs:
                told = asdict(need)
                assert {key: told[key] for key in line[need.strategy]} == line[need.strategy], (need, line["optimizer"])


def test_what_is_in_flight_is_gathered_by_blocks() -> None:
    """In a backward pass: two layers whole, one's gradients and a reduce-scatter; and the rest all the time."""
    assert [len(group) for group in grouped(Net(), None)] == [1, 5, 5, 5] and repeated_class(Net()) == "Layer"
    layer, gradients, reduced = 112, 97, 104  # numbers; in two padded shards, but for gradients; six are frozen
    rest, rest_gradients = 72, 66
    whole = rest + rest_gradients + 2 * layer + gradients
    ddp, fsdp, hsdp = estimate(Net(), gpus=4, gpus_per_node=2)
    assert (ddp.in_flight, fsdp.shards, hsdp.shards) == (4 * rest_gradients, 4, 2)
    assert hsdp.in_flight == 4 * (whole + reduced)
    *_, hsdp = estimate(Net(), gpus=4, gpus_per_node=2, mixed=torch.bfloat16)
    assert hsdp.in_flight == 2 * whole + 4 * reduced


def test_the_command_says_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "small_net", raising=False)
    (tmp_path / "small_net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(1000, 1000)\n")
    words = [f"{tmp_path}/small_net.py:build", "--gpus", "4", "--gpus-per-node", "2", "--gpu-gb", "0.013"]
    assert memory.main(words) == 0
    heading, _, *rows, last = capsys.readouterr().out.splitlines()
    assert heading.endswith("1,001,000 parameters in float32, no repeated layers. MB on each GPU:")
    assert rows[0].split()[2:4] == ["4.00", "4.00"]  # weights and gradients of DDP
    assert [row.split()[0] for row in rows] == ["ddp", "fsdp", "hsdp"]
    assert [" ".join(row.split()[7:]) for row in rows] == ["does not fit", "fits", "does not fit"]
    assert last.startswith("Activations")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["small_net.py", "--gpus", "4", "--gpu-gb", "80"], "it is not FILE.py:FUNCTION"),
        (["no_net.py:build", "--gpus", "4", "--gpu-gb", "80"], "there is no file no_net.py"),
        (["small_net.py:built", "--gpus", "4", "--gpu-gb", "80"], "Did you mean build?"),
        (["small_net.py:with_size", "--gpus", "4", "--gpu-gb", "80"], "missing 1 required positional argument"),
        (["small_net.py:size", "--gpus", "4", "--gpu-gb", "80"], "it returned int"),
        (["trains.py:build", "--gpus", "4", "--gpu-gb", "80"], "at its top level it trains"),
        (["small_net.py:build", "--gpus", "4"], "Slurm does not say how much memory a GPU has"),
        (["small_net.py:build", "--gpu-gb", "80"], "--gpus 8"),
    ],
)
def test_the_command_says_what_it_lacks(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "small_net", raising=False)
    text = "def build():\n    pass\ndef with_size(size):\n    pass\ndef size():\n    return 1\n"
    (tmp_path / "small_net.py").write_text(text)
    (tmp_path / "trains.py").write_text(
        "import cluster_ddp\nwith cluster_ddp.distributed() as world:\n    print('trained')\n"
    )
    with pytest.raises(SystemExit):
        memory.main(words)
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 6, "gpus_per_node": 4}, "not a whole number of nodes"),
        ({"optimizer": "adamv"}, "Did you mean adamw?"),
        ({"blocks": ["Laier"]}, "Did you mean Layer?"),
    ],
)
def test_what_does_not_go_together_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        estimate(Net(), **{"gpus": 4, "gpus_per_node": 2, **options})  # type: ignore[arg-type]
