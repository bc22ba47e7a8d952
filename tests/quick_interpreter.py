"""Triton's interpreter without what takes most of its time in these tests; what kernels compute stays the same. Of a
process that runs tests, once and for all of it. Each piece is for releases that have what it replaces: elsewhere the
interpreter is as it was, and slower."""

import builtins
import functools
from typing import Any

PLAIN = {"handle", "shape", "numel", "type", "dtype"}  # what a tensor of Triton's language has
CONSTANTS = 10_000  # of operations with a Python number, before they are forgotten


@functools.cache
def quick_interpreter() -> None:
    """Let the interpreter, once a process, leave out the following. It looks through all of triton.language at each
    call of a device function, to patch what it has patched at the launch; computes every int32 sum and product again in
    int64 for an assertion that is off; and for each value makes anew its shape as a tuple of constants, that tuple's
    type, and a table of NumPy's types. It decides for each operation anew how the operands' types become one, and
    copies an operand to the result's shape, which NumPy's own broadcasting does without."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch, no_scope = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", lambda: None)

    @functools.cache
    def languages(fn: Any) -> list[Any]:
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_once(fn: Any) -> Any:
        found = languages(fn)
        return patch(fn) if not found or any(tl.core.is_builtin(one.load) for one in found) else no_scope()

    interpreter._patch_lang = patch_once
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _remember_numpy_types(interpreter)
    if hasattr(tl.core, "_type_for_tuple_values"):  # 3.4.0 has none, 3.6.0 has
        _type_tuples_late(tl.core)
        _share_types(tl.core)
    if hasattr(interpreter, "_LangPatchScope") and hasattr(interpreter, "TritonSemantic"):
        _call_builtins_directly(tl.core, interpreter)
        _remember_promotions(tl.core, interpreter)


def _remember_numpy_types(interpreter: Any) -> None:
    find, known = interpreter._get_np_dtype, {}

    def found(kind: Any) -> Any:
        name = kind.element_ty.name if kind.is_block() else kind.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = found


def _type_tuples_late(core: Any) -> None:
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


def _share_types(core: Any) -> None:
    """Make one type of each element and shape, and one shape and size for its tensors: nothing in a kernel changes
    them. A type's name says all of it."""
    begin_block, begin_tensor = core.block_type.__init__, core.tensor.__init__
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__
    blocks: dict[Any, Any] = {}
    tensors: dict[str, Any] = {}
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, bool, str, type(None)}

    def new(cls: Any, element_ty: Any = None, shape: Any = (), *more: Any) -> Any:
        values = shape.values if type(shape) is core.tuple else shape
        sizes = builtins.tuple([one.value if type(one) is core.constexpr else one for one in values])
        if cls is not core.block_type or not isinstance(element_ty, core.dtype) or {*map(type, sizes)} != {int}:
            return object.__new__(cls)
        return blocks.setdefault((element_ty.name, sizes), object.__new__(cls))

    def block(self: Any, *given: Any) -> None:
        if "name" not in self.__dict__:
            begin_block(self, *given)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if kind.name in tensors:
            self.handle, self.type = handle, kind
            self.shape, self.numel, self.dtype = tensors[kind.name]
            return
        begin_tensor(self, handle, kind)
        if set(vars(self)) == PLAIN:
            tensors[kind.name] = self.shape, self.numel, self.dtype

    core.block_type.__new__, core.block_type.__init__, core.tensor.__init__ = new, block, tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    core._unwrap_if_constexpr = lambda value: (
        value.value if type(value) is core.constexpr else value if type(value) in plain else unwrap(value)
    )


def _call_builtins_directly(core: Any, interpreter: Any) -> None:
    """Call a builtin with its semantic, without a copy of the arguments and a check that it has one."""
    checked = core.builtin(lambda: None).__code__
    patch = interpreter._patch_attr

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is not checked:
            patch(obj, name, member, builder, scope)
            return
        semantic, function = interpreter.TritonSemantic(builder), member.__wrapped__

        def call(*given: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*given, **named)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _remember_promotions(core: Any, interpreter: Any) -> None:
    """Remember by the operands' types which type and shape they get. An operand that only lacks the shape keeps its
    smaller array, which NumPy broadcasts: what follows is elementwise, and computes with both operands."""
    language, tensor = interpreter.TritonSemantic, core.tensor
    promote, convert, cast = language.binary_op_type_checking_impl, language.to_tensor, language.cast
    known: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    limits: dict[str, float] = {}

    def promoted(self: Any, lhs: Any, rhs: Any, *flags: bool) -> Any:
        if type(lhs) is not tensor:
            return promote(self, lhs, rhs, *flags)
        if type(rhs) is tensor:
            key = lhs.type.name, rhs.type.name, flags
            if key not in known:
                pair = promote(self, lhs, rhs, *flags)
                known[key] = [None if a.type == b.type else a.type for a, b in ((pair[0], lhs), (pair[1], rhs))]
                return pair
            left, right = known[key]
            return (shaped(self, lhs, left) if left else lhs), (shaped(self, rhs, right) if right else rhs)
        key = lhs.type.name, type(rhs), rhs, flags
        if key in constants:
            return lhs, constants[key]
        left, right = promote(self, lhs, rhs, *flags)
        if left is lhs and type(rhs) in (int, float):
            if len(constants) >= CONSTANTS:
                constants.clear()
            constants[key] = tensor(self.scalar_constant(rhs, right.dtype).handle, right.type)
        return left, right

    def shaped(self: Any, value: Any, kind: Any) -> Any:
        value = self.cast(value, kind.scalar)
        handle = value.handle
        if not value.type.is_block() and handle.data.dtype != interpreter._get_np_dtype(handle.dtype):
            return self.broadcast_impl_shape(value, kind.shape)  # a truth value of Python, say, becomes an int1
        return value if value.type.name == kind.name else tensor(handle, kind)

    def small_enough(array: Any, kind: Any) -> bool:
        if kind.name not in limits:
            limits[kind.name] = float("inf") if kind.is_ptr() else max(kind.primitive_bitwidth, 8) / 8
        return bool(array.itemsize <= limits[kind.name])

    language.binary_op_type_checking_impl = promoted
    language.to_tensor = lambda self, value, *more: value if type(value) is tensor else convert(self, value, *more)
    language.cast = lambda self, value, kind, *more: (
        value if value.dtype is kind.scalar else cast(self, value, kind, *more)
    )
    interpreter._validate_np_data_size = small_enough
    interpreter.InterpreterBuilder.create_expand_dims = lambda self, arg, axis: interpreter.TensorHandle(
        arg.data.reshape((*arg.data.shape[:axis], 1, *arg.data.shape[axis:])), arg.dtype.scalar
    )
