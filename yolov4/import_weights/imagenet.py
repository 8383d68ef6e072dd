"""Downloads weights of YOLOv4's backbone that were trained on ImageNet, for --init_from=imagenet.

The file has the first 105 layers of Darknet's classifier cfg/csdarknet53-omega.cfg. Its address is from
AlexeyAB/darknet issue 5804. yolov4.conv.137 and yolov4-tiny.conv.29 were trained on COCO, not on ImageNet.
"""

from common.errors import UserError
from common.weights import weight_files

DARKNET_FILES = "https://github.com/AlexeyAB/darknet/releases/download/darknet_yolo_v4_pre/"
CSP_DARKNET53 = "csdarknet53-omega.conv.105"  # no checksum is published; the reader checks the size


def download(backbone: str) -> str:
    """Returns the path of a backbone's public file, after a download to ~/.keras/models if necessary.

    Raises:
        UserError: the backbone has no published file, or the download fails.
    """
    if backbone != "csp_darknet53":
        raise UserError(f"--init_from=imagenet has no weights of {backbone}: give a file or a run directory")
    return weight_files.download(DARKNET_FILES + CSP_DARKNET53, CSP_DARKNET53)
