"""How many images a second a detector gets through, loading and post-processing included."""

import time


class Throughput:
    """Takes the times of batches: give it to evaluation.predict as `on_batch`.

    Args:
        num_images: of all batches together.
        batch_size: images of a batch.
        prefetch: batches that are loaded while the first one compiles; like that one they are left out.
    """

    def __init__(self, num_images: int, batch_size: int, prefetch: int) -> None:
        self._num_images = num_images
        self._skipped = 1 + prefetch
        self._counted = max(num_images - self._skipped * batch_size, 0)
        self._start = self._warm = self._last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._last = time.monotonic()
        if done == self._skipped:
            self._warm = self._last

    def describe(self) -> str:
        """One line: images per second; or, of few batches, their seconds."""
        if not self._counted:
            return f"{self._num_images} images in {self._last - self._start:.1f} s, compiling included"
        rate = self._counted / max(self._last - self._warm, 1e-9)
        return (
            f"{rate:.1f} images/s from file to boxes: loading, network and post-processing; without the "
            f"first {self._skipped} batches, which compile or were loaded meanwhile"
        )
