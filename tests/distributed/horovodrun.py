"""Starts horovodrun, but skips its check whether Gloo was built in. This check takes three seconds."""

from horovod.runner import launch

launch.gloo_built = lambda **_: True

if __name__ == "__main__":
    launch.run_commandline()
