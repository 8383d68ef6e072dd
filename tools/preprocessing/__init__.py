"""What stands behind preprocess.py: images in, a chain of operators, and what becomes of the results."""
