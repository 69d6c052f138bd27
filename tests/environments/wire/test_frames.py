"""Frames: collected from any pieces, and refused before their payload is kept or parsed."""

import json
import socket
import struct
import threading

import pytest

from gvpo_trl.environments.appworld.wire import frames


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
def test_frames_are_collected_from_pieces_of_any_size(size):
    payloads = [b"", b"a", b"bc" * 100, b"\x00\x00\x00\x05"]
    stream = b"".join(frames.pack_frame(payload) for payload in payloads)
    buffer, found = frames.FrameBuffer(), []
    for start in range(0, len(stream), size):
        payload = buffer.feed(stream[start : start + size])
        while payload is not None:
            found.append(payload)
            payload = buffer.feed(b"")
    assert found == payloads
    assert len(buffer) == 0


def test_a_buffer_says_how_many_bytes_are_missing():
    buffer = frames.FrameBuffer()
    assert buffer.missing == 4
    buffer.feed(b"\x00\x00")
    assert buffer.missing == 2
    buffer.feed(b"\x00\x05")
    assert buffer.missing == 5
    buffer.feed(b"abc")
    assert buffer.missing == 2


def test_a_frame_that_is_too_long_is_refused_at_its_length():
    buffer = frames.FrameBuffer(limit=10)
    with pytest.raises(frames.FrameTooLong, match="announces 11 bytes, the limit is 10") as caught:
        buffer.feed(struct.pack(">I", 11))
    assert caught.value.announced == 11


def exchange(raw: bytes, **options) -> dict:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=lambda: (theirs.sendall(raw), theirs.shutdown(socket.SHUT_WR)), daemon=True).start()
        return frames.receive(ours, 20, **options)


def test_a_message_of_many_values_is_not_parsed(monkeypatch):
    raw = frames.pack_frame(b'{"a": [' + b"{}," * 5_000_000 + b"1]}")
    monkeypatch.setattr(json, "loads", lambda payload: pytest.fail("it was parsed"))
    with pytest.raises(frames.TooManyNodes, match="more than 100000 values"):
        exchange(raw)


LONG_TEXTS = {
    "commas": "," * 1_000_000,
    "brackets": "[{" * 500_000,
    "quotes": '"' * 1_000_000,
    "backslashes": "\\" * 1_000_001,
    "backslashes and quotes": '\\"' * 500_000,
    "JSON": json.dumps([{"a": 1}] * 100_000),
}


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_text_is_one_value_whatever_it_holds(name):
    message = {"text": LONG_TEXTS[name], "more": [1, {"b": LONG_TEXTS[name]}]}
    assert exchange(frames.pack_frame(json.dumps(message).encode())) == message


@pytest.mark.parametrize("opened", ['"', '["a", "', '"\\', '"\\\\"'])
def test_a_string_without_end_is_garbage(opened):
    with pytest.raises(frames.ChannelGarbage):
        exchange(frames.pack_frame(opened.encode() + b"," * 1_000_000))


def test_values_are_counted_to_the_number():
    frames.check_nodes(b"[1, 2]", limit=4)
    with pytest.raises(frames.TooManyNodes):
        frames.check_nodes(b"[1, 2, 3, 4]", limit=4)
    for payload in (b'["a,b,c,d,e"]', b'{"a": "[[[[[["}', b'["\\",\\",\\",\\""]'):
        frames.check_nodes(payload, limit=4)
    with pytest.raises(frames.TooManyNodes):
        frames.check_nodes(b'["a", "b", "c", "d", "e"]', limit=4)
