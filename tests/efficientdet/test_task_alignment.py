"""Task-aligned assignment and its loss, box by box and anchor by anchor in plain NumPy (arXiv 2108.07755)."""

import numpy as np

from common import boxes as box_ops
from efficientdet import task_alignment


def test_assignment_is_the_papers():
    """Of two images, one without boxes. Two boxes are nearly the same, and one is smaller than a pixel."""
    rng = np.random.default_rng(2)
    left_top, sides = rng.random((2, 2, 60, 2))
    predicted = np.concatenate([left_top, left_top + 0.6 * sides], axis=-1).astype(np.float32)
    scores, centers = rng.random((2, 60, 3), np.float32), rng.random((60, 2), np.float32)
    boxes, classes = np.full((2, 6, 4), -1, np.float32), np.full((2, 6), -1, np.int32)
    boxes[0, :3] = [0.1, 0.1, 0.7, 0.8], [0.1, 0.12, 0.72, 0.82], [*centers[7], *centers[7] + 0.001]
    classes[0, :3] = 2, 0, 2
    found = task_alignment.assign(predicted, scores, centers, boxes, classes, (64, 64))

    wanted, quality = {}, np.zeros((2, 60, 3))  # anchor -> (IoU, box)
    iou = np.array([box_ops.iou(predicted[0], box) for box in boxes[0, :3]])
    aligned = scores[0][:, classes[0, :3]].T ** 0.5 * iou**6.0
    for b, box in enumerate(boxes[0, :3]):
        distance, reach = np.abs(centers - (box[:2] + box[2:]) / 2), (box[2:] - box[:2]) / 2
        aligned[b, (distance >= np.maximum(reach, 4 / 64)).any(axis=1)] = 0
        for anchor in [a for a in np.argsort(-aligned[b])[:10] if aligned[b, a] > 0]:
            wanted[anchor] = max(wanted.get(anchor, (0.0, 0)), (iou[b, anchor], b))
    for anchor, (_, b) in wanted.items():
        mine = [a for a in wanted if wanted[a][1] == b]
        best = iou[b, mine].max()
        quality[0, anchor, classes[0, b]] = aligned[b, anchor] / aligned[b, mine].max() * best
        np.testing.assert_allclose(found.boxes[0, anchor], boxes[0, b], atol=1e-7)
    assert len({b for _, b in wanted.values()}) >= 2
    np.testing.assert_allclose(found.quality, quality, atol=1e-6)
