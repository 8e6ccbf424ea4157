"""The tables: means and deviations over draws, shares of softmax, what is not finite."""

from __future__ import annotations

from fidelity_report import draw, print_tables


def run(method, num_features, seed, value):
    return {"method": method, "num_features": num_features, "seed": seed, "scores": {"spearman": value}}


def results(*runs):
    return {"task": "sts", "model": "tiny", "softmax": {"spearman": 0.8}, "runs": list(runs)}


def rows(content, capsys):
    print_tables(content, markdown=True)
    tables = capsys.readouterr().out.split("\n\n")
    parsed = []
    for table in tables:
        lines = [line for line in table.splitlines() if line.startswith("|")]
        if lines:
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            parsed.append((cells[0], {line[0]: line[1:] for line in cells[2:]}))
    return parsed


def test_means_deviations_and_shares(capsys):
    content = results(
        run("favor++", 64, 0, 0.5),
        run("favor++", 64, 1, 0.6),
        run("favor++", 16, 0, 0.4),
        run("elu", None, None, 0.3),
        run("trig", 16, 0, None),
        run("window-only", 16, None, 0.72),
        run("uniform", None, None, 0.2),
    )
    (header, scores), (_, shares) = rows(content, capsys)
    assert header == ["attention", "M = 16", "M = 64"]
    assert list(scores) == ["softmax", "uniform", "window-only", "favor++", "elu", "trig"]
    assert scores["favor++"] == ["40.00", "55.00 ± 7.07"]
    assert shares["favor++"] == ["50.00", "68.75 ± 8.84"]
    assert scores["softmax"] == ["80.00", "80.00"]
    assert shares["softmax"] == ["100.00", "100.00"]
    assert scores["uniform"] == ["20.00", "20.00"]
    assert scores["window-only"] == ["72.00", ""]
    assert scores["trig"] == ["not finite", ""]


def test_a_figure_is_drawn_while_runs_are_still_missing(tmp_path):
    draw(results(run("uniform", None, None, 0.2)), tmp_path / "one.png")
    draw(results(run("trig", 16, 0, None), run("favor+++window", 32, 0, 0.5)), tmp_path / "two.png")
    for name in ("one.png", "two.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
