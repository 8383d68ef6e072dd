"""Trains a small detection network in PyTorch on batches of efficientdet_pipeline.py, made by DALI.

    python pytorch_loader.py                         # draws its images
    torchrun --nproc-per-node 2 pytorch_loader.py    # the same on two ranks

Copy this file and efficientdet_pipeline.py. They need DALI, NumPy, Pillow and PyTorch, but not TensorFlow:
`make torch` of this project installs them into .venv/torch. If you set `device_id` in `Config`, the batches
are on this GPU. Then move the network to the same GPU.

torchvision's detection models take `list(batch["images"].permute(0, 3, 1, 2)), detection_targets(batch)`.
Make such a model with image_mean=[0, 0, 0], image_std=[1, 1, 1]: the images are already normalised.
"""

import dataclasses
import itertools
import json
import os
import pathlib
import tempfile

import numpy as np

try:
    import torch
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
    from torch.nn import functional
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: pip install torch, or make torch in the repository") from None

from efficientdet_pipeline import Config, draw_synthetic, make_pipeline

SIZE, EPOCHS, NUM_CLASSES, ANCHORS_PER_CELL = 128, 12, 2, 9
LEVELS = (3, 4, 5)  # cells of 8, 16 and 32 pixels
OUTPUTS = ["images", "num_positives", "boxes", "classes"]
OUTPUTS += [f"{kind}_targets_{level}" for level in LEVELS for kind in ("class", "box")]


def make_loader(config: Config, rank: int = 0, num_ranks: int = 1) -> DALIGenericIterator:
    """Returns an iterator over one rank's shard of each epoch. A batch is a list of one dict of tensors.

    With last_batch_policy FILL, all ranks have the same number of batches. For evaluation, use PARTIAL and a
    reader that does not shuffle. Set the reader's pad_last_batch and stick_to_shard to True.
    """
    pipeline = make_pipeline(config, rank, num_ranks)
    pipeline.build()
    options = {"last_batch_policy": LastBatchPolicy.FILL, "auto_reset": True}
    return DALIGenericIterator(pipeline, OUTPUTS, reader_name="reader", **options)


def detection_targets(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the objects of each image in torchvision's format, without padding.

    Returns:
        boxes: float32 (N, 4), left, top, right, bottom in pixels. N can be 0.
        labels: int64 (N,), 1-based.
    """
    height, width = batch["images"].shape[1:3]
    boxes_px = batch["boxes"] * batch["boxes"].new_tensor([width, height, width, height])
    return [
        {"boxes": boxes[classes >= 0], "labels": classes[classes >= 0].long() + 1}
        for boxes, classes in zip(boxes_px, batch["classes"], strict=True)
    ]


class Detector(torch.nn.Module):
    """Returns class logits (B, h, w, K * C) and box deltas (B, h, w, K * 4) for each level of h x w cells."""

    def __init__(self) -> None:
        super().__init__()
        pairs = itertools.pairwise([3, 16, 32, 64, 64, 64])  # channels
        self.stages = torch.nn.ModuleList(torch.nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in pairs)
        self.classes = torch.nn.Conv2d(64, ANCHORS_PER_CELL * NUM_CLASSES, 3, padding=1)
        self.boxes = torch.nn.Conv2d(64, ANCHORS_PER_CELL * 4, 3, padding=1)
        torch.nn.init.constant_(self.classes.bias, -4.6)  # low scores at first: most anchors are background

    def forward(self, images: torch.Tensor) -> list[tuple]:
        features, outputs = images.permute(0, 3, 1, 2), []  # PyTorch expects channels first
        for level, stage in enumerate(self.stages, 1):
            features = stage(features).relu()
            if level in LEVELS:
                logits, deltas = self.classes(features), self.boxes(features)
                outputs.append((logits.permute(0, 2, 3, 1), deltas.permute(0, 2, 3, 1)))
        return outputs


def detection_loss(outputs: list, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the focal loss (arXiv 1708.02002) plus the L1 loss, both divided by (matched anchors + 1)."""
    losses = []
    for level, (logits, deltas) in zip(LEVELS, outputs, strict=True):
        classes, box_targets = batch[f"class_targets_{level}"], batch[f"box_targets_{level}"]
        truth = functional.one_hot(classes.long() + 1, NUM_CLASSES + 1)[..., 1:].float()  # background: zeros
        logits = logits.reshape(truth.shape)  # (B, h, w, K, C)
        weight = (truth - logits.sigmoid()) ** 2 * (0.25 * truth + 0.75 * (1 - truth))
        entropy = functional.binary_cross_entropy_with_logits(logits, truth, reduction="none")
        matched = (classes >= 0).repeat_interleave(4, dim=-1)  # (B, h, w, K * 4)
        losses += [(weight * entropy).sum(), (deltas - box_targets)[matched].abs().sum()]
    return sum(losses) / (batch["num_positives"].sum() + 1)


def check_epochs(config: Config) -> None:
    """Asserts that two ranks together read every image once per epoch."""
    document = json.loads(pathlib.Path(config.annotations).read_bytes())
    scales = {image["id"]: SIZE / max(image["width"], image["height"]) for image in document["images"]}
    expected = {image_id: [] for image_id in scales}
    for row in document["annotations"]:
        left, top, width, height = np.multiply(row["bbox"], scales[row["image_id"]])
        expected[row["image_id"]].append([left, top, left + width, top + height, row["category_id"]])
    plain = dataclasses.replace(config, crop="none", flip_prob=0.0)
    loaders = [make_loader(plain, rank, num_ranks=2) for rank in range(2)]
    for _ in range(2):  # epochs
        targets = [target for loader in loaders for (batch,) in loader for target in detection_targets(batch)]
        objects = [torch.column_stack([target["boxes"], target["labels"]]).tolist() for target in targets]
        for image, truth in zip(sorted(objects), sorted(expected.values()), strict=True):
            np.testing.assert_allclose(image, truth, atol=1)  # because sides of images are rounded


def main() -> None:
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as directory:
        draw_synthetic(directory)  # writes images and instances.json
        options = {"batch_size": 4, "image_size": (SIZE, SIZE), "levels": LEVELS}
        config = Config(f"{directory}/instances.json", directory, **options)
        check_epochs(config)
        images = make_pipeline(config).run()[0].as_tensor()
        assert torch.from_dlpack(images).data_ptr() == images.data_ptr()  # DLPack makes no copy

        torch.manual_seed(0)
        model = Detector()
        if num_ranks > 1:
            torch.distributed.init_process_group("gloo")  # nccl for GPUs
            model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        loader, means = make_loader(config, rank, num_ranks), []
        for epoch in range(EPOCHS):
            losses = []
            for (batch,) in loader:
                loss = detection_loss(model(batch["images"]), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            means.append(sum(losses) / len(losses))
            print(f"rank {rank}, epoch {epoch + 1}: {len(losses)} batches, loss {means[-1]:.2f}")
    if num_ranks > 1:
        torch.distributed.destroy_process_group()
    assert means[-1] < 0.9 * means[0]


if __name__ == "__main__":
    main()
