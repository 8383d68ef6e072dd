"""Published weights in: Darknet's files."""
