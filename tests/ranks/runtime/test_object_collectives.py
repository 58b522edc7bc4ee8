"""Values on their way between ranks."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import job_ids, run_ranks, slurm_step

import cluster_ddp
from cluster_ddp.agent.channel import Key
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.runtime import object_collectives, rng

pytestmark = pytest.mark.full

NO_SECRET, OURS, OTHERS = Key(b"", "run"), Key(b"ours", "run"), Key(b"others", "run")
JOB_ID = job_ids()


class Malicious:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        0.1,
        float("-inf"),
        "a\nb\udc80é",
        b"\x00\n\xff",
        Path("/a b\n"),
        (),
        [1, (2, [b"", {"x": None}])],
        {1: "int", "1": "str", (1, 2): {}, None: [], 1.5: b"x"},
        ["list", "tuple", "bytes"],
        {frozenset({1})},
    ],
    ids=repr,
)
def test_plain_data_needs_no_pickle(value: object) -> None:
    data = object_collectives.pack(value, NO_SECRET)
    assert data.startswith(b"plain\n")
    back = object_collectives.unpack(data, NO_SECRET)
    assert (back, repr(back)) == (value, repr(value))  # 1 and True are equal, and so are 1 and 1.0


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float8_e4m3fn", "int64", "uint8", "complex64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_need_no_pickle(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).to(getattr(torch, dtype))[: int(torch.Size(shape).numel())].reshape(shape)
    back, flag = object_collectives.unpack(
        object_collectives.pack((tensor, torch.tensor([True, False])), NO_SECRET), NO_SECRET
    )
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert back.double().equal(tensor.double()) if not tensor.is_complex() else back.equal(tensor)
    assert flag.tolist() == [True, False]


class _Holder:
    """Must be pickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("is_pickled", [False, True])
def test_a_gpus_tensor_arrives_on_the_receivers_own_gpu(monkeypatch: pytest.MonkeyPatch, is_pickled: bool) -> None:
    """Not on the sender's: "cuda" without an index is the current device, which each rank has set to its own."""
    tensor, real, moves = torch.tensor([1.5, 2.5]), torch._C.TensorBase.device, []
    tensor.is_on_gpu_1 = True  # type: ignore[attr-defined]
    told = property(lambda self: torch.device("cuda", 1) if hasattr(self, "is_on_gpu_1") else real.__get__(self))
    monkeypatch.setattr(torch.Tensor, "device", told)
    sent = object_collectives.pack(_Holder(tensor) if is_pickled else tensor, OURS)
    assert sent.startswith(b"pickled" if is_pickled else b"plain") and b"cuda:" not in sent
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: moves.append(torch.device(device)) or self)
    back = object_collectives.unpack(sent, OURS)
    assert moves == [torch.device("cuda")]
    assert (back.tensor if is_pickled else back).tolist() == [1.5, 2.5]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint64", "complex64", "bool", ">i4"])
@pytest.mark.parametrize("shape", [None, (), (0, 3), (2, 3)])
def test_numpys_numbers_need_no_pickle(dtype: str, shape: tuple[int, ...] | None) -> None:
    numbers = np.arange(6).astype(dtype)
    value = numbers[1] if shape is None else numbers[: int(np.prod(shape))].reshape(shape)
    (back,) = object_collectives.unpack(object_collectives.pack([value], NO_SECRET), NO_SECRET)
    assert type(back) is type(value)
    assert (back.dtype, back.shape, back.tolist()) == (value.dtype, value.shape, value.tolist())
    if shape is not None:
        back[...] = 0  # as it could be if it had been pickled


def test_of_a_tensor_its_view_and_its_gradient_flag_arrive() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    for tensor in (whole.t()[1:], (whole * 1j).conj(), torch.ones(2, requires_grad=True)):
        back = object_collectives.unpack(object_collectives.pack(tensor, NO_SECRET), NO_SECRET)
        assert back.equal(tensor) and back.requires_grad == tensor.requires_grad


def test_what_a_checkpoint_gathers_is_plain() -> None:
    state = rng.capture([torch.device("cpu")])
    back = object_collectives.unpack(object_collectives.pack(state, NO_SECRET), NO_SECRET)
    rng.restore(back, [torch.device("cpu")])
    assert back["python"] == state["python"] and back["torch"].equal(state["torch"])


@pytest.mark.parametrize("value", [Fraction(1, 3), Counter("aab"), [torch.nn.Parameter(torch.ones(()))]])
def test_other_objects_are_pickled_where_there_is_a_secret(value: object) -> None:
    back = object_collectives.unpack(object_collectives.pack(value, OURS), OURS)
    assert type(back) is type(value) and back == value
    with pytest.raises(ClusterDDPError, match="these ranks share no secret"):
        object_collectives.pack(value, NO_SECRET)


@pytest.mark.parametrize("key", [OURS, NO_SECRET])
def test_what_no_rank_has_sealed_is_not_unpickled(tmp_path: Path, key: Key) -> None:
    path = tmp_path / "was here"
    body = pickle.dumps(Malicious(path))
    pickle.loads(body)
    path.unlink()  # so it would have worked
    for data in (
        b"pickled\n\n" + body,
        b"pickled\n" + NO_SECRET.mac("pickle", body) + b"\n" + body,
        b"pickled\n" + OURS.mac("rank 0", body) + b"\n" + body,
        object_collectives.pack(Malicious(path), OTHERS),
    ):
        with pytest.raises(ClusterDDPError):
            object_collectives.unpack(data, key)
    assert not path.exists()


def gather_and_broadcast() -> None:
    with cluster_ddp.distributed() as world:
        mine = {"rank": world.rank, "tensor": torch.full((world.rank,), 7), "path": Path("a" * world.rank)}
        if os.environ.get("CLUSTER_DDP_SECRET"):
            mine["object"] = Fraction(world.rank, 3)
        for everyone in (world.gather(mine), world.gather_to_main(mine)):
            print(everyone)
        print(world.broadcast(mine if world.is_main else None), world.broadcast("" if world.is_main else "no"))


@pytest.mark.parametrize("secret", [{}, {"CLUSTER_DDP_SECRET": "5a" * 32}], ids=["none", "secret"])
def test_ranks_exchange_values_of_any_size(tmp_path: Path, secret: dict[str, str]) -> None:
    environments = [slurm_step(rank, 3, job_id=JOB_ID + len(secret), **secret) for rank in range(3)]
    ends = run_ranks(gather_and_broadcast, environments, tmp_path)
    assert [end.exit_code for end in ends] == [0, 0, 0], ends
    first, second, third = (end.output.splitlines() for end in ends)
    for rank in range(3):
        assert f"'rank': {rank}, 'tensor': tensor({[7] * rank}" in first[0]
        assert f"PosixPath('{'a' * rank or '.'}')" in first[0]
    assert ("Fraction(2, 3)" in first[0]) == bool(secret)
    assert second[0] == third[0] == first[0] == first[1]
    assert second[1] == third[1] == "None"
    assert first[2] == second[2] == third[2]


def send_an_object() -> None:
    with cluster_ddp.distributed() as world:
        world.gather(Fraction(1, 2))


def test_without_a_secret_an_object_is_an_error_with_a_hint(tmp_path: Path) -> None:
    ends = run_ranks(send_an_object, [slurm_step(rank, 2, job_id=JOB_ID + 5) for rank in range(2)], tmp_path)
    assert all(end.exit_code == 1 for end in ends), ends
    assert any("Sending a value of type Fraction" in end.output for end in ends)
    assert any("export CLUSTER_DDP_SECRET=$(openssl rand -hex 32)" in end.output for end in ends)
    (alone,) = run_ranks(send_an_object, [slurm_step(0, 1, job_id=JOB_ID + 6)], tmp_path)
    assert alone.exit_code == 0, alone.output
