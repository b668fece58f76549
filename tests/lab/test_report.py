"""Results to lines, tables and plots."""

import json
import math
import subprocess

import pytest
from PIL import Image

from flash_vision.lab.grid import load_grid
from flash_vision.lab.report import ReportOptions, report_grid
from flash_vision.lab import results
from flash_vision.lab.results import add_result, code_tree, count_spikes, is_finished, make_result
from flash_vision.lab.size import Size


def result(run, **values):
    return {
        "key": run.key, "grid": "tiny", "variant": run.label, "seed": run.seed, "diverged": False,
        "parameters": 1_234_000, "macs": 56_700_000, "images_per_s": 120.4, "train_seconds": 531.2,
        "spikes": 0, "nonfinite": 0, "commit": "a" * 40 + "+", **values,
    }  # fmt: skip


@pytest.fixture
def grid(write_grid, tmp_path):
    """A grid of two variants and three seeds, of which one run is missing and one has diverged."""
    groups = {"heads": {"question": "How many heads?", "variants": ["vit", "vit-one-head"], "seeds": [0, 1, 2]}}
    path = write_grid(groups=groups)
    many, one = (load_grid(path).runs()[i : i + 3] for i in (0, 3))
    (tmp_path / "out" / "tiny").mkdir(parents=True)
    results = tmp_path / "out" / "tiny" / "results.jsonl"
    for run, top1, speed in zip(many, (40.0, 41.0, 45.0), (100.0, 120.4, 300.0), strict=True):
        add_result(results, result(run, top1=top1, images_per_s=speed))
    add_result(results, result(one[0], top1=39.5, spikes=2))
    add_result(results, result(one[1], diverged=True, images_per_s=None, train_seconds=None, nonfinite=21))
    return path


def test_a_table_has_mean_sample_deviation_and_n_and_counts_what_diverged(grid, tmp_path):
    text = report_grid(ReportOptions(grid=str(grid), output=str(tmp_path / "out")))
    title, _, head, _, many, one, _, commits = text.splitlines()
    assert title == "**heads. How many heads?** Top-1 on the validation images, last epoch."
    names = [cell.strip() for cell in head.strip("|").split("|")]
    rows = [dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True)) for row in (many, one)]
    # deviation of 40, 41, 45: sqrt((4 + 1 + 9) / 2)
    assert rows == [
        {
            "variant": "vit", "top-1 %": "42.00", "deviation": f"{math.sqrt(7):.2f}", "n": "3", "to the first": "",
            "M parameters": "1.234", "M MACs": "56.7", "images/s": "120", "training s": "531", "spikes": "0",
            "skipped": "0", "diverged": "0",
        },
        {
            "variant": "vit-one-head", "top-1 %": "39.50", "deviation": "", "n": "1", "to the first": "-2.50",
            "M parameters": "1.234", "M MACs": "56.7", "images/s": "120", "training s": "531", "spikes": "2",
            "skipped": "21", "diverged": "1",
        },
    ]  # fmt: skip
    assert commits == "Commits: aaaaaaa+."


def test_the_tables_go_between_two_lines_of_a_page_and_nothing_else_changes(grid, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("# Before\n<!-- lab tiny -->\nold\n<!-- end lab tiny -->\nafter\n")
    options = ReportOptions(grid=str(grid), output=str(tmp_path / "out"), into=str(page))
    for _ in range(2):
        text = report_grid(options)
        assert page.read_text() == f"# Before\n<!-- lab tiny -->\n\n{text}\n<!-- end lab tiny -->\nafter\n"
    page.write_text("# Before\n<!-- end lab tiny -->\n<!-- lab tiny -->\n")
    with pytest.raises(ValueError, match=r"into .*RESULTS\.md: must hold the line <!-- lab tiny -->"):
        report_grid(options)


def test_the_plot_is_a_picture_with_ink_in_both_panels(grid, tmp_path):
    plot = tmp_path / "plots" / "tiny.png"
    report_grid(ReportOptions(grid=str(grid), output=str(tmp_path / "out"), plot=str(plot)))
    with Image.open(plot) as image:
        grey = image.convert("L")
    for half in (grey.crop((0, 0, grey.width // 2, grey.height)), grey.crop((grey.width // 2, 0, *grey.size))):
        assert sum(half.histogram()[:128]) > 500


def test_spikes_are_counted_once_each_and_noise_is_none():
    quiet = [2.0 - 0.01 * i + (0.2 if i % 3 else -0.2) for i in range(60)]
    assert count_spikes(quiet) == 0
    spiky = list(quiet)
    spiky[30:33] = [4.0, 5.0, 3.0]
    spiky[50] = math.nan
    assert count_spikes(spiky) == 2


@pytest.mark.parametrize(
    ("records", "exit_code", "expected"),
    [
        ([{"kind": "train", "step": 1}], 0, True),
        ([{"kind": "train", "step": 1}], 75, False),
        ([{"kind": "event", "step": 3, "event": "nonfinite"}], 3, True),
        ([{"kind": "event", "step": 3, "event": "corrupt"}], 3, False),
        ([], -9, False),
    ],
)
def test_a_run_is_finished_when_it_is_done_or_its_loss_is_lost(tmp_path, records, exit_code, expected):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert is_finished(tmp_path, exit_code) is expected


def test_a_run_that_ends_near_the_loss_of_guessing_has_diverged(write_grid, tmp_path):
    (run,) = load_grid(write_grid(groups={"one": {"question": "?", "variants": ["vit"]}})).runs()
    config = run.train_config().as_dict()
    (tmp_path / "run.json").write_text(
        json.dumps({"config": config, "commit": "c", "versions": {}, "device": "cpu", "threads": 1})
    )

    def made(losses, exit_code=0):
        train = [
            {
                "kind": "train",
                "step": i + 1,
                "loss": loss,
                "grad_norm": math.inf if i == 3 else 1.0,
                "images_per_s": 50.0,
            }
            for i, loss in enumerate(losses)
        ]
        final = {"kind": "eval", "step": len(losses), "top1": 51.5, "top5": 100.0, "loss": 1.0, "best": 52.0}
        skipped = {"kind": "event", "step": 9, "event": "nonfinite"}
        text = "".join(
            json.dumps(record) + "\n" for record in (*train, skipped, {**final, "top1": 52.0, "step": 1}, final)
        )
        (tmp_path / "metrics.jsonl").write_text(text)
        return make_result("tiny", run, tmp_path, Size(10, 20), exit_code, "f" * 40)

    good = made([0.99] * 20)  # ln 3 - 0.1 = 0.9986
    assert good["tree"] == "f" * 40
    assert (good["diverged"], good["top1"], good["best_top1"], good["nonfinite"]) == (False, 51.5, 52.0, 2)
    assert (good["updates"], good["images"], good["train_seconds"]) == (20, 160, 3.2)
    assert made([0.5] * 10 + [1.0] * 10)["diverged"]
    assert made([0.5] * 19 + [math.nan])["diverged"]
    assert made([0.5] * 19 + [math.nan])["final_loss"] is None
    assert made([0.5] * 20, exit_code=3)["diverged"]


def test_the_tree_is_that_of_the_package_and_says_whether_it_was_edited(tmp_path, monkeypatch):
    package = tmp_path / "flash_vision"
    (package / "lab").mkdir(parents=True)
    (package / "a.py").write_text("a = 1\n")
    monkeypatch.setattr(results, "__file__", str(package / "lab" / "results.py"))
    assert code_tree() is None

    def commit(message):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        for words in (["add", "."], [*who, "commit", "-qm", message]):
            subprocess.run(["git", "-C", str(tmp_path), *words], check=True)

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit("one")
    first = code_tree()
    (tmp_path / "README.md").write_text("more\n")
    assert code_tree() == first
    commit("two")
    assert code_tree() == first
    assert len(first) == 40
    (package / "b.py").write_text("b = 1\n")
    assert code_tree() == f"{first}+"
    commit("three")
    assert len({first, code_tree(), f"{first}+"}) == 3
