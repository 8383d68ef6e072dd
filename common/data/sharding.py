"""Which rank reads which images, and in which order."""

from typing import Any

from common.errors import UserError

SHUFFLE_BUFFER = 1024  # encoded images


def check_shards(num_images: int, num_shards: int) -> None:
    """Raises UserError if there are more ranks than images."""
    if num_images < num_shards:
        raise UserError(f"{num_images} images are too few for {num_shards} ranks: use at most {num_images}")


def shard_range(size: int, shard_id: int, num_shards: int) -> tuple[int, int]:
    """Returns the range [begin, end) of images in a shard, as in DALI's loader.h."""
    return size * shard_id // num_shards, size * (shard_id + 1) // num_shards


def order(training: bool, seed: int, *, in_container: bool = False) -> dict[str, Any]:
    """Returns the arguments for DALI's readers that set the order of the images.

    Args:
        training: if True, images are shuffled and repeat without end. If False, each rank reads its shard in
            order.
        in_container: True for containers such as TFRecords, which DALI shuffles by file and in a buffer.
    """
    if not training:
        return {"pad_last_batch": True, "stick_to_shard": True}
    shuffled = {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed}
    return shuffled | (buffer_order(seed) if in_container else {})


def buffer_order(seed: int) -> dict[str, Any]:
    """Returns the arguments that shuffle within a buffer."""
    return {"random_shuffle": True, "initial_fill": SHUFFLE_BUFFER, "seed": seed}
