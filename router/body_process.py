"""A process of its own for large bodies, because parsing holds the GIL.

msgspec, `re` and `json` are C code that gives nobody else a turn: 32 MiB of JSON would hold up every stream
of the router for most of a second, in whatever thread they are parsed. So such bodies go through a pipe to a
child, which answers with token ids; the router's threads only copy bytes.
"""

import gc
import os
import pickle
import struct
import subprocess
import sys
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

import msgspec

from replicas.api import ModelCard
from router.errors import ApiError
from router.preparation import Endpoint, Prepared, prepare
from router.protocol import ChatBody, CompletionBody
from router.text import TextCodec

_HEADER: Final = struct.Struct("<QQ")
_LENGTH: Final = struct.Struct("<Q")


class BodyProcessError(Exception):
    """The child ended, or failed on a body; the next body gets a new one."""


class BodyProcess:
    """The router's side. The child starts with the first large body and ends with the router.

    Thread-safe; one body at a time.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` holds the tokenizer, as for TextCodec.from_folder."""
        self._folder = folder
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def prepare(self, endpoint: Endpoint, data: bytes, card: ModelCard) -> Prepared:
        """As preparation.prepare; blocks while the child works. Raises ApiError, BodyProcessError."""
        with self._lock:
            child = self._running_child()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                _send(child.stdin, msgspec.msgpack.encode((endpoint, card)), data)
                outcome = _receive(child.stdout)
            except (OSError, EOFError) as error:
                self._end()
                raise BodyProcessError(f"the process for large bodies ended: {error}") from error
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        """End the child. Idempotent."""
        child = self._child
        if child is not None:
            child.kill()  # unblocks the thread that waits for its answer
        with self._lock:
            self._end()

    def _running_child(self) -> "subprocess.Popen[bytes]":
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "router.body_process", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a terminal's Ctrl-C is the router's affair
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()


def _send(stream: IO[bytes], question: bytes, data: bytes) -> None:
    stream.write(_HEADER.pack(len(question), len(data)))
    stream.write(question)
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Prepared | ApiError | BodyProcessError:
    """Read the child's answer. Rows are unpacked one by one, so that other threads get their turn."""
    (size,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    outcome = pickle.loads(_read(stream, size))
    if isinstance(outcome, Prepared):
        rows = []
        for _ in outcome.echoes:
            (size,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
            rows.append(tuple(array("I", _read(stream, size))))
            # Once looked at, a tuple of integers is none of the collector's business any more. Left to
            # later, it would look through millions of ids at once, and hold the GIL meanwhile.
            gc.collect(0)
        return replace(outcome, prompts=rows)
    assert isinstance(outcome, ApiError | BodyProcessError)
    return outcome


def _read(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("no answer")
    return data


def _serve(text: TextCodec, questions: IO[bytes], answers: IO[bytes]) -> None:
    """The child: answer until the router closes the pipe."""
    while header := questions.read(_HEADER.size):
        num_question, num_data = _HEADER.unpack(header)
        question = _read(questions, num_question)
        endpoint, card = msgspec.msgpack.decode(question, type=tuple[Endpoint, ModelCard])
        _answer(answers, _outcome(endpoint, _read(questions, num_data), text, card))


def _outcome(
    endpoint: Endpoint, data: bytes, text: TextCodec, card: ModelCard
) -> Prepared | ApiError | BodyProcessError:
    try:
        return prepare(endpoint, data, text, card)
    except ApiError as error:
        return error
    except Exception as error:  # the outermost loop of this process
        return BodyProcessError(f"{type(error).__name__}: {error}"[:500])


def _answer(stream: IO[bytes], outcome: Prepared | ApiError | BodyProcessError) -> None:
    rows: list[tuple[int, ...]] = []
    if isinstance(outcome, Prepared):
        rows, outcome = outcome.prompts, replace(outcome, prompts=[], body=_without_text(outcome.body))
    message = pickle.dumps(outcome, pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(message)))
    stream.write(message)
    for row in rows:
        packed = array("I", row).tobytes()
        stream.write(_LENGTH.pack(len(packed)))
        stream.write(packed)
    stream.flush()


def _without_text(body: ChatBody | CompletionBody) -> ChatBody | CompletionBody:
    """Drop what has become tokens, a grammar or nothing: it can be most of the body."""
    spent: dict[str, object] = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key", "metadata"))
    if isinstance(body, ChatBody):
        spent |= {"messages": [], "tools": None, "chat_template_kwargs": None}
    else:
        spent |= {"prompt": ""}
    return msgspec.structs.replace(body, **spent)


if __name__ == "__main__":
    _serve(TextCodec.from_folder(Path(sys.argv[1])), sys.stdin.buffer, sys.stdout.buffer)
