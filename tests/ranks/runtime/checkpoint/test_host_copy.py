"""Copies of a state in the host's memory."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy

CPU = torch.device("cpu")


def test_a_copy_does_not_change_with_its_source() -> None:
    model = torch.nn.Linear(3, 2)
    source = {
        "model": model.state_dict(),
        "sparse": torch.eye(2).to_sparse(),
        "list": [torch.zeros(2)],
        "meta": {"a": 1},
    }
    copy = HostCopy(CPU).of(source)
    expected = {"weight": model.weight.detach().clone(), "bias": model.bias.detach().clone()}
    with torch.no_grad():
        model.weight.fill_(7)
        model.bias.fill_(7)
    source["sparse"].mul_(5)
    source["list"][0].fill_(1)
    source["list"].append(1)
    source["meta"]["a"] = 2
    source["model"]._metadata[""]["version"] = 99
    assert torch.equal(copy["model"]["weight"], expected["weight"])
    assert torch.equal(copy["model"]["bias"], expected["bias"])
    assert torch.equal(copy["sparse"].to_dense(), torch.eye(2))
    assert copy["list"][0].tolist() == [0, 0] and len(copy["list"]) == 1
    assert copy["meta"] == {"a": 1}
    assert copy["model"]._metadata[""]["version"] == 1


def test_copies_use_the_same_memory_again_until_it_is_too_small() -> None:
    copying, tensors = HostCopy(CPU), [torch.rand(4), torch.rand(4)]

    def pointers() -> list[int]:
        return [tensor.data_ptr() for tensor in copying.of({"a": tensors})["a"]]

    first = pointers()
    assert len({*first, *(tensor.data_ptr() for tensor in tensors)}) == 4
    tensors[0].fill_(3)
    assert pointers() == first
    tensors[1] = torch.rand(40_000)
    copied = copying.of({"a": tensors})["a"]
    assert torch.equal(copied[0], tensors[0]) and torch.equal(copied[1], tensors[1])


DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def test_every_kind_of_tensor_is_copied_bit_for_bit_and_can_be_written(tmp_path: Path) -> None:
    odd = torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    state = {str(dtype): torch.rand(3, 5).mul(9).to(dtype) for dtype in DTYPES}
    state |= {"strided": odd, "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "part": torch.rand(9)[::2]}
    copied = HostCopy(CPU).of({"position": 0, "parts": state, "ranks": []})
    checkpoint_file.write(tmp_path / "x.pt", copied)
    read = checkpoint_file.read(tmp_path / "x.pt")["parts"]
    for name, tensor in state.items():
        for found in (copied["parts"][name], read[name]):
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape) and torch.equal(found, tensor), name


class Runtime:
    """Stands in for the CUDA runtime: notes what is pinned."""

    def __init__(self, status: int) -> None:
        self.status, self.pinned, self.calls = status, {}, 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        if self.status == 0:
            assert not any(at < address + nbytes and address < at + size for at, size in self.pinned.items())
            self.pinned[address] = nbytes
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_for_a_gpu_one_piece_of_memory_is_pinned_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would take 2 ** n bytes for each tensor."""
    runtime = Runtime(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    copying, tensors = HostCopy(torch.device("cuda", 0)), [torch.rand(1100, 1000), torch.rand(7)]
    copying.reserve(tensors)
    ((address, nbytes),) = runtime.pinned.items()
    assert nbytes == 1100 * 1000 * 4 + 64
    for _ in range(2):
        copied = copying.of(tensors)
        assert all(address <= tensor.data_ptr() < address + nbytes for tensor in copied)
    assert runtime.calls == 1
    copying.of([*tensors, torch.rand(9_000)])
    assert [*runtime.pinned.values()] == [nbytes + 9_000 * 4 + 64 - 9_000 * 4 % 64]
    del copying, copied
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "handlers", [caplog.handler])
    monkeypatch.setattr(logging.getLogger("cluster_ddp"), "propagate", False)
    copying, tensor = HostCopy(torch.device("cuda", 0)), torch.rand(5_000)
    assert torch.equal(copying.of([tensor])[0], tensor)
    assert caplog.text.count("can't be pinned (CUDA error 2)") == 1


def test_cudas_note_of_a_failed_pinning_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for it after the next kernel, and would blame that. (Without a driver every call notes one anew.)"""
    if "libcudart" not in Path("/proc/self/maps").read_text():
        pytest.skip("this torch was built without CUDA")
    calls: list[str] = []

    class Library:
        def __init__(self, path: str) -> None:
            self.name = Path(path).name.partition(".")[0]

        def __getattr__(self, function: str) -> Callable[[], None]:
            return lambda: calls.append(f"{self.name} {function}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(2))
    monkeypatch.setattr(ctypes, "CDLL", Library)
    HostCopy(torch.device("cuda", 0)).of([torch.rand(5_000)])
    assert set(calls) == {"libcudart cudaGetLastError"}


REFUSED = {
    "a lambda": lambda: 0,
    "a set": {1},
    "an object": object(),
    "a module": torch.nn.Linear(1, 1),
    "an array": np.zeros(2),
    "a Path": Path("x"),
    "a date from NumPy": np.datetime64("2020-01-01"),
    "a longdouble": np.longdouble(1),
    "an object in an array": np.array(print, dtype=object),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_loaded_is_refused_with_its_place(what: str) -> None:
    with pytest.raises(CheckpointError, match=r"state\['optimizer'\]\['groups'\]\[1\]\['fn'\] is a \w+"):
        HostCopy(CPU).of({"optimizer": {"groups": [{}, {"fn": REFUSED[what]}]}})
