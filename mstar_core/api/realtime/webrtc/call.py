"""One WebRTC call: the peer connection of a realtime session, in the place of its WebSocket.

Its wire is that of /v1/realtime. Events travel on the data channel; sound of both sides on tracks. The call turns sound
of the user into events of the wire, takes sound of the model out of them, and cuts an interrupted answer where its
track had been played to.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import numpy as np
import pybase64
from aiortc import RTCConfiguration, RTCDataChannel, RTCIceServer, RTCPeerConnection, RTCSessionDescription
from aiortc.exceptions import InvalidStateError
from aiortc.mediastreams import MediaStreamError
from av import AudioResampler

from mstar_core.api.realtime.settings import RealtimeSettings
from mstar_core.api.realtime.sound.resampling import PieceResampler
from mstar_core.api.realtime.webrtc.voice_track import VoiceTrack
from mstar_core.api.schema import IceServerAnswer
from mstar_core.errors import RequestError

CHANNEL: Final = "oai-events"
SOUND: Final = "response.output_audio.delta"
HEARD_RATE: Final = 24_000
GONE: Final = ("failed", "closed", "disconnected")
OPEN_S: Final = 60.0
"""Time within which a client opens the data channel."""

BUFFERED_BYTES: Final = 256 << 10
"""Events that may wait in the data channel. Further ones wait in the session, which then slows its responses."""

FLUSH_S: Final = 2.0
"""Longest wait at the end of a call for events that have not been sent."""

SERVER_CANDIDATES: Final = {"stun": "srflx", "turn": "relay", "turns": "relay"}
"""Type of the address that a server of each scheme gives (RFC 8839)."""

log = logging.getLogger("mstar.api.realtime")


class RealtimeCall:
    """A connection of a session. Owned by the route, which serves it until it ends.

    If the client hangs up or disappears, or does not open the data channel, the task that waits in `receive` is
    cancelled.
    """

    is_closed_by_client = True
    """A call does not resume."""

    def __init__(
        self,
        settings: Callable[[], RealtimeSettings],
        servers: Sequence[IceServerAnswer] = (),
        *,
        open_s: float = OPEN_S,
        stall_s: float = OPEN_S,
    ) -> None:
        """settings: of the session, current. servers: STUN and TURN servers; the first of each kind is used.

        open_s: time within which the client opens the data channel. stall_s: time within which it reads an event.
        """
        self._settings = settings
        self._open_s, self._stall_s = open_s, stall_s
        self._has_room = asyncio.Event()
        self._servers = servers
        self._peer = RTCPeerConnection(
            RTCConfiguration([RTCIceServer(**msgspec.to_builtins(each)) for each in servers])
        )
        self._voice = VoiceTrack()
        self._events: asyncio.Queue[str | None] = asyncio.Queue()
        self._channel: RTCDataChannel | None = None
        self._is_open = asyncio.Event()
        self._response_id = ""
        self._cut_ids: set[str] = set()
        self._own = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._peer.on("datachannel", self._opened)
        self._peer.on("track", self._heard)
        self._peer.on("connectionstatechange", self._changed)

    async def answer(self, offer: str) -> str:
        """Return the SDP that answers an offer. Raises RequestError for one that is not valid."""
        try:
            await self._peer.setRemoteDescription(RTCSessionDescription(offer, "offer"))
            self._peer.addTrack(self._voice)
            await self._peer.setLocalDescription(await self._peer.createAnswer())
        except (ValueError, AssertionError, IndexError, KeyError, AttributeError, InvalidStateError) as error:
            await self._peer.close()
            raise RequestError(
                "the SDP offer is not valid",
                str(error)[:200],
                f"send an offer with one audio track and the data channel {CHANNEL}",
                field="sdp",
            ) from error
        sdp = str(self._peer.localDescription.sdp)
        self._warn_of_servers(sdp)
        self._start(self._await_channel())
        return sdp

    async def _await_channel(self) -> None:
        """End a call whose client does not reach the server, or opens no data channel."""
        try:
            await asyncio.wait_for(self._is_open.wait(), self._open_s)
        except TimeoutError:
            log.info("no data channel came", extra={"facts": {"seconds": self._open_s}})
            self._events.put_nowait(None)

    def _warn_of_servers(self, sdp: str) -> None:
        """Log servers that gave no address: clients behind a NAT may not reach the call."""
        urls = [url for server in self._servers for url in server.urls]
        for kind in ("srflx", "relay"):
            asked = [url for url in urls if SERVER_CANDIDATES.get(url.partition(":")[0]) == kind]
            if asked and f" typ {kind}" not in sdp:
                log.warning("an ICE server gave no address", extra={"facts": {"url": asked[0], "candidate": kind}})

    # The connection of a session

    async def receive(self) -> str:
        """Return the next event of the client, sound included. Raises CancelledError after its end."""
        event = await self._events.get()
        if event is None:
            raise asyncio.CancelledError
        return event

    async def send(self, message: str) -> None:
        """Send an event on the data channel; sound of the model goes to the track."""
        await self._is_open.wait()
        try:
            async with asyncio.timeout(self._stall_s):
                await self._until_buffered(BUFFERED_BYTES)
        except TimeoutError:
            log.info("a client does not read its data channel", extra={"facts": {"seconds": self._stall_s}})
            self._events.put_nowait(None)
            return
        event = json.loads(message)
        match event["type"]:
            case kind if kind == SOUND:
                self._speak(event)
                return
            case "response.output_audio.done":
                self._voice.finish()
                self._start(self._play())
            case "input_audio_buffer.speech_started":
                self._emit(message)
                self._interrupt()
                return
            case "output_audio_buffer.cleared":
                if event["response_id"] in self._cut_ids:
                    return  # reported already
                self._cut()
        self._emit(message)

    async def close(self, reason: str, code: int = 1000) -> None:
        """End the call, after events that wait."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._until_buffered(0)
        await asyncio.sleep(0)
        self._events.put_nowait(None)
        for task in list(self._tasks):
            task.cancel()
        self._voice.stop()
        with suppress(ConnectionError, OSError):
            await self._peer.close()
        log.info("a call ended", extra={"facts": {"reason": reason, "code": code}})

    # Sound of the model

    def _speak(self, event: dict[str, Any]) -> None:
        form = self._settings().spoken
        samples = form.decode(pybase64.b64decode(event["delta"]), "audio")
        is_first = event["response_id"] != self._response_id
        self._response_id = event["response_id"]
        self._voice.push(event["item_id"], samples, form.rate)
        if is_first:
            self._emit_own("output_audio_buffer.started", self._response_id)

    async def _play(self) -> None:
        """Report the end of the response's sound, unless it is cut before."""
        response_id = self._response_id
        await self._voice.is_idle.wait()
        if response_id not in self._cut_ids:
            self._emit_own("output_audio_buffer.stopped", response_id)

    def _interrupt(self) -> None:
        """End the playback, and let the session cut the item there."""
        rules = self._settings().turns
        if rules is not None and rules.interrupts and self._cut():
            self._emit_own("output_audio_buffer.cleared", self._response_id)

    def _cut(self) -> bool:
        """End the playback. Returns whether there was any."""
        voice = self._voice
        if not voice.is_speaking:
            return False
        self._cut_ids.add(self._response_id)
        voice.clear()
        place = {"item_id": voice.item_id, "content_index": 0, "audio_end_ms": voice.played_ms}
        self._events.put_nowait(json.dumps({"type": "conversation.item.truncate", **place}))
        return True

    def _emit_own(self, kind: str, response_id: str) -> None:
        self._own += 1
        facts = {"event_id": f"event_call_{self._own}", "response_id": response_id}
        self._emit(json.dumps({"type": kind, **facts}))

    def _emit(self, message: str) -> None:
        channel = self._channel
        if channel is None or channel.readyState != "open":
            return
        try:
            channel.send(message)
        except ValueError as error:  # longer than the client's `max-message-size`
            self._own += 1
            kind = json.loads(message)["type"]
            said = {"type": "invalid_request_error", "code": "event_too_large", "message": f"{kind}: {error}"}
            channel.send(json.dumps({"type": "error", "event_id": f"event_call_{self._own}", "error": said}))

    async def _until_buffered(self, most: int) -> None:
        """Wait until at most so many bytes of events wait, or the data channel has closed."""
        channel = self._channel
        if channel is None:
            return
        channel.bufferedAmountLowThreshold = most
        while channel.bufferedAmount > most and channel.readyState == "open":
            self._has_room.clear()
            await self._has_room.wait()

    # Events of the peer connection

    def _opened(self, channel: RTCDataChannel) -> None:
        if channel.label != CHANNEL:
            return
        self._channel = channel
        channel.on("message", self._said)
        channel.on("close", lambda: self._events.put_nowait(None))
        channel.on("close", self._has_room.set)
        channel.on("bufferedamountlow", self._has_room.set)
        self._is_open.set()

    def _said(self, message: str) -> None:
        """Pass on an event. One that clears the playback also ends what a finished response left of it."""
        if "output_audio_buffer.clear" in message[:200] and self._cut():
            self._emit_own("output_audio_buffer.cleared", self._response_id)
        self._events.put_nowait(message)

    def _heard(self, track: Any) -> None:
        if track.kind == "audio":
            self._start(self._listen(track))

    async def _listen(self, track: Any) -> None:
        """Turn frames of the track into events of the wire, in the format that the session expects."""
        mono = AudioResampler(format="s16", layout="mono", rate=HEARD_RATE)
        form, resampler = self._settings().heard, PieceResampler(HEARD_RATE, self._settings().heard.rate)
        await self._is_open.wait()
        with suppress(MediaStreamError):
            while True:
                frame = await track.recv()
                now = self._settings().heard
                if now != form:
                    form, resampler = now, PieceResampler(HEARD_RATE, now.rate)
                for part in mono.resample(frame):
                    samples = resampler.push(part.to_ndarray().reshape(-1).astype(np.int16, copy=False))
                    if len(samples):
                        sound = pybase64.b64encode_as_string(form.encode(samples))
                        self._events.put_nowait(json.dumps({"type": "input_audio_buffer.append", "audio": sound}))

    def _changed(self) -> None:
        if self._peer.connectionState in GONE:
            self._events.put_nowait(None)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
