"""Bandwidths from the TOML file of a cluster, the one that `fastcomm isp` takes.

Of its keys dispatch needs three: `gpus_per_node`, `bw_intra` of a GPU, and `bw_node`, which the
GPUs of a node share.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from fastcomm.errors import ConfigError
from fastcomm.inputs import parsed_toml, text
from fastcomm.units import parse_bandwidth

_KEYS = ("gpus_per_node", "bw_intra", "bw_node")
_MOST_GPUS = 1 << 20  # of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a cluster file says of the links."""

    gpus_per_node: int
    inter_bytes_per_s: float  # of a GPU
    intra_bytes_per_s: float


def hardware(name: str, gpus_per_node: int) -> Hardware:
    """Read a file, or a cluster that is shipped; its nodes must have so many GPUs."""
    found = _parsed(_text(name), name)
    if found.gpus_per_node != gpus_per_node:
        raise ConfigError(
            f"{name}: gpus_per_node is {found.gpus_per_node}, that of the workload is "
            f"{gpus_per_node}"
        )
    return found


def _text(name: str) -> str:
    shipped = resources.files("fastcomm") / "cluster" / "data" / f"{name.lower()}.toml"
    if Path(name).exists():
        return text(Path(name))
    if "/" not in name and shipped.is_file():
        return shipped.read_text("utf-8")
    raise ConfigError(f"cluster {name!r}: neither a file nor a cluster that is shipped")


def _parsed(words: str, name: str) -> Hardware:
    said = parsed_toml(words, name)
    if missing := [key for key in _KEYS if key not in said]:
        raise ConfigError(f"{name}: no key {', '.join(missing)}")
    gpus = said["gpus_per_node"]
    if type(gpus) is not int or not 1 <= gpus <= _MOST_GPUS:
        raise ConfigError(
            f"{name}: gpus_per_node: found {str(gpus)[:40]}, wanted 1 to {_MOST_GPUS}"
        )
    try:
        node, intra = (parse_bandwidth(str(said[key])) for key in ("bw_node", "bw_intra"))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error
    return Hardware(gpus_per_node=gpus, inter_bytes_per_s=node / gpus, intra_bytes_per_s=intra)
