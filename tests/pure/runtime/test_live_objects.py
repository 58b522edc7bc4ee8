from __future__ import annotations

import gc
import io
import sys
import threading
from pathlib import Path

from cluster_ddp.runtime import process_exit
from cluster_ddp.runtime.live_objects import objects_of


class Thing:
    pass


class Other(Thing):
    pass


def test_objects_of_a_class_and_of_those_below_it_in_each_generation() -> None:
    old = Thing()
    gc.collect()
    middle = Other()
    gc.collect(0)
    new = Thing()
    found = objects_of(Thing)
    assert len(found) == 3
    assert all(one in found for one in (old, middle, new))
    assert objects_of(Other) == [middle]
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        objects_of(Thing)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_all_files_that_a_script_may_have_opened(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w") as text, open(tmp_path / "b", "wb") as binary:
        found = objects_of(process_exit._FILES)
        assert text in found and binary in found and binary.raw in found
    assert issubclass(io.IOBase, process_exit._FILES)


def test_tuples_that_other_threads_make_meanwhile() -> None:
    """Each call that had kept a reference to one of them was a SystemError there, one in three."""
    errors, is_over = list[SystemError](), threading.Event()

    def make() -> None:
        while not is_over.is_set():
            try:
                tuple(number for number in range(40))
            except SystemError as error:
                errors.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(30):
            objects_of(Thing)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval_s)
    assert not errors
