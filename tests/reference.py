"""Writes docs/flags.md and docs/config.md: all flags and all hyper-parameters, as the code defines them.

python -m tests.reference
"""

import ast
import importlib
import pathlib
import re

from absl import flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
APPS = ("efficientdet", "yolov4")
# Programs that have a section in docs/flags.md. {app} stands for the name of each app.
APP_PROGRAMS = ("{app}/train.py", "{app}/eval.py", "{app}/infer.py", "{app}/export.py")
OTHER_PROGRAMS = (
    *("efficientdet/automl_weights.py", "yolov4/darknet_weights.py", "yolov4/fit_anchors.py"),
    *("tools/synthetic.py", "tools/check_data.py", "tools/convert.py", "tools/bench.py"),
    "examples/preprocessing/preprocess.py",
    *("benchmarks/accuracy_data.py", "benchmarks/accuracy.py", "benchmarks/large_coco.py"),
    "benchmarks/record_order.py",
)
PREAMBLE = """Set them by `--hparams=name=value,...` or by a YAML file. The table of models at the end of each
`config.py` replaces some of these defaults for each model. `run.json` in a run's directory has all values.
"""
WRITTEN_BY = "Written by `python -m tests.reference`; a test fails where it is out of date.\n"


def main() -> None:
    for name, text in pages().items():
        (ROOT / name).write_text(text)


def pages() -> dict[str, str]:
    """Returns {path of a page: its text}."""
    sections = []
    for program in APP_PROGRAMS:
        rows: dict[str, list[str]] = {}  # {row of a table: apps that have this flag}
        for app in APPS:
            for row in flag_rows(program.format(app=app)):
                rows.setdefault(row, []).append(app)
        lines = [row if len(apps) == 2 else f"{row} ({apps[0]} only)" for row, apps in rows.items()]
        sections.append((program.format(app="").strip("/"), lines))
    sections += [(program, flag_rows(program)) for program in OTHER_PROGRAMS]
    titles = ("flag", "default", "meaning")
    flags_page = (
        "# Flags\n\n" + WRITTEN_BY + "".join(_section(title, titles, rows) for title, rows in sections)
    )
    config_page = f"# Hyper-parameters\n\n{PREAMBLE}{WRITTEN_BY}"
    for app, name in zip(APPS, ("EfficientDetConfig", "YOLOv4Config"), strict=True):
        titles = ("name", "type", "default", "meaning")
        config_page += _section(f"{app}/config.py", titles, config_rows(app, name))
    return {"docs/flags.md": flags_page, "docs/config.md": config_page}


def flag_rows(program: str) -> list[str]:
    """Returns the rows of a program's table, from its `define_flags`."""
    module = importlib.import_module(program.removesuffix(".py").replace("/", "."))
    fv = flags.FlagValues()
    module.define_flags(fv)
    rows = []
    for flag in (fv[name] for name in fv):
        default = "" if flag.default in (None, "") else f"`{flag.default_as_str.strip(chr(39))}`"
        values, colon, text = flag.help.rpartition(">: ")  # absl puts <a|b>: before an enum's help
        choices = f" One of {values[1:].replace('|', ', ')}." if colon else ""
        rows.append(f"`--{flag.name}` | {default} | {_cell(text + choices)}")
    return rows


def config_rows(app: str, name: str) -> list[str]:
    """Returns the rows of a config class, from its source: fields, and the comments beside and above them."""
    source = (ROOT / app / "config.py").read_text()
    lines = source.splitlines()
    config = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == name)
    rows, last = [], config.lineno
    for field in config.body:
        if isinstance(field, ast.AnnAssign):
            end = field.end_lineno or 0
            above = [line.strip() for line in lines[last : field.lineno - 1]]
            groups = re.findall(r"(?m)^# --- (.*?) ---", "\n".join(above))
            rows += [f"**{group}** | | | " for group in groups]
            notes = [line for line in above if line.startswith("#") and not line.startswith("# ---")]
            notes += re.findall(r"#.*", lines[end - 1])
            kind = re.sub(r"^(?:Loader|Detection)\[(.*)\]$", r"\1", ast.unparse(field.annotation))
            default = f"`{ast.unparse(field.value)}`" if field.value else "the model's"
            cells = [f"`{ast.unparse(field.target)}`", f"`{kind}`", default]
            rows.append(" | ".join(map(_cell, [*cells, " ".join(note.lstrip("# ") for note in notes)])))
            last = end
    return rows


def _section(title: str, titles: tuple[str, ...], rows: list[str]) -> str:
    lines = [" | ".join(titles), " | ".join("---" for _ in titles), *rows]
    return f"\n## {title}\n\n" + "".join(f"| {line} |\n" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|")


if __name__ == "__main__":
    main()
