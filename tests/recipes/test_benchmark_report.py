"""Tables and the figure of benchmark.py, from made-up measurements."""

from __future__ import annotations

from benchmark_figure import draw
from benchmark_report import print_report
from made_up_rows import NAME, left_out, rows_of, timed

from hf_favorpp.benchmarking.rows import crossovers


def report(rows):
    return {"title": "attention", "settings": {"device": "cpu"}, "rows": rows, "crossovers": crossovers(rows)}


def test_tables_notes_and_crossovers_are_printed(capsys):
    rows = []
    for length, sdpa in ((128, timed(1.0)), (512, timed(1234.6)), (2048, left_out("out of memory"))):
        measured = {"sdpa": {"forward": sdpa}, NAME: {"forward": timed(4)}, "peer M=8": {"forward": timed(2)}}
        rows += rows_of(length, measured, {"peer": "peer M=8"})
    print_report(report(rows), markdown=True)
    printed = capsys.readouterr().out
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert table[0] == ["length", "M", "precond.", "backend", "ms", "SDPA", "speed-up", "MiB", "SDPA MiB", "peer"]
    assert table[3] == ["512", "8", "center", "cpu", "4", "1235", "309", "1", "1", "2"]
    assert table[4] == ["2048", "8", "center", "cpu", "4", "", "", "1", "", "2"]
    assert len(table) == 5, "no table of training, which was not asked for"
    assert f"length 2048, {NAME}: no sdpa_forward_ms: out of memory" in printed
    assert "not asked for" not in printed
    assert f"{NAME}, ran on cpu: forward 168; forward and backward not measured" in printed
    print_report(report(rows), markdown=False)
    assert "precond." in capsys.readouterr().out
    print_report(report(rows[:1]), markdown=True)
    assert "forward never (up to 128)" in capsys.readouterr().out
    print_report(report(rows[1:]), markdown=True)
    assert "forward at most 512" in capsys.readouterr().out


def test_a_figure_is_drawn_of_whatever_was_measured(tmp_path):
    full = {name: {"forward": timed(2), "train": timed(3)} for name in ("sdpa", NAME, "identity", "peer M=8")}
    rows = rows_of(64, full, {"peer": "peer M=8"}, floor_forward_ms=0.5) + rows_of(256, full)
    draw(report(rows), tmp_path / "figures" / "full.png")
    nothing = {"sdpa": {"forward": left_out("a")}, NAME: {"forward": left_out("b")}}
    draw(report(rows_of(64, nothing)), tmp_path / "nothing.svg")
    draw(report([]), tmp_path / "empty.png")
    assert (tmp_path / "figures" / "full.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "nothing.svg").read_text().startswith("<?xml")
