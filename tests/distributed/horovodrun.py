"""horovodrun without its first three seconds, in which a process looks whether Gloo was built in."""

from horovod.runner import launch

launch.gloo_built = lambda **_: True

if __name__ == "__main__":
    launch.run_commandline()
