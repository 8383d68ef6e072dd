"""Reports of small data sets."""

from common.anchors import Anchors
from common.data.check.issues import Issues
from tools.report import anchors, page, statistics

ANCHORS = Anchors(3, 7, 3, (1.0, 2.0, 0.5), 4.0, (128, 128))
HOSTILE_NAMES = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a$^_{$b")
HOSTILE_NAMES += ("日本語", "new\nline", "\x1b[31mred", "half a letter \udce9")


def report_of(truth, formats=None):
    return statistics.describe(truth, formats or {}), anchors.examine(truth, ANCHORS)


def sections_of(truth, issues=(), formats=None, pictures=()):
    data_statistics, anchor_report = report_of(truth, formats)
    return page.sections(data_statistics, issues, page.anchor_items(anchor_report), pictures)


def issues_of(kind, count, offenders):
    issues = Issues("made.json")
    issues.add_many(kind, count, offenders)
    return issues
