"""Which rank reads which images, in which order: one answer for all readers (readers.py describes it)."""

from common.args import MAX_SEED
from common.errors import UserError

SHUFFLE_BUFFER = 1024  # encoded images held by each rank while it trains from containers


def shard_range(size: int, shard_id: int, num_shards: int) -> tuple[int, int]:
    """The part [begin, end) of `size` images that DALI gives to a shard (start_index in its loader.h)."""
    return size * shard_id // num_shards, size * (shard_id + 1) // num_shards


def check_shards(num_images: int, shard_id: int, num_shards: int, seed: int) -> None:
    """UserError for more ranks than images or a seed that DALI cannot take; ValueError for no such shard."""
    if num_images < num_shards:
        raise UserError(
            f"{num_images} images cannot be shared by {num_shards} ranks: use at most {num_images} ranks"
        )
    if not 0 <= shard_id < num_shards:
        raise ValueError(f"shard_id={shard_id} is not in 0..{num_shards - 1}")
    if not 0 <= seed <= MAX_SEED:
        raise UserError(f"seed={seed} is not in 0..{MAX_SEED}")


def order(training: bool, seed: int) -> dict[str, bool | int]:
    """The arguments of DALI's readers that order images: shuffled without end, or each rank its part for
    ever the same."""
    if training:  # the pipeline's own seed has no say in this shuffling
        return {"shuffle_after_epoch": True, "shuffle_after_epoch_seed": seed}
    return {"pad_last_batch": True, "stick_to_shard": True}


def container_order(training: bool, seed: int) -> dict[str, bool | int]:
    """`order` for readers of containers, which DALI shuffles by file, and within a buffer."""
    return order(training, seed) | (_buffer(seed) if training else {})


def buffer_order(training: bool, seed: int) -> dict[str, bool | int]:
    """`order` for readers that shuffle within a buffer and no more: each epoch, a rank reads the part that
    was the next rank's in the epoch before."""
    return _buffer(seed) if training else order(training, seed)


def _buffer(seed: int) -> dict[str, bool | int]:
    return {"random_shuffle": True, "initial_fill": SHUFFLE_BUFFER, "seed": seed}
