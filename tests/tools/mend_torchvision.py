"""Makes torchvision importable beside a torch that it was not built for: run it with the Python that has both.

The package index's torchvision is built for a torch with CUDA. Beside one without, importing it fails for want of two
operators that it describes and nobody who serves text calls. vLLM's model of the policy's family imports it.
"""

import importlib.util
from pathlib import Path

MENDED = """import torch
for _name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main() -> None:
    """Declare the two operators before they are described, unless that is done or torchvision has them."""
    spec = importlib.util.find_spec("torchvision")
    assert spec is not None and spec.origin is not None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        path = Path(spec.origin).with_name("_meta_registrations.py")
        path.write_text(MENDED + path.read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
