import numpy as np

from common.anchors import Anchors
from common.data.check.issues import Issues
from tests.common.made_annotations import random_annotations
from tools.report import anchor_report, statistics, tables

ANCHORS = Anchors(3, 7, 3, (1.0, 2.0, 0.5), 4.0, (128, 128))
NASTY = ("<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "a$^_{$b")
NASTY += ("日本語", "new\nline", "\x1b[31mred", "half a letter \udce9")


def report_of(truth, formats=None):
    return statistics.describe(truth, formats or {}), anchor_report.examine(truth, ANCHORS)


def sections_of(truth, issues=(), formats=None, shown=()):
    return tables.sections(*report_of(truth, formats), issues, shown)


def found(kind, count, offenders):
    issues = Issues("made.json")
    issues.add_many(kind, count, offenders)
    return issues


def few():
    return random_annotations(np.random.default_rng(0), 6, 8)
