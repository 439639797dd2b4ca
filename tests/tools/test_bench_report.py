"""Generated pages: of the benchmarks' figures, and of formats and peers, which markers of tests name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.refuses import refuses
from tools.bench import report
from tools.bench.common import ROOT, Figures, Record, make_parser, objects_text, percentile
from tools.docs.compatibility import Claim, collect_claims

FIELDS = {"figure", "value", "unit", "group", "command", "machine", "date", "commit"}
VERSIONS = {"python", "torch", "transformers", "numpy", "opencv", "pyzmq", "sam3_node"}
MACHINE = {"cpu", "cores", "load_average", "avx512", "amx", "memory_gb"}
RESULTS = report.read_results()
RECORDS = [record for records in RESULTS.values() for record in records]
PAGES = report.format_pages(RESULTS)
OVERVIEW = report.format_overview(RESULTS)


def test_the_committed_page_is_what_the_generator_writes() -> None:
    assert (report.DOCS / "benchmarks.md").read_text() == OVERVIEW


def test_the_page_of_a_benchmark_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["report", "latency-step"])
    report.main()
    assert capsys.readouterr().out == f"{PAGES['latency-step']}\n"


def find_faults(record: Record) -> Iterator[str]:
    """Yield what is wrong with a record."""
    if missing := FIELDS - record.keys():
        yield f"lacks {', '.join(sorted(missing))}"
        return
    page = PAGES[report.name_bench(record)]
    if record["group"] not in report.GROUPS:
        yield f"group {record['group']}"
    if not re.fullmatch("[0-9a-f]{8}", record["commit"]):
        yield f"commit {record['commit']}: expected 8 digits of a commit without changes"
    if str(ROOT) in json.dumps(record):
        yield "names the folder of the checkout"
    if record["figure"] not in page or record["command"] not in page:
        yield "is not printed"
    if "versions" in record and not (
        record["versions"].keys() >= VERSIONS and record["machine"].keys() >= MACHINE
    ):
        yield "lacks a version or a part of the machine"


def test_every_record_is_complete_and_printed() -> None:
    faults = [
        f"{name}, {record.get('figure')}: {fault}"
        for name, records in RESULTS.items()
        for record in records
        for fault in find_faults(record)
    ]
    assert not faults, "\n".join(faults)


def test_a_benchmark_of_this_checkout_measures_every_headline() -> None:
    files = {file for headlines in report.HEADLINES.values() for _, file, _ in headlines}
    names = {report.name_bench(record) for file in files for record in RESULTS[file]}
    assert not [name for name in sorted(names) if report.find_bench(name) is None]


def test_every_group_has_a_figure_measured_by_this_version() -> None:
    assert {record["group"] for record in RECORDS if "versions" in record} == set(report.GROUPS)


def test_the_first_page_has_about_25_figures_and_six_plots() -> None:
    assert 20 <= sum(map(len, report.HEADLINES.values())) <= 30
    assert len(report.PLOTS) == 6


@pytest.mark.parametrize("plot", report.PLOTS, ids=lambda plot: plot.name)
def test_a_plot_is_drawn_from_the_results(plot: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.write(RESULTS, tmp_path / plot.name)
    assert (tmp_path / plot.name).stat().st_size > 1000
    assert (report.DOCS / "images" / plot.name).is_file()


def test_figures_keep_the_spread_and_put_ratios_first(tmp_path: Path) -> None:
    figures = Figures("latency.step", ["--objects", "4", "--json", "FILE", "--threads", "2"])
    figures.add("time", [3.0, 1.0, 2.0], "ms")
    figures.add("speed", 1.5, "x", target="at least 1", interval=(1.25, 1.75))
    figures.write(tmp_path / "results/step.json")
    ratio, time = json.loads((tmp_path / "results/step.json").read_text())
    assert (ratio["figure"], ratio["value"], ratio["target"]) == ("speed", 1.5, "at least 1")
    assert ratio["interval"] == {"low": 1.25, "high": 1.75}
    assert time["spread"] == {"min": 1.0, "median": 2.0, "max": 3.0, "runs": 3}
    assert time["value"] == 2.0
    assert time["command"] == "python -m tools.bench.latency.step --objects 4 --threads 2"
    assert time["group"] == "latency"


def test_without_a_file_no_figures_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Figures("latency.step", []).write(None)
    assert not list(tmp_path.iterdir())


def test_the_parser_has_runs_only_where_a_benchmark_compares() -> None:
    assert make_parser("text", runs=5).parse_args(["--runs", "3"]).runs == 3
    assert make_parser("text", print_json=True).parse_args(["--json"]).json == Path("-")
    with pytest.raises(SystemExit):
        make_parser("text").parse_args(["--runs", "3"])


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"value": 1.523, "unit": "x"}, "1.52"),
        ({"value": 12261.0, "unit": "frames/s"}, "12,261"),
        ({"value": 0.00015, "unit": "px"}, "0.00015"),
        ({"value": "asserted", "unit": ""}, "asserted"),
        ({"value": 72.0, "unit": "%", "interval": {"low": 64.2, "high": 78.7}}, "72 (64.2 to 78.7 in 95 %)"),
        (
            {"value": 2.0, "unit": "x", "spread": {"min": 1.9, "max": 2.25, "runs": 5}},
            "2.00 (1.90 to 2.25, 5 runs)",
        ),
    ],
)
def test_a_value_is_shown_with_its_spread(record: Record, text: str) -> None:
    assert report.format_value(record) == text


def test_statistics() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert objects_text(1) == "1 object"


def claims_of(folder: Path, text: str) -> list[Claim]:
    (folder / "tests").mkdir()
    (folder / "tests" / "test_one.py").write_text(f"import pytest\n{text}")
    return list(collect_claims(folder))


def test_markers_of_functions_and_modules_are_found(tmp_path: Path) -> None:
    text = (
        'pytestmark = [pytest.mark.verifies("viewer", "Rerun", "own package", by="rerun-sdk")]\n'
        '@pytest.mark.verifies("recording", "A | B", "layout", "bytes", missing="a file")\n'
        "def test_one(): ...\n"
    )
    place = "tests/test_one.py"
    assert claims_of(tmp_path, text) == [
        Claim("viewer", "Rerun", "own package", "rerun-sdk", "", place),
        Claim("recording", "A | B", "layout", "bytes", "a file", place),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "NAME", '"cloud", "x", "layout", "by"', '"recording", "x", "hearsay", "by"'),
        *(f'"recording", "x", "layout"{more}' for more in ("", ', "by", "m", "more"', ', "by", reason="y"')),
    ],
)
def test_other_markers_are_refused_by_place(tmp_path: Path, arguments: str) -> None:
    text = f"@pytest.mark.verifies({arguments})\ndef test_one(): ...\n"
    with refuses(ValueError, field="tests/test_one.py:2"):
        claims_of(tmp_path, text)
