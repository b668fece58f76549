"""Results to lines, tables and plots."""

import json
import math
import re
import subprocess

import pytest
import yaml
from PIL import Image

from flash_vision.lab import results
from flash_vision.lab.grid import load_grid
from flash_vision.lab.report import ReportOptions, report_grid
from flash_vision.lab.results import add_result, code_tree, count_spikes, is_finished, make_result
from flash_vision.lab.size import Size

TWO = ["vit", "vit-one-head"]


def result(run, **values):
    return {
        "key": run.key, "grid": "tiny", "variant": run.label, "seed": run.seed, "diverged": False, "top5": 80.0,
        "loss": 3.5, "parameters": 1_234_000, "macs": 56_700_000, "images_per_s": 120.4, "train_seconds": 531.2,
        "spikes": 0, "nonfinite": 0, "commit": "a" * 40 + "+", "tree": "d" * 40, **values,
    }  # fmt: skip


def tables(text):
    """Title, rows and lines below the table of each group."""
    found = {}
    for part in re.split(r"\n(?=\*\*)", text.strip()):
        title, *lines = part.splitlines()
        head, _, *cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
        rows = {row[0]: dict(zip(head, row, strict=True)) for row in cells}
        found[title[2:].split(".")[0]] = (title, rows, [line for line in lines if line and "|" not in line])
    return found


@pytest.fixture
def reported(write_grid, tmp_path):
    """Writes results, a dict of (group, label, seed) to their values, and gives the report's tables."""

    def report(groups, values, **changes):
        path = write_grid(groups=groups, **changes)
        (tmp_path / "out" / "tiny").mkdir(parents=True)
        runs = {(run.group, run.label, run.seed): run for run in load_grid(path).runs()}
        for name, own in values.items():
            add_result(tmp_path / "out" / "tiny" / "results.jsonl", result(runs[name], **own))
        return tables(report_grid(ReportOptions(grid=str(path), output=str(tmp_path / "out"))))

    return report


@pytest.fixture
def grid(write_grid, tmp_path):
    """A grid of two variants and three seeds, of which one run is missing and one has diverged."""
    groups = {"heads": {"question": "How many heads?", "variants": ["vit", "vit-one-head"], "seeds": [0, 1, 2]}}
    path = write_grid(groups=groups)
    many, one = (load_grid(path).runs()[i : i + 3] for i in (0, 3))
    (tmp_path / "out" / "tiny").mkdir(parents=True)
    file = tmp_path / "out" / "tiny" / "results.jsonl"
    for run, top1, speed in zip(many, (40.0, 41.0, 45.0), (100.0, 120.4, 300.0), strict=True):
        add_result(file, result(run, top1=top1, images_per_s=speed))
    add_result(file, result(one[0], top1=39.5, spikes=2, loss=3.61234))
    add_result(file, result(one[1], diverged=True, images_per_s=None, train_seconds=None, nonfinite=21))
    return path


def test_a_table_has_mean_sample_deviation_and_n_and_counts_what_diverged(grid, tmp_path):
    text = report_grid(ReportOptions(grid=str(grid), output=str(tmp_path / "out")))
    ((title, rows, below),) = tables(text).values()
    assert title == "**heads. How many heads?** Top-1 on the validation images, last epoch."
    # deviation of 40, 41, 45: sqrt((4 + 1 + 9) / 2)
    assert list(rows.values()) == [
        {
            "variant": "vit", "top-1 %": "42.00", "deviation": f"{math.sqrt(7):.2f}", "n": "3", "to the first": "",
            "top-5 %": "80.00", "validation loss": "3.5000", "M parameters": "1.234", "M MACs": "56.7",
            "images/s": "120", "training s": "531", "spikes": "0", "skipped": "0", "diverged": "0",
        },
        {
            "variant": "vit-one-head", "top-1 %": "39.50", "deviation": "", "n": "1", "to the first": "-2.50",
            "top-5 %": "80.00", "validation loss": "3.6123", "M parameters": "1.234", "M MACs": "56.7",
            "images/s": "120", "training s": "531", "spikes": "2", "skipped": "21", "diverged": "1",
        },
    ]  # fmt: skip
    # 2 sqrt(7) sqrt(1/3 + 1)
    assert below == [
        "Noise s = 2.65. An asterisk: beyond 2 s sqrt(1/3 + 1/n), 6.11 for n = 1.",
        "Commits: aaaaaaa+.",
    ]


def test_the_first_variant_stands_for_all_its_seeds_and_group_a_gives_the_noise(reported):
    groups = {
        "loud": {"question": "?", "variants": ["vit"], "overrides": {"lr": 5e-3}, "seeds": [0, 1]},
        "few": {"question": "?", "variants": TWO},
        "a": {"question": "?", "variants": ["vit"], "seeds": [0, 1]},
        "sweep": {"question": "?", "variants": TWO, "sweep": {"lr": [2e-3, 3e-3]}},
    }
    values = {
        ("loud", "vit", 0): {"top1": 0.0},
        ("loud", "vit", 1): {"top1": 90.0},
        ("few", "vit", 0): {"top1": 40.0},
        ("few", "vit-one-head", 0): {"top1": 43.5},
        ("a", "vit", 1): {"top1": 42.0},
        ("sweep", "vit lr=0.003", 0): {"top1": 30.0},
    }
    found = reported(groups, values)
    _, rows, below = found["few"]
    assert [rows["vit"][name] for name in ("top-1 %", "n", "to the first")] == ["41.00", "2", ""]
    # s is the deviation of 40 and 42, sqrt(2); the bar 2 sqrt(2) sqrt(1/2 + 1) = 3.46
    assert rows["vit-one-head"]["to the first"] == "+2.50"
    assert below[0] == "Noise s = 1.41. An asterisk: beyond 2 s sqrt(1/2 + 1/n), 3.46 for n = 1."
    assert found["a"][1]["vit"]["n"] == "2"
    _, rows, below = found["sweep"]
    assert [(label, row["top-1 %"], row["n"]) for label, row in rows.items()] == [
        ("vit lr=0.002", "40.00", "1"),
        ("vit lr=0.003", "30.00", "1"),
        ("vit-one-head lr=0.002", "43.50", "1"),
    ]
    assert "to the first" not in rows["vit lr=0.002"]
    assert below == ["Commits: aaaaaaa+."]


def test_the_noise_of_the_grid_stands_in_where_the_results_show_none(reported):
    groups = {"few": {"question": "?", "variants": TWO}}
    values = {("few", "vit", 0): {"top1": 40.0}, ("few", "vit-one-head", 0): {"top1": 38.5}}
    _, rows, below = reported(groups, values, noise=0.5)["few"]
    assert rows["vit-one-head"]["to the first"] == "-1.50*"
    assert below[0] == "Noise s = 0.50. An asterisk: beyond 2 s sqrt(1/1 + 1/n), 1.41 for n = 1."


def test_a_difference_beyond_the_noise_has_an_asterisk(reported):
    groups = {"few": {"question": "?", "variants": TWO, "seeds": [0, 1]}}
    values = {("few", "vit", 0): {"top1": 40.0}, ("few", "vit", 1): {"top1": 41.0}}
    _, rows, _ = reported(groups, values | {("few", "vit-one-head", 0): {"top1": 38.5}})["few"]
    assert rows["vit-one-head"]["to the first"] == "-2.00*"  # beyond 2 sqrt(1/2) sqrt(3/2) = 1.73


def test_without_the_first_variant_there_is_no_difference(reported, write_grid):
    variants = yaml.safe_load(write_grid().read_text())["variants"] | {"vit-slow": {"extends": "vit", "lr": 1e-3}}
    values = {("few", "vit-one-head", 0): {"top1": 40.0}, ("few", "vit-slow", 0): {"top1": 41.0}}
    groups = {"few": {"question": "?", "variants": list(variants)}}
    _, rows, below = reported(groups, values, variants=variants)["few"]
    assert list(rows) == ["vit-one-head", "vit-slow"]
    assert "to the first" not in rows["vit-slow"]
    assert below == ["Commits: aaaaaaa+."]


def test_troubles_have_columns_where_there_are_any_or_low_precision_is_compared(reported):
    groups = {
        "calm": {"question": "?", "variants": ["vit"]},
        "low": {"question": "?", "variants": ["vit"], "sweep": {"emulate": ["", "float16"]}},
    }
    found = reported(groups, {("calm", "vit", 0): {"top1": 40.0}})
    assert "spikes" not in found["calm"][1]["vit"]
    assert found["low"][1]["vit emulate="]["diverged"] == "0"


def test_rows_from_different_code_are_named_with_the_group_they_stand_in(reported):
    groups = {
        "mixed": {"question": "?", "variants": TWO},
        "same": {"question": "?", "variants": ["vit"], "overrides": {"lr": 5e-3}},
    }
    values = {
        ("mixed", "vit", 0): {"top1": 40.0, "commit": "b" * 40},
        ("mixed", "vit-one-head", 0): {"top1": 40.0, "tree": "e" * 40 + "+"},
        ("same", "vit", 0): {"top1": 41.0, "commit": None},
    }
    found = reported(groups, values)
    assert found["mixed"][2][-2:] == [
        "Commits: aaaaaaa+, bbbbbbb.",
        "These rows come from different states of flash_vision: ddddddd, eeeeeee+.",
    ]
    assert found["same"][2] == ["Commits: unknown."]


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
    assert good["config"]["epochs"] == config["epochs"]
    assert not {"data_dir", "output", "experiment"} & good["config"].keys()  # lines of results are shared
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
