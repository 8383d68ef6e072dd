"""Starts one rank of a Horovod job under srun, without ssh and without MPI. docker/slurm_srun.sh calls it.

    srun --ntasks-per-node=8 python docker/slurm_rank.py efficientdet/train.py --flagfile=...

The rank's number comes from Slurm's variables. The first rank also runs Horovod's rendezvous server.

docker/slurm_srun.sh sets DETECTION_HOSTS (the hosts of the job, comma-separated, in Slurm's order) and
DETECTION_PORT. HOROVOD_GLOO_IFACE and NCCL_SOCKET_IFNAME choose another network interface.
"""

import os
import signal
import socket
import sys
import threading
import time

import psutil

START_SECONDS = 300  # the first start of an image on a node can take minutes


def interface_to(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # UDP: nothing is sent
        address = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next(name for name, owned in interfaces if address in (each.address for each in owned))


def serve(port: int, hosts: list[str], ranks_per_host: int, parent: int) -> None:
    """Runs Horovod's rendezvous server until the parent process has ended."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    # Ignore both signals: after a signal, the ranks still need this server to save a checkpoint.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    slots = parse_hosts(",".join(f"{host}:{ranks_per_host}" for host in hosts))
    server = RendezvousHTTPServer(("", port), RendezvousHandler, 0)
    server.init(get_host_assignments(slots, len(hosts) * ranks_per_host))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


def wait_for(host: str, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"error: the first rank does not answer at {host}:{port} ({error})")
        time.sleep(0.5)


def main() -> None:
    hosts, port = os.environ["DETECTION_HOSTS"].split(","), int(os.environ["DETECTION_PORT"])
    rank, size, local_rank, node = (
        int(os.environ[f"SLURM_{name}"]) for name in ("PROCID", "NTASKS", "LOCALID", "NODEID")
    )
    per_host = size // len(hosts)
    if rank == 0:
        parent = os.getpid()
        if os.fork() == 0:
            serve(port, hosts, per_host, parent)
    first = "127.0.0.1" if node == 0 else hosts[0]
    wait_for(first, port)
    interface = interface_to("127.0.0.1" if len(hosts) == 1 else hosts[0 if node else 1])
    os.environ.setdefault("HOROVOD_GLOO_IFACE", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    horovod = {
        "HOSTNAME": hosts[node],
        "RANK": rank,
        "SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": per_host,
        "CROSS_RANK": node,
        "CROSS_SIZE": len(hosts),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "GLOO_RENDEZVOUS_ADDR": socket.gethostbyname(first),
        "GLOO_RENDEZVOUS_PORT": port,
    }
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in horovod.items()})
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
