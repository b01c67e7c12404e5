"""dataplane.pydpdk on its own: packets through a net_ring port, one of them moved by a DMA engine.

    python examples/pydpdk_loopback.py

Needs no privileges, no huge pages and no hardware.
"""

from dataplane import pydpdk
from dataplane.pydpdk.ffi import ffi

FRAMES = [bytes([number]) * 60 for number in range(3)]


def main() -> None:
    with pydpdk.Eal.start(memory_mb=64, huge=False) as eal:
        print(eal.describe())
        pool = pydpdk.Mempool(eal, "packets", 255, room=2176)
        port = pydpdk.Port(eal, "net_ring0")
        port.configure()
        port.rx_queue(0, pool)
        port.start()
        # net_ring receives what is put on its ring.
        pydpdk.Ring.of(eal, "ETH_RXTX0_net_ring0").put([pydpdk.Mbuf(pool, frame) for frame in FRAMES])
        received = port.receive(pool)
        same = sum(mbuf.data == frame for mbuf, frame in zip(received, FRAMES, strict=True))
        print(f"{same} of {len(FRAMES)} packets came back; {port.facts.driver}, {pool.in_use} buffers in use")
        with pydpdk.DmaDevice(eal, "dma_skeleton0") as engine:
            source, target = ffi.new("char[]", received[0].data), ffi.new("char[]", 60)
            engine.copy(source, target, 60)
            engine.submit()
            while not engine.completed():
                pass
            print("moved by", engine.name, bytes(ffi.buffer(target)) == FRAMES[0])
    # Leaving the block closed engine, buffers, port and pool, in that order.


if __name__ == "__main__":
    main()
