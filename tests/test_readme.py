"""Checks the commands, flags, files and links in README.md and the pages of docs/.

The tests in tests/pages/ run the commands.
"""

import importlib
import pathlib
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest
from absl import flags
from horovod.runner.launch import parse_args

from tools import check_data

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")))
PATHS = {path.stem: path for path in FILES}
PAGES = {name: path.read_text() for name, path in PATHS.items()}
# tests/pages/test_pages.py runs their commands.
PAGES_TO_RUN = (
    *("README", "data", "training", "export", "troubleshooting", "benchmarks", "architecture"),
    *("yolov4", "preprocessing", "examples"),
)
# Pages without commands, and pages whose commands need other hosts, Docker, hours or a copy of the project.
OTHER_PAGES = (
    *("distributed", "containers", "copy_this", "accuracy", "licences", "performance_notes", "CONTRIBUTING"),
    *("flags", "config", "customize", "api", "versions", "maintaining"),
    *("migrate", "horovod", "dali_features"),
)


def commands(text: str) -> list[str]:
    """Returns the lines of the bash blocks of a page; a backslash continues a line."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in re.sub(r" *\\\n *", " ", block).splitlines()]
    return [line for line in lines if line.strip()]


def python_commands(*names: str) -> list[str]:
    """Returns the Python commands of the pages in order, each once."""
    return python_commands_in("\n".join(PAGES[name] for name in names))


def python_commands_in(text: str) -> list[str]:
    """Returns the Python commands of a page's text in order, each once."""
    lines = [command.removeprefix(".venv/bin/") for command in commands(text)]
    return [line for line in dict.fromkeys(lines) if line.startswith("python ")]


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    """Returns a command's program, such as efficientdet/train.py, and its arguments."""
    indexes = [index for index, word in enumerate(words) if re.fullmatch(r"(\w+/)+\w+\.py", word)]
    return (words[indexes[0]], words[indexes[0] + 1 :]) if indexes else None


def known_flags(program: str) -> flags.FlagValues:
    """Returns the flags of a program, and --help. absl replaces --flagfile by the flags in the file."""
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    fv = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "absl.app's", flag_values=fv)
    if hasattr(module, "define_flags"):
        module.define_flags(fv)
    elif hasattr(module, "argparse"):
        for name in re.findall(r'add_argument\("--(\w+)"', (ROOT / program).read_text()):
            flags.DEFINE_string(name, None, "argparse's", flag_values=fv)
    return fv


def ranks_of(words: list[str]) -> int:
    """Returns the number of ranks of a command. Each Slurm node has eight."""
    count = re.search(r"(-np|--nodes=) ?(\d+)", " ".join(words))
    return int(count[2]) * (8 if count[1] == "--nodes=" else 1) if count else 1


def gpus_of(recipe: str) -> int:
    """Returns the number of GPUs in a recipe's name, such as d0_coco_16gpu.txt or d0_coco_8xv100.txt."""
    number = re.search(r"_(\d+)(gpu|xv100)\.txt$", recipe)
    return int(number[1]) if number else 8 if "retinanet_coco" in recipe else 1


def check_recipe(words: list[str], fv: flags.FlagValues) -> None:
    """Asserts that recipes and commands with many ranks name separate evaluation data."""
    recipes = re.findall(r"--flagfile=(\S*_coco\S*)", " ".join(words))
    if fv.strategy not in ("mirrored", "multi_worker"):
        assert all(gpus_of(recipe) == ranks_of(words) for recipe in recipes), recipes
    if recipes or ranks_of(words) > 1 or fv.strategy != "none":
        names = [f"{split}_{kind}" for split in ("train", "eval") for kind in ("images", "annotations")]
        assert len({fv[name].value for name in names} - {None}) == 4, words


def check_flags(words: list[str], on_a_page: bool = True) -> None:
    """Asserts that the program, its flags and its flag files exist."""
    program, arguments = program_of(words)
    if program == "tools/check_data.py":
        arguments = check_data.without_training_flags(arguments)
    fv = known_flags(program)
    positional = fv([program, *arguments])[1:]
    assert not positional or program in ("tools/describe_weights.py", "tools/bench.py"), positional
    if on_a_page and program.endswith("/train.py") and not fv.help:
        check_recipe(words, fv)


def check_horovodrun(words: list[str]) -> None:
    """Asserts that the number of ranks equals the number of slots on the hosts."""
    with mock.patch.object(sys, "argv", words):
        args = parse_args()
    assert args.num_proc >= 2
    assert pathlib.Path(args.command[0]).name == "python"
    assert args.command[1].endswith("/train.py")
    assert "--strategy=horovod" in args.command or any(word.endswith("gpu.txt") for word in args.command)
    if args.hosts:
        assert sum(int(host.rpartition(":")[2]) for host in args.hosts.split(",")) == args.num_proc


PROGRAMS = {
    f"{page}-{number}": words
    for page, text in PAGES.items()
    for number, words in enumerate(map(shlex.split, commands(text)))
    if program_of(words)
}


@pytest.mark.parametrize("words", PROGRAMS.values(), ids=PROGRAMS)
def test_documented_command_has_flags_of_its_program(words):
    check_flags(words)
    if "horovodrun" in words:
        check_horovodrun(words[words.index("horovodrun") :])


def test_documentation_tests_cover_every_page_and_extract_its_commands():
    assert len(PAGES) == len(FILES)
    assert set(PAGES) == {*PAGES_TO_RUN, *OTHER_PAGES}
    assert sum(len(python_commands(page)) for page in PAGES_TO_RUN) >= 50
    for page, minimum in (("distributed", 10), ("containers", 3)):
        assert sum(name.startswith(f"{page}-") for name in PROGRAMS) >= minimum


def test_documented_commands_start_with_python_make_or_horovodrun():
    for name in PAGES_TO_RUN:
        for command in commands(PAGES[name]):
            assert command.removeprefix(".venv/bin/").split()[0] in ("python", "make", "horovodrun"), command


@pytest.mark.parametrize("name", PAGES)
def test_flags_in_the_text_of_each_documentation_page_exist(name, capsys):
    programs = sorted({program_of(words)[0] for words in PROGRAMS.values()})
    known = {flag for program in programs for flag in known_flags(program)}
    with mock.patch.object(sys, "argv", ["horovodrun", "--help"]), pytest.raises(SystemExit):
        parse_args()
    known |= set(re.findall(r"--([\w-]+)", capsys.readouterr().out)) | {"nodes", "shm-size"}
    known |= {"tf_xla_persistent_cache_directory", "python", "logdir"}
    known |= {"account", "partition", "signal", "time", "gang-scheduling", "device", "flagfile"}
    known |= {"for", "timeout", "cascade", "run"}
    text = "" if name == "containers" else PAGES[name]
    assert set(re.findall(r"(?<![\w-])--([a-z][\w-]+)(?==)", text)) <= known


@pytest.mark.parametrize("name", PAGES)
def test_links_and_docker_files_of_each_documentation_page_exist(name):
    text = PAGES[name]
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        assert link.startswith("https://") or (PATHS[name].parent / file).exists(), link
        assert file or anchor in slugs, link
    for file in set(re.findall(r"(?<![\w/.])docker/[\w.]+\w", text)):
        assert (ROOT / file).exists(), file


def test_documented_make_targets_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    lines = [command for name in PAGES_TO_RUN for command in commands(PAGES[name])]
    targets = [word for command in lines if command.startswith("make ") for word in command.split()[1:]]
    assert {*DEMOS, "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# {make target: (app, make variable of the run's directory)}
DEMOS = {
    "demo": ("efficientdet", "DEMO"),
    "demo-small-efficientdet": ("efficientdet", "DEMO_SMALL_EFFICIENTDET"),
    "demo-yolov4": ("yolov4", "DEMO_YOLOV4"),
}


def make(
    target: str, directory: pathlib.Path, *words: str, **variables: object
) -> subprocess.CompletedProcess:
    """Runs the make target of a demo in this Python environment."""
    (directory / "venv").mkdir()
    (directory / "venv" / ".ready").touch()
    variables |= {"VENV": directory / "venv", "RUN": sys.executable, "DEMO_DATA": directory / "data"}
    variables[DEMOS[target][1]] = directory / "run"
    settings = [f"{name}={value}" for name, value in variables.items()]
    return subprocess.run(["make", target, *words, *settings], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("target", DEMOS)
def test_make_demo_commands_have_flags_of_their_programs(tmp_path, target):
    result = make(target, tmp_path, "--dry-run")
    assert result.returncode == 0, result.stderr
    lines = re.split("\n|&&", result.stdout.replace("\\\n", " ").replace("$overwrite", "false"))
    programs = [shlex.split(line) for line in lines if line.strip()]
    programs = [words for words in programs if words[0] == sys.executable]
    expected = ["tools/synthetic.py"] * 2 + [
        f"{DEMOS[target][0]}/{name}.py" for name in ("train", "eval", "infer")
    ]
    assert sorted(program_of(words)[0] for words in programs) == sorted(expected)
    for words in programs:
        check_flags(words)
