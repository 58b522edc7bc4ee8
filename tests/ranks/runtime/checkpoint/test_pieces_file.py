"""A checkpoint or a pieces file of another form, though its SHA-256 is right, is one that can't be used: no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster_ddp.runtime.checkpoint import checkpoint_file
from cluster_ddp.runtime.checkpoint.folder import CheckpointFolder
from cluster_ddp.runtime.checkpoint.sharded import pieces_file

NAME = "state['parts']['model']['weight']"
FILE = "rank-0-0a1b-1.pt"
PIECE = ["float32", [0, 0], [2, 3], 0]


def write(checkpoint: Path, *, pieces: Any = None, index: Any = None, files: Any = None, described: Any = None) -> None:
    """A sharded checkpoint of one rank, with other content where it is given."""
    folder = pieces_file.folder_of(checkpoint)
    folder.mkdir(exist_ok=True)
    content = {"pieces": torch.zeros(24, dtype=torch.uint8), "index": json.dumps({NAME: PIECE})}
    content |= {} if pieces is None else {"pieces": pieces}
    content |= {} if index is None else {"index": index}
    sha256 = checkpoint_file.write(folder / FILE, content)
    file = {"rank": 0, "sha256": sha256, "bytes": (folder / FILE).stat().st_size} | (described or {})
    weight = torch.empty(2, 3, device="meta")
    state: dict[str, Any] = {"position": {"steps": 1}, "parts": {"model": {"weight": weight}}, "ranks": []}
    checkpoint_file.write(checkpoint, {**state, "sharded": {"files": {FILE: file}} if files is None else files})


def index_of(piece: Any) -> str:
    return json.dumps({NAME: piece})


FORMS: dict[str, dict[str, Any]] = {
    "files: none": {"files": []},
    "files: a text": {"files": "rank-0"},
    "files: without their key": {"files": {"file": {}}},
    "files: a list": {"files": {"files": [FILE]}},
    "files: a list of pairs": {"files": {"files": [[FILE, 1]]}},
    "files: a number": {"files": {"files": 3}},
    "files: a path elsewhere": {"files": {"files": {"../../x.pt": {"rank": 0, "sha256": "", "bytes": 1}}}},
    "files: a number as a name": {"files": {"files": {1: {"rank": 0, "sha256": "", "bytes": 1}}}},
    "files: no entry": {"files": {"files": {FILE: None}}},
    "files: an empty entry": {"files": {"files": {FILE: {}}}},
    "files: none of them": {"files": {"files": {}}},
    "rank: a text": {"described": {"rank": "0"}},
    "rank: a tensor": {"described": {"rank": torch.zeros(())}},
    "sha256: a number": {"described": {"sha256": 1}},
    "bytes: a text": {"described": {"bytes": "24"}},
    "bytes: true": {"described": {"bytes": True}},
    "pieces: a list": {"pieces": [0] * 24},
    "pieces: of another dtype": {"pieces": torch.zeros(24)},
    "pieces: of two dimensions": {"pieces": torch.zeros(4, 6, dtype=torch.uint8)},
    "pieces: without values": {"pieces": torch.zeros(24, dtype=torch.uint8, device="meta")},
    "pieces: sparse": {"pieces": torch.zeros(24, dtype=torch.uint8).to_sparse()},
    "index: no JSON": {"index": "{"},
    "index: bytes": {"index": b"\xff"},
    "index: a number": {"index": 3},
    "index: a list": {"index": "[1]"},
    "index: null": {"index": "null"},
    "index: a piece of three": {"index": index_of(PIECE[:3])},
    "index: a piece of none": {"index": index_of(None)},
    "index: a dtype of none": {"index": index_of(["float31", *PIECE[1:]])},
    "index: a function as a dtype": {"index": index_of(["load", *PIECE[1:]])},
    "index: a number as a dtype": {"index": index_of([32, *PIECE[1:]])},
    "index: another dtype": {"index": index_of(["int32", *PIECE[1:]])},
    "index: a negative start": {"index": index_of(["float32", [-1, 0], [2, 3], 0])},
    "index: a start as a text": {"index": index_of(["float32", "00", [2, 3], 0])},
    "index: a start of one dimension": {"index": index_of(["float32", [0], [2, 3], 0])},
    "index: half of the rows": {"index": index_of(["float32", [0, 0], [1, 3], 0])},
    "index: beyond the tensor": {"index": index_of(["float32", [1, 0], [2, 3], 0])},
    "index: beyond the bytes": {"index": index_of(["float32", [0, 0], [2, 3], 8])},
    "index: a negative offset": {"index": index_of(["float32", [0, 0], [2, 3], -8])},
    "index: half an offset": {"index": index_of(["float32", [0, 0], [2, 3], 0.5])},
    "index: a tensor that is not there": {"index": json.dumps({NAME: PIECE, "more": PIECE})},
    "index: no tensor": {"index": "{}"},
}


def test_the_form_that_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "step-00000001.pt")
    pieces_file.check_all(tmp_path / "step-00000001.pt")


@pytest.mark.parametrize("form", FORMS)
def test_another_form_is_set_aside_and_the_one_before_is_used(tmp_path: Path, form: str) -> None:
    write(tmp_path / "step-00000001.pt")
    newest = tmp_path / "step-00000002.pt"
    write(newest, **FORMS[form])
    found, refused = CheckpointFolder(tmp_path, keep=2).newest(pieces_file.check_all)
    assert found is not None and found[0].name == "step-00000001.pt"
    assert list(refused) == [newest]
