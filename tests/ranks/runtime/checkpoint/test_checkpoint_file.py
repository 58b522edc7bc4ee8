"""One checkpoint file: what comes back is what was written, or an error; never another state, never foreign code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import os
import pickle
import time
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster_ddp.errors import CheckpointError
from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.checkpoint_file import DamagedError
from cluster_ddp.runtime.checkpoint.host_copy import HostCopy

CPU = torch.device("cpu")
FRAME: dict[str, Any] = {"position": {"steps": 3}, "parts": {}, "ranks": []}


def written(path: Path, **more: Any) -> dict[str, Any]:
    state = {**FRAME, **more}
    checkpoint_file.write(path, HostCopy(CPU).of(state))
    return state


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, with the same types and the same order of keys."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        one, other = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
        return torch.equal(one, other)
    if isinstance(one, dict):
        return (
            list(one) == list(other)
            and all(same(one[key], other[key]) for key in one)
            and same(getattr(one, "__dict__", None), getattr(other, "__dict__", None))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # nan is nan, -0.0 is not 0.0


def test_a_nested_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(torch.bfloat16)
    state = {
        "model": model.state_dict(),
        "bool": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "0-dim": torch.tensor(2.5, dtype=torch.float64),
        "bits": torch.tensor([float("nan"), -0.0, float("inf")]),
        "half": torch.arange(4, dtype=torch.float16),
        "complex": torch.ones(2, dtype=torch.complex64),
        "strided": torch.arange(12).reshape(3, 4).t()[1:],
        "expanded": torch.ones(1, 2).expand(3, 2),
        "plain": (None, True, -(2**70), 0.1, float("-inf"), 1 + 2j, "ü\n", b"\0", torch.bfloat16, torch.Size([2])),
        "nested": [
            {"a": (1, [2, {"b": ()}])},
            OrderedDict(x=1),
            Counter(aab=2),
            {1: "int", (2, 3): "tuple", None: "none"},
        ],
    }
    assert same(checkpoint_file.read(_path(tmp_path, state)), {**FRAME, **state})
    assert hasattr(checkpoint_file.read(tmp_path / "x.pt")["model"], "_metadata")


def test_what_is_nearly_plain_becomes_plain(tmp_path: Path) -> None:
    pair = namedtuple("pair", "a b")
    state = {
        "numpy": [np.float64(0.1), np.int32(-3), np.bool_(True), np.array(2.0, dtype=np.float32), np.str_("x")],
        "named": pair(1, 2),
        "default": defaultdict(list, a=[1]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    found = checkpoint_file.read(_path(tmp_path, state))
    assert same(found["numpy"], [0.1, -3, True, 2.0, "x"])
    assert same(found["named"], (1, 2))
    assert same(found["default"], {"a": [1]})
    assert same(found["parameter"], torch.ones(2))


def _path(folder: Path, state: dict[str, Any]) -> Path:
    written(folder / "x.pt", **state)
    return folder / "x.pt"


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(min_size=1),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(value=plain)
def test_whatever_plain_value_can_be_copied_comes_back(tmp_path: Path, value: Any) -> None:
    """What HostCopy takes, and read then refuses, would be noticed only when a training is to go on."""
    written(tmp_path / "x.pt", value=value)
    assert same(checkpoint_file.read(tmp_path / "x.pt")["value"], value)


def test_a_very_large_number_comes_back_or_is_refused_in_time(tmp_path: Path) -> None:
    with contextlib.suppress(CheckpointError):
        written(tmp_path / "x.pt", value=2**3000)
        assert checkpoint_file.read(tmp_path / "x.pt")["value"] == 2**3000


def test_torch_load_reads_it_as_it_is(tmp_path: Path) -> None:
    state = written(tmp_path / "x.pt", weight=torch.arange(5.0))
    assert same(torch.load(tmp_path / "x.pt", weights_only=True), state)
    assert same(torch.load(tmp_path / "x.pt", weights_only=True, mmap=True), state)


def test_the_digest_is_the_contents(tmp_path: Path) -> None:
    written_digest = checkpoint_file.write(tmp_path / "x.pt", FRAME)
    content = (tmp_path / "x.pt").read_bytes()[: -checkpoint_file._TRAILER_BYTES]
    assert checkpoint_file.digest(tmp_path / "x.pt") == written_digest == hashlib.sha256(content).hexdigest()


# Damage


def read_checked(path: Path) -> dict[str, Any] | None:
    """As a resume does it: the digest first. None where the file is refused as it should be."""
    try:
        checkpoint_file.digest(path)
    except (DamagedError, OSError):
        return None
    return checkpoint_file.read(path)


def test_a_file_cut_at_any_length_is_damaged(tmp_path: Path) -> None:
    written(tmp_path / "x.pt", weight=torch.arange(9.0))
    path, content = tmp_path / "cut.pt", (tmp_path / "x.pt").read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedError):
            checkpoint_file.digest(path)


def test_any_byte_changed_is_damage(tmp_path: Path) -> None:
    state = written(tmp_path / "x.pt", weight=torch.arange(9.0))
    path, content = tmp_path / "flipped.pt", bytearray((tmp_path / "x.pt").read_bytes())
    for index in range(len(content)):
        content[index] ^= 1 << index % 8
        path.write_bytes(content)
        content[index] ^= 1 << index % 8
        found = read_checked(path)
        assert found is None or (index == len(content) - 1 and same(found, state))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_no_edit_gives_another_state(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes put in the place of others, more or fewer: a page of zeros, a block of another file, an appended line."""
    path = tmp_path / "edited.pt"
    if not (tmp_path / "x.pt").exists():
        written(tmp_path / "x.pt", weight=torch.arange(9.0))
    content = (tmp_path / "x.pt").read_bytes()
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    new = data.draw(st.binary(max_size=200) | st.just(bytes(stop - start)) | st.just(content[:start]))
    path.write_bytes(content[:start] + new + content[stop:])
    found = read_checked(path)
    assert found is None or same(found, checkpoint_file.read(tmp_path / "x.pt"))


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "plain.pt")
    (tmp_path / "text.pt").write_text("no checkpoint\n" * 50)
    (tmp_path / "empty.pt").touch()
    for name in ("plain.pt", "text.pt", "empty.pt"):
        with pytest.raises(DamagedError):
            checkpoint_file.digest(tmp_path / name)
    with pytest.raises(DamagedError, match="it is not a file"):
        checkpoint_file.digest(tmp_path)
    with pytest.raises(OSError):
        checkpoint_file.digest(tmp_path / "missing.pt")
    with pytest.raises(OSError):
        checkpoint_file.read(tmp_path / "missing.pt")
    checkpoint_file.write(tmp_path / "other.pt", {"epoch": 1})
    with pytest.raises(DamagedError, match="not a checkpoint of cluster_ddp"):
        checkpoint_file.read(tmp_path / "other.pt")


# Files that bring code


class Call:
    """Is, once pickled and loaded by pickle, what a call returns."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced

    def __call__(self) -> None:
        """A pickled callable must be one here, too."""


ATTACKS: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda marker: Call(os.system, f"touch {marker}"),
    "eval": lambda marker: Call(eval, f"open({str(marker)!r}, 'w')"),
    "getattr chain": lambda marker: Call(Call(getattr, Call(importlib.import_module, "os"), "mkdir"), str(marker)),
    "in a dictionary": lambda marker: {"a": [{"b": (1, Call(os.mkdir, str(marker)))}]},
    "as a key": lambda marker: {Call(os.mkdir, str(marker)): 1},
    "next to tensors": lambda marker: OrderedDict(weight=torch.ones(3), bias=Call(os.mkdir, str(marker))),
}


def _zip(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _legacy(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _bare(state: Any) -> bytes:
    return pickle.dumps(state, protocol=2)


@pytest.mark.parametrize("form", [_zip, _legacy, _bare])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_never_runs_code(tmp_path: Path, attack: str, form: Callable[[Any], bytes]) -> None:
    """Its digest is right: whoever can write the file can also write that."""
    marker, path = tmp_path / "pwned", tmp_path / "evil.pt"
    content = form({**FRAME, "attack": ATTACKS[attack](marker)})
    path.write_bytes(content + checkpoint_file._MARK + hashlib.sha256(content).hexdigest().encode() + b"\n")
    assert checkpoint_file.digest(path) == hashlib.sha256(content).hexdigest()
    with pytest.raises(DamagedError, match="none of its code was run"):
        checkpoint_file.read(path)
    assert not marker.exists()
    if form is not _bare:  # the attack is a real one
        with contextlib.suppress(Exception):
            torch.load(path, weights_only=False)
        assert marker.exists()


@pytest.mark.parametrize(
    "bad", [b"", b"\x80\x02.", b"\x80\x02R.", b"\x80\x02}(s.", b"\x80\x02]q\x00h\x05.", b"\x80\x02Nb."]
)
def test_a_broken_pickle_with_a_right_digest_is_damaged(tmp_path: Path, bad: bytes) -> None:
    """In a zip archive that is whole: whatever goes wrong in loading it is told as damage."""
    import zipfile

    buffer = io.BytesIO(_zip(FRAME))
    inner = io.BytesIO()
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(inner, "w") as new:
        for name in old.namelist():
            new.writestr(name, bad if name.endswith("data.pkl") else old.read(name))
    path, content = tmp_path / "x.pt", inner.getvalue()
    path.write_bytes(content + checkpoint_file._MARK + hashlib.sha256(content).hexdigest().encode() + b"\n")
    with pytest.raises(DamagedError):
        checkpoint_file.read(path)


# A rank that reads what rank 0 has chosen


def test_a_rank_that_sees_another_file_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_file, "VISIBLE_WITHIN_S", 0.0)
    monkeypatch.setattr(checkpoint_file, "time", SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    digest = checkpoint_file.write(tmp_path / "x.pt", FRAME)
    assert checkpoint_file.not_as_chosen(tmp_path / "x.pt", digest) is None
    other = str(checkpoint_file.not_as_chosen(tmp_path / "x.pt", "a" * 64))
    assert other == f"here its SHA-256 is {digest[:12]}…, on rank 0 aaaaaaaaaaaa…"
    assert (
        checkpoint_file.not_as_chosen(tmp_path / "y.pt", digest) == "here it can't be read: No such file or directory"
    )


def test_a_file_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = tmp_path / "x.pt", tmp_path / "y.pt"
    digest = checkpoint_file.write(other, FRAME)
    steps = iter([lambda: path.write_bytes(other.read_bytes()[:50]), lambda: other.replace(path)])
    monkeypatch.setattr(
        checkpoint_file, "time", SimpleNamespace(sleep=lambda _: next(steps)(), monotonic=time.monotonic)
    )
    assert checkpoint_file.not_as_chosen(path, digest) is None
    assert checkpoint_file.read(path) == FRAME


# Taking tensors out of a mapped file


def test_what_is_taken_out_is_the_files_own_and_no_other_memory_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expanded tensor is larger than what it has in memory; a sparse one has no address."""
    tensors = {
        "large": torch.rand(300, 300),
        "expanded": torch.full((1,), 3.0).expand(3_000_000),
        "part": torch.rand(90_000)[::3],
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "x.pt"
    checkpoint_file.write(path, {**FRAME, "parts": tensors})
    let_go: list[tuple[int, int]] = []
    libc = SimpleNamespace(madvise=lambda start, nbytes, advice: let_go.append((start.value, nbytes.value)))
    monkeypatch.setattr(checkpoint_file.ctypes, "CDLL", lambda _: libc)
    read = checkpoint_file.read(path)["parts"]
    taken = {name: checkpoint_file.taken(tensor) for name, tensor in read.items()}
    monkeypatch.undo()
    assert all(torch.equal(taken[name].to_dense(), tensors[name].to_dense()) for name in tensors)
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line]
    ranges = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in mapped]
    assert len(let_go) == 2  # of the large one, and of all that the part's storage has
    assert all(any(first <= start and start + nbytes <= last for first, last in ranges) for start, nbytes in let_go)
