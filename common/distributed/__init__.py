"""Ranks: processes and devices that train together, by Horovod or tf.distribute."""
