"""Triton's interpreter without what takes most of its time in these tests; what kernels compute stays the same. Of a
process that runs tests, once and for all of it. Each piece is for releases that have what it replaces: elsewhere the
interpreter is as it was, and slower."""

from __future__ import annotations

import builtins
import functools
from typing import Any

PLAIN = {"handle", "shape", "numel", "type", "dtype"}  # what a tensor of Triton's language has


@functools.cache
def quick_interpreter() -> None:
    """Let the interpreter, once a process, leave out the following. It looks through all of triton.language at each
    call of a device function, to patch what it has patched at the launch; computes every int32 sum and product again in
    int64 for an assertion that is off; and for each value makes anew its shape as a tuple of constants, that tuple's
    type, and a table of NumPy's types."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, no_scope = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", lambda: None)

    def patch_once(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        if not languages or any(tl.core.is_builtin(language.load) for language in languages):
            return patch(fn)
        return no_scope()

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _remember_numpy_types(interpreter)
    if hasattr(tl.core, "_type_for_tuple_values"):  # 3.4.0 has none, 3.6.0 has
        _type_tuples_late(tl.core)
        _remember_shapes(tl.core)


def _remember_numpy_types(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, {}

    def found(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = found


def _type_tuples_late(core: Any) -> None:
    """A tuple's type is made when somebody asks for it."""
    begin = core.tuple.__init__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            begin(self, args, type)

    def get(self: Any) -> Any:
        own = self.__dict__
        if "_type" not in own:
            own["_type"] = core._type_for_tuple_values(self.values)
        return own["_type"]

    def put(self: Any, kind: Any) -> None:
        self.__dict__["_type"] = kind

    core.tuple.__init__ = init
    core.tuple.type = property(get, put)


def _remember_shapes(core: Any) -> None:
    """Blocks of one shape share it, and tensors of one shape its constants: nothing in a kernel changes them."""
    begin_block, begin_tensor = core.block_type.__init__, core.tensor.__init__
    blocks: dict[Any, Any] = {}
    tensors: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if type(shape) is core.tuple else shape
        key = builtins.tuple([one.value if type(one) is core.constexpr else one for one in values])
        if key in blocks:
            self.element_ty = element_ty
            self.shape, self.numel, text = blocks[key]
            self.name = f"<{text}, {element_ty}>"
            return
        begin_block(self, element_ty, shape)
        if all(type(size) is int for size in key):
            blocks[key] = self.shape, self.numel, str(self.shape)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        key = builtins.tuple(kind.shape) if kind.is_block() else ()
        if key in tensors:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = tensors[key]
            return
        begin_tensor(self, handle, kind)
        if set(vars(self)) == PLAIN:
            tensors[key] = self.shape, self.numel

    core.block_type.__init__, core.tensor.__init__ = block, tensor
