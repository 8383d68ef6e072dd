"""Ranks: processes and devices that train together, with Horovod or tf.distribute."""
