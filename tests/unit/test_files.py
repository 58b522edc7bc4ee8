from pathlib import Path

import pytest

from cluster_ddp.files import atomic_write


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with atomic_write(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with pytest.raises(RuntimeError), atomic_write(path) as file:
        file.write(b"tw")
        raise RuntimeError
    assert path.read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]
