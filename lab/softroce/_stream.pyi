import numpy as np
from numpy.typing import NDArray

class Stream:
    def __init__(
        self, socket: int, source: tuple[bytes, bytes], target: tuple[bytes, bytes], qpn: int, reply_qpn: int,
        mtu: int, *, big_endian_imm: bool = False,
    ) -> None: ...
    def send(self, data: bytes | NDArray[np.uint8], address: int, rkey: int) -> int: ...
