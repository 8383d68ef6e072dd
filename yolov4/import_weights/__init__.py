"""Reads published weights: Darknet's files and its ImageNet backbone."""
