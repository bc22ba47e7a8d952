"""An interpreter of the pseudocode of AMD's ISA documents, for what it says of one lane.

The documents' text is AMD's and is not in this repository. Whoever has it can compare it with the definitions of the
tests (isa_against_text.py). Arithmetic on floats is that of isa_numbers.py.

Values are bits with a width and a kind: u, i integers, b bits, f floats. Operations on integers have the width of the
wider operand. The text's own conventions:

    D0.u32, tmp[15 : 0].f16, in[i]    views, fields and elements, also on the left
    64'F(x), 16'0U                    casts and literals with a width
    { a, b }                          a above b
    v_max_f32(a, b)                   another instruction
    +0.0, −0.0                        zeros of one sign; 0.0 equals both"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import isa_numbers as number
from isa_numbers import F64, NAN
from isa_values import (
    BY_WIDTH,
    CONSTANTS,
    FORMATS,
    FUNCTIONS,
    NotUnderstood,
    Value,
    boolean,
    literal,
    of,
    resized,
    view,
)

_TOKEN = re.compile(
    r"\s*(?:(\d+'0x[0-9a-fA-F]+|\d+'\d+U?|\d+'[A-Z])|(0x[0-9a-fA-F]+(?:ULL|LL|U)?|\d+\.\d+F?|\d+(?:ULL|LL|U)?)"
    r"|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|<>|&&|\|\||\+=|[-+*/%&|^~!<>?:=(){}\[\].,;]))"
)


class Run:
    """One lane's execution of one text."""

    def __init__(self, text: str, values: Mapping[str, Any], texts: Mapping[str, str]) -> None:
        self.texts, self.values = texts, dict(values)
        plain = re.sub(r"//[^\n]*|^(TRAPSTS|ROUND_MODE|prev_mode)\b.*$", "", text, flags=re.MULTILINE)
        self.tokens: list[str] = []
        at = 0
        while plain[at:].strip():
            found = _TOKEN.match(plain, at)
            if not found:
                raise NotUnderstood(plain[at : at + 40])
            self.tokens.append(next(group for group in found.groups() if group))
            at = found.end()
        self.at = 0

    # ---- tokens

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else ""

    def take(self, wanted: str = "") -> str:
        found = self.peek()
        if wanted and found != wanted:
            raise NotUnderstood(f"{found!r} where {wanted!r} was expected, after {self.tokens[self.at - 6 : self.at]}")
        self.at += 1
        return found

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.at += 1
            return True
        return False

    # ---- statements

    def run(self) -> dict[str, Any]:
        self.block(True, ())
        return self.values

    def block(self, active: bool, ends: tuple[str, ...]) -> Value | None:
        """Statements up to one of `ends`; a value where one of them returns it."""
        result = None
        while self.at < len(self.tokens) and self.peek() not in ends:
            found = self.statement(active and result is None)
            result = found if result is None else result
        return result

    def statement(self, active: bool) -> Value | None:
        if self.accept(";"):
            return None
        if self.accept("if"):
            return self.branches(active)
        if self.accept("for"):
            return self.loop(active)
        if self.accept("return"):
            value = self.expression(active)
            return value if active else None
        if self.accept("declare"):
            name = self.take()
            self.take(":")
            self.take()
            if self.accept("["):
                count = int(self.take())
                self.take("]")
                self.values[name] = self.values.get(name, [None] * count)
            return None
        self.assignment(active)
        return None

    def branches(self, active: bool) -> Value | None:
        done, result = not active, None
        while True:
            chosen = self.expression(not done).true and not done
            self.take("then")
            found = self.block(chosen, ("elsif", "else", "endif"))
            result = found if chosen else result
            done = done or chosen
            word = self.take()
            if word == "elsif":
                continue
            if word == "else":
                found = self.block(not done, ("endif",))
                result = found if not done else result
                self.take("endif")
            return result

    def loop(self, active: bool) -> Value | None:
        name = self.take()
        self.take("in")
        first = self.expression(active).integer
        self.take(":")
        last = self.expression(active).integer
        self.take("do")
        start = self.at
        for n in range(first, last + 1) if active else (0,):
            self.at = start
            self.values[name] = of(n, 32, "i")
            self.block(active, ("endfor",))
        self.take("endfor")
        return None

    def assignment(self, active: bool) -> None:
        if self.accept("{"):
            targets = [self.target(active)]
            while self.accept(","):
                targets.append(self.target(active))
            self.take("}")
            self.take("=")
            value = self.expression(active)
            if active:
                at = 0
                for name, path, width in reversed(targets):
                    self.store(name, path, Value(number.field(value.bits, at, width), width, "u"))
                    at += width
            return
        start = self.at
        name, path, _ = self.target(active)
        if self.accept("+="):
            end, self.at = self.at, start
            old = self.postfix(active)
            self.at = end
            right = self.expression(active)
            if active:
                self.store(name, path, self.arithmetic("+", old, right))
            return
        self.take("=")
        if self.peek() == "lambda":
            self.values[name] = self.function()
            return
        value = self.expression(active)
        if active:
            self.store(name, path, value)

    def target(self, active: bool) -> tuple[str, list[Any], int]:
        """Name, then the steps of what is assigned: ".f32", (high, low), index; and the width of the last."""
        name, path, width = self.take(), [], 32
        while self.peek() in (".", "["):
            if self.accept("."):
                path.append(self.take())
                width = 16 if path[-1] == "bf16" else int(path[-1][1:])
                continue
            self.take("[")
            first = self.expression(active).integer
            if self.accept(":"):
                path.append((first, self.expression(active).integer))
            else:
                path.append(first)
            self.take("]")
        return name, path, width

    def store(self, name: str, path: list[Any], value: Value) -> None:
        old = self.values.get(name)
        if isinstance(old, list):
            old[path[0]] = value
            return
        places = [step for step in path if not isinstance(step, str)]
        kinds = [step for step in path if isinstance(step, str)]
        if kinds and kinds[-1] == path[-1]:
            value = self.as_kind(value, kinds[-1])
        if not places:
            # NAN marks any quiet NaN; it can fill a whole value only.
            self.values[name] = value
            return
        high, low = places[0] if isinstance(places[0], tuple) else (places[0], places[0])
        if high < low:
            raise NotUnderstood("a reversed field on the left")
        before = old.bits if isinstance(old, Value) and old.bits != NAN else 0
        width = max(high + 1, old.width if isinstance(old, Value) else 0)
        mask = ((1 << (high - low + 1)) - 1) << low
        bits = value.format.infinity | value.format.quiet if value.bits == NAN else value.bits
        self.values[name] = Value(before & ~mask | bits << low & mask, width, "b")

    def as_kind(self, value: Value, suffix: str) -> Value:
        """What a typed left side does to a value: floats keep their bits, integers are cut."""
        if value.kind in "fh" or suffix[0] in "fb":
            return value if suffix in ("f16", "f32", "f64", "bf16") else view(value, suffix)
        return of(value.integer, int(suffix[1:]), suffix[0])

    def function(self) -> Callable[[list[Value]], Value]:
        """lambda(a, b) (expression or statements)."""
        self.take("lambda")
        self.take("(")
        names = [self.take()]
        while self.accept(","):
            names.append(self.take())
        self.take(")")
        self.take("(")
        start, depth = self.at, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(self.take(), 0)
        end = self.at - 1
        body = self.tokens[start:end]

        def call(arguments: list[Value]) -> Value:
            inner = Run("", self.values | dict(zip(names, arguments, strict=True)), self.texts)
            inner.tokens = body
            if body[0] in ("declare", "if", "for"):
                found = inner.block(True, ())
                assert found is not None
                return found
            return inner.expression(True)

        return call

    # ---- expressions, from the loosest operator down

    def expression(self, active: bool) -> Value:
        condition = self.binary(0, active)
        if not self.accept("?"):
            return condition
        yes = self.expression(active)
        self.take(":")
        no = self.expression(active)
        return yes if condition.true else no

    def binary(self, level: int, active: bool) -> Value:
        if level == len(_LEVELS):
            return self.unary(active)
        left = self.binary(level + 1, active)
        while self.peek() in _LEVELS[level]:
            operator = self.take()
            right = self.binary(level + 1, active)
            left = self.operate(operator, left, right) if active else left
        return left

    def operate(self, operator: str, a: Value, b: Value) -> Value:
        if operator in ("&&", "||"):
            return boolean((a.true and b.true) if operator == "&&" else (a.true or b.true))
        if operator in _COMPARES:
            return boolean(self.compare(operator, a, b))
        return self.arithmetic(operator, a, b)

    def compare(self, operator: str, a: Value, b: Value) -> bool:
        if isinstance(b.bits, int) and b.kind == "denormal":
            return number.is_denormal(BY_WIDTH[a.width], a.bits) if a.bits != NAN else False
        if a.kind in "fh" or b.kind in "fh":
            f = a.format
            order = number.order(f, a.bits, resized(b, f).bits if b.width != a.width else b.bits)
            if b.signed_zero and order == 0 and number.is_zero(f, a.bits):
                order = 0 if number.negative(f, a.bits) == number.negative(b.format, b.bits) else 1
        else:
            order = (a.integer > b.integer) - (a.integer < b.integer)
        if order is None:
            return operator == "!="
        return {"==": order == 0, "!=": order != 0, "<>": order != 0, "<": order < 0, "<=": order <= 0,
                ">": order > 0, ">=": order >= 0}[operator]  # fmt: skip

    def arithmetic(self, operator: str, a: Value, b: Value) -> Value:
        if operator == "**":
            return Value(b.integer, 0, "power")  # 2.0F ** n; only products of it are used
        if b.kind == "power" or a.kind == "power":
            value, power = (a, b) if b.kind == "power" else (b, a)
            return Value(number.scale(value.format, value.bits, power.bits), value.width, "f")
        if a.kind in "fh":
            function = {"+": number.add, "-": number.subtract, "*": number.multiply, "/": number.divide}[operator]
            f = a.format
            if b.width != a.width:
                raise NotUnderstood("floats of two widths")
            return Value(function(f, a.bits, b.bits), f.width, a.kind)
        width = max(a.width, b.width)
        kind = "i" if a.kind == "i" and b.kind == "i" else "u"
        x, y = a.integer, b.integer
        if operator in ("<<", ">>"):
            return of(x << y if operator == "<<" else x >> y, a.width, a.kind)
        result = {"+": x + y, "-": x - y, "*": x * y, "&": x & y, "|": x | y, "^": x ^ y,
                  "/": x // y if y else 0, "%": x % y if y else 0}[operator]  # fmt: skip
        return of(result, width, kind)

    def unary(self, active: bool) -> Value:
        operator = self.peek()
        if operator not in ("-", "+", "!", "~"):
            return self.postfix(active)
        self.take()
        value = self.unary(active)
        if operator == "!":
            return boolean(not value.true)
        if operator == "~":
            return of(~value.bits, value.width, value.kind)
        if value.kind in "fh":
            zero = number.is_zero(value.format, value.bits) if value.bits != NAN else False
            bits = value.bits ^ value.format.sign if operator == "-" and value.bits != NAN else value.bits
            return Value(bits, value.width, value.kind, zero)
        return of(-value.integer if operator == "-" else value.integer, value.width, value.kind)

    def postfix(self, active: bool) -> Value:
        value: Any = self.primary(active)
        while self.peek() in (".", "["):
            if self.accept("."):
                suffix = self.take()
                if value is not None and not isinstance(value, list):
                    value = value if value.kind == "denormal" else self.named_constant(value, suffix)
                continue
            self.take("[")
            first = self.expression(active).integer
            last = self.expression(active).integer if self.accept(":") else None
            self.take("]")
            if value is None:
                continue
            if isinstance(value, list):
                value = value[first] if active else None
            elif last is None:
                value = Value(value.bits >> first & 1, 1, "u")
            elif first < last:  # reversed
                count = last - first + 1
                value = Value(int(f"{number.field(value.bits, first, count):0{count}b}"[::-1], 2), count, "u")
            else:
                value = Value(number.field(value.bits, last, first - last + 1), first - last + 1, "b")
        if value is None:
            if active:
                raise NotUnderstood(f"no value before {self.tokens[self.at - 3 : self.at + 3]}")
            return Value(0, 32, "u")
        return value  # type: ignore[no-any-return]

    def named_constant(self, value: Value, suffix: str) -> Value:
        if value.kind == "infinity":
            f = FORMATS[suffix]
            return Value(f.infinity | (f.sign if value.bits else 0), f.width, "f")
        if value.kind == "nan":
            return Value(NAN, FORMATS[suffix].width, "f")
        return view(value, suffix)

    def primary(self, active: bool) -> Any:
        token = self.take()
        if token == "(":
            value = self.expression(active)
            self.take(")")
            return value
        if token == "{":
            parts = [self.expression(active)]
            while self.accept(","):
                parts.append(self.expression(active))
            self.take("}")
            bits, width = 0, 0
            for part in parts:
                bits, width = bits << part.width | part.bits, width + part.width
            return Value(bits, width, "b")
        if "'" in token:
            return self.sized(token, active)
        if token[0].isdigit():
            return literal(token)
        if self.peek() == "(":
            return self.call(token, active)
        if token == "INF":
            return Value(F64.infinity, 64, "f") if self.peek() != "." else Value(0, 0, "infinity")
        if token == "NAN":
            return Value(0, 0, "nan")
        if token == "DENORM":
            return Value(0, 0, "denormal")
        if token == "WAVE_MODE":
            self.take(".")
            return self.values.get(self.take())
        return CONSTANTS.get(token) or self.values.get(token)

    def sized(self, token: str, active: bool) -> Value:
        width, rest = int(token.split("'")[0]), token.split("'")[1]
        if rest[0].isdigit():
            return of(int(rest.rstrip("U"), 0), width, "u")
        self.take("(")
        value = self.expression(active)
        self.take(")")
        if rest == "F":
            if value.kind in "fh":
                return resized(value, BY_WIDTH[width])
            return Value(value.bits & ((1 << width) - 1), width, "f")  # a literal's bits: 32'F(0xffc00000)
        return of(value.integer, width, {"U": "u", "I": "i", "B": "b"}[rest])

    def call(self, name: str, active: bool) -> Value:
        self.take("(")
        arguments = [self.expression(active)]
        while self.accept(","):
            arguments.append(self.expression(active))
        self.take(")")
        if not active:
            return Value(0, 32, "u")
        if callable(self.values.get(name)):
            return self.values[name](arguments)  # type: ignore[no-any-return]
        if name in FUNCTIONS:
            return FUNCTIONS[name](*arguments)
        if name.upper() in self.texts:
            inner = {f"S{n}": argument for n, argument in enumerate(arguments)}
            inner |= {"IEEE": self.values["IEEE"]} if "IEEE" in self.values else {}
            return Run(self.texts[name.upper()], inner, self.texts).run()["D0"]  # type: ignore[no-any-return]
        raise NotUnderstood(f"{name}()")


_LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!=", "<>"), ("<", "<=", ">", ">="), ("<<", ">>"),
           ("+", "-"), ("*", "/", "%"), ("**",))  # fmt: skip
_COMPARES = ("==", "!=", "<>", "<", "<=", ">", ">=")
