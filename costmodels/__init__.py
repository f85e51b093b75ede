"""Time and memory models of devices, links and operators; knows nothing of the search."""

from costmodels.hardware.device import (
    Device,
    DeviceError,
    Link,
    aliases,
    device_names,
    load_device,
    topology_names,
)

__all__ = [
    "Device",
    "DeviceError",
    "Link",
    "aliases",
    "device_names",
    "load_device",
    "topology_names",
]
