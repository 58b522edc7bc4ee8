"""Collectives of Python values: plain data as JSON and raw tensors, other objects pickled and sealed.

Unpickling can run any code. gloo's connections have no authentication. So only bytes with an HMAC of this run's key are
unpickled.
"""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path, PosixPath
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cluster_ddp.agent.channel import Key
from cluster_ddp.errors import ClusterDDPError
from cluster_ddp.run.names import Env
from cluster_ddp.runtime import process_group

_PLAIN, _PICKLED = b"plain\n", b"pickled\n"
_PURPOSE = "pickle"
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_NUMBERS = "biufc"  # the kinds of NumPy's dtypes that are numbers
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


class _NotPlainError(Exception):
    pass


def pack(value: Any, key: Key) -> bytes:
    """Return a value as bytes: as JSON if it is plain, else pickled and signed.

    Plain are None, bool, int, float, str, bytes, Path, dense tensors, NumPy's numeric arrays and numbers, and lists,
    tuples, dicts and sets of these.

    Raises:
        ClusterDDPError: the value must be pickled, and the ranks share no secret.
    """
    blobs: list[bytes] = []
    try:
        head = json.dumps(_to_json(value, blobs)).encode()
    except (_NotPlainError, RecursionError, ValueError):  # too deep; an integer of thousands of digits
        if not key.is_secret:
            raise _no_secret(f"Sending a value of type {type(value).__name__} to other ranks:") from None
        body = _pickled(value)
        return _PICKLED + key.mac(_PURPOSE, body) + b"\n" + body
    return _PLAIN + head + b"\n" + b"".join(blobs)


def unpack(data: bytes, key: Key) -> Any:
    """Return the value that a rank has packed.

    Raises:
        ClusterDDPError: it is pickled, and the ranks share no secret, or it does not come from a rank of this run.
    """
    kind, _, rest = data.partition(b"\n")
    head, _, body = rest.partition(b"\n")
    if kind + b"\n" == _PLAIN:
        return _from_json(json.loads(head), io.BytesIO(body))
    if not key.is_secret:
        raise _no_secret("Taking an object from another rank:")
    if not key.proves(head, _PURPOSE, body):
        found = "it is pickled, and not signed by a rank of this run: somebody else has joined the ranks' connections."
        raise ClusterDDPError("Taking an object from another rank:", found, "tell your cluster's support")
    return pickle.loads(body)


class _Pickler(pickle.Pickler):
    """Pickles tensors of a GPU without its index: torch itself would restore them on the sender's one."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.device.type == "cuda" and obj.layout == torch.strided:
            return _placed, (obj.detach().cpu(), obj.device.type, obj.requires_grad)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _placed(numbers: torch.Tensor, device_type: str, requires_grad: bool) -> torch.Tensor:
    """Another rank's tensor, on this rank's own device of that type."""
    return numbers.to(device_type).requires_grad_(requires_grad)


def _no_secret(asked: str) -> ClusterDDPError:
    found = "it must be pickled, and these ranks share no secret: who reaches their ports could run code in them."
    hint = f"send plain data or tensors; or, before the ranks start: export {Env.SECRET}=$(openssl rand -hex 32)"
    return ClusterDDPError(asked, found, hint)


def all_gather(value: Any, key: Key) -> list[Any]:
    """Return every rank's value, in the order of ranks, on every rank. A collective."""
    process_group.check()
    mine, sizes = _padded(pack(value, key))
    ranks = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(ranks, mine)
    return [unpack(_bytes(one, size), key) for one, size in zip(ranks, sizes)]


def gather(value: Any, key: Key) -> list[Any] | None:
    """Return every rank's value, in the order of ranks, on rank 0; None on the others. A collective."""
    process_group.check()
    mine, sizes = _padded(pack(value, key))
    ranks = [torch.empty_like(mine) for _ in sizes] if dist.get_rank() == 0 else None
    dist.gather(mine, ranks)
    return None if ranks is None else [unpack(_bytes(one, size), key) for one, size in zip(ranks, sizes)]


def broadcast(value: Any, key: Key) -> Any:
    """Return rank 0's value on every rank. A collective."""
    process_group.check()
    is_main = dist.get_rank() == 0
    data = pack(value, key) if is_main else b""
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    message = _tensor(data, int(size))
    dist.broadcast(message, 0)
    return unpack(data if is_main else _bytes(message, len(message)), key)


def _padded(data: bytes) -> tuple[torch.Tensor, list[int]]:
    """The bytes, padded with zeros to the length of the longest rank's; and all ranks' sizes."""
    sizes = [torch.empty((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor(len(data)))
    numbers = [int(size) for size in sizes]
    return _tensor(data, max(numbers)), numbers


def _tensor(data: bytes, size: int) -> torch.Tensor:
    tensor = torch.zeros(size, dtype=torch.uint8)
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor


def _bytes(tensor: torch.Tensor, size: int) -> bytes:
    return tensor[:size].numpy().tobytes()


def _to_json(value: Any, blobs: list[bytes]) -> Any:
    """JSON's own types unchanged; others as [kind, …], with the bytes of tensors, arrays and bytes in `blobs`."""
    kind = type(value)
    if kind in (type(None), bool, int, float, str):
        return value
    if kind in _COLLECTIONS.values():
        return [kind.__name__, *(_to_json(one, blobs) for one in value)]
    if kind is dict:
        return ["dict", *([_to_json(name, blobs), _to_json(one, blobs)] for name, one in value.items())]
    if kind is PosixPath:
        return ["path", str(value)]
    if kind is bytes:
        blobs.append(value)
        return ["bytes", len(value)]
    if kind is torch.Tensor and value.layout == torch.strided and not value.is_quantized:
        numbers = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        blobs.append(numbers.reshape(-1).view(torch.uint8).numpy().tobytes())
        return ["tensor", len(blobs[-1]), str(value.dtype), list(value.shape), value.device.type, value.requires_grad]
    if isinstance(value, (np.ndarray, np.generic)) and kind.__module__ == "numpy" and value.dtype.kind in _NUMBERS:
        blobs.append(value.tobytes())
        return ["numpy", len(blobs[-1]), value.dtype.str, list(value.shape) if kind is np.ndarray else None]
    raise _NotPlainError


def _from_json(value: Any, blobs: io.BytesIO) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_from_json(one, blobs) for one in rest)
    if kind == "dict":
        return {_from_json(name, blobs): _from_json(one, blobs) for name, one in rest}
    if kind == "path":
        return Path(rest[0])
    if kind == "bytes":
        return bytes(_taken(blobs, rest[0]))
    if kind == "numpy":
        size, dtype, shape = rest
        numbers = np.frombuffer(_taken(blobs, size), dtype=np.dtype(dtype))
        return numbers[0] if shape is None else numbers.reshape(shape)
    assert kind == "tensor"
    size, dtype, shape, device_type, requires_grad = rest
    data = torch.frombuffer(_taken(blobs, size), dtype=_DTYPES[dtype]) if size else torch.empty(0, dtype=_DTYPES[dtype])
    return _placed(data.reshape(shape), device_type, requires_grad)


def _taken(blobs: io.BytesIO, count: int) -> bytearray:
    piece = bytearray(count)
    assert blobs.readinto(piece) == count
    return piece
