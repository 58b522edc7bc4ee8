"""`World.weights_digest` names what differs between ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from ranks import job_ids, run_ranks, slurm_step

import cluster_ddp


def digest_other_entries() -> None:
    with cluster_ddp.distributed(cuda=False) as world:
        model = world.wrap(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
        found = []
        for tensor in (model.module[1].running_mean, model.module[0].bias):
            with torch.no_grad():
                tensor.fill_(world.rank)
            try:
                world.weights_digest(model)
            except RuntimeError as error:
                found.append(str(error))
            if tensor is model.module[1].running_mean:
                world.share_buffers(model)
                assert world.weights_digest(model)
        if world.is_main:
            Path(os.environ["FOUND"]).write_text(json.dumps(found))


def test_buffers_and_weights_that_differ_are_named(tmp_path: Path) -> None:
    job_id, env = job_ids(), {"FOUND": str(tmp_path / "found"), "CLUSTER_DDP_RUN_DIR": str(tmp_path / "run")}
    ends = run_ranks(digest_other_entries, [slurm_step(rank, 2, job_id=job_id, **env) for rank in range(2)], tmp_path)
    assert [end.exit_code for end in ends] == [0, 0], ends
    buffers, weights = json.loads((tmp_path / "found").read_text())
    assert "same weights and different buffers: 1.running_mean" in buffers and "world.share_buffers(model)" in buffers
    assert weights == "The ranks have different weights: 0.bias."
