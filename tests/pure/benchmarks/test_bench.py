"""What becomes of a benchmark that is run with others."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import bench
import catalog
import pytest
import tables
from record import Figure


@pytest.mark.parametrize(
    ("code", "timeout_s", "failed"),
    [
        ("import sys; sys.exit('the disk is full')", 60, "status 1: the disk is full"),
        ("print('done')", 60, "it printed no JSON"),
        ("import time; time.sleep(60)", 0.1, "not done after 0.1 s"),
    ],
)
def test_a_failure_is_a_result(code: str, timeout_s: float, failed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TIMEOUT_S", timeout_s)
    result = bench.run([sys.executable, "-c", code])
    assert result["failed"] == failed
    assert result["command"].startswith("python -c ")
    assert bench.verdict(result) == f"failed: {failed}"


def test_what_a_training_says_before_its_report_does_no_harm() -> None:
    code = "print('Stopped after step 9 {of 10}.'); import json; print(json.dumps({'figures': []}, indent=2))"
    assert bench.run([sys.executable, "-c", code]) == {"figures": []}


def test_options_that_are_empty_leave_their_arguments_out() -> None:
    one = catalog.Benchmark(
        script="x.py", title="", about="", arguments=("--rounds=3", "--torchx={torchx}", "--d={data}")
    )
    assert one.command({"torchx": "", "data": "a b"})[1:] == ["benchmarks/x.py", "--rounds=3", "--d=a b"]


def test_the_verdict_names_what_missed_its_target() -> None:
    slow, quick = (Figure(what=f"{x} s", values=[x], unit="s", at_most=2) for x in (3, 1))
    result = {"figures": [slow.result(), quick.result(), Figure(what="y", values=[9], unit="s").result()]}
    assert bench.verdict(result) == "1 of 2 targets met: not 3 s"


def test_those_that_were_not_run_keep_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, record = tmp_path / "README.md", tmp_path / "record.json"
    readme.write_text(f"{tables.BEGIN}{tables.END}\n")
    record.write_text(json.dumps({"b.py": {"unable": "no GPU", "command": "b"}}))
    benchmarks = [catalog.Benchmark(script=f"{x}.py", title=x.upper(), about=f"About {x}.") for x in "abc"]
    monkeypatch.setattr(bench, "BENCHMARKS", benchmarks)
    monkeypatch.setattr(bench, "README", readme)
    monkeypatch.setattr(bench, "RECORD", record)
    monkeypatch.setattr(bench, "GPU_FIGURES", tmp_path / "gpu-figures.json")
    monkeypatch.setattr(bench, "_fetch_mnist", lambda *_: None)
    monkeypatch.setattr(bench, "run", lambda command: {"failed": "status 1", "command": Path(command[-1]).name})
    monkeypatch.setattr(sys, "argv", ["bench.py", "a", "c"])
    assert bench.main() == 1
    assert list(json.loads(record.read_text())) == ["a.py", "b.py", "c.py"]
    titles = [line for line in readme.read_text().splitlines() if line.startswith("#")]
    assert titles == ["## A", "## B", "## C"]
    assert "About b.\n\nNot measured: no GPU. `b`." in readme.read_text()


def test_what_the_gpu_tests_leave_becomes_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "GPU_FIGURES", tmp_path / "gpu-figures.json")
    assert bench._gpu_sections() == []
    figure = Figure(what="a copy of 2 GB", values=[0.3], unit="s").result()
    report = {"figures": [figure], "hardware": "a GPU", "versions": "torch 2", "date": "2026-11-21", "command": "x"}
    bench.GPU_FIGURES.write_text(json.dumps({"gpu_pair": report, "gpu": report}))
    one, pair = bench._gpu_sections()
    assert one.startswith("## One GPU\n") and pair.startswith("## Two ranks on one GPU\n")
    assert "`x`; a GPU; torch 2; 2026-11-21." in one and "| a copy of 2 GB | 0.3 s |" in one


def test_every_benchmark_of_the_table_is_there() -> None:
    assert all((catalog.FOLDER / one.script).exists() for one in catalog.BENCHMARKS)


def test_what_a_benchmark_itself_uses_is_not_told_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stat = "cpu {} 0 0 900 0 0 0 0 0 0\n"
    ours = SimpleNamespace(user=1, system=0, children_user=1, children_system=0)
    clock = iter((10.0, 20.0))
    monkeypatch.setattr(bench.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(bench.os, "sysconf", lambda name: 100)
    monkeypatch.setattr(bench.os, "times", lambda: ours)
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(Path, "read_text", lambda path: stat.format(500))
    others = bench.Others()
    ours.children_user = 6  # 5 s, of 8 s that the machine was busy, of 2 times 10 s
    monkeypatch.setattr(Path, "read_text", lambda path: stat.format(500 + 800))
    assert others.percent() == pytest.approx(15)


def test_a_report_from_a_gpu_stands_beside_the_one_of_the_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, record, gpu = tmp_path / "README.md", tmp_path / "record.json", tmp_path / "gpu-figures.json"
    readme.write_text(f"{tables.BEGIN}{tables.END}\n")
    on_cpus = {"throughput.py": {"unable": "no time", "command": "b"}}
    record.write_text(json.dumps(on_cpus))
    for name, path in (("README", readme), ("RECORD", record), ("GPU_FIGURES", gpu)):
        monkeypatch.setattr(bench, name, path)
    monkeypatch.setattr(bench, "_fetch_mnist", lambda *_: None)
    monkeypatch.setattr(bench, "run", lambda command: {"is_on_gpu": True, "figures": [], "command": "throughput.py"})
    monkeypatch.setattr(sys, "argv", ["bench.py", "throughput"])
    assert bench.main() == 0
    assert json.loads(record.read_text()) == on_cpus
    assert "Training samples a second on a GPU" in readme.read_text()
    assert set(json.loads(gpu.read_text())) == {"throughput"}
