"""Stands in for torchvision where SGLang is imported for its attention layers only. SGLang's configuration package
imports torchvision for models with images. Its wheels are built for one release of torch, and the tests need no image:
names can be imported from here, and nothing can be done with them."""

import importlib.machinery
import sys
import types

__version__ = "0.0.0"


class Unavailable:
    """What every name is here: it can be a base class or an annotation, and raises where it is called."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError("torchvision is a stub in this environment")


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unavailable


def _module(name: str) -> types.ModuleType:
    module = _Stub(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    return module


transforms = _module("torchvision.transforms")
transforms.functional = _module("torchvision.transforms.functional")
transforms.v2 = _module("torchvision.transforms.v2")
transforms.v2.functional = _module("torchvision.transforms.v2.functional")
io = _module("torchvision.io")
ops = _module("torchvision.ops")


class InterpolationMode:
    """transformers' image processors look these up while they are imported."""

    NEAREST = NEAREST_EXACT = BOX = BILINEAR = BICUBIC = HAMMING = LANCZOS = None


transforms.InterpolationMode = transforms.functional.InterpolationMode = InterpolationMode
transforms.v2.functional.InterpolationMode = InterpolationMode
