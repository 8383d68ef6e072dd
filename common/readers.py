"""The reader factories under their public name: `from common.readers import coco_reader`."""

from common.data.readers import coco_reader, file_reader, tfrecord_reader, webdataset_reader

__all__ = ["coco_reader", "file_reader", "tfrecord_reader", "webdataset_reader"]
