"""Which switch port a NIC is on, from `lldpctl -f json` (or json0) of its host.

    fill(topology, {"gpu0": neighbours(dump), ...}) -> Topology with ports for nics[] and node_nics[]

lldpctl does not say whose dump it is, so the caller names the host. The switch must be called in the topology as
it calls itself in LLDP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from switch_configs.errors import PlanError
from switch_configs.schema import Topology

__all__ = ["fill", "neighbours"]

Ports = dict[str, tuple[str, str]]  # interface -> (switch, port)


def neighbours(dump: Any, where: str = "LLDP dump") -> Ports:
    """Raises PlanError if this is not an lldpctl dump."""
    try:
        interfaces = dump["lldp"]
        entries: list[dict[str, Any]] = []
        for part in interfaces if isinstance(interfaces, list) else [interfaces]:
            some = part.get("interface", [])
            entries += some if isinstance(some, list) else [some]
        found = []
        for entry in entries:
            if "name" in entry and "port" in entry:  # json0: the same keys everywhere, all values in lists
                found.append((entry["name"], entry["chassis"][0]["name"][0]["value"], _port0(entry["port"][0])))
                continue
            for interface, body in entry.items():
                names = [name for name in body["chassis"] if isinstance(body["chassis"][name], dict) and name != "id"]
                if names:
                    found.append((interface, names[0], _port(body["port"])))
        out: Ports = {}
        for interface, switch, port in found:
            seen = (str(switch), port)
            if out.setdefault(str(interface), seen) != seen:
                raise PlanError(
                    f"{interface} has two neighbours, {out[interface][0]} and {switch}", where=where,
                    remedy="take what is not a switch port out of the dump, or write the port into the topology",
                )
        return out
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise PlanError(
            f"not what `lldpctl -f json` prints ({type(error).__name__}: {error})", where=where,
            remedy="run lldpctl -f json on the host",
        ) from None


def _port(port: dict[str, Any]) -> str:
    # a port id of type mac or local number is no name; the description then is
    kind, value = port["id"]["type"], port["id"]["value"]
    return str(value if kind in ("ifname", "ifalias") else port.get("descr", value))


def _port0(port: dict[str, Any]) -> str:
    kind, value = port["id"][0]["type"], port["id"][0]["value"]
    return str(value if kind in ("ifname", "ifalias") else port.get("descr", [{"value": value}])[0]["value"])


def fill(topology: Topology, dumps: Mapping[str, Ports]) -> Topology:
    """Raises PlanError naming the NIC that no dump shows, or the switch that the topology does not have."""
    data = topology.model_dump(exclude_unset=True)
    leaves = {leaf["name"]: leaf for leaf in data["leaves"]}

    def place(host: str, interface: str) -> tuple[dict[str, Any], str]:
        where = f"{host} {interface}"
        if host not in dumps:
            raise PlanError("no LLDP dump of this host was given", where=where, remedy=f"add --lldp {host}=FILE")
        if interface not in dumps[host]:
            raise PlanError("its LLDP dump shows no neighbour there", where=where,
                            remedy="is the link up, and does the switch send LLDP on it?")
        switch, port = dumps[host][interface]
        if switch not in leaves:
            raise PlanError(f"is on switch {switch}, which the topology does not have", where=where,
                            remedy="add it to leaves under the name it has in LLDP")
        return leaves[switch], port

    for nic in data.pop("nics", []):
        leaf, port = place(nic["host"], nic.pop("interface"))
        leaf.setdefault("ports", []).append({**nic, "port": port})
    for nic in data.pop("node_nics", []):
        leaf, port = place(nic["node"], nic.pop("interface"))
        leaf.setdefault("monitor_ports", []).append({**nic, "port": port})
    try:
        return Topology.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise PlanError(f"{field}: {first['msg']}", where="topology with the LLDP dumps",
                        remedy="compare the dumps with the topology") from None
