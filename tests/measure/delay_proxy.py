"""A proxy that is as far away as it is told to be: `python tests/measure/delay_proxy.py PORT MS`.

Passes bytes to a port of this machine and back, each way half the milliseconds late, and prints its own
port.
"""

from __future__ import annotations

import asyncio
import sys
import time


async def _late(source: asyncio.StreamReader, target: asyncio.StreamWriter, seconds: float) -> None:
    """Pass bytes on late, in order and at their distance: more are read while others are on their way."""
    on_their_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1 << 12)

    async def arrive() -> None:
        while True:
            due, data = await on_their_way.get()
            await asyncio.sleep(due - time.monotonic())
            if not data:
                break
            target.write(data)
            await target.drain()
        target.close()

    arriving = asyncio.create_task(arrive())
    try:
        while data := await source.read(1 << 16):
            await on_their_way.put((time.monotonic() + seconds, data))
    except ConnectionError:
        pass
    await on_their_way.put((time.monotonic() + seconds, b""))
    await arriving


async def _main(port: int, milliseconds: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        seconds = milliseconds / 2000
        await asyncio.gather(
            _late(reader, far_writer, seconds), _late(far_reader, writer, seconds), return_exceptions=True
        )

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
