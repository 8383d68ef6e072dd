"""Why did the loader stop? DALI and tf.data say that an image cannot be decoded, but seldom which one."""

import dataclasses
from collections.abc import Iterator

from common.datacheck import images
from common.datacheck.images import ImageFacts
from common.errors import UserError
from common.issues import DataError, Findings
from common.sources import CocoSource, ImageListSource, Source, TFRecordSource

_PLAIN_TENSORFLOW = ("JPEG", "PNG")


def explain(error: Exception, source: Source | None, pipeline_type: str) -> UserError:
    """Finds the images that cannot be read, by decoding all of them again.

    Args:
        error: what the loader raised.
        source: what it was reading.
        pipeline_type: who was reading.

    Returns:
        The error to raise: it names the images with their files, records and ids; or, where all can be
        decoded, says what the loader said.
    """
    findings = _damage(source)
    if findings.stopping:
        return DataError(findings)
    other = next(_other_formats(source), None)
    if pipeline_type == "tensorflow" and other:
        return UserError(f"--pipeline_type=tensorflow reads JPEG and PNG, and {other}: use dali_cpu")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = next((line for line in lines if "Error" in line or "rror when" in line), lines[0] if lines else "")
    return UserError(f"the loader ({pipeline_type}) stopped: {said}")


def _damage(source: Source | None) -> Findings:
    """What stops and was not known when the source was opened."""
    if isinstance(source, ImageListSource):
        findings = Findings("images")
        for file, fact in _facts_of_list(source, decode=True):
            if fact.fault:
                findings.add(fact.fault, f"{file!r}: {fact.detail}" if fact.detail else repr(file))
        return findings
    if not isinstance(source, CocoSource | TFRecordSource):
        return Findings("")
    policy = dataclasses.replace(source.policy, on_bad_image="stop", decode=True)
    try:
        _ = dataclasses.replace(source, policy=policy).annotations
    except DataError as error:
        (found,) = error.findings
    else:
        return Findings("")
    fresh = Findings(found.origin)
    for finding in found.stopping:
        skipped = set(source.annotations.findings[finding.kind].offenders)
        offenders = [offender for offender in finding.offenders if offender not in skipped]
        fresh.add_many(finding.kind, len(offenders), offenders)
    return fresh


def _other_formats(source: Source | None) -> Iterator[str]:
    """Images that plain TensorFlow does not decode: `a.webp is WEBP`."""
    if isinstance(source, TFRecordSource):
        named = (("one of the records", name) for name in source.records.formats)
    elif isinstance(source, CocoSource):
        names = source.annotations.file_names
        facts = images.inspect_files(source.images_dir, names)
        named = zip(names, (fact.image_format for fact in facts), strict=True)
    elif isinstance(source, ImageListSource):
        named = ((file, fact.image_format) for file, fact in _facts_of_list(source, decode=False))
    else:
        named = ()
    return (f"{name} is {of}" for name, of in named if of not in _PLAIN_TENSORFLOW)


def _facts_of_list(source: ImageListSource, *, decode: bool) -> Iterator[tuple[str, ImageFacts]]:
    limit = source.policy.max_megapixels
    return zip(
        source.files,
        images.inspect_list(source.files, decode=decode, max_megapixels=limit),
        strict=True,
    )
