r"""The batches of tools/preprocess.py in PyTorch: by DALI's iterator, and by DLPack.

    pip install torch
    python examples/preprocess_pytorch.py

Draws a small set of two classes, hands it to a tiny network twice and compares every pixel. On a GPU make the
`Preprocessor` with device="gpu", device_id=0: the tensors are on that GPU then, and nothing else changes.
"""

import contextlib
import os
import pathlib
import sys
import tempfile

if not __package__:  # run as a script: import from the repo root, exactly as the tests do
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import PIL.Image

try:
    import torch
    from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
except ImportError:
    torch = None
# PyTorch's Triton and TensorFlow, which `common` imports, have an LLVM each. They get along where Triton is
# imported first; the other way round the process aborts at PyTorch's first optimizer: "Option ... registered
# more than once".
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

from common import errors
from common.errors import UserError
from tools import synthetic
from tools.preprocess import Preprocessor, open_image_source

NUM_IMAGES, BATCH_SIZE = 21, 8  # so that the last batch is a shorter one
MANY = 6  # objects
# PyTorch has its channels first. Pixels are normalised as torchvision's models expect them.
OPS = "resize:short=72 | crop:64x48 | crop_mirror_normalize:mean=imagenet,layout=chw"


def draw(directory: str) -> None:
    """Images in few/ and many/: the directory is the label, as for torchvision's ImageFolder."""
    for index in range(NUM_IMAGES):
        picture = synthetic.draw_picture(seed=0, index=index)
        label = "many" if len(picture.category_ids) >= MANY else "few"
        path = pathlib.Path(directory, label, f"{index:03d}.png")
        path.parent.mkdir(exist_ok=True)
        PIL.Image.fromarray(picture.image).save(path)


def main() -> None:
    """The example."""
    if torch is None:
        raise UserError("this example needs PyTorch, 2.0 or newer: pip install torch")
    with tempfile.TemporaryDirectory() as directory:
        draw(directory)
        train(directory)


def train(directory: str) -> None:
    """Two epochs on the images in `directory`; asserts that they are what NumPy gets."""
    source = open_image_source("files", directory)
    work = Preprocessor(source=source, ops=OPS, batch_size=BATCH_SIZE)
    expected = np.stack([sample.image for sample in work.samples()])

    # --- DALI's iterator. A pipeline has no end; the iterator asks its reader, by name, how long an epoch is.
    # PARTIAL: every image once, the last batch is as short as it comes. auto_reset: it can be run again.
    # With training=True the Preprocessor shuffles; here the order is the source's, to be compared.
    iterator = DALIGenericIterator(
        Preprocessor(source=source, ops=OPS, batch_size=BATCH_SIZE).pipeline,
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, kernel_size=3, stride=4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, len(source.label_names)),
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    for epoch in range(2):
        images, labels = [], []
        for (batch,) in iterator:  # one dict for each pipeline, that is for each GPU
            loss = torch.nn.functional.cross_entropy(network(batch["images"]), batch["labels"].long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            images.append(batch["images"])
            labels.append(batch["labels"])
        np.testing.assert_array_equal(torch.cat(images).numpy(), expected)
        np.testing.assert_array_equal(torch.cat(labels).numpy(), source.labels)
        sizes = [len(part) for part in images]
        print(f"epoch {epoch + 1}: batches of {sizes}, {tuple(images[0].shape[1:])}; loss {loss.item():.3f}")

    # --- DLPack, without the iterator: any tensor of DALI's Dynamic API, and no copy is made.
    batches = [batch for batch, _ in work.dynamic()]
    one = torch.from_dlpack(batches[0].tensors[0])
    whole = torch.cat([batch.torch() for batch in batches])  # the same for a batch of equally large images
    np.testing.assert_array_equal(one.numpy(), expected[0])
    np.testing.assert_array_equal(whole.numpy(), expected)
    print(f"DLPack: {one.dtype} {tuple(one.shape)}, all {len(whole)} images the same")


if __name__ == "__main__":
    errors.run(main)
