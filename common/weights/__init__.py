"""Weights files, their metadata, and starting from published weights."""
