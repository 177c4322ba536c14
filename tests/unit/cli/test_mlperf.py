"""`swerve mlperf` on logs and trees: exit codes, tables and JSON."""

import json
import subprocess
import sys

import pytest

from swerve.cli.main import main

from ..mlperf.logs import write_log

RDI = "Research, Development, or Internal (RDI)"


def run(capsys, *words):
    code = main(["mlperf", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_clean_log_exits_with_0_and_findings_with_1(capsys, tmp_path):
    path = write_log(tmp_path / "run.log")
    code, out, _ = run(capsys, "check", path)
    assert (code, out) == (0, "no findings: 1 logs, ruleset 6.1.0, by swerve, compliance_checker\n")
    write_log(path, changes={"config_filename": None, "eval_samples": 256})
    code, out, _ = run(capsys, "check", path)
    assert code == 1
    assert "eval_samples: 256, expected 251 (wrong-value, compliance_checker)" in out
    assert "-> run with the value of the rules" in out
    assert "2 findings in 1 places" in out
    assert max(map(len, out.splitlines())) <= 118


def test_what_cannot_be_read_exits_with_2(capsys, tmp_path):
    assert run(capsys, "check", tmp_path / "none")[::2] == (
        2,
        f"swerve: {tmp_path / 'none'}: no such log: name a file with :::MLLOG lines\n",
    )


def test_json_of_a_check_is_stable(capsys, tmp_path):
    path = write_log(tmp_path / "run.log", changes={"eval_samples": 256})
    code, out, _ = run(capsys, "check", path, "--json")
    assert code == 1
    assert json.loads(out) == {
        "path": str(path),
        "kind": "log",
        "ruleset": "6.1.0",
        "checkers": ["swerve", "compliance_checker"],
        "logs": [str(path)],
        "clean": False,
        "findings": [
            {
                "checker": "compliance_checker",
                "severity": "error",
                "kind": "wrong-value",
                "file": str(path),
                "line": 14,
                "key": "eval_samples",
                "found": "256, expected 251",
                "meaning": "the rules fix this value, and the run logged another",
                "remedy": "run with the value of the rules; if the run used it, mend what it logs",
            }
        ],
    }


def test_files_with_the_same_findings_share_them(capsys, tmp_path):
    for number in range(3):
        write_log(tmp_path / f"result_{number}.txt", seed=number, changes={"config_filename": None})
    code, out, _ = run(capsys, "check", tmp_path)
    assert code == 1
    assert out.count("config_filename") == 1
    assert all(f"result_{number}.txt" in out for number in range(3))


@pytest.fixture
def site(tmp_path):
    fields = dict.fromkeys(("host_networking", "host_networking_topology", "host_memory_configuration"), "N/A")
    path = tmp_path / "laptop.json"
    path.write_text(json.dumps({**fields, "number_of_nodes": "1", "cooling": "air", "status": RDI}))
    return path


def test_three_logs_and_a_site_become_a_checked_tree(capsys, tmp_path, site):
    logs = [write_log(tmp_path / f"{number}.log", seed=number) for number in range(3)]
    words = ["package", "--org", "Example", "--system", site, "--division", "open", "--out", tmp_path / "out", *logs]
    code, out, _ = run(capsys, *words, "--json")
    told = json.loads(out)
    assert (code, told["clean"], told["kind"]) == (0, True, "tree")
    assert told["checkers"] == ["swerve", "compliance_checker", "system_desc_checker", "package_checker"]
    assert "host_memory_capacity" in told["probed"]
    assert "cooling" not in told["probed"]
    site.unlink()
    code, _, err = run(capsys, *words)
    assert code == 2
    assert f"swerve mlperf system --out {site} writes a template" in err


def test_a_description_is_filled_with_what_the_machine_tells(capsys, tmp_path, site):
    code, out, err = run(capsys, "system", "--site", site, "--out", tmp_path / "box.json")
    fields = json.loads((tmp_path / "box.json").read_text())
    assert out == ""
    assert (code, len(fields)) == (0, 33)
    assert (fields["cooling"], fields["accelerators_per_node"]) == ("air", "0")
    assert [name for name, value in fields.items() if value is None] == ["submitter", "division", "system_name"]
    assert err.count("to fill in: ") == 3


def test_a_report_prints_a_line_per_batch_size(capsys, tmp_path):
    for number in range(3):
        write_log(tmp_path / f"{number}.log", seed=number)
    code, out, _ = run(capsys, "report", tmp_path, "--out", tmp_path / "out")
    assert code == 0
    assert out.splitlines()[1].split() == ["256", "3", "of", "3", "19.0", "min", "19.0", "min", "50.0", "s", "16.7%"]
    assert (tmp_path / "out" / "report.html").is_file()


def test_without_the_package_one_line_says_what_to_install(tmp_path):
    path = write_log(tmp_path / "run.log")
    code = (
        "import sys\nsys.modules['mlperf_logging'] = None\nsys.modules['matplotlib'] = None\n"
        "from swerve.cli.main import main\n"
        f"for words in (['check', {str(path)!r}], ['report', {str(path)!r}, '--out', {str(tmp_path / 'out')!r}]):\n"
        "    print(main(['mlperf', *words]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["1", "1"]
    assert done.stderr.splitlines() == [
        "swerve: mlperf-logging is missing: pip install 'swerve[mlperf]'",
        "swerve: matplotlib is missing: pip install 'swerve[mlperf]'",
    ]
