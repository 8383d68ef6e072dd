"""Checks a data set, or training and evaluation data together, and reports their contents."""

import collections
import pathlib

from common.anchors import MAX_INSTANCES, Anchors
from common.args import ImagePolicy
from common.data.check.images import inspect_files
from common.data.check.issues import DataError
from common.data.open import DataFlags, open_pair
from common.data.sources import CocoSource, Source
from tools.report import anchor_report, page, statistics, tables


def check(
    data: DataFlags,
    evaluation: DataFlags,
    anchors: Anchors,
    policy: ImagePolicy,
    *,
    label_map: str | None = None,
    report: str | None = None,
    max_instances: int = MAX_INSTANCES,
) -> str:
    """Checks data, prints a summary, and returns it. Also writes an HTML page if `report` is given.

    Args:
        data: paths of the data set.
        evaluation: paths of evaluation data to check together with `data`; they may be None.
        label_map: path of the file with the class names of TFRecords.
        report: path of the HTML page. Evaluation data get a second page, with `_eval` in its name.
        max_instances: largest number of boxes kept per image.

    Raises:
        DataError: the data cannot be used for training. The HTML page lists all errors.
        UserError: flags cannot be used.
    """
    if report:
        page.check_suffix(report)
    try:
        sources = open_pair(data, evaluation, label_map=label_map, policy=policy, names=("", "eval"))
    except DataError as error:
        if report:
            faults = [tables.Section(of.origin, tables.issue_items(of)) for of in error.issues]
            page.write(report, faults)
        raise
    parts = []
    for number, source in enumerate(filter(None, sources)):
        found = source.annotations
        numbers = statistics.describe(found, _formats(source, policy))
        matched = anchor_report.examine(found, anchors, max_instances=max_instances)
        shown = []
        if report:
            from tools.report import figures, pictures

            drawn = [figures.draw(numbers, matched), pictures.sheet(found, source.encoded)]
            shown = [image for image in drawn if image is not None]
        content = tables.sections(numbers, matched, found.issues, shown)
        parts.append(page.format_text(content))
        if report:
            path = pathlib.Path(report)
            path = path.with_stem(f"{path.stem}_eval") if number else path
            page.write(path, content)
            parts.append(f"report: {path}")
    text = "\n\n".join(parts)
    print(text)
    return text


def _formats(source: Source, policy: ImagePolicy) -> dict[str, int]:
    if isinstance(source, CocoSource):
        facts = inspect_files(source.images_dir, source.annotations.file_names, policy)
        return collections.Counter(fact.image_format for fact in facts)
    return source.formats  # type: ignore[attr-defined]  # a TFRecordSource
