"""Why did the loader stop? DALI and tf.data report that an image cannot be decoded, but seldom which one."""

import math
from collections.abc import Iterator

from common.datacheck import image_files, tfrecord
from common.datacheck.images import ImageFacts, ImagePolicy
from common.errors import UserError
from common.issues import DataError, Findings
from common.progress import log
from common.sources import CocoSource, ImageListSource, Source, TFRecordSource

_PLAIN_TENSORFLOW = ("JPEG", "PNG")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Finds the images that cannot be read, by decoding all of them again, after the error was logged.

    Args:
        error: what the loader raised.
        source: what it was reading.
        pipeline_type: which loader it was.

    Returns:
        The error to raise: it names the images with their files, records and ids; or, where all can be
        decoded, the loader's own error.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = next(
        (line for line in lines if "Error" in line or "rror when" in line), lines[0] if lines else ""
    )
    stopped = f"the loader ({pipeline_type}) stopped: {words}"
    if source is not None:
        log(f"{stopped}\nDecoding the images to find the damaged one; interrupt if that takes too long")
    findings = _damage(source)
    if findings.stopping:
        return DataError(findings)
    other = next(_other_formats(source), None)
    if pipeline_type == "tensorflow" and other:
        return UserError(f"--pipeline_type=tensorflow reads JPEG and PNG, and {other}: use dali_cpu")
    return UserError(stopped)


def _damage(source: Source | None) -> Findings:
    """What stops and was not known when the source was opened."""
    if isinstance(source, TFRecordSource):
        largest = float(source.annotations.image_sizes.prod(axis=1, dtype=float).max())
        policy = ImagePolicy(max_megapixels=largest / 1e6, decode=True)
        try:
            found = tfrecord.open_records(source.files, source.label_map, policy=policy).annotations.findings
        except DataError as error:
            (found,) = error.findings
        fresh = Findings(found.origin)
        for finding in found.stopping:
            if finding.kind == "image-too-large":
                continue  # skipped when the source was opened
            skipped = set(source.annotations.findings[finding.kind].offenders)
            offenders = [offender for offender in finding.offenders if offender not in skipped]
            fresh.add_many(finding.kind, len(offenders), offenders)
        return fresh
    findings = Findings("images" if isinstance(source, ImageListSource) else "")
    if isinstance(source, CocoSource):
        findings = Findings(source.annotations.origin)
    for name, fact in _facts(source, decode=True):
        fact.add_fault(name, findings)
    return findings


def _other_formats(source: Source | None) -> Iterator[str]:
    """Images that plain TensorFlow does not decode: `a.webp is WEBP`."""
    if isinstance(source, TFRecordSource):
        named = (("one of the records", name) for name in source.formats)
    else:
        named = ((name, fact.image_format) for name, fact in _facts(source, decode=False))
    return (f"{name} is {of}" for name, of in named if of not in _PLAIN_TENSORFLOW)


def _facts(source: Source | None, *, decode: bool) -> Iterator[tuple[str, ImageFacts]]:
    """The names of images in words, and what is found in their files."""
    if isinstance(source, CocoSource):
        annotations = source.annotations
        facts = image_files.inspect_files(
            source.images_dir, annotations.file_names, decode=decode, max_megapixels=math.inf
        )
        yield from zip(map(annotations.image_name, range(source.size)), facts, strict=True)
    elif isinstance(source, ImageListSource):
        facts = image_files.inspect_list(source.files, decode=decode, max_megapixels=math.inf)
        yield from zip(map(repr, source.files), facts, strict=True)
