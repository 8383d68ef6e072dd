"""Published weights in: Darknet's files and its ImageNet backbone."""
