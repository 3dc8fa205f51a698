# SPDX-License-Identifier: Apache-2.0
"""The part of a Kubernetes API server that a registry uses: ConfigMaps and Leases of one namespace.

Written after the API's documentation and compared with kube-apiserver 1.20. Run as a program:

    fake_kubernetes.py --port PORT [--namespace ema] [--data FILE] [--tokens FILE] [--cert FILE --key FILE]

It needs no package. With --data, a restarted process continues with the same objects, as after an outage. With --tokens,
each request needs one of the tokens of the file, which is read for each request. Paths for tests, which need no token:

    POST /control/compact             forget the history, so that a watch from an older version gets 410
    POST /control/end-watches         end all watches, as the server does after timeoutSeconds
    POST /control/lose-answers        carry out the next write, but close the connection without an answer
    POST /control/fail?status=N&reason=R  answer the next request with this status, without carrying it out
    GET  /control/objects             names of all objects
"""

from __future__ import annotations

import argparse
import copy
import datetime
import http.server
import json
import os
import pathlib
import re
import socket
import ssl
import threading
import time
import urllib.parse
import uuid

PATH = re.compile(
    r"/(?:api/v1|apis/coordination\.k8s\.io/v1)/namespaces/([^/]+)/(configmaps|leases)(?:/([^/]+))?$"
)
KINDS = {"configmaps": ("v1", "ConfigMap"), "leases": ("coordination.k8s.io/v1", "Lease")}
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}(Z|[+-]\d\d:\d\d)")
MAX_DATA_BYTES = 1 << 20
MAX_ANNOTATION_BYTES = 256 << 10
MAX_BODY_BYTES = 3 << 20


class Failure(Exception):
    """An answer that is not a success."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }


class Store:
    """All objects and the events since the last compaction. Thread-safe."""

    def __init__(self, namespace: str, data: pathlib.Path | None) -> None:
        self.namespace = namespace
        self.changed = threading.Condition()
        self._data = data
        self._version = 1
        self._compacted = 0
        self._objects: dict[tuple[str, str], dict] = {}
        self._events: list[tuple[int, str, str, dict]] = []  # Version, resource, type, object.
        self.watch_round = 0  # Raised to end all watches.
        if data is not None and data.exists():
            state = json.loads(data.read_text())
            self._version = self._compacted = state["version"]
            self._objects = {(each[0], each[1]): each[2] for each in state["objects"]}

    def _record(self, resource: str, event: str, item: dict) -> None:
        item["metadata"]["resourceVersion"] = str(self._version)
        self._events.append((self._version, resource, event, copy.deepcopy(item)))
        if self._data is not None:
            objects = [[*key, value] for key, value in self._objects.items()]
            partial = self._data.with_suffix(".partial")
            partial.write_text(json.dumps({"version": self._version, "objects": objects}))
            os.replace(partial, self._data)
        self.changed.notify_all()

    def _check(self, resource: str, item: dict) -> None:
        def invalid(problem: str) -> Failure:
            kind = KINDS[resource][1]
            return Failure(422, "Invalid", f'{kind} "{metadata.get("name")}" is invalid: {problem}')

        metadata = item.get("metadata", {})
        if not NAME.fullmatch(metadata.get("name", "")) or len(metadata["name"]) > 253:
            raise invalid("metadata.name: a lowercase RFC 1123 subdomain is required")
        for value in metadata.get("labels", {}).values():
            if not LABEL.fullmatch(value):
                raise invalid(f"metadata.labels: Invalid value: {value!r}")
        annotations = metadata.get("annotations", {})
        if sum(len(k) + len(v.encode()) for k, v in annotations.items()) > MAX_ANNOTATION_BYTES:
            raise invalid(
                f"metadata.annotations: Too long: must have at most {MAX_ANNOTATION_BYTES} bytes"
            )
        if sum(len(value.encode()) for value in item.get("data", {}).values()) > MAX_DATA_BYTES:
            raise invalid(f"[]: Too long: must have at most {MAX_DATA_BYTES} bytes")
        spec = item.get("spec", {})
        if resource == "leases" and spec.get("leaseDurationSeconds", 1) <= 0:
            raise invalid("spec.leaseDurationSeconds: must be greater than 0")
        if "renewTime" in spec and not TIME.fullmatch(spec["renewTime"]):
            raise Failure(400, "BadRequest", f'parsing time "{spec["renewTime"]}"')

    def _not_found(self, resource: str, name: str) -> Failure:
        return Failure(404, "NotFound", f'{resource} "{name}" not found')

    def _conflict(self, resource: str, name: str, why: str) -> Failure:
        return Failure(
            409, "Conflict", f'Operation cannot be fulfilled on {resource} "{name}": {why}'
        )

    def get(self, resource: str, name: str) -> dict:
        with self.changed:
            if (resource, name) not in self._objects:
                raise self._not_found(resource, name)
            return copy.deepcopy(self._objects[resource, name])

    def list(self, resource: str, selector: dict[str, str]) -> dict:
        version, kind = KINDS[resource]
        with self.changed:
            items = [
                copy.deepcopy(item)
                for (each, _), item in sorted(self._objects.items())
                if each == resource and matches(item, selector)
            ]
            return {
                "kind": f"{kind}List",
                "apiVersion": version,
                "metadata": {"resourceVersion": str(self._version)},
                "items": items,
            }

    def create(self, resource: str, item: dict) -> dict:
        with self.changed:
            self._check(resource, item)
            name = item["metadata"]["name"]
            if item["metadata"].get("resourceVersion"):
                raise Failure(
                    500,
                    "InternalError",
                    "resourceVersion should not be set on objects to be created",
                )
            if (resource, name) in self._objects:
                raise Failure(409, "AlreadyExists", f'{resource} "{name}" already exists')
            now = datetime.datetime.now(datetime.timezone.utc)
            item["apiVersion"], item["kind"] = KINDS[resource]
            item["metadata"] |= {
                "namespace": self.namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            self._version += 1
            self._objects[resource, name] = item
            self._record(resource, "ADDED", item)
            return copy.deepcopy(item)

    def update(self, resource: str, name: str, item: dict) -> dict:
        with self.changed:
            self._check(resource, item)
            old = self._objects.get((resource, name))
            if old is None:
                # A Lease can be created by PUT, whatever its version.
                if resource == "leases":
                    item["metadata"].pop("resourceVersion", None)
                    return self.create(resource, item)
                raise self._not_found(resource, name)
            metadata = item["metadata"]
            version = metadata.get("resourceVersion")
            if not version and resource == "leases":
                raise Failure(
                    422, "Invalid", "metadata.resourceVersion: must be specified for an update"
                )
            if version and version != old["metadata"]["resourceVersion"]:
                raise self._conflict(
                    resource,
                    name,
                    "the object has been modified; please apply your changes to the latest version and try again",
                )
            item["apiVersion"], item["kind"] = KINDS[resource]
            for field in ("namespace", "uid", "creationTimestamp", "resourceVersion"):
                metadata[field] = old["metadata"][field]
            if item == old:
                return copy.deepcopy(old)  # Nothing is written, so the version remains.
            self._version += 1
            self._objects[resource, name] = item
            self._record(resource, "MODIFIED", item)
            return copy.deepcopy(item)

    def delete(self, resource: str, name: str, options: dict) -> dict:
        with self.changed:
            old = self._objects.get((resource, name))
            if old is None:
                raise self._not_found(resource, name)
            expected = options.get("preconditions", {}).get("resourceVersion")
            found = old["metadata"]["resourceVersion"]
            if expected is not None and expected != found:
                raise self._conflict(
                    resource,
                    name,
                    f"the ResourceVersion in the precondition ({expected}) does not match the "
                    f"ResourceVersion in record ({found}). The object might have been modified",
                )
            self._version += 1
            del self._objects[resource, name]
            self._record(resource, "DELETED", old)
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def compact(self) -> None:
        with self.changed:
            self._events.clear()
            self._compacted = self._version

    def end_watches(self) -> None:
        with self.changed:
            self.watch_round += 1
            self.changed.notify_all()

    def events_after(self, version: int, resource: str) -> list[tuple[int, str, dict]]:
        """With `changed` held. Raises Failure: they have been compacted."""
        if version < self._compacted:
            raise Failure(
                410, "Expired", f"too old resource version: {version} ({self._compacted})"
            )
        return [
            (number, event, item)
            for number, each, event, item in self._events
            if number > version and each == resource
        ]

    def names(self) -> list[str]:
        with self.changed:
            return [f"{resource}/{name}" for resource, name in sorted(self._objects)]


def matches(item: dict, selector: dict[str, str]) -> bool:
    return selector.items() <= item["metadata"].get("labels", {}).items()


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int, store: Store, tokens: pathlib.Path | None) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.store = store
        self.tokens = tokens
        self.next_failure: Failure | None = None
        self.must_lose_answer = False
        self.tls: ssl.SSLContext | None = None

    def finish_request(self, request: socket.socket, client_address: object) -> None:
        # On the thread of the connection: a client may connect and say nothing.
        if self.tls is not None:
            try:
                request = self.tls.wrap_socket(request, server_side=True)
            except (ssl.SSLError, OSError):
                return
        try:
            super().finish_request(request, client_address)
        except (OSError, ssl.SSLError):
            pass  # The client has gone.
        finally:
            request.close()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def _reply(self, code: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _handle(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        length = int(self.headers.get("Content-Length") or 0)
        try:
            text = self.rfile.read(length)
            if url.path.startswith("/control/"):
                self._reply(200, self._control(url.path, query))
                return
            if length > MAX_BODY_BYTES:
                raise Failure(413, "RequestEntityTooLarge", "Request entity too large")
            self._authenticate()
            failure, self.server.next_failure = self.server.next_failure, None
            if failure is not None:
                raise failure
            code, answer = self._serve(url.path, query, json.loads(text) if text else {})
            if code == 0:
                return  # A watch.
            if self.command != "GET" and self.server.must_lose_answer:
                self.server.must_lose_answer = False
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            self._reply(code, answer)
        except Failure as failure:
            self._reply(failure.code, failure.status)

    do_GET = do_POST = do_PUT = do_DELETE = _handle

    def _control(self, path: str, query: dict[str, str]) -> object:
        server = self.server
        if path == "/control/compact":
            server.store.compact()
        elif path == "/control/end-watches":
            server.store.end_watches()
        elif path == "/control/lose-answers":
            server.must_lose_answer = True
        elif path == "/control/fail":
            status, reason = int(query["status"]), query.get("reason", "Injected")
            server.next_failure = Failure(status, reason, "a failure for a test")
        elif path == "/control/objects":
            return server.store.names()
        else:
            raise Failure(404, "NotFound", path)
        return {}

    def _authenticate(self) -> None:
        if self.server.tokens is None:
            return
        given = self.headers.get("Authorization", "")
        if given not in [f"Bearer {token}" for token in self.server.tokens.read_text().split()]:
            raise Failure(401, "Unauthorized", "Unauthorized")

    def _serve(self, path: str, query: dict[str, str], body: dict) -> tuple[int, object]:
        store = self.server.store
        found = PATH.match(path)
        if not found:
            raise Failure(404, "NotFound", "the server could not find the requested resource")
        namespace, resource, name = found.groups()
        if namespace != store.namespace:
            if self.command == "POST":
                raise Failure(404, "NotFound", f'namespaces "{namespace}" not found')
            raise Failure(404, "NotFound", f'{resource} "{name}" not found')
        if self.command == "POST":
            return 201, store.create(resource, body)
        if self.command == "PUT":
            return 200, store.update(resource, name, body)
        if self.command == "DELETE":
            return 200, store.delete(resource, name, body)
        if name:
            return 200, store.get(resource, name)
        terms = [term for term in query.get("labelSelector", "").split(",") if term]
        selector = dict(term.split("=", 1) for term in terms)
        if query.get("watch") in ("1", "true"):
            self._watch(resource, selector, query)
            return 0, None
        return 200, store.list(resource, selector)

    def _watch(self, resource: str, selector: dict[str, str], query: dict[str, str]) -> None:
        store = self.server.store
        version = int(query["resourceVersion"])
        deadline = time.monotonic() + int(query.get("timeoutSeconds", 1800))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        watch_round = store.watch_round
        is_expired = False
        while not is_expired:
            with store.changed:
                try:
                    events = store.events_after(version, resource)
                    if not events:
                        left = deadline - time.monotonic()
                        if left <= 0 or watch_round != store.watch_round:
                            break
                        store.changed.wait(left)
                        continue
                    version = events[-1][0]
                    lines = [
                        {"type": event, "object": item}
                        for _, event, item in events
                        if matches(item, selector)
                    ]
                except Failure as failure:
                    lines = [{"type": "ERROR", "object": failure.status}]
                    is_expired = True
            for line in lines:
                self._send_chunk(json.dumps(line).encode() + b"\n")
        self._send_chunk(b"")

    def _send_chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--namespace", default="ema")
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--tokens", type=pathlib.Path)
    parser.add_argument("--cert")
    parser.add_argument("--key")
    options = parser.parse_args()
    server = Server(options.port, Store(options.namespace, options.data), options.tokens)
    if options.cert:
        server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.tls.load_cert_chain(options.cert, options.key)
    server.serve_forever()


if __name__ == "__main__":
    main()
