"""Tests gpu_check.py, cases.py, running.py and verdict.py with stand-ins."""

import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from common.errors import UserError
from tests.conftest import ROOT
from tests.test_readme import check_flags, program_of
from tools import gpu_check
from tools.gpu_checks import cases, parts, running, verdict
from tools.gpu_checks.running import Case

GOOD = "print('noise'); print('{\"images_per_second\": 7}')"


def case(name: str, code: str, **more) -> Case:
    return Case("tests", {"what": name}, [sys.executable, "-c", code], **more)


def run_all(path: pathlib.Path, *made: Case, retry: bool = False, host: str = "A") -> dict:
    return running.run_all(made, path / "gpu_check.json", host=host, retry=retry)


FAILURES = {  # code of a case -> status, message
    "import sys; sys.exit('error: no such weights')": ("failed", "exit code 1: no such weights"),
    "import os; os.kill(os.getpid(), 11)": ("crashed", "SIGSEGV: no output"),
    "import os; os.write(2, b'E0 a\\nF0000 check\\nb'); os.abort()": ("crashed", "SIGABRT: F0000 check"),
    "print('{')": ("failed", "no result: JSONDecodeError"),
    "print('[1, 2]')": ("failed", "no result: TypeError"),
    "import no_such": ("failed", "exit code 1: ModuleNotFoundError: No module named 'no_such'"),
    'print(\'{"error": "boxes differ"}\')': ("failed", "boxes differ"),
}


def test_every_failure_is_a_row_and_the_others_stay(tmp_path):
    bad = [case(f"bad{number}", code) for number, code in enumerate(FAILURES)]
    absent = Case("tests", {"what": "absent"}, ["/no/such/program"])
    rows = run_all(tmp_path, case("first", GOOD), *bad, absent, case("last", GOOD))
    assert rows == json.loads((tmp_path / "gpu_check.json").read_bytes())
    for number, (status, message) in enumerate(FAILURES.values()):
        row = rows[f"tests bad{number}"]
        assert row["status"] == status and row["message"].startswith(message), row
    row = rows["tests absent"]
    assert row["status"] == "failed" and "/no/such/program" in row["message"]
    for name in ("tests first", "tests last"):
        assert rows[name]["status"] == "ok" and rows[name]["result"] == {"images_per_second": 7}


END = "signal.signal(15, lambda *_: (child.terminate(), child.wait(), sys.exit(1)))"
STUBBORN = "signal.signal(15, signal.SIG_IGN)"


@pytest.mark.parametrize(("on_term", "own_session"), [(END, True), (STUBBORN, False)])
def test_a_case_that_hangs_ends_with_its_children(tmp_path, monkeypatch, on_term, own_session):
    monkeypatch.setattr(running, "GRACE", 1.0)
    write = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))"
    start = f"{on_term}; child = subprocess.Popen(['sleep', '600'], start_new_session={own_session})"
    code = f"import signal, subprocess, sys; {start}; {write}; child.wait()"
    rows = run_all(tmp_path, case("hangs", code, limit=2.0), case("absent", GOOD, left_out="one GPU"))
    assert rows["tests hangs"]["status"] == "timed out" and rows["tests hangs"]["message"] == "after 2 s"
    assert rows["tests absent"]["status"] == "left out"
    stat = pathlib.Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    time.sleep(0.2)
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


STOPPED = """
import pathlib, sys
from common import errors
from tools.gpu_checks import running
codes, path = {codes!r}, pathlib.Path({path!r})
cases = [running.Case("tests", {{"what": code}}, [sys.executable, "-c", code]) for code in codes]
errors.run(lambda: running.run_all(cases, path, host='', retry=False) and None)
"""


def test_after_an_interrupt_only_what_is_left_runs(tmp_path):
    files = [tmp_path / f"count{number}" for number in range(3)]
    codes = [f"open({str(file)!r}, 'a').write('x'); print('{{}}')" for file in files]
    # The second case hangs in its first run.
    codes[1] = (
        f"import os, time; again = os.path.exists({str(files[1])!r}); {codes[1]}; again or time.sleep(600)"
    )
    path = tmp_path / "gpu_check.json"
    command = [sys.executable, "-c", STOPPED.format(codes=codes, path=str(path))]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not files[1].exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in said and "Traceback" not in said
    assert len(json.loads(path.read_bytes())) == 1
    subprocess.run(command, cwd=ROOT, check=True)
    assert [file.read_text() for file in files] == ["x", "xx", "x"]
    assert len(json.loads(path.read_bytes())) == 3


def test_a_failure_is_repeated_on_demand(tmp_path):
    bad = case("bad", f"open({str(tmp_path / 'count')!r}, 'a').write('x'); 1 / 0")
    for retry, host, times in ((False, "B", 1), (False, "B", 1), (True, "B", 2), (False, "A", 3)):
        run_all(tmp_path, bad, retry=retry, host=host)
        assert len((tmp_path / "count").read_text()) == times
    assert run_all(tmp_path, case("bad", GOOD))["tests bad"]["status"] == "ok"
    (tmp_path / "gpu_check.json").write_text("{")
    with pytest.raises(UserError, match=r"gpu_check.json is not JSON .*: remove it"):
        run_all(tmp_path, bad)


def test_bad_flags_and_no_gpu_are_one_line(tmp_path):
    with pytest.raises(UserError, match="unknown stage 'decode': did you mean 'decoding'"):
        gpu_check.check(gpu_check.Args(stages="facts,decode"))
    with pytest.raises(UserError, match="--images and --annotations belong together"):
        gpu_check.check(gpu_check.Args(images="my/images"))
    command = [sys.executable, ROOT / "tools" / "gpu_check.py", f"--output_dir={tmp_path}/out"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == "" and not (tmp_path / "out").exists()
    assert done.stderr.startswith("error: no GPU: ") and len(done.stderr.splitlines()) == 1


def test_the_command_with_stand_in_cases(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "count_gpus", lambda: 1)
    monkeypatch.setattr(gpu_check, "draw", lambda *_, **__: None)
    decode = Case("decoding", {"load": 0.3, "roi": False}, [sys.executable, "-c", GOOD])
    monkeypatch.setattr(cases, "all_cases", lambda *_: [decode, case("not by DALI alone", GOOD)])
    _, words = gpu_check.check(gpu_check.Args(output_dir=str(tmp_path), dali_only=True))
    assert words == "Decoding alone makes 7 images/s: use --hw_decoder_load=0.3."
    assert "| decoding load=0.3 roi=False | ok | 7 |" in (tmp_path / "rows.md").read_text().splitlines()


def test_all_cases_are_commands_of_this_project():
    made = cases.all_cases(pathlib.Path("/out"), "/my/images", "/my/instances.json", gpus=1, cores=16)
    assert len({each.name for each in made}) == len(made) > 90
    assert list(dict.fromkeys(each.stage for each in made)) == list(cases.STAGES)
    assert {each.about["run"] for each in made if each.left_out} == {"two-gpus"}
    for words in (list(each.command) for each in made if each.stage != "tests"):
        if program_of(words):
            check_flags(words, on_a_page=False)
        else:
            inspect.signature(getattr(parts, words[3])).bind(**json.loads(words[4]))
    assert "tests/yolov4/test_pipeline.py" in {each.about.get("file") for each in made}


def test_numbers_are_read_from_what_programs_leave(tmp_path, monkeypatch):
    assert cases._passed("==\n3 passed, 1 skipped in 9s") == {"passed": 3, "skipped": 1}
    assert "error" in cases._passed("2 skipped in 9s")
    (tmp_path / "results.csv").write_text("epoch,images_per_second,loss,AP\n1,5,4,\n2,7.5,3.5,\n")
    assert cases._last_epoch(tmp_path, "") == {"images_per_second": 7.5, "loss": 3.5}
    monkeypatch.setattr(parts, "nccl", lambda: {"error": "none"})
    assert cases._with_nccl(tmp_path, "") == {"images_per_second": 7.5, "loss": 3.5, "error": "none"}
    candidates = {"model": {"error": "killed"}, "data dali_gpu": {"images_per_second": {"median": 5.04}}}
    (tmp_path / "bench.json").write_text(json.dumps({"candidates": candidates, "verdict": ["a", "b"]}))
    expected = {"data": 5.0, "verdict": "a b", "error": "killed"}
    assert cases._rates(tmp_path / "bench.json", "") == expected


# --- the verdict ---


def row(stage: str, result: dict | float, status: str = "ok", message: str = "", **about) -> dict:
    result = result if isinstance(result, dict) else {"images_per_second": result}
    return {"stage": stage, "about": about, "status": status, "message": message, "result": result}


def step(rate: float, precision: str = "float32", xla: bool = False, batch: int = 64, **more) -> dict:
    about = {"what": "data,model,both" if more else "model", "precision": precision, "xla": xla}
    return row("training", {"model": rate, **more}, app="net", batch_size=batch, **about)


def decode(rate: float, load: float = 0.65, status: str = "ok", *, roi: bool = False) -> dict:
    return row("decoding", rate, status, load=load, roi=roi)


def facts(libnvcuvid: bool, jpeg_engines: int) -> dict:
    return row("facts", {"libnvcuvid": libnvcuvid, "jpeg_engines": jpeg_engines})


LOADING = [row("loading", n, app="net", num_threads=n, batch_size=64) for n in (2, 8)]
BOTH = step(1000, data=3000, both=700, verdict="The model limits.")
GONE = row("tests", {}, "failed", "exit code 1: No module named 'tensorflow'")
TWO = row("nccl", 190, app="net", what="train.py", run="two-gpus")
WORDS = {
    "No libnvcuvid, so no JPEG engine works:": [facts(False, 0)],
    "No JPEG engine on this GPU:": [facts(True, 0)],
    "1 of 1 cases passed": [facts(True, 7)],
    "Decoding alone makes 5000 images/s: use --hw_decoder_load=0.45.": [decode(5000, 0.45), decode(4000)],
    "Decoding alone makes 4000 images/s: use --hw_decoder_load=0.65.": [decode(4100, 0.45), decode(4000)],
    "--roi_decoding is 1.25 times as fast as without: use it.": [decode(4000), decode(5000, roi=True)],
    "--roi_decoding does not work (crashed): leave it": [decode(4000), decode(9, 0.3, "crashed", roi=True)],
    "net: the loader makes 8 images/s with --num_threads=8 --batch_size=64, 2 with": LOADING,
    "net: --precision=bf is 1.80 times as fast as float32, batch 64: use it.": [step(100), step(180, "bf")],
    "net: --xla is 1.03 times as fast as float32, batch 64: leave it": [step(100), step(103, xla=True)],
    "net: --batch_size=128 is 1.20 times as fast as": [step(100, xla=True), step(120, xla=True, batch=128)],
    "net: float32: The model limits. Loader and step together reach 70% of the slower rate.": [BOTH],
    "net: train.py two-gpus: images_per_second 190.": [TWO],
    "net: AP a.plan: AP 0.25.": [row("exports", {"AP": 0.25}, app="net", what="AP", file="a.plan")],
    "A package is missing: install it, or use --dali_only.": [GONE],
    "row 0: timed out: after 3 s": [row("graphs", {}, "timed out", "after 3 s")],
}


@pytest.mark.parametrize(("last", "rows"), WORDS.items())
def test_words_follow_from_the_rows(last, rows):
    words = verdict.words({f"row {number}": each for number, each in enumerate(rows)})
    assert words[0].startswith(f"{sum(each['status'] == 'ok' for each in rows)} of {len(rows)} cases passed")
    assert words[-1].startswith(last)
