"""Writes small data sets in the exact form of annotation tools.

All have a.png and b.png of 40 x 20 pixels: a cat with left, top, right, bottom = 3, 4, 10, 12 in a.png, and a
dog with 0, 5, 20, 15 in b.png. The sources of the forms are named in each function.
"""

import io
import json
import tarfile
import zipfile

from tests.tools.conversion.labelled_images import black_image, write_file

OBJECTS = (("a.png", "cat", (3, 4, 10, 12)), ("b.png", "dog", (0, 5, 20, 15)))


def write_images(directory, folder=""):
    for name, _, _ in OBJECTS:
        write_file(directory, f"{folder}{name}", black_image())


# --- CVAT: cvat-ai/cvat cvat/apps/dataset_manager/formats/cvat.py and bindings.py (meta) ---

CVAT_META = """\
  <version>1.1</version>
  <meta>
    <task>
      <id>7</id>
      <name>pets</name>
      <size>2</size>
      <mode>annotation</mode>
      <overlap>0</overlap>
      <labels>
        <label>
          <name>dog</name>
          <color>#b83df5</color>
          <type>any</type>
          <attributes>
          </attributes>
        </label>
        <label>
          <name>cat</name>
          <color>#f078f0</color>
          <type>any</type>
          <attributes>
            <attribute>
              <name>age</name>
              <mutable>False</mutable>
              <input_type>number</input_type>
              <default_value>0</default_value>
              <values>0;20;1</values>
            </attribute>
          </attributes>
        </label>
      </labels>
    </task>
    <dumped>2024-05-02 10:12:45.120319+00:00</dumped>
  </meta>
"""
CVAT_BOX = (
    '    <box label="{}" source="manual" occluded="0" xtl="{:.2f}" ytl="{:.2f}" xbr="{:.2f}" ybr="{:.2f}"'
    ' z_order="0">\n    </box>\n'
)


def cvat_xml(shapes=None, size=(20, 40), attributes=""):
    """`shapes` replaces the text in the elements of the images. `attributes` is added to each of them."""
    height, width = size
    parts = ['<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n', CVAT_META]
    for number, (name, label, box) in enumerate(OBJECTS):
        parts.append(
            f'  <image id="{number}" name="{name}"{attributes} width="{width}" height="{height}">\n'
            + (CVAT_BOX.format(label, *box) if shapes is None else shapes[number])
            + "  </image>\n"
        )
    return "".join([*parts, "</annotations>\n"])


def write_cvat(directory):
    write_images(directory, "images/")
    write_file(directory, "annotations.xml", cvat_xml())
    return directory / "annotations.xml"


# --- labelme: wkentaro/labelme labelme/_label_file.py, LabelFile.save ---


def labelme_json(name, shapes, size=(20, 40)):
    """Each shape is (label, shape_type, points)."""
    document = {
        "version": "5.4.1",
        "flags": {},
        "shapes": [
            {
                "label": label,
                "points": points,
                "group_id": None,
                "description": "",
                "shape_type": kind,
                "flags": {},
                "mask": None,
            }
            for label, kind, points in shapes
        ],
        "imagePath": name,
        "imageData": None,
        "imageHeight": size[0],
        "imageWidth": size[1],
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


def write_labelme(directory):
    write_images(directory)
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        shape = (label, "rectangle", [[x2, y2], [x1, y1]])
        write_file(directory, name.replace("png", "json"), labelme_json(name, [shape]))
    return directory


# --- csv ---


def write_tensorflow_csv(directory):
    """datitran/raccoon_dataset xml_to_csv.py."""
    write_images(directory)
    lines = ["filename,width,height,class,xmin,ymin,xmax,ymax"]
    lines += [f"{name},40,20,{label},{','.join(map(str, box))}" for name, label, box in OBJECTS]
    write_file(directory, "train_labels.csv", "\n".join(lines) + "\n")
    return directory / "train_labels.csv"


OPENIMAGES_TITLES = (
    "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,"
    "IsOccluded,IsTruncated,IsGroupOf,IsDepiction,IsInside"
)


def write_openimages(directory, is_group=0):
    """storage.googleapis.com/openimages: oidv6-train-annotations-bbox.csv, class-descriptions-boxable.csv."""
    write_images(directory)
    lines = [OPENIMAGES_TITLES]
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        sides = f"{x1 / 40},{x2 / 40},{y1 / 20},{y2 / 20}"
        lines.append(f"{name.removesuffix('.png')},xclick,/m/{label},1,{sides},0,1,{is_group},0,0")
    write_file(directory, "train-annotations-bbox.csv", "\n".join(lines) + "\n")
    write_file(directory, "class-descriptions-boxable.csv", "/m/cat,cat\n/m/dog,dog\n/m/011k07,Tortoise\n")
    return directory / "train-annotations-bbox.csv"


def write_retinanet_csv(directory):
    """fizyr/keras-retinanet README, "CSV datasets": no names of columns."""
    write_images(directory)
    lines = [f"{name},{','.join(map(str, box))},{label}" for name, label, box in OBJECTS]
    write_file(directory, "annotations.csv", "\n".join(lines) + "\n")
    return directory / "annotations.csv"


# --- formats that convert.py does not read ---


def write_createml(directory):
    """HumanSignal/labelImg libs/create_ml_io.py, CreateMLWriter.write: x and y are the centre of a box."""
    images = []
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        box = {"x": (x1 + x2) / 2, "y": (y1 + y2) / 2, "width": x2 - x1, "height": y2 - y1}
        boxes = [{"label": label, "coordinates": box}]
        images.append({"image": name, "verified": False, "annotations": boxes})
    write_file(directory, "createml.json", json.dumps(images))
    return directory / "createml.json"


def write_labelbox(directory):
    """docs.labelbox.com/reference/export-image-annotations; lightly-ai/labelformat formats/labelbox.py."""
    lines = []
    for number, (name, label, (x1, y1, x2, y2)) in enumerate(OBJECTS):
        box = {"top": y1, "left": x1, "height": y2 - y1, "width": x2 - x1}
        kind = {"name": label, "value": label, "annotation_kind": "ImageBoundingBox"}
        objects = [{"feature_id": f"f{number}", "feature_schema_id": "s1"} | kind | {"bounding_box": box}]
        labels = [{"label_kind": "Default", "version": "1.0.0", "annotations": {"objects": objects}}]
        row = {"id": f"r{number}", "global_key": name, "row_data": f"https://storage.labelbox.com/{name}"}
        media = {"height": 20, "width": 40, "mime_type": "image/png"}
        projects = {"p1": {"name": "pets", "labels": labels}}
        lines.append(json.dumps({"data_row": row, "media_attributes": media, "projects": projects}))
    write_file(directory, "export.ndjson", "\n".join(lines) + "\n")
    return directory / "export.ndjson"


def write_supervisely(directory):
    """supervisely/supervisely supervisely/annotation/annotation.py and label.py, to_json."""
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        points = {"exterior": [[x1, y1], [x2 - 1, y2 - 1]], "interior": []}
        shape = {"points": points, "geometryType": "rectangle", "shape": "rectangle"}
        objects = [{"classTitle": label, "description": "", "tags": []} | shape]
        size = {"height": 20, "width": 40}
        document = {"description": "", "size": size, "tags": [], "objects": objects, "customBigData": {}}
        write_file(directory, f"ds0/ann/{name}.json", json.dumps(document))
    return directory / "ds0" / "ann" / "a.png.json"


def write_supervisely_meta(directory):
    """supervisely/supervisely supervisely/project/project_meta.py and annotation/obj_class.py, to_json."""
    classes = [{"title": label, "shape": "rectangle", "color": "#0F8A8A"} for _, label, _ in OBJECTS]
    write_file(directory, "meta.json", json.dumps({"classes": classes, "tags": [], "projectType": "images"}))
    return directory / "meta.json"


def write_via3_project(directory):
    """VIA 3's _via_data.js and _via_metadata.js: xy is [2, left, top, width, height]."""
    project = {
        "pid": "__VIA_PROJECT_ID__",
        "rev": "__VIA_PROJECT_REV_ID__",
        "rev_timestamp": "__VIA_PROJECT_REV_TIMESTAMP__",
        "pname": "pets",
        "creator": "VGG Image Annotator (http://www.robots.ox.ac.uk/~vgg/software/via)",
        "created": 1714644765120,
        "vid_list": ["1", "2"],
    }
    files, metadata = {}, {}
    for number, (name, label, (x1, y1, x2, y2)) in enumerate(OBJECTS, 1):
        files[number] = {"fid": number, "fname": name, "type": 2, "loc": 1, "src": ""}
        region = {"vid": str(number), "flg": 0, "z": [], "xy": [2, x1, y1, x2 - x1, y2 - y1]}
        metadata[f"{number}_aB3dE5gH"] = region | {"av": {"1": label}}
    views = {number: {"fid_list": [str(number)]} for number in files}
    document = {"project": project, "config": {"file": {}}, "attribute": {}, "file": files}
    write_file(directory, "via3.json", json.dumps(document | {"metadata": metadata, "view": views}))
    return directory / "via3.json"


def write_label_studio(directory):
    """HumanSignal/label-studio docs/source/guide/task_format.md."""
    tasks = []
    for number, (name, label, (x1, y1, x2, y2)) in enumerate(OBJECTS, 1):
        box = {"x": x1 / 0.4, "y": y1 / 0.2, "width": (x2 - x1) / 0.4, "height": (y2 - y1) / 0.2}
        result = {
            "original_width": 40,
            "original_height": 20,
            "image_rotation": 0,
            "value": box | {"rotation": 0, "rectanglelabels": [label]},
            "id": f"Dx_aB91IS{number}",
            "from_name": "label",
            "to_name": "image",
            "type": "rectanglelabels",
            "origin": "manual",
        }
        annotation = {"id": number, "completed_by": 1, "result": [result], "was_cancelled": False}
        data = {"image": f"/data/upload/1/8ae4d6c2-{name}"}
        tasks.append({"id": number, "annotations": [annotation], "data": data, "meta": {}, "project": 1})
    write_file(directory, "project-1-at-2024-05-02-10-12.json", json.dumps(tasks))
    return directory / "project-1-at-2024-05-02-10-12.json"


def write_label_studio_min(directory):
    """label_studio_converter/converter.py, convert_to_json_min."""
    box = {"x": 7.5, "y": 20, "width": 17.5, "height": 40, "rotation": 0, "rectanglelabels": ["cat"]}
    box |= {"original_width": 40, "original_height": 20}
    task = {"image": "/data/upload/1/8ae4d6c2-a.png", "id": 1, "label": [box], "annotator": 1}
    write_file(directory, "min.json", json.dumps([task]))
    return directory / "min.json"


def _via_metadata():
    files = {}
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        shape = {"name": "rect", "x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}
        region = {"shape_attributes": shape, "region_attributes": {"animal": label}}
        files[f"{name}129"] = {"filename": name, "size": 129, "regions": [region], "file_attributes": {}}
    return files


def write_via(directory):
    """VIA 2's via.js: pack_via_metadata."""
    write_file(directory, "via_region_data.json", json.dumps(_via_metadata(), separators=(",", ":")))
    return directory / "via_region_data.json"


def write_via_project(directory):
    """VIA 2's via.js: project_save_with_confirm."""
    settings = {"ui": {"annotation_editor_height": 25}, "core": {"buffer_size": 18}, "project": {"name": "p"}}
    project = {"_via_settings": settings, "_via_img_metadata": _via_metadata(), "_via_attributes": {}}
    write_file(directory, "via_project.json", json.dumps(project, separators=(",", ":")))
    return directory / "via_project.json"


def write_via_csv(directory):
    """VIA 2's via.js: pack_via_metadata("csv"). VIA 1.0 begins the line with #."""
    lines = [
        "filename,file_size,file_attributes,region_count,region_id,region_shape_attributes,region_attributes"
    ]
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        shape = f'""name"":""rect"",""x"":{x1},""y"":{y1},""width"":{x2 - x1},""height"":{y2 - y1}'
        lines.append(f'{name},129,"{{}}",1,0,"{{{shape}}}","{{""animal"":""{label}""}}"')
    write_file(directory, "via_region_data.csv", "\n".join(lines))
    return directory / "via_region_data.csv"


def write_coco_results(directory):
    """cocodataset.org, format-results, as pycocotools' loadRes reads it; and image_info.json of infer.py.

    The ids of images are 1 and 2, those of categories 5 and 7. The first image also has a dog of score 0.2.
    """
    write_images(directory)
    names = {"dog": 5, "cat": 7}
    images, detections = [], []
    for image_id, (name, label, (left, top, right, bottom)) in enumerate(OBJECTS, 1):
        images.append({"id": image_id, "file_name": name, "height": 20, "width": 40})
        detection = {"image_id": image_id, "category_id": names[label], "score": 0.91}
        detections.append(detection | {"bbox": [left, top, right - left, bottom - top]})
    detections.append({"image_id": 1, "category_id": 5, "bbox": [1, 1, 9.5, 9], "score": 0.2})
    categories = [{"id": category_id, "name": name} for name, category_id in names.items()]
    write_file(directory, "image_info.json", json.dumps({"images": images, "categories": categories}))
    write_file(directory, "detections.json", json.dumps(detections))
    return directory / "detections.json"


def write_webdataset(directory):
    """webdataset/webdataset: files of one sample have one name, and stand together."""
    path = directory / "shard-000000.tar"
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, label, box in OBJECTS:
            picture = io.BytesIO()
            black_image().save(picture, "PNG")
            content = {
                name: picture.getvalue(),
                name.replace("png", "json"): json.dumps([label, box]).encode(),
            }
            for member, data in content.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def write_zip(directory):
    """CVAT, Label Studio and Roboflow send their exports as a zip."""
    write_cvat(directory / "files")
    with zipfile.ZipFile(directory / "task_7.zip", "w") as archive:
        archive.write(directory / "files" / "annotations.xml", "annotations.xml")
    return directory / "task_7.zip"


def write_darknet_list(directory):
    """AlexeyAB/darknet README, "How to train (to detect your custom objects)"."""
    write_images(directory, "obj/")
    write_file(directory, "obj/a.txt", "0 0.1625 0.4 0.175 0.4\n")
    write_file(directory, "obj/b.txt", "1 0.25 0.5 0.5 0.5\n")
    write_file(directory, "obj.names", "cat\ndog\n")
    write_file(directory, "train.txt", f"{directory}/obj/a.png\n{directory}/obj/b.png\n")
    text = "classes = 2\ntrain  = data/train.txt\nvalid  = data/test.txt\nnames = data/obj.names\n"
    write_file(directory, "obj.data", text)
    return directory / "train.txt"


def write_cvat_yolo(directory):
    """CVAT's "YOLO 1.1", by datumaro plugins/data_formats/yolo/exporter.py with add_path_prefix."""
    write_images(directory, "obj_train_data/")
    write_file(directory, "obj_train_data/a.txt", "0 0.162500 0.400000 0.175000 0.400000\n")
    write_file(directory, "obj_train_data/b.txt", "1 0.250000 0.500000 0.500000 0.500000\n")
    write_file(directory, "obj.names", "cat\ndog\n")
    write_file(directory, "train.txt", "data/obj_train_data/a.png\ndata/obj_train_data/b.png\n")
    text = "classes = 2\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n"
    write_file(directory, "obj.data", text)
    return directory / "train.txt"


def write_voc(directory):
    write_images(directory)
    for name, label, (x1, y1, x2, y2) in OBJECTS:
        sides = f"<xmin>{x1 + 1}</xmin><ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
        text = f"<annotation>\n\t<folder>x</folder>\n\t<filename>{name}</filename>\n\t<object>\n"
        text += f"\t\t<name>{label}</name>\n\t\t<bndbox>{sides}</bndbox>\n\t</object>\n</annotation>\n"
        write_file(directory, name.replace("png", "xml"), text)
    return directory


def write_labelimg_xml(directory):
    """HumanSignal/labelImg libs/labelFile.py and libs/pascal_voc_io.py: 1 in place of 0."""
    write_images(directory)
    for name, label, box in OBJECTS:
        x1, y1, x2, y2 = (max(edge, 1) for edge in box)
        sides = f"<xmin>{x1}</xmin><ymin>{y1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax>"
        text = f"<annotation>\n\t<folder>x</folder>\n\t<filename>{name}</filename>\n"
        text += f"\t<path>/home/me/x/{name}</path>\n\t<object>\n\t\t<name>{label}</name>\n"
        text += f"\t\t<bndbox>{sides}</bndbox>\n\t</object>\n</annotation>\n"
        write_file(directory, name.replace("png", "xml"), text)
    return directory


def write_labelimg_txt(directory):
    """HumanSignal/labelImg libs/yolo_io.py, YOLOWriter.save."""
    write_images(directory)
    write_file(directory, "a.txt", "0 0.162500 0.400000 0.175000 0.400000\n")
    write_file(directory, "b.txt", "1 0.250000 0.500000 0.500000 0.500000\n")
    write_file(directory, "classes.txt", "cat\ndog\n")
    return directory


def write_yolo_yaml(directory):
    write_images(directory, "images/train/")
    write_file(directory, "labels/train/a.txt", "0 0.1625 0.4 0.175 0.4\n")
    write_file(directory, "labels/train/b.txt", "1 0.25 0.5 0.5 0.5\n")
    write_file(directory, "data.yaml", "path: .\ntrain: images/train\nnames:\n  0: cat\n  1: dog\n")
    return directory / "data.yaml"
