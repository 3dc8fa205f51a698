# SPDX-License-Identifier: Apache-2.0
"""Changes protobuf messages at random: values and structure by their descriptors, and bytes by the wire format.

The messages of a call become bytes, because some mutants are messages that no protobuf library writes.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

MAX_MESSAGE_BYTES = 8 << 20
MAX_DEPTH = 6
# Mutants with many or long values are slow, so they are a small share.
LARGE_SHARE = 0.02
# Stands for a string until the message is serialized: protobuf writes no invalid UTF-8.
MARKER = "invalid-utf8"
INVALID_UTF8 = b"\xc3\x28\xc0\xaf\xed\xa0\x80\xf5\x80\x80\x80\xff"

POWERS = (7, 8, 16, 31, 32, 53, 62, 63)
INTEGERS = [0, 1, -1, 2, 3, 10, 64, 65, 100, 1024, 65537]
INTEGERS += [sign * (2**power - less) for power in POWERS for sign in (1, -1) for less in (0, 1)]
INTEGERS = [number for number in INTEGERS if -(2**63) <= number < 2**63]
DOUBLES = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-320, 1e308, -1e308, 2.0**63, 0.288675]
DOUBLES += [float("nan"), float("inf"), -float("inf")]
STRINGS = ["", " ", ".", "..", "../../etc/passwd", "/", "a/b", "a\\b", "-", "_a", "a" * 127]
STRINGS += [
    "a" * 128,
    "a" * 129,
    "a" * 1024,
    "a" * 1025,
    "nul\0byte",
    "a\x1b[31m\x9b\r\n",
    "\u202e",
]
STRINGS += [
    "\u00e9",
    "\U0001f600",
    "\ufffd",
    "*",
    "**",
    "*a*a*a*a*a*b",
    "[",
    "[a-",
    "[!]",
    "\\",
    "?" * 300,
]
STRINGS += [
    "0",
    "-1",
    "1",
    "1ba",
    "0ba",
    "-1ba",
    "1e400ba",
    "nan",
    "nanba",
    "infep",
    "1.5dur",
    "1h30m",
]
STRINGS += [
    "9223372036854775808ba",
    "0x10ba",
    "1ba ",
    "true",
    "half_life",
    "copy",
    "sentinel",
    "%n%s",
    "{}",
]
STRINGS += [MARKER, "__metadata__", "config.json", "a.safetensors", "debug", "error"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    messages: list[bytes]
    # What differs from the recorded request.
    changes: tuple[str, ...]


def is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)


def find_places(message: Any, path: str = "", depth: int = 0) -> Iterator[tuple[Any, Any, str]]:
    """Yields each field of a message and of the messages in it, also unset ones: (message, field, path)."""
    if depth > MAX_DEPTH:
        return
    for field in message.DESCRIPTOR.fields:
        name = f"{path}.{field.name}" if path else field.name
        yield message, field, name
        if field.message_type is None or is_map(field):
            continue
        value = getattr(message, field.name)
        for part in value if is_repeated(field) else [value]:
            yield from find_places(part, name, depth + 1)


class Mutator:
    """Makes mutants of recorded calls; the same `seed` makes the same ones."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def mutate(self, messages: Sequence[Any]) -> Mutant:
        """Changes 1 to 3 things of a call. `messages` stay as they are."""
        copies = [type(message).FromString(message.SerializeToString()) for message in messages]
        changes = []
        for _ in range(self._random.choice((1, 1, 1, 2, 3))):
            if copies and self._random.random() < 0.8:
                changes.append(self._change_field(self._random.choice(copies)))
        encoded = [self._encode(message) for message in copies]
        if not changes or self._random.random() < 0.1:
            changes.append(self._change_bytes(encoded))
        if len(messages) > 1 and self._random.random() < 0.15:
            changes.append(self._change_order(encoded))
        return Mutant(encoded, tuple(changes))

    # --- Fields ---

    def _change_field(self, message: Any) -> str:
        # Recursive types have more places the deeper they are, so the depth is chosen first.
        places = list(find_places(message))
        if not places:
            return "no field"
        depth = self._random.choice(sorted({path.count(".") for _, _, path in places}))
        owner, field, path = self._random.choice(
            [place for place in places if place[2].count(".") == depth]
        )
        what = f"{message.DESCRIPTOR.name}.{path}"
        if is_map(field):
            return f"{what}: {self._change_map(owner, field)}"
        if is_repeated(field):
            return f"{what}: {self._change_list(owner, field)}"
        if self._random.random() < 0.15:
            owner.ClearField(field.name)
            return f"{what}: cleared"
        if field.message_type is not None:
            getattr(owner, field.name).Clear()
            getattr(owner, field.name).SetInParent()
            return f"{what}: empty"
        value = self._scalar(field, getattr(owner, field.name))
        setattr(owner, field.name, value)
        return f"{what} = {value!r:.60}"

    def _change_map(self, owner: Any, field: FieldDescriptor) -> str:
        entries = getattr(owner, field.name)
        choice = self._random.randrange(5)
        if choice == 0:
            entries.clear()
            return "cleared"
        if choice == 1:
            for number in range(self._count()):
                entries[f"key{number}"] = "1ba"
            return f"{len(entries)} entries"
        key = self._random.choice([*entries, *STRINGS] if choice < 4 else STRINGS)
        entries[key] = self._random.choice(STRINGS)
        return f"[{key!r:.30}] = {entries[key]!r:.30}"

    def _change_list(self, owner: Any, field: FieldDescriptor) -> str:
        values = getattr(owner, field.name)
        choice = self._random.randrange(6)
        if choice == 0:
            owner.ClearField(field.name)
            return "cleared"
        if choice == 1 and len(values) > 0:
            del values[self._random.randrange(len(values))]
            return "one removed"
        if choice == 2:
            kept = list(values)
            self._random.shuffle(kept)
            owner.ClearField(field.name)
            values.extend(kept)
            return "shuffled"
        if choice == 3:
            first = list(values)[:1] or [self._element(field)]
            values.extend(first * self._count())
            return f"{len(values)} elements"
        if choice == 4 and field.message_type is None and len(values) > 0:
            values[self._random.randrange(len(values))] = self._scalar(field, values[0])
            return f"an element of {len(values)} changed"
        values.append(self._element(field))
        return f"{len(values)} elements, the last {str(values[-1])!r:.40}"

    def _element(self, field: FieldDescriptor) -> Any:
        if field.message_type is None:
            return self._scalar(field, field.default_value or None)
        return field.message_type._concrete_class()

    def _count(self) -> int:
        if self._random.random() < LARGE_SHARE:
            return self._random.choice((5000, 100_000, 300_000))
        return self._random.choice((1, 2, 16, 17, 63, 65, 257))

    def _scalar(self, field: FieldDescriptor, value: Any) -> Any:
        kind = field.cpp_type
        if field.type == field.TYPE_BYTES:
            return self._changed(value or b"")
        if kind == field.CPPTYPE_STRING:
            return self._text(value or "")
        if kind == field.CPPTYPE_BOOL:
            return not value
        if kind == field.CPPTYPE_ENUM:
            return self._random.choice([-1, 99, 2**31 - 1, *field.enum_type.values_by_number])
        if kind in (field.CPPTYPE_DOUBLE, field.CPPTYPE_FLOAT):
            return self._random.choice([*DOUBLES, -(value or 1.0), (value or 1.0) * 2])
        return self._random.choice([*INTEGERS, *self._neighbours(value or 0)])

    def _neighbours(self, value: int) -> list[int]:
        near = [value - 1, value + 1, -value, value * 2, self._random.getrandbits(63)]
        return [number for number in near if -(2**63) <= number < 2**63]

    def _text(self, value: str) -> str:
        if self._random.random() < LARGE_SHARE:
            return self._random.choice(("a", "*", "\u00e9", "a*")) * 1_000_000
        similar = [value + "x", value[:-1], value.upper(), value + " ", value + "\0", value * 2]
        return self._random.choice([*STRINGS, *similar, *similar])

    # --- Bytes ---

    def _encode(self, message: Any) -> bytes:
        encoded: bytes = message.SerializeToString()
        return encoded.replace(MARKER.encode(), INVALID_UTF8)[: MAX_MESSAGE_BYTES + 100]

    def _change_bytes(self, encoded: list[bytes]) -> str:
        if not encoded:
            return "no message"
        at = self._random.randrange(len(encoded))
        change = self._random.choice(
            [
                self._truncated,
                self._changed,
                self._retagged,
                self._with_unknown_field,
                self._with_group,
                self._with_long_varint,
                self._repeated,
                self._noise,
            ]
        )
        encoded[at] = change(encoded[at])
        return f"message {at} {change.__name__.strip('_')}, {len(encoded[at])} bytes"

    def _truncated(self, data: bytes) -> bytes:
        return data[: self._random.randrange(len(data) + 1)]

    def _changed(self, data: bytes) -> bytes:
        if not data or self._random.random() < 0.2:
            return data + self._noise(b"")
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 8))):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _retagged(self, data: bytes) -> bytes:
        """A field with the wrong wire type."""
        tag = self._random.randrange(1, 16) << 3 | self._random.randrange(8)
        return data + bytes([tag]) + self._noise(b"")

    def _with_unknown_field(self, data: bytes) -> bytes:
        size = 1_000_000 if self._random.random() < LARGE_SHARE else self._random.randrange(100)
        return data + b"\xf8\x7f\x01" * size

    def _with_group(self, data: bytes) -> bytes:
        """Groups in groups, perhaps deeper than a parser goes, perhaps without an end."""
        depth = self._random.choice((1, 99, 101, 10_000))
        return data + b"\x7b" * depth + b"\x7c" * self._random.choice((depth, 0, depth - 1))

    def _with_long_varint(self, data: bytes) -> bytes:
        length = self._random.choice((9, 10, 11, 1000))
        tag = self._random.randrange(1, 16) << 3
        return data + bytes([tag]) + b"\x80" * length + self._random.choice((b"\x01", b"\x7f", b""))

    def _repeated(self, data: bytes) -> bytes:
        return data * 2

    def _noise(self, _: bytes) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 5, 30, 300)))

    def _change_order(self, encoded: list[bytes]) -> str:
        change = self._random.choice(("one missing", "shuffled", "the first again", "none"))
        if change == "one missing":
            del encoded[self._random.randrange(len(encoded))]
        elif change == "shuffled":
            self._random.shuffle(encoded)
        elif change == "the first again":
            encoded.append(encoded[0])
        else:
            encoded.clear()
        return f"messages: {change}"
