"""Darknet's rules (AlexeyAB/darknet) in plain loops and float64.

The crop and the mosaic follow src/data.c, everything else src/yolo_layer.c.
"""

import itertools
import math

import numpy as np


def darknet_axis(side, other_side, out, other_out, first_draw, last_draw, keep_aspect):
    """Returns start and length of Darknet's crop, then of its place in the output, along one axis."""
    before, after = side * first_draw, side * last_draw
    if keep_aspect:
        missing = other_side * out / other_out - side
        if missing > 0:
            before, after = before - missing / 2, after - missing / 2
    before, after = math.floor(before + 0.5), math.floor(after + 0.5)
    length = max(side - before - after, 1)
    first, last = max(before, 0), min(before + length, side)
    scale = out / length
    place_first = min(math.floor((first - before) * scale + 0.5), out - 1)
    place_last = max(math.floor((last - before) * scale + 0.5), place_first + 1)
    return first, last - first, place_first, place_last - place_first


def area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def clip_visible(boxes, low, high, min_visible):
    """Clips boxes; a box of which less than `min_visible` is left becomes 0, which Darknet does not do."""
    clipped = np.clip(boxes, low, high)
    return clipped * (area(clipped) >= min_visible * area(boxes))[:, np.newaxis]


def darknet_mosaic(canvases, sources, cut_y, cut_x, min_visible=0.0):
    """Like Darknet's load_data_detection, but clips boxes; returns (image, boxes, labels)."""
    height, width = canvases[0][0].shape[:2]
    out = np.zeros_like(canvases[0][0])
    all_boxes, all_labels = [], []
    for tile, source in enumerate(sources):
        image, boxes, labels, (top, left, place_height, place_width), _ = canvases[source]
        left_shift, top_shift = min(cut_x, left), min(cut_y, top)
        right_shift = min(width - cut_x, width - left - place_width)
        bottom_shift = min(height - cut_y, height - top - place_height)
        # position in the canvas = position in the mosaic + (dx, dy)
        dx = width - cut_x - right_shift if tile in (0, 2) else left_shift - cut_x
        dy = height - cut_y - bottom_shift if tile in (0, 1) else top_shift - cut_y
        rows = range(cut_y) if tile in (0, 1) else range(cut_y, height)
        columns = np.arange(cut_x) if tile in (0, 2) else np.arange(cut_x, width)
        for y in rows:
            out[y, columns] = image[y + dy, columns + dx]
        low = np.array([columns[0], rows[0], columns[0], rows[0]])
        high = np.array([columns[-1], rows[-1], columns[-1], rows[-1]]) + 1
        all_boxes.append(clip_visible(boxes - [dx, dy, dx, dy], low, high, min_visible))
        all_labels.append(labels)
    return out, np.concatenate(all_boxes), np.concatenate(all_labels)


def is_valid(box, class_number, num_classes):
    x0, y0, x1, y1 = (float(side) for side in box)
    if not np.isfinite([x0, y0, x1, y1]).all() or x1 <= x0 or y1 <= y0:
        return False
    x, y = (x0 + x1) / 2, (y0 + y1) / 2
    return 0 <= x <= 1 and 0 <= y <= 1 and 0 <= class_number < num_classes


def shape_iou(width, height, anchor, image_size):
    anchor_width, anchor_height = anchor[0] / image_size[1], anchor[1] / image_size[0]
    common = min(width, anchor_width) * min(height, anchor_height)
    return common / (width * height + anchor_width * anchor_height - common)


def assign(boxes, classes, config, head, grid_size, num_classes):
    """Returns {(row, column, k): indices of the boxes that train this prediction}.

    Boxes with their centre in the cell come first, then those of the nearest column, then of the nearest row.
    """
    rows, columns = grid_size
    stride = config.strides[head]
    image_size = rows * stride, columns * stride
    trained = {}
    places = range(3 if config.neighbour_cells else 1)
    for place, (number, box) in itertools.product(places, enumerate(boxes)):
        if not is_valid(box, classes[number], num_classes):
            continue
        x0, y0, x1, y1 = (float(side) for side in box)
        x, y = (x0 + x1) / 2 * columns, (y0 + y1) / 2 * rows
        column, row = min(int(x), columns - 1), min(int(y), rows - 1)
        if place == 1:
            column += -1 if x - column < 0.5 else 1
        elif place == 2:
            row += -1 if y - row < 0.5 else 1
        if not (0 <= row < rows and 0 <= column < columns):
            continue
        ious = [shape_iou(x1 - x0, y1 - y0, anchor, image_size) for anchor in config.anchor_sizes]
        best = ious.index(max(ious))
        for k, n in enumerate(config.masks[head]):
            if n == best or (config.iou_thresh < 1 and ious[n] > config.iou_thresh):
                trained.setdefault((row, column, k), []).append(number)
    return trained


def sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def decode(raw, config, head, row, column, k, grid_size):
    """Returns a box, ltrb normalised, from raw x, y, w, h."""
    stride, scale = config.strides[head], config.scale_xy[head]
    width, height = config.anchor_sizes[config.masks[head][k]]
    x = (column + scale * sigmoid(raw[0]) - (scale - 1) / 2) / grid_size[1]
    y = (row + scale * sigmoid(raw[1]) - (scale - 1) / 2) / grid_size[0]
    half_width = width * np.exp(raw[2]) / (grid_size[1] * stride) / 2
    half_height = height * np.exp(raw[3]) / (grid_size[0] * stride) / 2
    return np.array([x - half_width, y - half_height, x + half_width, y + half_height])


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    area_a, area_b = (a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1])
    return width * height / (area_a + area_b - width * height)


def ciou_terms(a, b):
    """Returns the parts of CIoU (arXiv 1911.08287): IoU, distance term, aspect term v, weight alpha of v."""
    overlap = iou(a, b)
    hull = (max(a[2], b[2]) - min(a[0], b[0])) ** 2 + (max(a[3], b[3]) - min(a[1], b[1])) ** 2
    distance = ((a[0] + a[2] - b[0] - b[2]) ** 2 + (a[1] + a[3] - b[1] - b[3]) ** 2) / 4
    angles = [np.arctan((box[2] - box[0]) / (box[3] - box[1])) for box in (a, b)]
    v = 4 / np.pi**2 * (angles[1] - angles[0]) ** 2
    return overlap, distance / hull, v, v / max(1 - overlap + v, 1e-12)


def best_ious(raw, boxes, classes, config, head):
    """Returns best IoUs (h, w, K); 0 if no class score exceeds 0.25."""
    rows, columns, anchors, outputs = raw.shape
    best = np.zeros((rows, columns, anchors))
    for row, column, k in np.ndindex(rows, columns, anchors):
        if not (sigmoid(raw[row, column, k, 5:]) > 0.25).any():
            continue
        prediction = decode(raw[row, column, k, :4], config, head, row, column, k, (rows, columns))
        for box, class_number in zip(boxes, classes, strict=True):
            if is_valid(box, class_number, outputs - 5):
                best[row, column, k] = max(best[row, column, k], iou(prediction, box))
    return best


def losses(heads, boxes, classes, config, constants=None):
    """Returns the box, objectness and class losses, and the values through which no gradient flows.

    `constants` are such values from an earlier call. They replace the values of this call.
    """
    constants = dict(constants or {})
    sums = np.zeros(3)
    for b in range(len(boxes)):
        for head, raws in enumerate(heads):
            raw = np.asarray(raws[b], np.float64)
            grid_size, num_classes = raw.shape[:2], raw.shape[-1] - 5
            if (b, head) not in constants:
                best = best_ious(raw, boxes[b], classes[b], config, head)
                constants[b, head] = best > config.ignore_thresh
            weight = np.where(constants[b, head], 0.0, 1.0)
            target = np.zeros(raw.shape[:3])
            trained = assign(boxes[b], classes[b], config, head, grid_size, num_classes)
            for cell, numbers in trained.items():
                weight[cell] = 1
                y = np.zeros(num_classes)
                y[[classes[b][n] for n in numbers]] = 1
                shared = y.sum() if config.iou_thresh < 1 else 1
                prediction = decode(raw[cell][:4], config, head, *cell, grid_size=grid_size)
                first_box = np.asarray(boxes[b][numbers[0]], np.float64)
                quality = constants.setdefault((b, head, cell), iou(prediction, first_box))
                target[cell] = 1 - config.objectness_iou * (1 - quality)
                for n in numbers:
                    box = np.asarray(boxes[b][n], np.float64)
                    overlap, distance, v, alpha = ciou_terms(prediction, box)
                    alpha = constants.setdefault((b, head, cell, n), alpha)
                    size = 2 - (box[2] - box[0]) * (box[3] - box[1]) if config.size_weighting else 1
                    sums[0] += size * (1 - (overlap - distance - alpha * v)) / shared
                y = y * (1 - config.label_smoothing) + config.label_smoothing / 2
                sums[2] += cross_entropy(raw[cell][5:], y).sum()
            sums[1] += (weight * cross_entropy(raw[..., 4], target)).sum()
    normalizers = [config.iou_normalizer, config.obj_normalizer, config.cls_normalizer]
    return sums * normalizers / len(boxes), constants


def cross_entropy(logits, targets):
    return np.logaddexp(0, logits) - logits * targets


def box_delta(raw, box, config, head, cell, grid_size):
    """Returns Darknet's deltas (4,), before it limits them (dx_box_iou, delta_yolo_box).

    Two errors of Darknet are corrected: a wrong sign in the term of the enclosing box, and the intersection
    of boxes that do not overlap.
    """
    prediction = decode(raw, config, head, *cell, grid_size=grid_size)
    delta = np.zeros(4)
    shared = [min(prediction[2 + i], box[2 + i]) - max(prediction[i], box[i]) for i in (0, 1)]
    sides = prediction[2:] - prediction[:2]
    intersection = shared[0] * shared[1] if min(shared) > 0 else 0.0
    union = sides.prod() + (box[2] - box[0]) * (box[3] - box[1]) - intersection
    hull = [max(prediction[2 + i], box[2 + i]) - min(prediction[i], box[i]) for i in (0, 1)]
    diagonal = hull[0] ** 2 + hull[1] ** 2
    apart = (box[:2] + box[2:] - prediction[:2] - prediction[2:]) / 2
    distance = (apart**2).sum()
    for i in (0, 1):
        if min(shared) > 0:
            by_edge = []
            for sign, inside in ((-1, prediction[i] > box[i]), (1, prediction[2 + i] < box[2 + i])):
                d_intersection = sign * shared[1 - i] * inside
                d_union = sign * sides[1 - i] - d_intersection
                by_edge.append((union * d_intersection - intersection * d_union) / union**2)
            delta[i] += by_edge[0] + by_edge[1]
            delta[2 + i] += by_edge[1] - by_edge[0]  # Darknet does not halve this
        low, high = prediction[i] < box[i], prediction[2 + i] > box[2 + i]
        d_diagonal = 2 * hull[i] * (float(high) - float(low))
        delta[i] += (2 * apart[i] * diagonal + d_diagonal * distance) / diagonal**2
        delta[2 + i] += hull[i] * (float(high) + float(low)) * distance / diagonal**2
    *_, alpha = ciou_terms(prediction, box)
    angle = np.arctan((box[2] - box[0]) / (box[3] - box[1])) - np.arctan(sides[0] / sides[1])
    delta[2:] += alpha * 8 / np.pi**2 * angle * np.array([sides[1], -sides[0]])
    delta[2:] *= np.exp(raw[2:4])
    return config.iou_normalizer * delta
