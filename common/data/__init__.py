"""From a path to a batch: annotations, readers, checks, loaders."""
