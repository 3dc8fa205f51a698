# SPDX-License-Identifier: Apache-2.0
"""Sends calls whose messages are any bytes, and says what is wrong with the server's answer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from mutation import MAX_MESSAGE_BYTES, Mutant, Mutator
from recorded_requests import RECORDINGS, SERVICE, AuthorizedStub, Recording, ema, errors
from server_process import ROOT

# A call that takes longer hangs. Long, because other programs may use the machine.
TIMEOUT_S = 60
# A watch may wait for a commit that never comes.
WATCH_TIMEOUT_S = 1
PROTO = ROOT / "proto/ema/v1/ema_service.proto"
CODES = {code.name for code in grpc.StatusCode}
# Every call can fail with these; the top of ema_service.proto says when.
COMMON_CODES = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"}
# How gRPC itself rejects a request that it cannot parse.
UNPARSED = "Unable to parse request"
METHODS = {method.name: method for method in SERVICE.methods}


@dataclasses.dataclass(frozen=True)
class Answer:
    code: str
    text: str = ""
    # The error's ErrorDetail, if it has one.
    detail: Any = None


class HostileCaller:
    """Calls the service with a token, knowing nothing of its messages. A context manager."""

    def __init__(self, address: str, token: str) -> None:
        # A connection of its own, and replies of any size.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        options.append(("grpc.max_send_message_length", -1))
        self._channel = grpc.insecure_channel(address, options)
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __enter__(self) -> HostileCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def call(self, rpc: str, messages: list[bytes]) -> Answer:
        method = METHODS[rpc]
        kind = f"{_stream(method.client_streaming)}_{_stream(method.server_streaming)}"
        send = getattr(self._channel, kind)(f"/{SERVICE.full_name}/{rpc}")
        request = iter(messages) if method.client_streaming else messages[0]
        timeout_s = WATCH_TIMEOUT_S if rpc == "Watch" else TIMEOUT_S
        try:
            reply = send(request, timeout=timeout_s, metadata=self._metadata)
            if method.server_streaming:
                self._read(rpc, reply)
        except grpc.RpcError as error:
            if rpc == "Watch" and error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return Answer("OK")
            trailers = dict(error.trailing_metadata() or ())
            data = trailers.get("ema-error-detail-bin")
            detail = None if data is None else errors.ErrorDetail.FromString(data)
            return Answer(error.code().name, error.details() or "", detail)
        return Answer("OK")

    def _read(self, rpc: str, replies: Any) -> None:
        for _ in replies:
            # A watch has no end.
            if rpc == "Watch":
                replies.cancel()
                return


def _stream(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


@functools.cache
def documented_codes() -> dict[str, set[str]]:
    """The codes of each RPC that its comment in ema_service.proto names, also by "errors as" another RPC's."""
    service = PROTO.read_text().split("service EmaService {")[1]
    comments = dict(
        (rpc, re.sub(r"\s*//\s*", " ", comment))
        for comment, rpc in re.findall(r"((?:^  //.*\n)+)^  rpc (\w+)\(", service, re.M)
    )
    assert set(comments) == set(METHODS)

    def codes_of(rpc: str, seen: frozenset[str]) -> Iterator[str]:
        yield from CODES.intersection(re.findall(r"\b[A-Z_]+\b", comments[rpc]))
        for other in re.findall(r"\bas ([A-Z]\w+)", comments[rpc]):
            if other in METHODS and other not in seen:
                yield from codes_of(other, seen | {other})

    return {rpc: {"OK", *COMMON_CODES, *codes_of(rpc, frozenset((rpc,)))} for rpc in METHODS}


def words_of(text: str) -> set[str]:
    """The words of a text in lower case and in the singular."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]{3,}", text.lower())}


@functools.cache
def field_words(rpc: str) -> set[str]:
    """The words in the names of a request's fields and messages, such as "offset", "pushrequest" and "request"."""
    names = {"request": ""}

    def collect(message: Any) -> None:
        if message.name in names:
            return
        names[message.name] = " ".join(field.name for field in message.fields)
        for field in message.fields:
            if field.message_type is not None:
                collect(field.message_type)

    collect(METHODS[rpc].input_type)
    return words_of(" ".join([*names, *names.values()]))


def find_fault(rpc: str, mutant: Mutant, answer: Answer) -> str:
    """What the answer to a mutant must not be; empty: nothing is wrong."""
    if answer.detail is None and answer.code != "OK":
        return _find_fault_of_grpc(mutant, answer)
    if answer.code not in documented_codes()[rpc]:
        return f"{answer.code} is not documented for {rpc}"
    if answer.detail is not None and answer.detail.reason == 0:
        return "no reason"
    if re.search(r"[\0-\x1f\x7f-\x9f]", answer.text):
        return "the text has control characters"
    if answer.code == "INVALID_ARGUMENT" and not words_of(answer.text) & field_words(rpc):
        return "the text names no field"
    return ""


def _find_fault_of_grpc(mutant: Mutant, answer: Answer) -> str:
    """Of an error without an ErrorDetail: only gRPC itself may reject a call like that."""
    if answer.code == "RESOURCE_EXHAUSTED":
        is_long = any(len(data) > MAX_MESSAGE_BYTES for data in mutant.messages)
        return "" if is_long else "no ErrorDetail, but the message is short"
    if answer.code == "INTERNAL":
        # Parsers differ in what they accept, such as field number 0, so the text decides.
        return "" if answer.text == UNPARSED else "no ErrorDetail, but gRPC has parsed it"
    return "no ErrorDetail"


def delete_models(stub: Any, prefix: str) -> None:
    """Deletes the models whose names begin with `prefix`, also from the disk."""
    for model in stub.ListModels(ema.ListModelsRequest(), timeout=TIMEOUT_S).models:
        if model.name.startswith(prefix):
            request = ema.DeleteModelRequest(model=model.name, confirm_model=model.name, purge=True)
            stub.DeleteModel(request, timeout=TIMEOUT_S)


def attack(
    address: str, token: str, owner_token: str, *, prefix: str, seed: str, count: int
) -> tuple[Counter[str], dict[str, str]]:
    """Makes a model, sends `count` mutants of its requests, and deletes all models of the prefix.

    Args:
        token: of an admin of the models whose names begin with `prefix`, and of no other.
        owner_token: of an admin of all models, for SetLogLevel.

    Returns how often each RPC got each code, and an example of each fault.
    """
    chance = random.Random(seed)
    mutator = Mutator(seed)
    # Half of the time one RPC only: others might have deleted or fenced what it needs.
    rpcs = list(RECORDINGS)
    if chance.random() < 0.5:
        rpcs = [chance.choice(rpcs)]
    codes: Counter[str] = Counter()
    faults: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        stub = AuthorizedStub(stack.enter_context(grpc.insecure_channel(address)), token)
        recording = Recording(stub, f"{prefix}{chance.getrandbits(32)}")
        limited, owner = (
            stack.enter_context(HostileCaller(address, each)) for each in (token, owner_token)
        )
        for _ in range(count):
            rpc = chance.choice(rpcs)
            mutant = mutator.mutate(recording.messages(rpc))
            # Drain is not called by the owner: its mutants would end the server.
            answer = (owner if rpc == "SetLogLevel" else limited).call(rpc, mutant.messages)
            codes[f"{rpc} {answer.code}"] += 1
            if fault := find_fault(rpc, mutant, answer):
                sent = [data[:200].hex() for data in mutant.messages]
                example = f"seed {seed}: {answer}; {mutant.changes}; sent {sent}"
                faults.setdefault(f"{rpc}: {fault}", example)
        delete_models(stub, prefix)
    return codes, faults
