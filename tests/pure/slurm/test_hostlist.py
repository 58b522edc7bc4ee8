import pytest

from cluster_ddp.errors import TopologyError
from cluster_ddp.slurm.hostlist import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("login", ["login"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[9-011]", ["n9", "n10", "n11"]),
        ("n[001]", ["n001"]),
        ("n[3,1-2,2]", ["n3", "n1", "n2", "n2"]),
        ("b2,a[1-2],b2", ["b2", "a1", "a2", "b2"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("x[1-2]-ib.cluster", ["x1-ib.cluster", "x2-ib.cluster"]),
        ("[1-2]", ["1", "2"]),
        ("rack[1][05-06]", ["rack105", "rack106"]),
        (",a,,b ,c\n", ["a", "b", "c"]),
    ],
)
def test_expands_as_scontrol_does(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("n[1-3", "'[' at character 2"),
        ("n1-3]", "']' at character 5"),
        ("n[]", "neither a number"),
        ("n[a-b]", "neither a number"),
        ("n[1,]", "neither a number"),
        ("n[3-1]", "backward"),
        ("n[1-99999999]", "65536"),
        ("n[1-60000][1-60000]", "1048576"),
    ],
)
def test_refuses_what_is_no_hostlist(text: str, complaint: str) -> None:
    with pytest.raises(TopologyError) as caught:
        expand(text)
    assert complaint in caught.value.found
    assert text in caught.value.asked
    assert "scontrol show hostnames" in caught.value.hint
