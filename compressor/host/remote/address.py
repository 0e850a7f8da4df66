"""Read the address of a device: ``rpc://HOST:PORT/KEY``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compressor.errors import UsageError

SCHEME = "rpc://"


@dataclass(frozen=True)
class DeviceAddress:
    """Where a device, or a tracker that knows devices, listens.

    Attributes:
        host, port: of the device's server, or of TVM's tracker.
        key: the device's name there.
    """

    host: str
    port: int
    key: str

    @classmethod
    def parse(cls, text: str) -> DeviceAddress:
        """Read an address.

        Raises:
            UsageError: it is written otherwise.
        """
        found = re.fullmatch(r"rpc://(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):(\d{1,5})/([\w.-]{1,80})", text)
        if found is None or not 0 < int(found[2]) < 65536:
            raise UsageError(
                f"device {text!r:.100}: write it as rpc://HOST:PORT/KEY, such as rpc://raspberrypi.local:9090/pi5, as "
                "`compress device serve` was told there"
            )
        return cls(found[1].strip("[]"), int(found[2]), found[3])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}{host}:{self.port}/{self.key}"
