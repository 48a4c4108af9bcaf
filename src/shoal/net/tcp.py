"""TCP with TLS 1.3 from the standard library. A self-signed ed25519 certificate says which peer listens.

Measured traps: bulk through asyncio's StreamReader reaches a third of what BufferedProtocol does; asyncio waits 30 s
for the closing handshake of a silent peer unless told otherwise; a forked DataLoader worker keeps every socket open and
so hides its parent's death from the swarm.
"""

from __future__ import annotations

import asyncio
import asyncio.trsock
import hashlib
import os
import socket
import ssl
import tempfile
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from shoal.core.address import Endpoint
from shoal.core.errors import OptionError, PeerLost, ProtocolError
from shoal.core.gauges import RateGauge
from shoal.net.channel import (
    FRAME_BYTES,
    HEADER_BYTES,
    PAYLOAD_BYTES,
    PREFIX,
    QUEUE_BYTES,
    SLOW_READER_SECONDS,
    TOOK_NOTHING,
    Buffer,
    Channel,
    Frame,
    FrameReader,
    Intake,
)
from shoal.net.identity import Identity
from shoal.net.machine import open_files_allowed, own_hosts, reachable_endpoints, resolve

SLICE_BYTES = 256 * 1024
UNSENT_BYTES = 128 * 1024
"""What the kernel may hold of one connection beyond the congestion window: more only delays what comes after it."""
TLS_HANDSHAKE_SECONDS, TLS_SHUTDOWN_SECONDS = 5.0, 1.0
MAX_WAITING = 2048
"""All members of a group open a link and a stream in the same moment, and a group may have 1024."""

_sockets: dict[asyncio.trsock.TransportSocket, None] = {}


def _leave_sockets_to_parent() -> None:
    """In a forked child: put /dev/null in the place of every socket of shoal's.

    Not close(): the child's copies of the socket objects would later close the same numbers again, by then somebody
    else's files.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for sock in list(_sockets):
        if (number := sock.fileno()) >= 0:
            os.dup2(null, number)
    os.close(null)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_sockets_to_parent)


class _Gone(asyncio.Transport):
    """In the place of a lost transport: asyncio's refer to us, and would keep 0.3 MB until the collector comes."""

    def is_closing(self) -> bool:
        return True

    def close(self) -> None:
        return

    abort = close


class TcpChannel(asyncio.BufferedProtocol):
    """One TLS connection. Only its own event loop touches it. With `tls` it is the end that listens."""

    def __init__(
        self, connected: Callable[[TcpChannel], None], intake: Intake, tls: ssl.SSLContext | None = None,
        server_key: bytes = b"", certificate: bytes = b"",
    ) -> None:  # fmt: skip
        self._connected, self._intake, self._tls = connected, intake, tls
        self._reader = FrameReader()
        self._most_queued_bytes = 0  # a stranger's next frame is read when the one before was
        self._frames: deque[Frame] = deque()
        self._queued_bytes = 0
        self._reading_paused = False
        self._lost: Exception | None = None
        self._wake_receiver: asyncio.Future[None] | None = None
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._sending = asyncio.Lock()
        self.server_key, self.binding = server_key, hashlib.sha256(certificate).digest()
        self.remote = self.address = "?"
        self.on_traffic: Callable[[int, int], None] = lambda sent, received: None

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        _sockets[sock] = None
        self._socket = sock
        peer = transport.get_extra_info("peername") or ("?", 0)
        self.remote, self.address = f"{peer[0]}:{peer[1]}", peer[0]
        if self._tls:
            self._transport.pause_reading()  # until `secure`: whoever waits for that costs next to nothing
        else:
            self._transport.set_write_buffer_limits(high=SLICE_BYTES)
            certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
            self.server_key = _public_key(certificate)
            self.binding = hashlib.sha256(certificate).digest()
        self._connected(self)
        self._connected = lambda channel: None  # it may refer to us

    async def secure(self) -> None:
        if self._tls is None:
            return
        try:
            if self._lost:
                raise self._reason()
            secured = await asyncio.get_running_loop().start_tls(
                self._transport, self, self._tls, server_side=True,
                ssl_handshake_timeout=TLS_HANDSHAKE_SECONDS, ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
            )  # fmt: skip
            if secured is None:
                raise PeerLost(f"the connection to {self.remote} closed")
        except OSError as error:
            error.__traceback__ = None  # it refers to asyncio's future of the handshake, and that to it
            self.connection_lost(error)
            if isinstance(error, ssl.SSLError):
                raise ProtocolError(f"no TLS ({error.reason})") from None
            raise PeerLost(str(error)) from None
        except BaseException:
            self.connection_lost(None)
            raise
        self._transport, self._tls = secured, None
        self._transport.set_write_buffer_limits(high=SLICE_BYTES)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self.on_traffic(0, nbytes)
        if self._lost or self._transport.is_closing():
            return
        try:
            frame = self._reader.advance(nbytes)
        except ProtocolError as error:
            self._fail(ProtocolError(str(error)))  # not the one that was raised: see _reason
            self._reader = FrameReader()
            asyncio.get_running_loop().call_soon(self.abort)  # asyncio's TLS breaks when its protocol aborts in here
            return
        if frame is None:
            return
        self._frames.append(frame)
        self._queue(len(frame[0]) + len(frame[1]) + FRAME_BYTES)
        self._wake()

    def _queue(self, grown_bytes: int) -> None:
        self._queued_bytes += grown_bytes
        self._intake.hold(self, self._queued_bytes)
        self._read_or_pause()

    def _read_or_pause(self) -> None:
        """Read on, or no more, as what is queued here and in all channels allows."""
        if self._lost or self._transport.is_closing():
            return
        limit = self._most_queued_bytes // 2 if self._reading_paused else self._most_queued_bytes
        may_read = self._queued_bytes <= limit and self._intake.may_read(self, self._read_or_pause)
        if may_read and self._reading_paused:
            self._transport.resume_reading()
        elif not may_read and not self._reading_paused:
            self._transport.pause_reading()
        self._reading_paused = not may_read

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def connection_lost(self, exc: Exception | None) -> None:
        _sockets.pop(self._socket, None)
        self._transport = _Gone()
        self._fail(PeerLost(f"the connection to {self.remote} closed" + (f": {exc}" if exc else "")))

    def _reason(self) -> Exception:
        """A new one each time: one that was raised refers to the frames that hold this channel, a cycle of 0.3 MB."""
        return type(self._lost)(*self._lost.args) if self._lost else PeerLost("closed")

    def _fail(self, reason: Exception) -> None:
        self._lost = self._lost or reason
        self._can_write.set()
        self._wake()

    def _wake(self) -> None:
        if self._wake_receiver is not None and not self._wake_receiver.done():
            self._wake_receiver.set_result(None)

    # -- the Channel

    def trust(self) -> None:
        self._most_queued_bytes = QUEUE_BYTES
        self._reader.max_header_bytes, self._reader.max_payload_bytes = HEADER_BYTES, PAYLOAD_BYTES

    async def send(self, header: bytes, payload: Buffer = b"") -> None:
        async with self._sending:
            if self._lost:
                raise self._reason()
            view = memoryview(payload).cast("B")
            try:
                self._write(b"".join((PREFIX.pack(len(header), len(view)), header, view[:SLICE_BYTES])))
                await self._wait_for_reader()
                for start in range(SLICE_BYTES, len(view), SLICE_BYTES):
                    self._write(view[start : start + SLICE_BYTES])
                    await self._wait_for_reader()
            except BaseException:
                self.abort()  # half a frame would make the rest unreadable
                raise
            if self._lost:
                raise self._reason()

    def post(self, header: bytes) -> bool:
        if self._lost or self._sending.locked() or not self._can_write.is_set() or self._transport.is_closing():
            return False
        self._write(PREFIX.pack(len(header), 0) + header)
        return True

    async def _wait_for_reader(self) -> None:
        while not self._can_write.is_set():
            before = self._transport.get_write_buffer_size()
            try:
                async with asyncio.timeout(SLOW_READER_SECONDS):
                    await self._can_write.wait()
            except TimeoutError:
                if not self._transport.is_closing() and self._transport.get_write_buffer_size() >= before:
                    self._fail(PeerLost(f"{self.remote} {TOOK_NOTHING}"))

    def _write(self, data: Buffer) -> None:
        if self._transport.is_closing():
            raise PeerLost(f"the connection to {self.remote} is closed")
        self._transport.write(data)
        self.on_traffic(len(data), 0)

    def measure(self, sent: RateGauge, received: RateGauge) -> bool:
        return False

    def place(self, buffers: Sequence[memoryview]) -> None:
        self._reader.places = deque(buffers)

    async def receive(self) -> Frame:
        while not self._frames:
            if self._lost:
                raise self._reason()
            self._wake_receiver = asyncio.get_running_loop().create_future()
            await self._wake_receiver
        frame = self._frames.popleft()
        self._queue(-len(frame[0]) - len(frame[1]) - FRAME_BYTES)
        return frame

    def close(self) -> None:
        self._forget_frames()
        if not self._transport.is_closing():  # asyncio's TLS transport breaks when it is closed twice
            self._transport.close()

    def abort(self) -> None:
        self._forget_frames()
        self._transport.abort()

    def _forget_frames(self) -> None:
        """Nobody reads here any more."""
        self._frames.clear()
        self._queued_bytes = 0
        self._intake.forget(self)


class TcpTransport:
    """Listens and dials on TCP."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._certificate = b""
        self._server: asyncio.Server | None = None
        self._channels: weakref.WeakSet[TcpChannel] = weakref.WeakSet()
        self._intake = Intake()
        self.max_waiting = open_files_allowed(4 * MAX_WAITING) // 4  # strangers may not use them up

    async def start(self, listen: Endpoint, accept: Callable[[Channel], None]) -> list[Endpoint]:
        server_tls = self._server_context()

        def connected(channel: TcpChannel) -> None:
            self._channels.add(channel)
            accept(channel)

        def protocol() -> TcpChannel:
            return TcpChannel(connected, self._intake, server_tls, self._identity.public_key, self._certificate)

        try:
            self._server = await asyncio.get_running_loop().create_server(
                protocol, listen.host, listen.port, backlog=128
            )
        except OSError as error:
            raise OptionError("listen", str(listen), f"a host of this machine with a free port ({error})") from error
        self._listening = cast(tuple[asyncio.trsock.TransportSocket, ...], tuple(self._server.sockets))
        _sockets.update(dict.fromkeys(self._listening))
        port = self._listening[0].getsockname()[1]
        return reachable_endpoints(listen.host, port)

    async def dial(self, endpoint: Endpoint) -> Channel:
        host = "127.0.0.1" if endpoint.host in own_hosts() else await resolve(endpoint.host)
        done: asyncio.Future[TcpChannel] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: TcpChannel(done.set_result, self._intake),
                host, endpoint.port, ssl=_client_context(), server_hostname="shoal",
                ssl_handshake_timeout=TLS_HANDSHAKE_SECONDS, ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
            )  # fmt: skip
            channel = await done
        except ConnectionRefusedError:
            raise PeerLost("connection refused: nobody listens there") from None
        except (ssl.SSLError, ConnectionError) as error:
            raise PeerLost(f"what listens there is no shoal peer ({error})") from None
        except OSError as error:
            raise PeerLost(f"can't be reached ({os.strerror(error.errno) if error.errno else error})") from None
        self._channels.add(channel)
        return channel

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for sock in self._listening:
                _sockets.pop(sock, None)
        for channel in list(self._channels):
            channel.close()

    def _server_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        pem = self._identity.certificate_pem()
        with tempfile.TemporaryDirectory(
            prefix="shoal-"
        ) as folder:  # the ssl module reads certificates from files only
            path = Path(folder) / "peer.pem"
            path.touch(mode=0o600)
            path.write_bytes(pem)
            context.load_cert_chain(path)
        self._certificate = ssl.PEM_cert_to_DER_cert(pem[pem.index(b"-----BEGIN CERTIFICATE") :].decode())
        return context


def _client_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # no authority: the handshake compares the key with the peer's id
    return context


def _public_key(certificate: bytes) -> bytes:
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except ValueError:
        key = None
    return key.public_bytes_raw() if isinstance(key, Ed25519PublicKey) else b"not an ed25519 certificate"
