"""What both of DALI's APIs read."""

import numpy as np
from nvidia import dali


def by_pipeline(call, batches, batch_size=3):
    """[(image, label)] of each batch."""
    pipeline = build(call, batch_size)
    return [run(pipeline) for _ in range(batches)]


def build(call, batch_size=3, checkpoint=None):
    pipeline = dali.Pipeline(
        batch_size, 1, None, prefetch_queue_depth=1, enable_checkpointing=True, checkpoint=checkpoint
    )
    with pipeline:
        pipeline.set_outputs(*call.in_graph())
    pipeline.build()
    return pipeline


def run(pipeline):
    images, labels = pipeline.run()
    assert all(np.array(label).dtype == np.int32 and np.array(label).shape == () for label in labels)
    return [(np.array(image), int(np.array(label))) for image, label in zip(images, labels, strict=True)]


def by_dynamic(call, batch_size=3, **options):
    """The same of one epoch, or more."""
    return [
        [
            (np.asarray(image), int(np.asarray(label)))
            for image, label in zip(images.tensors, labels.tensors, strict=True)
        ]
        for images, labels in call.in_dynamic(batch_size, **options)
    ]


def flat(batches):
    return [sample for batch in batches for sample in batch]


def key(sample):
    """A sample as something that can be compared and counted."""
    image, label = sample
    return image.shape, image.tobytes(), label


def names_of(source):
    return [image.name for image in source.images]
