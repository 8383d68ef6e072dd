"""TF_CONFIG: which workers a cluster of tf.distribute has, and which of them this process is.

workers, rank = read(os.environ.get("TF_CONFIG"))
"""

import json

from common.errors import UserError

EXAMPLE = '{"cluster": {"worker": ["a:12345", "b:12345"]}, "task": {"type": "worker", "index": 0}}'


def read(text: str | None) -> tuple[list[str], int]:
    """Reads the value of TF_CONFIG.

    Args:
        text: its value; None where it is not set.

    Returns:
        The workers' addresses ("host:port"), a chief's first, and the index of this process among them.

    Raises:
        UserError: it is missing or wrong.
    """
    if not text:
        raise UserError(f"--strategy=multi_worker needs TF_CONFIG, on each worker its own: {EXAMPLE}")
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        jobs = {job: list(cluster[job]) for job in ("chief", "worker") if job in cluster}
        kind, index = task["type"], task["index"]
        own = jobs[kind][index] if type(index) is int and index >= 0 else None
        workers = [address for addresses in jobs.values() for address in addresses]
        ports = [int(address.rpartition(":")[2]) for address in workers]
        hosts = [address.rpartition(":")[0] for address in workers]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(
            f"TF_CONFIG={text} cannot be understood ({reason}): it looks like {EXAMPLE}"
        ) from error
    if own is None or not all(hosts) or not all(0 < port < 65536 for port in ports):
        raise UserError(f"TF_CONFIG={text} is not right: an index counts from 0, an address is host:port")
    if set(cluster) - set(jobs):
        raise UserError(f"TF_CONFIG has {sorted(cluster)} tasks: a chief and workers are all that train here")
    if len(set(workers)) < len(workers):
        raise UserError(f"TF_CONFIG={text} gives two workers the same address")
    return workers, index + (len(jobs.get("chief", [])) if kind == "worker" else 0)
