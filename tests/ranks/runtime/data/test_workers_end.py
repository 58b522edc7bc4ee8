"""However a training ends, its DataLoader workers end with it, and never before it.

Every form that a user writes: a script at the top level (whose shard lives to the end of the interpreter) or in a
function, our loader or the user's own, with and without workers, persistent or not.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from ranks import job_ids, slurm_step
from slowness import LIMIT_S, scaled

pytestmark = pytest.mark.full

JOB_ID = job_ids()
FORKS_RANKS = Path(__file__).with_name("forked_cases.py")
RANKS = 2
ENDINGS = {"success": 0, "USR1": 75, "TERM": 75, "exception": 1}
WORKERS = [(0, False), (1, True), (2, False)]
OWN_WORKERS = {"top level": (1, False), "function": (2, True)}

SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset
import cluster_ddp

class Numbers(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.tensor([float(index)])

class Once(Dataset):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        return index

OPTIONS = dict(num_workers={workers}, persistent_workers={persist})

{body}
"""

BODY = """
with cluster_ddp.distributed(cuda=False) as world:
    model = world.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    shard = world.shard(Numbers(), batch_size=8, shuffle_seed=1, **({shard_options}))
    numbers = iter({numbers})
    checkpoint = cluster_ddp.Checkpointer(world, shard=shard, model=model, optimizer=optimizer)
    for epoch in checkpoint.epochs(2 if "{ending}" in ("success", "exception") else 10**6):
        for batch in shard:
            next(numbers, None)
            if checkpoint.steps == 3:
                world.print("at step 3")
                if "{ending}" == "exception" and world.rank == 1:
                    raise ValueError("the one that matters")
            model(batch).sum().backward()
            optimizer.step()
            checkpoint.step()
            if epoch > 1:
                time.sleep(0.02)
    world.print("trained")
"""


@dataclass(frozen=True)
class Case:
    name: str
    script: str
    folder: str
    environments: list[dict[str, str]]
    warning: str | None
    """The signal that all processes get once rank 0 has printed "at step 3"."""


def case(folder: Path, number: int, form: str, loader: str, ending: str, workers: int, persist: bool) -> Case:
    name = f"{form}-{loader}-{ending}-{workers}{'-persistent' if persist else ''}"
    own = loader == "own"
    body = BODY.format(
        ending=ending,
        shard_options="{}" if own else "OPTIONS",
        numbers="DataLoader(Once(), batch_size=1, **OPTIONS)" if own else "()",
    )
    if form == "function":
        body = "def main():" + body.replace("\n", "\n    ") + "\nmain()"
    place = folder / name
    place.mkdir()
    script = place / "script.py"
    script.write_text(SCRIPT.format(workers=workers, persist=persist, body=body))
    run_dir = {"CLUSTER_DDP_RUN_DIR": str(place / "run")}
    environments = [slurm_step(rank, RANKS, job_id=JOB_ID + number, **run_dir) for rank in range(RANKS)]
    warning = ending if ending in ("USR1", "TERM") else None
    return Case(name, str(script), str(place), environments, warning)


@pytest.mark.parametrize("form", ["top level", "function"])
def test_every_form_ends_as_it_should(tmp_path: Path, form: str) -> None:
    loaders = [("ours", *workers) for workers in WORKERS] + [("own", *OWN_WORKERS[form])]
    forms = [(loader, ending, *workers) for (loader, *workers), ending in itertools.product(loaders, ENDINGS)]
    cases = [case(tmp_path, number, form, *values) for number, values in enumerate(forms)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    done = subprocess.run(
        [sys.executable, FORKS_RANKS, str(scaled(60))],
        input=json.dumps([asdict(one) for one in cases]),
        env={**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        timeout=scaled(LIMIT_S),
        check=True,
    )
    found = json.loads(done.stdout)
    wrong: dict[str, tuple[object, list[str]]] = {}
    for one, (_, ending, _, _) in zip(cases, forms):
        logs = [(Path(one.folder) / f"{rank}.log").read_text() for rank in range(RANKS)]
        said = complaints(logs, ending)
        if found[one.name] != {"statuses": [ENDINGS[ending]] * RANKS, "left": False} or said:
            wrong[one.name] = (found[one.name], said)
    assert not wrong, "\n".join(f"{name}: {outcome} {' | '.join(said)}" for name, (outcome, said) in wrong.items())


def complaints(logs: list[str], ending: str) -> list[str]:
    """What is in the logs though it should not, or is not though it should."""
    everything = "".join(logs)
    expected = {
        "success": ["trained"],
        "USR1": ["Stopped after step", "Saved."],
        "TERM": ["Stopped after step", "Saved."],
        "exception": ["ValueError: the one that matters", "stopped: rank 1"],
    }[ending]
    missing = [f"not said: {words}" for words in expected if words not in everything]
    unwanted = ["DataLoader worker", "Exception ignored", "NOT saved"]
    tracebacks = 1 if ending == "exception" else 0
    extra = [f"said: {words}" for words in unwanted if words in everything]
    if everything.count("Traceback") != tracebacks:
        extra.append(f"{everything.count('Traceback')} tracebacks")
    return missing + extra + (logs if missing or extra else [])


GIVEN_UP = """
import time
import torch
from torch.utils.data import Dataset
import cluster_ddp

class Slow(Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        time.sleep(600 * index)
        return torch.tensor([float(index)])

with cluster_ddp.distributed(cuda=False) as world:
    shard = world.shard(Slow(), batch_size=1, num_workers=1, persistent_workers=False)
    for batch in shard:
        break
{then}
print("given up", flush=True)
"""


@pytest.mark.parametrize("then", ["del shard, batch", ""])
def test_a_worker_that_is_busy_for_long_is_ended_too(tmp_path: Path, then: str) -> None:
    """torch waits for it for 5 s, and then sends a TERM, which it ignores."""
    script = tmp_path / "script.py"
    script.write_text(GIVEN_UP.format(then=then))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "CLUSTER_DDP_"))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=scaled(LIMIT_S))
    printed = done.stdout.splitlines()[-1]  # Gloo of torch 2.10 prints a line before
    assert (done.returncode, printed, done.stderr) == (0, "given up", "")
