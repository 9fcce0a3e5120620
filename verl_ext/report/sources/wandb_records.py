"""The records of a `.wandb` file: W&B's transaction log, which a run writes online and offline alike.

Behind seven bytes that say whose it is, LevelDB's log format (chunks in blocks of 32 KiB, a record is one or several)
with zlib's CRC-32; in each record a protobuf message. wandb itself is not used: it has no reader in Python any more
(0.31), and importing it takes longer than reading a run. The fields have the numbers of its wandb_internal.proto.
"""

import struct
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any, BinaryIO

from verl_ext.report.run import ReportError

BEGINNING = b":W&B\xe1\xbe\0"  # name, magic number, version
BLOCK = 1 << 15
CHUNK = struct.Struct("<IHB")  # checksum of kind and data, length of the data, kind
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4
MOST_RECORD = 16 << 20  # bytes; a row of 100,000 metrics has less than half
# Message -> field -> its number and type; keys and values are read as bytes, which need not be UTF-8.
MESSAGES = {
    "Record": {"history": (2, "HistoryRecord"), "run": (17, "RunRecord")},
    "HistoryRecord": {"item": (1, "HistoryItem*"), "step": (2, "HistoryStep")},
    "HistoryItem": {"key": (1, "bytes"), "nested_key": (2, "bytes*"), "value_json": (16, "bytes")},
    "HistoryStep": {"num": (1, "int64")},
    "RunRecord": {
        "run_id": (1, "bytes"),
        "project": (3, "bytes"),
        "display_name": (8, "bytes"),
        "start_time": (17, "Timestamp"),
    },
    "Timestamp": {"seconds": (1, "int64"), "nanos": (2, "int32")},
}


def messages(file: BinaryIO) -> Iterator[Any]:
    """Each `Record` of the file; None in the place of one that cannot be read, or is beyond MOST_RECORD.

    A last one that is cut is left out: it may still be being written.

    Raises:
        ReportError: this is not W&B's file.
    """
    parse, error = _parser()
    for record in _records(file):
        try:
            yield None if record is None else parse(record)
        except error:
            yield None


def _records(file: BinaryIO) -> Iterator[bytes | None]:
    block = file.read(BLOCK)
    if not BEGINNING.startswith(block[: len(BEGINNING)]):
        raise ReportError("this is not a file of W&B: it begins otherwise")
    at = len(BEGINNING)
    parts: list[bytes] | None = None  # of the record that has begun
    size = 0
    while block:
        while at + CHUNK.size <= len(block):
            checksum, length, kind = CHUNK.unpack_from(block, at)
            start, end = at + CHUNK.size, at + CHUNK.size + length
            if end > len(block) and len(block) < BLOCK:
                return  # the rest is cut, or still being written
            if not FULL <= kind <= LAST or zlib.crc32(block[at + CHUNK.size - 1 : end]) != checksum:
                parts = None
                yield None
                break  # the next block can be read again
            data, at = block[start:end], end
            if kind in (FULL, FIRST):
                if parts is not None:  # the one before has no end
                    yield None
                parts, size = [], 0
            elif parts is None:  # the rest of what could not be read
                continue
            parts.append(data)
            size += length
            if size > MOST_RECORD:
                parts = None
                yield None
            elif kind in (FULL, LAST):
                yield b"".join(parts)
                parts = None
        block, at = file.read(BLOCK) if len(block) == BLOCK else b"", 0


@cache
def _parser() -> tuple[Any, type[Exception]]:
    """What makes a `Record` of bytes, and the error that it raises."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.message import DecodeError

    field = descriptor_pb2.FieldDescriptorProto
    types = {"bytes": field.TYPE_BYTES, "int32": field.TYPE_INT32, "int64": field.TYPE_INT64}
    file = descriptor_pb2.FileDescriptorProto(name="verl_ext/wandb.proto", package="verl_ext.wandb", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, (number, kind) in fields.items():
            label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            added = message.field.add(name=field_name, number=number, label=label)
            kind = kind.rstrip("*")
            added.type = types.get(kind, field.TYPE_MESSAGE)
            if kind not in types:
                added.type_name = f".{file.package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    record = message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Record"))
    return record.FromString, DecodeError
