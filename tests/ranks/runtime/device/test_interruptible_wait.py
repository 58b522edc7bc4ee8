"""Waiting for a device: its end, a deadline, another rank's failure; with an event that stands in for CUDA's."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch

from cluster_ddp.runtime.device import interruptible_wait

GPU = torch.device("cuda", 0)


class Event:
    """Stands in for torch.cuda.Event: done after so many questions."""

    questions_left = 0
    recorded_on: object = None

    def record(self, stream: object) -> None:
        Event.recorded_on = stream

    def query(self) -> bool:
        Event.questions_left -= 1
        return Event.questions_left < 0


@pytest.fixture(autouse=True)
def event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")


def test_it_ends_with_the_work_of_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "questions_left", 5)
    interruptible_wait.for_device(GPU, timeout_s=20, peer_failed=lambda: False)
    assert Event.questions_left == -1 and Event.recorded_on == "the stream of cuda:0"


def test_on_a_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "questions_left", 5)
    interruptible_wait.for_device(torch.device("cpu"), timeout_s=0, peer_failed=lambda: True)
    assert Event.questions_left == 5


def test_a_device_that_is_never_done_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "questions_left", 10**9)
    start = time.monotonic()
    with pytest.raises(interruptible_wait.DeviceTimeoutError, match=r"waited 0\.2 s"):
        interruptible_wait.for_device(GPU, timeout_s=0.2, peer_failed=lambda: False)
    assert time.monotonic() - start >= 0.2


def test_another_ranks_failure_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "questions_left", 10**9)
    failed = threading.Event()
    threading.Timer(0.2, failed.set).start()
    with pytest.raises(interruptible_wait.PeerFailedError):
        interruptible_wait.for_device(GPU, timeout_s=20, peer_failed=failed.is_set)


@pytest.mark.parametrize("error", [None, RuntimeError("CUDA error: device-side assert triggered")])
def test_a_device_on_which_every_call_fails_is_broken(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    class Stream:
        def query(self) -> bool:
            if error is not None:
                raise error
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert interruptible_wait.is_broken(GPU) == (error is not None)
    assert not interruptible_wait.is_broken(torch.device("cpu"))


def test_handlers_of_signals_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Event, "questions_left", 10**9)

    def handler(number: int, frame: object) -> None:
        Event.questions_left = 0

    before = signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.2, signal.raise_signal, (signal.SIGUSR1,)).start()
    try:
        interruptible_wait.for_device(GPU, timeout_s=20, peer_failed=lambda: False)
    finally:
        signal.signal(signal.SIGUSR1, before)
